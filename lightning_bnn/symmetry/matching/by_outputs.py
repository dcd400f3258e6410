"""Two networks compared by what they compute: outputs on random inputs, and half way between."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn.params import Params
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry.comparison import Comparison, perturbed, tolerance_of
from lightning_bnn.symmetry.forward import Inputs, in_runnable_precision, on_network, outputs
from lightning_bnn.symmetry.matching.interpolation import interpolate

__all__ = ["half_way_error", "output_error", "random_inputs"]


def random_inputs(*example: Any, draws: int = 16, seed: int = 0) -> list[Inputs]:
    """Inputs like an example: numbers are drawn anew, what is not floating stays.

    Args:
        *example: inputs that the network takes.
        draws: how many inputs.
        seed: of the numbers.
    """

    def draw(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    every = []
    for k in range(draws):
        generator = keyed_generator(seed, "inputs", k)
        every.append(tree_map(draw, Inputs(example)))
    return every


@torch.no_grad()
def output_error(model: nn.Module, a: Params, b: Params, inputs: list[Inputs]) -> float:
    """The largest difference of outputs, relative to those that weights move at all.

    NaN says that the outputs do not depend on the weights.

    Args:
        model: gives the computation, in evaluation mode.
        a: one network.
        b: another one.
        inputs: what both read.
    """

    def error(network: nn.Module, x: Inputs) -> float:
        ways = (b, perturbed(b), a)
        old, wrong, new = (outputs(network, _like(network, p), x) for p in ways)
        return Comparison.between(old, wrong, tolerance_of(b)).error(new)

    return max(in_runnable_precision(model, on_network(model, x), error) for x in inputs)


@torch.no_grad()
def half_way_error(model: nn.Module, a: Params, b: Params, inputs: list[Inputs]) -> float:
    r"""How far the network half way is from the mean of what both ends compute.

    .. math:: \sqrt{\frac{\sum_x \| f_{(a + b)/2}(x) - \bar f(x) \|^2}
        {\sum_x \| \bar f(x) - \bar{\bar f} \|^2}}, \quad \bar f = \tfrac12 (f_a + f_b)

    Zero on a straight line without a barrier; one where it is as large as the spread of outputs.

    Args:
        model: gives the computation, in evaluation mode; statistics of batch norms are averaged.
        a: one end.
        b: the other end.
        inputs: what all three read.
    """
    half = interpolate(a, b, 0.5)
    apart = spread = 0.0
    rows = [[_flat(outputs(model, p, on_network(model, x))) for p in (a, b, half)] for x in inputs]
    goals = [(ends[0] + ends[1]) / 2 for ends in rows]
    mean = torch.stack(goals).mean(0)
    for (_, _, between), goal in zip(rows, goals, strict=True):
        apart += float((between - goal).square().sum())
        spread += float((goal - mean).square().sum())
    return math.sqrt(apart / spread) if spread > 0 else math.nan


def _like(network: nn.Module, params: Params) -> Params:
    """Weights in the precision of a network."""
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in params.items()}


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.double().flatten() for t in tensors])
