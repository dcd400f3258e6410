"""Small matrices that no symmetry of a network changes, by which thousands of networks compare.

Some axes of a network have an order of their own: pixels, tokens, classes. The weights between such
an axis and the units of a layer are a frame for these units, and a tensor that reads them carries
the frame on to the next layer. Products of the columns of a frame sum over units, so that neither
their order nor their signs matter, and rotations cancel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsym.groups.symmetries import Axis, Symmetries
from weightsym.groups.units import WRITES
from weightsym.networks.randomness import keyed_generator

_COLUMNS = 128
"""Of a frame, at most."""
_FEWEST = 8
"""Columns with products that tell anything."""
_TINY = 1e-30


def likeness(params: Mapping[str, Tensor], sym: Symmetries) -> dict[str, Tensor]:
    """Products of the columns of every frame, which all networks of one orbit have in common.

    Tensors are read one at a time. Norms with gains hold a stream fixed: fold those of the network
    first (`fold_norms`).

    Args:
        params: one network.
        sym: what `discover` returned.

    Returns:
        By the tensor that completes each frame, the products of all pairs of its columns.

    >>> from torch import nn
    >>> from weightsym import params as P
    >>> from weightsym import discover, likeness, permute, random_permutations
    >>> net = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 9))
    >>> sym, w = discover(net, torch.randn(8, 9)), P.of(net)
    >>> found = likeness(w, sym)
    >>> {name: tuple(products.shape) for name, products in found.items()}
    {'0.weight': (36,), '2.weight': (36,)}
    >>> again = likeness(permute(w, sym, random_permutations(sym)), sym)
    >>> torch.allclose(found["0.weight"], again["0.weight"], atol=1e-5)
    True
    """
    found: dict[str, Tensor] = {}
    for name, frame in _Frames(params, sym):
        products = _products(frame)
        pairs = torch.triu_indices(len(products), len(products), 1)
        found[name] = products[pairs[0], pairs[1]].float().cpu()
    return found


def kinship(shelf: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Correlations of what each network has beyond the mean of all others, for every pair.

    What networks of the same data have in common is in the mean. Below three networks nothing is.

    Args:
        shelf: of `likeness`, for every network.

    >>> g = torch.Generator().manual_seed(0)
    >>> one, *others = [{"w": torch.randn(500, generator=g)} for _ in range(6)]
    >>> child = {"w": one["w"] + 0.5 * torch.randn(500, generator=g)}
    >>> found = kinship([one, child, *others])
    >>> found[0, 1] > 0.8, found[0, 2:].abs().max() < 0.3
    (tensor(True), tensor(True))
    """
    count, total = len(shelf), torch.zeros(len(shelf), len(shelf), dtype=torch.float64)
    names = [name for name in shelf[0] if all(name in each for each in shelf)]
    for name in names:
        rows = torch.stack([each[name].double() for each in shelf])
        rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(_TINY)
        gram = rows @ rows.mT
        total += _correlations(gram, count)
    return total / max(len(names), 1)


def _correlations(gram: Tensor, count: int) -> Tensor:
    """Cosines of all pairs of rows less the mean of the others, from the products of all rows."""
    if count < 3:
        return gram
    sums, whole, own = gram.sum(1), gram.sum(), gram.diagonal()
    others = count - 2
    two = sums[:, None] + sums  # of rows i and j with all rows
    mean_square = (whole - 2 * two + own[:, None] + own + 2 * gram) / others**2
    with_mean = (
        sums[:, None] - own[:, None] - gram
    ) / others  # of row i with the mean without i, j
    product = gram - with_mean - with_mean.mT + mean_square
    squares = own[:, None] - 2 * with_mean + mean_square
    return product / (squares * squares.mT).clamp_min(_TINY).sqrt()


# ------------------------------------------------------------ frames
@dataclass(frozen=True, eq=False)
class Frame:
    """Numbers that say where the units of an axis stand among columns that nothing moves.

    Attributes:
        rows: ``(units, columns)``; of spaces ``(spaces, size, columns)``.
        writes: whether the units are written along the axis, not read.
        kind: of the matrices that mix the units, empty for none.
    """

    rows: Tensor
    writes: bool
    kind: str


Space = frozenset[tuple[str, int]]
"""All groups that move an axis."""
_KINDS = ("permutations", "linear", "scalings", "signs")


