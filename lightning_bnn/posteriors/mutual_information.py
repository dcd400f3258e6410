r"""The entropy that averaging over permutations adds to a diagonal Gaussian.

.. math:: I(g; \omega) = H(q^G) - H(q) = \log n! - E_q \log
    \mathrm{perm}\big(A_{ij} / A_{ii}\big)

for the units of one layer, where :math:`A_{ij}` is the density of the own weights of unit i
(incoming row, bias, outgoing column) under those of unit j. Layers that share no tensor add; a set
of such layers gives a lower bound for the whole group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.posteriors.permanents import log_bethe, log_capacity, log_transpositions
from lightning_bnn.posteriors.unit_layers import UnitLayer
from weightsym import Element, Symmetries, random_permutations
from weightsym.params import Params, precise, widest

Bound = Callable[[Tensor], Tensor]
_NEGLIGIBLE = 60.0
"""Exponent of the density, relative to their own, below which units cannot be confused."""
_ROUNDING = 1e-5
_MULTIPLE = 16
"""Padding of columns with which products of matrices are faster by half."""


class Sampled(NamedTuple):
    """Networks drawn from Gaussians, ``weights = mean + exp(log_std) * noise``, all as stacks."""

    weights: Params
    mean: Params
    log_std: Params
    noise: Params


# ------------------------------------------------------------ densities of units
def log_ratios(layer: UnitLayer, sampled: Sampled, units: Tensor | None = None) -> Tensor:
    r"""Return the logarithms of :math:`A_{ij} / A_{ii}`, ``(networks, units, units)``.

    Computed in float64, unless all terms are small enough for float32.

    Args:
        layer: with the units.
        sampled: networks.
        units: indices of some units.
    """
    return log_ratios_of(_rows(layer, sampled, units))


@torch.no_grad()
def confusable_units(layer: UnitLayer, sampled: Sampled) -> Tensor:
    """Return the indices of units that may be confused with another one.

    Some of the squared distances bound all of them: a few weights distinguish most pairs.

    Args:
        layer: with the units.
        sampled: networks.
    """
    return _screened(layer, sampled).units


class _Screened(NamedTuple):
    """Units that may be confused with another one, and their distances if there are any."""

    units: Tensor
    rows: UnitWeights | None = None
    squares: Squares | None = None


def _screened(layer: UnitLayer, sampled: Sampled) -> _Screened:
    """Screen by the most informative weights, then by all, whose products are reused."""
    with torch.no_grad():
        scales = layer.sums(sampled.log_std)
        logs = -layer.square_sums(sampled.noise) / 2 - scales
        telling = layer.telling_rows(sampled[:3], sampled.mean, sampled.log_std)
        candidates = _near(_telling_bound(UnitWeights(*telling), scales), logs)
    if len(candidates) == 0:
        return _Screened(candidates)
    everyone = len(candidates) == layer.units
    rows = _rows(layer, sampled, None if everyone else candidates)
    squares = squares_of(rows)
    near = _near(_bound(squares, scales[:, candidates]), logs[:, candidates])
    if len(near) == len(candidates):
        return _Screened(candidates, rows, squares)
    units = candidates[near]
    if len(units) == 0:
        return _Screened(units)
    return _Screened(units, _rows(layer, sampled, units), squares.at(near))


def _rows(layer: UnitLayer, sampled: Sampled, units: Tensor | None) -> UnitWeights:
    return UnitWeights(*(layer.rows(stack, units, _MULTIPLE) for stack in sampled[:3]))


# Twice the negative log-densities of units under each other's law, as far as some of their weights
# tell. Rounding is on the safe side: it is a part of the largest squares that enter a difference.
def _telling_bound(rows: UnitWeights, scales: Tensor) -> Tensor:
    """Return the bound by a single product, without the squares."""
    w, mu, rho = rows
    centre = mu.mean(1, keepdim=True)
    w, mu, precision = w - centre, mu - centre, (-2 * rho).exp()
    scaled, safe = mu * precision, 1 - 2 * _ROUNDING
    squares_own = safe * (mu * scaled).sum(2) + 2 * scales
    units = torch.cat([w.square(), w], 2)
    return torch.baddbmm(
        squares_own[:, None], units, torch.cat([safe * precision, -2 * scaled], 2).mT
    )


@torch.no_grad()
def _bound(squares: Squares, scales: Tensor) -> Tensor:
    bound = torch.add(squares.without_means, squares.of_weights, alpha=-2 * _ROUNDING)
    return bound.add_((1 - 2 * _ROUNDING) * squares.of_means + 2 * scales[:, None])


def _near(bound: Tensor, logs: Tensor) -> Tensor:
    """Return the indices of units that may be confused with another one.

    Args:
        bound: on twice the negative log-densities under other units' distributions.
        logs: log-densities of the units under their own.
    """
    limits = 2 * (_NEGLIGIBLE - logs)
    bound.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    if bool((bound.amin(2) >= limits).all()):  # most often, and fast
        return torch.zeros(0, dtype=torch.long, device=bound.device)
    near = (bound < limits[..., None]).any(0)
    return (near.any(0) | near.any(1)).nonzero()[:, 0]


# ------------------------------------------------------------ information
def permanent_information(layer: UnitLayer, sampled: Sampled, bound: Bound) -> Tensor:
    """Return the information in the order of the units of one layer, for every network.

    Only units that may be confused with another one enter a matrix.

    Args:
        layer: with the units.
        sampled: networks.
        bound: computes the permanent or a bound of it, from logarithms.
    """
    _, rows, squares = _screened(layer, sampled)
    first = next(iter(sampled.weights.values()))
    full = torch.full_like(_zeros(first), layer.log_order)
    if rows is None:
        return full
    return full - bound(log_ratios_of(rows, squares)).to(full)


class Bracket(NamedTuple):
    """Bounds of the information of the whole group, and estimates for one set of layers."""

    lower: Tensor
    upper: Tensor
    bethe: Tensor
    capacity: Tensor


def information_bracket(
    sym: Symmetries,
    layers: Sequence[UnitLayer],
    sampled: Sampled,
) -> Bracket:
    """Return bounds for every network. Their means over networks bound the mean.

    Layers outside the set add at most the logarithm of their number of permutations.

    Args:
        sym: result of `weightsym.discover`.
        layers: a set without shared tensors, see `independent_sets`.
        sampled: networks.
    """
    first = next(iter(sampled.weights.values()))
    zero = _zeros(first)
    bethe, capacity, swaps, slack, order = zero, zero, zero, 0.0, 0.0
    for layer in layers:
        units = confusable_units(layer, sampled)
        order += layer.log_order
        slack += len(units) / 2 * math.log(2)
        if len(units) > 0:
            ratios = log_ratios(layer, sampled, units)
            bethe = bethe - log_bethe(ratios)
            capacity = capacity - log_capacity(ratios)
            swaps = swaps - log_transpositions(ratios)
    bethe, capacity, swaps = bethe + order, capacity + order, swaps + order
    lower = torch.stack([bethe - slack, capacity]).mean(1)
    upper = torch.stack([bethe, swaps]).mean(1)
    remainder = sym.log10_permutations * math.log(10) - order
    return Bracket(
        lower.amax().clamp(min=0), upper.amin().clamp(max=order) + remainder, bethe, capacity
    )


def draw_information(
    sym: Symmetries,
    sampled: Sampled,
    draws: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Estimate the information as P2 does, from the identity and uniform permutations.

    .. math:: \log q(\omega) - \log \frac{1}{K} \Big(q(\omega) + \sum_{j=1}^{K-1}
        q(g_j^{-1} \omega)\Big)

    In expectation it is between zero and the smaller of the information and log K.

    Args:
        sym: result of `weightsym.discover`.
        sampled: networks.
        draws: number K of permutations.
        generator: draws the permutations.
    """
    weights = sampled.weights
    moved = _moved_tensors(sym, weights)
    unmoved = _log_density(weights, sampled, moved)
    terms = [torch.zeros_like(unmoved)]
    for _ in range(draws - 1):
        element = Element.of_groups(sym, permutations=random_permutations(sym, generator))
        image = element.on_some({name: weights[name] for name in moved})
        terms.append(_log_density(image, sampled, moved) - unmoved)
    return math.log(draws) - torch.stack(terms).logsumexp(0)


