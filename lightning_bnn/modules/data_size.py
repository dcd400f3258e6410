"""How many examples stand behind a train loader: the N that weighs data against the prior."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import IterableDataset, SequentialSampler, SubsetRandomSampler

__all__ = ["data_size"]


def data_size(loader: Any, batches: int | float | None = None) -> int:
    """Number of different examples that a loader gives, over all processes and epochs.

    Args:
        loader: what the trainer has for training.
        batches: how many batches of an epoch are used. A loader that shuffles gives other examples
            in every epoch, so this only matters for those that do not.
    """
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise ValueError(
            f"`num_data` cannot be read from {type(loader).__name__}, which has no data set with a "
            "length: pass the number of training examples to the module."
        )
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):
        return len(sampler)
    if isinstance(sampler, SequentialSampler) and batches is not None:
        size = getattr(loader, "batch_size", None)
        if size is not None and batches * size < len(dataset):
            return int(batches * size)
    return len(dataset)
