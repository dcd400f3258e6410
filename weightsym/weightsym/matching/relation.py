"""The relation of two networks: the same function, one made from the other, or independent.

Two tests count units, and no other networks are drawn to compare with. No symmetry changes the
second one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaincc
from torch import Tensor

from weightsym.forms.fingerprint import at_least_mass
from weightsym.groups.actions import act, multiply_sides
from weightsym.groups.placements import LinearGroup, Placement
from weightsym.groups.symmetries import PermutationGroup, Symmetries
from weightsym.groups.units import WRITES, other_axes, unit_rows
from weightsym.matching.difference import Difference, difference
from weightsym.matching.match import ByWeights
from weightsym.matching.matrices import SpaceMap, procrustes
from weightsym.matching.plan import assign
from weightsym.params import Params, is_weight

Verdict = Literal["same function", "made from it", "independent", "cannot be told"]
CHANCE = 1e-6
"""Probabilities below this tell that one network was made from the other."""
EXCESS = 0.5
"""The share of units that agree beyond chance in independent networks, at most (0.45 was seen)."""
_EQUAL = 1e-5  # a rest that rounding explains
_NEAR = 1e-3  # of one tensor
_SLACK = 3.0  # of distances, for the matrices and scales that have been fitted
_UNDERFLOW = 170  # 1 / 171! is no double


@dataclass(frozen=True)
class SharedUnits:
    """The units of one group that two networks share.

    Attributes:
        name: the tensor that writes the units.
        units: how many there are.
        in_place: how many of B are matched to the unit of A with the same number.
        agreeing: how many are matched alike by what comes before and by what follows; None where
            the weights of a group cannot be parted.

    >>> from weightsym import SharedUnits
    >>> SharedUnits("up.weight", 128, in_place=1, agreeing=120)
    SharedUnits(name='up.weight', units=128, in_place=1, agreeing=120)
    """

    name: str
    units: int
    in_place: int
    agreeing: int | None


@dataclass(frozen=True, eq=False)
class Relation:
    r"""Two networks in one frame, and tests of whether one was made from the other.

    Attributes:
        difference: both networks in one frame, and what is left between them.
        groups: the units that are shared, group by group.
        p_exact: of as many units in their places. If training treats units alike, the permutation
            between independent networks is uniform, whatever data they saw:
            :math:`P(F \ge k) \le 1 / k!`.
        p_robust: of as many units that are matched alike by two sets of tensors with nothing in
            common. It is calibrated: independent networks with features in common agree in less
            than ``EXCESS`` of their units beyond chance.
        p_close: of tensors as close, if their directions were random, for any of all permutations.

    >>> from torch import nn
    >>> from weightsym import params as P
    >>> from weightsym import discover, permute, random_permutations, relation
    >>> net = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 9))
    >>> sym, w = discover(net, torch.randn(8, 9)), P.of(net)
    >>> copy = {n: t + 0.01 * torch.randn_like(t) for n, t in w.items()}
    >>> found = relation(permute(copy, sym, random_permutations(sym)), w, sym)
    >>> found.verdict, found.p_robust < 1e-6
    ('made from it', True)
    """

    difference: Difference
    groups: tuple[SharedUnits, ...]
    p_exact: float
    p_robust: float
    p_close: float

    @property
    def verdict(self) -> Verdict:
        """The same function, made from it (or both from one start), independent, or unknown.

        Nothing can be told where so few units are compared that even if all of them agreed, that
        would not be beyond chance.
        """
        if self.difference.rest <= _EQUAL and (self.p_close < CHANCE or self._equal_everywhere):
            return "same function"
        if min(self.p_exact, self.p_robust, self.p_close) < CHANCE:
            return "made from it"
        every = [(g.units, g.units) for g in self.groups if g.agreeing is not None]
        return "independent" if p_agreeing(every) < CHANCE else "cannot be told"

    @property
    def _equal_everywhere(self) -> bool:
        """True if no small tensor differs beside large ones."""
        last = self.difference.stages[-1]
        return all(square <= _NEAR**2 * last.sizes[n] for n, square in last.squares.items())

    @property
    def shares(self) -> dict[str, float]:
        """By group the share of its units that are in their places or agree, the larger of both."""
        return {g.name: max(g.in_place, g.agreeing or 0) / g.units for g in self.groups}


def relation(
    a: Params, b: Params, sym: Symmetries, *, method: ByWeights = "ascent", seed: int = 0
) -> Relation:
    """Tell whether two networks are one function, whether one was made from the other, or neither.

    A network that was trained on, pruned, rounded or merged keeps its units, and a symmetry only
    moves them. Positions and tokens are not exchanged, and do not count. Norms with gains hold a
    stream fixed: fold those of both networks first (`fold_norms`).

    Args:
        a: one network.
        b: the other one.
        sym: what `discover` returned.
        method: how units are matched, see `match`.
        seed: of the order from which units are matched.

    >>> from torch import nn
    >>> from weightsym import params as P
    >>> from weightsym import discover, relation
    >>> nets = [nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 9)) for _ in range(2)]
    >>> sym = discover(nets[0], torch.randn(8, 9))
    >>> relation(*map(P.of, nets), sym).verdict
    'independent'
    """
    found = difference(a, b, sym, method=method, seed=seed)
    agreeing = _agreements(a, b, sym)
    groups = [
        SharedUnits(group.name, group.units, fixed_points(order), agreeing.get(k))
        for k, (group, order) in enumerate(zip(sym.permutations, found.permutations, strict=True))
        if group.units > 1
    ]
    return Relation(
        found,
        tuple(groups),
        p_in_place([(g.units, g.in_place) for g in groups]),
        p_agreeing([(g.units, g.agreeing) for g in groups if g.agreeing is not None]),
        _p_close(found, sym),
    )


# ------------------------------------------------------------ probabilities
def fixed_points(order: Tensor) -> int:
    """The number of units that a permutation leaves where they are."""
    return int((order == torch.arange(len(order))).sum())


def law_of_fixed_points(units: int) -> NDArray[np.float64]:
    """Probabilities of 0, 1, 2 ... fixed points of a uniform permutation.

    Args:
        units: how many are permuted.
    """
    least = np.cumsum([(-1.0) ** j / math.factorial(j) for j in range(min(units, 30) + 1)])
    counts = range(min(units, _UNDERFLOW) + 1)
    return np.array([least[min(units - k, 30)] / math.factorial(k) for k in counts]).clip(0)


def p_in_place(counts: Sequence[tuple[int, int]]) -> float:
    """The probability of as many units in their places, in one group or in all together.

    Groups are permuted independently; what is smaller, of the sum or of the best group, counts
    twice.

    Args:
        counts: by group how many units there are, and how many are in their places.
    """

    def tail(every: Sequence[tuple[int, int]]) -> float:
        total = np.ones(1)
        for units, _ in every:
            total = np.trim_zeros(np.convolve(total, law_of_fixed_points(units)), "b")
        return float(total[sum(fixed for _, fixed in every) :].sum())

    return _together(tail, counts)


def p_agreeing(counts: Sequence[tuple[int, int]]) -> float:
    r"""A bound on the probability of as many units that agree: that of Chernoff.

    .. math:: P(K \ge k) \le e^{-n\, \mathrm{KL}(k / n \,\|\, q)}, \qquad q = 1/n + \epsilon

    Args:
        counts: by group how many units there are, and how many agree.
    """

    def bound(every: Sequence[tuple[int, int]]) -> float:
        units, agreeing = (sum(n) for n in zip(*every, strict=True))
        rate, share = min(1.0, EXCESS + len(every) / units), agreeing / units
        if share <= rate:
            return 1.0
        apart = share * math.log(share / rate)
        if share < 1:
            apart += (1 - share) * math.log((1 - share) / (1 - rate))
        return math.exp(-units * apart)

    return _together(bound, counts)


def _together(
    p: Callable[[Sequence[tuple[int, int]]], float], counts: Sequence[tuple[int, int]]
) -> float:
    """The smaller probability, of all groups together or of the best of them, by Bonferroni."""
    best = min((len(counts) * p([one]) for one in counts), default=1.0)
    return min(1.0, 2 * min(best, p(counts))) if counts else 1.0


def _p_close(found: Difference, sym: Symmetries) -> float:
    r"""The probability that random directions are as close, tensor by tensor, for any permutation.

    .. math:: p_t = (3 \sin \alpha_t)^{n_t - 1}

    Fisher combines them; the number of permutations and signs multiplies the result. What all units
    share tells nothing, and each scale or matrix that was fitted takes a number.
    """
    sines, numbers = list[float](), list[float]()
    for name in sorted(n for n in sym.compared if is_weight(n, found.b[n])):
        (x, y), share = _beyond_means([found.a[name].double(), found.b[name].double()], sym, name)
        if share * x.numel() < 2 or min(float(x.norm()), float(y.norm())) == 0:
            continue
        apart = float((x / x.norm() - y / y.norm()).norm().clamp_min(1e-12))  # 2 sin(alpha / 2)
        sines.append(apart * math.sqrt(1 - apart**2 / 4) if apart < 1 else 1.0)
        numbers.append(share * x.numel() - 1)
    free = max(0.0, 1 - sym.dimension / max(sum(numbers), 1))
    logs = [-n * math.log(min(1.0, _SLACK * s)) for n, s in zip(numbers, sines, strict=True)]
    choices = sym.log10_permutations * math.log(10) + sym.sign_dof * math.log(2)
    return float(gammaincc(max(len(logs), 1), max(free * sum(logs) - choices, 0.0)))


def _beyond_means(pair: Sequence[Tensor], sym: Symmetries, name: str) -> tuple[list[Tensor], float]:
    """What the weights of a tensor have beyond the means over its units, and how much is free."""
    share, rest = 1.0, list(pair)
    dims = {sym.axes[a].dim for a in sym.axes_of[name]}
    for dim in sorted(d for d in dims if d is not None):
        rest = [w - w.mean(dim, keepdim=True) for w in rest]
        share *= 1 - 1 / rest[0].shape[dim]
    still = [float(r.norm()) < 1e-6 * float(w.norm()) for r, w in zip(rest, pair, strict=True)]
    return [r * (not s) for r, s in zip(rest, still, strict=True)], share


# ------------------------------------------------------------ units that are found twice
def _agreements(a: Params, b: Params, sym: Symmetries) -> dict[int, int]:
    """By group of permutations, how many units two sets of tensors match alike."""
    (moving, _), (goal, _) = (at_least_mass(w, sym, mixing=True) for w in (a, b))
    return _Walk(moving, goal, sym).agreeing


Node = tuple[str, int]
"""A group of permutations or of matrices, by its kind and number."""


class _Walk:
    """Two networks whose groups are matched one by one, by tensors that come before each.

    Both have the least mass, so that matrices are rotations. What follows a group then judges how
    its units were matched: by the cosines of its units with each other, which nothing behind them
    changes.

    Attributes:
        moving: the first network, as far as it has been brought to the second one.
        goal: the second one.
        sources: by group that is matched, all tensors whose numbers have decided how.
        agreeing: by group of permutations, the units that what follows matches alike.
    """

    def __init__(self, a: Params, b: Params, sym: Symmetries) -> None:
        self.sym, self.moving, self.goal = sym, dict(a), b
        self.inside = SpaceMap(sym).contained
        self.sources: dict[Node, frozenset[str]] = {}
        self.agreeing: dict[int, int] = {}
        self.signed: set[int] = set()
        self.movers = {axis: self._movers(axis) for axis in range(len(sym.axes))}
        waiting, left = list[Node](), self._nodes()
        while len(left) != len(waiting):
            waiting, left = left, [node for node in left if not self._visit(node)]

    # -------------------------------------------------------- groups
    def _nodes(self) -> list[Node]:
        """The groups that are matched, in the order of the graph: no blocks and no experts."""
        sym, exchanged = self.sym, self.sym.exchangeable_tensors.keys()
        nodes = [("permutations", k) for k in range(len(sym.permutations)) if k not in self.inside]
        nodes = [n for n in nodes if not sym.permutations[n[1]].inner]
        nodes += [("linear", k) for k in range(len(sym.linear))]
        nodes = [n for n in nodes if not exchanged & sym.moved_by(self._group(n))]
        return sorted(nodes, key=lambda n: min(p.axis for p in self._group(n).placements))

    def _group(self, node: Node) -> PermutationGroup | LinearGroup:
        kind, index = node
        return self.sym.permutations[index] if kind == "permutations" else self.sym.linear[index]

    def _movers(self, axis: int) -> tuple[set[Node], Tensor]:
        """What moves positions of an axis, and how many groups move each."""
        nodes, counts = set[Node](), torch.zeros(self.sym.axes[axis].length, dtype=torch.long)
        for kind in ("permutations", "linear"):
            for k, placement in self.sym.placements_by_axis(kind).get(axis, ()):
                if kind == "linear" or k not in self.inside:
                    nodes.add((kind, k))
                    counts[placement.positions.reshape(-1).unique().cpu()] += 1
        return nodes, counts

    def _visit(self, node: Node) -> bool:
        """Match a group, if all that its weights are compared along has been matched."""
        group, axes = self._group(node), self.sym.axes
        places = [p for p in group.placements if axes[p.axis].tensor in self.sym.compared]
        ready = [p for p in places if self._sources(p) is not None]
        first = [p for p in ready if self._is_wide(p)]
        first = [p for p in first if axes[p.axis].role in WRITES] or first
        if not first:
            return False
        layers = {self._layer(p) for p in first}
        biases = [p for p in ready if axes[p.axis].role == "out" and not self._is_wide(p)]
        first += [p for p in biases if self._layer(p) in layers]
        sources = frozenset[str]().union(*(self._sources(p) or () for p in first))
        if isinstance(group, LinearGroup):
            self._turn(node[1], group, first)
        else:
            self._order(node[1], first)
            rest = [p for p in places if axes[p.axis].tensor not in sources and self._is_wide(p)]
            if rest and group.units > 1:
                self.agreeing[node[1]] = fixed_points(self._order_within(rest))
        self.sources[node] = sources
        self._flip(first)
        return True

    def _sources(self, place: Placement) -> frozenset[str] | None:
        """The tensors that decide how weights at a place are compared, None if not all have."""
        axes = self.sym.axes
        others = [n for k in other_axes(self.sym, place.axis) for n in self.movers[k][0]]
        shared = self.movers[place.axis][1][place.positions.reshape(-1).cpu()] > 1
        if bool(shared.any()) or any(node not in self.sources for node in others):
            return None
        return frozenset({axes[place.axis].tensor}).union(*(self.sources[n] for n in others))

    def _layer(self, place: Placement) -> str:
        return self.sym.axes[place.axis].tensor.rpartition(".")[0]

    def _is_wide(self, place: Placement) -> bool:
        """True if each unit has more than one weight for each of its positions."""
        axis = self.sym.axes[place.axis]
        return self.sym.shapes[axis.tensor].numel() > axis.length

    # -------------------------------------------------------- from what comes before
    def _turn(self, k: int, group: LinearGroup, first: Sequence[Placement]) -> None:
        """Turn spaces as Procrustes does."""
        cross = torch.zeros((), dtype=torch.float64)
        for place in first:
            mine, theirs = self._rows(place)
            cross = cross + (theirs @ mine.mT).double()
        basis = group.basis.to(cross)
        turn = group.lifted(procrustes(basis.mT @ cross @ basis).matrices)
        self.moving = multiply_sides(self.moving, self.sym, k, turn, turn)

    def _order(self, k: int, first: Sequence[Placement]) -> None:
        """Put units in the order of those of the goal."""
        order = assign(self._cosines(self.goal, self.moving, first))
        orders = [order if j == k else None for j in range(len(self.sym.permutations))]
        self.moving = act(self.moving, self.sym, {"permutations": orders})

    def _flip(self, first: Sequence[Placement]) -> None:
        """Give signs that act on what was compared the values that suit it."""
        sym, names = self.sym, {self.sym.axes[p.axis].tensor for p in first}
        flips = {k for p in first for k, _ in sym.placements_by_axis("signs").get(p.axis, ())}
        for k in flips - self.signed:
            group, total = sym.signs[k], torch.zeros((), dtype=torch.float64)
            for place in group.placements:
                if sym.axes[place.axis].tensor in names and place.exponent % 2:
                    mine, theirs = self._rows(place)
                    total = total + (mine * theirs).sum(-1).double()
            signs = [torch.ones(g.units) for g in sym.signs]
            signs[k] = torch.where(total < 0, -1.0, 1.0).expand(group.units)
            some = {n: self.moving[n] for n in sym.moved_by(group) if n in self.moving}
            self.moving |= act(some, sym, {"signs": signs})
        self.signed |= flips

    def _rows(self, place: Placement) -> list[Tensor]:
        return [unit_rows(w, self.sym, place).float() for w in (self.moving, self.goal)]

    # -------------------------------------------------------- from what follows
    def _order_within(self, rest: Sequence[Placement]) -> Tensor:
        """The order in which units of both are alike by their cosines with all other units.

        Neither of the two that are compared counts: it stands where the first matching put it.
        """
        both = [self._cosines(w, w, rest).fill_diagonal_(0) for w in (self.moving, self.goal)]
        others = max(len(both[0]) - 1, 1)
        both = [(g - g.sum(1, keepdim=True) / others).fill_diagonal_(0) for g in both]
        mine, theirs = (
            (g.square().sum(1, keepdim=True) - g.square()).clamp_min(1e-30).sqrt() for g in both
        )
        return assign(both[0] @ both[1].mT / mine / theirs.mT)

    def _cosines(self, a: Params, b: Params, places: Sequence[Placement]) -> Tensor:
        """Cosines of the units of two networks at some places, with the signs that suit them."""
        parts: dict[frozenset[int], Tensor] = {}
        sizes = [torch.zeros(()), torch.zeros(())]
        for place in places:
            rows = [unit_rows(w, self.sym, place).float() for w in (a, b)]
            sizes = [s.to(r.device) + r.square().sum(-1) for s, r in zip(sizes, rows, strict=True)]
            product, signs = rows[0] @ rows[1].mT, self._signs(place)
            parts[signs] = parts[signs] + product if signs in parts else product
        total = torch.stack([p.abs() if signs else p for signs, p in parts.items()]).sum(0)
        mine, theirs = (s.sqrt().clamp_min(1e-30) for s in sizes)
        return total / mine[:, None] / theirs

    def _signs(self, place: Placement) -> frozenset[int]:
        """The groups of signs that flip units at a place."""
        there = torch.zeros(self.sym.axes[place.axis].length, dtype=torch.bool)
        there[place.positions.reshape(-1).cpu()] = True
        pairs = self.sym.placements_by_axis("signs").get(place.axis, ())
        return frozenset(k for k, p in pairs if bool(there[p.positions.reshape(-1).cpu()].any()))