class _Frames:
    """Frames of all spaces that can be reached, each completed by one tensor."""

    def __init__(self, params: Mapping[str, Tensor], sym: Symmetries) -> None:
        self.params, self.sym = params, sym
        self.spaces = {a: self._space(a) for a in range(len(sym.axes))}
        self.shifted = {place.axis for group in sym.shifts for place in group.placements}

    def __iter__(self) -> Iterator[tuple[str, Frame]]:
        known: dict[Space, Frame] = {}
        left = [n for n in self.sym.axes_of if n in self.params and self._is_plain(n)]
        count = -1
        while len(left) != count:
            count = len(left)
            for name in list(left):
                made = self._frame(name, known)
                if made is None:
                    continue
                left.remove(name)
                space, frame = made
                if space not in known:
                    known[space] = frame
                yield name, frame

    def _space(self, a: int) -> Space | None:
        """The groups that move an axis, None if one of them moves a part of it."""
        axis, moving = self.sym.axes[a], []
        for kind in _KINDS:
            for k, place in self.sym.placements_by_axis(kind).get(a, ()):
                part = place.positions.unique().numel() < axis.length
                if axis.dim is None or axis.blocks > 1 or part:
                    return None
                moving.append((kind, k))
        turns = [self.sym.linear[k].kind for kind, k in moving if kind == "linear"]
        scaled = any(kind == "scalings" for kind, _ in moving)
        known = turns == ["general"] or (turns in (["orthogonal"], ["centred"]) and not scaled)
        return frozenset(moving) if known or not turns else None

    def _is_plain(self, name: str) -> bool:
        sym, dims = self.sym, [self.sym.axes[a].dim for a in self.sym.axes_of[name]]
        plain = len(sym.shapes[name]) > 1 and name not in sym.exchangeable_tensors
        return plain and name not in sym.aliases and len(set(dims)) == len(dims) <= 2

    def _frame(self, name: str, known: Mapping[Space, Frame]) -> tuple[Space, Frame] | None:
        """The frame of the one axis of a tensor that has none yet, or none."""
        axes = [a for a in self.sym.axes_of[name] if self.spaces[a] != frozenset()]
        if not axes or any(self.spaces[a] is None for a in axes):
            return None
        if len(axes) == 1:
            return self._framed(axes[0], self.params[name], None)
        for own, other in (axes, axes[::-1]):
            frame = known.get(self.spaces[other] or frozenset())
            if frame is not None and frame.writes != self._writes(other):
                return self._framed(own, self.params[name], (self.sym.axes[other], frame))
        return None

    def _writes(self, a: int) -> bool:
        return self.sym.axes[a].role in WRITES

    def _framed(
        self, a: int, weight: Tensor, read: tuple[Axis, Frame] | None
    ) -> tuple[Space, Frame] | None:
        """The weights at an axis, with what they read replaced by its frame."""
        axis, space = self.sym.axes[a], self.spaces[a] or frozenset()
        if axis.dim is None or self.shifted & {*self.sym.axes_of[axis.tensor]} - {a}:
            return None
        weight = weight.movedim(axis.dim, 0)
        if read is not None:
            dim = read[0].dim or 0
            weight = weight.movedim(dim if dim > axis.dim else dim + 1, -1)
            rows = weight.float() @ read[1].rows.flatten(0, -2).to(weight.device)
            rows = _some_columns(rows.flatten(1))
        else:
            rows = _some_columns(weight.flatten(1)).float()
        if rows.shape[1] < _FEWEST:
            return None
        kind = ""
        for k, place in self.sym.placements_by_axis("linear").get(a, ()):
            if place.positions.shape[-1] > 1:
                return None
            rows, kind = rows[place.positions[..., 0].to(rows.device)], self.sym.linear[k].kind
        return space, Frame(rows, self._writes(a), kind)


def _some_columns(rows: Tensor) -> Tensor:
    """Columns at random, the same ones for all networks."""
    count = rows.shape[1]
    if count <= _COLUMNS:
        return rows
    chosen = torch.randperm(count, generator=keyed_generator("likeness", count))[:_COLUMNS]
    return rows[:, chosen.sort().values.to(rows.device)]


def _products(frame: Frame) -> Tensor:
    """Products of all columns, with what symmetries leave free divided out."""
    rows = frame.rows.double()
    rows = rows - rows.mean(-1, keepdim=True)  # a shift of all units
    if frame.kind == "general":
        spans = torch.linalg.svd(rows, full_matrices=False)[2]
        return (spans.mT @ spans).sum(0)
    rows = rows.flatten(0, -2)
    if frame.kind == "centred":
        rows = rows - rows.mean(0)
    if not frame.kind:  # each unit may have a scale of its own
        rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(_TINY)
    return rows.mT @ rows
