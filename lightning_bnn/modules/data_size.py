"""How many examples stand behind a train loader: the N that weighs data against the prior."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, SubsetRandomSampler

__all__ = ["data_size", "first_rows", "in_order"]


def data_size(loader: Any, batches: int | float | None = None) -> int:
    """Number of different examples that a loader gives, over all processes and epochs.

    Args:
        loader: what the trainer has for training.
        batches: how many batches of an epoch are used. A loader that shuffles gives other examples
            in every epoch, so this only matters for those that do not.
    """
    dataset = getattr(loader, "dataset", None)
    batched = isinstance(loader, DataLoader) and loader.batch_size is None
    batched = batched and loader.batch_sampler is None
    if batched or not isinstance(dataset, Sized):
        raise ValueError(
            f"`num_data` cannot be read from {type(loader).__name__}, which has no data set whose "
            "length counts examples: pass the number of training examples to the module."
        )
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):
        return len(sampler)
    if in_order(loader) and batches is not None:
        size = getattr(loader, "batch_size", None)
        if size is not None and batches * size < len(dataset):
            return int(batches * size)
    return len(dataset)


def in_order(loader: Any) -> bool:
    """Whether a loader gives the same batches in every epoch."""
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, SequentialSampler) or getattr(loader, "training", None) is False


def first_rows(loader: Any, rows: int) -> Any:
    """A small batch as a loader would make it, without starting it; None if that cannot be."""
    if hasattr(loader, "example"):
        return loader.example(rows)
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return None
    if getattr(loader, "batch_sampler", None) is None:  # its data set holds whole batches
        return loader.dataset[0]
    return loader.collate_fn([loader.dataset[k] for k in range(min(rows, len(dataset)))])
