"""Many networks in one frame: permutations and flips, or matrices."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from weightsym.arguments import check_count
from weightsym.groups.element import Element
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_finite, check_one_network, check_params, check_squares
from weightsym.matching.activations import inputs_of
from weightsym.matching.ascent import Ascent
from weightsym.matching.channels import ChannelView, distance
from weightsym.matching.match import Moves, match
from weightsym.matching.match_all import Pair, match_all
from weightsym.matching.matrices import SpaceMap, isometric
from weightsym.matching.plan import plan_of
from weightsym.matching.repair import reestimated
from weightsym.networks.batch_norms import batch_norms
from weightsym.networks.forward import structural_copy
from weightsym.params import Params, shares, stack_size, unstack, weighted_mean
from weightsym.params import stack as join

AlignMethod = Literal["joint", "reference"]
_log = logging.getLogger(__name__)

_STILL, _STILL_OF_MANY, _ROUNDING = 1e-4, 2.5e-4, 1e-12
"""A sweep with matrices, or of many networks, that takes less than these shares of it, or the last
of all squares, off the spread is the last."""
_SWEEPS = 100  # of one ascent
_PARTS = 64  # of a stack, whose networks move at once
_MANY = 256
"""Networks up to which each moves by itself until none does; more end when a sweep gains little."""
_SAMPLE = 64
"""Networks whose frame a larger stack begins with."""


@dataclass(frozen=True, eq=False)
class Alignment(Moves):
    """An element that brings all networks of a stack into a common frame, that of the first.

    It is itself the sequence of its permutations.

    Attributes:
        element: ``found.element(stack)`` are the networks in their frame.
        spread: after every sweep, the sum of squared distances of the networks to their mean, over
            the tensors that permutations (with matrices: any symmetries) reach; first as they were
            given.
        method: ``"joint"`` or ``"reference"``.
        networks: how many there are.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import align, discover
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
    >>> sym, stack = discover(net, torch.randn(8, 2)), P.populate(net, 3)
    >>> found = align(stack, sym)
    >>> found.spread[-1] < found.spread[0], found[0].shape
    (True, torch.Size([3, 5]))
    >>> (found.between(1, 2) @ found.between(2, 1)).permutations
    (tensor([0, 1, 2, 3, 4]),)
    """

    spread: tuple[float, ...]
    method: AlignMethod
    networks: int

    @property
    def members(self) -> Sequence[int]:
        """The number of networks."""
        return (self.networks,)

    def between(self, a: int, b: int) -> Element:
        """The element that brings network ``a`` into the frame of network ``b``.

        Args:
            a: number of the network that moves.
            b: number of the other one.
        """
        return self.element.of_members(b).inverse @ self.element.of_members(a)

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
    signs: bool = False,
    mixing: bool = False,
    sweeps: int = 50,
    seed: int = 0,
    weights: Sequence[int | float] | Tensor | None = None,
) -> Alignment:
    r"""Bring all networks of a stack into one frame.

    .. math:: \min_{g_1 \dots g_N} \sum_k w_k \| g_k \theta_k - \textstyle\sum_l w_l g_l \theta_l
        \|^2, \qquad \textstyle\sum_k w_k = 1

    Every network is matched to the sum of the others, one after the other, until none moves; the
    squared distance to the mean falls with every step. It begins once with the networks as they are
    and once with all matched to the first, and keeps the better end. Any two networks are then
    matched by way of the common frame, which is that of the first one: around every cycle the
    permutations cancel. With matrices the second start is what permutations alone have found. More
    than 256 networks begin with all matched to the mean of 64 of them in their frame, move a part
    at a time, and end once a sweep takes less than 1/4000 off the distance.

    References:
        C2M3: Cycle-Consistent Multi-Model Merging (Crisostomi et al., 2024)

    Args:
        stack: networks of one architecture.
        sym: what `discover` returned.
        method: ``"joint"``, or ``"reference"``: all are matched to the first only.
        signs: flip whole units as well, as `match` does.
        mixing: match heads, streams and adapters by matrices as well, see `match_all`.
        sweeps: rounds over all networks at most.
        seed: of the order of the networks within a round.
        weights: how much each network counts in the mean; by default all count the same.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import align, discover, permute, random_permutations
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> copies = permute(P.stack([w] * 4), sym, random_permutations(sym, members=4))
    >>> together = align(copies, sym).element(copies)
    >>> all(torch.equal(t[0], t[k]) for t in together.values() for k in range(4))
    True
    """
    _check(stack, sym, method, signs, mixing, sweeps)
    counts = torch.ones(stack_size(stack), dtype=torch.float64)
    if weights is not None:
        counts *= torch.tensor(shares(weights, len(counts))).double() * len(counts)
    check_squares(stack, "stack", plan_of(sym).compared)
    starts = _starts(stack, sym, method, signs, sweeps, seed, counts)
    rounds = sweeps if method == "joint" else 0
    frames = [_ByPermutations(stack, sym, start, signs, counts) for start in starts]
    for frame in frames:
        frame.run(rounds, seed)
    best = min(frames, key=lambda frame: frame.spread[-1])
    element = _as_the_first(best.element)
    if not (mixing and sym.linear):
        spread = distance_to_mean(stack, plan_of(sym).compared, counts)
        return Alignment(element, (spread, *best.spread), method, len(counts))
    return _with_matrices(stack, sym, element, method, rounds, seed, counts)


def _as_the_first(element: Element) -> Element:
    """The same frame, turned to where the first network is."""
    return element.of_members(0).inverse @ element


def _check(
    stack: Params,
    sym: Symmetries,
    method: str,
    signs: bool,
    mixing: bool,
    sweeps: int,
) -> None:
    if method not in get_args(AlignMethod):
        raise ValueError(f"`method` must be 'joint' or 'reference', got {method!r}.")
    check_count("sweeps", sweeps)
    if not check_params(stack, sym, "stack"):
        raise ValueError("`stack` must be a stack of networks, not one network.")
    check_finite(stack, sym, "stack")
    if mixing and signs:
        raise ValueError("`mixing` does not go with `signs`: matrices hold them.")


def _starts(
    stack: Params,
    sym: Symmetries,
    method: str,
    signs: bool,
    sweeps: int,
    seed: int,
    counts: Tensor,
) -> list[Element]:
    """Elements for all networks: matched to the first and as they are, or matched to a sample."""
    weighty = counts.nonzero().flatten()
    if method == "joint" and len(weighty) > _MANY:
        rows = weighty[torch.linspace(0, len(weighty) - 1, _SAMPLE).long()]
        some = {n: t[rows.to(t.device)] for n, t in stack.items()}
        how: dict[str, Any] = {"signs": signs, "sweeps": sweeps, "seed": seed}
        how["weights"] = counts[rows]
        mean = weighted_mean(align(some, sym, **how).element(some), counts[rows])
        return [match(stack, mean, sym, method="ascent", signs=signs, seed=seed).element]
    first = {n: t[0] for n, t in stack.items()}
    starts = [match(stack, first, sym, signs=signs, seed=seed).element]
    if method == "joint":
        starts.append(Element(sym))
    return starts


# ------------------------------------------------------------ sweeps
class _Frame:
    """Networks on their way to each other: part by part they go to the sums of all others.

    Attributes:
        standing: the tensors that count, of every network where it stands.
        counts: how often each network counts in the sum.
        parts: the rows that move at once, of a small stack one by one.
        spread: sums of squared distances to the mean, at first and after every sweep.
    """

    still = 0.0  # share of the spread: a sweep that gains no more is the last

    def __init__(self, standing: Params, counts: Tensor, parts: Sequence[slice]) -> None:
        self.standing, self.counts, self.parts = standing, counts, parts
        self.spread = [self._spread()]

    @abstractmethod
    def visit(self, index: int, others: Params) -> Params | None:
        """Bring networks closer to the sums of all others, or return nothing if they stay."""

    def run(self, sweeps: int, seed: int) -> None:
        """Sweep until no network moves, or hardly anything is gained."""
        self.generator, still = torch.Generator().manual_seed(seed), True
        for _ in range(sweeps):
            total, still = _sums(self.standing, self.counts), True
            order = torch.randperm(len(self.parts), generator=self.generator).tolist()
            for index in tqdm(order, "align", leave=False, disable=len(self.counts) <= _MANY):
                rows = self.parts[index]
                counts, old = self.counts[rows], {n: t[rows] for n, t in self.standing.items()}
                others = {n: t - _weighted(old[n], counts) for n, t in total.items()}
                new = self.visit(index, others)
                if new is not None:
                    less, more, still = _sums(old, counts), _sums(new, counts), False
                    total = {n: t - less[n] + more[n] for n, t in total.items()}
                    for n, t in self.standing.items():
                        t[rows] = new[n]
            before, after = self.spread[-1], self._spread()
            self.spread.append(after)
            still = still or bool(self.still) and before - after <= self._least(before)
            if still:
                break
        if not still:
            _log.warning("align: networks still move after %d sweeps.", sweeps)

    def _spread(self) -> float:
        total = _sums(self.standing, self.counts).values()
        squares = sum(float(t.square().sum()) for t in total)
        return self._squares() - squares / float(self.counts.sum())

    def _squares(self) -> float:
        each = (_weighted(t, self.counts).mul_(t).sum() for t in self.standing.values())
        return sum(map(float, each), 0.0)

    def _least(self, spread: float) -> float:
        return max(self.still * spread, _ROUNDING * self._squares())


def _weighted(rows: Tensor, counts: Tensor) -> Tensor:
    return rows.double() * counts.to(rows.device).reshape(-1, *[1] * (rows.ndim - 1))


def _sums(networks: Params, counts: Tensor) -> Params:
    return {n: torch.tensordot(counts.to(t.device), t.double(), 1) for n, t in networks.items()}


class _ByPermutations(_Frame):
    """Networks that move by permutations and flips."""

    def __init__(
        self, stack: Params, sym: Symmetries, start: Element, signs: bool, counts: Tensor
    ) -> None:
        plan = plan_of(sym)
        nothing = {n: torch.zeros_like(stack[n][0]) for n in plan.compared}
        self.still = _STILL_OF_MANY if len(counts) > _MANY else 0.0
        size = 1 if plan.branches else math.ceil(len(counts) / _PARTS)
        parts = [slice(k, k + size) for k in range(0, len(counts), size)]
        self.ascents = list[Ascent]()
        for rows in parts:
            some = {n: t[rows] for n, t in stack.items()}
            self.ascents.append(Ascent(plan, some, nothing, signs))
            self.ascents[-1].stand(start.of_members(rows))
        current = {n: torch.cat([a.current[n] for a in self.ascents]) for n in plan.compared}
        super().__init__(current, counts, parts)

    def visit(self, index: int, others: Params) -> Params | None:
        """Ascend from where the networks stand."""
        ascent, before = self.ascents[index], self.ascents[index].element
        ascent.look_at(others)
        ascent.climb(self.generator, _SWEEPS)
        ascent.exchange(self.generator, _SWEEPS)
        still = ascent.element is before
        return None if still else {n: ascent.current[n] for n in self.standing}

    @property
    def element(self) -> Element:
        """What has moved all networks."""
        return Element.joined([a.element for a in self.ascents], [a.members for a in self.ascents])


class _ByMatrices(_Frame):
    """Networks that move by permutations and matrices.

    The first one moves by what keeps distances only: sizes that all networks share change the
    distance to their mean without making them more alike, and those of the first one stay.
    """

    still = _STILL

    def __init__(self, stack: Params, sym: Symmetries, start: Element, counts: Tensor) -> None:
        self.sym, rows = sym, range(len(counts))
        self.members = [
            {n: t.double() if n in sym.touched else t for n, t in member.items()}
            for member in unstack(stack)
        ]
        self.elements = [start.of_members(m) for m in rows]
        every, rigid = ((ChannelView(s), SpaceMap(s)) for s in (sym, isometric(sym)))
        self.maps = [rigid if m == 0 else every for m in rows]
        parts = [slice(m, m + 1) for m in rows]
        super().__init__(join([self._moved(m) for m in rows]), counts, parts)

    def _moved(self, m: int) -> Params:
        read = self.members[m].__getitem__
        return {n: self.elements[m].of(n, read) for n in sorted(self.sym.compared)}

    def visit(self, index: int, others: Params) -> Params | None:
        """Bring one network closer to the mean of the others, from where it stands."""
        m, left = index, float(self.counts.sum() - self.counts[index])
        if left <= 0:
            return None
        mean = {**self.members[m], **{n: t[0] / left for n, t in others.items()}}
        old = self.elements[m]
        pair = Pair(*self.maps[m], self.members[m], mean, old)
        pair.run(1, anchored=False)
        self.elements[m] = pair.element
        new = self._moved(m)
        current = {n: t[m] for n, t in self.standing.items()}
        before, after = (float(distance(w, mean, self.sym.compared)) for w in (current, new))
        if after < before * (1 - 1e-9):
            return {n: t[None] for n, t in new.items()}
        self.elements[m] = old
        return None


def _with_matrices(
    stack: Params,
    sym: Symmetries,
    permuting: Element,
    method: AlignMethod,
    sweeps: int,
    seed: int,
    counts: Tensor,
) -> Alignment:
    """Match all to the first, then each to the mean of the others if that brings all closer.

    A joint frame also starts from the frame of permutations alone.
    """
    first = match_all(stack, {n: t[0] for n, t in stack.items()}, sym)
    starts = [first.element, permuting][: 2 if method == "joint" else 1]
    frames = list[_ByMatrices]()
    for start in starts:
        if not any(f.spread[-1] <= f._least(0.0) for f in frames):
            frames.append(_ByMatrices(stack, sym, start, counts))
            frames[-1].run(sweeps, seed)
    best = min(frames, key=lambda frame: frame.spread[-1])
    element = Element.joined(best.elements, [1] * len(counts))
    spread = distance_to_mean(stack, sorted(sym.compared), counts)
    return Alignment(_as_the_first(element), (spread, *best.spread), method, len(counts))


# ------------------------------------------------------------ distances
def distance_to_mean(stack: Params, names: Iterable[str], counts: Tensor | None = None) -> float:
    """Sum of squared distances of the networks of a stack to their mean, over some tensors.

    Args:
        stack: networks of one kind.
        names: of the tensors.
        counts: how often each network counts; by default once.
    """
    total = 0.0
    for rows in (stack[name].double().reshape(stack_size(stack), -1) for name in names):
        weights = torch.ones(len(rows)) if counts is None else counts
        weights = weights.to(rows)
        mean = weights @ rows / weights.sum()
        total += float(weights @ (rows - mean).square().sum(1))
    return total


# ------------------------------------------------------------ averages
@torch.no_grad()
def average(
    stack: Params,
    sym: Symmetries,
    weights: Sequence[int | float] | Tensor | None = None,
    *,
    reference: Params | None = None,
    signs: bool = True,
    mixing: bool = False,
    sweeps: int = 50,
    seed: int = 0,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
) -> Params:
    r"""The weighted average of networks, once all of them are in one frame.

    .. math:: \bar\theta = \sum_k w_k\, g_k \theta_k, \qquad \textstyle\sum_k w_k = 1

    The elements :math:`g_k` of the group of symmetries change no network; without them the average
    of networks of different runs computes nothing of use. With the numbers of examples as weights
    this is one round of federated averaging; the server's network of the last round is then the
    ``reference``.

    Scales stay as they are. Networks whose scales may differ need equal ones first, those of least
    mass: ``rescale(stack, sym, min_mass(stack, sym).scales)``.

    References:
        Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al.,
        2017)
        Federated Learning with Matched Averaging (Wang et al., 2020)

    Args:
        stack: networks of one kind, from one run or several.
        sym: what `discover` returned.
        weights: one number for each network, not negative, such as how many examples it has seen;
            by default all count the same. Networks of weight zero are left out.
        reference: a network in whose frame the others are averaged, each matched to it alone; by
            default all are matched to each other, in the frame of the first, see `align`.
        signs: flip units as well, where a network lets whole units be flipped, outside of heads and
            other blocks; not with ``mixing``.
        mixing: match heads, streams and adapters by matrices as well; without signs.
        sweeps: rounds over all networks at most.
        seed: of the order of the networks.
        model: gives the computation, to estimate the statistics of batch norms on the average.
        batches: inputs, or tuples whose first element is the input, of training data.

    Returns:
        One network. Without ``model`` and ``batches`` statistics of batch norms are averaged, too,
        which is not what the average has.

    >>> from weightsym.params import of, stack
    >>> from weightsym import discover, permute
    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> one, sym = of(net), discover(net, torch.randn(1, 1))
    >>> pair = stack([one, permute(one, sym, [torch.tensor([1, 0])])])
    >>> torch.equal(average(pair, sym)["0.weight"], one["0.weight"])
    True
    """
    if not check_params(stack, sym, "stack"):
        raise ValueError("`stack` must be a stack of networks, not one network.")
    if (model is None) != (batches is None):
        raise ValueError("`model` and `batches` go together: both, or neither.")
    parts = torch.tensor(shares(weights, stack_size(stack)), dtype=torch.float64)
    counted = (parts > 0).nonzero().flatten()
    if len(counted) < len(parts):
        parts = parts[counted]
        stack = {n: t.index_select(0, counted.to(t.device)) for n, t in stack.items()}
    how = partial(
        align,
        sym=sym,
        signs=signs and not mixing,
        mixing=mixing,
        sweeps=sweeps,
        seed=seed,
    )
    if reference is not None:
        both = _beside(reference, stack, sym)
        aligned = how(both, method="reference").element(both)
        stack = {n: t[1:] for n, t in aligned.items()}
    elif len(parts) > 1:
        stack = how(stack, weights=parts).element(stack)
    mean = weighted_mean(stack, parts)
    if model is None or batches is None or not batch_norms(model):
        return mean
    return reestimated(structural_copy(model).eval(), mean, inputs_of(batches))


def _beside(reference: Params, stack: Params, sym: Symmetries) -> Params:
    """A stack that begins with the reference."""
    check_one_network(reference, sym, "reference")
    missing = stack.keys() - reference.keys()
    if missing:
        raise ValueError(f"`reference` lacks {min(missing)!r}.")
    return {n: torch.cat([reference[n].to(t)[None], t]) for n, t in stack.items()}
