"""Matrices of channels: those that bring channels closest to others, beside permutations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from weightsym.forms.balanced_form import Balance, balance_spaces
from weightsym.groups.axis_maps import AxisMap
from weightsym.groups.element import Element
from weightsym.groups.elements import identity
from weightsym.groups.placements import LinearKind, complex_matrices
from weightsym.groups.symmetries import LinearGroup, PermutationGroup, Symmetries, without_groups
from weightsym.matching.channels import ChannelMoments
from weightsym.matching.plan import assign

_NOISE = 1e-13  # eigenvalues of moments below this share of the largest are rounding
_SHORTER = 4  # lengths of a step that are tried, each a third of the one before
_GAIN = 1e-9  # of the misfit: a step that takes less off it is the last one
_ORDERED = ("general", "orthogonal", "centred")


# ------------------------------------------------------------ nearest matrices
class Nearest(NamedTuple):
    """Matrices, and the inner product of channels that they reach."""

    matrices: Tensor
    similarity: Tensor


def procrustes(cross: Tensor) -> Nearest:
    r"""The rotation, or reflection, R with the largest :math:`\mathrm{tr}\, R^T M`.

    With :math:`M = B A^T` it brings the rows of A closest to those of B.

    Args:
        cross: matrices M, ``(..., size, size)``.
    """
    left, singular, right = torch.linalg.svd(cross)
    return Nearest(left @ right, singular.sum(-1))


def nearest(group: LinearGroup, moving: Tensor, goal: Tensor, cross: Tensor) -> Nearest:
    r"""The matrices of a group after which channels are closest to those of a reference.

    Rotations are those of Procrustes. Where sizes are free, both networks are balanced first
    (what enters a space is as large as what leaves it, :math:`A A^T = B B^T`), which leaves
    rotations free, and the matrix leads through the two balanced forms. Spaces that no matrix
    balances stay as they are.

    Args:
        group: says which matrices there are.
        moving: moments of the network, ``(2, ..., size, size)``; see `Moments`.
        goal: those of the reference.
        cross: those of the reference with the network.
    """
    if group.kind == "general":
        return _general(moving, goal, cross)
    if group.kind in ("complex", "unit complex"):
        return _complex(moving, goal, cross, group.kind == "complex")
    both = cross[0] + cross[1]
    basis = group.basis.to(both)
    rotation = procrustes(basis.mT @ both @ basis)
    projection = torch.eye(group.size).to(both) - basis @ basis.mT
    similarity = rotation.similarity + (both * projection).sum((-1, -2))
    return Nearest(group.lifted(rotation.matrices), similarity)


def _general(moving: Tensor, goal: Tensor, cross: Tensor) -> Nearest:
    mine, theirs = (balance_spaces(*map(_root, moment)) for moment in (moving, goal))
    turn = _between(mine, theirs, cross)
    rotation = procrustes(turn)
    matrices = theirs.inverse_transpose.mT @ rotation.matrices @ mine.forward
    usable = (mine.full & theirs.full)[..., None, None]
    unmoved = torch.eye(matrices.shape[-1]).to(matrices).expand_as(matrices)
    return Nearest(torch.where(usable, matrices, unmoved), rotation.similarity)


def _between(mine: Balance, theirs: Balance, cross: Tensor) -> Tensor:
    """Products of the channels of two networks in their balanced forms."""
    turn = theirs.forward @ cross[0] @ mine.forward.mT
    return turn + theirs.inverse_transpose @ cross[1] @ mine.inverse_transpose.mT


def least_squares(matrices: Tensor, moving: Tensor, cross: Tensor, steps: int = 20) -> Tensor:
    r"""Invertible matrices with the least distance of both sides together.

    .. math:: |B_1 - G A_1|^2 + |B_2 - G^{-T} A_2|^2

    Gauss-Newton on the group: a step :math:`e^X G` solves a Sylvester equation for X.

    Args:
        matrices: where to start, ``(spaces, size, size)``.
        moving: moments of the network, ``(2, spaces, size, size)``.
        cross: those of the reference with the network.
        steps: at most so many.
    """
    value = _misfit(matrices, moving, cross)
    for _ in range(steps):
        both = torch.stack([matrices, torch.linalg.inv(matrices).mT])
        a, b = both @ moving @ both.mT
        right = cross @ both.mT
        step = _sylvester(a, b, right[0] - a - (right[1] - b).mT)
        length = torch.linalg.matrix_norm(step)[:, None, None]
        before, start = value, matrices
        for k in range(_SHORTER):  # what is far away is approached in turns of one
            tried = torch.matrix_exp(step / length.clamp_min(1) / 3**k) @ start
            reached = _misfit(tried, moving, cross)
            better = reached < value
            matrices = torch.where(better[:, None, None], tried, matrices)
            value = torch.where(better, reached, value)
            if bool((value < before).all()):
                break
        if not bool((value < before - _GAIN * before.abs()).any()):
            break
    return matrices


def _misfit(matrices: Tensor, moving: Tensor, cross: Tensor) -> Tensor:
    both = torch.stack([matrices, torch.linalg.inv_ex(matrices).inverse.mT])
    value = (both * (both @ moving - 2 * cross)).sum((0, -2, -1))
    return torch.where(value.isfinite(), value, torch.inf)


def _sylvester(a: Tensor, b: Tensor, right: Tensor) -> Tensor:
    """The X with X A + B X equal to the right side, for positive semidefinite A and B."""
    (p, u), (q, v) = torch.linalg.eigh(a), torch.linalg.eigh(b)
    total = q[..., :, None] + p[..., None, :]
    least = 1e-12 * total.amax((-2, -1), keepdim=True)
    return v @ ((v.mT @ right @ u) / torch.maximum(total, least).clamp_min(1e-300)) @ u.mT


def _root(moment: Tensor) -> Tensor:
    """A square matrix A with A A^T equal to a moment."""
    values, vectors = torch.linalg.eigh(moment)
    values = torch.where(values > _NOISE * values[..., -1:], values, 0)
    return vectors * values.sqrt()[..., None, :]


def _complex(moving: Tensor, goal: Tensor, cross: Tensor, scaled: bool) -> Nearest:
    """One complex number for every pair of channels: its size balances, its phase fits."""
    size = torch.ones((), dtype=moving.dtype, device=moving.device)
    if scaled:
        trace = [m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (*goal, *moving)]
        ratio = trace[0] * trace[3] / (trace[1] * trace[2])
        size = torch.where((ratio > 0) & ratio.isfinite(), ratio, 1) ** 0.25
    wide = size[..., None, None]
    m = cross[0] * wide + cross[1] / wide
    x, y = m[..., 0, 0] + m[..., 1, 1], m[..., 1, 0] - m[..., 0, 1]
    length = torch.hypot(x, y)
    x, y = (torch.where(length > 0, v / length, o) for v, o in ((x, 1.0), (y, 0.0)))
    return Nearest(complex_matrices(x, y) * wide, length)


def all_pairs(group: LinearGroup, moments: ChannelMoments) -> Tensor:
    """Similarity of every space of the reference with every one of the network, best turned.

    It is a share of what the reference has with itself.
    """
    moving, goal = moments.moving[:, None], moments.goal[:, :, None]
    if group.kind == "general":
        mine, theirs = (balance_spaces(*map(_root, moment)) for moment in (moving, goal))
        values = torch.linalg.svdvals(_between(mine, theirs, moments.cross)).sum(-1)
        return values / (2 * theirs.singular.sum()).clamp_min(1e-300)
    own = nearest(group, moments.goal, moments.goal, moments.goal).similarity.sum()
    moving, goal = (moment.expand_as(moments.cross) for moment in (moving, goal))
    return nearest(group, moving, goal, moments.cross).similarity / own.clamp_min(1e-300)


# ------------------------------------------------------------ permutations of spaces
@dataclass(frozen=True, eq=False)
class SpaceMap:
    """The relations between permutations and matrices of one network.

    Attributes:
        sym: what `discover` returned.
        placed: groups of permutations that stay as they are.
    """

    sym: Symmetries
    placed: frozenset[int] = frozenset()

    @cached_property
    def blocks(self) -> dict[int, dict[int, Tensor]]:
        """The groups that move whole spaces, such as heads.

        By group of permutations and of matrices, the spaces of every unit ``(units, spaces)``.
        """
        result = {}
        for k, group in enumerate(self.sym.permutations):
            spaces = {j: _units(self.sym, group, g) for j, g in enumerate(self.sym.linear)}
            whole = {j: s for j, s in spaces.items() if s is not None}
            if whole:
                result[k] = whole
        return result

    @cached_property
    def contained(self) -> set[int]:
        """The groups whose permutations are matrices inside of spaces."""
        inside = [g for g in self.sym.linear if g.kind in _ORDERED]
        groups = enumerate(self.sym.permutations)
        return {k for k, group in groups if any(_contains(self.sym, g, group) for g in inside)}

    @cached_property
    def others(self) -> list[int]:
        """The groups that matrices do not replace: hidden units, and heads that share keys."""
        taken = self.contained | self.blocks.keys() | self.placed
        return [k for k in range(len(self.sym.permutations)) if k not in taken]

    @cached_property
    def tangled(self) -> bool:
        """True if other units lie inside of spaces: queries that share a head of keys."""
        inside = {p.axis for g in self.sym.linear for p in g.placements}
        return any(
            p.axis in inside for k in self.others for p in self.sym.permutations[k].placements
        )

    @cached_property
    def reduced(self) -> Symmetries:
        """The symmetries with these other permutations only."""
        return without_groups(self.sym, self.others)

    @cached_property
    def _first_owners(self) -> list[Tensor]:
        return [_owners(self.sym, group, group.placements[0].axis) for group in self.sym.linear]

    def nearest_orders(self, element: Element) -> list[Tensor]:
        """The permutations of an element; inside of spaces, those nearest to its matrices."""
        sym, nearest = self.sym, identity(self.sym)
        for k in self.contained:
            place = sym.permutations[k].placements[0]
            for j, _ in sym.placements_by_axis("linear")[place.axis]:
                owners = _owners(sym, sym.linear[j], place.axis)[place.positions[:, 0]]
                if bool((owners >= 0).all()) and sym.linear[j].kind in _ORDERED:
                    space, channels = element.matrices_of(j)[owners[0, 0]], owners[:, 1]
                    nearest[k] = assign(space[channels][:, channels].abs())
                    break
        step = element.without_shifts
        axes = {a: AxisMap(every.monomial) for a, every in step.axes.items()}
        plain = Element(sym, (replace(step, axes=axes),))
        return list((Element.of_values(sym, {"permutations": nearest}) @ plain).permutations)

    def orders(self, step: Element) -> list[Tensor]:
        """For every group of matrices, the space that a step brings to the place of each."""
        result = []
        for group, owners in zip(self.sym.linear, self._first_owners, strict=True):
            axis, positions = group.placements[0].axis, group.placements[0].positions[:, 0, 0]
            index = step.without_shifts.axes.get(axis, AxisMap()).monomial.index
            result.append(owners[positions if index is None else index.cpu()[positions], 0])
        return result


def _owners(sym: Symmetries, linear: LinearGroup, axis: int) -> Tensor:
    """Space and channel of every position on an axis, -1 where there is none."""
    owner = torch.full((sym.axes[axis].blocks * sym.axes[axis].size, 2), -1)
    for positions in (p.positions for p in linear.placements if p.axis == axis):
        numbers = torch.meshgrid(*(torch.arange(n) for n in positions.shape), indexing="ij")
        owner[positions] = torch.stack(numbers[:2], -1)
    return owner


def _units(sym: Symmetries, group: PermutationGroup, linear: LinearGroup) -> Tensor | None:
    """The spaces of every unit, if each unit consists of as many whole ones."""
    inside = {p.axis for p in linear.placements}
    for placement in (p for p in group.placements if p.axis in inside):
        owner = _owners(sym, linear, placement.axis)[:, 0]
        rows = [list(dict.fromkeys(row)) for row in owner[placement.positions].tolist()]
        rows = [[space for space in row if space >= 0] for row in rows]
        every = sorted(space for row in rows for space in row)
        if every == list(range(linear.spaces)) and len({len(row) for row in rows}) == 1:
            return torch.tensor(rows)
    return None


def _contains(sym: Symmetries, linear: LinearGroup, group: PermutationGroup) -> bool:
    """True if the units of a group are the channels of one space, wherever they are."""
    chosen, inside = set(), {p.axis for p in linear.placements}
    if any(p.axis not in inside for p in group.placements):
        return False
    for placement in group.placements:
        owners = _owners(sym, linear, placement.axis)[placement.positions]
        space, channels = owners[..., 0], owners[:, 0, 1]
        if bool(
            (owners < 0).any() | (owners != owners[:, :1]).any() | (space != space[0, 0]).any()
        ):
            return False
        chosen.add((int(space[0, 0]), *channels.tolist()))
    return len(chosen) == 1


def isometric(sym: Symmetries) -> Symmetries:
    """The symmetries that keep every distance: of matrices the rotations, without their sizes."""
    kinds: dict[LinearKind, LinearKind] = {"general": "orthogonal", "complex": "unit complex"}
    linear = [replace(group, kind=kinds.get(group.kind, group.kind)) for group in sym.linear]
    return replace(sym, linear=tuple(linear))
