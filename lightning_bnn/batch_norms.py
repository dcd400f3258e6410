"""Layers that keep statistics of their batches, which no average of networks keeps right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["batch_norms", "estimating"]


def batch_norms(model: nn.Module) -> list[Any]:
    """All batch norms of a network that track statistics.

    >>> norm = nn.BatchNorm1d(3)
    >>> batch_norms(nn.Sequential(nn.Linear(2, 3), norm)) == [norm]
    True
    """
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [m for m in norms if m.track_running_stats]


@contextmanager
def estimating(norms: Sequence[Any]) -> Iterator[None]:
    """Within this context batch norms take the mean of what they see, all batches alike.

    Args:
        norms: what `batch_norms` has found, whose statistics were set to nothing.
    """
    before = [(m.momentum, m.training) for m in norms]
    try:
        for m in norms:
            m.momentum, m.training = None, True
        yield
    finally:
        for m, (momentum, training) in zip(norms, before, strict=True):
            m.momentum, m.training = momentum, training
