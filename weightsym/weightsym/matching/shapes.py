"""Two networks of one architecture in one shape: what the smaller one lacks is zero."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from weightsym.forms.likeness import likeness
from weightsym.groups.placements import Placement
from weightsym.groups.symmetries import Symmetries
from weightsym.matching.difference import Network
from weightsym.networks.dicts import Computed

_BLOCK = re.compile(r"((?:.*?\.)??)(\d+)(\..*)")  # of the outermost list
_KINDS = ("linear", "permutations")


def in_one_shape(
    a: Network, b: Network, sym_a: Symmetries, sym_b: Symmetries
) -> tuple[Network, Network, Symmetries]:
    """Give both networks the shapes of the larger one, and zeros for all that only one has.

    Units without weights belong to no function, and neither do residual blocks. So the best match
    of both is that of the units of the smaller one to as many of the larger one. Of tables of
    tokens, positions and classes, the first rows are shared. Blocks of a list are matched in their
    order, by numbers that no symmetry changes (`likeness`).

    Args:
        a: one network.
        b: another one, with more or fewer units, layers, tokens or classes.
        sym_a: what `discover` returned for the first one.
        sym_b: what it returned for the second one.
    """
    size_a, size_b = (sum(shape.numel() for shape in s.shapes.values()) for s in (sym_a, sym_b))
    if size_a > size_b:
        b, a, sym_a = in_one_shape(b, a, sym_b, sym_a)
        return a, b, sym_a
    lists = _lists(sym_a, sym_b)
    names = {n: n for n in sym_b.shapes if n in sym_a.shapes} | _pairs(lists)
    if lists:
        numbers = [likeness(w, sym_b) for w in _embedded(a, b, sym_a, sym_b, names)]
        outside = {n: m for n, m in names.items() if not n.startswith(tuple(lists))}
        names = outside | _pairs(lists, numbers)
    return *_embedded(a, b, sym_a, sym_b, names), sym_b


def _embedded(
    a: Network, b: Network, sym_a: Symmetries, sym_b: Symmetries, names: Mapping[str, str]
) -> tuple[Network, Network]:
    """The smaller network among zeros, and the larger one with the same tokens and classes."""
    places = {n: [*_places(m, n, sym_a, sym_b)] for n, m in names.items()}

    def small(name: str) -> Tensor:
        if name not in names:
            return torch.zeros(sym_b.shapes[name])
        w = a[names[name]]
        for dim, (mine, theirs) in enumerate(places[name]):
            size = [*w.shape[:dim], sym_b.shapes[name][dim], *w.shape[dim + 1 :]]
            rows = w.index_select(dim, mine.to(w.device))
            w = w.new_zeros(size).index_copy_(dim, theirs.to(w.device), rows)
        return w

    def large(name: str) -> Tensor:
        w = b[name]
        for dim, (_, theirs) in enumerate(places.get(name, [])):
            if len(theirs) < w.shape[dim] and not _axes(sym_b, name, dim):
                shared = torch.zeros(w.shape[dim]).index_fill_(0, theirs, 1)
                w = w * shared.to(w).reshape(-1, *[1] * (w.ndim - dim - 1))
        return w

    every = list(sym_b.shapes)
    return Computed(every, small, b), Computed(every, large, b)


# ------------------------------------------------------------ widths
def _axes(sym: Symmetries, name: str, dim: int) -> list[int]:
    """The axes along a dimension of a tensor that units or channels lie on."""
    moved = [sym.placements_by_axis(kind) for kind in _KINDS]
    every = (a for a in sym.axes_of.get(name, ()) if sym.axes[a].dim == dim)
    return [a for a in every if any(a in table for table in moved)]


def _places(
    small: str, large: str, sym_a: Symmetries, sym_b: Symmetries
) -> Iterator[tuple[Tensor, Tensor]]:
    """By dimension of a tensor, the positions in the smaller and in the larger network."""
    shapes = sym_a.shapes[small], sym_b.shapes[large]
    for dim, (size, most) in enumerate(zip(*shapes, strict=True)):
        axes = _axes(sym_a, small, dim), _axes(sym_b, large, dim)
        free = size == most or not any(axes)
        where = torch.full((size,), -1)
        where[:most] = torch.arange(size)[:most] if free else -1
        pairs = (
            [] if free else [p for p in zip(*axes, strict=False) if sym_b.axes[p[1]].blocks == 1]
        )
        for (one, two), kind in itertools.product(pairs, _KINDS):
            both = [s.placements_by_axis(kind).get(k, ()) for s, k in ((sym_a, one), (sym_b, two))]
            for p, q in itertools.chain(_alike(both, False), _alike(both, True)):
                sizes = zip(p.positions.shape, q.positions.shape, strict=True)
                shared = tuple(slice(min(pair)) for pair in sizes)
                where[p.positions[shared].cpu()] = q.positions[shared].cpu()
        mine = (where >= 0).nonzero().flatten()
        if not free and len(mine) < size:
            raise ValueError(
                f"One network must have at least as many units as the other one everywhere, but "
                f"{large!r} has the shapes {tuple(shapes[0])} and {tuple(shapes[1])}."
            )
        yield mine, where[mine]


def _alike(
    both: Sequence[Sequence[tuple[int, Placement]]], heads: bool
) -> Iterator[tuple[Placement, Placement]]:
    """Pair placements of single units, or those of heads, of two networks, in their order."""
    mine, theirs = ([p for _, p in e if (p.positions.shape[1] > 1) == heads] for e in both)
    return zip(mine, theirs, strict=False)


# ------------------------------------------------------------ depths
Blocks = tuple[dict[int, list[str]], dict[int, list[str]]]
"""By number of a block, the ends of the names of its tensors, in both networks."""


def _lists(sym_a: Symmetries, sym_b: Symmetries) -> dict[str, Blocks]:
    """The lists of equal blocks of which the larger network has more, by the start of names."""
    alone = sorted(sym_a.shapes.keys() ^ sym_b.shapes.keys())
    starts = dict.fromkeys(m[1] for name in alone if (m := _BLOCK.fullmatch(name)))
    every = {start: (_blocks(start, sym_a), _blocks(start, sym_b)) for start in starts}
    lists = {
        start: (few, many)
        for start, (few, many) in every.items()
        if len(few) < len(many) and len({*map(frozenset, (*few.values(), *many.values()))}) == 1
    }
    for name in alone:
        if not name.startswith(tuple(lists)):
            raise ValueError(
                "The larger network may have more blocks of one kind, and nothing else: only one "
                f"has {name!r}."
            )
    return lists


def _blocks(start: str, sym: Symmetries) -> dict[int, list[str]]:
    blocks: dict[int, list[str]] = {}
    for match in map(_BLOCK.fullmatch, sym.shapes):
        if match and match[1] == start:
            blocks.setdefault(int(match[2]), []).append(match[3])
    return dict(sorted(blocks.items()))


def _pairs(
    lists: Mapping[str, Blocks], numbers: Sequence[Mapping[str, Tensor]] = ()
) -> dict[str, str]:
    """The name of each tensor of blocks in the smaller network, by that in the larger one.

    Args:
        lists: of blocks.
        numbers: of both networks, what no symmetry changes, with the first blocks paired.
    """
    names = dict[str, str]()
    for start, (few, many) in lists.items():
        columns, ends = list(range(len(few))), few[min(few)]
        if numbers:
            rows = [[_together(w, [f"{start}{j}{e}" for e in ends]) for j in many] for w in numbers]
            cosines = torch.stack(rows[0][: len(few)]) @ torch.stack(rows[1]).mT
            columns = increasing(cosines.numpy())
        chosen = zip(few, [list(many)[k] for k in columns], strict=True)
        names |= {f"{start}{j}{end}": f"{start}{i}{end}" for i, j in chosen for end in ends}
    return names


def _together(numbers: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """All numbers of a block as one row, those of each tensor of length one."""
    rows = [nn.functional.normalize(numbers[n].double(), dim=0) for n in names if n in numbers]
    return torch.cat([*rows, torch.zeros(1, dtype=torch.float64)])


def increasing(scores: NDArray[np.float64]) -> list[int]:
    """Columns of all rows, each after the one of the row before, with the largest sum of scores.

    Args:
        scores: with at least as many columns as rows.

    >>> increasing(np.array([[1, 0, 5], [9, 1, 1.0]]))
    [0, 1]
    """
    before, ends = np.zeros(scores.shape[1] + 1), list[NDArray[np.float64]]()
    for row in scores:
        ends.append(before[:-1] + row)
        before = np.concatenate([[-np.inf], np.maximum.accumulate(ends[-1])])
    columns = [scores.shape[1]]
    for sums in ends[::-1]:
        columns.append(int(sums[: columns[-1]].argmax()))
    return columns[:0:-1]


def longest_run(order: Tensor) -> int:
    """The largest number of units that are in increasing order.

    >>> longest_run(torch.tensor([0, 7, 1, 2, 6]))
    4
    """
    ends = list[int]()
    for unit in order.tolist():
        k = bisect_left(ends, unit)
        ends[k : k + 1] = [unit]
    return len(ends)
