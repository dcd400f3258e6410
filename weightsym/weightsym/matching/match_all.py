"""Everything that brings a network to another: permutations of units and heads, and matrices."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from weightsym.groups.element import Element, Values
from weightsym.groups.elements import identity
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_one_network
from weightsym.matching.activations import match_activations
from weightsym.matching.ascent import is_sure
from weightsym.matching.channels import By, ChannelMoments, ChannelView, distance, view_of
from weightsym.matching.interpolation import Loss
from weightsym.matching.learned import HalfWay, Learning, learn, parted
from weightsym.matching.match import Moves, match, ordered
from weightsym.matching.matrices import SpaceMap, all_pairs, least_squares, nearest
from weightsym.matching.moved import Moved
from weightsym.matching.plan import assign
from weightsym.networks.devices import at_least_single
from weightsym.params import Params

Frame = Literal["plain", "reference", "mixing"]
"""As they are, by permutations and signs, or by matrices as well: methods of `weightsym merge`."""
_PATIENCE = 8  # rounds without a smaller distance: heads are exchanged to and fro
_ROUNDS, SWEEPS = 20, 50
_FEW = 3  # steps to matrices that are near, or where nothing is near
_STEEPEST = 1e6
"""Condition of a matrix that is on its way to a limit which none reaches: of spaces without full
rank, whose channels may shrink."""


@dataclass(frozen=True, eq=False)
class FullMatch(Moves):
    """An element that brings a network, or every member of a stack, close to a reference.

    Attributes:
        element: ``found.element(params)`` is the network in the frame of the reference.
        before: distance of the weights to those of the reference, before.
        after: the same afterwards.

    >>> from weightsym import params as P
    >>> from weightsym import discover, match_all
    >>> adapter = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 8))
    >>> sym, stack = discover(adapter, torch.randn(8, 8)), P.populate(adapter, 2)
    >>> found = match_all(*P.unstack(stack), sym)
    >>> bool(found.after < found.before), found.matrices[0].shape
    (True, torch.Size([1, 3, 3]))
    """

    before: Tensor
    after: Tensor

    @property
    def members(self) -> Sequence[int]:
        """The number of networks of a stack, nothing for one network."""
        return self.before.shape

    def __str__(self) -> str:
        """Counts of what has moved, and the distance of weights before and after."""
        before, after = float(self.before.mean()), float(self.after.mean())
        groups = f"{len(self.permutations)} permutations, {len(self.matrices)} groups of matrices"
        return f"{groups}: distance of weights {before:.4g} before, {after:.4g} after"


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
    sweeps: int = SWEEPS,
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
    >>> back = found.element(turned)
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
            ends.insert(0, Element(sym))
            if permuting:
                ends.insert(1, match(member, reference, sym).element)
        before = distance(member, reference, sym.compared)
        every = [distance(Moved(member, end), reference, sym.compared) for end in ends]
        best = min(range(len(ends)), key=lambda k: float(every[k]))
        elements.append(ends[best])
        apart.append((before, every[best]))
    element = Element.joined(elements, [1] * len(elements)) if stacked else elements[0]
    before, after = (torch.stack(d) if stacked else d[0] for d in zip(*apart, strict=True))
    return FullMatch(element, before, after)


def with_matrices(
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    sym: Symmetries,
    placed: Collection[int],
    turned: Collection[int],
    least: float,
) -> Element:
    """The element that exchanges heads and mixes channels, where other units are in order.

    Args:
        params: one network that has been checked.
        reference: the network to come close to.
        sym: what `discover` returned.
        placed: the groups of permutations that stay.
        turned: the groups of rotations that stay.
        least: share of the distance, which the last round takes no more off.
    """
    view = ChannelView(sym, turned=frozenset(turned))
    pair = Pair(view, SpaceMap(sym, frozenset(placed)), params, reference)
    pair.run(SWEEPS, least=least)
    return pair.element


def in_frame(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], sym: Symmetries, method: Frame, seed: int = 0
) -> Element:
    """Find the element that brings a network to another by a method of `weightsym merge`.

    Args:
        a: the network that moves, in memory or on disk.
        b: the network to come close to.
        sym: what `discover` returned.
        method: plain moves nothing.
        seed: of the order from which units are matched.
    """
    if method not in get_args(Frame):
        raise ValueError(f"`method` must be one of {', '.join(get_args(Frame))}, got {method!r}.")
    if method == "mixing":
        return match_all(a, b, sym).element
    return match(a, b, sym, signs=True, seed=seed).element if method != "plain" else Element(sym)


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
        self.params = Moved(view.standing(params), start or Element(self.sym))
        rounding = [torch.finfo(params[n].dtype).eps for n in self.sym.compared]
        self.sure, self.apart, self.least = False, math.inf, 0.0
        self.decided = set[int]()
        self.still = max(rounding, default=1e-16) ** 0.6

    @property
    def element(self) -> Element:
        """What has brought the network where it stands."""
        return self.params.element

    def run(
        self, sweeps: int, anchored: bool = True, permuting: bool = True, least: float = 0.0
    ) -> None:
        """Repeat rounds until nothing moves, and refine the closest (by weights) or last network.

        Args:
            sweeps: at most so many.
            anchored: begin with what anchors streams, wherever the network stands.
            permuting: reorder units and heads as well.
            least: share of the distance, which the last round takes no more off.
        """
        best, closest, since = self.element, self._apart(), 0
        apart, self.least = closest, least
        for number in range(sweeps):
            still = self._round(anchored and number == 0, permuting) < self.still
            apart = self._apart()
            since = 0 if apart < closest * (1 - 1e-4) else since + 1
            still |= least > 0 and apart > closest * (1 - least)
            if self.channels is not None or apart < closest:
                best, closest = self.element, apart
            if still or since == _PATIENCE or (self.sure and self.view.is_large):
                break
        if self.channels is None and apart > closest:
            self.params.stand(best)
        self._refine(closest)

    @property
    def is_near(self) -> bool:
        """True if the networks are nearer to each other than most are to nothing."""
        goal = (at_least_single(self.goal[n]) for n in self.sym.compared)
        sizes = [torch.linalg.vector_norm(w).double() for w in goal]
        return self.apart < float(torch.stack(sizes).norm()) if sizes else True

    def _apart(self) -> float:
        noted = self.params.noted
        for name in self.sym.compared - noted.keys():
            noted[name] = float(distance(self.params, self.goal, [name])) ** 2
        return math.sqrt(math.fsum(noted.values()))

    def _round(self, first: bool, permuting: bool) -> float:
        """Turn streams, permute, mix all else, and return the size of the change."""
        before, sure = self.element.permutations, False
        turned = self._turn(self.view.streams, first)
        if permuting:
            if first or self.channels is None or self.spaces.tangled:
                step, sure = self._hidden_units()
                self._permute(step)
            if self.channels is not None and self.spaces.tangled:
                self.channels, self.everywhere = self.view.activations(
                    self._as_given(), self.reference
                )
            self.sure = self._exchange() and sure
        same = all(map(torch.equal, before, self.element.permutations))
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
            before, self.apart = self.element, apart
            for k, group in enumerate(self.sym.linear):
                if group.kind == "general":
                    pair = self._moments(k) if by_weights else self._moments(k).shares
                    eye = torch.eye(group.size).to(pair.moving).expand(group.spaces, -1, -1)
                    steps = _FEW if self.least else _ROUNDS
                    step = least_squares(eye, pair.moving, pair.paired, steps)
                    total = step @ self.element.matrices_of(k).to(step)
                    reached = torch.linalg.cond(total) < _STEEPEST
                    self._mix(k, torch.where(reached[:, None, None], step, eye))
                elif by_weights and k not in self.view.turned:
                    self._turn([k])
            apart = self._apart()
            if by_weights and apart > self.apart:  # numbers of planes are balanced
                self.params.stand(before)
            elif not by_weights:
                self.apart = apart
            if apart > self.apart * (1 - max(self.least, 1e-4)):
                break
        self.apart = min(apart, self.apart)

    def _mix(self, k: int, step: Tensor) -> float:
        """Mix the channels of one group, and return the distance of the matrices from one."""
        values: Values = {"linear": [step if j == k else None for j in range(len(self.sym.linear))]}
        names = self.sym.moved_by(self.sym.linear[k])
        self.params.move(Element.of_values(self.sym, values, step, names))
        for moments in (self.channels, self.everywhere):
            if moments is not None:
                moments[k] = moments[k].mixed(step)
        return float((step - torch.eye(step.shape[-1]).to(step)).abs().max())

    # -------------------------------------------------------- permutations
    def _permute(self, orders: Sequence[Tensor | None]) -> None:
        """Permute the network with the moments of its spaces."""
        step = Element.of_values(self.sym, {"permutations": orders})
        if not step.moving:
            return
        self.params.move(step)
        spaces = self.spaces.orders(step)
        self.channels, self.everywhere = (
            None if every is None else [m.reordered(o) for m, o in zip(every, spaces, strict=True)]
            for every in (self.channels, self.everywhere)
        )

    def _hidden_units(self) -> tuple[list[Tensor], bool]:
        """The best permutations of what lies outside of spaces, and True if they are sure."""
        result, groups, sure = identity(self.sym), self.spaces.others, True
        if not groups:
            return result, True
        reduced, view = self.spaces.reduced, self.view
        if view.network is None:
            pair = self.params, self.goal, reduced
            found, sure = ordered(*pair, False, 0, self.least)
            orders: Sequence[Tensor] = found.permutations
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
        network, like = self.element.on_some(dict(self.given)), self.reference
        return {n: t.to(like[n].dtype) if n in like else t for n, t in network.items()}

    def _exchange(self) -> bool:
        """Exchange heads by the best that can be had inside each pair, and tell if that is sure.

        With a least gain, what lies outside of heads stays, and so do heads beyond doubt.
        """
        sure = True
        for group, spaces in self.spaces.blocks.items():
            if group in self.decided:
                continue
            similarity = torch.stack(
                [self._similarity(k, matrices) for k, matrices in spaces.items()]
            ).sum(0)
            step = identity(self.sym)
            step[group] = assign(similarity)
            table, chosen = similarity.cpu(), step[group][:, None]
            picked = table.gather(1, chosen).flatten().numpy()
            beyond_doubt = bool(is_sure(table.numpy(), picked, table.amax(1).numpy()))
            sure &= beyond_doubt
            self.decided |= {group} if beyond_doubt and self.least else set()
            self._permute(step)
        return sure

    def _similarity(self, k: int, spaces: Tensor) -> Tensor:
        """Of every pair of heads, as a share of what the reference has with itself."""
        moments = self.view.moments(k, self.params, self.goal, self.everywhere, pairs=True)
        values, spaces = all_pairs(self.sym.linear[k], moments), spaces.to(moments.moving.device)
        return values[spaces[:, None], spaces[None]].sum(-1)


# ------------------------------------------------------------ learning
def learn_match(
    start: FullMatch,
    params: Params,
    reference: Params,
    sym: Symmetries,
    model: nn.Module,
    batches: Sequence[tuple[Any, Any]],
    *,
    loss: Loss = nn.functional.cross_entropy,
    learning: Learning | None = None,
    seed: int = 0,
) -> FullMatch:
    r"""Lower the loss half way between two networks over the group elements that join them.

    .. math:: \min_{g} \; L(\tfrac12 (a + g b))

    Heads stay where the start has put them. The element with the least loss on batches that were
    held back is kept, be it the start.

    Args:
        start: what `match_all` has found, usually by activations.
        params: the network that moves.
        reference: the network that stays.
        sym: what `discover` returned.
        model: gives the computation; it runs in evaluation mode and is left untouched. Statistics
            of BatchNorm are those of the batch.
        batches: pairs of input and target.
        loss: mean loss of a batch.
        learning: how to learn.
        seed: of the order of batches, and of those that are held back.

    >>> from weightsym import params as P
    >>> from weightsym import Learning, discover, interpolate, learn_match, match_all
    >>> mse, x = torch.nn.functional.mse_loss, torch.randn(64, 8)
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 8))
    >>> sym, (a, b) = discover(net, x), P.unstack(P.populate(net, 2))
    >>> start = match_all(a, b, sym)
    >>> how = Learning(steps=25)
    >>> found = learn_match(start, a, b, sym, net, [(x, x)] * 2, loss=mse, learning=how)
    >>> half_way = [interpolate(b, match.element(a), 0.5) for match in (start, found)]
    >>> bool(mse(P.apply(net, half_way[1], x), x) <= mse(P.apply(net, half_way[0], x), x))
    True
    """
    if not isinstance(start, FullMatch):
        raise ValueError(f"`start` must be what `match_all` returns, got {type(start).__name__}.")
    check_one_network(reference, sym, "reference")
    check_one_network(params, sym, "params")
    if not (sym.permutations or sym.linear):
        return start
    learning = learning or Learning()
    teaching, judging = parted(batches, learning.held_back, seed)
    half_way = HalfWay(model, reference, loss, judging)
    element, _ = learn(params, half_way, teaching, start.element, learning, seed)
    return FullMatch(
        element, start.before, distance(Moved(params, element), reference, sym.compared)
    )
