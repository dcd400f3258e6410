"""Products and inverses of permutations of all groups, those inside moving blocks as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weightsym.axis_actions import take_along_last
from weightsym.groups import Symmetries

__all__ = ["compose", "homes", "invert", "standing_at"]


def compose(first: Sequence[Tensor], second: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    r"""One element that does what ``first`` and then ``second`` do.

    .. math:: r(k) = p(q(k)) \quad \text{for } p \text{ and then } q

    Either may have a member dimension.

    >>> from torch import nn
    >>> from weightsym import compose, discover
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> compose([torch.tensor([1, 2, 0])], [torch.tensor([1, 0, 2])], sym)
    [tensor([2, 1, 0])]
    """
    return _by_member(_compose, sym, first, second)


def invert(permutations: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    r"""The element that undoes another one, with a member dimension if that has one.

    .. math:: p^{-1}(p(k)) = k

    >>> from torch import nn
    >>> from weightsym import compose, discover, invert, random_permutations
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> p = random_permutations(sym)
    >>> compose(p, invert(p, sym), sym)
    [tensor([0, 1, 2, 3, 4]), tensor([0, 1, 2, 3])]
    """
    return _by_member(_invert, sym, permutations)


def _by_member(
    act: Callable[..., list[Tensor]], sym: Symmetries, *elements: Sequence[Tensor]
) -> list[Tensor]:
    """The result for every member by itself, where blocks carry groups that differ by member."""
    members = next((len(p) for element in elements for p in element if p.ndim == 2), None)
    if members is None or not homes(sym):
        return act(sym, *elements)
    each = ([[p[m] if p.ndim == 2 else p for p in e] for e in elements] for m in range(members))
    every = [act(sym, *own) for own in each]
    return [torch.stack(rows) for rows in zip(*every, strict=True)]


def _compose(sym: Symmetries, first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    inside = homes(sym)
    result: list[Tensor] = list(first)
    for g, after in enumerate(second):
        standing = standing_at(g, first, sym, inside)
        result[standing] = take_along_last(first[standing], after)
    return result


def _invert(sym: Symmetries, permutations: Sequence[Tensor]) -> list[Tensor]:
    inside = homes(sym)
    return [
        permutations[standing_at(g, permutations, sym, inside)].argsort(-1)
        for g in range(len(permutations))
    ]


def homes(sym: Symmetries) -> dict[int, tuple[int, int, int]]:
    """Of every group inside a block: the group of blocks, its row there, the block."""
    return {
        member: (g, k, slot)
        for g, group in enumerate(sym.permutations)
        for k, row in enumerate(group.inner)
        for slot, member in enumerate(row)
    }


def standing_at(
    group: int,
    permutations: Sequence[Tensor],
    sym: Symmetries,
    inside: dict[int, tuple[int, int, int]],
) -> int:
    """The group whose units stand in the places of another one after blocks have moved.

    ``inside`` is what `homes` returns.
    """
    if group not in inside:
        return group
    home, row, slot = inside[group]
    blocks = standing_at(home, permutations, sym, inside)
    return sym.permutations[blocks].inner[row][int(permutations[blocks][slot])]
