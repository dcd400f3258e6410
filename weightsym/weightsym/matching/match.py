"""The permutations that bring a network closest to another, by its weights or by data."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn

from weightsym.groups.element import Element
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_pair, check_symmetries
from weightsym.matching.activations import by_activations, check_complete
from weightsym.matching.ascent import LARGE, SMALL, Ascent
from weightsym.matching.frank_wolfe import frank_wolfe, start_from_signatures
from weightsym.matching.interpolation import Loss
from weightsym.matching.learned import HalfWay, Learning, learn, parted
from weightsym.matching.moved import stack_of_one
from weightsym.matching.plan import Plan, plan_of
from weightsym.params import unstack

ByWeights = Literal["best", "ascent", "frank-wolfe"]
Method = Literal[ByWeights, "activations", "learned"]
Data = tuple[nn.Module, Iterable[Any]]

_log = logging.getLogger(__name__)
_TIE = 1e-7
_SWEEPS = 100  # per try at most
_NEAR = 0.5  # of what norms allow: two networks that have a common origin
_AT_ONCE = 2**21
"""Similarities of units that are held at once; networks beyond that wait for their turn."""


@dataclass(frozen=True, eq=False)
class Moves(Sequence[Tensor]):
    """An element that moves a network or a stack, as the sequence of its permutations.

    Attributes:
        element: of the group.
    """

    element: Element

    @property
    @abstractmethod
    def members(self) -> Sequence[int]:
        """The number of networks of a stack, nothing for one network."""

    @property
    def permutations(self) -> tuple[Tensor, ...]:
        """The order of the units of every group, for `permute`."""
        return tuple(p.expand(*self.members, -1) for p in self.element.permutations)

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Those that mix channels after the permutations, for `mix`."""
        return tuple(m.expand(*self.members, *m.shape[-3:]) for m in self.element.matrices)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        """The permutation of one group, or of several. Of a stack, one row per network."""
        return self.permutations[index]

    def __len__(self) -> int:
        """The number of groups that are permuted."""
        return len(self.permutations)


@dataclass(frozen=True, eq=False)
class MatchResult(Moves):
    """An element that brings a network, or every member of a stack, close to a reference.

    It is itself the sequence of its permutations: ``permute(params, sym, match(...))``.

    Attributes:
        element: ``found.element(params)`` is the network in the frame of the reference.
        objective: what the method maximises: the inner product of weights or of activations; of
            what is learnt, minus the loss at the midpoint on batches held back. One number, or one
            per member.
        method: how it was found; per member for a stack.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, match
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> found = match(w, w, sym)
    >>> found[0], found.method, found.objective > 0
    (tensor([0, 1, 2, 3, 4, 5, 6, 7]), 'ascent', tensor(True))
    """

    objective: Tensor
    method: str | tuple[str, ...]

    @property
    def members(self) -> Sequence[int]:
        """The number of networks of a stack, nothing for one network."""
        return self.objective.shape

    def single(self) -> MatchResult:
        """The result of the only member of a stack."""
        return MatchResult(self.element.of_members(0), self.objective[0], self.method[0])

    def __str__(self) -> str:
        """One line with method and objective."""
        methods = {self.method} if isinstance(self.method, str) else set(self.method)
        many = "" if self.objective.ndim == 0 else f" in the mean of {len(self.objective)} networks"
        names = " and ".join(sorted(methods))
        return f"{names}: objective {float(self.objective.mean()):.4g}{many}"


