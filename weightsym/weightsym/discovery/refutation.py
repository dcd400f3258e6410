"""Verification inside `discover`: test groups at random weights, drop and report failures."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from weightsym.discovery.dimensions.nodes import ancestors, operation_of
from weightsym.discovery.draws import ONE_OF_ALL, Pick, draws_numbers
from weightsym.discovery.example import forgets
from weightsym.discovery.export import Graphs
from weightsym.discovery.graph import Graph
from weightsym.discovery.products import Matrix, Weights, moved_matrix
from weightsym.discovery.random_weights import RandomWeights, WeightDraw, flipping, perturbing
from weightsym.discovery.sensitivity import KINDS, OutputMoves, Place, places_of, tensor_at
from weightsym.discovery.signals import draw_that_keeps_signals
from weightsym.discovery.streaming import (
    Call,
    Cast,
    called,
    evened_by,
    outputs_side_by_side,
    streamed_outputs,
)
from weightsym.discovery.unread import unread_numbers
from weightsym.discovery.verify import covering_elements, log_probabilities, logit_shift
from weightsym.groups.axis_maps import along_axis
from weightsym.groups.element import Element
from weightsym.groups.symmetries import Frozen, Symmetries, without_groups
from weightsym.networks.comparison import OutputComparison, agree, tolerance_in, tolerance_of
from weightsym.networks.forward import (
    Inputs,
    UnsupportedModel,
    as_real,
    in_precision,
    in_runnable_precision,
    outputs,
    same_noise,
    structural_copy,
    tensors_of,
)

_NOTHING_MOVES = "the outputs do not depend on the weights at this example (is it zero?)"
_ONE_KEY = (
    "a softmax over one element ignores its inputs, such as queries and keys, so that they were "
    "not tested (pass an example of two tokens or more)"
)


_ASLEEP = (
    "no output changes with {} at this example and random weights, so that its symmetries were "
    "not tested (is an input zero, a gate closed, or an expert not chosen?)"
)
_IN_PART = (
    "no output depends on a part of {} at this example, while groups move the rest (pass the "
    "longest example if a longer one reads more)"
)
_FAR, _FAR_AT_MOST = 1e3, 1e-2
"""How far outputs move with a place that is seen, in tolerances, and relative to their size."""
_PERTURBED_ALONE = 32
"""Tensors without derivatives that are perturbed one by one, at most. More count as seen."""
_FAINT = 1e-3
"""The size of a signal below which functions are straight lines."""
_REDRAWN = (
    *((2, 1.0, 1.0, False), (3, 1.0, 5.0, False), (4, 1.0, 1.0, False), (5, 0.3, 1.0, False)),
    *((6, 1.0, 1.0, True), (7, 1.0, 8.0, False)),
)
"""Seeds, noise on matrices, sizes of signals, and whether biases centre these, where the first
weights do not show all."""
_EXACT, _ROUNDING = 1e-12, 1e-5
"""The outputs of most networks in float32 differ by less from those of their graphs."""


@torch.no_grad()
def refute(
    model: nn.Module, sym: Symmetries, graphs: Graphs, inputs: Inputs, custom_rules: bool
) -> Symmetries:
    """Test at random weights. Drop and report groups that fail, refuse a user's wrong rule.

    Weights are drawn again, so that signals keep their size, until outputs move with all places
    that groups move. What no draw shows is named.

    Args:
        model: the network, in evaluation mode.
        sym: what the graphs say.
        graphs: what the network computes; where they cannot be run, the network itself is.
            Permutations meet other random numbers: they are not tested in training, and if a
            network draws in evaluation, too, they are tested with one number in place of all.
        inputs: to run it on.
        custom_rules: whether the user has given rules.
    """
    case = _Case(model, graphs.evaluation, inputs, draws_numbers(graphs.evaluation))
    try:
        sym, draw, unseen, in_part = _at_all_draws(case, sym, custom_rules)
    except UnsupportedModel as error:
        if _draws(model, inputs) and not isinstance(error, _WrongRule):
            raise _Unrepeatable(_says_different_things(type(model).__name__)) from error
        raise
    if not sym.unchecked and sym.touched and forgets(graphs.evaluation):
        sym = replace(sym, unchecked=_ONE_KEY)
    if not sym.unchecked and unseen:
        sym = replace(sym, unchecked=_ASLEEP.format(", ".join(unseen)))
    if in_part:
        reason = _IN_PART.format(", ".join(sorted(in_part)))
        sym = replace(sym, unchecked="; ".join(filter(None, (sym.unchecked, reason))))
    if graphs.evaluation_only or _trains_as_it_evaluates(graphs, inputs):
        return sym
    try:
        model.train()
        case = _Case(model, graphs.training, graphs.training_inputs, draw=draw)
        return _without_wrong_factors(case, sym, custom_rules)
    except (_Unrepeatable, _Unsteady):  # noise of a source of its own: nothing to compare
        return sym
    finally:
        model.eval()


def _at_all_draws(
    case: _Case, sym: Symmetries, custom_rules: bool
) -> tuple[Symmetries, WeightDraw, list[str], set[str]]:
    """Verify with several draws. Return the valid groups, the last draw, and untested tensors.

    Also the tensors of which the example reads a part.
    """
    judged, draw = _at_one_draw(case, sym, custom_rules), case.draw
    unseen, in_part = _unseen(case, judged), _read_in_part(case, judged)
    for redrawn in _REDRAWN:
        redraw = _other_draw(case, sym, *redrawn) if unseen or judged.is_faint else None
        if redraw is None:
            continue
        try:
            another = _at_one_draw(case._replace(draw=redraw), judged.sym, custom_rules)
        except _Unsteady:
            continue
        if math.isnan(another.sym.error):  # nothing moves there
            continue
        error = max(another.sym.error, judged.sym.error)  # not if the other is NaN
        another = another._replace(sym=replace(another.sym, unchecked="", error=error))
        judged, draw = another, redraw
        unseen &= _unseen(case, judged)
    names = {tensor_at(p, judged.sym) for p in unseen & {*places_of(judged.sym)}}
    return judged.sym, draw, sorted(names), in_part


def _at_one_draw(case: _Case, sym: Symmetries, custom_rules: bool) -> _Judged:
    judged = _refuted(case, sym, custom_rules)
    if case.is_even:
        left = _without_wrong_factors(case._replace(is_even=False), judged.sym, custom_rules)
        judged = judged._replace(sym=left)
    return judged


def _other_draw(
    case: _Case, sym: Symmetries, seed: int, noise: float, size: float, is_centred: bool
) -> WeightDraw | None:
    """Draw weights that keep signals at a given size. None if the graph cannot be run."""
    draw = WeightDraw(seed, noise)
    with suppress(Exception):  # as in `_judged_by_graph`
        assert case.graph is not None
        weights = RandomWeights(case.model, sym, draw=draw)
        return draw_that_keeps_signals(case.graph, case.inputs, weights, size, is_centred)
    return None


def _read_in_part(case: _Case, judged: _Judged) -> set[str]:
    """Return tensors that the example reads, and groups move, only in part."""
    sym, names_read = judged.sym, set[str]()
    names = {sym.axes[a].tensor for a in judged.doubtful}
    if case.graph is None or not names:
        return names_read
    with suppress(Exception):  # as in `_judged_by_graph`
        weights = case.weights(sym)
        by_name = weights.by_any_name(weights.read)
        unread = unread_numbers(case.graph, case.inputs, by_name, names)
        for a, positions in judged.doubtful.items():
            rows = along_axis(unread[sym.axes[a].tensor], sym.axes[a], 0)
            if bool((rows.reshape(-1, rows.shape[-1]).any(0) & positions).any()):
                names_read.add(sym.axes[a].tensor)
    return names_read


def _doubtful(sym: Symmetries, moves: OutputMoves) -> dict[int, Tensor]:
    """Find positions without effect on the outputs on axes where groups also move others."""
    doubtful, covered = dict[int, Tensor](), dict[tuple[str, int], Tensor]()
    for kind in KINDS:
        for place in (p for group in getattr(sym, kind) for p in group.placements):
            still, positions = moves.without_any(place.axis), place.positions.cpu()
            is_still = still[positions]
            parts = doubtful.setdefault(place.axis, torch.zeros_like(still))
            if kind in ("scalings", "signs") and len(positions.unique()) < len(still):
                parts[positions[is_still & ~is_still.all(-1, keepdim=True)]] = True
            if kind in ("permutations", "linear") or positions.shape[-1] > 1:
                mask = covered.setdefault((kind, place.axis), torch.zeros_like(still))
                mask[positions.flatten()] = True
    for (_, a), mask in covered.items():
        doubtful[a] |= moves.without_any(a) & ~mask
    return {a: mask for a, mask in doubtful.items() if bool(mask.any())}


def _unseen(case: _Case, judged: _Judged) -> set[Place]:
    """Return places that groups move and results depend on, but that affect no output here."""
    places = {*places_of(judged.sym)}
    if case.graph is None:
        return places - judged.seen
    live = ancestors(case.graph.results)  # not those that only training reads
    names = {source.name for node, source in case.graph.sources.items() if node in live}
    return {p for p in places - judged.seen if tensor_at(p, judged.sym) in names}


def _without_wrong_factors(case: _Case, sym: Symmetries, custom_rules: bool) -> Symmetries:
    """Test all groups except permutations, which would reassign the random numbers."""
    factors = _only(sym, [group for group in _every(sym) if group[0] != "permutations"])
    if not _every(factors):
        return sym
    factors = replace(factors, softmax_shift=None, frozen=())
    left = _refuted(case._replace(looks=False), factors, custom_rules).sym
    frozen = (*sym.frozen, *left.frozen)
    groups: dict[str, Any] = {
        field: getattr(left, field) for field in KINDS if field != "permutations"
    }
    return replace(sym, frozen=frozen, **groups)


class _Unrepeatable(UnsupportedModel):
    """Raised where the same weights give different outputs in every call."""


class _WrongRule(UnsupportedModel):
    """Raised where a user's rule changes the function."""


