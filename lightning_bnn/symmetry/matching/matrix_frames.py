"""Networks in one frame by permutations and matrices: each to the mean of the others."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from lightning_bnn.params import Params, unstack, weighted_mean
from lightning_bnn.params import stack as stack_networks
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.alignment import Alignment, distance_to_mean
from lightning_bnn.symmetry.matching.channel_views import View, distance
from lightning_bnn.symmetry.matching.full_elements import (
    FullElement,
    as_the_first,
    moved,
    together,
)
from lightning_bnn.symmetry.matching.match_all import match_all
from lightning_bnn.symmetry.matching.moving_spaces import SpaceMap, isometric
from lightning_bnn.symmetry.matching.whole_pair import WholePair
from lightning_bnn.symmetry.mixing import identity_mixings

__all__ = ["align_with_matrices"]

_log = logging.getLogger(__name__)

_STILL, _ROUNDING = 1e-4, 1e-12
"""A sweep that takes less off the spread than these shares of it and of all squares is the last."""


def align_with_matrices(
    stack: Params,
    sym: Symmetries,
    alone: Alignment,
    sweeps: int,
    seed: int,
    counts: Tensor,
) -> Alignment:
    """All to the first; then each to the mean of the others, where that brings all closer.

    Args:
        stack: networks of one kind.
        sym: what `discover` returned.
        alone: the frame of permutations without matrices, by the same method; a joint one is where
            sweeps start as well.
        sweeps: rounds over all networks at most.
        seed: of the order of the networks.
        counts: how often each network counts in the mean.
    """
    first = match_all(stack, {n: t[0] for n, t in stack.items()}, sym)
    starts = [(list(first.permutations), list(first.matrices))]
    if alone.method == "joint":
        still = [m.repeat(len(counts), 1, 1, 1) for m in identity_mixings(sym)]
        starts.append((list(alone), still))
    frames = list[_Frame]()
    while starts and not any(frame.spread[-1] <= frame.rounding for frame in frames):
        frames.append(_Frame(stack, sym, starts.pop(0), counts))
        if alone.method == "joint":
            frames[-1].run(sweeps, seed)
    best = min(frames, key=lambda frame: frame.spread[-1])
    permutations, matrices = as_the_first(together(best.elements), sym)
    given = distance_to_mean(stack, sorted(sym.touched), counts)
    spread = (given, *best.spread)
    return Alignment(tuple(permutations), spread, alone.method, matrices=tuple(matrices))


class _Frame:
    """Networks on their way to each other.

    The first one moves by what keeps distances only: sizes that all networks share change the
    distance to their mean without making them more alike, and those of the first one stay.
    """

    def __init__(self, stack: Params, sym: Symmetries, start: FullElement, counts: Tensor) -> None:
        self.sym, self.counts = sym, counts
        self.members = [
            {n: t.double() if n in sym.touched else t for n, t in member.items()}
            for member in unstack(stack)
        ]
        rows = range(len(self.members))
        self.elements = [([p[m] for p in start[0]], [g[m] for g in start[1]]) for m in rows]
        pairs = zip(self.members, self.elements, strict=True)
        self.standing = [moved(member, sym, element) for member, element in pairs]
        every, rigid = ((View(s), SpaceMap(s)) for s in (sym, isometric(sym)))
        self.maps = [rigid if m == 0 else every for m in rows]
        self.spread = [self._spread()]
        squares = sum(float(m[n].square().sum()) for m in self.members for n in sym.touched)
        self.rounding = _ROUNDING * squares

    def run(self, sweeps: int, seed: int) -> None:
        """Sweep until hardly anything is gained."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(sweeps):
            for m in torch.randperm(len(self.members), generator=generator).tolist():
                self._visit(m)
            self.spread.append(self._spread())
            before, after = self.spread[-2:]
            if before - after <= max(_STILL * before, self.rounding):
                return
        _log.warning("align: networks still move after %d sweeps.", sweeps)

    def _visit(self, m: int) -> None:
        """Bring one network closer to the mean of the others, from where it stands."""
        mean = self._mean_without(m)
        if mean is None:
            return
        view, space_map = self.maps[m]
        pair = WholePair(view, self.members[m], mean, space_map)
        pair.stand(self.elements[m])
        pair.run(1, anew=False)
        new = moved(self.members[m], self.sym, pair.element)
        before, after = (float(distance(w, mean, self.sym)) for w in (self.standing[m], new))
        if after < before * (1 - 1e-9):
            self.standing[m], self.elements[m] = new, pair.element

    def _mean_without(self, m: int) -> Params | None:
        """The mean of all networks but one; nothing where no other counts."""
        others = [*self.standing[:m], *self.standing[m + 1 :]]
        left = torch.cat([self.counts[:m], self.counts[m + 1 :]])
        return weighted_mean(stack_networks(others), left) if float(left.sum()) > 0 else None

    def _spread(self) -> float:
        names = sorted(self.sym.touched)
        return distance_to_mean(stack_networks(self.standing), names, self.counts)
