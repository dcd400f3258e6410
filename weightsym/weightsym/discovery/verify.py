"""Check symmetries by running the network: a random group element must not change its outputs.

A `Motion` is one element of the group, as it changes one tensor after the other. Where all tensors
of a network need not be held at once, each is read, moved and given back by name. What a further
kind of symmetry does to a tensor is one more step in `Motion.moved`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from weightsym import params as P
from weightsym.discovery.sensitivity import KINDS, OutputMoves, places_in, places_of
from weightsym.groups.actions import (
    Element,
    Kind,
    axis_permutation,
    multiplied_tensor,
    multiply,
    permute,
    permute_axis,
    reached_axes,
    source_of,
    tied,
)
from weightsym.groups.elements import random_permutations, random_scales, random_signs
from weightsym.groups.mixing import (
    added,
    carried,
    mix_some,
    mixed_axis,
    random_mixings,
    random_shifts,
    shift_some,
)
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_params
from weightsym.networks.comparison import OutputComparison, perturbed, tolerance_of
from weightsym.networks.forward import (
    Inputs,
    in_precision,
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
        motions = [motion for _ in range(2) for motion in covering_motions(sym, generator)]
        if softmax_shift:
            motions = [replace(m, logits=logit_shift(sym, generator)) for m in motions]
        moved = (seen(outputs(network, m.applied(before), inputs)) for m in motions)
        errors = [comparison.error(new) for new in moved]  # one network at a time
        for size, part in _damped(sym, _moves(network, sym, before, inputs, comparison)):
            for motion in covering_motions(part, generator):
                new = seen(outputs(network, motion.applied(before), inputs))
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
    """How far the outputs move with the weights at each place. None if there is no derivative."""

    def run(read: Read) -> list[Tensor]:
        names = {name: sym.aliases.get(name, name) for name in params}
        return outputs(network, {name: read(first) for name, first in names.items()}, inputs)

    try:
        fixed = {name for name, _ in network.named_buffers()}
        return OutputMoves(run, lambda name: params[name].clone(), sym, comparison.sizes, fixed)
    except Exception:  # an operation of others, or one in place
        return None


def _damped(sym: Symmetries, moves: OutputMoves | None) -> Iterator[tuple[float, Symmetries]]:
    """Groups with which outputs move little, by the size of the move. Not a number for the least.

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
            _log.warning("verify: the outputs move with %s no further than rounding.", names)
        chosen: dict[str, Any] = {kind: tuple(groups.get(kind, ())) for kind in KINDS}
        yield size, replace(sym, softmax_shift=None, **chosen)


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


# ------------------------------------------------------------ one element of the group
Read = Callable[[str], Tensor]
"""From the first name of a tensor of the state to the tensor, in memory of its own."""


@dataclass(frozen=True, eq=False)
class Motion:
    """An element of the group of one network.

    Attributes:
        sym: what `discover` has found.
        factors: scales and signs, by kind.
        cycles: one order of the units for every group of permutations; empty for none.
        mixings: matrices ``(spaces, size, size)`` or reflections ``(spaces, size)`` for every group
            of matrices; empty for none.
        shifts: one vector for every group of shifts; empty for none. They act first.
        logits: what is added to every row of the last weight and to every one of its biases.
    """

    sym: Symmetries
    factors: Mapping[Kind, Element] = field(default_factory=dict)
    cycles: Element = ()
    mixings: Element = ()
    shifts: Element = ()
    logits: tuple[Tensor, Tensor] | None = None

    def reading(self, weights: Read, precision: torch.dtype | None = None) -> Read:
        """A way to read the moved network, where ``read`` reads the one at rest."""
        return lambda name: self.moved(name, weights, precision)

    def applied(self, params: Params) -> Params:
        """The moved network, from one at rest."""
        reading = self.reading(lambda name: params[name].clone())
        names = (name for name in params if name not in self.sym.aliases)
        return tied({name: reading(name) for name in names}, self.sym)

    def moved(self, name: str, weights: Read, precision: torch.dtype | None = None) -> Tensor:
        """One tensor of the moved network, for which others of the one at rest may be read.

        Args:
            name: its first name.
            weights: gives what it has read in memory of its own.
            precision: in which products and sums are made; that of the tensor where none is given.
        """
        source = source_of(name, self.sym, self.cycles) if self.cycles else name
        w = self._shifted(source, weights, precision) if self.shifts else weights(source)
        for a in self.sym.axes_of.get(source, ()) if self.cycles else ():
            if a in self.sym.placements_by_axis("permutations"):
                w = self._reordered(w, a)  # before the cast: half as much to move
        w = in_precision(w, precision)
        if name in self._multiplied:
            axes = self._multiplied[name]
            w = multiplied_tensor(w, self.sym, axes, self.factors, in_place=True)
        for a in self.sym.axes_of.get(name, ()) if self.mixings else ():
            for k, placement in self.sym.placements_by_axis("linear").get(a, ()):
                g = self.mixings[k]
                inverse = g.ndim == 3 and placement.exponent == -1
                w = mixed_axis(w, self.sym, placement, torch.linalg.inv(g).mT if inverse else g)
        return self._with_shifted_logits(name, w)

    def _shifted(self, name: str, weights: Read, precision: torch.dtype | None) -> Tensor:
        w = weights(name)
        for a in self.sym.axes_of.get(name, ()):
            for k, placement in self.sym.placements_by_axis("shifts").get(a, ()):
                w = added(in_precision(w, precision), self.sym, placement, self.shifts[k])
        for group, value in zip(self.sym.shifts, self.shifts, strict=True):
            for reader in (reader for reader in group.readers if reader.bias == name):
                weight = self.sym.axes[reader.channels.axis].tensor
                read_by = {weight: in_precision(weights(weight), precision)}
                w = in_precision(w, precision)
                w -= carried(read_by, self.sym, reader, value).to(w)
        return w

    def _reordered(self, w: Tensor, a: int) -> Tensor:
        axis, order = self.sym.axes[a], axis_permutation(self.sym, a, self.cycles, w.device)
        moved = (order != torch.arange(len(order), device=w.device)).nonzero()[:, 0]
        if axis.blocks > 1 or 2 * len(moved) > len(order):
            return permute_axis(w, axis, order)
        view, dim = (w, axis.dim) if axis.dim is not None else (w.view(-1), 0)
        view.index_copy_(dim, moved, view.index_select(dim, order[moved]))
        return w

    def _with_shifted_logits(self, name: str, w: Tensor) -> Tensor:
        last = self.sym.softmax_shift
        if self.logits is None or last is None or name not in (last.weight, last.bias):
            return w
        vector, number = self.logits
        return w.add_((vector if name == last.weight else number).to(w))

    @cached_property
    def _multiplied(self) -> Mapping[str, Mapping[int, list[Kind]]]:
        return reached_axes(self.sym, self.factors)