@torch.no_grad()
def match(
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    sym: Symmetries,
    *,
    method: Method = "best",
    signs: bool = False,
    seed: int = 0,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
    learning: Learning | None = None,
) -> MatchResult:
    r"""Permutations after which a network is closest to a reference: largest inner product.

    .. math:: \max_\pi\, \langle \pi\, \theta, \theta^* \rangle

    Coordinate ascent goes through the network once from the input to the output, comparing only
    with what is already matched, and then sweeps in random order until no group changes. Where the
    input anchors nothing (residual streams) it gets stuck; Frank-Wolfe moves all groups at once
    between permutations, from the point that prefers none, and coordinate ascent finishes its
    answer; a second run starts where sorted weights look alike. Blocks (heads, convolution groups)
    are matched together with their inside, and so are experts that are modules of their own, by
    weights only.

    Other methods look at data instead. ``"activations"`` maximises the inner products of hidden
    activations on batches, by one assignment per group. ``"learned"`` makes the loss at the
    midpoint small by gradients, and keeps the permutations with the smallest on batches that were
    held back; it begins with the better of ``"best"`` and ``"activations"``.

    References:
        Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth, Hayase, Srinivasa,
        2023)
        C2M3: Cycle-Consistent Multi-Model Merging (Crisostomi et al., 2024)

    Args:
        params: one network, or a stack whose members are matched one by one.
        reference: the network to come close to.
        sym: what `discover` returned.
        method: ``"ascent"``, ``"frank-wolfe"``, or ``"best"``: the better of both and, if there are
            batches, of ascent from where activations match; ascent alone where no two groups share
            a tensor, as it is exact there. Frank-Wolfe is given up where three times its slope does
            not reach what ascent has found: large networks with nothing in common. Or one of those
            by data.
        signs: flip whole units as well; by weights only. Gated units, and units before a norm, can
            be flipped in some of their places only, and stay as they are.
        seed: of the sweeps, and of what is learnt.
        model: gives the computation, for what looks at data.
        batches: inputs, or tuples whose first element is the input; to learn, a list of (input,
            target) pairs.
        loss: mean loss of a batch, to learn.
        learning: how to learn.

    Returns:
        An element of the group, with the objective and the method that won. By weights the
        objective is the inner product of weights; by activations the sum of what is compared; of
        what is learnt, minus the loss at the midpoint on the batches held back.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, match, permute, random_permutations
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> copy = permute(w, sym, random_permutations(sym))
    >>> back = permute(copy, sym, match(copy, w, sym))
    >>> all(torch.equal(back[name], w[name]) for name in w)
    True
    """
    if method not in get_args(Method):
        raise ValueError(f"`method` must be one of {', '.join(get_args(Method))}, got {method!r}.")
    if signs and method not in get_args(ByWeights):
        raise ValueError(f"`signs` must be False for method {method!r}, which only permutes.")
    check_symmetries(sym)
    plan, data = plan_of(sym), None
    stacked = check_pair(params, reference, sym, plan.compared)
    if method not in get_args(ByWeights) or model is not None or batches is not None:
        data = _data(method, params, reference, model, batches)
    networks = params if stacked else stack_of_one(params)
    search = _OrderSearch(plan, networks, reference, signs, seed, data)
    if method == "learned":
        result = search.learned(loss, learning or Learning())
    elif method == "activations":
        result = search.by_activations()
    else:
        result = search.by_weights(method)
    return result if stacked else result.single()


def ordered(
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    sym: Symmetries,
    signs: bool,
    seed: int,
    least: float = 0.0,
) -> tuple[MatchResult, bool]:
    """Match two networks that have been checked by their weights, by ascent (see `match`).

    With a least gain, they ascend from where they stand (`Ascent.climb`).

    Returns:
        The result, and True if no unit has another partner that suits it.
    """
    search = _OrderSearch(plan_of(sym), stack_of_one(params), reference, signs, seed, None)
    found = search.roughly(least) if least else search.by_weights("ascent")
    return found.single(), bool(search.settled.all())


def _data(
    method: str,
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    model: nn.Module | None,
    batches: Iterable[Any] | None,
) -> Data:
    """A network that runs, and batches."""
    if model is None or batches is None:
        raise ValueError(f"`model` and `batches` must both be given for method {method!r}.")
    check_complete(model, params=params, reference=reference)
    return model, batches


