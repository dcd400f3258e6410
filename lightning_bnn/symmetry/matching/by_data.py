"""Matching by data: what `match` hands to activations, and to what learns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params, of, stack
from lightning_bnn.symmetry.matching.activations import (
    activation_tables,
    value_and_bound,
    with_shared_heads,
)
from lightning_bnn.symmetry.matching.interpolation import Loss
from lightning_bnn.symmetry.matching.learning import Best, Learning, Lines
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.matching.relaxation import Relaxation
from lightning_bnn.symmetry.matching.result import MatchResult
from lightning_bnn.symmetry.matching.sinkhorn import learn_softly
from lightning_bnn.symmetry.matching.straight_through import learn
from lightning_bnn.symmetry.matching.unit_moments import Measure

__all__ = [
    "Data",
    "Learner",
    "by_activations",
    "by_learning",
    "data_for",
    "starts_from_activations",
]

Learner = Literal["learned", "sinkhorn"]


@dataclass(frozen=True, eq=False)
class Data:
    """What is known besides weights: a network that runs, batches, and how to learn from them."""

    model: nn.Module
    batches: Iterable[Any]
    loss: Loss | None
    learning: Learning


def data_for(
    method: str,
    params: Params,
    reference: Params,
    model: nn.Module | None,
    batches: Iterable[Any] | None,
    loss: Loss | None,
    learning: Learning | None,
) -> Data | None:
    """The data of a method, or nothing for ``"best"`` by weights alone."""
    if method in ("ascent", "frank-wolfe") or (
        method == "best" and model is None and batches is None
    ):
        return None
    if model is None or batches is None:
        raise ValueError(f"`model` and `batches` must both be given for method {method!r}.")
    if method in get_args(Learner) and loss is None:
        raise ValueError(f"`loss` must be given for method {method!r}: the mean loss of a batch.")
    for name, network in (("params", params), ("reference", reference)):
        missing = of(model).keys() - network.keys()
        if missing:
            raise ValueError(
                f"`{name}` must hold all tensors of the network {type(model).__name__}: it lacks "
                f"{sorted(missing)[0]!r}."
            )
    return Data(model, batches, loss, learning or Learning())


def by_activations(
    plan: Plan, params: Params, reference: Params, data: Data, measure: Measure
) -> MatchResult:
    """One assignment per group, by activations.

    Args:
        plan: of the symmetries.
        params: a stack.
        reference: one network.
        data: network and batches.
        measure: what is compared.
    """
    relaxation = Relaxation(plan)
    tables = activation_tables(
        relaxation, data.model, params, stack([reference]), data.batches, measure
    )
    orders = relaxation.best(tables)
    value, bound = value_and_bound(tables, orders, len(next(iter(params.values()))))
    found = with_shared_heads(relaxation, params, reference, relaxation.elements(orders))
    methods = (measure,) * len(value)
    return MatchResult(tuple(found), value, bound, methods, tried={measure: value})


def by_learning(
    plan: Plan,
    params: Params,
    reference: Params,
    data: Data,
    method: Learner,
    start: MatchResult,
    seed: int,
    max_sweeps: int,
) -> MatchResult:
    """The best midpoint that gradients lead to, from weights or activations.

    Args:
        plan: of the symmetries.
        params: a stack.
        reference: one network.
        data: network, batches and loss.
        method: how to learn.
        start: what weights alone find.
        seed: of batches and sweeps.
        max_sweeps: sweeps of coordinate ascent per step.
    """
    assert data.loss is not None
    lines = Lines(data.model, reference, data.batches, data.loss, data.learning, seed)
    seen = by_activations(plan, params, reference, data, "activations")
    best = Best(lines, params, plan.sym, [start.permutations, seen.permutations])
    if plan.families and method == "learned":
        learn(plan, best, max_sweeps)
    elif plan.families:
        learn_softly(Relaxation(plan), best)
    unknown = torch.full_like(best.loss, torch.nan)
    methods = (method,) * len(best.loss)
    began = zip(("best", "activations"), best.at_starts, strict=True)
    tried = {name: -loss for name, loss in began} | {method: -best.loss}
    return MatchResult(tuple(best.permutations), -best.loss, unknown, methods, tried=tried)


def starts_from_activations(
    plan: Plan, params: Params, reference: Params, data: Data
) -> Sequence[Tensor]:
    """The permutations that activations lead to, ``(members, units)`` for every group."""
    return by_activations(plan, params, reference, data, "activations").permutations
