"""Parts of what moves as a product: joined, multiplied and summed, dimension by dimension.

A part is a tensor of labels with the dimensions of what it labels, of size 1 where it does not
change. An element moves as the product of its parts, so that a matrix has one part for its rows
and one for its columns, and a sum over products of weights ties part with part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.symmetry.rules.broadcasting import multiply_labels, unify
from lightning_bnn.symmetry.rules.constraints import Constraints, Kind
from lightning_bnn.symmetry.rules.labels import FROZEN, core, moving_dims
from lightning_bnn.symmetry.rules.reduction import reduce_channels
from lightning_bnn.symmetry.rules.statements import Limit

__all__ = ["aligned", "apart", "joined", "merged", "outer_product", "product", "total"]

_WITHIN = "all products of a row of channels with itself in one dimension are not followed"


def aligned(parts: Sequence[Tensor], ndim: int) -> list[Tensor]:
    """Parts with as many dimensions as broadcasting gives them."""
    return [p[(None,) * (ndim - p.ndim)] for p in parts]


def apart(system: Constraints, parts: Sequence[Tensor]) -> list[Tensor]:
    """Of dimensions that are flattened into one, such as those of a kernel, the first one moves."""
    kept: list[Tensor] = []
    for part in parts:
        dims = set(moving_dims(part))
        if any(dims & set(moving_dims(other)) for other in kept):
            system.freeze(part)
        else:
            kept.append(part)
    return kept


def outer_product(system: Constraints, parts: Sequence[Tensor], ndim: int) -> Tensor:
    """Labels of what moves as the product of several parts."""
    labels = torch.full((1,) * ndim, FROZEN)
    for part in sorted(parts, key=lambda p: len(moving_dims(p))):
        labels = core(multiply_labels(system, labels, part))
    return labels


def joined(
    system: Constraints, parts: Sequence[Tensor], reach: Sequence[Collection[int]]
) -> dict[frozenset[int], Tensor]:
    """Parts that reach along a common dimension as one: each pair of their channels is one there.

    Args:
        system: gets the pairs.
        parts: those of one tensor.
        reach: the dimensions of each of them, here or where it is moved to.
    """
    found: dict[frozenset[int], list[Tensor]] = {}
    for part, mine in zip(parts, reach, strict=True):
        meeting = [dims for dims in found if dims & set(mine)] or [frozenset(mine)]
        together = [p for dims in meeting for p in found.pop(dims, ())]
        _note_pairs_within(system, together, part)
        found[frozenset(mine).union(*meeting)] = [*together, part]
    return {
        dims: ps[0] if len(ps) == 1 else outer_product(system, ps, ps[0].ndim)
        for dims, ps in found.items()
    }


def _note_pairs_within(system: Constraints, together: Sequence[Tensor], part: Tensor) -> None:
    """Say so where channels meet those of their own row: that both move alike is not followed."""
    for other in together:
        common = np.intersect1d(core(other).numpy(), core(part).numpy())
        if (common > FROZEN).any():
            system.limits.append(Limit(common, None, _WITHIN))


def _matched(
    system: Constraints, parts: Sequence[Tensor], others: Sequence[Tensor], active: bool
) -> Iterator[tuple[frozenset[int], Tensor | None, Tensor | None]]:
    """Parts of two tensors along the same dimensions, once for each set of these.

    Those of an activation are joined where parts of the other reach across them.
    """
    reach = [[frozenset(moving_dims(p)) for p in ps] for ps in (parts, others)]
    if active:
        groups: list[frozenset[int]] = []
        for mine in dict.fromkeys(dims for side in reach for dims in side):
            meeting = [g for g in groups if g & mine]
            groups = [g for g in groups if not g & mine] + [mine.union(*meeting)]
        reach = [[next(g for g in groups if dims <= g) for dims in side] for side in reach]
    left, right = (
        joined(system, ps, side) for ps, side in zip((parts, others), reach, strict=True)
    )
    for dims in {**left, **right}:
        yield dims, left.get(dims), right.get(dims)


def merged(
    system: Constraints, parts: Sequence[Tensor], inverse: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Parts along the same dimensions as one: their product, divided by those of a denominator."""
    result: dict[tuple[int, ...], Tensor] = {}
    for part in parts:
        key = tuple(moving_dims(part))
        result[key] = multiply_labels(system, result[key], part) if key in result else part
    for part in inverse:
        key = tuple(moving_dims(part))
        above = result.get(key, torch.full((1,) * part.ndim, FROZEN))
        result[key] = multiply_labels(system, above, part, inverse=True)
    return [core(p) for p in result.values()]


def product(
    system: Constraints,
    parts: Sequence[Tensor],
    others: Sequence[Tensor],
    active: bool = False,
    inverse: bool = False,
    summed: Sequence[int] = (),
) -> list[Tensor]:
    """Parts of a product, element by element, or of a quotient.

    Products that are ``summed`` next stand for their sums, which matrices may leave as they are.
    """
    result = []
    for _, one, other in _matched(system, parts, others, active):
        if other is None or (one is None and not inverse):
            result.append(other if one is None else one)
            continue
        one = torch.full((1,) * other.ndim, FROZEN) if one is None else one
        part = core(multiply_labels(system, one, other, inverse, summed))
        meet = [d for d in summed if d in moving_dims(part)]
        result.append(reduce_channels(system, part, meet) if meet else part)
    return [core(p) for p in result if p is not None]


def total(
    system: Constraints, parts: Sequence[Tensor], others: Sequence[Tensor], active: bool = False
) -> list[Tensor]:
    """Parts of a sum: those along the same dimensions are tied, all others have no size."""
    pairs = list(_matched(system, parts, others, active))
    result = []
    for dims, *both in pairs:
        given = [p for p in both if p is not None]
        if len(given) < 2:
            crossing = any(dims & more for more, *_ in pairs if more != dims)
            kinds: tuple[Kind, ...] = ("scale", "sign")
            system.freeze(given[0], ("permutation", *kinds) if crossing else kinds)
        result.append(core(unify(system, *given)) if len(given) == 2 else given[0])
    return result
