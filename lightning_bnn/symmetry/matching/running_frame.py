"""One network after another in the frame of a running mean; a cheap test says when to look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.params import Params, is_stacked, stack_size
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry.actions import flip, permute, rescale
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.align import Scales
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.branches import exchange_branches
from lightning_bnn.symmetry.matching.match import match
from lightning_bnn.symmetry.matching.match_all import match_all
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.matching.unmoved import Apart, Nearness
from lightning_bnn.symmetry.min_mass import min_mass

__all__ = ["RunningFrame"]

_FURTHER = 1.5  # times as far from the mean as when it was looked at last: worth a look
_UNSEEN = 0.05  # of the mean: so much may come from networks that nobody has looked at
_SWEEPS = 100


class RunningFrame:
    """Brings networks of one run to the frame of their running mean, one after the other.

    Where the last element of the group still fits, nothing is searched: first by distances alone
    (`Nearness`), then, if these do not tell, by one assignment per group. Only a network that one
    of these assignments moves is matched anew; the new element is taken if its inner product with
    the mean is larger. As long as a run stays where it is, that element is the identity, and the
    network is returned untouched.

    Where distances never tell, as with units that are nearly alike, assignments are solved for some
    networks only: as soon as those since the last one make up a twentieth of the mean, or when a
    unit is half as far again from it as then. So all are looked at while weights are large.

    Args:
        sym: what `discover` returned.
        signs: flip units as well, where the network lets them be flipped.
        scales: ``"min-mass"`` gives every network the least mass over all rescalings first.
        mixing: match heads, streams and adapters by matrices at every call, see `match_all`;
            without signs and scales.
        seed: of the search.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import RunningFrame, discover, permute
    >>> net = mlp(2, [4], 1)
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> frame = RunningFrame(sym)
    >>> mean = frame.begin(w)
    >>> moved = frame.bring(permute(w, sym, [torch.tensor([1, 0, 2, 3])]), mean, weight=0.5)
    >>> torch.equal(moved["1.weight"], w["1.weight"]), frame.moved_units
    (True, 2)
    """

    def __init__(
        self,
        sym: Symmetries,
        *,
        signs: bool = True,
        scales: Scales | None = None,
        mixing: bool = False,
        seed: int = 0,
    ) -> None:
        if mixing and scales:
            raise ValueError("`mixing` does not go with `scales`: matrices hold both.")
        self.sym, self.scales, self.seed = sym, scales, seed
        self.mixing = mixing and bool(sym.linear)
        self.signs = signs and bool(sym.signs) and not self.mixing
        self.plan = Plan(sym)
        self.nearness = Nearness(self.plan, self.signs)
        self.calls, self.looks, self.matches = 0, 0, 0
        """How many networks came, how many the distances could not clear, how many were matched."""
        self._orders: list[Tensor] | None = None
        self._flips: list[Tensor] | None = None
        self._apart: Apart | None = None
        self._looked_at: list[Tensor] | None = None
        self._unseen = 0.0

    @property
    def moved_units(self) -> int:
        """How many units the last network had in other places, or flipped, than the mean has."""
        if self._orders is None:
            return 0
        places = sum(int((p != torch.arange(p.shape[-1])).sum()) for p in self._orders)
        return places + sum(int((s < 0).sum()) for s in self._flips or ())

    @torch.no_grad()
    def begin(self, params: Params) -> Params:
        """The first network, with whose weights a mean begins."""
        self.calls += 1
        return self._scaled(params)

    @torch.no_grad()
    def bring(self, params: Params, mean: Params, weight: int | float) -> Params:
        """A network in the frame of its mean, or every member of a stack in that of its own.

        Args:
            params: the network.
            mean: what it is averaged with, in the same precision.
            weight: with what share the network enters the mean afterwards.
        """
        self.calls += 1
        if not (self.sym.permutations or self.sym.scalings or self.sym.linear):
            return params
        stacked = is_stacked(params, self.sym.shapes)
        if not stacked:
            params, mean = ({n: t[None] for n, t in w.items()} for w in (params, mean))
        moved = self._scaled(params)
        moved = self._mixed(moved, mean) if self.mixing else self._moved(moved, mean, weight)
        return moved if stacked else {n: t[0] for n, t in moved.items()}

    def _scaled(self, params: Params) -> Params:
        if self.scales is None or not self.sym.scalings:
            return params
        return rescale(params, self.sym, min_mass(params, self.sym).scales)

    def _mixed(self, params: Params, means: Params) -> Params:
        """By matrices: of every member what brings it closer, if anything does."""
        moved = []
        for k in range(stack_size(params)):
            one, mean = ({n: t[k] for n, t in w.items()} for w in (params, means))
            moved.append(match_all(one, mean, self.sym).apply(one, self.sym))
            self.matches += 1
        return {n: torch.stack([w[n] for w in moved]).to(t.dtype) for n, t in params.items()}

    # -------------------------------------------------------- permutations
    def _moved(self, params: Params, means: Params, weight: int | float) -> Params:
        if not self.plan.families:
            return params
        moved = self._placed(params)
        distances = self.nearness.distances(moved, means)
        if not self._cleared(distances, means, weight) and self._look(params, means, distances):
            moved = self._placed(params)
            distances = self.nearness.distances(moved, means)
            self._looked_at = distances
        assert self._apart is not None
        for drift, distance in zip(self._apart.drift, distances, strict=True):
            drift += weight * distance
        return moved

    def _placed(self, params: Params) -> Params:
        """The networks in the places that were found last."""
        if self._orders is None:
            return params
        flipped = params if self._flips is None else flip(params, self.sym, self._flips)
        return permute(flipped, self.sym, self._orders)

    def _cleared(self, distances: list[Tensor], means: Params, weight: int | float) -> bool:
        """Whether distances say that nothing has moved, or what was seen last is good enough."""
        if self._apart is not None:
            unclear = self._unclear(distances, self._apart)
            if not any(bool(units.any()) for units in unclear):
                return True
            self._unseen += weight
            if self._unseen < _UNSEEN and not self._further(distances, unclear):
                return True
        self._apart = self.nearness.apart(means)
        unclear = self._unclear(distances, self._apart)
        if any(bool(units.any()) for units in unclear):
            return False
        self._looked_at, self._unseen = distances, 0.0
        return True

    def _unclear(self, distances: list[Tensor], apart: Apart) -> list[Tensor]:
        """Which units may be nearer to another place; branches move as wholes, unseen."""
        if self.plan.branches:
            return [torch.ones_like(d, dtype=torch.bool) for d in distances]
        return self.nearness.unclear(distances, apart)

    def _further(self, distances: list[Tensor], unclear: list[Tensor]) -> bool:
        """Whether such a unit is much further from the mean than when it was looked at."""
        if self._looked_at is None:
            return True
        every = zip(distances, self._looked_at, unclear, strict=True)
        return any(bool(((now > _FURTHER * then) & units).any()) for now, then, units in every)

    def _look(self, params: Params, means: Params, distances: list[Tensor]) -> bool:
        """Solve the assignments; whether any network has found a better place."""
        self.looks, self._looked_at, self._unseen = self.looks + 1, distances, 0.0
        members = stack_size(params)
        orders = self._orders or [p.repeat(members, 1) for p in identity(self.sym)]
        flips = self._flips
        if self.signs and flips is None:
            flips = [torch.ones(members, g.units) for g in self.sym.signs]
        compared = self.plan.compared
        goal = {n: means[n] for n in compared}
        ascent = Ascent(self.plan, {n: params[n] for n in compared}, goal, flips)
        ascent.at(orders)
        generator = keyed_generator(self.seed, "running frame", self.calls)
        ascent.climb(range(len(self.plan.families)), generator, _SWEEPS)
        exchange_branches(ascent, generator, _SWEEPS)
        pairs = [*zip(orders, ascent.now.permutations, strict=True)]
        pairs += [*zip(flips or (), ascent.signs or (), strict=True)]
        restless = torch.stack([(old != new).any(1) for old, new in pairs]).any(0)
        for member in restless.nonzero().flatten().tolist():
            self._match(ascent, params, means, member)
        if bool(restless.any()):
            self._orders, self._flips = list(ascent.now.permutations), ascent.signs
        return bool(restless.any())

    def _match(self, ascent: Ascent, params: Params, means: Params, member: int) -> None:
        """Let a member stand where a search from scratch ends, if that is closer to its mean."""
        self.matches += 1
        own, mean = ({n: t[member] for n, t in w.items()} for w in (params, means))
        found = match(own, mean, self.sym, signs=self.signs, seed=self.seed)
        if float(found.objective) > float(ascent.score()[member]) * (1 + 1e-7):
            for old, new in zip(ascent.now.permutations, found.permutations, strict=True):
                old[member] = new
            for old, new in zip(ascent.signs or (), found.signs or (), strict=True):
                old[member] = new

    # -------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """All that later networks depend on, and the counts."""
        apart = self._apart
        return {
            "calls": self.calls, "looks": self.looks, "matches": self.matches,
            "orders": self._orders, "flips": self._flips, "looked_at": self._looked_at,
            "unseen": self._unseen,
            "nearest": apart and apart.nearest, "drift": apart and apart.drift,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another frame of the same symmetries was."""
        self.calls, self.looks, self.matches = (state[n] for n in ("calls", "looks", "matches"))
        self._orders, self._flips = _copied(state["orders"]), _copied(state["flips"])
        self._looked_at, self._unseen = _copied(state["looked_at"]), state["unseen"]
        nearest, drift = _copied(state["nearest"]), _copied(state["drift"])
        self._apart = None if nearest is None or drift is None else Apart(nearest, drift)


def _copied(tensors: list[Tensor] | None) -> list[Tensor] | None:
    return None if tensors is None else [t.clone() for t in tensors]
