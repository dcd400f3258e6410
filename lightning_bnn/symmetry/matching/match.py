"""The permutations that bring a network closest to another by its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.params import Params, stack, unstack
from lightning_bnn.symmetry.actions import flip, permute
from lightning_bnn.symmetry.elements import identity, random_permutations
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.frank_wolfe import frank_wolfe
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.matching.relaxation import Relaxation
from lightning_bnn.symmetry.matching.result import MatchResult
from lightning_bnn.symmetry.validation import check_finite, check_one_network, check_params

__all__ = ["Method", "match"]

Method = Literal["best", "ascent", "frank-wolfe"]


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
) -> MatchResult:
    r"""Permutations after which a network is closest to a reference: largest inner product.

    Coordinate ascent goes through the network once from the input to the output, comparing only
    with what is already matched, and then sweeps in random order until no group changes. Where the
    input anchors nothing (residual streams) it gets stuck; Frank-Wolfe moves all groups at once
    between permutations, from the point that prefers none, and coordinate ascent finishes its
    answer. Blocks (heads, convolution groups) are matched together with their inside.

    References:
        Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth, Hayase, Srinivasa,
        2023)
        C2M3: Cycle-Consistent Multi-Model Merging (Crisostomi et al., 2024)

    Args:
        params: one network, or a stack whose members are matched one by one.
        reference: the network to come close to.
        sym: what `discover` returned.
        method: ``"ascent"``, ``"frank-wolfe"``, or ``"best"``: the better of both, and the first
            alone where no two groups share a tensor, as it is exact there.
        restarts: further tries from random permutations; the best is kept.
        signs: flip units as well, where a network lets them be flipped.
        seed: of the sweeps and restarts.
        max_sweeps: sweeps per try.

    Returns:
        One permutation per group, for `permute`, with the objective and the method that won.
    """
    if method not in get_args(Method):
        raise ValueError(f"`method` must be one of {', '.join(get_args(Method))}, got {method!r}.")
    if restarts < 0 or max_sweeps < 1:
        raise ValueError(
            f"`restarts` must be at least 0 and `max_sweeps` at least 1, got {restarts} and "
            f"{max_sweeps}."
        )
    check_one_network(reference, sym, "reference")
    check_finite(reference, sym, "reference")
    stacked = check_params(params, sym)
    check_finite(params, sym)
    search = _Search(Plan(sym), reference, restarts, signs, seed, max_sweeps)
    members = unstack(params) if stacked else [params]
    found = search.run(members, method)
    moved = [
        permute(flip(m, sym, s) if s else m, sym, p)
        for m, (p, s, _) in zip(members, found, strict=True)
    ]
    return _result(search.plan, members, moved, reference, found, stacked)


Found = tuple[list[Tensor], list[Tensor] | None, str]


class _Search:
    """One way of looking for permutations, for several networks and one reference."""

    def __init__(
        self, plan: Plan, reference: Params, restarts: int, signs: bool, seed: int, max_sweeps: int
    ) -> None:
        self.plan, self.reference, self.restarts = plan, reference, restarts
        self.signs, self.seed, self.max_sweeps = signs, seed, max_sweeps

    def run(self, members: Sequence[Params], method: Method) -> list[Found]:
        """The best of what the method tries, for every network."""
        joint = method == "frank-wolfe" or (method == "best" and self.plan.couples)
        starts = self._joint_starts(members) if joint and self.plan.families else None
        found = []
        for k, member in enumerate(members):
            ways = {} if starts is None else {"frank-wolfe": starts[k]}
            found.append(self._best(member, ways, alone=method != "frank-wolfe" or starts is None))
        return found

    def _joint_starts(self, members: Sequence[Params]) -> list[list[Tensor]] | None:
        relaxation = Relaxation(self.plan)
        if not relaxation.pieces:
            return None
        orders = frank_wolfe(relaxation, stack(members), self.reference)
        return [relaxation.element([o[m] for o in orders]) for m in range(len(members))]

    def _best(self, member: Params, ways: dict[str, list[Tensor]], alone: bool) -> Found:
        sym, generator = self.plan.sym, torch.Generator().manual_seed(self.seed)
        flips = [torch.ones(g.units) for g in sym.signs] if self.signs else None
        starts: list[tuple[str, list[Tensor] | None]] = [("ascent", None)] if alone else []
        starts += ways.items()
        starts += [("ascent", random_permutations(sym, generator)) for _ in range(self.restarts)]
        best, top = None, -float("inf")
        for name, start in starts:
            ascent = Ascent(self.plan, member, self.reference, flips)
            first = identity(sym) if start is None else start
            permutations = ascent.run(first, generator, self.max_sweeps, start is None)
            if best is None or ascent.score() > top + 1e-7 * abs(top):
                best, top = (permutations, ascent.signs, name), ascent.score()
        assert best is not None
        return best


def _result(
    plan: Plan,
    members: Sequence[Params],
    moved: Sequence[Params],
    reference: Params,
    found: Sequence[Found],
    stacked: bool,
) -> MatchResult:
    objective = torch.stack([plan.similarity(m, reference) for m in moved])
    bound = torch.stack([plan.bound(m, reference) for m in members])
    permutations, signs, methods = zip(*found, strict=True)
    every = [torch.stack(rows) for rows in zip(*permutations, strict=True)]
    flips = None if signs[0] is None else [torch.stack(rows) for rows in zip(*signs, strict=True)]
    if stacked:
        chosen = None if flips is None else tuple(flips)
        return MatchResult(tuple(every), objective, bound, methods, chosen)
    one = tuple(rows[0] for rows in every)
    flip_one = None if flips is None else tuple(rows[0] for rows in flips)
    return MatchResult(one, objective[0], bound[0], methods[0], flip_one)