@dataclass(eq=False)
class _OrderSearch:
    """Networks to match to a reference, and the best that is found for every one of them."""

    plan: Plan
    networks: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]
    signs: bool
    seed: int
    data: Data | None

    def __post_init__(self) -> None:
        sym, names = self.plan.sym, self.plan.compared or self.networks
        self.members = len(self.networks[next(iter(names))])
        self.element = Element(sym)
        self.names = [""] * self.members
        self.sure = torch.zeros(self.members, dtype=torch.bool)
        self.score = torch.full((self.members,), -torch.inf, dtype=torch.float64)

    def by_activations(self) -> MatchResult:
        """By one assignment per group, whose tables activations give."""
        assert self.data is not None
        model, batches = self.data
        orders, value = by_activations(
            self.plan, model, dict(self.networks), dict(self.reference), batches
        )
        return MatchResult(self._permuting(orders), value, ("activations",) * len(value))

    def _permuting(self, orders: Sequence[Tensor]) -> Element:
        return Element.of_values(self.plan.sym, {"permutations": orders})

    def learned(self, loss: Loss | None, learning: Learning) -> MatchResult:
        """By gradients of the loss half way, from weights or activations."""
        if loss is None or self.data is None:
            raise ValueError("`loss` must be given for method 'learned': the mean loss of a batch.")
        teaching, judging = parted(self.data[1], learning.held_back, self.seed)
        half_way = HalfWay(self.data[0], dict(self.reference), loss, judging)
        sym = replace(self.plan.sym, linear=())
        starts = [self.by_weights("best").element, self.by_activations().element]
        losses = [half_way.judge(start.on_some(dict(self.networks))) for start in starts]
        results = []
        for m, member in enumerate(unstack(dict(self.networks))):
            best = min(zip(losses, starts, strict=True), key=lambda pair: float(pair[0][m]))[1]
            start = replace(best.of_members(m), sym=sym)
            results.append(learn(member, half_way, teaching, start, learning, self.seed))
        elements, least = zip(*results, strict=True)
        joined = Element.joined(elements, [1] * len(elements))
        return MatchResult(joined, -torch.cat(least), ("learned",) * len(least))

    def roughly(self, least: float) -> MatchResult:
        """Ascend until a sweep gains little."""
        ascent, generator = self._ascent(torch.arange(self.members)), torch.Generator()
        ascent.climb(generator.manual_seed(self.seed), _SWEEPS, settled=set(), least=least)
        return MatchResult(ascent.element, self.score, ("ascent",) * self.members)

    def by_weights(self, method: ByWeights) -> MatchResult:
        """Try what the method says, some networks at a time, and finish in double precision."""
        plan = self.plan
        at_once = 1 if plan.branches else max(1, _AT_ONCE // max(1, plan.pairs))
        if self.members > at_once:
            every = (
                {n: t[k : k + at_once] for n, t in self.networks.items()}
                for k in range(0, self.members, at_once)
            )
            return _joined([replace(self, networks=some).by_weights(method) for some in every])
        joint = method == "frank-wolfe" or (method == "best" and plan.couples)
        joint = joint and bool(plan.tables)
        first = self.score.clone()
        if not joint or method != "frank-wolfe":
            first = self._ascend("ascent")
        if method == "best" and self.data is not None and plan.couples:
            start = self.by_activations().element
            self._ascend("ascent from activations", start)
        if joint and not bool(self.settled.all()):
            self._jointly(first)
        if SMALL < plan.size <= LARGE and not bool(self.settled.all()):
            ascent = self._ascent(torch.arange(self.members), exact=True)
            ascent.stand(self.element)
            ascent.climb(torch.Generator().manual_seed(self.seed), _SWEEPS)
            self.element, self.score = ascent.element, ascent.score()
        return MatchResult(self.element, self.score, tuple(self.names))

    def _ascent(self, rows: Tensor, exact: bool = False) -> Ascent:
        """Ascent of some members."""
        some = self.networks
        if len(rows) < self.members:
            some = {n: some[n][rows] for n in self.plan.compared or some}
        return Ascent(self.plan, some, self.reference, self.signs, exact)

    def _ascend(
        self, name: str, start: Element | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Ascend, keep the result of every member if it is better, and return the scores."""
        rows = torch.arange(self.members) if rows is None else rows
        ascent = self._ascent(rows)
        ascent.run(start, torch.Generator().manual_seed(self.seed), _SWEEPS)
        if not ascent.settled:
            _log.warning("match: ascent is still improving after %d sweeps.", _SWEEPS)
        score = ascent.score()
        self.sure[rows] |= torch.from_numpy(ascent.sure.all(0))
        better = score > self.score[rows] + _TIE * score.abs()
        self.score[rows[better]] = score[better]
        if len(rows) == self.members and bool(better.all()):
            self.element = ascent.element
        elif bool(better.any()):
            chosen = torch.arange(self.members)
            chosen[rows[better]] = self.members + better.nonzero().flatten()
            both = Element.joined([self.element, ascent.element], [self.members, len(rows)])
            self.element = both.of_members(chosen)
        for m in rows[better].tolist():
            self.names[m] = name
        return score

    def _jointly(self, first: Tensor) -> None:
        """Frank-Wolfe, finished by ascent: from where nothing is preferred, then from signatures.

        The second start is left out where the first agrees with ascent, or was given up although
        its slopes told something; both are where every unit and its partner suit each other best.

        Args:
            first: what ascent has reached.
        """
        plan, reference, rows = self.plan, dict(self.reference), (~self.settled).nonzero().flatten()
        for by_signatures in (False, True):
            if not len(rows):
                return
            some = {n: self.networks[n][rows] for n in plan.compared}
            point = start_from_signatures(plan, some, reference) if by_signatures else None
            before, done = first[rows], torch.zeros(len(rows), dtype=torch.bool)
            walk = frank_wolfe(plan, some, reference, point, before)
            orders = plan.elements(walk.orders)
            if not self.signs:  # no ascent leads on from where one has ended
                known = [p.expand(self.members, -1)[rows] for p in self.element.permutations]
                pairs = zip(orders, known, strict=True)
                done = torch.stack([(o == p).all(1) for o, p in pairs]).all(0)
                done &= self.score[rows].isfinite()
            going = ~walk.lost & ~done
            if bool(going.any()):
                start = self._permuting([o[going] for o in orders])
                score = self._ascend("frank-wolfe", start, rows[going])
                done[going] = (before[going] - score).abs() <= _TIE * score.abs()
            rows = rows[~done & ~(walk.lost & ~walk.blind)]

    @property
    def settled(self) -> Tensor:
        """True for members whose units all have sure partners, and that are near the reference."""
        total = torch.zeros(self.members, dtype=torch.float64)
        for n in self.plan.compared if bool(self.sure.any()) else ():
            goal = torch.linalg.vector_norm(self.reference[n], dtype=torch.float64)
            moving = torch.linalg.vector_norm(self.networks[n].flatten(1), dim=1)
            total += (moving.double() * goal).cpu()
        return self.sure & (self.score > _NEAR * total)


def _joined(results: Sequence[MatchResult]) -> MatchResult:
    """The results of several stacks as one."""
    members = [len(r.objective) for r in results]
    return MatchResult(
        Element.joined([r.element for r in results], members),
        torch.cat([r.objective for r in results]),
        tuple(name for r in results for name in r.method),
    )
