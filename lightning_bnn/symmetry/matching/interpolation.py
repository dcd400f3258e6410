"""Straight lines between networks, and the barrier on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bnn.params import Params, is_stacked, of

__all__ = ["Barrier", "barrier", "interpolate", "reestimated"]

Loss = Callable[[Any, Any], Tensor]


def interpolate(a: Params, b: Params, weight: float) -> Params:
    r"""The network :math:`(1 - \lambda) a + \lambda b`; what is not floating is taken from ``a``.

    >>> interpolate({"w": torch.zeros(2)}, {"w": torch.ones(2)}, 0.25)["w"]
    tensor([0.2500, 0.2500])
    """
    if a.keys() != b.keys():
        odd = sorted(a.keys() ^ b.keys())[0]
        raise ValueError(f"`a` and `b` are different networks: {odd!r} is only in one of them.")
    return {n: torch.lerp(t, b[n], weight) if t.is_floating_point() else t for n, t in a.items()}


@dataclass(frozen=True)
class Barrier:
    """Losses on the line between two networks.

    Attributes:
        height: largest loss on the line minus the mean loss of its ends.
        weights: positions on the line.
        losses: mean loss at each of them.
    """

    height: float
    weights: tuple[float, ...]
    losses: tuple[float, ...]


@torch.no_grad()
def barrier(
    model: nn.Module,
    a: Params,
    b: Params,
    batches: Sequence[tuple[Any, Any]],
    loss: Loss = nn.functional.cross_entropy,
    *,
    points: int = 11,
    batch_norm: Literal["reestimate", "as-is"] = "reestimate",
) -> Barrier:
    r"""The loss barrier between two networks (P3).

    .. math:: \max_\lambda L((1 - \lambda) a + \lambda b) - \tfrac12 (L(a) + L(b))

    References:
        A Compact Representation for BNNs by Removing Permutation Symmetry (Xiao, Liu, Bamler, 2023)
        REPAIR: REnormalizing Permuted Activations for Interpolation Repair (Jordan et al., 2023)

    Args:
        model: gives the computation; it runs in evaluation mode and is left untouched.
        a: one end.
        b: the other end, usually after `permute` with the permutations of `match`.
        batches: pairs of input and target, read several times.
        loss: mean loss of a batch.
        points: number of evenly spaced positions, both ends included.
        batch_norm: estimate the statistics of every network on the line anew from the batches, or
            interpolate them like weights. Without re-estimation most of a barrier is an artefact of
            the statistics.
    """
    if points < 3:
        raise ValueError(f"`points` must be at least 3, got {points}.")
    if batch_norm not in ("reestimate", "as-is"):
        raise ValueError(f"`batch_norm` must be 'reestimate' or 'as-is', got {batch_norm!r}.")
    for name, end in (("a", a), ("b", b)):
        if end.keys() != of(model).keys() or is_stacked(end, of(model)):
            raise ValueError(
                f"`{name}` must hold all tensors of one network {type(model).__name__}."
            )
    if not isinstance(batches, Sequence):
        raise ValueError(
            "`batches` must be a list of (input, target) pairs: it is read many times."
        )
    network = copy.deepcopy(model).eval()
    weights = torch.linspace(0, 1, points, dtype=torch.float64).tolist()
    losses = []
    for weight in weights:
        params = interpolate(a, b, weight)
        if batch_norm == "reestimate":
            params = reestimated(network, params, (x for x, _ in batches))
        losses.append(_mean_loss(network, params, batches, loss))
    return Barrier(max(losses) - (losses[0] + losses[-1]) / 2, tuple(weights), tuple(losses))


def _mean_loss(
    network: nn.Module, params: Params, batches: Iterable[tuple[Any, Any]], loss: Loss
) -> float:
    total, count = 0.0, 0
    for x, y in batches:
        total += float(loss(functional_call(network, params, (x,)), y)) * len(x)
        count += len(x)
    if not count:
        raise ValueError("`batches` is empty.")
    return total / count


def reestimated(network: nn.Module, params: Params, inputs: Iterable[Any]) -> Params:
    """Average the statistics over all batches, as a fresh pass in training mode would.

    Args:
        network: gives the computation.
        params: one network; it is left untouched.
        inputs: of all batches.
    """
    norms = [
        m
        for m in network.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    if not norms:
        return params
    params = {n: t.clone() if n.rpartition(".")[2] in _STATISTICS else t for n, t in params.items()}
    for name, tensor in params.items():
        if name.endswith("num_batches_tracked"):
            tensor.zero_()
    momenta = [m.momentum for m in norms]
    try:
        for m in norms:
            m.momentum, m.training = None, True
        for x in inputs:
            functional_call(network, params, (x,))
    finally:
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum, m.training = momentum, False
    return params


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
