"""The training batches, outside of training too: for statistics, curvatures and full gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset

from lightning_bnn._compat import trainer_of
from lightning_bnn.methods import Batch
from lightning_bnn.modules.data_size import in_order
from lightning_bnn.modules.network_inputs import batch_for
from lightning_bnn.modules.part import Bayesian
from lightning_bnn.randomness import keyed_randomness

__all__ = ["TrainingData", "moved_by"]


class TrainingData:
    """The batches of an epoch, on the device, as often as they are asked for.

    Every process sees the examples of all. Loaders of this package give them in order and without
    augmentation, see `TensorLoader.whole`.

    Args:
        module: says what is input and what is target.
        source: a train loader, or a datamodule.
    """

    def __init__(self, module: Bayesian, source: Any) -> None:
        self.module, self.source = module, source

    def __iter__(self) -> Iterator[Batch]:
        """Inputs and targets, in the order of the loader."""
        module, source = self.module, self.source
        loader, move = source, moved_by(module)
        if hasattr(source, "train_dataloader"):
            source.setup("fit")
            loader, move = source.train_dataloader(), moved_by(module, source)
        whole = getattr(loader, "whole", None)
        shared = whole is None and isinstance(getattr(loader, "sampler", None), DistributedSampler)
        with keyed_randomness(module.seed, "training batches", device=module.device):
            batches = loader if whole is None else whole()
            for raw in islice(batches, _limit(module, loader)):
                batch = batch_for(module, move(raw))
                if shared:
                    inputs = tuple(_gathered(module, x) for x in batch.inputs)
                    batch = Batch(inputs, _gathered(module, batch.targets))
                yield batch


def moved_by(module: Bayesian, datamodule: Any = None) -> Callable[[Any], Any]:
    """How a batch gets to the device, and through the hooks of whom it comes from.

    Args:
        module: where batches go.
        datamodule: where they are from, if no trainer moves them.
    """
    if datamodule is not None:
        prepare = getattr(datamodule, "on_after_batch_transfer", lambda batch, _: batch)
        return lambda batch: prepare(move_data_to_device(batch, module.device), 0)
    trainer = trainer_of(module)
    if trainer is None:
        return lambda batch: move_data_to_device(batch, module.device)
    return lambda batch: trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _limit(module: Bayesian, loader: Any) -> int | None:
    """Batches of an epoch: of streams, of loaders whose other batches never come, of trials."""
    trainer = trainer_of(module)
    if trainer is None:
        return None
    if trainer.fast_dev_run:
        return int(trainer.fast_dev_run)
    batches = trainer.num_training_batches
    cut = in_order(loader) or isinstance(getattr(loader, "dataset", None), IterableDataset)
    return int(batches) if cut and math.isfinite(batches) and batches > 0 else None


def _gathered(module: Bayesian, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    gathered = module.all_gather(value)
    assert isinstance(gathered, Tensor)
    return gathered.flatten(0, 1)
