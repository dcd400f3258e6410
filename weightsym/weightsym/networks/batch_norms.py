"""Layers with batch statistics, which have to be recomputed for averaged networks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from weightsym.networks import dicts as P
from weightsym.networks.dicts import Params
from weightsym.networks.prediction import apply
from weightsym.networks.running import runs_at_once


def batch_norms(model: nn.Module) -> list[Any]:
    """List the batch norms of a network that track statistics.

    >>> norm = nn.BatchNorm1d(3)
    >>> batch_norms(nn.Sequential(nn.Linear(2, 3), norm)) == [norm]
    True
    """
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [m for m in norms if m.track_running_stats]


def has_statistics(model: nn.Module) -> bool:
    """Return whether a network has a layer that tracks statistics of its inputs."""
    return any(batch_norms(model))


@torch.no_grad()
def refreshed(
    model: nn.Module,
    networks: Params,
    inputs: Iterable[tuple[Any, ...]],
    chunk_size: int | None = None,
) -> Params:
    """Return a stack with statistics of its own activations, averaged over batches.

    One pass over the data for all networks. Dropout is off.

    Args:
        model: gives the computation.
        networks: a stack; it is not changed.
        inputs: of the training batches.
        chunk_size: networks that run at once.
    """
    runner = copy.deepcopy(model).eval()
    layers = batch_norms(runner)
    names = {name for name, t in P.of(model).items() if not P.is_weight(name, t)}
    stack = {name: t.clone() if name in names else t for name, t in networks.items()}
    at_once = P.stack_size(stack) if runs_at_once(model, chunk_size) else 1
    chunk = chunk_size or at_once
    for layer in layers:
        layer.train()
    for k, batch in enumerate(inputs):
        for layer in layers:
            layer.momentum = 1 / (k + 1)
        apply(runner, stack, *batch, chunk_size=chunk)
    return stack