def _moved_tensors(sym: Symmetries, weights: Params) -> list[str]:
    places = (placement for group in sym.permutations for placement in group.placements)
    exchanged = {name for group in sym.permutations for row in group.tensors for name in row}
    moved = {sym.axes[placement.axis].tensor for placement in places} | exchanged
    return sorted(moved & weights.keys())


def _log_density(weights: Params, sampled: Sampled, names: Sequence[str]) -> Tensor:
    """Return the log-density without constants that all images share."""
    parts = [
        (weights[name] - sampled.mean[name]) * (-sampled.log_std[name]).exp() for name in names
    ]
    squares = [z.square().flatten(1).sum(1, dtype=widest(z.device)) for z in parts]
    return -torch.stack(squares).sum(0) / 2


_SINGLE = 1e5
"""Largest squares to sum in float32, with a rounding error below 0.01."""


class UnitWeights(NamedTuple):
    """Weights of units, means and logarithms of deviations, ``(networks, units, weights)``."""

    weights: Tensor
    mean: Tensor
    log_std: Tensor

    def double(self) -> UnitWeights:
        """Return the same numbers in the `widest` type, with gradients."""
        return UnitWeights(*(precise(t) for t in self))


class Squares(NamedTuple):
    r"""The terms of :math:`\sum_c (w_{ic} - \mu_{jc})^2 / \sigma_{jc}^2`, and their factors.

    Attributes:
        of_weights: sums of the first terms, ``(networks, units, units)``.
        without_means: sums of the first and mixed terms.
        of_means: sums of the last terms, ``(networks, 1, units)``.
        weights: centred at the mean of all units, ``(networks, units, weights)``.
        mean: centred in the same way.
        precision: the inverse variances.
    """

    of_weights: Tensor
    without_means: Tensor
    of_means: Tensor
    weights: Tensor
    mean: Tensor
    precision: Tensor

    def at(self, units: Tensor) -> Squares:
        """Select some of the units."""
        of_weights, without_means = (t[:, units][..., units] for t in self[:2])
        weights, mean, precision = (t[:, units] for t in self[3:])
        return Squares(
            of_weights, without_means, self.of_means[..., units], weights, mean, precision
        )

    @property
    def are_exact(self) -> bool:
        """True if the rounding of float32 does not matter here."""
        peak = self.of_weights.amax() + self.of_means.amax()
        return self.of_weights.dtype == torch.float64 or bool(peak <= _SINGLE)


