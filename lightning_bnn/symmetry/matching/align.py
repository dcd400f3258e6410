"""Many networks in one frame: each is matched to the sum of the others, until none moves."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.params import Params, stack_size, unstack
from lightning_bnn.symmetry.actions import flip, permute, rescale
from lightning_bnn.symmetry.composition import compose, invert
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.match import match
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.min_mass import min_mass
from lightning_bnn.symmetry.validation import check_finite, check_params

__all__ = ["AlignMethod", "Alignment", "align", "cycle_error"]

AlignMethod = Literal["joint", "reference"]
Scales = Literal["min-mass"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Alignment(Sequence[Tensor]):
    """What brings every network of a stack into a common frame; a sequence of its permutations.

    Attributes:
        permutations: one per group, ``(members, units)``.
        spread: after every sweep, the sum of squared distances of the networks to their mean, over
            the tensors that permutations reach; first as they were given.
        method: ``"joint"`` or ``"reference"``.
        signs: flips that come before the permutations, where they were asked for.
        scales: positive factors that come before the flips, where they were asked for.
    """

    permutations: tuple[Tensor, ...]
    spread: tuple[float, ...]
    method: AlignMethod
    signs: tuple[Tensor, ...] | None = None
    scales: tuple[Tensor, ...] | None = None

    def apply(self, stack: Params, sym: Symmetries) -> Params:
        """The stack in the common frame."""
        stack = stack if self.scales is None else rescale(stack, sym, self.scales)
        stack = stack if self.signs is None else flip(stack, sym, self.signs)
        return permute(stack, sym, self)

    def between(self, a: int, b: int, sym: Symmetries) -> list[Tensor]:
        """Permutations that bring network ``a`` into the frame of network ``b``."""
        to_common = [p[a] for p in self.permutations]
        return compose(to_common, invert([p[b] for p in self.permutations], sym), sym)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        """The permutations of one group, one row per network."""
        return self.permutations[index]

    def __len__(self) -> int:
        """The number of groups that are permuted."""
        return len(self.permutations)

    def __str__(self) -> str:
        """The method and what it does to the spread."""
        return (
            f"{self.method}: squared distance to the mean {self.spread[0]:.4g} -> "
            f"{self.spread[-1]:.4g} in {len(self.spread) - 1} sweeps"
        )


@torch.no_grad()
def align(
    stack: Params,
    sym: Symmetries,
    *,
    method: AlignMethod = "joint",
    scales: Scales | None = None,
    signs: bool = False,
    sweeps: int = 50,
    seed: int = 0,
) -> Alignment:
    r"""Bring all networks of a stack into one frame.

    .. math:: \min_{g_1 \dots g_N} \sum_k \| g_k \theta_k - \tfrac1N \sum_l g_l \theta_l \|^2

    Every network is matched to the sum of the others, one after the other, until none moves; the
    squared distance to the mean falls with every step. It begins once with the networks as they are
    and once with all matched to the first, and keeps the better end. Any two networks are then
    matched by way of the common frame, which is that of the first one: around every cycle the
    permutations cancel.

    References:
        C2M3: Cycle-Consistent Multi-Model Merging (Crisostomi et al., 2024)

    Args:
        stack: networks of one architecture.
        sym: what `discover` returned.
        method: ``"joint"``, or ``"reference"``: all are matched to the first only.
        scales: ``"min-mass"`` gives every network the least mass over all rescalings first.
        signs: flip units as well, where a network lets them be flipped.
        sweeps: rounds over all networks at most.
        seed: of the order of the networks within a round.
    """
    if method not in get_args(AlignMethod):
        raise ValueError(f"`method` must be 'joint' or 'reference', got {method!r}.")
    if scales not in (None, *get_args(Scales)):
        raise ValueError(f"`scales` must be 'min-mass' or None, got {scales!r}.")
    if sweeps < 1:
        raise ValueError(f"`sweeps` must be at least 1, got {sweeps}.")
    if not check_params(stack, sym, "stack"):
        raise ValueError("`stack` must be a stack of networks, not one network.")
    check_finite(stack, sym, "stack")
    factors = min_mass(stack, sym).scales if scales and sym.scalings else None
    scaled = stack if factors is None else rescale(stack, sym, factors)
    joint = _Joint(Plan(sym), scaled, signs, seed)
    best = joint.run(*joint.at_the_first(), sweeps if method == "joint" else 0)
    if method == "joint":
        other = joint.run(*joint.as_given(), sweeps)
        best = other if other[2][-1] < best[2][-1] else best
    permutations, flips, spread = best
    before = joint.spread(unstack(stack))
    permutations = _as_the_first(permutations, sym)
    if flips is not None:
        flips = _flipped_as_the_first(permutations, flips, joint.plan)
    return Alignment(
        tuple(permutations),
        (before, *spread),
        method,
        None if flips is None else tuple(flips),
        factors,
    )


def _as_the_first(permutations: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    """The same alignment in the frame of the first network."""
    return compose(permutations, invert([p[0] for p in permutations], sym), sym)


def _flipped_as_the_first(
    permutations: Sequence[Tensor], flips: Sequence[Tensor], plan: Plan
) -> list[Tensor]:
    """Common flips after which those of the first network are none."""
    result = [f.clone() for f in flips]
    for g, mirror in enumerate(plan.mirrors):
        if mirror is not None:
            common = flips[mirror][:1].expand_as(permutations[g])
            result[mirror].scatter_(
                1, permutations[g], flips[mirror].gather(1, permutations[g]) * common
            )
    return result


Elements = list[list[Tensor]]
Flips = list[list[Tensor]] | None


class _Joint:
    """Leave-one-out sweeps over the networks of one stack."""

    def __init__(self, plan: Plan, stack: Params, signs: bool, seed: int) -> None:
        self.plan, self.sym, self.seed = plan, plan.sym, seed
        self.stack, self.signs, self.size = stack, signs, stack_size(stack)
        self.members = unstack({n: stack[n] for n in plan.compared})
        self.norms = sum(self._square(m) for m in self.members)

    def as_given(self) -> tuple[Elements, Flips]:
        """Every network where it stands."""
        one = [torch.ones(g.units) for g in self.sym.signs]
        flips = [[s.clone() for s in one] for _ in self.members] if self.signs else None
        return [identity(self.sym) for _ in self.members], flips

    def at_the_first(self) -> tuple[Elements, Flips]:
        """Every network matched to the first."""
        first = {n: t[0] for n, t in self.stack.items()}
        found = match(self.stack, first, self.sym, signs=self.signs, seed=self.seed)
        every = range(self.size)
        flips = None if found.signs is None else [[s[m] for s in found.signs] for m in every]
        return [[p[m] for p in found] for m in every], flips

    def run(
        self, elements: Elements, flips: Flips, sweeps: int
    ) -> tuple[list[Tensor], list[Tensor] | None, list[float]]:
        """Sweep until no network moves; elements, flips and the spread after every sweep."""
        generator = torch.Generator().manual_seed(self.seed)
        ascents = [
            Ascent(self.plan, member, {}, None if flips is None else flips[m])
            for m, member in enumerate(self.members)
        ]
        current = [a.at(e) for a, e in zip(ascents, elements, strict=True)]
        total = self._sum(current)
        spread = [self._spread_of(total)]
        pending = set(range(self.size)) if sweeps else set()
        for _ in range(sweeps):
            moved = False
            for m in torch.randperm(self.size, generator=generator).tolist():
                others = {n: t - current[m][n] for n, t in total.items()}
                new = ascents[m].towards(others, elements[m], generator)
                if new is None:
                    continue
                elements[m], moved = new, True
                total = {n: others[n] + ascents[m].current[n] for n in total}
                current[m] = {n: ascents[m].current[n] for n in total}
            total = self._sum(current)  # without the rounding of many differences
            spread.append(self._spread_of(total))
            pending = pending if moved else set()
            if not moved:
                break
        if pending:
            _log.warning("align: networks still move after %d sweeps.", sweeps)
        signs = None
        if flips is not None:
            signs = [
                torch.stack(rows) for rows in zip(*(a.signs or () for a in ascents), strict=True)
            ]
        return [torch.stack(rows) for rows in zip(*elements, strict=True)], signs, spread

    def spread(self, networks: Sequence[Params]) -> float:
        """Sum of squared distances to the mean."""
        chosen = [{n: w[n] for n in self.plan.compared} for w in networks]
        return sum(map(self._square, chosen)) - self._square(self._sum(chosen)) / len(chosen)

    def _spread_of(self, total: Params) -> float:
        return self.norms - self._square(total) / self.size

    @staticmethod
    def _sum(networks: Sequence[Params]) -> Params:
        return {n: torch.stack([w[n] for w in networks]).double().sum(0) for n in networks[0]}

    @staticmethod
    def _square(network: Params) -> float:
        return sum(float(t.double().square().sum()) for t in network.values())


def cycle_error(between: Mapping[tuple[int, int], Sequence[Tensor]], sym: Symmetries) -> float:
    """Share of units that do not come back to their place on the way round three networks.

    Args:
        between: for every ordered pair ``(a, b)``, permutations that bring ``a`` to ``b``, from
            `match` or from `Alignment.between`.
        sym: what `discover` returned.
    """
    networks = sorted({k for pair in between for k in pair})
    missing = [p for p in itertools.permutations(networks, 2) if p not in between]
    if len(networks) < 3 or missing:
        raise ValueError(
            "`between` must hold every ordered pair of at least three networks"
            + (f", {missing[0]} is missing." if missing else ".")
        )
    astray = units = 0
    for a, b, c in itertools.permutations(networks, 3):
        there = compose(between[a, b], between[b, c], sym)
        for order in compose(there, between[c, a], sym):
            astray += int((order != torch.arange(len(order))).sum())
            units += len(order)
    return astray / max(units, 1)
