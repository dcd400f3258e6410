"""Layers that keep statistics of their batches, which no average of networks keeps right."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["batch_norms"]


def batch_norms(model: nn.Module) -> list[Any]:
    """All batch norms of a network that track statistics.

    >>> norm = nn.BatchNorm1d(3)
    >>> batch_norms(nn.Sequential(nn.Linear(2, 3), norm)) == [norm]
    True
    """
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return [m for m in norms if m.track_running_stats]
