"""Base classes of metrics: exact sums in float64, and NaN with one warning if empty."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities.prints import rank_zero_warn

from weightsym.params import has_float64, where_precise


class ExactMetric(Metric):
    """A metric that is the same number on one process and on many, in one batch and in many.

    States are sums (float64, or int64 counts) or one-dimensional float64 lists; both synchronise
    exactly, also when a process has seen no data. In a ``MetricCollection`` metrics share their
    states if these have the same names and, after the first batch, the same values. One more state
    allows this only to metrics of one family with the same options.

    Args:
        *options: all that changes what an update adds.
        **kwargs: what every ``torchmetrics.Metric`` takes.
    """

    is_differentiable = False
    full_state_update = False
    family = ""
    """The name that classes with the same updates have in common, by default that of the class."""

    def __init__(self, *options: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dtype = torch.float64
        name = self.family or type(self).__name__
        letters = hashlib.blake2b(repr((name, options)).encode(), digest_size=8).digest()
        self.add_state("identity", torch.tensor(list(letters)), dist_reduce_fx="max")

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

        def moved(state: Tensor) -> Tensor:
            return state.to(where_precise(fn(torch.empty(0, device=state.device))).device)

        super()._apply(moved, exclude_state)
        self._dtype = torch.float64
        return self

    def _wrap_update(self, update: Callable[..., None]) -> Callable[..., None]:
        """Take predictions to the states, which stay on the CPU where a device has no float64."""

        @functools.wraps(update)
        def measured(*args: Any, **kwargs: Any) -> None:
            values = (*args, *kwargs.values())
            if not all(isinstance(x, Tensor) and has_float64(x.device) for x in values):
                args, kwargs = tree_map_only(Tensor, where_precise, (args, kwargs))
            update(*args, **kwargs)

        return super()._wrap_update(measured)

    def _nan(self, reason: str) -> Tensor:
        if self.update_called:  # torchmetrics itself warns about a metric without any update
            rank_zero_warn(f"{type(self).__name__} is NaN: {reason}.", UserWarning)
        return torch.full((), torch.nan, dtype=torch.float64, device=self.device)


class ExampleMean(ExactMetric):
    """The mean over examples of one number, or of one tensor, per example."""

    total: Tensor
    count: Tensor

    def __init__(self, *options: Any, shape: tuple[int, ...] = (), **kwargs: Any) -> None:
        super().__init__(*options, **kwargs)
        self.add_sum("total", shape, torch.float64)
        self.add_sum("count", (), torch.int64)

    def add(self, values: Tensor) -> None:
        """Add one value per example, ``(batch, *shape)``."""
        self.add_total(values.sum(0, dtype=torch.float64), len(values))

    def add_total(self, total: Tensor, examples: int) -> None:
        """Add the sum over several examples."""
        self.total = self.total + total
        self.count = self.count + examples

    def compute(self) -> Tensor:
        """The mean, or NaN without examples."""
        if self.count == 0:
            return self.total + self._nan("it has seen no example")
        return self.total / self.count


class PredictionMean(ExampleMean):
    """The mean over examples of a number that predictions, or their logits, give.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.
    """

    def __init__(self, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(from_logits, **kwargs)
        self.from_logits = from_logits


def collected(state: list[Tensor] | Tensor) -> Tensor:
    """A list state as one tensor, before or after it was synchronised."""
    if isinstance(state, Tensor):
        return state
    return torch.cat(state) if state else torch.zeros(0, dtype=torch.float64)
