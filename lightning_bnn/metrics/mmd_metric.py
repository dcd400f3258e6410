"""MMD between posteriors over weights as a metric, whose layers may come from many processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, collected, digest
from lightning_bnn.metrics.kernels import KernelGrid
from lightning_bnn.metrics.laws import Estimate, jackknife_error, modes_table_of
from lightning_bnn.metrics.mmd import MMDTable, Order, Reduction, reduced, table_of
from lightning_bnn.metrics.reference import MMDReference, as_reference
from lightning_bnn.metrics.sources import WeightSource
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.params import Params

__all__ = ["MMD"]

Kind = Literal["pooled", "law", "mixture"]
_END = 0
"""Ends a layer's name where names travel between processes as numbers."""


class MMD(ExactMetric):
    """Unbiased MMD^2 between two posteriors over weights, see `mmd`, `law_mmd` and `mixture_mmd`.

    One update compares two stacks, on any part of the layers; layers may come in several updates
    and from several processes. A layer that several processes have compared counts once.

    Args:
        reduction: over the twenty kernels.
        order: ``"kernels-first"`` or ``"layers-first"``.
        grid: the rule for bandwidths.
        device: where distances are computed; by default where the weights are.
        memory: bytes that a chunk of features may take (an `MMDReference` has its own of both).
        of: what is compared with the reference: all networks ``"pooled"``; the ``"law"`` of a
            method, of which ``modes`` are independent runs; the ``"mixture"`` of these modes.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> metric = MMD("mean")
    >>> metric.update({"w": torch.eye(3)}, {"w": torch.eye(3)[:2] + 1})
    >>> metric.compute()
    tensor(0.3119, dtype=torch.float64)
    """

    higher_is_better = False

    def __init__(
        self,
        reduction: Reduction = "median",
        order: Order = "kernels-first",
        grid: KernelGrid | None = None,
        device: str | torch.device | None = None,
        memory: int = 2**28,
        of: Kind = "pooled",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.reduction = check_choice("reduction", reduction, get_args(Reduction))
        self.order = check_choice("order", order, get_args(Order))
        self.of = check_choice("of", of, get_args(Kind))
        self.grid = grid or KernelGrid()
        self.options: dict[str, Any] = {"device": device, "memory": memory}
        self._stem = f"mmd_{digest(self.grid, self.of)}"
        for state in ("names", "size", "left_out", "values"):
            self.add_list(f"{self._stem}_{state}")

    def update(
        self,
        x: Params | WeightSource | MMDReference,
        y: Params | WeightSource,
        layers: Sequence[str] | None = None,
        modes: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Compare two stacks.

        Args:
            x: the reference; an `MMDReference` remembers its own distances, and knows its chains.
            y: the approximation.
            layers: only these, for example those of `share_layers`.
            modes: the mode of every network of ``y``; None if each is a mode of its own.
        """
        if self.of == "pooled" and modes is not None:
            raise ValueError("`modes` belong to a law or a mixture: pass `of='law'` to the metric.")
        options = {} if isinstance(x, MMDReference) else self.options
        reference = as_reference(x, self.grid, **options)
        if self.of == "pooled":
            table = table_of(reference, y, layers)
            values, left_out = table.values[None], (0, 0)
        else:
            of_modes = modes_table_of(reference, y, modes, layers)
            values, left_out = getattr(of_modes, self.of), of_modes.left_out
            table = MMDTable(of_modes.layers, of_modes.sizes, values[0])
        for k, name in enumerate(table.layers):
            self._state("names").append(self._vector([*name.encode(), _END]))
            self._state("size").append(self._vector([int(table.sizes[k])]))
            self._state("left_out").append(self._vector(left_out))
            self._state("values").append(values[:, k].flatten().to(self.device))

    def compute(self) -> Tensor:
        """MMD^2; NaN before the first layer."""
        return self._estimate().value

    def estimate(self) -> Estimate:
        """MMD^2 with the jackknife's error over modes and chains; pooled networks have none.

        As for `compute`, all processes must ask, and get that of all layers.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            return self._estimate()

    def _estimate(self) -> Estimate:
        if not len(collected(self._state("size"))):
            nothing = self._nan("it has compared no layer")
            return Estimate(nothing, nothing)
        _, sizes, values, left_out = self._layers()
        whole, *left = reduced(values, sizes, self.reduction, self.order).split([1, *left_out])
        return Estimate(whole[0], jackknife_error(left, left_out))

    def table(self) -> MMDTable:
        """MMD^2 of every layer and kernel that this process knows of."""
        names, sizes, values, _ = self._layers()
        return MMDTable(names, sizes, values[0])

    def _layers(self) -> tuple[tuple[str, ...], Tensor, Tensor, tuple[int, int]]:
        """Names, sizes, and what was computed, ``(left out, layers, kernels)``; each layer once."""
        letters = bytes(int(letter) for letter in collected(self._state("names")).tolist())
        names = letters.decode().split(chr(_END))[:-1]
        if not names:
            raise ValueError("No layer has been compared yet: call `update` first.")
        counts = collected(self._state("left_out")).reshape(-1, 2).long()
        if len(counts.unique(dim=0)) > 1:
            raise ValueError(
                "Layers have been compared by different modes: call `reset()` between comparisons."
            )
        of_modes, of_chains = counts[0].tolist()
        values = collected(self._state("values"))
        values = values.reshape(len(names), 1 + of_modes + of_chains, -1)
        first = _first_of_each(names, values)
        sizes = collected(self._state("size"))[first].long()
        return (
            tuple(names[k] for k in first),
            sizes,
            values[first].transpose(0, 1),
            (of_modes, of_chains),
        )

    def _state(self, name: str) -> Any:
        return getattr(self, f"{self._stem}_{name}")

    def _vector(self, values: Sequence[float | int]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)


def _first_of_each(names: Sequence[str], values: Tensor) -> list[int]:
    """Where every layer stands first; processes that have compared the same one must agree."""
    first: dict[str, int] = {}
    for k, name in enumerate(names):
        known = values[first.setdefault(name, k)]
        if not torch.allclose(known, values[k], rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"Layer {name!r} has been compared twice with different weights: "
                "call `reset()` between comparisons."
            )
    return list(first.values())
