"""Inside `discover`: test groups at random weights, drop and report those that fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weightsym.discovery.dimensions.nodes import ancestors
from weightsym.discovery.draws import ONE_OF_ALL, Pick, draws_numbers
from weightsym.discovery.example import forgets
from weightsym.discovery.export import Graphs
from weightsym.discovery.graph import Graph
from weightsym.discovery.random_weights import RandomWeights, perturbing
from weightsym.discovery.streaming import streamed_outputs
from weightsym.discovery.verify import (
    Motion,
    Read,
    covering_motions,
    log_probabilities,
    logit_shift,
)
from weightsym.groups.actions import EVERY
from weightsym.groups.symmetries import Frozen, Symmetries, without_groups
from weightsym.networks.comparison import Comparison, agree, tolerance_in, tolerance_of
from weightsym.networks.forward import (
    Inputs,
    UnsupportedModel,
    as_real,
    in_runnable_precision,
    outputs,
    same_noise,
    structural_copy,
    tensors_of,
)

__all__ = ["Check", "computes_its_graphs", "refute"]

_NOTHING_MOVES = "the outputs do not depend on the weights at this example (is it zero?)"
_ONE_KEY = (
    "a softmax over one element forgets what it reads, such as queries and keys, so that the check "
    "has not seen it (give an example of two tokens or more)"
)


_ASLEEP = (
    "no output moves with {} at this example and random weights, so that the check has not seen "
    "what moves there (is an input zero, a gate closed, or an expert not chosen?)"
)
_EXACT, _ROUNDING = 1e-12, 1e-5
"""The outputs of most networks in float32 differ by less from those of their graphs."""


@torch.no_grad()
def refute(
    model: nn.Module, sym: Symmetries, graphs: Graphs, inputs: Inputs, custom_rules: bool
) -> Symmetries:
    """Test at random weights. Drop and report groups that fail, refuse a user's wrong rule.

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
        sym = _refuted(case, sym, custom_rules)
        if case.is_even:
            sym = _without_wrong_factors(case._replace(is_even=False), sym, custom_rules)
    except UnsupportedModel as error:
        if _draws(model, inputs) and not isinstance(error, _WrongRule):
            raise _Unrepeatable(_says_different_things(type(model).__name__)) from error
        raise
    if not sym.unchecked and sym.touched and forgets(graphs.evaluation):
        sym = replace(sym, unchecked=_ONE_KEY)
    if not sym.unchecked and (names := _asleep(case, sym)):
        sym = replace(sym, unchecked=_ASLEEP.format(", ".join(names)))
    if graphs.evaluation_only or _trains_as_it_evaluates(graphs, inputs):
        return sym
    try:
        model.train()
        case = _Case(model, graphs.training, graphs.training_inputs)
        return _without_wrong_factors(case, sym, custom_rules)
    except _Unrepeatable:  # noise of a source of its own: there is nothing to compare
        return sym
    finally:
        model.eval()


@torch.no_grad()
def computes_its_graphs(model: nn.Module, sym: Symmetries, graphs: Graphs, inputs: Inputs) -> bool:
    """Whether a network gives what its graphs give, so that what holds for them holds for it."""

    def agreed(graph: Graph | None, inputs: Inputs) -> bool:
        case = _Case(model, graph, inputs)
        try:
            return graph is not None and _computes(case, graph, RandomWeights(model, sym))
        except Exception:  # an operation that only runs inside its module
            return False

    if not agreed(graphs.evaluation, inputs):
        return False
    if graphs.evaluation_only or _trains_as_it_evaluates(graphs, inputs):
        return True
    try:
        model.train()
        return agreed(graphs.training, graphs.training_inputs)
    finally:
        model.eval()


