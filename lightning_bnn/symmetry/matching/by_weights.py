"""Matching by weights: every way that is tried for the members of a stack, and the best of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_bnn.params import Params, stack_size
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry.actions import flip, permute
from lightning_bnn.symmetry.elements import identity, random_permutations
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.branches import exchange_branches
from lightning_bnn.symmetry.matching.by_data import Data, starts_from_activations
from lightning_bnn.symmetry.matching.frank_wolfe import frank_wolfe
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.matching.relaxation import Relaxation
from lightning_bnn.symmetry.matching.result import MatchResult
from lightning_bnn.symmetry.matching.signatures import start_from_signatures

__all__ = ["ByWeights", "Search"]

_log = logging.getLogger(__name__)

ByWeights = Literal["best", "ascent", "frank-wolfe"]
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
    settled: Tensor


class Search:
    """One way of looking for permutations, for several networks and one reference."""

    def __init__(
        self, plan: Plan, reference: Params, restarts: int, signs: bool, seed: int, max_sweeps: int
    ) -> None:
        self.plan, self.reference, self.restarts = plan, reference, restarts
        self.signs, self.seed, self.max_sweeps = signs, seed, max_sweeps

    def result(self, networks: Params, method: ByWeights, data: Data | None) -> MatchResult:
        """The best of what the method tries, for every member of a stack."""
        tries = self.run(networks, method, data)
        best, methods = _best(tries)
        best = self._finished(networks, best)
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
            _objectives(tries),
        )

    def _finished(self, networks: Params, best: _Try) -> _Try:
        """Every member where nothing is left to gain but by rounding."""
        at_once = max(1, _AT_ONCE // 2 // max(1, self.plan.pairs))
        orders = [p.clone() for p in best.permutations]
        flips = None if best.signs is None else [s.clone() for s in best.signs]
        for k in range(0, stack_size(networks), at_once):
            some = slice(k, k + at_once)
            signs = None if flips is None else [s[some] for s in flips]
            members = {n: t[some] for n, t in networks.items()}
            ascent = Ascent(self.plan, members, self.reference, signs)
            ascent.at([p[some] for p in orders])
            ascent.finish(torch.Generator().manual_seed(self.seed), self.max_sweeps)
            ends = [*ascent.now.permutations, *(ascent.signs or ())]
            for whole, part in zip([*orders, *(flips or ())], ends, strict=True):
                whole[some] = part
        return replace(best, permutations=orders, signs=flips)

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
        hopeless = torch.zeros(stack_size(networks), dtype=torch.bool)
        for by_signatures in (False, True) if joint else ():
            chosen = ~hopeless & ~_agree(tries, stack_size(networks), by_signatures)
            if bool(chosen.any()):
                found, lost = self._jointly(relaxation, networks, chosen, by_signatures, tries)
                tries.append(found)
                hopeless[chosen] = lost
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
    ) -> tuple[_Try, Tensor]:
        """What Frank-Wolfe finds, from the point that prefers nothing or from signatures.

        Ascent finishes it, but where that is what an earlier try has ended with. Also says for
        which of the chosen members the start told something that has led nowhere.
        """
        some = {n: t[chosen] for n, t in networks.items()}
        both = (some, self.reference)
        every, goal = ({n: _real(w[n]) for n in relaxation.pieces} for w in both)
        start = start_from_signatures(relaxation, every, goal) if by_signatures else None
        known = [self._resting(t, chosen) for t in tries]
        corners = [(relaxation.orders(orders), at) for orders, at in known]
        walk = frank_wolfe(relaxation, every, goal, start, corners)
        orders = relaxation.elements(walk.orders)
        score = torch.full((len(orders[0]),), -torch.inf, dtype=torch.float64)
        for (own, at), earlier in zip(known, tries, strict=True):
            same = torch.stack([(a == b).all(1) for a, b in zip(own, orders, strict=True)]).all(0)
            score = torch.where(same & at, earlier.score[chosen], score)
        new = score.isneginf() & ~walk.lost
        settled, signs = ~new, self._unflipped(len(score))
        if bool(new.any()):
            going = {n: t[new] for n, t in some.items()}
            end = self._try(going, "frank-wolfe", [o[new] for o in orders])
            orders = [_filled(o, new, f) for o, f in zip(orders, end.permutations, strict=True)]
            score, settled = _filled(score, new, end.score), _filled(settled, new, end.settled)
            signs = signs and [
                _filled(s, new, f) for s, f in zip(signs, end.signs or (), strict=True)
            ]
        found = self._among_all(_Try("frank-wolfe", score, orders, signs, settled), chosen)
        return found, walk.lost & ~walk.blind

    def _resting(self, earlier: _Try, chosen: Tensor) -> tuple[list[Tensor], Tensor]:
        """Where a try has left some members, and for which no ascent leads on from there."""
        exact = not self.signs and not any(map(self.plan.sees_itself, self.plan.families))
        at = earlier.settled[chosen] & exact & earlier.score[chosen].isfinite()
        return [p[chosen] for p in earlier.permutations], at

    def _among_all(self, found: _Try, chosen: Tensor) -> _Try:
        """A try of some members as one of all."""
        members, signs = len(chosen), self._unflipped(len(chosen))
        score = torch.full((members,), -torch.inf, dtype=torch.float64)
        pairs = zip(self._nowhere(members), found.permutations, strict=True)
        if signs is not None:
            pairs_of_signs = zip(signs, found.signs or (), strict=True)
            signs = [_filled(o, chosen, s) for o, s in pairs_of_signs]
        return _Try(
            found.name,
            _filled(score, chosen, found.score),
            [_filled(start, chosen, order) for start, order in pairs],
            signs,
            _filled(torch.zeros(members, dtype=torch.bool), chosen, found.settled),
        )

    def _unflipped(self, members: int) -> list[Tensor] | None:
        """Signs that flip no unit, if units may be flipped."""
        return [torch.ones(members, g.units) for g in self.plan.sym.signs] if self.signs else None

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
        score, settled = (
            torch.cat(x) for x in zip(*((p.score, p.settled) for p in parts), strict=True)
        )
        return _Try(name, score, orders, signs, settled)

    def _try_some(self, networks: Params, name: str, start: Sequence[Tensor] | None) -> _Try:
        members = stack_size(networks)
        flips = self._unflipped(members)
        ascent = Ascent(self.plan, networks, self.reference, flips)
        generator = torch.Generator().manual_seed(self.seed)
        first = self._nowhere(members) if start is None else start
        ascent.run(first, generator, self.max_sweeps, start is None)
        exchange_branches(ascent, generator, self.max_sweeps)
        if not ascent.settled.all():
            _log.warning(
                "match: coordinate ascent is still improving after %d sweeps.", self.max_sweeps
            )
        settled = torch.from_numpy(ascent.settled)
        return _Try(name, ascent.score(), ascent.now.permutations, ascent.signs, settled)

    def _random(self, generator: torch.Generator) -> list[Tensor]:
        """Random permutations; blocks that have tensors of their own stay in their places."""
        groups = self.plan.sym.permutations
        orders = random_permutations(self.plan.sym, generator)
        pairs = zip(groups, orders, strict=True)
        return [torch.arange(g.units) if g.tensors else order for g, order in pairs]


def _real(w: Tensor) -> Tensor:
    return w if w.dtype == torch.float64 else w.float()


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
    return last.isfinite() & ((first - last).abs() <= _TIE * last.abs())


def _objectives(tries: Sequence[_Try]) -> dict[str, Tensor]:
    """Of every way the best that any of its tries has reached."""
    scores = {
        name: torch.stack([t.score for t in tries if t.name == name]).amax(0)
        for name in dict.fromkeys(t.name for t in tries)
    }
    return {name: score.where(score.isfinite(), torch.nan) for name, score in scores.items()}


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
    settled = torch.stack([t.settled for t in tries])[pick, every]
    return _Try("", scores[pick, every], orders, signs, settled), names