class _Unsteady(UnsupportedModel):
    """Raised where rounding errors are as large as those of a wrong group."""


class _Judged(NamedTuple):
    """The remaining symmetries, the places that affected the outputs, and the test's sensitivity.

    It ``is_faint`` where signals are so small that any function of them is a straight line. What is
    ``doubtful`` are positions by axis, with which nothing moves, beside those that groups move.
    """

    sym: Symmetries
    seen: frozenset[Place] = frozenset()
    is_faint: bool = False
    doubtful: Mapping[int, Tensor] = {}


def _says_different_things(name: str) -> str:
    return (
        f"{name} gives different outputs for the same input and weights in "
        "evaluation mode, so that no symmetry can be checked. Make its forward deterministic, "
        "or pass the submodule that is."
    )


def _draws(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether two calls differ unless their random numbers are repeated."""
    with same_noise(model.parameters()):
        calls = [structural_copy(model)(*inputs.args, **inputs.named) for _ in range(2)]
    first, second = ([as_real(t) for t in tensors_of(out)] for out in calls)
    return not agree(first, second, 1e-6)


class _Case(NamedTuple):
    """A network in one mode, its graph in that mode, and the inputs of both.

    Where it ``is_even``, all random numbers of an operation are one. Where it ``looks``, the check
    also says which places it has seen.
    """

    model: nn.Module
    graph: Graph | None
    inputs: Inputs
    is_even: bool = False
    draw: WeightDraw = WeightDraw()
    looks: bool = True

    def weights(self, sym: Symmetries) -> RandomWeights:
        """Return the random weights of the draw."""
        return RandomWeights(self.model, sym, draw=self.draw)


def _trains_as_it_evaluates(graphs: Graphs, inputs: Inputs) -> bool:
    """Return whether verification in training mode would add nothing."""
    if graphs.training is None or graphs.training_inputs is not inputs:
        return False
    return graphs.evaluation.says_the_same(graphs.training)


def _refuted(case: _Case, sym: Symmetries, custom_rules: bool) -> _Judged:
    """Verify by the graph, one weight at a time, if it matches the network, else by the network."""
    name = type(case.model).__name__
    judged = _judged_by_graph(case, sym, custom_rules, name)
    if judged is not None:
        return judged

    def by_network(network: nn.Module, inputs: Inputs) -> _Judged:
        check = Check.of_network(network, inputs, sym, case.draw)
        check.looks = case.looks
        return _judged(check, sym, custom_rules and not case.is_even, name)

    return in_runnable_precision(case.model, case.inputs, by_network)


def _judged_by_graph(case: _Case, sym: Symmetries, custom_rules: bool, name: str) -> _Judged | None:
    """Verify by the graph. None if the error must come from the network itself."""
    if case.graph is None:
        return None
    try:
        weights = case.weights(sym)
        first = _first(case, weights)
        check = Check.of_graph(case.graph, case.inputs, weights, first=first)
        check.looks = case.looks
        is_right = functools.partial(_is_of_network, case, case.graph, weights, first)
        if check.sensitive and not case.is_even and check.holds(sym, is_right):
            return check.judged(replace(sym, error=check.error_seen))
        if not is_right(check.outputs):
            return None
        if case.is_even:
            check = _evened(case, case.graph, weights)
        return _judged(check, sym, custom_rules, name)
    except (_WrongRule, _Unsteady):
        if case.is_even:
            raise
        return None
    except Exception:  # an operation that does not run in float64, or only inside its module
        return None


def _evened(case: _Case, graph: Graph, weights: RandomWeights) -> Check:
    """Return a check with one value for all draws of an operation that keeps outputs sensitive."""
    for pick in ONE_OF_ALL:
        check = Check.of_graph(graph, case.inputs, weights, pick)
        if check.sensitive:
            break
    return check


def _judged(check: Check, sym: Symmetries, custom_rules: bool, name: str) -> _Judged:
    if not check.sensitive and sym.touched:
        return _Judged(replace(sym, unchecked=_NOTHING_MOVES))
    if check.error(sym) <= check.tolerance:
        return check.judged(replace(sym, error=check.error_seen))
    sym = check.with_true_shift(sym)
    if check.error(sym) <= check.tolerance:
        return check.judged(replace(sym, error=check.error_seen))
    check.raise_tolerance_to_noise()
    if not check.repeatable():
        raise _Unrepeatable(_says_different_things(name))
    wrong = _offenders(check, sym)
    if custom_rules and wrong:
        names = ", ".join(name for _, _, name in wrong[:3])
        raise _WrongRule(f"A rule in `rules` is wrong: the groups at {names} change the outputs.")
    sym = _without(sym, wrong)
    if check.error(sym) > check.tolerance:
        sym = _without_what_fails_together(check, sym)
    if check.error(sym) > check.tolerance:
        raise UnsupportedModel(
            f"The symmetries found in {name} change its outputs and were rejected."
        )
    return check.judged(replace(sym, error=check.error_seen))


# ------------------------------------------------------------ the graph in place of the network
def _first(case: _Case, weights: RandomWeights) -> list[Tensor]:
    """Return the outputs at random weights, from tracing if it used the same weights."""
    measured = case.graph.measured if case.graph is not None else None
    is_first = weights.draw == WeightDraw()
    if measured is not None and measured.random == weights.random and is_first:
        return measured.outputs
    return weights.outputs(case.model, case.inputs)


def _is_of_network(
    case: _Case, graph: Graph, weights: RandomWeights, first: list[Tensor], results: list[Tensor]
) -> bool:
    """Return whether a graph in float64 matches a network, which may round and draw.

    Where they differ by more than rounding, both run in the precision of the network, and it runs
    twice: noise of a source of its own is no part of a graph.
    """
    rounding = max(1e-2, tolerance_of(weights.state))
    if agree(first, results, _ROUNDING):
        return True
    return agree(first, results, rounding) and _computes(case, graph, weights, first)


def _computes(case: _Case, graph: Graph, weights: RandomWeights, first: list[Tensor]) -> bool:
    """Return whether a graph matches its network, which must repeat any differing outputs."""
    tolerance = tolerance_of(weights.state)
    by_name = weights.by_any_name(weights.read)
    traced = streamed_outputs(graph, case.inputs, by_name, None)
    if agree(first, traced, min(1e-6, tolerance)):
        return True
    second = weights.outputs(case.model, case.inputs)
    repeats = agree(first, second, min(1e-6, tolerance))
    return repeats and agree(first, traced, min(1e-4, tolerance))


# ------------------------------------------------------------ single groups
def _offenders(check: Check, sym: Symmetries) -> list[tuple[str, int, str]]:
    """Bisect the set of groups until single invalid ones remain."""
    pending, wrong = [_every(sym)], []
    while pending:
        suspects = pending.pop()
        if not suspects or check.error(_only(sym, suspects)) <= check.tolerance:
            continue
        if len(suspects) == 1:
            wrong += suspects
        else:
            pending += [suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]]
    return wrong


def _without_what_fails_together(check: Check, sym: Symmetries) -> Symmetries:
    """Drop groups that hold alone but not together, kind by kind, until the rest holds."""
    for field in ("permutations", "shifts", "linear", "signs", "scalings"):
        if check.error(sym) <= check.tolerance:
            break
        sym = _without(sym, [group for group in _every(sym) if group[0] == field])
    return sym


def _every(sym: Symmetries) -> list[tuple[str, int, str]]:
    return [
        (field, k, group.name) for field in KINDS for k, group in enumerate(getattr(sym, field))
    ]


def _only(sym: Symmetries, chosen: Sequence[tuple[str, int, str]]) -> Symmetries:
    groups: dict[str, Any] = {
        field: tuple(getattr(sym, field)[k] for name, k, _ in chosen if name == field)
        for field in KINDS
    }
    return replace(sym, **groups)


def _without(sym: Symmetries, wrong: Sequence[tuple[str, int, str]]) -> Symmetries:
    remaining = [group for group in _every(sym) if group not in wrong]
    left = without_groups(sym, [k for field, k, _ in remaining if field == "permutations"])
    others = [group for group in remaining if group[0] != "permutations"]
    reports = [
        Frozen(field.removesuffix("s"), name, "", "the numerical check refuted this group")
        for field, _, name in wrong
    ]
    return replace(
        _only(sym, others), permutations=left.permutations, frozen=(*sym.frozen, *reports)
    )


# ------------------------------------------------------------ one check
Run = Callable[[Sequence[Weights], torch.dtype | None], Iterable[list[Tensor]]]
Watched = Callable[[Weights, Call], list[Tensor]]
_PERTURBED, _OTHER = 0.3, 2.0
"""Sizes of the logarithms of the factors that make a network another one, or decisions others."""


class Check:
    """A network at random weights, and the error of a set of groups there.

    Attributes:
        run: from several ways to read weights, and a precision, to the outputs of each.
        read: how the random weights are read.
        precision: in which they are moved; as they are where it is None.
        tolerance: the error that rounding explains.
        error_seen: what the last set of groups made.
        looks: whether to ask which places it has seen.
    """

    def __init__(
        self,
        run: Run,
        weights: RandomWeights,
        tolerance: float,
        precision: torch.dtype | None = None,
        first: list[Tensor] | None = None,
        watched: Watched | None = None,
    ) -> None:
        self.run, self.weights = run, weights
        self.read: Weights = weights.read if precision is None else weights
        self._watched = watched
        self.tolerance, self.precision = tolerance, precision
        self._first, self._touched = first, weights.sym.touched
        self.error_seen, self.looks = 0.0, True

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The outputs of the network at the random weights."""
        return self._outputs(self.read, self.precision)

    def _outputs(self, lookup: Weights, precision: torch.dtype | None) -> list[Tensor]:
        (outputs,) = self.run([lookup], precision)
        return outputs

    @cached_property
    def measured(self) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs at the random weights and at perturbed ones, which need not be precise."""
        if self._first is None:
            return self.outputs, self.perturbed(self._touched)
        perturbed = perturbing(self.read, self._touched, _PERTURBED, None)
        return self._first, self._outputs(perturbed, None)

    @cached_property
    def _comparison(self) -> OutputComparison:
        right, wrong = self.measured
        return OutputComparison.between(right, wrong, self.tolerance)

    @property
    def sensitive(self) -> bool:
        """True if any output changes with the weights."""
        return self._comparison.sensitive

    @cached_property
    def measure(self) -> OutputComparison:
        """The change of every output under wrong weights, as a scale for errors."""
        right, wrong = self.measured
        return OutputComparison.between(self.outputs, wrong, self.tolerance, right)

    @classmethod
    def of_network(
        cls,
        network: nn.Module,
        inputs: Inputs,
        sym: Symmetries,
        draw: WeightDraw = WeightDraw(),  # noqa: B008
    ) -> Check:
        """Check by the forward of a network."""
        weights = RandomWeights(network, sym, draw=draw)

        def forward(reads: Sequence[Any], precision: torch.dtype | None) -> Iterable[list[Tensor]]:
            return (outputs(network, weights.all_by(lookup), inputs) for lookup in reads)

        return cls(forward, weights, tolerance_of(weights.state))

    @classmethod
    def of_graph(
        cls, graph: Graph, inputs: Inputs, weights: RandomWeights, even: Pick | None = None,
        first: list[Tensor] | None = None,
    ) -> Check:  # fmt: skip
        """Check by an exported graph in float64, one weight at a time.

        If it is ``even``, one number stands for all draws of an operation. If the outputs of the
        network at the random weights are given as ``first``, those at perturbed weights are made in
        its precision, too.
        """
        call = evened_by(even) if even is not None else None
        goes_alone = not weights.has_large or draws_numbers(graph)

        def run(reads: Sequence[Weights], precision: torch.dtype | None) -> Iterable[list[Tensor]]:
            named = [weights.by_any_name(lookup) for lookup in reads]
            if goes_alone:  # until one fails
                return (streamed_outputs(graph, inputs, n, precision, call) for n in named)
            return outputs_side_by_side(graph, inputs, named, precision, call)

        def watched(lookup: Weights, call: Call) -> list[Tensor]:
            return streamed_outputs(graph, inputs, weights.by_any_name(lookup), None, call)

        return cls(run, weights, tolerance_in(torch.float64), torch.float64, first, watched)

    def judged(self, sym: Symmetries) -> _Judged:
        """Return the symmetries, and the places that affect the outputs."""
        sizes = list[float]()
        note = functools.partial(_note_size, sizes)

        def run(lookup: Weights) -> list[Tensor]:
            return (
                self._outputs(lookup, None)
                if self._watched is None
                else self._watched(lookup, note)
            )

        if not self.looks:
            return _Judged(sym, frozenset(places_of(sym)))
        fixed = self.weights.buffers
        try:
            moves = OutputMoves(run, self.read, sym, self._comparison.sizes, fixed)
        except Exception:  # an operation that has no derivative
            every = {tensor_at(place, sym) for place in places_of(sym)}
            fixed = fixed if len(every) <= _PERTURBED_ALONE else fixed | every
            moves = OutputMoves(lambda _: [], self.read, sym, [], fixed)
        sizes_at = {place: moves.at(place) for place in places_of(sym)}
        least = min(_FAR * self.tolerance, _FAR_AT_MOST)
        sensitive = {place for place, size in sizes_at.items() if least <= size < math.inf}
        moved = {tensor_at(place, sym) for place, size in sizes_at.items() if size > 0}
        still = {tensor_at(place, sym) for place in sizes_at} - moved
        jumping = still - self._asleep(still)
        sensitive |= {place for place in sizes_at if tensor_at(place, sym) in jumping}
        is_faint = min(sizes, default=1.0) < _FAINT
        return _Judged(sym, frozenset(sensitive), is_faint, _doubtful(sym, moves))

    def _asleep(self, names: Collection[str]) -> set[str]:
        """Return the tensors without a gradient that also change no output when they are replaced.

        Some decide by their size, and some by their sign, such as a mask that is learned.
        """
        asleep, pending = set[str](), [sorted(names)] if names else []
        while pending:
            some = pending.pop()
            larger = self.perturbed(frozenset(some), _OTHER)
            signs = flipping(self.weights.read, frozenset(some), self.precision)
            flipped = self._outputs(signs, self.precision)
            if all(agree(self.outputs, outputs, _EXACT) for outputs in (larger, flipped)):
                asleep |= {*some}
            elif len(some) > 1:
                pending += [some[: len(some) // 2], some[len(some) // 2 :]]
        return asleep

    def holds(self, sym: Symmetries, is_right: Callable[[list[Tensor]], bool]) -> bool:
        """Return whether all elements preserve the outputs that were measured.

        Args:
            sym: the groups.
            is_right: tells whether outputs are those that were measured, but for rounding.
        """
        right, wrong = self.measured
        first, *others = covering_elements(sym, torch.Generator().manual_seed(2))
        (old,) = self._moved([first])
        if not is_right(old):
            return False
        if sym.softmax_shift is not None:
            shift = logit_shift(sym, torch.Generator().manual_seed(3))
            others = [shift @ element for element in others]
            old, right, wrong = (log_probabilities(out, sym) for out in (old, right, wrong))
        comparison = OutputComparison.between(old, wrong, self.tolerance, right)
        for new in self._moved(others):
            new = new if sym.softmax_shift is None else log_probabilities(new, sym)
            if not self._allows(comparison.error(new)):
                return False
        return True

    def _allows(self, error: float) -> bool:
        self.error_seen = error if math.isnan(error) else max(self.error_seen, error)
        return error <= self.tolerance

    def error(self, sym: Symmetries) -> float:
        """Return the error under elements that together move every unit and flip every sign."""
        if not self.sensitive:
            return 0.0
        first, *others = covering_elements(sym, torch.Generator().manual_seed(2))
        self.error_seen = 0.0
        (new,) = self._moved([first])
        if not self._allows(self.measure.error(new)):
            return self.error_seen
        if sym.softmax_shift is not None:
            shift = logit_shift(sym, torch.Generator().manual_seed(3))
            others = [shift @ element for element in others]
        for new in self._moved(others):
            is_plain = sym.softmax_shift is None
            error = self.measure.error(new) if is_plain else self._error_of_logits(new, sym)
            if not self._allows(error):
                break
        return self.error_seen

    def _moved(self, elements: Sequence[Element]) -> Iterable[list[Tensor]]:
        """Yield the outputs at the weights after each of some elements."""

        def precise(name: str) -> Tensor:
            return in_precision(self.weights.read(name), self.precision)

        def moved_by(element: Element) -> Weights:
            def read(name: str) -> Tensor | Matrix:
                t = self.read(name) if self.weights.has_large else None
                matrix = moved_matrix(element, name, t) if isinstance(t, Matrix) else None
                return element.of(name, precise, owned=True) if matrix is None else matrix

            return read

        return self.run([moved_by(element) for element in elements], self.precision)

    def perturbed(self, names: frozenset[str], size: float = _PERTURBED) -> list[Tensor]:
        """Return the outputs at weights that are perturbed in part or as a whole."""
        return self._outputs(perturbing(self.read, names, size, self.precision), self.precision)

    def _error_of_logits(self, logits: list[Tensor], sym: Symmetries) -> float:
        runs = (self.outputs, *self.measured, logits)
        old, right, wrong, new = (log_probabilities(out, sym) for out in runs)
        return OutputComparison.between(old, wrong, self.tolerance, right).error(new)

    def repeatable(self) -> bool:
        """Return whether the same weights give the same outputs."""
        return self.measure.error(self._outputs(self.read, self.precision)) <= self.tolerance

    def raise_tolerance_to_noise(self) -> None:
        """Raise the tolerance for float32 inside a forward, and for rounding in deep networks.

        Where a small change of the weights grows on the way to the outputs, so does rounding; up to
        1e-6 is believed, far below what a wrong group does. A batch norm over two examples, one
        after the other, lets rounding grow further, and with it what a wrong group does: there, up
        to 1e-4 is believed.
        """
        noise = self._growth(1e-9) * 1e-9
        if noise < 1e-5:
            self.tolerance = max(self.tolerance, 100 * noise)
        else:
            growth = max(self._growth(1e-12), noise * 1e9) if noise > 1e-2 else noise * 1e9
            rounding = torch.finfo(torch.float64).eps * growth
            believed = min(1e-6, 1000 * rounding), min(1e-4, 30 * rounding)
            self.tolerance = max(self.tolerance, *believed)

    def _growth(self, change: float) -> float:
        """Return the factor by which the outputs amplify a small change of the weights."""
        return self.measure.error(self.perturbed(frozenset(), change)) / change

    def with_true_shift(self, sym: Symmetries) -> Symmetries:
        """Drop the softmax shift unless it preserves the probabilities."""
        if sym.softmax_shift is None:
            return sym
        shift = logit_shift(sym, torch.Generator().manual_seed(3))
        (moved,) = self._moved([shift])
        error = self._error_of_logits(moved, sym)
        return sym if error <= max(self.tolerance, 1e-6) else replace(sym, softmax_shift=None)


# ------------------------------------------------------------ signals
_HOMOGENEOUS = frozenset(
    "mul div add sub neg abs relu leaky_relu clone alias to _to_copy detach copy sign pow sqrt "
    "rsqrt reciprocal square lift_fresh_copy contiguous dropout where masked_fill clamp".split()
)
"""Functions of single numbers that are no less curved where these are small."""


def _note_size(sizes: list[float], node: Node, args: Any, kwargs: Any, cast: Cast) -> Any:
    """Call an operation, and record the magnitude of the inputs of nonlinear functions."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    is_curved = is_pointwise and operation_of(node).removesuffix("_") not in _HOMOGENEOUS
    if is_curved and len(tensors) == 1 and tensors[0].requires_grad:
        sizes.append(float(tensors[0].detach().norm()) / math.sqrt(max(1, tensors[0].numel())))
    return called(node, args, kwargs, cast)
