"""Straight lines between networks, the barrier on them, and how far outputs are apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from weightsym.arguments import is_number
from weightsym.groups.validation import check_named_tensors
from weightsym.matching.ascent import LARGE
from weightsym.matching.repair import Repairs, check_whole, reestimated
from weightsym.networks.batch_norms import batch_norms
from weightsym.networks.comparison import OutputComparison, perturb_, tolerance_of
from weightsym.networks.forward import (
    Inputs,
    as_real,
    called_by,
    in_precision,
    in_precision_of,
    in_runnable_precision,
    on_network,
    structural_copy,
    tensors_of,
)
from weightsym.networks.randomness import keyed_generator
from weightsym.params import Params, of

Loss = Callable[[Any, Any], Tensor]
Statistics = Literal["as-is", "re-estimated", "repaired"]


def interpolate(a: Params, b: Params, weight: float) -> Params:
    r"""The network :math:`(1 - \lambda) a + \lambda b`, with integers and the precision of ``a``.

    >>> interpolate({"w": torch.zeros(2)}, {"w": torch.ones(2)}, 0.25)["w"]
    tensor([0.2500, 0.2500])
    """
    for name, params in (("a", a), ("b", b)):
        check_named_tensors(params, name)
    if not is_number(weight):
        raise ValueError(f"`weight` must be a finite number, got {weight!r}.")
    if a.keys() != b.keys():
        odd = sorted(a.keys() ^ b.keys())[0]
        raise ValueError(f"`a` and `b` are different networks: {odd!r} is only in one of them.")
    for n, t in a.items():
        if t.shape != b[n].shape:
            shapes = f"{tuple(t.shape)} and {tuple(b[n].shape)}"
            raise ValueError(f"`a` and `b` are different networks: {n!r} has shapes {shapes}.")
    return {
        n: torch.lerp(t, b[n].to(t.dtype), weight) if t.is_floating_point() else t
        for n, t in a.items()
    }


@dataclass(frozen=True)
class Barrier:
    """Losses on the line between two networks.

    Attributes:
        height: largest loss on the line minus the mean loss of its ends.
        weights: positions on the line.
        losses: mean loss at each of them.
        statistics: what was done about those of the networks between the ends: BatchNorm
            ``"re-estimated"``, preactivations ``"repaired"``, or nothing.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import barrier
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> batches = [(torch.randn(8, 2), torch.randint(2, (8,)))]
    >>> line = barrier(net, P.of(net), P.of(net), batches, points=3)
    >>> line.weights, abs(line.height) < 1e-6, line.statistics
    ((0.0, 0.5, 1.0), True, 'as-is')
    """

    height: float
    weights: tuple[float, ...]
    losses: tuple[float, ...]
    statistics: Statistics = "as-is"


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
    repair: bool = False,
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
        repair: give preactivations of the networks between the ends the means and deviations that
            lie between those of the ends, as the function `repair` does; in networks with BatchNorm
            re-estimation is that already.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import barrier, discover, match, permute
    >>> net, x = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(64, 2)
    >>> sym, w = discover(net, x), P.of(net)
    >>> batches, loss = [(x, net(x).detach())], torch.nn.functional.mse_loss
    >>> copy = permute(w, sym, [torch.tensor([3, 2, 1, 0])])
    >>> back = permute(copy, sym, match(copy, w, sym))
    >>> apart, close = (barrier(net, w, end, batches, loss).height for end in (copy, back))
    >>> close < 1e-8 < apart
    True
    """
    if points < 3:
        raise ValueError(f"`points` must be at least 3, got {points}.")
    if batch_norm not in ("reestimate", "as-is"):
        raise ValueError(f"`batch_norm` must be 'reestimate' or 'as-is', got {batch_norm!r}.")
    if repair and batch_norm == "as-is" and batch_norms(model):
        raise ValueError(
            "`batch_norm` must be 'reestimate' with `repair`, which is that for this network."
        )
    for name, end in (("a", a), ("b", b)):
        check_whole(model, end, name)
    if not isinstance(batches, Sequence):
        raise ValueError(
            "`batches` must be a list of (input, target) pairs: it is read many times."
        )
    network, network_at, statistics = _between(model, a, b, batches, batch_norm, repair)
    weights = torch.linspace(0, 1, points, dtype=torch.float64).tolist()
    losses = []
    for weight in weights:
        losses.append(mean_loss(network, network_at(weight), batches, loss))
    height = max(losses) - (losses[0] + losses[-1]) / 2
    return Barrier(height, tuple(weights), tuple(losses), statistics)


