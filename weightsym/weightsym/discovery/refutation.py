"""Inside `discover`: test groups at random weights, drop and report those that fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weightsym.actions import EVERY
from weightsym.comparison import agree, tolerance_of
from weightsym.discovery.checking import Check
from weightsym.discovery.draws import ONE_OF_ALL, draws_numbers
from weightsym.discovery.example import forgets
from weightsym.discovery.export import Graphs
from weightsym.discovery.graph import Graph
from weightsym.discovery.random_weights import RandomWeights
from weightsym.discovery.streaming import streamed_outputs
from weightsym.forward import (
    Inputs,
    UnsupportedModel,
    as_real,
    in_runnable_precision,
    outputs,
    same_noise,
    structural_copy,
    tensors_of,
)
from weightsym.fresh_memory import reused_memory
from weightsym.groups import Frozen, PermutationGroup, Symmetries

__all__ = ["computes_its_graphs", "refute"]

_NOTHING_MOVES = "the outputs do not depend on the weights at this example (is it zero?)"
_ONE_KEY = (
    "a softmax over one element forgets what it reads, such as queries and keys, so that the check "
    "has not seen it (give an example of two tokens or more)"
)


_ROUNDING = 1e-5
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
        with reused_memory():
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
    with reused_memory():
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
    left = _only(sym, remaining)
    new_index = {
        k: n for n, k in enumerate(k for field, k, _ in remaining if field == "permutations")
    }

    def inner(group: PermutationGroup) -> tuple[tuple[int, ...], ...]:
        rows = (row for row in group.inner if all(k in new_index for k in row))
        return tuple(tuple(new_index[k] for k in row) for row in rows)

    reports = [
        Frozen(field.removesuffix("s"), name, "", "the numerical check refuted this group")
        for field, _, name in wrong
    ]
    return replace(
        left,
        permutations=tuple(replace(group, inner=inner(group)) for group in left.permutations),
        frozen=(*sym.frozen, *reports),
    )
