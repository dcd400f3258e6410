r"""How much the permutations of a network add to the entropy of a diagonal Gaussian over it.

.. math:: I(g; \omega) = H(q^G) - H(q) = \log n! - E_q \log
    \mathrm{perm}\big(A_{ij} / A_{ii}\big)

for the units of one layer, where :math:`A_{ij}` is the density of the own weights of unit i
(incoming row, bias, outgoing column) under those of unit j. Layers that share no tensor add; a set
of such layers gives a lower bound for the whole group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.posteriors.permanents import log_bethe, log_capacity, log_transpositions
from lightning_bnn.posteriors.unit_layers import UnitLayer
from lightning_bnn.symmetry import Symmetries, random_permutations
from lightning_bnn.symmetry.actions import permute_some

__all__ = [
    "Bracket",
    "Sampled",
    "draw_information",
    "information_bracket",
    "log_ratios",
    "confusable_units",
    "permanent_information",
]

Bound = Callable[[Tensor], Tensor]
_NEGLIGIBLE = 60.0
"""Units whose density under each other's law is below e^-60 of their own cannot be confused."""
_ROUNDING = 1e-5
_SINGLE = 1e5
"""Squares up to here can be summed in float32: their rounding is below 0.01."""


class Sampled(NamedTuple):
    """Networks drawn from Gaussians, ``weights = mean + exp(log_std) * noise``, all as stacks."""

    weights: Params
    mean: Params
    log_std: Params
    noise: Params


# ------------------------------------------------------------ densities of units
def log_ratios(layer: UnitLayer, sampled: Sampled, units: Tensor | None = None) -> Tensor:
    r"""Logarithms of :math:`A_{ij} / A_{ii}`, ``(networks, units, units)``.

    In float64, unless no term is so large that its rounding would matter.

    Args:
        layer: whose units.
        sampled: networks.
        units: only these.
    """
    rows = [layer.rows(stack, units) for stack in sampled[:3]]
    if _peak(*rows) > _SINGLE:
        rows = [t.double() for t in rows]
    of_weights, crossed, of_means = _squared_distances(*rows)
    logs = -(of_weights + crossed + of_means) / 2 - rows[2].sum(2)[:, None]
    return logs - logs.diagonal(dim1=1, dim2=2)[..., None]


