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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.metrics.kernels import KernelGrid, Modes, left_out_parts
from lightning_bnn.metrics.mmd import Estimate, MMDTable, Reduction
from lightning_bnn.metrics.reference import MMDReference, WeightSource, as_reference, as_source
from weightsym.params import Networks

__all__ = ["law_mmd", "mixture_mmd"]


class ModesTables(NamedTuple):
    """Tables of the law, the mixture, its floor, and of each mode alone.

    >>> from lightning_bnn.metrics.laws import modes_table
    >>> table = modes_table({"w": torch.eye(4)}, {"w": torch.eye(4) + 1}, [0, 0, 1, 1])
    >>> table.law.layers, table.law.left_out, table.single.reduce().shape
    (('w',), (0, 4), torch.Size([2]))
    """

    law: MMDTable
    mixture: MMDTable
    floor: MMDTable
    single: MMDTable


# ------------------------------------------------------------ functions
def modes_table(
    x: Networks | WeightSource | MMDReference,
    y: Networks | WeightSource,
    modes: Sequence[int] | Tensor | None,
    grid: KernelGrid | None = None,
    layers: Sequence[str] | None = None,
    **options: Any,
) -> ModesTables:
    """MMD^2 of laws and mixtures of every layer and kernel. The arguments are those of `law_mmd`.

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

    Modes must be independent runs. More of them make the error smaller, more draws of each hardly.

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
    tables = modes_table(x, y, modes, **options)
    return tables.mixture.estimate(reduction), tables.floor.estimate(reduction)
