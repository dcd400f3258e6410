"""Rebasin by data: match the units of two networks by their hidden activations."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params, stack, unstack
from lightning_bnn.symmetry.forward import structural_copy
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.matching.probes import Probes
from lightning_bnn.symmetry.matching.relaxation import Relaxation
from lightning_bnn.symmetry.matching.unit_moments import MEASURES, JointMoments, Measure
from lightning_bnn.symmetry.validation import check_params

__all__ = ["activation_tables", "match_activations", "value_and_bound", "with_shared_heads"]

_log = logging.getLogger(__name__)
_SWEEPS = 100


# ------------------------------------------------------------ activations
@torch.no_grad()
def match_activations(
    model: nn.Module,
    params: Params,
    reference: Params,
    sym: Symmetries,
    batches: Iterable[Any],
    *,
    average: bool = False,
) -> list[Tensor]:
    r"""Permutations after which hidden activations agree best with those of a reference.

    .. math:: \max_p \sum_x \sum_k a_{p(k)}(x)\, a^*_k(x)

    Inner products of activations are summed over the batches and maximised by one linear assignment
    per group, as by ``match(..., method="activations")``, which also says what was reached. Heads
    that share keys (grouped queries) are matched by weights, with a warning.

    References:
        A Compact Representation for BNNs by Removing Permutation Symmetry (Xiao, Liu, Bamler, 2023)

    Args:
        model: gives the computation; it runs in evaluation mode.
        params: one network or a stack.
        reference: the network to agree with; the activations of a stack are averaged.
        sym: what `discover` returned.
        batches: inputs, or tuples whose first element is the input.
        average: match a stack (the samples of one posterior) as a whole, by activations averaged
            over its members.

    Returns:
        One permutation per group, for `permute`; with a leading dimension for a stack that is not
        averaged.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import discover, match_activations, permute
    >>> net, batches = mlp(2, [4], 1, torch.nn.Tanh), [torch.randn(64, 2)]
    >>> sym, w = discover(net, batches[0]), P.of(net)
    >>> copy = permute(w, sym, [torch.tensor([3, 0, 1, 2])])
    >>> match_activations(net, copy, w, sym, batches)  # what undoes it
    [tensor([1, 2, 3, 0])]
    """
    stacked = check_params(params, sym)
    members = params if stacked else stack([params])
    goal = reference if check_params(reference, sym, "reference") else stack([reference])
    relaxation = Relaxation(Plan(sym))
    tables = activation_tables(relaxation, model, members, goal, batches, average=average)
    found = relaxation.elements(relaxation.best(tables))
    if average:
        members = {n: t.mean(0, keepdim=True) for n, t in _floating(members).items()}
    mean = {n: t.mean(0) for n, t in _floating(goal).items()}
    found = with_shared_heads(relaxation, members, mean, found)
    return found if stacked and not average else [p[0] for p in found]


def activation_tables(
    relaxation: Relaxation,
    model: nn.Module,
    params: Params,
    reference: Params,
    batches: Iterable[Any],
    measure: Measure = "activations",
    average: bool = False,
) -> list[Tensor]:
    """How alike units are, ``(members, units, units)`` for every table; zeros where none is seen.

    Args:
        relaxation: of the symmetries of the network.
        model: gives the computation; it runs in evaluation mode.
        params: a stack.
        reference: a stack, whose activations are averaged.
        batches: inputs, or tuples whose first element is the input.
        measure: what is compared.
        average: take the activations of ``params`` in the mean over its members, too.
    """
    if isinstance(batches, Tensor):
        raise ValueError("`batches` must be an iterable of inputs; put one tensor into a list.")
    probes = Probes(structural_copy(model).eval(), relaxation)
    for k in relaxation.plan.branches:
        _log.warning(
            "match: the order of the experts that hold %s is not seen in activations; they stay in "
            "their places, and weights alone exchange them.",
            relaxation.plan.sym.permutations[k].tensors[0][0],
        )
    members, goals = unstack(params), unstack(reference)
    sums: list[JointMoments] = []
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        if not sums:
            probes.drop_blind_ones(goals[0], x)
            sums = [JointMoments() for _ in probes.spots]
        goal, own = _stacked(probes, goals, x), _stacked(probes, members, x)
        for total, a, b in zip(sums, goal, own, strict=True):
            total.add(a.mean(0), b.mean(0, keepdim=True) if average else b)
    if not sums and probes.spots:
        raise ValueError("`batches` is empty.")
    like = torch.zeros(1 if average else len(members), 1, 1, dtype=torch.float64)
    tables = [like.expand(-1, t.units, t.units) for t in relaxation.tables]
    for spot, total in zip(probes.spots, sums, strict=False):
        tables[spot.table] = _finite(MEASURES[measure](total).cpu())
    return tables


def with_shared_heads(
    relaxation: Relaxation, params: Params, reference: Params, orders: list[Tensor]
) -> list[Tensor]:
    """Orders in which heads that share keys, and all around and inside of them, fit by weights.

    A query head has part of every channel of its keys: neither is assigned before the other, so
    that no table of activations tells the order of both.

    Args:
        relaxation: of the symmetries of the network.
        params: a stack.
        reference: one network.
        orders: by activations, of every member.
    """
    plan = relaxation.plan
    chosen = shared_heads(relaxation)
    if not chosen:
        return orders
    moving = {g for k in chosen for g in plan.families[k].members}
    _log.warning(
        "match: activations do not tell the order of heads that share keys (grouped queries): "
        "weights order these heads and what is inside of them."
    )
    compared = plan.compared
    ascent = Ascent(plan, {n: params[n] for n in compared}, {n: reference[n] for n in compared})
    ascent.at(orders)
    known = set(range(len(orders))) - moving
    ascent.climb(chosen, torch.Generator().manual_seed(0), _SWEEPS, known)
    return list(ascent.now.permutations)


def shared_heads(relaxation: Relaxation) -> list[int]:
    """The families that tables of a relaxation leave out, and those around and inside of them."""
    plan = relaxation.plan
    missing = [f.group for f in plan.families if f not in relaxation.families]
    homes = set[int]()
    for g in missing:
        while g in plan.homes:
            g = plan.homes[g][0]
        homes.add(g)
    around = [k for k, f in enumerate(plan.families) if f.group in homes]
    return sorted({*around, *(k for g in homes for k in plan.families_inside(g))})


def _floating(params: Params) -> Params:
    return {n: t for n, t in params.items() if t.is_floating_point()}


def _stacked(probes: Probes, networks: list[Params], x: Any) -> list[Tensor]:
    runs = [probes.run(network, x) for network in networks]
    return [torch.stack(rows) for rows in zip(*runs, strict=True)]


def _finite(table: Tensor) -> Tensor:
    if not bool(table.isfinite().all()):
        raise ValueError("`batches` lead to activations that are NaN or infinite.")
    return table


def value_and_bound(
    tables: Sequence[Tensor], orders: Sequence[Tensor], members: int
) -> tuple[Tensor, Tensor]:
    """What orders reach in tables, and what no order can exceed, of every member."""
    value, bound = torch.zeros(2, members, dtype=torch.float64)
    for table, order in zip(tables, orders, strict=True):
        value = value + table.gather(2, order[:, :, None]).sum((1, 2))
        bound = bound + table.amax(2).sum(1)
    return value, bound
