"""MMD between two posteriors over weights: layer by layer, twenty kernels, symmetries or not.

What is computed is the unbiased estimate of MMD^2. A layer is one tensor of weights; the table of
all layers and kernels is reduced over kernels and averaged over layers, weighted by their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, collected, digest
from lightning_bnn.metrics.kernels import KernelGrid
from lightning_bnn.metrics.reference import MMDReference, as_reference
from lightning_bnn.metrics.sources import WeightSource
from lightning_bnn.metrics.validation import option
from lightning_bnn.params import Params

__all__ = ["MMD", "MMDTable", "mmd", "mmd_table", "share_layers"]

Reduction = Literal["median", "mean", "max"]
Order = Literal["kernels-first", "layers-first"]
_END = 0
"""Ends a layer's name where names travel between processes as numbers."""


@dataclass(frozen=True)
class MMDTable:
    """MMD^2 of every layer and kernel, Laplace kernels first."""

    layers: tuple[str, ...]
    sizes: Tensor
    values: Tensor

    def per_layer(self, reduction: Reduction = "median") -> Tensor:
        """MMD^2 of every layer, reduced over kernels."""
        return _reduced(self.values, reduction)

    def reduce(self, reduction: Reduction = "median", order: Order = "kernels-first") -> Tensor:
        """MMD^2 reduced over kernels and layers, in the order that `mmd` explains."""
        option("order", order, get_args(Order))
        weights = self.sizes.double() / self.sizes.sum()
        if order == "kernels-first":
            return (weights * self.per_layer(reduction)).sum()
        return _reduced((weights[:, None] * self.values).sum(0), reduction)

    def __str__(self) -> str:
        reductions = get_args(Reduction)
        width = max([len("layer"), *map(len, self.layers)])
        names, sizes = [*self.layers, "all"], [*self.sizes.tolist(), int(self.sizes.sum())]
        numbers = torch.stack([self.per_layer(r) for r in reductions], 1).tolist()
        numbers.append([self.reduce(r).item() for r in reductions])
        head = f"{'layer':<{width}}" + "".join(f"{name:>12}" for name in ("weights", *reductions))
        rows = [
            f"{name:<{width}}{size:>12}" + "".join(f"{value:>12.3g}" for value in row)
            for name, size, row in zip(names, sizes, numbers, strict=True)
        ]
        return "\n".join([head, *rows])


# ------------------------------------------------------------ functions
def mmd(
    x: Params | WeightSource | MMDReference,
    y: Params | WeightSource,
    reduction: Reduction = "median",
    order: Order = "kernels-first",
    grid: KernelGrid | None = None,
    **options: Any,
) -> Tensor:
    """Unbiased MMD^2 between two posteriors over weights, given as stacks of networks.

    Args:
        x: the reference: a stack, a `WeightSource`, or an `MMDReference`, which remembers its own
            distances for the next comparison.
        y: the approximation.
        reduction: over the twenty kernels.
        order: ``"kernels-first"`` reduces within each layer and then averages over layers, as
            Laurent et al. (2024) do; ``"layers-first"`` averages the table over layers first. For
            the mean it makes no difference.
        grid: the rule for bandwidths.
        **options: ``layers``, ``device``, ``memory``, ``progress`` of `MMDReference`.

    Returns:
        If both are samples of the same distribution, a number around zero (it may be negative);
        the largest of twenty such numbers (``"max"``) is above zero then, by as much as
        `MMDReference.noise_floor` says: 0.009 for 40 and 20 networks of six weights.

    >>> mmd({"w": torch.eye(3)}, {"w": torch.eye(3)[:2] + 1})
    tensor(0.2820, dtype=torch.float64)
    """
    return mmd_table(x, y, grid, **options).reduce(reduction, order)


def mmd_table(
    x: Params | WeightSource | MMDReference,
    y: Params | WeightSource,
    grid: KernelGrid | None = None,
    **options: Any,
) -> MMDTable:
    """MMD^2 of every layer and kernel; the arguments are those of `mmd`.

    >>> print(mmd_table({"w": torch.eye(3)}, {"w": torch.eye(3)[:2] + 1}))
    layer     weights      median        mean         max
    w               3       0.282       0.312        0.53
    all             3       0.282       0.312        0.53
    """
    layers = list(as_reference(x, grid, **options).compare(y))
    return MMDTable(
        tuple(layer.name for layer in layers),
        torch.tensor([layer.size for layer in layers]),
        torch.stack([layer.values.cpu() for layer in layers]),
    )


