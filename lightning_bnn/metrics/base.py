"""Base classes of metrics: exact sums in float64, and NaN with one warning if empty."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.prints import rank_zero_warn

__all__ = ["ExactMetric", "ExampleMean", "PredictionMean", "collected", "digest"]


class ExactMetric(Metric):
    """A metric that is the same number on one process and on many, in one batch and in many.

    States are sums (float64, or int64 counts) or one-dimensional float64 lists; both synchronise
    exactly, also when a process has seen no data.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dtype = torch.float64

    def add_sum(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Register a state that adds up over batches and processes."""
        self.add_state(name, default=torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")

    def add_list(self, name: str) -> None:
        """Register a state that collects one-dimensional float64 tensors."""
        self.add_state(name, default=[], dist_reduce_fx="cat")

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw one or several values, as every torchmetrics class does."""
        return self._plot(val, ax)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        """States follow a module to its device, never to its precision.

        A process without data contributes an empty tensor of ``_dtype``, hence that stays float64.
        """
        super()._apply(lambda t: t.to(fn(t.new_empty(0)).device), exclude_state)
        self._dtype = torch.float64
        return self

    def _nan(self, reason: str) -> Tensor:
        if self.update_called:  # torchmetrics itself warns about a metric without any update
            rank_zero_warn(f"{type(self).__name__} is NaN: {reason}.", UserWarning)
        return torch.full((), torch.nan, dtype=torch.float64, device=self.device)


class ExampleMean(ExactMetric):
    """The mean over examples of one number, or of one tensor, per example.

    The names of the states contain the class's name: inside a ``MetricCollection`` two different
    metrics whose first batches agree are never taken for one. A metric that weighs examples
    differently by an option adds that to the names as ``variant``.
    """

    def __init__(self, shape: tuple[int, ...] = (), variant: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        stem = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower() + variant
        self._sum, self._count = f"{stem}_sum", f"{stem}_count"
        self.add_sum(self._sum, shape, torch.float64)
        self.add_sum(self._count, (), torch.int64)

    def add(self, values: Tensor) -> None:
        """Add one value per example, ``(batch, *shape)``."""
        self.add_total(values.sum(0, dtype=torch.float64), len(values))

    def add_total(self, total: Tensor, examples: int) -> None:
        """Add the sum over several examples."""
        setattr(self, self._sum, getattr(self, self._sum) + total)
        setattr(self, self._count, getattr(self, self._count) + examples)

    def compute(self) -> Tensor:
        """The mean, or NaN without examples."""
        total, count = getattr(self, self._sum), getattr(self, self._count)
        if count == 0:
            return total + self._nan("it has seen no example")
        return total / count


class PredictionMean(ExampleMean):
    """The mean over examples of a number that predictions, or their logits, give.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.
    """

    def __init__(self, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.from_logits = from_logits


def collected(state: list[Tensor] | Tensor) -> Tensor:
    """A list state as one tensor, before or after it was synchronised."""
    if isinstance(state, Tensor):
        return state
    return torch.cat(state) if state else torch.zeros(0, dtype=torch.float64)


def digest(*options: Any) -> str:
    """A short name for options that change what an update adds.

    ``MetricCollection`` lets metrics share their states if those have the same names and, after the
    first batch, the same values; metrics of different options must not.
    """
    return hashlib.sha256(repr(options).encode()).hexdigest()[:8]
