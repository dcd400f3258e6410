"""The permutations that bring a network closest to another, by its weights or by data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params, stack, stack_size
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry.actions import flip, permute
from lightning_bnn.symmetry.elements import identity, random_permutations
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.ascent import Ascent
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
    are matched together with their inside.

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


_TIE = 1e-7
_AT_ONCE = 2**26
"""Similarities of units that are held at once; networks beyond that wait for their turn."""


@dataclass(frozen=True, eq=False)
class _Try:
    """What one way has found for every member, with a score of minus infinity where it was not."""

    name: str
    score: Tensor
    permutations: list[Tensor]
    signs: list[Tensor] | None


class _Search:
    """One way of looking for permutations, for several networks and one reference."""

    def __init__(
        self, plan: Plan, reference: Params, restarts: int, signs: bool, seed: int, max_sweeps: int
    ) -> None:
        self.plan, self.reference, self.restarts = plan, reference, restarts
        self.signs, self.seed, self.max_sweeps = signs, seed, max_sweeps

    def result(self, networks: Params, method: ByWeights, data: Data | None) -> MatchResult:
        """The best of what the method tries, for every member of a stack."""
        best, methods = _best(self.run(networks, method, data))
        sym, signs = self.plan.sym, best.signs
        moved = permute(flip(networks, sym, signs) if signs else networks, sym, best.permutations)
        objective = self.plan.similarity(moved, self.reference)
        bound = self.plan.bound(networks, self.reference)
        return MatchResult(
            tuple(best.permutations),
            objective.expand(len(methods)).clone(),
            bound.expand(len(methods)).clone(),
            methods,
            None if signs is None else tuple(signs),
        )

    def run(self, networks: Params, method: ByWeights, data: Data | None) -> list[_Try]:
        """All that the method tries."""
        relaxation, coupled = Relaxation(self.plan), self.plan.couples
        joint = method == "frank-wolfe" or (method == "best" and coupled)
        joint = joint and bool(relaxation.pieces)
        alone = method != "frank-wolfe" or not joint
        tries = self._ascents(networks) if alone else []
        if method == "best" and data is not None and coupled:
            seen = starts_from_activations(self.plan, networks, self.reference, data)
            tries.append(self._try(networks, "ascent from activations", seen))
        for by_signatures in (False, True) if joint else ():
            unsettled = ~_agree(tries, stack_size(networks), by_signatures)
            if bool(unsettled.any()):
                tries.append(self._jointly(relaxation, networks, unsettled, by_signatures, tries))
        return tries

    def _ascents(self, networks: Params) -> list[_Try]:
        """From the input to the output, and from random permutations."""
        tries = [self._try(networks, "ascent", None)]
        for k in range(self.restarts):
            one = self._random(keyed_generator(self.seed, "restart", k))
            start = [p.repeat(stack_size(networks), 1) for p in one]
            tries.append(self._try(networks, "ascent", start))
        return tries

    def _jointly(
        self,
        relaxation: Relaxation,
        networks: Params,
        chosen: Tensor,
        by_signatures: bool,
        tries: Sequence[_Try],
    ) -> _Try:
        """What Frank-Wolfe finds, from the point that prefers nothing or from signatures.

        Ascent finishes it, but where that is what an earlier try has ended with.
        """
        some = {n: t[chosen] for n, t in networks.items()}
        both = (some, self.reference)
        every, goal = ({n: _real(w[n]) for n in relaxation.pieces} for w in both)
        start = start_from_signatures(relaxation, every, goal) if by_signatures else None
        orders = relaxation.elements(frank_wolfe(relaxation, every, goal, start))
        score = torch.full((len(orders[0]),), -torch.inf, dtype=torch.float64)
        for earlier in tries if not self.signs else ():
            own = [p[chosen] for p in earlier.permutations]
            same = [(a == b).all(1) for a, b in zip(own, orders, strict=True)]
            score = torch.where(torch.stack(same).all(0), earlier.score[chosen], score)
        new, signs = score.isneginf(), None
        if bool(new.any()):
            found = self._try(
                {n: t[new] for n, t in some.items()}, "frank-wolfe", [o[new] for o in orders]
            )
            orders = [_filled(o, new, f) for o, f in zip(orders, found.permutations, strict=True)]
            score, signs = _filled(score, new, found.score), found.signs
        return self._among_all("frank-wolfe", chosen, score, orders, signs)

    def _among_all(
        self,
        name: str,
        chosen: Tensor,
        score: Tensor,
        orders: Sequence[Tensor],
        signs: Sequence[Tensor] | None,
    ) -> _Try:
        """A try of some members as one of all."""
        nothing = torch.full(chosen.shape, -torch.inf, dtype=torch.float64)
        ones = None if signs is None else [s.new_ones(len(chosen), s.shape[1]) for s in signs]
        return _Try(
            name,
            _filled(nothing, chosen, score),
            [
                _filled(i, chosen, o)
                for i, o in zip(self._nowhere(len(chosen)), orders, strict=True)
            ],
            None
            if ones is None or signs is None
            else [_filled(o, chosen, s) for o, s in zip(ones, signs, strict=True)],
        )

    def _nowhere(self, members: int) -> list[Tensor]:
        return [p.repeat(members, 1) for p in identity(self.plan.sym)]

    def _try(self, networks: Params, name: str, start: Sequence[Tensor] | None) -> _Try:
        """Ascend from some permutations, or once through the network where there are none."""
        members, at_once = stack_size(networks), max(1, _AT_ONCE // max(1, self.plan.pairs))
        parts = [
            self._try_some(
                {n: t[k : k + at_once] for n, t in networks.items()},
                name,
                None if start is None else [p[k : k + at_once] for p in start],
            )
            for k in range(0, members, at_once)
        ]
        if len(parts) == 1:
            return parts[0]
        signs = None
        if self.signs:
            signs = [torch.cat(rows) for rows in zip(*(p.signs or () for p in parts), strict=True)]
        orders = [torch.cat(rows) for rows in zip(*(p.permutations for p in parts), strict=True)]
        return _Try(name, torch.cat([p.score for p in parts]), orders, signs)

    def _try_some(self, networks: Params, name: str, start: Sequence[Tensor] | None) -> _Try:
        sym, members = self.plan.sym, stack_size(networks)
        flips = [torch.ones(members, g.units) for g in sym.signs] if self.signs else None
        ascent = Ascent(self.plan, networks, self.reference, flips)
        generator = torch.Generator().manual_seed(self.seed)
        first = self._nowhere(members) if start is None else start
        permutations = ascent.run(first, generator, self.max_sweeps, start is None)
        if not ascent.settled.all():
            _log.warning(
                "match: coordinate ascent is still improving after %d sweeps.", self.max_sweeps
            )
        return _Try(name, ascent.score(), permutations, ascent.signs)

    def _random(self, generator: torch.Generator) -> list[Tensor]:
        """Random permutations; blocks that have tensors of their own stay in their places."""
        groups = self.plan.sym.permutations
        orders = random_permutations(self.plan.sym, generator)
        pairs = zip(groups, orders, strict=True)
        return [torch.arange(g.units) if g.tensors else order for g, order in pairs]


def _filled(values: Tensor, where: Tensor, new: Tensor) -> Tensor:
    """A copy with other values for some members."""
    values = values.clone()
    values[where] = new
    return values


def _agree(tries: Sequence[_Try], members: int, asked: bool) -> Tensor:
    """Whether the first and the last try reach the same, so that more are not worth their time."""
    if not asked or len(tries) < 2:
        return torch.zeros(members, dtype=torch.bool)
    first, last = tries[0].score, tries[-1].score
    return (first - last).abs() <= _TIE * last.abs()


def _best(tries: Sequence[_Try]) -> tuple[_Try, tuple[str, ...]]:
    """Of every member the first try that nothing exceeds, and their names."""
    scores = torch.stack([t.score for t in tries])
    top = scores.amax(0)
    pick = (scores >= top - _TIE * top.abs()).int().argmax(0)
    every = torch.arange(len(pick))
    orders = [
        torch.stack(o)[pick, every] for o in zip(*(t.permutations for t in tries), strict=True)
    ]
    signs = None
    if tries[0].signs is not None:
        rows = zip(*(t.signs or () for t in tries), strict=True)
        signs = [torch.stack(s)[pick, every] for s in rows]
    names = tuple(tries[k].name for k in pick.tolist())
    return _Try("", scores[pick, every], orders, signs), names