def _squared_distances(w: Tensor, mu: Tensor, rho: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""The three parts of :math:`\sum_c (w_{ic} - \mu_{jc})^2 / \sigma_{jc}^2`, by products."""
    centre = mu.detach().mean(1, keepdim=True)
    w, mu, precision = w - centre, mu - centre, (-2 * rho).exp()
    of_means = (mu.square() * precision).sum(2)[:, None]
    return w.square() @ precision.mT, -2 * w @ (mu * precision).mT, of_means


@torch.no_grad()
def _peak(w: Tensor, mu: Tensor, rho: Tensor) -> float:
    """A bound of the squares that enter the log-densities."""
    centre = mu.mean(1, keepdim=True)
    largest = torch.maximum((w - centre).abs().amax(1), (mu - centre).abs().amax(1))
    return float((largest * (-rho.amin(1)).exp()).square().sum(1).amax())


@torch.no_grad()
def confusable_units(layer: UnitLayer, sampled: Sampled) -> Tensor:
    """Units that may be taken for another one, as indices.

    A part of the squared distances bounds all of them: most pairs are told apart by a few weights.

    Args:
        layer: whose units.
        sampled: networks.
    """
    squares = layer.sums({name: sampled.noise[name].square() for name in layer.tensors})
    scales = layer.sums(sampled.log_std)
    logs = -squares / 2 - scales
    near = _near(layer.telling_rows(sampled[:3], sampled.mean, sampled.log_std), scales, logs)
    units = near.nonzero()[:, 0]
    if len(units) > 0:
        rows = [layer.rows(stack, units) for stack in sampled[:3]]
        units = units[_near(rows, scales[:, units], logs[:, units])]
    return units


def _near(rows: Sequence[Tensor], scales: Tensor, logs: Tensor) -> Tensor:
    """Which units may be taken for another one, as far as some of their weights tell.

    Rounding is on the safe side: it is a part of the largest squares that enter a difference.

    Args:
        rows: weights, means and logarithms of standard deviations.
        scales: sums of the latter over all weights of a unit.
        logs: log-densities of the units where they are.
    """
    of_weights, crossed, of_means = _squared_distances(*rows)
    squares = of_weights + of_means
    bound = -(squares + crossed) / 2 - scales[:, None] + _ROUNDING * squares
    near = (bound - logs[..., None] > -_NEGLIGIBLE).any(0)
    near.fill_diagonal_(False)
    return near.any(0) | near.any(1)


# ------------------------------------------------------------ information
def permanent_information(layer: UnitLayer, sampled: Sampled, bound: Bound) -> Tensor:
    """Information in the order of the units of one layer, one estimate for every network.

    Only units that may be taken for another one enter a matrix; all others are known for certain.

    Args:
        layer: whose units.
        sampled: networks.
        bound: the permanent or a bound of it, of logarithms.
    """
    units = confusable_units(layer, sampled)
    first = next(iter(sampled.weights.values()))
    full = torch.full((len(first),), layer.log_order, dtype=torch.float64, device=first.device)
    if len(units) == 0:
        return full
    return full - bound(log_ratios(layer, sampled, units)).to(full)


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
    """Bounds for every network; their means over networks bound the mean.

    Layers outside of the set can add at most the logarithm of how many permutations they have.

    Args:
        sym: what `lightning_bnn.symmetry.discover` returned.
        layers: a set that shares no tensor, see `independent_sets`.
        sampled: networks.
    """
    first = next(iter(sampled.weights.values()))
    zero = torch.zeros(len(first), dtype=torch.float64, device=first.device)
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
    rest = sym.log10_permutations * math.log(10) - order
    return Bracket(lower.amax().clamp(min=0), upper.amin().clamp(max=order) + rest, bethe, capacity)


def draw_information(
    sym: Symmetries,
    sampled: Sampled,
    draws: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""The estimate of P2 for every network: the identity and uniform permutations, K in all.

    .. math:: \log q(\omega) - \log \frac{1}{K} \Big(q(\omega) + \sum_{j=1}^{K-1}
        q(g_j^{-1} \omega)\Big)

    In expectation it is between zero and the smaller of the information and log K.

    Args:
        sym: what `lightning_bnn.symmetry.discover` returned.
        sampled: networks.
        draws: K.
        generator: draws the permutations.
    """
    weights = sampled.weights
    moved = _moved_tensors(sym, weights)
    unmoved = _log_density(weights, sampled, moved)
    terms = [torch.zeros_like(unmoved)]
    size = len(unmoved)
    for _ in range(draws - 1):
        element = [p.expand(size, -1) for p in random_permutations(sym, generator)]
        image = permute_some({name: weights[name] for name in moved}, sym, element)
        terms.append(_log_density(image, sampled, moved) - unmoved)
    return math.log(draws) - torch.stack(terms).logsumexp(0)


def _moved_tensors(sym: Symmetries, weights: Params) -> list[str]:
    places = (place for group in sym.permutations for place in group.placements)
    exchanged = {name for group in sym.permutations for row in group.tensors for name in row}
    moved = {sym.axes[place.axis].tensor for place in places} | exchanged
    return sorted(moved & weights.keys())


def _log_density(weights: Params, sampled: Sampled, names: Sequence[str]) -> Tensor:
    """Without constants, which all images share."""
    parts = [
        (weights[name] - sampled.mean[name]) * (-sampled.log_std[name]).exp() for name in names
    ]
    squares = [z.square().flatten(1).sum(1, dtype=torch.float64) for z in parts]
    return -torch.stack(squares).sum(0) / 2
