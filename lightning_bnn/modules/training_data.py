"""The training batches, outside of training too: for statistics, curvatures and full gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset

from lightning_bnn.modules.data_size import in_order
from lightning_bnn.modules.judged_module import JudgedModule
from lightning_bnn.randomness import keyed_randomness

__all__ = ["Batch", "Rereadable", "training_batches", "training_source"]

Batch = tuple[tuple[Any, ...], Tensor]


def training_source(module: JudgedModule) -> Any:
    """The data of the trainer, else those of the last fit or that were named; None without any."""
    if module._trainer is not None:
        trainer: Any = module.trainer
        for source in (trainer.train_dataloader, trainer.datamodule):
            if source is not None:
                return source
    return module._train_data


def training_batches(module: JudgedModule, source: Any) -> Iterator[Batch]:
    """Inputs and targets of an epoch, on the device; every process sees the examples of all.

    Loaders of this package give them in order and without augmentation, see `TensorLoader.whole`.

    Args:
        module: says what is input and what is target.
        source: a train loader, or a datamodule.
    """
    loader, arrived = source, _moved_by(module)
    if hasattr(source, "train_dataloader"):
        source.setup("fit")
        loader, arrived = source.train_dataloader(), _moved_by(module, source)
    whole = getattr(loader, "whole", None)
    shared = whole is None and isinstance(getattr(loader, "sampler", None), DistributedSampler)
    with keyed_randomness(module.seed, "training batches", device=module.device):
        limit = _limit(module, loader)
        for batch in islice(loader if whole is None else whole(), limit):
            inputs, targets = module.inputs_and_targets(arrived(batch))
            inputs = module._cast(inputs)
            if shared:
                inputs = tuple(_gathered(module, x) for x in inputs)
                targets = _gathered(module, targets)
            yield inputs, targets


def _moved_by(module: JudgedModule, datamodule: Any = None) -> Callable[[Any], Any]:
    """How a batch gets to the device, and through the hooks of whom it comes from."""
    if datamodule is not None:

        def by_hand(batch: Any) -> Any:
            moved = move_data_to_device(batch, module.device)
            return datamodule.on_after_batch_transfer(moved, 0)

        return by_hand
    if module._trainer is None:
        return lambda batch: move_data_to_device(batch, module.device)
    return lambda batch: module.trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _limit(module: JudgedModule, loader: Any) -> int | None:
    """Batches of an epoch: of streams, of loaders whose other batches never come, of trials."""
    if module._trainer is None:
        return None
    trainer: Any = module.trainer
    if trainer.fast_dev_run:
        return int(trainer.fast_dev_run)
    batches = trainer.num_training_batches
    cut = in_order(loader) or isinstance(getattr(loader, "dataset", None), IterableDataset)
    return int(batches) if cut and math.isfinite(batches) and batches > 0 else None


def _gathered(module: JudgedModule, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    gathered = module.all_gather(value)
    assert isinstance(gathered, Tensor)
    return gathered.flatten(0, 1)


class Rereadable:
    """The training batches of a module, as often as they are asked for.

    Args:
        module: says what is input and what is target.
        source: a train loader, or a datamodule.
    """

    def __init__(self, module: JudgedModule, source: Any) -> None:
        self.module, self.source, self.count = module, source, 0

    def __iter__(self) -> Iterator[Batch]:
        """Inputs and targets; `count` becomes the number of examples."""
        count = 0
        for inputs, targets in training_batches(self.module, self.source):
            count += len(targets)
            yield inputs, targets
        self.count = count
        if count == 0:
            raise ValueError("The training data are empty: a stream can be read only once.")
