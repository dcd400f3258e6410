"""One network after another in the frame of a running mean, matched only where units have moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weightsym.actions import flip, permute
from weightsym.elements import identity
from weightsym.groups import Symmetries
from weightsym.matching.match import match
from weightsym.matching.plan import plan_of
from weightsym.params import Params, is_stacked, stack_size

__all__ = ["RunningFrame"]

_FURTHER = 1.5  # times as far from the mean as when it was looked at last: worth a look
_UNSEEN = 0.05  # of the mean: so much may come from networks that nobody has looked at


class RunningFrame:
    """Brings networks of one run to the frame of their running mean, one after the other.

    Where every unit is nearer to its own place than half of what separates that from the average of
    all units, nothing is searched: the last element of the group still fits. Otherwise the network
    is matched anew, and the new element is taken if its inner product with the mean is larger. As
    long as a run stays where it is, that element is the identity, and the network is returned
    untouched.

    Where units always are that far away, only some networks are matched: as soon as those since the
    last one make up a twentieth of the mean, or when such a unit is half as far again from it as
    then. So all are looked at while weights are large.

    Args:
        sym: what `discover` returned.
        seed: of the search.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import RunningFrame, discover, permute
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> frame = RunningFrame(sym)
    >>> moved = frame.bring(permute(w, sym, [torch.tensor([1, 0, 2, 3])]), w, weight=0.5)
    >>> torch.equal(moved["0.weight"], w["0.weight"]), frame.moved_units
    (True, 2)
    """

    def __init__(self, sym: Symmetries, *, seed: int = 0) -> None:
        self.sym, self.seed = sym, seed
        self.plan = plan_of(sym)
        self.calls, self.looks, self.matches = 0, 0, 0
        """Networks that came, that distances could not clear, and that were matched."""
        self._element: list[Tensor] | None = None
        self._looked_at: list[Tensor] | None = None
        self._unseen = 0.0

    @property
    def moved_units(self) -> int:
        """Number of units that the last network had in other places, or flipped."""
        orders, flips = self._parts()
        places = sum(int((p != torch.arange(p.shape[-1])).sum()) for p in orders)
        return places + sum(int((s < 0).sum()) for s in flips)

    @torch.no_grad()
    def bring(self, params: Params, mean: Params, weight: int | float) -> Params:
        """A network in the frame of its mean, or every member of a stack in that of its own.

        Args:
            params: the network.
            mean: what it is averaged with, in the same precision.
            weight: with what share the network enters the mean afterwards.
        """
        self.calls += 1
        if not self.plan.families:
            return params
        stacked = is_stacked(params, self.sym.shapes)
        if not stacked:
            params, mean = ({n: t[None] for n, t in w.items()} for w in (params, mean))
        moved = self._placed(params)
        far, self._unseen = self._far(moved, mean), self._unseen + weight
        if not any(bool(units.any()) for units in far):
            self._looked_at, self._unseen = far, 0.0
        elif self._looked_at is None or self._unseen >= _UNSEEN or self._further(far):
            self._search(params, moved, mean)
            moved = self._placed(params)
            self._looked_at, self._unseen = self._far(moved, mean), 0.0
        return moved if stacked else {n: t[0] for n, t in moved.items()}

    # -------------------------------------------------------- permutations
    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Permutations and flips of all members, as they were found last."""
        element, groups = self._element or [], len(self.sym.permutations)
        return element[:groups], element[groups:]

    def _placed(self, params: Params) -> Params:
        """The networks in the places that were found last."""
        orders, flips = self._parts()
        flipped = flip(params, self.sym, flips) if flips else params
        return permute(flipped, self.sym, orders) if orders else flipped

    def _far(self, networks: Params, means: Params) -> list[Tensor]:
        """Distances of units to the mean's, zero where they are near: ``(members, units)``.

        Units are vectors of all weights that enter and leave them.
        """
        places = [part for views in self.plan.views for part in views if part]
        names = {view.tensor for part in places for view in part}
        apart = {n: (networks[n] - means[n]).square() for n in names}
        result = []
        for part in places:
            distance = _sum([v.rows(apart[v.tensor]).sum(-1) for v in part])
            rows = [v.rows(means[v.tensor]) for v in part]
            around = _sum([(r - r.mean(1, keepdim=True)).square().sum(-1) for r in rows])
            result.append(torch.where(4 * distance > around, distance, 0).sqrt())
        return result

    def _further(self, far: list[Tensor]) -> bool:
        """Check for units much further from the mean than after the last search."""
        assert self._looked_at is not None
        pairs = zip(far, self._looked_at, strict=True)
        return any(bool((now > _FURTHER * then).any()) for now, then in pairs)

    def _search(self, params: Params, moved: Params, means: Params) -> None:
        """Match all members, and take what brings them closer than the places found last."""
        self.looks += 1
        members, matches = stack_size(params), self.matches
        element = [p.repeat(members, 1) for p in identity(self.sym)]
        element += [torch.ones(members, g.units) for g in self.sym.signs]
        if self._element is not None:
            element = [e.clone() for e in self._element]
        for m in range(members):
            moving, placed, mean = ({n: t[m] for n, t in w.items()} for w in (params, moved, means))
            matched = match(moving, mean, self.sym, signs=bool(self.sym.signs), seed=self.seed)
            before = self.plan.similarity(placed, mean)
            if bool(matched.objective > before + 1e-7 * before.abs()):
                self.matches += 1
                for mine, new in zip(element, matched.element, strict=True):
                    mine[m] = new
        if self.matches > matches:
            self._element = element

    # -------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """All that later networks depend on, and the counts."""
        return {
            "calls": self.calls, "looks": self.looks, "matches": self.matches,
            "element": self._element, "looked_at": self._looked_at, "unseen": self._unseen,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another frame of the same symmetries was."""
        self.calls, self.looks, self.matches = (state[n] for n in ("calls", "looks", "matches"))
        self._element, self._looked_at = (
            None if tensors is None else [t.clone() for t in tensors]
            for tensors in (state["element"], state["looked_at"])
        )
        self._unseen = state["unseen"]


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)
