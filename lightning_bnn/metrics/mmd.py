"""MMD between two posteriors, over weights or functions, of their laws or mixtures.

All functions return the unbiased estimate of MMD^2. A layer is one tensor of weights. The table of
all layers and kernels is reduced over kernels and averaged over layers, weighted by their sizes.

A method that is run several times gives several modes, and each gives networks. There are two ways
to compare them. The *law* of the method is the distribution of its networks over runs and draws:
its estimate uses pairs of different modes only, and is unbiased for any number of modes and draws.
The *mixture* of the K given modes is another distribution. That of K single networks is K atoms:
even if they are drawn from the law of the reference, it lies a *floor* away from it, which falls as
1/K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.distances import distance_blocks
from lightning_bnn.metrics.kernels import KernelGrid, Modes, left_out_parts, mmd2_by_kernel
from lightning_bnn.metrics.remembered_mmd import (
    STACKS,
    MMDReference,
    WeightSource,
    as_reference,
    as_source,
    layers_that_differ,
)
from lightning_bnn.metrics.validation import check_choice, check_finite
from lightning_bnn.tables import text_table
from weightsym.params import Networks, key_of, stack

__all__ = ["MMD", "function_space_mmd", "law_mmd", "mixture_mmd", "mmd", "mmd_table"]

Reduction = Literal["median", "mean", "max"]


class Estimate(NamedTuple):
    """A number and its standard error, which is NaN if nothing can be left out."""

    value: Tensor
    error: Tensor


@dataclass(frozen=True)
class MMDTable:
    """MMD^2 of every layer and kernel, Laplace kernels first.

    Attributes:
        layers: their names.
        sizes: number of weights of each.
        values: ``(..., layers, kernels)``; with parts left out in turn, first the value for all
            modes, then those without a part of them, then without a part of the chains.
        left_out: numbers of left-out parts of the modes, and of the chains of the reference.

    >>> from lightning_bnn.metrics import mmd_table
    >>> table = mmd_table({"w": torch.eye(4)}, {"w": torch.eye(4) + 1})
    >>> table.values.shape, table.per_layer("max") == table.values.max()
    (torch.Size([1, 20]), tensor([True]))
    """

    layers: tuple[str, ...]
    sizes: Tensor
    values: Tensor
    left_out: tuple[int, int] = (0, 0)

    def per_layer(self, reduction: Reduction = "median") -> Tensor:
        """Return MMD^2 of every layer, reduced over kernels."""
        return _reduced(self.values, reduction)

    def reduce(self, reduction: Reduction = "median") -> Tensor:
        """Return MMD^2 reduced over kernels, and averaged over layers by size."""
        weights = (self.sizes.double() / self.sizes.sum()).to(self.values.device)
        return (weights * _reduced(self.values, reduction)).sum(-1)

    def estimate(self, reduction: Reduction = "median") -> Estimate:
        """Return the number with its jackknife error.

        Modes and chains are left out in turn, and both variances add up. Fewer than three modes, or
        than three chains (or networks) of the reference, have no error.
        """
        numbers = self.reduce(reduction).reshape(-1)
        whole, *left = numbers.split([1, *self.left_out])
        if not all(self.left_out):
            return Estimate(whole[0], whole.new_tensor(torch.nan))
        variances = torch.stack([jackknife_variance(values) for values in left])
        return Estimate(whole[0], variances.sum().sqrt())

    def __str__(self) -> str:
        reductions = get_args(Reduction)
        numbers = torch.stack([self.per_layer(r) for r in reductions], 1).tolist()
        numbers.append([self.reduce(r).item() for r in reductions])
        names, sizes = [*self.layers, "all"], [*self.sizes.tolist(), int(self.sizes.sum())]
        rows = [
            [name, str(size), *(f"{value:.3g}" for value in row)]
            for name, size, row in zip(names, sizes, numbers, strict=True)
        ]
        return text_table(["layer", "weights", *reductions], rows)


def jackknife_variance(left: Tensor) -> Tensor:
    r"""Return the jackknife variance of a number.

    .. math:: s^2 = \frac{K - 1}{K} \sum_k (\theta_{-k} - \bar\theta)^2

    Args:
        left: the numbers without each part.
    """
    return (len(left) - 1) / len(left) * (left - left.mean()).square().sum()


# ------------------------------------------------------------ over weights
def mmd(
    x: Networks | WeightSource | MMDReference,
    y: Networks | WeightSource,
    reduction: Reduction = "median",
    grid: KernelGrid | None = None,
    **options: Any,
) -> Tensor:
    r"""Unbiased MMD^2 between two posteriors over weights, given as stacks or lists of networks.

    .. math::
        \frac{\sum_{i \ne j} k(x_i, x_j)}{m (m - 1)} + \frac{\sum_{i \ne j} k(y_i, y_j)}{n (n - 1)}
        - \frac{2}{m n} \sum_{i, j} k(x_i, y_j)

    Args:
        x: the reference: a stack, a list of modules, a `WeightSource`, or an `MMDReference`, which
            remembers its own distances for the next comparison.
        y: the approximation.
        reduction: over the twenty kernels of each layer, before layers are averaged, as Laurent et
            al. (2024) do.
        grid: rule for bandwidths.
        **options: ``layers``, ``device``, ``memory``, ``progress`` of `MMDReference`.

    Returns:
        If both are samples of the same distribution, a number around zero (it may be negative);
        the largest of twenty such numbers (``"max"``) is above zero then, by as much as
        `MMDReference.noise_floor` says: 0.009 for 40 and 20 networks of six weights.

    >>> mmd({"w": torch.eye(3)}, {"w": torch.eye(3)[:2] + 1})
    tensor(0.2820, dtype=torch.float64)
    """
    return mmd_table(x, y, grid, **options).reduce(reduction)


def mmd_table(
    x: Networks | WeightSource | MMDReference,
    y: Networks | WeightSource,
    grid: KernelGrid | None = None,
    layers: Sequence[str] | None = None,
    **options: Any,
) -> MMDTable:
    """Compute MMD^2 of every layer and kernel, with the arguments of `mmd`.

    For two stacks, tensors that are equal in all networks of both are left out.

    >>> print(mmd_table({"w": torch.eye(3)}, {"w": torch.eye(3)[:2] + 1}))
    layer  weights  median   mean   max
    w            3   0.282  0.312  0.53
    all          3   0.282  0.312  0.53
    """
    if isinstance(x, STACKS) and isinstance(y, STACKS):
        x, y = stack(x), stack(y)
        layers = layers_that_differ(x, y) if layers is None else layers
    compared = list(as_reference(x, grid, layers, **options).compare(y, layers))
    return MMDTable(
        tuple(layer.name for layer in compared),
        torch.tensor([layer.size for layer in compared]),
        torch.stack([layer.values for layer in compared]).cpu(),
    )


def _reduced(values: Tensor, reduction: str) -> Tensor:
    check_choice("reduction", reduction, get_args(Reduction))
    if reduction == "median":
        return values.quantile(0.5, dim=-1)  # torch.median is the lower of the two in the middle
    return values.mean(-1) if reduction == "mean" else values.amax(-1)


# ------------------------------------------------------------ of several modes
class ModesTables(NamedTuple):
    """Tables of the law, the mixture, its floor, and of each mode alone.

    >>> from lightning_bnn.metrics.mmd import modes_table
    >>> table = modes_table({"w": torch.eye(4)}, {"w": torch.eye(4) + 1}, [0, 0, 1, 1])
    >>> table.law.layers, table.law.left_out, table.single.reduce().shape
    (('w',), (0, 4), torch.Size([2]))
    """

    law: MMDTable
    mixture: MMDTable
    floor: MMDTable
    single: MMDTable


def modes_table(
    x: Networks | WeightSource | MMDReference,
    y: Networks | WeightSource,
    modes: Sequence[int] | Tensor | None,
    grid: KernelGrid | None = None,
    layers: Sequence[str] | None = None,
    **options: Any,
) -> ModesTables:
    """Compute MMD^2 of laws and mixtures for every layer and kernel, as `law_mmd`.

    >>> table = modes_table({"w": torch.eye(4)}, {"w": torch.eye(4) + 1}, [0, 0, 1, 1])
    >>> table.law.values.shape, table.single.values.shape
    (torch.Size([5, 1, 20]), torch.Size([2, 1, 20]))
    """
    reference = as_reference(x, grid, layers, **options)
    grouped = Modes.of(modes, as_source(y).rows)
    compared = list(reference.compare_modes(y, grouped, layers))
    names = tuple(layer.name for layer in compared)
    sizes = torch.tensor([layer.size for layer in compared])
    columns = zip(*(layer.values for layer in compared), strict=True)
    left_out = left_out_parts(reference.chains, grouped)
    return ModesTables(
        *(MMDTable(names, sizes, torch.stack(v, 1).cpu(), left_out) for v in columns)
    )


def law_mmd(
    x: Networks | WeightSource | MMDReference,
    y: Networks | WeightSource,
    modes: Sequence[int] | Tensor | None,
    reduction: Reduction = "median",
    **options: Any,
) -> Estimate:
    r"""Unbiased MMD^2 between the reference and the law of a method, from pairs of different modes.

    .. math:: \mathbb{E}\, k(x, x') + \mathbb{E}_{a \neq b}\, k(y_a, y_b) - 2\, \mathbb{E}\, k(x, y)

    Modes must be independent runs. More modes reduce the error, more draws of each hardly do.

    Args:
        x: the reference: a stack, a `WeightSource`, or an `MMDReference`, which remembers its own
            distances. Pass ``chains`` if its networks are draws of chains.
        y: networks of the method.
        modes: the mode of every network of ``y``; None if each is a mode of its own.
        reduction: over the twenty kernels.
        **options: ``grid`` and those of `MMDReference`: ``chains``, ``layers``, ``device``, ...

    >>> x, y = {"w": torch.eye(4)}, {"w": torch.eye(4) + 1}
    >>> law_mmd(x, y, [0, 0, 1, 1])
    Estimate(value=tensor(0.4658, dtype=torch.float64), error=tensor(nan, dtype=torch.float64))
    """
    return modes_table(x, y, modes, **options).law.estimate(reduction)


def mixture_mmd(
    x: Networks | WeightSource | MMDReference,
    y: Networks | WeightSource,
    modes: Sequence[int] | Tensor | None,
    reduction: Reduction = "median",
    **options: Any,
) -> tuple[Estimate, Estimate]:
    r"""MMD^2 between the reference and the mixture of the given modes, and its floor.

    .. math:: \mathbb{E}\, k(x, x') + \mathbb{E}_{a, b}\, k(y_a, y_b)
        - 2\, \mathbb{E}\, k(x, y), \quad \text{floor} = \frac{1 - \mathbb{E}\, k(x, x')}{K}

    A mode of several networks counts as the density from which they are drawn, a mode of one
    network as an atom. The floor is the value for as many single networks of the reference's own
    law. The arguments are those of `law_mmd`.

    >>> x, y = {"w": torch.eye(4)}, {"w": torch.eye(4) + 1}
    >>> mixture, floor = mixture_mmd(x, y, None)
    >>> bool(mixture.value > floor.value)
    True
    """
    tables = modes_table(x, y, modes, **options)
    return tables.mixture.estimate(reduction), tables.floor.estimate(reduction)


# ------------------------------------------------------------ over functions
def function_space_mmd(
    x: Float[Tensor, " samples *shape"],
    y: Float[Tensor, " others *shape"],
    reduction: Reduction = "median",
    grid: KernelGrid | None = None,
) -> Float[Tensor, ""]:
    r"""Unbiased MMD^2 between two sets of networks, compared by their predictions.

    .. math:: \mathbb{E}\, k(x, x') + \mathbb{E}\, k(y, y') - 2\, \mathbb{E}\, k(x, y)

    Two posteriors that differ only by symmetries of the networks are equal in this space.

    Args:
        x: predictions of the reference's networks, ``(samples, batch, ...)``.
        y: predictions of the other networks for the same inputs; their number may differ.
        reduction: over the twenty kernels.
        grid: rule for bandwidths.

    >>> x, y = torch.eye(3)[:, None], torch.eye(3)[:2, None] / 2
    >>> function_space_mmd(x, y)
    tensor(-0.1430, dtype=torch.float64)
    """
    _check_predictions(x, y)
    if not x[0].numel():
        return torch.full((), torch.nan, dtype=torch.float64)
    dtype = torch.promote_types(x.dtype, y.dtype)
    x, y = (t.detach().to(x.device, dtype).flatten(1) for t in (x, y))
    blocks = distance_blocks([(x, y)], (len(x), len(y)))
    return _reduced(mmd2_by_kernel(blocks, grid or KernelGrid()).cpu(), reduction)


def _check_predictions(x: Tensor, y: Tensor) -> None:
    floating = x.is_floating_point() and y.is_floating_point()
    if not floating or x.ndim < 2 or y.ndim < 2 or x.shape[1:] != y.shape[1:]:
        raise ValueError(
            "`x` and `y` must be float predictions (samples, batch, ...) for the same inputs, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )
    if min(len(x), len(y)) < 2:
        raise ValueError(f"MMD needs at least 2 networks on each side, got {len(x)} and {len(y)}.")
    check_finite(x, "x")
    check_finite(y, "y")


# ------------------------------------------------------------ the metric
class MMD(ExactMetric):
    """Unbiased MMD^2 between two posteriors over weights, see `mmd`.

    One update compares two stacks, on any part of the layers; layers may come in several updates
    and from several processes. A layer that several processes have compared counts once.

    Args:
        reduction: over the twenty kernels.
        grid: rule for bandwidths.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> metric = MMD("mean")
    >>> metric.update({"w": torch.eye(3)}, {"w": torch.eye(3)[:2] + 1})
    >>> metric.compute()
    tensor(0.3119, dtype=torch.float64)
    """

    higher_is_better = False
    rows: list[Tensor]

    def __init__(
        self, reduction: Reduction = "median", grid: KernelGrid | None = None, **kwargs: Any
    ) -> None:
        super().__init__(grid, **kwargs)
        self.reduction = check_choice("reduction", reduction, get_args(Reduction))
        self.grid = grid or KernelGrid()
        self.add_list("rows")

    def update(
        self,
        x: Networks | WeightSource | MMDReference,
        y: Networks | WeightSource,
        layers: Sequence[str] | None = None,
    ) -> None:
        """Compare two stacks.

        Args:
            x: the reference; an `MMDReference` remembers its own distances, and has options for
                large stacks.
            y: the approximation.
            layers: names of the layers to compare, if several processes share the work.
        """
        table = mmd_table(x, y, self.grid, layers)
        keys = torch.tensor([key_of(name) >> 10 for name in table.layers])
        heads = torch.stack([keys, table.sizes], 1)
        self.rows.append(torch.cat([heads, table.values.double()], 1).flatten().to(self.device))

    def compute(self) -> Tensor:
        """Return MMD^2, or NaN before the first layer."""
        rows = collected(self.rows)
        if not len(rows):
            return self._nan("it has compared no layers")
        rows = _once(rows.reshape(-1, 2 + 2 * self.grid.n_bandwidths))
        return MMDTable((), rows[:, 1].long(), rows[:, 2:]).reduce(self.reduction)


def _once(rows: Tensor) -> Tensor:
    """Return the first row of every layer, on which all processes must agree."""
    first: dict[float, Tensor] = {}
    for row in rows:
        earlier = first.setdefault(float(row[0]), row)
        if not torch.allclose(earlier, row, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(
                "A layer has been compared twice with different weights: call `reset()` between "
                "comparisons."
            )
    return torch.stack(list(first.values()))
