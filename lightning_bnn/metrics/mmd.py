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

from lightning_bnn.metrics.kernels import KernelGrid
from lightning_bnn.metrics.reference import MMDReference, as_reference
from lightning_bnn.metrics.sources import WeightSource
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.params import Params

__all__ = [
    "MMDTable",
    "Order",
    "Reduction",
    "mmd",
    "mmd_table",
    "reduced",
    "share_layers",
    "table_of",
]

Reduction = Literal["median", "mean", "max"]
Order = Literal["kernels-first", "layers-first"]


@dataclass(frozen=True)
class MMDTable:
    """MMD^2 of every layer and kernel, Laplace kernels first.

    >>> from lightning_bnn.metrics import mmd_table
    >>> table = mmd_table({"w": torch.eye(4)}, {"w": torch.eye(4) + 1})
    >>> table.values.shape, table.per_layer("max") == table.values.max()
    (torch.Size([1, 20]), tensor([True]))
    """

    layers: tuple[str, ...]
    sizes: Tensor
    values: Tensor

    def per_layer(self, reduction: Reduction = "median") -> Tensor:
        """MMD^2 of every layer, reduced over kernels."""
        return _reduced(self.values, reduction)

    def reduce(self, reduction: Reduction = "median", order: Order = "kernels-first") -> Tensor:
        """MMD^2 reduced over kernels and layers, in the order that `mmd` explains."""
        return reduced(self.values, self.sizes, reduction, order)

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
    r"""Unbiased MMD^2 between two posteriors over weights, given as stacks of networks.

    .. math::
        \frac{\sum_{i \ne j} k(x_i, x_j)}{m (m - 1)} + \frac{\sum_{i \ne j} k(y_i, y_j)}{n (n - 1)}
        - \frac{2}{m n} \sum_{i, j} k(x_i, y_j)

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
    return table_of(as_reference(x, grid, **options), y)


def table_of(
    reference: MMDReference, y: Params | WeightSource, layers: Sequence[str] | None = None
) -> MMDTable:
    """The same for a reference that remembers its distances.

    Args:
        reference: the one posterior.
        y: the other.
        layers: only these.
    """
    compared = list(reference.compare(y, layers))
    return MMDTable(
        tuple(layer.name for layer in compared),
        torch.tensor([layer.size for layer in compared]),
        torch.stack([layer.values.cpu() for layer in compared]),
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


def reduced(
    values: Tensor, sizes: Tensor, reduction: Reduction = "median", order: Order = "kernels-first"
) -> Tensor:
    """One number from tables of MMD^2, in the order that `mmd` explains.

    Args:
        values: ``(..., layers, kernels)``.
        sizes: weights of every layer.
        reduction: over kernels.
        order: which comes first.
    """
    check_choice("order", order, get_args(Order))
    weights = (sizes.double() / sizes.sum()).to(values.device)
    if order == "kernels-first":
        return (weights * _reduced(values, reduction)).sum(-1)
    return _reduced((weights[:, None] * values).sum(-2), reduction)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    check_choice("reduction", reduction, get_args(Reduction))
    if reduction == "median":
        return values.quantile(0.5, dim=-1)  # torch.median is the lower of the two in the middle
    return values.mean(-1) if reduction == "mean" else values.amax(-1)
