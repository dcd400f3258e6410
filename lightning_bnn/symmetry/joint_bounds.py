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
and outputs have factor one; from there the bounds spread through the network, all of them valid.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.axis_actions import broadcastable
from lightning_bnn.symmetry.groups import LinearGroup, Symmetries
from lightning_bnn.symmetry.mass_problem import MassProblem, factor_index
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
        self.mass = problem.value(point.u)
        self.factors = problem.factors(point.u)
        self.up, self.down = (torch.full_like(point.u, torch.inf) for _ in range(2))
        ones = torch.ones_like(self.factors)
        self.grams = [self._grams(group, ones) for group in point.groups]
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
        self.down = torch.minimum(self.down, bound[:, n + 1 :])
        lowest = self._lowest()
        for k, group in enumerate(self.point.groups):
            mass = self.mass[:, None]
            least = (_least_eigenvalue(g, mass) for g in self._grams(group, lowest))
            self.spaces[k] = tuple(  # type: ignore[assignment]
                torch.minimum(old, _half_log(mass, new))
                for old, new in zip(self.spaces[k], least, strict=True)
            )

    def _lowest(self) -> Tensor:
        """The table of the least factors relative to the point, as matrices index it."""
        up, down = self.up.clone(), self.down.clone()
        for (larger, smaller), owner in zip(self.spaces, self.point.owners, strict=True):
            flat = owner.reshape(-1).to(up.device)
            up[:, flat] = larger.repeat_interleave(owner.shape[1], -1)
            down[:, flat] = smaller.repeat_interleave(owner.shape[1], -1)
        return torch.exp(-2 * torch.cat([down, up.new_zeros(len(up), 1), up], -1))

    def _grams(self, group: LinearGroup, lowest: Tensor) -> tuple[Tensor, Tensor]:
        """W diag(l) W^T of both sides of every space."""
        sym, members = self.point.sym, len(lowest)
        found = {
            e: lowest.new_zeros(members, group.spaces, group.size, group.size) for e in (1, -1)
        }
        for place in weight_places(sym, group):
            name = sym.axes[place.axis].tensor
            w = self.point.scaled[name]
            for axis in sym.placements_by_axis("scalings"):
                if sym.axes[axis].tensor == name and axis != place.axis:
                    index = factor_index(sym, axis).to(w.device)
                    w = w * broadcastable(lowest[:, index].sqrt(), sym.axes[axis], w, 1)
            rows = rows_at(w, sym, place)
            found[place.exponent] = found[place.exponent] + rows @ rows.mT
        return found[1], found[-1]


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
    total = torch.cat([problem.plus, f.new_zeros(len(f), 1), problem.minus], -1)
    for m in problem.matrices:
        rows = torch.matmul(m.squares, f[:, m.columns][..., None])[..., 0]
        columns = torch.matmul(m.squares.mT, f[:, m.rows][..., None])[..., 0]
        total = total.index_add(-1, m.rows.reshape(-1), rows.flatten(-2))
        total = total.index_add(-1, m.columns.reshape(-1), columns.flatten(-2))
    total[:, n] = 0
    return total