def _between(
    model: nn.Module,
    a: Params,
    b: Params,
    batches: Sequence[tuple[Any, Any]],
    batch_norm: str,
    repair: bool,
) -> tuple[nn.Module, Callable[[float], Params], Statistics]:
    """The module that computes, the networks on the line, and the treatment of statistics."""
    inputs, norms = [x for x, _ in batches], bool(batch_norms(model))
    if repair and inputs and not norms:
        repairs = Repairs(model, a, b, inputs)
        done: Statistics = "repaired" if repairs.layers else "as-is"
        return repairs.network, lambda w: repairs.at(interpolate(a, b, w), w), done
    network, reestimates = copy.deepcopy(model).eval(), norms and batch_norm == "reestimate"

    def at(weight: float) -> Params:
        params = interpolate(a, b, weight)
        return reestimated(network, params, inputs) if reestimates else params

    return network, at, "re-estimated" if reestimates else "as-is"


@torch.no_grad()
def mean_loss(
    network: nn.Module, params: Params, batches: Iterable[tuple[Any, Any]], loss: Loss
) -> float:
    """The mean loss of a network over all examples."""
    total, count = 0.0, 0
    for x, y in batches:
        total += float(
            loss(functional_call(network, params, (in_precision_of(params, x),)), y)
        ) * len(x)
        count += len(x)
    if not count:
        raise ValueError("`batches` is empty.")
    return total / count


# ------------------------------------------------------------ outputs
def random_inputs(*example: Any, draws: int = 16, seed: int = 0) -> list[Inputs]:
    """Inputs like an example: numbers are drawn anew, what is not floating stays.

    Args:
        *example: inputs that the network takes.
        draws: how many inputs; one where nothing is drawn.
        seed: of the numbers.
    """

    def draw(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    every, leaves = [], tree_leaves(example)
    floats = any(isinstance(x, Tensor) and x.is_floating_point() for x in leaves)
    for k in range(draws if floats else 1):
        generator = keyed_generator(seed, "inputs", k)
        every.append(tree_map(draw, Inputs(example)))
    return every


@torch.no_grad()
def output_error(
    model: nn.Module, a: Mapping[str, Tensor], b: Mapping[str, Tensor], inputs: list[Inputs]
) -> float:
    """The largest difference of outputs, relative to those that weights move at all.

    NaN says that the outputs do not depend on the weights.

    Args:
        model: gives the computation, in evaluation mode.
        a: one network.
        b: another one.
        inputs: what both read.
    """

    def error(network: nn.Module, x: Inputs) -> float:
        own = of(network)
        dtype = next((t.dtype for t in own.values()), None)

        def returned(params: Mapping[str, Tensor], size: float = 0.0) -> list[Tensor]:
            def read(name: str) -> Tensor:
                given = params[name] if name in params else own[name]
                t = in_precision(given, dtype)
                t = t.clone() if t is given else t
                return perturb_(name, t, size) if size else t

            return [as_real(t) for t in tensors_of(called_by(structural_copy(network), read, x))]

        old, wrong, new = returned(b), returned(b, 0.3), returned(a)
        return OutputComparison.between(old, wrong, tolerance_of(b)).error(new)

    network, is_large = _without_weights(model), sum(p.numel() for p in model.parameters()) > LARGE
    every = (on_network(model, x) for x in inputs)
    return max(
        error(network, x) if is_large else in_runnable_precision(network, x, error) for x in every
    )


def _without_weights(model: nn.Module) -> nn.Module:
    """Copy a network with parameters on the meta device."""
    weights: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()
    }
    return copy.deepcopy(model, weights)
