"""Everything that brings a network to another: permutations of units and heads, and matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weightsym.groups.elements import compose, identity, identity_mixings
from weightsym.groups.symmetries import Symmetries
from weightsym.matching.activations import match_activations
from weightsym.matching.ascent import is_sure
from weightsym.matching.channels import By, ChannelMoments, ChannelView, distance, view_of
from weightsym.matching.match import match, orders_by_ascent
from weightsym.matching.matrices import (
    Element,
    FullMatch,
    SpaceMap,
    all_pairs,
    least_squares,
    moved,
    nearest,
    together,
)
from weightsym.matching.plan import assign
from weightsym.matching.standing import Standing
from weightsym.networks.devices import at_least_single
from weightsym.params import Params

_PATIENCE = 8  # rounds without a smaller distance: heads are exchanged to and fro
_ROUNDS = 20
_STEEPEST = 1e6
"""Condition of a matrix that is on its way to a limit which none reaches: of spaces without full
rank, whose channels may shrink."""


@torch.no_grad()
def match_all(
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    sym: Symmetries,
    *,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    by: By = "weights",
    permuting: bool = True,
    sweeps: int = 50,
) -> FullMatch:
    r"""Bring a network to another by permutations and matrices together: for transformers.

    .. math:: \min_{\pi, G} \| G\, \pi\, \theta - \theta^* \|

    A round turns streams, permutes hidden units, exchanges heads by the best that can be had inside
    each pair of them, and mixes the channels inside. Rounds follow until nothing moves. By weights
    the network comes no farther from the reference than it was, and than `match` brings it. Norms
    with gains hold the stream fixed but for signs and permutations: fold them first, see
    `fold_norms`.

    Rotations are those of Procrustes, over all places of a group at once:

    .. math:: \max_R \; \mathrm{tr}\, R^T \sum_l B_l A_l^T

    with the channels :math:`A_l` of the network and :math:`B_l` of the reference. Where matrices
    are free, both networks are balanced first, see `canonicalise`, and a rotation leads from one
    balanced form to the other.

    References:
        Generalized Linear Mode Connectivity for Transformers (Theus et al., 2025)

    Args:
        params: one network, or a stack whose members are matched one by one.
        reference: the network to come close to.
        sym: what `discover` returned.
        model: gives the computation where activations are compared.
        batches: inputs, or tuples whose first element is the input.
        by: compare ``"weights"``, or ``"activations"``, which for networks that were trained apart
            lowers barriers far more. Where no linear map shows the channels, weights are compared,
            with a warning.
        permuting: exchange units and heads as well; without, matrices alone are found.
        sweeps: at most so many rounds; of weights, the closest is kept.

    >>> from weightsym import params as P
    >>> from weightsym import discover, match_all, mix, random_mixings
    >>> norm = torch.nn.RMSNorm(4, elementwise_affine=False)
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), norm, torch.nn.Linear(4, 8))
    >>> sym, w = discover(net, torch.randn(8, 8)), P.of(net)
    >>> turned = mix(w, sym, random_mixings(sym))
    >>> found = match_all(turned, w, sym)
    >>> back = found.apply(turned, sym)
    >>> all(torch.allclose(back[name], w[name], atol=1e-5) for name in w)
    True
    """
    view, members, stacked = view_of(params, reference, sym, model, batches, by, sweeps)
    spaces, elements = SpaceMap(sym), list[Element]()
    apart = list[tuple[Tensor, Tensor]]()
    for member in members:
        pair = Pair(view, spaces, member, reference)
        pair.run(sweeps, permuting=permuting)
        ends = [pair.element]
        if by == "weights" and not pair.is_near:
            ends.insert(0, _nothing(sym))
            if permuting:
                ends.insert(1, (list(match(member, reference, sym)), identity_mixings(sym)))
        before = distance(member, reference, sym.compared)
        every = [distance(standing(member, sym, e), reference, sym.compared) for e in ends]
        best = min(range(len(ends)), key=lambda k: float(every[k]))
        elements.append(ends[best])
        apart.append((before, every[best]))
    element = together(elements) if stacked else elements[0]
    before, after = (torch.stack(d) if stacked else d[0] for d in zip(*apart, strict=True))
    return FullMatch(tuple(element[0]), tuple(element[1]), before, after)


def _nothing(sym: Symmetries) -> Element:
    return identity(sym), identity_mixings(sym)


def standing(params: Mapping[str, Tensor], sym: Symmetries, element: Element) -> Standing:
    """A network after permutations and matrices, tensor by tensor.

    Args:
        params: one network.
        sym: what `discover` returned.
        element: of the group.
    """
    network = Standing(params, sym)
    network.permutations = element[0]
    for k, matrices in enumerate(element[1]):
        if not torch.equal(
            matrices, torch.eye(matrices.shape[-1]).to(matrices).expand_as(matrices)
        ):
            network.mix(k, matrices)
    return network


# ------------------------------------------------------------ rounds
class Pair:
    """A network on its way to a reference, by permutations and matrices, round by round.

    Both stand where shifts leave nothing free (`View.standing`): no element of the group changes
    that.

    Args:
        view: how channels are compared.
        spaces: how permutations and matrices go together.
        params: the network as it is given.
        reference: the other one.
        start: an element to begin with.
    """

    def __init__(
        self,
        view: ChannelView,
        spaces: SpaceMap,
        params: Mapping[str, Tensor],
        reference: Mapping[str, Tensor],
        start: Element | None = None,
    ) -> None:
        self.view, self.spaces, self.sym = view, spaces, view.sym
        self.given, self.reference, self.goal = params, reference, view.standing(reference)
        self.channels, self.everywhere = view.activations(params, reference)
        device = next(iter(params.values())).device
        self.permutations, matrices = _nothing(self.sym) if start is None else start
        self.matrices = [m.to(device) for m in matrices]
        self.params = standing(view.standing(params), self.sym, self.element)
        rounding = [torch.finfo(params[n].dtype).eps for n in self.sym.compared]
        self.sure, self.apart = False, math.inf
        self.still = max(rounding, default=1e-16) ** 0.6

    @property
    def element(self) -> Element:
        """The permutations and matrices that have brought the network where it stands."""
        return self.permutations, self.matrices

    def run(self, sweeps: int, anchored: bool = True, permuting: bool = True) -> None:
        """Repeat rounds until nothing moves, and refine the closest (by weights) or last network.

        Args:
            sweeps: at most so many.
            anchored: begin with what anchors streams, wherever the network stands.
            permuting: reorder units and heads as well.
        """
        best, least, since = self._state(), self._apart(), 0
        apart = least
        for number in range(sweeps):
            still = self._round(anchored and number == 0, permuting) < self.still
            apart = self._apart()
            since = 0 if apart < least * (1 - 1e-4) else since + 1
            if self.channels is not None or apart < least:
                best, least = self._state(), apart
            if still or since == _PATIENCE or (self.sure and self.view.is_large):
                break
        if self.channels is None and apart > least:
            self._return_to(best)
        self._refine(least)

    @property
    def is_near(self) -> bool:
        """True if the networks are nearer to each other than most are to nothing."""
        goal = (at_least_single(self.goal[n]) for n in self.sym.compared)
        sizes = [torch.linalg.vector_norm(w).double() for w in goal]
        return self.apart < float(torch.stack(sizes).norm()) if sizes else True

    def _state(self) -> Element:
        return self.permutations, list(self.matrices)

    def _return_to(self, element: Element) -> None:
        self.permutations, self.matrices = element[0], list(element[1])
        self.params = standing(self.params.given, self.sym, element)

    def _apart(self) -> float:
        return float(distance(self.params, self.goal, self.sym.compared))

    def _round(self, first: bool, permuting: bool) -> float:
        """Turn streams, permute, mix all else, and return the size of the change."""
        before, sure = self.permutations, False
        turned = self._turn(self.view.streams, first)
        if permuting:
            if first or self.channels is None or self.spaces.tangled:
                orders, sure = self._hidden_units()
                self._permute(orders)
            if self.channels is not None and self.spaces.tangled:
                self.channels, self.everywhere = self.view.activations(
                    self._as_given(), self.reference
                )
            self.sure = self._exchange() and sure
        same = all(map(torch.equal, before, self.permutations))
        return max(turned, self._turn(self.view.rest), 0.0 if same else 1.0)

    # -------------------------------------------------------- matrices
    def _turn(self, groups: Sequence[int], first: bool = False) -> float:
        """Mix the channels of some groups, and return the distance of the matrices from one."""
        change = 0.0
        for k in groups:
            pair = self._moments(k, first)
            step = nearest(self.sym.linear[k], pair.moving, pair.goal, pair.paired).matrices
            change = max(change, self._mix(k, step))
        return change

    def _moments(self, k: int, first: bool = False) -> ChannelMoments:
        return self.view.moments(k, self.params, self.goal, self.channels, first)

    def _refine(self, apart: float) -> None:
        """Replace balanced forms by least squares, where matrices are free, from what was found.

        Weights alternate with rotations of streams as long as that lowers the distance.

        Args:
            apart: the distance before.
        """
        by_weights = self.channels is None
        for _ in range(_ROUNDS if by_weights else 1):
            before, self.apart = self._state(), apart
            for k, group in enumerate(self.sym.linear):
                if group.kind == "general":
                    pair = self._moments(k) if by_weights else self._moments(k).shares
                    eye = torch.eye(group.size).to(pair.moving).expand(group.spaces, -1, -1)
                    step = least_squares(eye, pair.moving, pair.paired)
                    reached = torch.linalg.cond(step @ self.matrices[k]) < _STEEPEST
                    self._mix(k, torch.where(reached[:, None, None], step, eye))
                elif by_weights:
                    self._turn([k])
            apart = self._apart()
            if by_weights and apart > self.apart:  # numbers of planes are balanced
                self._return_to(before)
            elif not by_weights:
                self.apart = apart
            if apart > self.apart * (1 - 1e-4):
                break
        self.apart = min(apart, self.apart)

    def _mix(self, k: int, step: Tensor) -> float:
        """Mix the channels of one group, and return the distance of the matrices from one."""
        self.matrices[k] = step @ self.matrices[k]
        self.params.mix(k, self.matrices[k])
        for moments in (self.channels, self.everywhere):
            if moments is not None:
                moments[k] = moments[k].mixed(step)
        return float((step - torch.eye(step.shape[-1]).to(step)).abs().max())

    # -------------------------------------------------------- permutations
    def _permute(self, step: Sequence[Tensor]) -> None:
        """Permute the network with the matrices and moments of its spaces."""
        if all(torch.equal(p, torch.arange(len(p))) for p in step):
            return
        self.permutations = compose(self.permutations, step, self.sym)
        self.matrices = self.spaces.carried(self.matrices, step)
        self.params = standing(self.params.given, self.sym, self.element)
        orders = [spaces for spaces, _ in self.spaces.orders(step)]
        self.channels, self.everywhere = (
            None if every is None else [m.reordered(o) for m, o in zip(every, orders, strict=True)]
            for every in (self.channels, self.everywhere)
        )

    def _hidden_units(self) -> tuple[list[Tensor], bool]:
        """The best permutations of what lies outside of spaces, and True if they are sure."""
        result, groups, sure = identity(self.sym), self.spaces.others, True
        if not groups:
            return result, True
        reduced, view = self.spaces.reduced, self.view
        if view.network is None:
            orders, sure = orders_by_ascent(self.params.stack, self.goal, reduced)
        else:
            moving = self._as_given()
            orders = match_activations(
                view.network, moving, dict(self.reference), reduced, view.inputs
            )
            sure = False
        for k, order in zip(groups, orders, strict=True):
            result[k] = order
        return result, sure

    def _as_given(self) -> Params:
        """The network as it stands, with its own shifts, in the precision of the reference."""
        network, like = moved(dict(self.given), self.sym, self.element), self.reference
        return {n: t.to(like[n].dtype) if n in like else t for n, t in network.items()}

    def _exchange(self) -> bool:
        """Exchange heads by the best that can be had inside each pair, and tell if that is sure."""
        sure = True
        for group, spaces in self.spaces.blocks.items():
            similarity = torch.stack(
                [self._similarity(k, matrices) for k, matrices in spaces.items()]
            ).sum(0)
            step = identity(self.sym)
            step[group] = assign(similarity)
            table, chosen = similarity.cpu(), step[group][:, None]
            picked = table.gather(1, chosen).flatten().numpy()
            sure = is_sure(table.numpy(), picked, table.amax(1).numpy()) and sure
            self._permute(step)
        return sure

    def _similarity(self, k: int, spaces: Tensor) -> Tensor:
        """Of every pair of heads, as a share of what the reference has with itself."""
        moments = self.view.moments(k, self.params, self.goal, self.everywhere)
        values, spaces = all_pairs(self.sym.linear[k], moments), spaces.to(moments.moving.device)
        moving = nearest(self.sym.linear[k], moments.goal, moments.goal, moments.goal).similarity
        return values[spaces[:, None], spaces[None]].sum(-1) / moving.sum().clamp_min(1e-300)
