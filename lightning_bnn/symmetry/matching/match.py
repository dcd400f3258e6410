"""The permutations that bring a network closest to another, by its weights or by data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_bnn.params import Params, stack
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.by_data import (
    Data,
    Learner,
    by_activations,
    by_learning,
    data_for,
)
from lightning_bnn.symmetry.matching.by_weights import ByWeights, Search
from lightning_bnn.symmetry.matching.interpolation import Loss
from lightning_bnn.symmetry.matching.learning import Learning
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.matching.result import MatchResult
from lightning_bnn.symmetry.matching.unit_moments import Measure
from lightning_bnn.symmetry.validation import (
    check_finite,
    check_one_network,
    check_params,
    check_squares,
)

__all__ = ["Method", "match"]

Method = Literal[ByWeights, Measure, Learner]


@torch.no_grad()
def match(
    params: Params,
    reference: Params,
    sym: Symmetries,
    *,
    method: Method = "best",
    restarts: int = 0,
    signs: bool = False,
    seed: int = 0,
    max_sweeps: int = 100,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
    learning: Learning | None = None,
) -> MatchResult:
    r"""Permutations after which a network is closest to a reference: largest inner product.

    .. math:: \max_\pi\, \langle \pi\, \theta, \theta^* \rangle

    Coordinate ascent goes through the network once from the input to the output, comparing only
    with what is already matched, and then sweeps in random order until no group changes. Where the
    input anchors nothing (residual streams) it gets stuck; Frank-Wolfe moves all groups at once
    between permutations, from the point that prefers none, and coordinate ascent finishes its
    answer; a second run starts where sorted weights look alike. Blocks (heads, convolution groups)
    are matched together with their inside, and so are experts that are modules of their own, by
    weights only.

    Other methods look at data instead. Hidden activations on batches are compared by

    - ``"activations"``: inner products,
    - ``"correlation"``: correlations, to which scales of units mean nothing,
    - ``"regression"``: what the best line from a unit (its activation times a number plus another)
      explains of the sum of squares of the reference's unit, whatever the sign,

    summed over units, and maximised by one assignment per group. ``"learned"`` and ``"sinkhorn"``
    make the loss at the midpoint small by gradients, and keep the permutations with the smallest on
    batches that were held back; both begin with the better of ``"best"`` and ``"activations"``.

    References:
        Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth, Hayase, Srinivasa,
        2023)
        C2M3: Cycle-Consistent Multi-Model Merging (Crisostomi et al., 2024)
        Re-basin via implicit Sinkhorn differentiation (Guerrero Pena et al., 2023)

    Args:
        params: one network, or a stack whose members are matched one by one.
        reference: the network to come close to.
        sym: what `discover` returned.
        method: ``"ascent"``, ``"frank-wolfe"``, or ``"best"``: the better of both and, if there are
            batches, of ascent from where activations match; ascent alone where no two groups share
            a tensor, as it is exact there. Frank-Wolfe is given up where three times its slope does
            not reach what ascent has found: large networks with nothing in common. Or one of those
            by data.
        restarts: further tries of ascent from random permutations; the best is kept.
        signs: flip whole units as well; by weights only. Gated units, and units before a norm, can
            be flipped in some of their places only, and stay as they are.
        seed: of the sweeps and restarts, and of what is learnt.
        max_sweeps: sweeps per try.
        model: gives the computation, for what looks at data.
        batches: inputs, or tuples whose first element is the input; to learn, a list of (input,
            target) pairs.
        loss: mean loss of a batch, to learn.
        learning: how to learn.

    Returns:
        One permutation per group, for `permute`, with the objective and the method that won. By
        weights the objective is the inner product of weights; by activations the sum of what is
        compared; of what is learnt, minus the loss at the midpoint on the batches held back.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import discover, match, permute, random_permutations
    >>> net = mlp(2, [8, 8], 1)
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> copy = permute(w, sym, random_permutations(sym))
    >>> back = permute(copy, sym, match(copy, w, sym))
    >>> all(torch.equal(back[name], w[name]) for name in w)
    True
    """
    if method not in get_args(Method):
        raise ValueError(f"`method` must be one of {', '.join(get_args(Method))}, got {method!r}.")
    if restarts < 0 or max_sweeps < 1:
        raise ValueError(
            f"`restarts` must be at least 0 and `max_sweeps` at least 1, got {restarts} and "
            f"{max_sweeps}."
        )
    if signs and method not in get_args(ByWeights):
        raise ValueError(f"`signs` must be False for method {method!r}, which only permutes.")
    check_one_network(reference, sym, "reference")
    check_finite(reference, sym, "reference")
    stacked = check_params(params, sym)
    check_finite(params, sym)
    plan = Plan(sym)
    for name, networks in (("reference", reference), ("params", params)):
        check_squares(networks, name, plan.compared)
    data = data_for(method, params, reference, model, batches, loss, learning)
    search = Search(plan, reference, restarts, signs, seed, max_sweeps)
    networks = params if stacked else stack([params])
    found = _found(search, networks, method, data)
    return found if stacked else found.single()


def _found(search: Search, networks: Params, method: Method, data: Data | None) -> MatchResult:
    plan, reference = search.plan, search.reference
    if method in ("best", "ascent", "frank-wolfe"):
        return search.result(networks, method, data)
    assert data is not None
    if method in ("learned", "sinkhorn"):
        start = search.result(networks, "best", data)
        sweeps = search.max_sweeps
        return by_learning(plan, networks, reference, data, method, start, search.seed, sweeps)
    assert method in ("activations", "correlation", "regression")
    return by_activations(plan, networks, reference, data, method)
