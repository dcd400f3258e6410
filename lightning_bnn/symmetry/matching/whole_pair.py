"""A network that permutations and matrices together bring to a reference, round by round."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import permute_some
from lightning_bnn.symmetry.composition import compose
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.matching.activations import match_activations
from lightning_bnn.symmetry.matching.assignment import assign
from lightning_bnn.symmetry.matching.channel_views import View
from lightning_bnn.symmetry.matching.full_elements import FullElement, moved
from lightning_bnn.symmetry.matching.match import match
from lightning_bnn.symmetry.matching.mixings import Pair
from lightning_bnn.symmetry.matching.moving_spaces import Blocks, SpaceMap
from lightning_bnn.symmetry.matching.nearest import all_pairs, nearest

__all__ = ["WholePair"]

_PATIENCE = 8  # rounds without a smaller distance: heads are exchanged to and fro


class WholePair(Pair):
    """A network on its way to a reference, by permutations as well."""

    def __init__(self, view: View, params: Params, reference: Params, space_map: SpaceMap) -> None:
        super().__init__(view, params, reference)
        self.space_map, self.given = space_map, params
        self.permutations = identity(self.sym)

    @property
    def element(self) -> FullElement:
        """What has brought the network where it stands."""
        return self.permutations, self.matrices

    def stand(self, element: FullElement) -> None:
        """Go to where an element brings the network; where weights are compared."""
        self.permutations, self.matrices = element[0], [m.to(self.device) for m in element[1]]
        self.params = moved(self.view.standing(self.given), self.sym, element)

    def run(self, sweeps: int, anew: bool = True) -> None:
        """Rounds until nothing moves; by weights from the closest, by activations from the last.

        Args:
            sweeps: at most so many.
            anew: begin with what anchors streams, wherever the network stands.
        """
        best, least, since = self._here(), self.apart, 0
        for number in range(sweeps):
            still = self._round(first=anew and number == 0) < self.still
            since = 0 if self.apart < least * (1 - 1e-4) else since + 1
            if self.seen is not None or self.apart < least:
                best, least = self._here(), self.apart
            if still or since == _PATIENCE:
                break
        self.permutations, self.matrices, self.params = best
        self.refine()

    def swap(self, misfit: Callable[[Params], float], rounds: int) -> None:
        """Exchange any two heads where that lowers the misfit of the network half way."""
        least = misfit(self._as_given())
        for _ in range(rounds):
            before = least
            for blocks in self.space_map.blocks:
                units = self.sym.permutations[blocks.group].units
                for pair in itertools.combinations(range(units), 2):
                    kept = self._here(), self.seen, self.everywhere
                    self._swap(blocks, pair)
                    value = misfit(self._as_given())
                    if value < least:
                        least = value
                    else:
                        (self.permutations, self.matrices, self.params), *seen = kept
                        self.seen, self.everywhere = seen
            if not least < before:
                return

    def _swap(self, blocks: Blocks, pair: tuple[int, int]) -> None:
        """Exchange two heads, and mix the channels inside anew."""
        step = identity(self.sym)
        step[blocks.group][list(pair)] = step[blocks.group][list(reversed(pair))]
        self._permute(step)
        self.turn(list(blocks.spaces))
        self.refine(blocks.spaces)

    def _here(self) -> tuple[list[Tensor], list[Tensor], Params]:
        return list(self.permutations), list(self.matrices), self.params

    def _round(self, first: bool) -> float:
        before = self.permutations
        turned = self.turn(self.view.streams, first)
        if first or self.seen is None or self.space_map.tangled:
            self._permute(self._hidden_units())
        if self.seen is not None and self.space_map.tangled:
            self.seen, self.everywhere = self.view.activations(self._as_given(), self.reference)
        self._exchange()
        same = all(map(torch.equal, before, self.permutations))
        return max(turned, self.turn(self.view.rest), 0.0 if same else 1.0)

    def _permute(self, step: Sequence[Tensor]) -> None:
        """Permute what stands now; spaces take their matrices and moments along."""
        self.params = permute_some(self.params, self.sym, step)
        self.permutations = compose(self.permutations, step, self.sym)
        self.matrices = self.space_map.carried(self.matrices, step)
        orders = [spaces for spaces, _ in self.space_map.orders(step)]
        self.seen, self.everywhere = (
            None if seen is None else [m.reordered(o) for m, o in zip(seen, orders, strict=True)]
            for seen in (self.seen, self.everywhere)
        )

    def _hidden_units(self) -> list[Tensor]:
        """The best permutations of what lies outside of spaces."""
        result, groups = identity(self.sym), self.space_map.others
        if not groups:
            return result
        reduced, view = self.space_map.reduced, self.view
        if view.network is None:
            found = list(match(self.params, self.goal, reduced, method="ascent"))
        else:
            own = self._as_given()
            found = match_activations(view.network, own, self.reference, reduced, view.inputs)
        for k, order in zip(groups, found, strict=True):
            result[k] = order
        return result

    def _as_given(self) -> Params:
        """The network as it stands, with its own shifts, in the precision of the reference."""
        here, like = moved(self.given, self.sym, self.element), self.reference
        return {n: t.to(like[n].dtype) if n in like else t for n, t in here.items()}

    def _exchange(self) -> None:
        """Exchange heads by the best that can be had inside each pair of them."""
        for blocks in self.space_map.blocks:
            similarity = torch.stack([self._similarity(blocks, k) for k in blocks.spaces]).sum(0)
            step = identity(self.sym)
            step[blocks.group] = assign(similarity)
            self._permute(step)

    def _similarity(self, blocks: Blocks, k: int) -> Tensor:
        """Of every pair of heads, as a share of what the reference has with itself."""
        moments = self.view.moments(k, self.params, self.goal, self.everywhere)
        values = all_pairs(self.sym.linear[k], moments)
        spaces = blocks.spaces[k].to(values.device)
        own = nearest(self.sym.linear[k], moments.goal, moments.goal, moments.goal).similarity
        return values[spaces[:, None], spaces[None]].sum(-1) / own.sum().clamp_min(1e-300)
