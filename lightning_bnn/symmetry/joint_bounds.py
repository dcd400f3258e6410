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

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.groups import LinearGroup, Symmetries
from lightning_bnn.symmetry.mass_problem import Posynomial, plan
from lightning_bnn.symmetry.spaces import covered, weight_places
from lightning_bnn.symmetry.units import unit_rows

__all__ = ["certified_gap"]

_PASSES = 50


def certified_gap(problem: Posynomial, weights: Params, sym: Symmetries) -> Tensor:
    """Bound on how far the mass lies above its least value, for every member.

    Args:
        problem: the mass as a function of the log scales that are free, at zero.
        weights: the tensors that matrices act on, as a stack.
        sym: what `discover` returned.
    """
    radii = _Radii(problem, weights, sym)
    widest = torch.maximum(radii.up, radii.down)
    gap = _product(widest, (problem.inflow - problem.outflow).abs())
    for group, owner in radii.spaces:
        a, b = radii.grams(group, owner, torch.zeros_like(widest), torch.zeros_like(widest))
        nuclear = torch.linalg.eigvalsh(a - b).abs().sum(-1)
        gap = gap + _product(widest[:, owner[:, 0]], nuclear)
    return 2 * gap


def _product(bound: Tensor, moment: Tensor) -> Tensor:
    return torch.where(moment == 0, 0, bound * moment).sum(-1)


class _Radii:
    """Bounds of how far the log scales of units, and of the channels of spaces, grow and fall."""

    def __init__(self, problem: Posynomial, weights: Params, sym: Symmetries) -> None:
        self.problem, self.weights, self.sym = problem, weights, sym
        general = [g for g in sym.linear if g.kind == "general"]
        self.spaces = [(g, _owners(sym, g).to(problem.single.device)) for g in general]
        assert problem.free is not None
        self.free = problem.free
        moving = torch.cat(
            [self.free.nonzero()[:, 0], *(owner.reshape(-1) for _, owner in self.spaces)]
        )
        self.up = torch.zeros_like(problem.inflow)
        self.up[:, moving] = torch.inf
        self.down = self.up.clone()
        for _ in range(_PASSES):
            before = torch.cat([self.up, self.down], -1)
            self._tighten()
            after = torch.cat([self.up, self.down], -1)
            if not bool((after < 0.95 * before).any()):
                break

    def _tighten(self) -> None:
        """One pass over all units, then one over all spaces."""
        n, mass, free = self.problem.variables, self.problem.value[:, None], self.free
        lowest = self._falls(self.up, self.down)
        bound = _half_log(mass, self.problem.beside((-2 * lowest).exp()))
        self.up = torch.where(free, self.up.minimum(bound[:, :n]), self.up)
        self.down = torch.where(free, self.down.minimum(bound[:, n + 1 : 2 * n + 1]), self.down)
        if len(self.problem.powers):
            self._tighten_products(bound[:, 2 * n + 1 :])
        for group, owner in self.spaces:
            for side, gram in zip(
                (self.up, self.down), self.grams(group, owner, self.up, self.down), strict=True
            ):
                larger = _half_log(mass, _least_eigenvalue(gram, mass))[..., None]
                side[:, owner] = side[:, owner].minimum(larger)

    def _against(self, up: Tensor, down: Tensor) -> Tensor:
        """For every power in a product, how far at most it can lower it."""
        _, variable = self.problem.powers.indices()
        power = self.problem.powers.values()
        return torch.where(power > 0, down[:, variable], up[:, variable]) * power.abs()

    def _falls(self, up: Tensor, down: Tensor) -> Tensor:
        """The largest fall of every log factor."""
        products = self._by_product(self._against(up, down))
        return torch.cat([down, up.new_zeros(len(up), 1), up, products], -1)

    def _by_product(self, values: Tensor) -> Tensor:
        zero = values.new_zeros(len(values), len(self.problem.powers))
        return zero.index_add(1, self.problem.powers.indices()[0], values)

    def _tighten_products(self, bound: Tensor) -> None:
        """Bound each log scale of a sum that is bounded, if the others are bounded below."""
        factor, variable = self.problem.powers.indices()
        power, against = self.problem.powers.values(), self._against(self.up, self.down)
        unknown = against.isinf()
        known = torch.where(unknown, 0, against)
        missing = self._by_product(unknown.to(bound))[:, factor] - unknown.to(bound)
        rest = (bound + self._by_product(known))[:, factor] - known
        rest = torch.where(missing > 0, torch.inf, rest / power.abs()).clamp_min(0)
        for side, here in ((self.up, power > 0), (self.down, power < 0)):
            here = here & self.free[variable]
            at = variable[here].expand(len(side), -1)
            side.scatter_reduce_(-1, at, rest[:, here], "amin")

    def grams(
        self, group: LinearGroup, owner: Tensor, up: Tensor, down: Tensor
    ) -> tuple[Tensor, Tensor]:
        """W diag(l) W^T of both sides of every space of a group, for the least factors l."""
        least = (-self._falls(up, down)).exp()
        others = torch.ones(self.problem.variables, dtype=torch.bool, device=up.device)
        others[owner.reshape(-1)] = False
        beside = (-self._falls(*(torch.where(others, side, 0) for side in (up, down)))).exp()
        size = len(least), group.spaces, group.size, group.size
        result = {1: least.new_zeros(size), -1: least.new_zeros(size)}
        for placement in weight_places(self.sym, group):
            axis = self.sym.axes[placement.axis]
            w, recipe = self.weights[axis.tensor], plan(self.sym)[0][axis.tensor]
            if recipe.whole:
                w = w * least[:, recipe.factors[0].to(w.device)].reshape(w.shape)
            for side, index in zip(recipe.axes, recipe.factors, strict=False):
                table = beside if side.dim == axis.dim else least
                factors = table[:, index.reshape(-1).to(w.device)]
                w = w * side.spread(factors, w.shape[1:])
            rows = unit_rows({}, self.sym, placement, w)
            result[placement.exponent] = result[placement.exponent] + rows @ rows.mT
        return result[1], result[-1]


def _owners(sym: Symmetries, group: LinearGroup) -> Tensor:
    """The variables of the scales that the channels of every space have, ``(spaces, size)``."""
    placement, start = group.placements[0], 0
    axis = sym.axes[placement.axis]
    variable = torch.full((axis.blocks * axis.size,), -1)
    for scaling, own in zip(sym.scalings, covered(sym, sym.scalings, ("general",)), strict=True):
        for p in scaling.placements:
            if p.axis == placement.axis:
                units = start + torch.arange(scaling.units)[own]
                variable[p.positions[own]] = units[:, None].expand_as(p.positions[own])
        start += scaling.units
    return variable[placement.positions[..., 0]]


def _least_eigenvalue(gram: Tensor, mass: Tensor) -> Tensor:
    """Of the channels that are there: the rows of the others are zero, and count as fixed."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    gram = gram + torch.diag_embed(torch.where(diagonal == 0, mass[..., None], 0))
    values = torch.linalg.eigvalsh(gram)
    return (values[..., 0] - 1e-15 * gram.shape[-1] * values[..., -1]).clamp_min(0)


def _half_log(mass: Tensor, part: Tensor) -> Tensor:
    """Largest log of a factor whose square times a part of the mass is at most the mass."""
    return torch.where(part > 0, (mass / part).log() / 2, torch.inf).clamp_min(0)
