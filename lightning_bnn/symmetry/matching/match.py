"""The permutations that bring a network closest to another, by its weights or by data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params, stack, unstack
from lightning_bnn.symmetry.actions import flip, permute
from lightning_bnn.symmetry.elements import identity, random_permutations
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.branches import exchange_branches
from lightning_bnn.symmetry.matching.by_data import (
    Data,
    Learner,
    by_activations,
    by_learning,
    data_for,
    starts_from_activations,
)
from lightning_bnn.symmetry.matching.frank_wolfe import frank_wolfe
from lightning_bnn.symmetry.matching.interpolation import Loss
from lightning_bnn.symmetry.matching.learning import Learning
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.matching.relaxation import Relaxation
from lightning_bnn.symmetry.matching.result import MatchResult
from lightning_bnn.symmetry.matching.signatures import start_from_signatures
from lightning_bnn.symmetry.matching.unit_moments import Measure
from lightning_bnn.symmetry.validation import check_finite, check_one_network, check_params

__all__ = ["Method", "match"]

_log = logging.getLogger(__name__)

ByWeights = Literal["best", "ascent", "frank-wolfe"]
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
            a tensor, as it is exact there. Or one of those by data.
        restarts: further tries of ascent from random permutations; the best is kept.
        signs: flip units as well, where a network lets them be flipped; by weights only.
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
    data = data_for(method, params, reference, model, batches, loss, learning)
    search = _Search(Plan(sym), reference, restarts, signs, seed, max_sweeps)
    networks = params if stacked else stack([params])
    found = _found(search, networks, method, data)
    return found if stacked else found.single()


def _found(search: _Search, networks: Params, method: Method, data: Data | None) -> MatchResult:
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


def _real(w: Tensor) -> Tensor:
    return w if w.dtype == torch.float64 else w.float()


Found = tuple[list[Tensor], list[Tensor] | None, str]
Try = tuple[float, Found]
_TIE = 1e-7


class _Search:
    """One way of looking for permutations, for several networks and one reference."""

    def __init__(
        self, plan: Plan, reference: Params, restarts: int, signs: bool, seed: int, max_sweeps: int
    ) -> None:
        self.plan, self.reference, self.restarts = plan, reference, restarts
        self.signs, self.seed, self.max_sweeps = signs, seed, max_sweeps

    def result(self, networks: Params, method: ByWeights, data: Data | None) -> MatchResult:
        """The best of what the method tries, for every member of a stack."""
        members = unstack(networks)
        found = self.run(members, method, data)
        moved = [
            permute(flip(m, self.plan.sym, s) if s else m, self.plan.sym, p)
            for m, (p, s, _) in zip(members, found, strict=True)
        ]
        return _result(self.plan, members, moved, self.reference, found)

    def run(self, members: Sequence[Params], method: ByWeights, data: Data | None) -> list[Found]:
        """The best of what the method tries, for every network."""
        relaxation, coupled = Relaxation(self.plan), self.plan.couples
        joint = method == "frank-wolfe" or (method == "best" and coupled)
        joint = joint and bool(relaxation.pieces)
        alone = method != "frank-wolfe" or not joint
        tries = [self._ascents(member) if alone else [] for member in members]
        if method == "best" and data is not None and coupled:
            seen = starts_from_activations(self.plan, stack(members), self.reference, data)
            for k, member in enumerate(members):
                tries[k].append(self._try(member, "ascent from activations", seen[k]))
        for by_signatures in (False, True) if joint else ():
            unsettled = [k for k, t in enumerate(tries) if not (by_signatures and _agree(t))]
            some = [members[k] for k in unsettled]
            elements = self._jointly(relaxation, some, by_signatures) if some else []
            for k, element in zip(unsettled, elements, strict=True):
                tries[k].append(self._try(members[k], "frank-wolfe", element))
        return [_best(t) for t in tries]

    def _ascents(self, member: Params) -> list[Try]:
        """From the input to the output, and from random permutations."""
        sym, generator = self.plan.sym, torch.Generator().manual_seed(self.seed)
        first = self._try(member, "ascent", None, generator)
        others = (random_permutations(sym, generator) for _ in range(self.restarts))
        return [first, *(self._try(member, "ascent", start, generator) for start in others)]

    def _jointly(
        self, relaxation: Relaxation, members: Sequence[Params], by_signatures: bool
    ) -> list[list[Tensor]]:
        """What Frank-Wolfe finds, from the point that prefers nothing or from signatures."""
        both = (stack(members), self.reference)
        every, goal = ({n: _real(w[n]) for n in relaxation.pieces} for w in both)
        start = start_from_signatures(relaxation, every, goal) if by_signatures else None
        orders = frank_wolfe(relaxation, every, goal, start)
        return [relaxation.element([o[m] for o in orders]) for m in range(len(members))]

    def _try(
        self,
        member: Params,
        name: str,
        start: Sequence[Tensor] | None,
        generator: torch.Generator | None = None,
    ) -> Try:
        """Ascend from some permutations, or once through the network where there are none."""
        sym = self.plan.sym
        flips = [torch.ones(g.units) for g in sym.signs] if self.signs else None
        ascent = Ascent(self.plan, member, self.reference, flips)
        first = identity(sym) if start is None else list(start)
        generator = generator or torch.Generator().manual_seed(self.seed)
        ascent.run(first, generator, self.max_sweeps, start is None)
        exchange_branches(ascent, generator, self.max_sweeps)
        if not ascent.settled:
            _log.warning(
                "match: coordinate ascent is still improving after %d sweeps.", self.max_sweeps
            )
        return ascent.score(), (ascent.permutations, ascent.signs, name)


def _agree(tries: Sequence[Try]) -> bool:
    """Whether the first and the last try reach the same, so that more are not worth their time."""
    first, last = tries[0][0], tries[-1][0]
    return len(tries) > 1 and abs(first - last) <= _TIE * abs(last)


def _best(tries: Sequence[Try]) -> Found:
    """The first of those that nothing exceeds."""
    top = max(score for score, _ in tries)
    return next(found for score, found in tries if score >= top - _TIE * abs(top))


def _result(
    plan: Plan,
    members: Sequence[Params],
    moved: Sequence[Params],
    reference: Params,
    found: Sequence[Found],
) -> MatchResult:
    objective = torch.stack([plan.similarity(m, reference) for m in moved])
    bound = torch.stack([plan.bound(m, reference) for m in members])
    permutations, signs, methods = zip(*found, strict=True)
    every = [torch.stack(rows) for rows in zip(*permutations, strict=True)]
    flips = None if signs[0] is None else [torch.stack(rows) for rows in zip(*signs, strict=True)]
    return MatchResult(
        tuple(every), objective, bound, methods, None if flips is None else tuple(flips)
    )
