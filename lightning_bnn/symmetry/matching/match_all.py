"""Everything that brings a network to another: permutations of units and heads, and matrices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import permute, permute_some
from lightning_bnn.symmetry.composition import compose
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.activations import match_activations
from lightning_bnn.symmetry.matching.assignment import assign
from lightning_bnn.symmetry.matching.half_way import HalfWay
from lightning_bnn.symmetry.matching.match import match
from lightning_bnn.symmetry.matching.mixings import By, Pair, View, distance, view_of
from lightning_bnn.symmetry.matching.moving_spaces import Blocks, SpaceMap
from lightning_bnn.symmetry.matching.nearest import all_pairs, nearest
from lightning_bnn.symmetry.matching.watching import first_inputs
from lightning_bnn.symmetry.mixing import mix

__all__ = ["FullMatch", "match_all"]


_JUDGES = 1  # batches
_PATIENCE = 8  # rounds without a smaller distance: heads are exchanged to and fro


@dataclass(frozen=True, eq=False)
class FullMatch:
    """Permutations and matrices that bring a network, or every member of a stack, to a reference.

    Attributes:
        permutations: one per group of ``sym.permutations``, for `permute`; they act first.
        matrices: one tensor per group of ``sym.linear``, for `mix`.
        before: distance of the weights to those of the reference, before.
        after: the same afterwards.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.symmetry import discover, match_all
    >>> adapter = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 8))
    >>> sym, stack = discover(adapter, torch.randn(8, 8)), P.populate(adapter, 2)
    >>> found = match_all(*P.unstack(stack), sym)
    >>> bool(found.after < found.before), found.matrices[0].shape
    (True, torch.Size([1, 3, 3]))
    """

    permutations: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]
    before: Tensor
    after: Tensor

    def apply(self, params: Params, sym: Symmetries) -> Params:
        """The network or stack in the frame of the reference; its function stays."""
        return mix(permute(params, sym, self.permutations), sym, self.matrices)

    def __str__(self) -> str:
        """What has moved, and how much closer the weights are."""
        before, after = float(self.before.mean()), float(self.after.mean())
        groups = f"{len(self.permutations)} permutations, {len(self.matrices)} groups of matrices"
        return f"{groups}: distance of weights {before:.4g} before, {after:.4g} after"


@torch.no_grad()
def match_all(
    params: Params,
    reference: Params,
    sym: Symmetries,
    *,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    by: By = "weights",
    sweeps: int = 50,
    swaps: int = 0,
) -> FullMatch:
    r"""Bring a network to another by permutations and matrices together: for transformers.

    .. math:: \min_{\pi, G} \| G\, \pi\, \theta - \theta^* \|

    A round turns streams, permutes hidden units, exchanges heads by the best that can be had inside
    each pair of them, and mixes the channels inside. Rounds follow until nothing moves. Norms with
    gains hold the stream fixed but for signs and permutations: fold them first, see `fold_norms`.

    References:
        Generalized Linear Mode Connectivity for Transformers (Theus et al., 2025)

    Args:
        params: one network, or a stack whose members are matched one by one.
        reference: the network to come close to.
        sym: what `discover` returned.
        model: gives the computation where activations are compared.
        batches: inputs, or tuples whose first element is the input.
        by: compare ``"weights"`` or ``"activations"``, see `match_mixings`.
        sweeps: at most so many rounds; of weights, the closest is kept.
        swaps: at most so many rounds in which any two heads of a layer are exchanged, and stay so
            if the outputs of the network half way then come closer to the mean of those of both;
            with a model and batches. A try costs a run of the first batch.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.symmetry import discover, match_all, mix, random_mixings
    >>> norm = torch.nn.RMSNorm(4, elementwise_affine=False)
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), norm, torch.nn.Linear(4, 8))
    >>> sym, w = discover(net, torch.randn(8, 8)), P.of(net)
    >>> turned = mix(w, sym, random_mixings(sym))
    >>> found = match_all(turned, w, sym)
    >>> back = found.apply(turned, sym)
    >>> all(torch.allclose(back[name], w[name], atol=1e-5) for name in w)
    True
    """
    if swaps and batches is not None and not isinstance(batches, Tensor):
        batches = list(batches)  # they are looked at twice
    halfway = _halfway(model, reference, batches, swaps)
    view, members, stacked = view_of(params, reference, sym, model, batches, by, sweeps)
    space_map = SpaceMap(sym)
    found = []
    for member in members:
        whole = _Whole(view, member, reference, space_map)
        whole.run(sweeps)
        if halfway is not None:
            whole.swap(halfway.to(member), swaps)
        found.append((whole.permutations, whole.matrices))
    permutations, matrices = (
        [torch.stack(rows) for rows in zip(*parts, strict=True)]
        for parts in zip(*found, strict=True)
    )
    if not stacked:
        permutations, matrices = ([t[0] for t in part] for part in (permutations, matrices))
    moved = mix(permute(params, sym, permutations), sym, matrices)
    before, after = (distance(p, reference, sym) for p in (params, moved))
    return FullMatch(tuple(permutations), tuple(matrices), before, after)


def _halfway(
    model: nn.Module | None, reference: Params, batches: Iterable[Any] | None, swaps: int
) -> HalfWay | None:
    """What judges exchanges of heads, if there are to be any."""
    if not swaps:
        return None
    if swaps < 0 or model is None or batches is None:
        raise ValueError(
            f"`swaps` must be at least 0, and need `model` and `batches`, got {swaps}."
        )
    return HalfWay(model, reference, first_inputs(batches)[:_JUDGES])


class _Whole(Pair):
    """A network on its way to a reference, by permutations as well."""

    def __init__(self, view: View, params: Params, reference: Params, space_map: SpaceMap) -> None:
        super().__init__(view, params, reference)
        self.space_map = space_map
        self.permutations = identity(self.sym)

    def run(self, sweeps: int) -> None:
        """Rounds until nothing moves; by weights from the closest, by activations from the last."""
        best, least, since = self._here(), float("inf"), 0
        for number in range(sweeps):
            moved = self._round(first=number == 0)
            apart = float(distance(self.params, self.reference, self.sym))
            since = 0 if apart < least * (1 - 1e-4) else since + 1
            if self.seen is not None or apart < least:
                best, least = self._here(), apart
            if moved < self.still or since == _PATIENCE:
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
        moved = self.turn(self.view.streams, first)
        if first or self.seen is None or self.space_map.tangled:
            self._permute(self._hidden_units())
        if self.seen is not None and self.space_map.tangled:
            self.seen, self.everywhere = self.view.activations(self._as_given(), self.reference)
        self._exchange()
        same = all(map(torch.equal, before, self.permutations))
        return max(moved, self.turn(self.view.rest), 0.0 if same else 1.0)

    def _permute(self, step: Sequence[Tensor]) -> None:
        """Permute what stands now; spaces take their matrices and moments along."""
        orders = self.space_map.space_orders(step)
        self.params = permute_some(self.params, self.sym, step)
        self.permutations = compose(self.permutations, step, self.sym)
        self.matrices = [m[o] for m, o in zip(self.matrices, orders, strict=True)]
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
            found = list(match(self.params, self.reference, reduced, method="ascent"))
        else:
            own = self._as_given()
            found = match_activations(view.network, own, self.reference, reduced, view.inputs)
        for k, order in zip(groups, found, strict=True):
            result[k] = order
        return result

    def _as_given(self) -> Params:
        """The network as it stands, in the precision of the reference."""
        like = self.reference
        return {n: t.to(like[n].dtype) if n in like else t for n, t in self.params.items()}

    def _exchange(self) -> None:
        """Exchange heads by the best that can be had inside each pair of them."""
        for blocks in self.space_map.blocks:
            similarity = torch.stack([self._similarity(blocks, k) for k in blocks.spaces]).sum(0)
            step = identity(self.sym)
            step[blocks.group] = assign(similarity)
            self._permute(step)

    def _similarity(self, blocks: Blocks, k: int) -> Tensor:
        """Of every pair of heads, as a share of what the reference has with itself."""
        moments = self.view.moments(k, self.params, self.reference, self.everywhere)
        values = all_pairs(self.sym.linear[k], moments)
        spaces = blocks.spaces[k].to(values.device)
        own = nearest(self.sym.linear[k], moments.goal, moments.goal, moments.goal).similarity
        return values[spaces[:, None], spaces[None]].sum(-1) / own.sum().clamp_min(1e-300)
