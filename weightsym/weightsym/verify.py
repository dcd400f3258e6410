"""Check symmetries by running the network: a random group element must not change its outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weightsym import params as P
from weightsym.actions import Kind, multiply, permute
from weightsym.comparison import Comparison, perturbed, tolerance_of
from weightsym.elements import random_permutations, random_scales, random_signs
from weightsym.forward import Inputs, in_runnable_precision, on_network, outputs
from weightsym.groups import Symmetries
from weightsym.mixing import mix_some, random_mixings
from weightsym.motions import covering_motions, logit_shift
from weightsym.params import Params
from weightsym.shifting import random_shifts, shift_some
from weightsym.validation import check_params

__all__ = [
    "log_probabilities",
    "random_element",
    "verify",
]


@torch.no_grad()
def verify(
    model: nn.Module,
    sym: Symmetries,
    *example: Any,
    softmax_shift: bool = False,
    generator: torch.Generator | None = None,
    **named: Any,
) -> float:
    r"""Return the largest relative error of the outputs under four elements of the whole group.

    Each pair of them moves every unit, flips every sign, and mixes and shifts all channels.

    .. math:: \max |f(g\, \theta, x) - f(\theta, x)| \,/\, s

    with s the largest of the outputs that weights move at all, or of these moves.

    NaN says that the outputs do not depend on the weights, so that nothing was compared.

    Args:
        model: the network, in the mode to be tested; its own weights are used and left untouched.
        sym: what `discover` returned for it.
        *example: inputs.
        softmax_shift: shift the logits too, and compare log-probabilities.
        generator: source of the elements, by default seeded with 0.
        **named: inputs by name.

    >>> from torch import nn
    >>> from weightsym import discover, verify
    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(8, 2)
    >>> sym = discover(net, x)
    >>> verify(net, sym, x) < 1e-6
    True
    >>> net[1] = nn.Sigmoid()  # no sign of its units is free
    >>> verify(net, sym, x) < 1e-6
    False
    """
    inputs = on_network(model, Inputs(example, named))
    generator = generator or torch.Generator().manual_seed(0)

    def measure(network: nn.Module, inputs: Inputs) -> float:
        before = P.of(network)
        check_params(before, sym, "model")

        old = seen(outputs(network, before, inputs))
        other = seen(outputs(network, perturbed(before, sym.touched), inputs))
        comparison = Comparison.between(old, other, tolerance_of(before))
        motions = [motion for _ in range(2) for motion in covering_motions(sym, generator)]
        if softmax_shift:
            motions = [replace(m, logits=logit_shift(sym, generator)) for m in motions]
        moved = (seen(outputs(network, m.applied(before), inputs)) for m in motions)
        errors = [comparison.error(new) for new in moved]  # one network at a time
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    def seen(out: list[Tensor]) -> list[Tensor]:
        return log_probabilities(out, sym) if softmax_shift else out

    return in_runnable_precision(model, inputs, measure)


def log_probabilities(logits: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    """Log-probabilities, which a softmax shift leaves unchanged."""
    assert sym.softmax_shift is not None
    return [t.log_softmax(sym.softmax_shift.dim) for t in logits]


def random_element(
    params: Params, sym: Symmetries, generator: torch.Generator, mixing: bool = False
) -> Params:
    """Act with a random sign, scale and permutation of every unit, and with random mixings."""
    factors: dict[Kind, list[Tensor]] = {
        "signs": random_signs(sym, generator),
        "scalings": random_scales(sym, generator),
    }
    params = multiply(params, sym, factors)
    if mixing:
        params = mix_some(params, sym, random_mixings(sym, generator))
        params = shift_some(params, sym, random_shifts(sym, generator))
    return permute(params, sym, random_permutations(sym, generator))