@torch.no_grad()
def squares_of(rows: UnitWeights) -> Squares:
    """Return squared distances of all units from all means.

    Args:
        rows: of the units.
    """
    w, mu, rho = rows
    centre = mu.mean(1, keepdim=True)
    w, mu, precision = w - centre, mu - centre, (-2 * rho).exp_()
    scaled = mu * precision
    of_weights = w.square() @ precision.mT
    without_means = torch.baddbmm(of_weights, w, scaled.mT, alpha=-2)
    of_means = scaled.mul_(mu).sum(2)[:, None]
    return Squares(of_weights, without_means, of_means, w, mu, precision)


def log_ratios_of(rows: UnitWeights, squares: Squares | None = None) -> Tensor:
    r"""Return logarithms of :math:`A_{ij} / A_{ii}` with gradients, ``(networks, units, units)``.

    Computed in float64 where the rounding of float32 would matter.

    Args:
        rows: of the units.
        squares: their squared distances, if already computed.
    """
    squares = squares_of(rows) if squares is None else squares
    if not squares.are_exact:
        rows = rows.double()
        squares = squares_of(rows)
    return _LogRatios.apply(*rows, squares)


class _LogRatios(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, mu: Tensor, rho: Tensor, squares: Squares) -> Tensor:
        ctx.save_for_backward(squares.weights, squares.mean, squares.precision)
        logs = (squares.without_means + (squares.of_means + 2 * rho.sum(2)[:, None])).mul_(-0.5)
        return logs.sub_(logs.diagonal(dim1=1, dim2=2)[..., None].clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, mu, precision = ctx.saved_tensors
        grad = grad.clone()
        grad.diagonal(dim1=1, dim2=2).sub_(grad.sum(2))
        of_units = grad.sum(1)[..., None]
        of_weights = (grad @ precision).mul_(w).baddbmm_(grad, mu * precision, beta=-1)
        first, second = grad.mT @ w, grad.mT @ w.square()
        second.addcmul_(mu, first, value=-2).addcmul_(mu.square(), of_units)
        of_log_std = torch.addcmul(-of_units, second, precision)
        of_mean = first.addcmul_(mu, of_units, value=-1).mul_(precision)
        return of_weights, of_mean, of_log_std, None


def _zeros(stack: Tensor) -> Tensor:
    """Return a zero for each network, in the `widest` type."""
    return torch.zeros(len(stack), dtype=widest(stack.device), device=stack.device)


def interpolation(layers: Sequence[UnitLayer], mean: Params, log_std: Params) -> Tensor:
    """Return the interpolation measure of every Gaussian of a stack.

    Args:
        layers: with the compared units.
        mean: of the Gaussians, as a stack.
        log_std: logarithms of their standard deviations.
    """
    first = next(iter(mean.values()))
    signal = _zeros(first)
    noise = signal.clone()
    for layer in layers:
        rows = precise(layer.rows(mean))
        signal += (rows - rows.mean(1, keepdim=True)).square().sum((1, 2))
        variances = (2 * precise(layer.rows(log_std))).exp()
        noise += (1 - 1 / layer.units) * variances.sum((1, 2))
    return noise / (signal + noise)
