"""The training batches, outside of training too: for statistics, curvatures and full gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_bnn.modules.template_module import TemplateModule
from lightning_bnn.randomness import keyed_randomness

__all__ = ["Batch", "train_loader", "training_batches"]

Batch = tuple[tuple[Any, ...], Tensor]


def train_loader(module: TemplateModule) -> Any:
    """The train loader of the fit, else that of the datamodule; None if there is neither."""
    if module._trainer is None:
        return None
    trainer = module.trainer
    if trainer.train_dataloader is not None:
        return trainer.train_dataloader
    if trainer.datamodule is None:
        return None
    trainer.datamodule.setup("fit")
    return trainer.datamodule.train_dataloader()


def training_batches(module: TemplateModule, loader: Any) -> Iterator[Batch]:
    """Inputs and targets of an epoch, on the device; every process sees the examples of all.

    Loaders of this package give them in order and without augmentation, see `TensorLoader.whole`.

    Args:
        module: says what is input and what is target.
        loader: what trains.
    """
    whole = getattr(loader, "whole", None)
    source = loader if whole is None else whole()
    shared = whole is None and isinstance(getattr(loader, "sampler", None), DistributedSampler)
    with keyed_randomness(module.seed, "training batches", device=module.device):
        for batch in source:
            moved = module.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            inputs, targets = module.inputs_and_targets(moved)
            inputs = module._cast(inputs)
            if shared:
                inputs = tuple(_gathered(module, x) for x in inputs)
                targets = _gathered(module, targets)
            yield inputs, targets


def _gathered(module: TemplateModule, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.flatten(module.all_gather(value), 0, 1)