def share_layers(sizes: dict[str, int], rank: int, world_size: int) -> list[str]:
    """The layers of one process when several share the work, balanced by size.

    >>> [share_layers({"a": 5, "b": 4, "c": 2}, rank, 2) for rank in range(2)]
    [['a'], ['b', 'c']]
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"`rank` must be in 0..{world_size - 1}, got {rank}.")
    shares: list[list[str]] = [[] for _ in range(world_size)]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        min(shares, key=lambda share: sum(sizes[n] for n in share)).append(name)
    return shares[rank]


def _reduced(values: Tensor, reduction: str) -> Tensor:
    option("reduction", reduction, get_args(Reduction))
    if reduction == "median":
        return values.quantile(0.5, dim=-1)  # torch.median is the lower of the two in the middle
    return values.mean(-1) if reduction == "mean" else values.amax(-1)


# ------------------------------------------------------------ class
class MMD(ExactMetric):
    """Unbiased MMD^2 between two posteriors over weights, see `mmd`.

    One update compares two stacks, on any part of the layers; layers may come in several updates
    and from several processes. A layer that several processes have compared counts once.

    Args:
        reduction: over the twenty kernels.
        order: ``"kernels-first"`` or ``"layers-first"``.
        grid: the rule for bandwidths.
        device: where distances are computed; by default where the weights are.
        memory: bytes that a chunk of features may take (an `MMDReference` has its own of both).
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
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.reduction = option("reduction", reduction, get_args(Reduction))
        self.order = option("order", order, get_args(Order))
        self.grid = grid or KernelGrid()
        self.options: dict[str, Any] = {"device": device, "memory": memory}
        self._stem = f"mmd_{digest(self.grid)}"
        for state in ("names", "size", "values"):
            self.add_list(f"{self._stem}_{state}")

    def update(
        self,
        x: Params | WeightSource | MMDReference,
        y: Params | WeightSource,
        layers: Sequence[str] | None = None,
    ) -> None:
        """Compare two stacks.

        Args:
            x: the reference; an `MMDReference` remembers its own distances.
            y: the approximation.
            layers: only these, for example those of `share_layers`.
        """
        options = {} if isinstance(x, MMDReference) else self.options
        for layer in as_reference(x, self.grid, **options).compare(y, layers):
            self._state("names").append(self._vector([*layer.name.encode(), _END]))
            self._state("size").append(self._vector([layer.size]))
            self._state("values").append(layer.values.to(self.device))

    def compute(self) -> Tensor:
        """MMD^2; NaN before the first layer."""
        if not len(collected(self._state("size"))):
            return self._nan("it has compared no layer")
        return self.table().reduce(self.reduction, self.order)

    def table(self) -> MMDTable:
        """MMD^2 of every layer and kernel that this process knows of."""
        letters = bytes(int(letter) for letter in collected(self._state("names")).tolist())
        names = letters.decode().split(chr(_END))[:-1]
        if not names:
            raise ValueError("No layer has been compared yet: call `update` first.")
        values = collected(self._state("values")).reshape(len(names), -1)
        first = _first_of_each(names, values)
        sizes = collected(self._state("size"))[first].long()
        return MMDTable(tuple(names[k] for k in first), sizes, values[first])

    def _state(self, name: str) -> Any:
        return getattr(self, f"{self._stem}_{name}")

    def _vector(self, values: Sequence[float | int]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)


def _first_of_each(names: Sequence[str], values: Tensor) -> list[int]:
    """Where every layer stands first; processes that have compared the same one must agree."""
    first: dict[str, int] = {}
    for k, name in enumerate(names):
        if not torch.allclose(values[first.setdefault(name, k)], values[k], rtol=1e-4, atol=1e-6):
            raise ValueError(
                f"Layer {name!r} has been compared twice with different weights: "
                "call `reset()` between comparisons."
            )
    return list(first.values())
