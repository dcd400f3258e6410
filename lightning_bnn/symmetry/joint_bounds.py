r"""A lower bound of the least mass over scales and matrices together, at a point near it.

Let m be the mass at a point. Every other point of the orbit has the mass of :math:`\exp(X)` acting
on this one, up to rotations, with a symmetric matrix :math:`X_h` for every space and a log scale
:math:`x_i` for every unit. Along :math:`\exp(t X)` each squared weight, in the eigenbasis of X, is
multiplied by an exponential of t, so that the mass is convex in t, with the derivative

.. math:: 2 \sum_h \langle X_h, A_h A_h^T - B_h B_h^T \rangle + 2 \sum_i x_i (in_i - out_i)

at zero. A convex function lies above its tangent. With any bounds :math:`\|X_h\| \le L_h` and
:math:`|x_i| \le U_i` that hold wherever the mass is at most m, the least mass is at least

.. math:: m - 2 \sum_h L_h \|A_h A_h^T - B_h B_h^T\|_* - 2 \sum_i U_i |in_i - out_i|.

The bounds: no part of the mass is larger than m. If the factors at the other end of the weights of
unit i are known to be at least :math:`l_j`, then :math:`e^{2 x_i} \sum_j W_{ij}^2 l_j \le m`. For a
space, :math:`\|e^X N^{1/2}\|^2 \ge \|e^X\|^2 \lambda_{min}(N)` with :math:`N = W diag(l) W^T` gives
:math:`\log \|e^X\| \le \log(m / \lambda_{min}(N)) / 2`, and its other side bounds
:math:`e^{-X}`. A space at the other end has the factor :math:`\sigma_{min}^2` everywhere. Inputs
and outputs have factor one; from there the bounds spread through the network, all of them valid. A
sum of log scales that is bounded bounds each of them where the others cannot fall without end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.axis_actions import broadcastable
from lightning_bnn.symmetry.composites import factor_index, factor_tables
from lightning_bnn.symmetry.groups import LinearGroup, Symmetries
from lightning_bnn.symmetry.mass_problem import MassProblem
from lightning_bnn.symmetry.spaces import rows_at, weight_places

__all__ = ["JointPoint", "certified_gap"]

_PASSES = 50


class JointPoint(NamedTuple):
    """A point of the joint problem.

    Attributes:
        problem: the mass as a function of log scales.
        u: the log scales.
        alive: those that count; the others are held.
        scaled: the tensors that matrices act on, with the scales applied.
        groups: the groups of ``kind="general"``.
        owners: for each group the variables that its channels own, ``(spaces, size)``.
    """

    problem: MassProblem
    u: Tensor
    alive: Tensor
    scaled: Params
    sym: Symmetries
    groups: tuple[LinearGroup, ...]
    owners: tuple[Tensor, ...]


def certified_gap(point: JointPoint) -> Tensor:
    """Bound on how far the mass lies above its least value, for every member."""
    flow = point.problem.flow(point.u)
    moments = ((flow.inflow - flow.outflow) * point.alive).abs()
    radii = _Radii(point)
    gap = _product(torch.maximum(radii.up, radii.down), moments).sum(-1)
    for k in range(len(point.groups)):
        difference = radii.grams[k][0] - radii.grams[k][1]
        nuclear = torch.linalg.eigvalsh(difference).abs().sum(-1)
        gap = gap + _product(torch.maximum(*radii.spaces[k]), nuclear).sum(-1)
    return 2 * gap


def _product(bound: Tensor, moment: Tensor) -> Tensor:
    return torch.where(moment == 0, 0, bound * moment)


class _Radii:
    """Upper bounds of the logs of all factors and of their inverses, passed on until they rest."""

    def __init__(self, point: JointPoint) -> None:
        self.point, problem = point, point.problem
        self.composites, self.tables = problem.composites, factor_tables(point.sym)[1]
        self.mass = problem.value(point.u)
        self.factors = problem.factors(point.u)
        self.up, self.down = (torch.full_like(point.u, torch.inf) for _ in range(2))
        ones = torch.ones_like(self.factors)
        self.grams = [self._grams(k, ones) for k in range(len(point.groups))]
        self.spaces = [
            (torch.full_like(a[..., 0, 0], torch.inf), torch.full_like(a[..., 0, 0], torch.inf))
            for a, _ in self.grams
        ]
        for _ in range(_PASSES):
            before = self._total()
            self._tighten()
            after = self._total()
            same_infinite = bool((before.isinf() == after.isinf()).all())
            if same_infinite and not bool((after < 0.95 * before)[before.isfinite()].any()):
                break

    def _total(self) -> Tensor:
        sides = [t for pair in self.spaces for t in pair]
        return torch.cat([t.flatten(1) for t in (self.up, self.down, *sides)], -1)

    def _tighten(self) -> None:
        """One pass over all units, then one over all spaces."""
        n = self.point.problem.variables
        lowest = self._lowest()
        mass = _partner_mass(self.point.problem, self.factors * lowest) * self.factors
        bound = _half_log(self.mass[:, None], mass)
        self.up = torch.minimum(self.up, bound[:, :n])
        self.down = torch.minimum(self.down, bound[:, n + 1 : 2 * n + 1])
        if self.composites.count:
            self._tighten_composites(bound[:, 2 * n + 1 :])
        lowest = self._lowest()
        for k in range(len(self.point.groups)):
            mass = self.mass[:, None]
            least = (_least_eigenvalue(g, mass) for g in self._grams(k, lowest))
            self.spaces[k] = tuple(  # type: ignore[assignment]
                torch.minimum(old, _half_log(mass, new))
                for old, new in zip(self.spaces[k], least, strict=True)
            )

    def _tighten_composites(self, bound: Tensor) -> None:
        """What bounds a sum of log scales bounds each of them, if the others are bounded below."""
        factor, variable, power = self.composites.entries
        against = self._against(*self._reach())
        unknown = against.isinf()
        known = torch.where(unknown, 0, against)
        sums, missing = (_by_factor(t, factor, bound) for t in (known, unknown.to(bound)))
        rest = sums[:, factor] - known + bound[:, factor]
        rest = torch.where(missing[:, factor] - unknown.to(bound) > 0, torch.inf, rest)
        rest = (rest / power.abs()).clamp_min(0)
        for side, here in ((self.up, power > 0), (self.down, power < 0)):
            at = variable[here].expand(len(side), -1)
            side.scatter_reduce_(-1, at, rest[:, here], "amin")

    def _against(self, up: Tensor, down: Tensor) -> Tensor:
        """For every power of a composite, how far at most it can lower the sum."""
        _, variable, power = self.composites.entries
        return torch.where(power > 0, down[:, variable], up[:, variable]) * power.abs()

    def _reach(self) -> tuple[Tensor, Tensor]:
        """How far every log scale can grow and fall; those of spaces as far as their matrices."""
        up, down = self.up.clone(), self.down.clone()
        for (larger, smaller), owner in zip(self.spaces, self.point.owners, strict=True):
            flat = owner.reshape(-1).to(up.device)
            up[:, flat] = larger.repeat_interleave(owner.shape[1], -1)
            down[:, flat] = smaller.repeat_interleave(owner.shape[1], -1)
        return up, down

    def _lowest(self) -> Tensor:
        """The table of the least factors relative to the point, as matrices index it."""
        up, down = self._reach()
        parts = [down, up.new_zeros(len(up), 1), up]
        if self.composites.count:
            parts.append(
                _by_factor(
                    self._against(up, down), self.composites.factor, self.point.problem.others
                )
            )
        return torch.exp(-2 * torch.cat(parts, -1))

    def _beside(self, axis: int, owner: Tensor, lowest: Tensor) -> Tensor:
        """The least factors along an axis of a space without those of its own channels."""
        factor, variable, power = self.composites.entries
        n = self.point.problem.variables
        up, down = (-lowest[:, at].log() / 2 for at in (slice(n + 1, 2 * n + 1), slice(n)))
        against = self._against(up, down)
        own = torch.isin(variable, owner.to(variable.device))
        sums = _by_factor(torch.where(own, 0, against), factor, self.point.problem.others)
        index = self.tables[axis].to(lowest.device) - (2 * n + 1)
        return torch.where(index < 0, 1, torch.exp(-2 * sums[:, index.clamp_min(0)]))

    def _grams(self, k: int, lowest: Tensor) -> tuple[Tensor, Tensor]:
        """W diag(l) W^T of both sides of every space of a group."""
        sym, members, group = self.point.sym, len(lowest), self.point.groups[k]
        found = {
            e: lowest.new_zeros(members, group.spaces, group.size, group.size) for e in (1, -1)
        }
        for place in weight_places(sym, group):
            name = sym.axes[place.axis].tensor
            w = self.point.scaled[name]
            for axis in sym.placements_by_axis("scalings"):
                if sym.axes[axis].tensor != name or (axis == place.axis) > (axis in self.tables):
                    continue
                if axis == place.axis:
                    factor = self._beside(axis, self.point.owners[k], lowest)
                else:
                    factor = lowest[:, self._index(axis).to(w.device)]
                w = w * broadcastable(factor.sqrt(), sym.axes[axis], w, 1)
            rows = rows_at(w, sym, place)
            found[place.exponent] = found[place.exponent] + rows @ rows.mT
        return found[1], found[-1]

    def _index(self, axis: int) -> Tensor:
        return self.tables[axis] if axis in self.tables else factor_index(self.point.sym, axis)


def _by_factor(values: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """Values of all powers summed by the composite that they belong to."""
    return torch.zeros_like(like).index_add(-1, factor, values)


def _least_eigenvalue(gram: Tensor, mass: Tensor) -> Tensor:
    """Of the channels that are there: the rows of the others are zero, and count as fixed."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    gram = gram + torch.diag_embed(torch.where(diagonal == 0, mass[..., None], 0))
    values = torch.linalg.eigvalsh(gram)
    return (values[..., 0] - 1e-15 * gram.shape[-1] * values[..., -1]).clamp_min(0)


def _half_log(mass: Tensor, part: Tensor) -> Tensor:
    """Largest log of a factor whose square times a part of the mass is at most the mass."""
    bound = torch.where(part > 0, (mass / part).log() / 2, torch.inf)
    return bound.clamp_min(0)


def _partner_mass(problem: MassProblem, f: Tensor) -> Tensor:
    """For every factor the sum of what it multiplies, other factors included."""
    n = problem.variables
    total = torch.cat([problem.plus, f.new_zeros(len(f), 1), problem.minus, problem.others], -1)
    for m in problem.matrices:
        rows = torch.matmul(m.squares, f[:, m.columns][..., None])[..., 0]
        columns = torch.matmul(m.squares.mT, f[:, m.rows][..., None])[..., 0]
        total = total.index_add(-1, m.rows.reshape(-1), rows.flatten(-2))
        total = total.index_add(-1, m.columns.reshape(-1), columns.flatten(-2))
    total[:, n] = 0
    return total