_FEW = 4
"""Units of a group that chance may move as another one."""


def covering_motions(sym: Symmetries, generator: torch.Generator) -> list[Motion]:
    """Motions that together move all units, flip every sign, mix and shift all channels.

    What keeps the function is a closed group. Of a smaller one than is claimed, a random scale,
    shift or invertible matrix is outside with probability one, and so is a random reflection, since
    reflections generate all rotations: these need one motion. Permutations need generators: a cycle
    of all units in a random order and, in the second motion, an exchange of two neighbours in it.
    Signs, and groups of two units, move in the first motion, in the second or in both, drawn for
    each by itself: so two that can only move together are told from two that move freely. Of few
    units that is left to chance: these move in further motions, see `_apart`.
    """
    flips = [_patterns(group.units, generator) for group in sym.signs]
    orders = [torch.randperm(group.units, generator=generator) for group in sym.permutations]
    swaps = _patterns(len(orders), generator)
    signs = [[1 - 2 * pattern[k] for pattern in flips] for k in range(2)]
    first = Motion(
        sym,
        {"signs": signs[0], "scalings": random_scales(sym, generator)},
        [_cycle(order, bool(swap)) for order, swap in zip(orders, swaps[0], strict=True)],
        _random_mixings(sym, generator),
        random_shifts(sym, generator),
    )
    factors: dict[Kind, Element] = {
        "signs": signs[1],
        "scalings": random_scales(sym, generator),
    }
    exchanges = [_exchange(order, bool(s)) for order, s in zip(orders, swaps[1], strict=True)]
    return [first, Motion(sym, factors, exchanges), *_apart(sym, generator)]


def _apart(sym: Symmetries, generator: torch.Generator) -> list[Motion]:
    """Motions of signs and of groups of few units, of which any two move apart in one of them."""
    signs = [(k, u) for k, g in enumerate(sym.signs) if g.units <= _FEW for u in range(g.units)]
    orders = [k for k, g in enumerate(sym.permutations) if 1 < g.units <= _FEW]
    count = len(signs) + len(orders)
    if count < 2:
        return []
    codes = [torch.arange(count) >> bit & 1 for bit in range((count - 1).bit_length())]
    codes += [torch.randint(0, 2, (count,), generator=generator) for _ in range(2)]
    motions = []
    for code in codes:
        flips = [torch.ones(group.units) for group in sym.signs]
        cycles = [torch.arange(group.units) for group in sym.permutations]
        for (k, u), moves in zip(signs, code.tolist(), strict=False):
            flips[k][u] = -1.0 if moves else 1.0
        for k, moves in zip(orders, code[len(signs) :].tolist(), strict=True):
            order = torch.randperm(len(cycles[k]), generator=generator)
            cycles[k] = _exchange(order, bool(moves)) if moves else cycles[k]
        motions.append(Motion(sym, {"signs": flips}, cycles))
    return motions


def _random_mixings(sym: Symmetries, generator: torch.Generator) -> list[Tensor]:
    """A random element of every group, a reflection where the group is orthogonal."""
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
    """Two rows that say in which of two motions something moves: in at least one."""
    drawn = torch.randint(1, 4, (count,), generator=generator)
    return torch.stack([drawn % 2, drawn // 2])


def _cycle(order: Tensor, swaps: bool) -> Tensor:
    """Move every unit to the place of the next, and two units only if they are to change."""
    if len(order) == 2 and not swaps:
        return torch.arange(2)
    return torch.empty_like(order).scatter_(0, order, order.roll(1))


def _exchange(order: Tensor, swaps: bool) -> Tensor:
    """Two units that follow each other in an order change places."""
    permutation = torch.arange(len(order))
    if len(order) > 2 or swaps:
        permutation[order[:2]] = order[:2].flip(0)
    return permutation


def logit_shift(sym: Symmetries, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random shift of the logits: a vector for the weight and a number for the bias."""
    if sym.softmax_shift is None:
        raise ValueError("The network does not end in a layer whose outputs are its logits.")
    shape = sym.shapes[sym.softmax_shift.weight][1:]
    vector = torch.randn(shape, generator=generator)
    return vector, torch.randn((), generator=generator)