def _asleep(case: _Case, sym: Symmetries) -> list[str]:
    """Tensors that are moved by groups, and with which no output moves."""
    graph, fields = case.graph, ("permutations", "scalings", "signs", "linear")
    if graph is None or graph.measured is None or not graph.measured.still:
        return []
    axes = {p.axis for field in fields for group in getattr(sym, field) for p in group.placements}
    live = ancestors(graph.results)  # not those that only training reads
    names = {source.name for node, source in graph.sources.items() if node in live}
    names &= graph.measured.still & {sym.axes[a].tensor for a in axes}
    names -= {sym.axes[p.axis].tensor for g in sym.shifts if g.is_dead for p in g.placements}
    check, asleep = Check.of_graph(graph, case.inputs, RandomWeights(case.model, sym)), list[str]()
    pending = [sorted(names)] if names else []
    while pending:
        some = pending.pop()
        if agree(check.outputs, check.perturbed(frozenset(some), _OTHER), _EXACT):
            asleep += some
        elif len(some) > 1:
            pending += [some[: len(some) // 2], some[len(some) // 2 :]]
    return sorted(asleep)


def _without_wrong_factors(case: _Case, sym: Symmetries, custom_rules: bool) -> Symmetries:
    """All but permutations tested, which meet other random numbers."""
    factors = _only(sym, [group for group in _every(sym) if group[0] != "permutations"])
    if not _every(factors):
        return sym
    left = _refuted(case, replace(factors, softmax_shift=None, frozen=()), custom_rules)
    frozen = (*sym.frozen, *left.frozen)
    groups: dict[str, Any] = {
        field: getattr(left, field) for field in EVERY if field != "permutations"
    }
    return replace(sym, frozen=frozen, **groups)


class _Unrepeatable(UnsupportedModel):
    """The same weights give other outputs every time."""


class _WrongRule(UnsupportedModel):
    """A rule of the user breaks the function."""


def _says_different_things(name: str) -> str:
    return (
        f"{name} gives different outputs for the same input and weights in "
        "evaluation mode, so that no symmetry can be checked. Make its forward deterministic, "
        "or pass the submodule that is."
    )


def _draws(model: nn.Module, inputs: Inputs) -> bool:
    """Tell whether two calls differ if nobody repeats the random numbers."""
    with same_noise(model.parameters()):
        calls = [structural_copy(model)(*inputs.args, **inputs.named) for _ in range(2)]
    first, second = ([as_real(t) for t in tensors_of(out)] for out in calls)
    return not agree(first, second, 1e-6)


class _Case(NamedTuple):
    """A network in one of its modes, its graph in that mode, and what both run on.

    Where it ``is_even``, all random numbers of an operation are one.
    """

    model: nn.Module
    graph: Graph | None
    inputs: Inputs
    is_even: bool = False


def _trains_as_it_evaluates(graphs: Graphs, inputs: Inputs) -> bool:
    """Tell whether training could say nothing new."""
    if graphs.training is None or graphs.training_inputs is not inputs:
        return False
    return graphs.evaluation.says_the_same(graphs.training)


def _refuted(case: _Case, sym: Symmetries, custom_rules: bool) -> Symmetries:
    """By the graph, one weight at a time, if it is what the network does. Else by the network."""
    name = type(case.model).__name__
    judged = _judged_by_graph(case, sym, custom_rules, name)
    if judged is not None:
        return judged

    def by_network(network: nn.Module, inputs: Inputs) -> Symmetries:
        check = Check.of_network(network, inputs, sym)
        return _judged(check, sym, custom_rules and not case.is_even, name)

    return in_runnable_precision(case.model, case.inputs, by_network)


def _judged_by_graph(
    case: _Case, sym: Symmetries, custom_rules: bool, name: str
) -> Symmetries | None:
    """Judge by the graph. None where the network itself must say what is wrong."""
    if case.graph is None:
        return None
    try:
        weights = RandomWeights(case.model, sym)
        first = _first(case, weights)
        check = Check.of_graph(case.graph, case.inputs, weights, first=first)
        if check.sensitive and not case.is_even and check.holds(sym, _ROUNDING):
            return replace(sym, error=check.error_seen)
        if not _is_of_network(case, case.graph, weights, check.outputs, first):
            return None
        if case.is_even:
            check = _evened(case, case.graph, weights)
        return _judged(check, sym, custom_rules, name)
    except _WrongRule:
        if case.is_even:
            raise
        return None
    except Exception:  # an operation that does not run in float64, or only inside its module
        return None


def _evened(case: _Case, graph: Graph, weights: RandomWeights) -> Check:
    """A check with one number for all draws of an operation, which lets something pass."""
    for pick in ONE_OF_ALL:
        check = Check.of_graph(graph, case.inputs, weights, pick)
        if check.sensitive:
            break
    return check


def _judged(check: Check, sym: Symmetries, custom_rules: bool, name: str) -> Symmetries:
    if not check.sensitive and sym.touched:
        return replace(sym, unchecked=_NOTHING_MOVES)
    if check.error(sym) <= check.tolerance:
        return replace(sym, error=check.error_seen)
    sym = check.with_true_shift(sym)
    if check.error(sym) <= check.tolerance:
        return replace(sym, error=check.error_seen)
    check.raise_tolerance_to_noise()
    if not check.repeatable():
        raise _Unrepeatable(_says_different_things(name))
    wrong = _offenders(check, sym)
    if custom_rules and wrong:
        names = ", ".join(name for _, _, name in wrong[:3])
        raise _WrongRule(
            "A rule given in `rules` breaks the function: "
            f"the groups at {names} change the outputs."
        )
    sym = _without(sym, wrong)
    if check.error(sym) > check.tolerance:
        sym = _without_what_fails_together(check, sym)
    if check.error(sym) > check.tolerance:
        raise UnsupportedModel(
            f"The symmetries found in {name} change its outputs and were refused."
        )
    return replace(sym, error=check.error_seen)


# ------------------------------------------------------------ the graph in place of the network
def _first(case: _Case, weights: RandomWeights) -> list[Tensor]:
    """Outputs of a network at random weights. They are known if it was traced with as many."""
    measured = case.graph.measured if case.graph is not None else None
    if measured is not None and measured.random == weights.random:
        return measured.outputs
    return outputs(case.model, weights.all(), case.inputs)


def _is_of_network(
    case: _Case, graph: Graph, weights: RandomWeights, results: list[Tensor], first: list[Tensor]
) -> bool:
    """Tell whether a graph made in float64 what the network returns, which may round and draw.

    Where they differ by more than rounding, both run in the precision of the network, and it runs
    twice: noise of a source of its own is no part of a graph.
    """
    rounding = max(1e-2, tolerance_of(weights.state))
    if agree(first, results, _ROUNDING):
        return True
    return agree(first, results, rounding) and _computes(case, graph, weights, first)


def _computes(
    case: _Case, graph: Graph, weights: RandomWeights, first: list[Tensor] | None = None
) -> bool:
    """Whether a graph gives what its network does, which must do so again where they differ."""
    tolerance, first = tolerance_of(weights.state), first or _first(case, weights)
    by_name = weights.by_any_name(weights.read)
    traced = streamed_outputs(graph, case.inputs, by_name, None)
    if agree(first, traced, min(1e-6, tolerance)):
        return True
    second = outputs(case.model, weights.all(), case.inputs)
    repeats = agree(first, second, min(1e-6, tolerance))
    return repeats and agree(first, traced, min(1e-4, tolerance))


# ------------------------------------------------------------ single groups
def _offenders(check: Check, sym: Symmetries) -> list[tuple[str, int, str]]:
    """Halve the set of groups until single wrong ones remain."""
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
    """Groups that hold one by one, but not together: kind by kind fewer, until the rest holds."""
    for field in ("permutations", "shifts", "linear", "signs", "scalings"):
        if check.error(sym) <= check.tolerance:
            break
        sym = _without(sym, [group for group in _every(sym) if group[0] == field])
    return sym


def _every(sym: Symmetries) -> list[tuple[str, int, str]]:
    return [
        (field, k, group.name) for field in EVERY for k, group in enumerate(getattr(sym, field))
    ]


def _only(sym: Symmetries, chosen: Sequence[tuple[str, int, str]]) -> Symmetries:
    groups: dict[str, Any] = {
        field: tuple(getattr(sym, field)[k] for name, k, _ in chosen if name == field)
        for field in EVERY
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
Run = Callable[[Read, torch.dtype | None], list[Tensor]]
_PERTURBED, _OTHER = 0.3, 2.0
"""Sizes of the logarithms of the factors that make a network another one, or decisions others."""


class Check:
    """A network at random weights, and the error that a set of groups makes there.

    Attributes:
        run: from how weights are read, and a precision, to outputs.
        read: how the random weights are read.
        precision: in which they are moved; as they are where it is None.
        tolerance: the error that rounding explains.
        error_seen: what the last set of groups made.
    """

    def __init__(
        self,
        run: Run,
        weights: RandomWeights,
        tolerance: float,
        precision: torch.dtype | None = None,
        first: list[Tensor] | None = None,
    ) -> None:
        self.run, self.read = run, weights.read
        self.tolerance, self.precision = tolerance, precision
        self._first, self._touched = first, weights.sym.touched
        self.error_seen = 0.0

    @cached_property
    def outputs(self) -> list[Tensor]:
        """Outputs of the network at the random weights."""
        return self.run(self.read, self.precision)

    @cached_property
    def measured(self) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs at the random weights and at perturbed ones, which need not be precise."""
        if self._first is None:
            return self.outputs, self.perturbed(self._touched)
        perturbed = perturbing(self.read, self._touched, _PERTURBED, None)
        return self._first, self.run(perturbed, None)

    @cached_property
    def sensitive(self) -> bool:
        """True if any output moves with the weights."""
        right, wrong = self.measured
        return Comparison.between(right, wrong, self.tolerance).sensitive

    @cached_property
    def measure(self) -> Comparison:
        """Measure how far wrong weights move every output."""
        right, wrong = self.measured
        return Comparison.between(self.outputs, wrong, self.tolerance, right)

    @classmethod
    def of_network(cls, network: nn.Module, inputs: Inputs, sym: Symmetries) -> Check:
        """By the forward of a network."""
        weights = RandomWeights(network, sym)

        def forward(tensors: Read, precision: torch.dtype | None) -> list[Tensor]:
            return outputs(network, weights.all_by(tensors), inputs)

        return cls(forward, weights, tolerance_of(weights.state))

    @classmethod
    def of_graph(
        cls, graph: Graph, inputs: Inputs, weights: RandomWeights, even: Pick | None = None,
        first: list[Tensor] | None = None,
    ) -> Check:  # fmt: skip
        """By an exported graph in float64, one weight after the other.

        If it is ``even``, one number stands for all draws of an operation. If the outputs of the
        network at the random weights are given as ``first``, those at perturbed weights are made in
        its precision, too.
        """

        def run(tensors: Read, precision: torch.dtype | None) -> list[Tensor]:
            return streamed_outputs(graph, inputs, weights.by_any_name(tensors), precision, even)

        return cls(run, weights, tolerance_in(torch.float64), torch.float64, first)

    def holds(self, sym: Symmetries, rounding: float) -> bool:
        """Tell whether all elements give the same, which is what was measured but for rounding.

        Args:
            sym: the groups.
            rounding: of the outputs that were measured.
        """
        right, wrong = self.measured
        first, *others = covering_motions(sym, torch.Generator().manual_seed(2))
        old = self._moved(first)
        if not agree(right, old, rounding):
            return False
        if sym.softmax_shift is not None:
            logits = logit_shift(sym, torch.Generator().manual_seed(3))
            others = [replace(motion, logits=logits) for motion in others]
            old, right, wrong = (log_probabilities(out, sym) for out in (old, right, wrong))
        comparison = Comparison.between(old, wrong, self.tolerance, right)
        for motion in others:
            new = self._moved(motion)
            new = new if sym.softmax_shift is None else log_probabilities(new, sym)
            if not self._allows(comparison.error(new)):
                return False
        return True

    def _allows(self, error: float) -> bool:
        self.error_seen = error if math.isnan(error) else max(self.error_seen, error)
        return error <= self.tolerance

    def error(self, sym: Symmetries) -> float:
        """The error under elements that together move every unit and flip every sign."""
        if not self.sensitive:
            return 0.0
        first, *others = covering_motions(sym, torch.Generator().manual_seed(2))
        self.error_seen = 0.0
        if not self._allows(self.measure.error(self._moved(first))):
            return self.error_seen
        if sym.softmax_shift is not None:
            logits = logit_shift(sym, torch.Generator().manual_seed(3))
            others = [replace(motion, logits=logits) for motion in others]
        for motion in others:
            if sym.softmax_shift is None:
                error = self.measure.error(self._moved(motion))
            else:
                error = self._error_of_probabilities(motion, sym)
            if not self._allows(error):
                break
        return self.error_seen

    def _moved(self, motion: Motion) -> list[Tensor]:
        return self.run(motion.reading(self.read, self.precision), self.precision)

    def perturbed(self, names: frozenset[str], size: float = _PERTURBED) -> list[Tensor]:
        """Outputs at weights of which some, or all, are others."""
        return self.run(perturbing(self.read, names, size, self.precision), self.precision)

    def _error_of_probabilities(self, motion: Motion, sym: Symmetries) -> float:
        runs = (self.outputs, *self.measured, self._moved(motion))
        old, right, wrong, new = (log_probabilities(out, sym) for out in runs)
        return Comparison.between(old, wrong, self.tolerance, right).error(new)

    def repeatable(self) -> bool:
        """Tell whether the same weights give the same outputs."""
        return self.measure.error(self.run(self.read, self.precision)) <= self.tolerance

    def raise_tolerance_to_noise(self) -> None:
        """Allow for a forward that computes in float32 inside, and for rounding in deep networks.

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
        """Measure how many times larger a small change of the weights is in the outputs."""
        return self.measure.error(self.perturbed(frozenset(), change)) / change

    def with_true_shift(self, sym: Symmetries) -> Symmetries:
        """Drop the softmax shift unless it keeps the probabilities."""
        if sym.softmax_shift is None:
            return sym
        logits = logit_shift(sym, torch.Generator().manual_seed(3))
        error = self._error_of_probabilities(Motion(sym, logits=logits), sym)
        return sym if error <= max(self.tolerance, 1e-6) else replace(sym, softmax_shift=None)
