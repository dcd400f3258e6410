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
    """A metric with the same value on one process or many, in one batch or many.

    States are sums (float64, or int64 counts) or one-dimensional float64 lists; both synchronise
    exactly, also if a process has seen no data. In a ``MetricCollection`` metrics share states that
    have equal names and, after the first batch, equal values. A further state restricts this to
    metrics of one family with the same options.

    Args:
        *options: everything that affects an update.
        **kwargs: arguments of every ``torchmetrics.Metric``.
    """

    is_differentiable = False
    full_state_update = False
    family = ""
    """Name shared by classes with the same updates, by default that of the class."""

    def __init__(self, *options: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._dtype = torch.float64
        name = self.family or type(self).__name__
        letters = hashlib.blake2b(repr((name, options)).encode(), digest_size=8).digest()
        self.add_state("identity", torch.tensor(list(letters)), dist_reduce_fx="max")

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a state or a count without the search for modules, which takes longer."""
        if name in self.__dict__ and type(value) in (Tensor, int, type(None)):
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

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
        """Move states with a module to its device, but never to its precision.

        A process without data contributes an empty tensor of ``_dtype``, which therefore stays
        float64.
        """

        def moved(state: Tensor) -> Tensor:
            return state.to(where_precise(fn(torch.empty(0, device=state.device))).device)

        super()._apply(moved, exclude_state)
        self._dtype = torch.float64
        return self

    def _wrap_update(self, update: Callable[..., None]) -> Callable[..., None]:
        """Move predictions to the states, which stay on the CPU if a device has no float64."""

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
    """The mean over examples of a number or a tensor per example."""

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
        """Return the mean, or NaN without examples."""
        if self.count == 0:
            return self.total + self._nan("it has seen no examples")
        return self.total / self.count


class PredictionMean(ExampleMean):
    """The mean over examples of a number computed from predictions or their logits.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.
    """

    def __init__(self, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(from_logits, **kwargs)
        self.from_logits = from_logits


def collected(state: list[Tensor] | Tensor) -> Tensor:
    """Return a list state as one tensor, before or after synchronisation."""
    if isinstance(state, Tensor):
        return state
    return torch.cat(state) if state else torch.zeros(0, dtype=torch.float64)
