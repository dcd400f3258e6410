"""Permutations and matrices together: what they do to networks, and which brings them closest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import permute_some
from lightning_bnn.symmetry.composition import compose, invert
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.channel_views import distance
from lightning_bnn.symmetry.matching.moving_spaces import SpaceMap
from lightning_bnn.symmetry.mixing import identity_mixings, mix_some

__all__ = ["FullElement", "as_the_first", "closest", "moved", "nothing", "together"]

FullElement = tuple[list[Tensor], list[Tensor]]
"""Permutations, which act first, and matrices."""


def nothing(sym: Symmetries) -> FullElement:
    """The element that leaves everything as it is."""
    return identity(sym), identity_mixings(sym)


def moved(params: Params, sym: Symmetries, element: FullElement) -> Params:
    """A network or a stack after permutations and matrices."""
    return mix_some(permute_some(params, sym, element[0]), sym, element[1])


def closest(
    elements: Iterable[FullElement], params: Params, reference: Params, sym: Symmetries
) -> FullElement:
    """The element that brings a network closest to a reference; the first of equal ones."""
    return min(elements, key=lambda e: float(distance(moved(params, sym, e), reference, sym)))


def together(elements: Sequence[FullElement]) -> FullElement:
    """The elements of several networks as one for their stack."""
    permutations, matrices = (
        [torch.stack(rows) for rows in zip(*parts, strict=True)]
        for parts in zip(*elements, strict=True)
    )
    return permutations, matrices


def as_the_first(elements: FullElement, sym: Symmetries) -> FullElement:
    r"""The elements of a stack after which the first network stands where it was given.

    .. math:: g_1^{-1} g_k = P_1^{-1} M_1^{-1} M_k P_k
    """
    permutations, matrices = elements
    back = invert([p[0] for p in permutations], sym)
    steps = [torch.linalg.inv(m[0]) @ m for m in matrices]
    return compose(permutations, back, sym), SpaceMap(sym).carried(steps, back)
