"""Verify symmetries by running the network under random group elements.

Where all tensors of a network need not be held at once, each is read, moved and given back by name:
see `Element.of`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weightsym import params as P
from weightsym.discovery.sensitivity import KINDS, OutputMoves, places_in, places_of
from weightsym.groups.element import Element, Values
from weightsym.groups.elements import random_mixings, random_scales, random_shifts
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_params
from weightsym.networks.comparison import OutputComparison, perturbed, tolerance_of
from weightsym.networks.forward import (
    Inputs,
    in_runnable_precision,
    on_network,
    outputs,
)
from weightsym.params import Params

_log = logging.getLogger(__name__)


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

    with s the largest of the outputs that weights move at all. Groups whose tensors move them by
    less than a thousandth of that are tested by themselves, and s is smaller by as much.

    NaN says that the outputs do not depend on the weights, so that nothing was compared, or that
    rounding moves them as far as the tensors of a group do. A warning names these.

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
        perturbed_outputs = seen(outputs(network, perturbed(before, sym.touched), inputs))
        comparison = OutputComparison.between(old, perturbed_outputs, tolerance_of(before))
        parts = [(1.0, sym), (1.0, sym)]
        parts += _damped(sym, _moves(network, sym, before, inputs, comparison))
        errors = []
        for size, subgroup in parts:
            for element in covering_elements(subgroup, generator):
                if softmax_shift and subgroup is sym:
                    element = logit_shift(sym, generator) @ element
                new = seen(outputs(network, element.on_some(before), inputs))
                errors.append(comparison.error(new) / size)
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    def seen(out: list[Tensor]) -> list[Tensor]:
        return log_probabilities(out, sym) if softmax_shift else out

    return in_runnable_precision(model, inputs, measure)


def log_probabilities(logits: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    """Log-probabilities, which a softmax shift leaves unchanged."""
    assert sym.softmax_shift is not None
    return [t.log_softmax(sym.softmax_shift.dim) for t in logits]


_STEP, _LEAST = 1e-3, 1e-12
"""Ratio of the sizes at which groups are tested together, and the least that is not rounding."""


def _moves(
    network: nn.Module,
    sym: Symmetries,
    params: Params,
    inputs: Inputs,
    comparison: OutputComparison,
) -> OutputMoves | None:
    """Return the sensitivity to the weights at each place, or None without a gradient."""

    def run(lookup: Callable[[str], Any]) -> list[Tensor]:
        names = {name: sym.aliases.get(name, name) for name in params}
        return outputs(network, {name: lookup(first) for name, first in names.items()}, inputs)

    try:
        fixed = {name for name, _ in network.named_buffers()}
        return OutputMoves(run, lambda name: params[name].clone(), sym, comparison.sizes, fixed)
    except Exception:  # an operation of others, or one in place
        return None


def _damped(sym: Symmetries, moves: OutputMoves | None) -> Iterator[tuple[float, Symmetries]]:
    """Yield groups to which outputs are least sensitive, by the size of the change (NaN if least).

    Places with which no output moves, but for rounding, are not a part of the function here, if a
    group has others.
    """
    parts: dict[float, dict[str, list[Any]]] = {}
    if moves is None:
        return
    felt = {*places_of(sym)}
    for kind in KINDS:
        for group in getattr(sym, kind):
            sizes = {place: moves.at(place) for place in places_in(group)}
            fades = any(size > 0 for place, size in sizes.items() if place in felt)
            large = [size for size in sizes.values() if size >= _LEAST]
            size = min(large, default=0.0 if fades else 1.0)
            step = int(-math.log10(max(size, _LEAST / 10)) / 3)
            size = _STEP**step if size >= _LEAST else math.nan
            if size != 1:
                parts.setdefault(size, {}).setdefault(kind, []).append(group)
    for size, groups in parts.items():
        if math.isnan(size):
            names = ", ".join(dict.fromkeys(g.name for gs in groups.values() for g in gs))
            _log.warning("verify: the outputs change with %s by no more than rounding.", names)
        chosen: dict[str, Any] = {kind: tuple(groups.get(kind, ())) for kind in KINDS}
        yield size, replace(sym, softmax_shift=None, **chosen)


# ------------------------------------------------------------ elements of the group
_FEW = 4
"""Units of a group that chance may move as another one."""


def covering_elements(sym: Symmetries, generator: torch.Generator) -> list[Element]:
    """Return elements of all kinds that together cover the group, see `covering_values`."""
    return [Element.of_values(sym, values) for values in covering_values(sym, generator)]


def covering_values(sym: Symmetries, generator: torch.Generator) -> list[Values]:
    """Return values of elements that together move all units and flip, mix and shift all channels.

    What keeps the function is a closed group. Of a smaller one than is claimed, a random scale,
    shift or invertible matrix is outside with probability one, and so is a random reflection, since
    reflections generate all rotations: these need one element. Permutations need generators: a
    cycle of all units in a random order and, in the second element, an exchange of two neighbours
    in it. Signs, and groups of two units, move in the first element, in the second or in both,
    drawn for each by itself: so two that can only move together are told from two that move freely.
    Of few units that is left to chance: these move in further elements, see `_apart`.
    """
    flips = [_patterns(group.units, generator) for group in sym.signs]
    orders = [torch.randperm(group.units, generator=generator) for group in sym.permutations]
    swaps = _patterns(len(orders), generator).bool().tolist()
    first: Values = {
        "signs": [1 - 2 * pattern[0] for pattern in flips],
        "scalings": random_scales(sym, generator),
        "permutations": [_cycle(order, s) for order, s in zip(orders, swaps[0], strict=True)],
        "linear": _random_mixings(sym, generator),
        "shifts": random_shifts(sym, generator),
    }
    second: Values = {
        "signs": [1 - 2 * pattern[1] for pattern in flips],
        "scalings": random_scales(sym, generator),
        "permutations": [_exchange(order, s) for order, s in zip(orders, swaps[1], strict=True)],
    }
    return [first, second, *_apart(sym, generator)]


def _apart(sym: Symmetries, generator: torch.Generator) -> list[Values]:
    """Return elements that separate any two signs or small permutation groups."""
    signs = [(k, u) for k, g in enumerate(sym.signs) if g.units <= _FEW for u in range(g.units)]
    orders = [k for k, g in enumerate(sym.permutations) if 1 < g.units <= _FEW]
    count = len(signs) + len(orders)
    if count < 2:
        return []
    codes = [torch.arange(count) >> bit & 1 for bit in range((count - 1).bit_length())]
    codes += [torch.randint(0, 2, (count,), generator=generator) for _ in range(2)]
    elements: list[Values] = []
    for code in codes:
        flips = [torch.ones(group.units) for group in sym.signs]
        cycles = [torch.arange(group.units) for group in sym.permutations]
        for (k, u), moves in zip(signs, code.tolist(), strict=False):
            flips[k][u] = -1.0 if moves else 1.0
        for k, moves in zip(orders, code[len(signs) :].tolist(), strict=True):
            order = torch.randperm(len(cycles[k]), generator=generator)
            cycles[k] = _exchange(order, bool(moves)) if moves else cycles[k]
        elements.append({"signs": flips, "permutations": cycles})
    return elements


def _random_mixings(sym: Symmetries, generator: torch.Generator) -> list[Tensor]:
    """Draw an element of every linear group, a reflection for orthogonal groups."""
    result = []
    for group in sym.linear:
        if group.kind in ("orthogonal", "centred"):
            v = torch.randn(group.spaces, group.size, generator=generator, dtype=torch.float64)
            v = v - v.mean(-1, keepdim=True) if group.kind == "centred" else v
            result.append(v / v.norm(dim=-1, keepdim=True))
        else:
            result += random_mixings(replace(sym, linear=(group,)), generator)
    return result


def _patterns(count: int, generator: torch.Generator) -> Tensor:
    """Draw two rows of bits, of which at least one is set in every column."""
    drawn = torch.randint(1, 4, (count,), generator=generator)
    return torch.stack([drawn % 2, drawn // 2])


def _cycle(order: Tensor, swaps: bool) -> Tensor:
    """Move every unit to the position of the next; swap two units only if asked."""
    if len(order) == 2 and not swaps:
        return torch.arange(2)
    return torch.empty_like(order).scatter_(0, order, order.roll(1))


def _exchange(order: Tensor, swaps: bool) -> Tensor:
    """Exchange the first two units of an order, but a single pair only if ``swaps``."""
    permutation = torch.arange(len(order))
    if len(order) > 2 or swaps:
        permutation[order[:2]] = order[:2].flip(0)
    return permutation


def logit_shift(sym: Symmetries, generator: torch.Generator) -> Element:
    """Draw a shift of the logits: a vector for the weight and a number for the bias."""
    if sym.softmax_shift is None:
        raise ValueError("The network does not end in a layer whose outputs are its logits.")
    vector = torch.randn(sym.shapes[sym.softmax_shift.weight][1:], generator=generator)
    return Element.of_values(sym, {"logits": [vector, torch.randn((), generator=generator)]})
