"""MMD between posteriors of several modes: of their laws, and of their mixtures as they are.

A method that is run several times gives several modes, and each gives networks. What all of them
together are depends on the question. The *law* of the method is the distribution of its networks
over runs and draws: its estimate takes pairs of different modes only and is unbiased for any number
of modes and draws. The *mixture* of the K modes that are there is another distribution. That of K
single networks is K atoms: even if they are drawn from the law of the reference, it lies a *floor*
away from it, which falls as 1/K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_bnn.metrics.mmd import Order, Reduction, reduced
from lightning_bnn.metrics.modes import Modes, left_out_parts
from lightning_bnn.metrics.reference import MMDReference, as_reference
from lightning_bnn.metrics.sources import WeightSource, as_source
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.params import Params

__all__ = [
    "Estimate",
    "ModesTable",
    "Which",
    "jackknife_error",
    "jackknife_variance",
    "law_mmd",
    "mixture_mmd",
    "modes_table",
    "modes_table_of",
]

Which = Literal["law", "mixture", "floor"]


class Estimate(NamedTuple):
    """A number and its standard error; NaN where nothing can be left out.

    >>> from lightning_bnn.metrics import modes_table
    >>> networks = {"w": torch.randn(40, 3, generator=torch.Generator().manual_seed(0))}
    >>> parts = {"w": networks["w"][:20]}, {"w": networks["w"][20:]}
    >>> estimate = modes_table(*parts, modes=[k // 4 for k in range(20)]).estimate("law")
    >>> bool(estimate.value.abs() < 4 * estimate.error)  # both are draws of one law
    True
    """

    value: Tensor
    error: Tensor


@dataclass(frozen=True)
class ModesTable:
    """MMD^2 of laws and mixtures of every layer and kernel.

    Attributes:
        layers: their names.
        sizes: weights of each.
        law: ``(left out, layers, kernels)``: of all modes, then without each part of them, then
            without each part of the reference's chains.
        mixture: the same of the modes as they are.
        floor: what so many single networks of the reference's own law have as a mixture.
        single: every mode alone, ``(modes, layers, kernels)``.
        left_out: how many parts of the modes, and of the chains, are left out in turn.

    >>> from lightning_bnn.metrics import modes_table
    >>> table = modes_table({"w": torch.eye(4)}, {"w": torch.eye(4) + 1}, [0, 0, 1, 1])
    >>> table.layers, table.left_out, table.of_each_mode().shape
    (('w',), (0, 4), torch.Size([2]))
    """

    layers: tuple[str, ...]
    sizes: Tensor
    law: Tensor
    mixture: Tensor
    floor: Tensor
    single: Tensor
    left_out: tuple[int, int]

    def estimate(
        self, which: Which, reduction: Reduction = "median", order: Order = "kernels-first"
    ) -> Estimate:
        """One of the three numbers, with the error of the jackknife.

        Modes and chains are left out in turn, and both variances add up. Fewer than three modes, or
        than three chains (or networks) of the reference, have no error.

        Args:
            which: ``"law"``, ``"mixture"`` or ``"floor"``.
            reduction: over kernels.
            order: which comes first, kernels or layers.
        """
        check_choice("which", which, get_args(Which))
        numbers = reduced(getattr(self, which), self.sizes, reduction, order)
        whole, *left = numbers.split([1, *self.left_out])
        return Estimate(whole[0], jackknife_error(left, self.left_out))

    def of_each_mode(
        self, reduction: Reduction = "median", order: Order = "kernels-first"
    ) -> Tensor:
        """MMD^2 of every mode alone; that of a single network is of one atom."""
        return reduced(self.single, self.sizes, reduction, order)


def jackknife_variance(left: Tensor) -> Tensor:
    r"""Variance of a number out of those without each part of the data.

    .. math:: s^2 = \frac{K - 1}{K} \sum_k (\theta_{-k} - \bar\theta)^2

    Args:
        left: the number without each part.
    """
    return (len(left) - 1) / len(left) * (left - left.mean()).square().sum()


def jackknife_error(left: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Standard error out of numbers without some parts, whose variances add up.

    Args:
        left: numbers without each part of the modes, then of the chains.
        counts: how many parts there are; without some of both there is no error.
    """
    if not all(counts):
        return left[0].new_tensor(torch.nan)
    return torch.stack([jackknife_variance(values) for values in left]).sum().sqrt()


# ------------------------------------------------------------ functions
def modes_table(
    x: Params | WeightSource | MMDReference,
    y: Params | WeightSource,
    modes: Sequence[int] | Tensor | None,
    grid: Any = None,
    **options: Any,
) -> ModesTable:
    """MMD^2 of laws and mixtures of every layer and kernel; the arguments are those of `law_mmd`.

    >>> table = modes_table({"w": torch.eye(4)}, {"w": torch.eye(4) + 1}, [0, 0, 1, 1])
    >>> table.law.shape, table.single.shape
    (torch.Size([5, 1, 20]), torch.Size([2, 1, 20]))
    """
    return modes_table_of(as_reference(x, grid, **options), y, modes)


def modes_table_of(
    reference: MMDReference,
    y: Params | WeightSource,
    modes: Sequence[int] | Tensor | None,
    layers: Sequence[str] | None = None,
) -> ModesTable:
    """The same for a reference that remembers its distances.

    Args:
        reference: the one posterior.
        y: the other.
        modes: the mode of every network of ``y``; None if each is a mode of its own.
        layers: only these.
    """
    grouped = Modes.of(modes, as_source(y).rows)
    compared = list(reference.compare_modes(y, grouped, layers))
    columns = zip(*(layer.values for layer in compared), strict=True)
    law, mixture, floor, single = (torch.stack(values, 1).cpu() for values in columns)
    return ModesTable(
        tuple(layer.name for layer in compared),
        torch.tensor([layer.size for layer in compared]),
        law,
        mixture,
        floor,
        single,
        left_out_parts(reference.chains, grouped),
    )


def law_mmd(
    x: Params | WeightSource | MMDReference,
    y: Params | WeightSource,
    modes: Sequence[int] | Tensor | None,
    reduction: Reduction = "median",
    order: Order = "kernels-first",
    **options: Any,
) -> Estimate:
    r"""Unbiased MMD^2 between the reference and the law of a method, from pairs of different modes.

    .. math:: \mathbb{E}\, k(x, x') + \mathbb{E}_{a \neq b}\, k(y_a, y_b) - 2\, \mathbb{E}\, k(x, y)

    Modes must be independent runs. More of them make the error smaller, more draws of each hardly.

    Args:
        x: the reference: a stack, a `WeightSource`, or an `MMDReference`, which remembers its own
            distances. Pass ``chains`` if its networks are draws of chains.
        y: networks of the method.
        modes: the mode of every network of ``y``; None if each is a mode of its own.
        reduction: over the twenty kernels.
        order: ``"kernels-first"`` or ``"layers-first"``, as for `mmd`.
        **options: ``grid`` and those of `MMDReference`: ``chains``, ``layers``, ``device``, ...

    >>> x, y = {"w": torch.eye(4)}, {"w": torch.eye(4) + 1}
    >>> law_mmd(x, y, [0, 0, 1, 1])
    Estimate(value=tensor(0.4658, dtype=torch.float64), error=tensor(nan, dtype=torch.float64))
    """
    return modes_table(x, y, modes, **options).estimate("law", reduction, order)


def mixture_mmd(
    x: Params | WeightSource | MMDReference,
    y: Params | WeightSource,
    modes: Sequence[int] | Tensor | None,
    reduction: Reduction = "median",
    order: Order = "kernels-first",
    **options: Any,
) -> tuple[Estimate, Estimate]:
    r"""MMD^2 between the reference and the mixture of the modes as they are, and its floor.

    .. math:: \mathbb{E}\, k(x, x') + \mathbb{E}_{a, b}\, k(y_a, y_b)
        - 2\, \mathbb{E}\, k(x, y), \quad \text{floor} = \frac{1 - \mathbb{E}\, k(x, x')}{K}

    A mode of several networks counts as the density that they are drawn from, a mode of one network
    as an atom. The floor is what as many single networks of the reference's own law would have.
    The arguments are those of `law_mmd`.

    >>> x, y = {"w": torch.eye(4)}, {"w": torch.eye(4) + 1}
    >>> mixture, floor = mixture_mmd(x, y, None)
    >>> bool(mixture.value > floor.value)
    True
    """
    table = modes_table(x, y, modes, **options)
    mixture, floor = (table.estimate(w, reduction, order) for w in ("mixture", "floor"))
    return mixture, floor
