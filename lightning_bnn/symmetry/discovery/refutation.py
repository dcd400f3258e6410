"""Inside `discover`: test groups at random weights, drop and report those that fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_bnn.symmetry.axis_actions import EVERY
from lightning_bnn.symmetry.comparison import agree, tolerance_of
from lightning_bnn.symmetry.discovery.checking import Check
from lightning_bnn.symmetry.discovery.export import Graphs
from lightning_bnn.symmetry.discovery.graph import Graph
from lightning_bnn.symmetry.discovery.random_weights import RandomWeights
from lightning_bnn.symmetry.discovery.streaming import streamed_outputs
from lightning_bnn.symmetry.forward import Inputs, UnsupportedModel, in_runnable_precision, outputs
from lightning_bnn.symmetry.groups import Frozen, PermutationGroup, Symmetries

__all__ = ["refute"]

_NOTHING_MOVES = "the outputs do not depend on the weights at this example (is it zero?)"


@torch.no_grad()
def refute(
    model: nn.Module, sym: Symmetries, graphs: Graphs, inputs: Inputs, custom_rules: bool
) -> Symmetries:
    """Test at random weights; drop and report groups that fail, refuse a user's wrong rule.

    Args:
        model: the network, in evaluation mode.
        sym: what the graphs say.
        graphs: what the network computes; where they cannot be run, the network itself is. In
            training all but permutations are tested; those meet other random numbers there.
        inputs: to run it on.
        custom_rules: whether the user has given rules.
    """
    sym = _refuted(_Case(model, graphs.evaluation, inputs), sym, custom_rules)
    factors = _only(sym, [group for group in _every(sym) if group[0] != "permutations"])
    if graphs.evaluation_only or not _every(factors):
        return sym
    factors = replace(factors, softmax_shift=None, frozen=())
    try:
        model.train()
        case = _Case(model, graphs.training, graphs.training_inputs)
        left = _refuted(case, factors, custom_rules)
    except _Unrepeatable:  # noise of a source of its own: there is nothing to compare
        return sym
    finally:
        model.eval()
    frozen = (*sym.frozen, *left.frozen)
    kept: dict[str, Any] = {kind: getattr(left, kind) for kind in EVERY if kind != "permutations"}
    return replace(sym, frozen=frozen, **kept)


class _Unrepeatable(UnsupportedModel):
    """The same weights give other outputs every time."""


class _Case(NamedTuple):
    """A network in one of its modes, its graph in that mode, and what both run on."""

    model: nn.Module
    graph: Graph | None
    inputs: Inputs


def _refuted(case: _Case, sym: Symmetries, custom_rules: bool) -> Symmetries:
    """What the graph lets pass, passes, if the graph is right; else the network itself decides."""
    passed = _passed_by_graph(case, sym)
    if passed is not None:
        return passed

    def by_network(network: nn.Module, inputs: Inputs) -> Symmetries:
        return _judged(Check.of_network(network, inputs, sym), sym, custom_rules, network)

    return in_runnable_precision(case.model, case.inputs, by_network)


def _judged(check: Check, sym: Symmetries, custom_rules: bool, network: nn.Module) -> Symmetries:
    passed = _passed(check, sym)
    if passed is not None:
        return passed
    sym = check.with_true_shift(sym)
    check.raise_tolerance_to_noise()
    if not check.repeatable():
        raise _Unrepeatable(
            f"{type(network).__name__} gives different outputs for the same input and weights in "
            "evaluation mode, so that no symmetry can be checked. Make its forward deterministic, "
            "or pass the submodule that is."
        )
    wrong = _offenders(check, sym)
    if custom_rules and wrong:
        names = ", ".join(name for _, _, name in wrong[:3])
        raise UnsupportedModel(
            "A rule given in `rules` breaks the function: "
            f"the groups at {names} change the outputs."
        )
    sym = _without(sym, wrong)
    if check.error(sym) > check.tolerance:
        raise UnsupportedModel(
            f"The symmetries found in {type(network).__name__} change its outputs and were refused."
        )
    return replace(sym, error=check.error_seen)


def _passed(check: Check, sym: Symmetries) -> Symmetries | None:
    """The symmetries, the softmax shift perhaps left out, if nothing speaks against them."""
    if not check.sensitive and sym.touched:
        return replace(sym, unchecked=_NOTHING_MOVES)
    if check.error(sym) <= check.tolerance:
        return replace(sym, error=check.error_seen)
    without_shift = check.with_true_shift(sym)
    if without_shift is not sym and check.error(without_shift) <= check.tolerance:
        return replace(without_shift, error=check.error_seen)
    return None


# ------------------------------------------------------------ the graph in place of the network
def _passed_by_graph(case: _Case, sym: Symmetries) -> Symmetries | None:
    """What the graph has nothing against; None where it has, or is not what the network does."""
    try:
        weights = RandomWeights(case.model, sym)
        if case.graph is None or not _graph_is_right(case, weights):
            return None
        return _passed(Check.of_graph(case.graph, case.inputs, weights), sym)
    except Exception:  # an operation that does not run in float64, or only inside its module
        return None


def _graph_is_right(case: _Case, weights: RandomWeights) -> bool:
    """Whether the network gives, at random weights in its own precision, what its graph gives.

    Noise of a source of its own is no part of the graph, hence the network runs twice.
    """
    assert case.graph is not None
    params = weights.all_by(weights.read)
    runs = [outputs(case.model, params, case.inputs) for _ in range(2)]
    tolerance = tolerance_of(params)
    if not agree(runs[0], runs[1], min(1e-6, tolerance)):
        return False
    read = weights.by_any_name(params.__getitem__)
    traced = streamed_outputs(case.graph, case.inputs, read, None)
    return agree(runs[0], traced, min(1e-4, tolerance))


# ------------------------------------------------------------ single groups
def _offenders(check: Check, sym: Symmetries) -> list[tuple[str, int, str]]:
    """Halve the set of groups until single wrong ones remain."""
    pending, wrong = [_every(sym)], []
    while pending:
        part = pending.pop()
        if not part or check.error(_only(sym, part)) <= check.tolerance:
            continue
        if len(part) == 1:
            wrong += part
        else:
            pending += [part[: len(part) // 2], part[len(part) // 2 :]]
    return wrong


def _every(sym: Symmetries) -> list[tuple[str, int, str]]:
    return [(kind, k, group.name) for kind in EVERY for k, group in enumerate(getattr(sym, kind))]


def _only(sym: Symmetries, kept: Sequence[tuple[str, int, str]]) -> Symmetries:
    groups: dict[str, Any] = {
        kind: tuple(getattr(sym, kind)[k] for name, k, _ in kept if name == kind) for kind in EVERY
    }
    return replace(sym, **groups)


def _without(sym: Symmetries, wrong: Sequence[tuple[str, int, str]]) -> Symmetries:
    kept = [group for group in _every(sym) if group not in wrong]
    left = _only(sym, kept)
    new_index = {k: n for n, k in enumerate(k for kind, k, _ in kept if kind == "permutations")}

    def inner(group: PermutationGroup) -> tuple[tuple[int, ...], ...]:
        rows = (row for row in group.inner if all(k in new_index for k in row))
        return tuple(tuple(new_index[k] for k in row) for row in rows)

    reports = [
        Frozen(kind.removesuffix("s"), name, "", "the numerical check refuted this group")
        for kind, _, name in wrong
    ]
    return replace(
        left,
        permutations=tuple(replace(group, inner=inner(group)) for group in left.permutations),
        frozen=(*sym.frozen, *reports),
    )
