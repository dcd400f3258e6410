"""The weights with which a network was merged from others, by least squares in its frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsym.forms.fingerprint import to_least_mass
from weightsym.groups.shift_removal import without_shifts
from weightsym.groups.symmetries import Symmetries
from weightsym.matching.channels import ChannelView
from weightsym.matching.difference import Network
from weightsym.matching.match import match
from weightsym.matching.match_all import SWEEPS, Pair
from weightsym.matching.matrices import SpaceMap
from weightsym.matching.walk import Walk


@dataclass(frozen=True)
class Parents:
    r"""The weights of the networks that a child may have been merged from.

    .. math:: \min_w \| \theta - \textstyle\sum_k w_k\, g_k \theta_k \|

    Attributes:
        weights: of each network, over all tensors.
        by_layer: the same for every layer alone.
        rest: the share of the norm of the child that the sum does not explain.

    >>> from weightsym import Parents
    >>> Parents((0.3, 0.7), {"up": (0.3, 0.7)}, rest=0.0).weights
    (0.3, 0.7)
    """

    weights: tuple[float, ...]
    by_layer: dict[str, tuple[float, ...]]
    rest: float


@torch.no_grad()
def parents_of(
    child: Network, candidates: Sequence[Network], sym: Symmetries, *, seed: int = 0
) -> Parents:
    """Find the weights with which a network was merged from several others.

    Candidates are taken as they are, matched to the child, or matched with least mass (where other
    scales or matrices disguise it), whichever explains most. Where much is left (``rest``), the
    weights mean nothing: ask `relation` first.

    Args:
        child: a network that may have been merged.
        candidates: networks that it may have been merged from.
        sym: what `discover` returned.
        seed: of the order from which units are matched.

    >>> from torch import nn
    >>> from weightsym import params as P
    >>> from weightsym import discover, parents_of, permute, random_permutations
    >>> nets = [nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 64)) for _ in range(3)]
    >>> sym, (a, b, c) = discover(nets[0], torch.randn(8, 64)), map(P.of, nets)
    >>> child = permute({n: 0.3 * a[n] + 0.7 * b[n] for n in a}, sym, random_permutations(sym))
    >>> [abs(round(w, 2)) for w in parents_of(child, [a, b, c], sym).weights]
    [0.3, 0.7, 0.0]
    """
    if not candidates:
        raise ValueError("`candidates` must hold at least one network.")
    every = [without_shifts(w, sym) for w in (child, *candidates)]
    frames = [every]
    if sym.scalings or any(group.rescales for group in sym.linear):
        frames.append([to_least_mass(w, sym, mixing=True)[0].view(w) for w in every])
    found = [_solved(child, candidates, sym)]
    for goal, *rest in frames:
        found.append(_solved(goal, [_moved(w, goal, sym, seed) for w in rest], sym))
    return min(found, key=lambda parents: parents.rest)


def _moved(params: Network, goal: Network, sym: Symmetries, seed: int) -> Network:
    """A network in the frame of another one."""
    if not sym.linear:
        return match(params, goal, sym, signs=True, seed=seed).element.view(params)
    start = Walk(params, goal, sym).moving.element
    pair = Pair(ChannelView(sym), SpaceMap(sym), params, goal, start)
    pair.run(SWEEPS, anchored=False)
    return pair.element.view(params)


def _solved(goal: Network, moved: Sequence[Network], sym: Symmetries) -> Parents:
    layers: dict[str, Tensor] = {}
    for name in sorted(sym.compared):
        rows = torch.stack([w[name].double().flatten().cpu() for w in (goal, *moved)])
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers.get(layer, torch.zeros(())) + rows @ rows.mT
    gram = torch.stack(list(layers.values())).sum(0)
    weights = _least_squares(gram)
    left = gram[0, 0] - weights @ gram[1:, 0]
    share = float(left.clamp_min(0) / gram[0, 0].clamp_min(1e-300))
    by_layer = {name: tuple(_least_squares(part).tolist()) for name, part in layers.items()}
    return Parents(tuple(weights.tolist()), by_layer, math.sqrt(share))


def _least_squares(gram: Tensor) -> Tensor:
    """Solve the normal equations of the first row by all others."""
    return torch.linalg.pinv(gram[1:, 1:], rtol=1e-10, hermitian=True) @ gram[1:, 0]
