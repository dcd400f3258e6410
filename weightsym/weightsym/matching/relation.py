"""The relation of two networks: the same function, one made from the other, or independent.

Two tests count units, and no other networks are drawn to compare with. No symmetry changes the
second one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betainc, gammaincc, gammaln
from torch import Tensor

from weightsym.forms.mass_problem import square_sums
from weightsym.groups.axis_maps import along_axis
from weightsym.groups.placements import Placement
from weightsym.groups.symmetries import PermutationGroup, Symmetries
from weightsym.matching.difference import Difference, Network, difference
from weightsym.matching.shapes import in_one_shape, longest_run
from weightsym.matching.walk import fixed_points
from weightsym.networks.devices import at_least_single

T = TypeVar("T")
Verdict = Literal["same function", "made from it", "parts of it", "independent", "cannot be told"]
CHANCE = 1e-6
"""Probabilities below this tell that one network was made from the other."""
EXCESS = 0.3
"""The share of units that agree beyond chance in independent networks, at most (0.2 was seen)."""
_FAR = 0.9  # distance of tensors, of which 1.41 is that of independent ones
_UNLIKELY = 0.05  # the probability of as many units of independent networks that agree
_EQUAL = 1e-5  # a rest that rounding explains
_NEAR = 1e-3  # of one tensor
_SLACK = 3.0  # of distances, for the matrices and scales that have been fitted
_UNDERFLOW = 170  # 1 / 171! is no double
_LEAST = 1e-300  # probability that is shown
_SORTED = 1e-3  # the probability of the order of exchangeable units
_EXACT = 2**20  # numbers of a tensor that are compared
_FEW = 4  # units, of which fewer are often in order


@dataclass(frozen=True)
class SharedUnits:
    """The units of one group that two networks share.

    Attributes:
        name: the tensor that writes the units.
        units: how many there are.
        in_place: how many of B are matched to the unit of A with the same number, of other widths
            how many at most to units in the same order; None where units of both are sorted alike,
            as the states of a Mamba begin, so that places prove nothing.
        agreeing: how many are matched alike by both parts of their weights; None where there are
            too few weights to be parted.
        among: how many units the network with more of them has, None for the same number.
        rest: what is left between the tensors that write them, relative to their norms.
        compared: how many units were looked for in both parts, None for all.

    >>> from weightsym import SharedUnits
    >>> SharedUnits("up.weight", 2048, in_place=1, agreeing=500, compared=512).tried
    512
    """

    name: str
    units: int
    in_place: int | None
    agreeing: int | None
    among: int | None = None
    rest: float = math.nan
    compared: int | None = None

    @property
    def tried(self) -> int:
        """How many units were looked for in both parts."""
        return self.units if self.compared is None else self.compared

    @property
    def is_apart(self) -> bool:
        """True if enough units are compared, hardly any is shared, and tensors are far apart."""
        if self.agreeing is None or p_agreeing([(self.tried, self.tried)]) >= CHANCE:
            return False
        is_unlike = self.agreeing < EXCESS * self.tried and self.rest > _FAR
        return is_unlike and p_in_place([self]) > _UNLIKELY


@dataclass(frozen=True, eq=False)
class Relation:
    r"""Two networks in one frame, and tests of whether one was made from the other.

    Attributes:
        difference: both networks in one frame, and what is left between them.
        groups: the units that are shared, group by group.
        p_exact: of as many units in their places, or in order. If training treats units alike, the
            permutation between independent networks is uniform, whatever data they saw:
            :math:`P(F \ge k) \le 1 / k!`, and :math:`P(L \ge k) \le \tbinom{n}{k} / k!` of the
            longest run in order among n.
        p_robust: of as many units that are matched alike by two parts of their weights. It is
            calibrated: independent networks agree in less than ``EXCESS`` of their units beyond
            chance.
        p_close: of tensors as close, if their directions were random, for any of all permutations.
            All three are at least 1e-300.
        partial: True if one network has more units, layers, tokens or classes.

    >>> import torch
    >>> from torch import nn
    >>> from weightsym import params as P
    >>> from weightsym import discover, permute, random_permutations, relation
    >>> net = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 9))
    >>> sym, w = discover(net, torch.randn(8, 9)), P.of(net)
    >>> copy = {n: t + 0.001 * torch.randn_like(t) for n, t in w.items()}
    >>> found = relation(permute(copy, sym, random_permutations(sym)), w, sym)
    >>> found.verdict, found.p_robust < 1e-6
    ('made from it', True)
    """

    difference: Difference
    groups: tuple[SharedUnits, ...]
    p_exact: float
    p_robust: float
    p_close: float
    partial: bool = False

    @property
    def verdict(self) -> Verdict:
        """The same function, made from it (or both from one start), independent, or unknown.

        Parts are what networks of other shapes share, or related ones of which some groups have
        nothing in common (``shares``). Nothing can be told where so few units are compared that
        even if all of them agreed, that would not be beyond chance, or where so many agree that
        this is unlikely.
        """
        if self.difference.rest <= _EQUAL and (self.p_close < CHANCE or self._equal_everywhere):
            return "same function"
        if min(self.p_exact, self.p_robust, self.p_close) < CHANCE:
            apart = {group.is_apart for group in self.groups}
            return "parts of it" if self.partial or len(apart) > 1 else "made from it"
        every = [(g.tried, g.tried) for g in self.groups if g.agreeing is not None]
        is_decided = p_agreeing(every) < CHANCE and self.p_robust > _UNLIKELY
        return "independent" if is_decided else "cannot be told"

    @property
    def _equal_everywhere(self) -> bool:
        """True if no small tensor differs beside large ones."""
        last = self.difference.stages[-1]
        return all(square <= _NEAR**2 * last.sizes[n] for n, square in last.squares.items())

    @property
    def shares(self) -> dict[str, float]:
        """By group the share of its units that are in their places or agree, the larger of both."""
        return {
            g.name: max((g.in_place or 0) / g.units, (g.agreeing or 0) / g.tried)
            for g in self.groups
        }


def relation(
    a: Network,
    b: Network,
    sym: Symmetries,
    sym_b: Symmetries | None = None,
    *,
    seed: int = 0,
) -> Relation:
    """Tell whether two networks are one function, whether one was made from the other, or neither.

    A network that was trained on, pruned, rounded or merged keeps its units, and a symmetry only
    moves them. Positions and tokens are not exchanged, and do not count. Norms with gains hold a
    stream fixed: fold those of both networks first (`fold_norms`).

    One network may have fewer units, layers, tokens or classes, and nothing more than the other:
    its units are then matched to as many of the other one (`in_one_shape`).

    Args:
        a: one network.
        b: the other one.
        sym: what `discover` returned.
        sym_b: what it returned for the second network, if that has other shapes.
        seed: of the order from which units are matched.

    >>> import torch
    >>> from torch import nn
    >>> from weightsym import params as P
    >>> from weightsym import discover, relation
    >>> nets = [nn.Sequential(nn.Linear(9, n), nn.ReLU(), nn.Linear(n, 9)) for n in (32, 24)]
    >>> sym, sym_b = (discover(net, torch.randn(8, 9)) for net in nets)
    >>> relation(*map(P.of, nets), sym, sym_b).verdict
    'independent'
    """
    differ = sym_b is not None and sym_b.shapes != sym.shapes
    if differ and sym_b is not None:
        a, b, sym = in_one_shape(a, b, sym, sym_b)
    found = difference(a, b, sym, seed=seed)
    groups, totals = list[SharedUnits](), [_totals(w, sym) for w in (a, b)]
    for k, (group, order) in enumerate(zip(sym.permutations, found.permutations, strict=True)):
        there = [_with_weights(every, group) if differ else order >= 0 for every in totals]
        units = min(int(some.sum()) for some in there)
        if units > 1:
            whole = units == group.units
            places = (
                fixed_points(order) if whole else longest_run(order[there[1] & there[0][order]])
            )
            in_place = None if _are_sorted(totals, group) else places
            among = None if whole else group.units
            agreeing, rest = found.agreeing.get(k), _rest(found, group.name)
            tried = found.compared.get(k, group.units)
            compared = None if tried == group.units else tried
            groups.append(SharedUnits(group.name, units, in_place, agreeing, among, rest, compared))
    return Relation(
        found,
        tuple(groups),
        max(p_in_place(groups), _LEAST),
        max(p_agreeing([(g.tried, g.agreeing) for g in groups if g.agreeing is not None]), _LEAST),
        max(_p_close(found, sym), _LEAST),
        differ,
    )


_Totals = Mapping[int, tuple[Tensor, Tensor]]


def _totals(params: Network, sym: Symmetries) -> _Totals:
    """By axis that permutations move, the sum and the sum of squares at every position."""
    result = {}
    for a in sym.placements_by_axis("permutations"):
        if sym.axes[a].tensor in sym.compared:
            w = at_least_single(params[sym.axes[a].tensor])
            rows = along_axis(w, sym.axes[a], 0)[None].flatten(0, -2)
            ones = rows.new_ones(len(rows))
            result[a] = (ones @ rows).double().cpu(), square_sums(rows[None], (2,))[0].cpu()
    return result


def _of_units(totals: _Totals, place: Placement) -> list[Tensor]:
    """The sums and the sums of squares of all units at a place."""
    at = place.positions.flatten(1).cpu()
    return [values[at].sum(1) for values in totals[place.axis]]


def _with_weights(totals: _Totals, group: PermutationGroup) -> Tensor:
    """The units of a group that have weights."""
    places = [p for p in group.placements if p.axis in totals]
    return torch.stack([_of_units(totals, p)[1] > 0 for p in places]).any(0)


def _rest(found: Difference, name: str) -> float:
    """What is left of a tensor, NaN where it is zero or not a weight."""
    last = found.stages[-1]
    size = last.sizes.get(name, 0.0)
    return math.sqrt(last.squares[name] / size) if size > 0 else math.nan


def _are_sorted(totals: Sequence[_Totals], group: PermutationGroup) -> bool:
    """True if one statistic of the weights sorts the units of both networks alike."""
    places = [p for p in group.placements if p.axis in totals[0]]
    limit = _SORTED / max(2 * len(places), 1)

    def sorts(place: Placement) -> bool:
        first = _trends(totals[0], place)
        if all(_p_order(x, group.units) >= limit for x in first):
            return False
        pairs = zip(first, _trends(totals[1], place), strict=True)
        return any(
            x * y > 0 and _p_order(min(x, y, key=abs), group.units) < limit for x, y in pairs
        )

    return group.units >= _FEW and any(map(sorts, places))


def _trends(totals: _Totals, place: Placement) -> list[float]:
    """Rank correlations of the means and the norms of units with their numbers."""
    ranks = [_ranks(values.numpy()) for values in _of_units(totals, place)]
    numbers = range(len(place.positions))
    return [float(np.corrcoef(r, numbers)[0, 1]) if np.ptp(r) > 0 else 0.0 for r in ranks]


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rank of every number, the mean of their ranks for equal ones."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


def _p_order(correlation: float, units: int) -> float:
    """The probability of a rank correlation as large, by Student's law."""
    return float(betainc(units / 2 - 1, 0.5, max(0.0, 1 - correlation**2)))


# ------------------------------------------------------------ probabilities
def law_of_fixed_points(units: int) -> NDArray[np.float64]:
    """Probabilities of 0, 1, 2 ... fixed points of a uniform permutation.

    Args:
        units: how many are permuted.
    """
    least = np.cumsum([(-1.0) ** j / math.factorial(j) for j in range(min(units, 30) + 1)])
    counts = range(min(units, _UNDERFLOW) + 1)
    return np.array([least[min(units - k, 30)] / math.factorial(k) for k in counts]).clip(0)


def bounds_of_runs(units: int) -> NDArray[np.float64]:
    r"""Bounds of the probabilities of 0, 1, 2 ... units in order in a uniform permutation.

    .. math:: P(L \ge k) \le \binom{n}{k} / k!

    Args:
        units: how many are permuted.
    """
    k = np.arange(units + 1)
    logs = gammaln(units + 1) - gammaln(units - k + 1) - 2 * gammaln(k + 1)
    return np.trim_zeros(np.exp(np.minimum(logs, 0)), "b")


def p_in_place(groups: Sequence[SharedUnits]) -> float:
    """The probability of as many units in place or in order, in one group or in all together.

    Groups are permuted independently; what is smaller, of the sum or of the best group, counts
    twice.

    Args:
        groups: those without known places are left out.
    """

    def tail(every: Sequence[SharedUnits]) -> float:
        total = np.ones(1)
        for g in every:
            law = law_of_fixed_points if g.among is None else bounds_of_runs
            total = np.trim_zeros(np.convolve(total, law(g.units)), "b")
        return min(1.0, float(total[sum(g.in_place or 0 for g in every) :].sum()))

    return _together(tail, [g for g in groups if g.in_place is not None])


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


def _together(p: Callable[[Sequence[T]], float], counts: Sequence[T]) -> float:
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
    for name in sorted(sym.compared):
        (x, share), (y, _) = (_beyond_means(w[name], sym, name) for w in found.moved)
        if share * x.numel() < 2 or min(float(x.norm()), float(y.norm())) == 0:
            continue
        apart = float(x.div_(x.norm()).sub_(y.div_(y.norm())).norm())  # 2 sin(alpha / 2)
        apart = max(apart, 1e-12)
        sines.append(apart * math.sqrt(1 - apart**2 / 4) if apart < 1 else 1.0)
        numbers.append(share * x.numel() - 1)
    free = max(0.0, 1 - sym.dimension / max(sum(numbers), 1))
    logs = [-n * math.log(min(1.0, _SLACK * s)) for n, s in zip(numbers, sines, strict=True)]
    choices = sym.log10_permutations * math.log(10) + sym.sign_dof * math.log(2)
    return float(gammaincc(max(len(logs), 1), max(free * sum(logs) - choices, 0.0)))


def _beyond_means(w: Tensor, sym: Symmetries, name: str) -> tuple[Tensor, float]:
    """What the weights of a tensor have beyond the means over its units, and how much is free."""
    some = w[: max(1, _EXACT // max(1, w[0].numel()))] if w.numel() > _EXACT else w
    w = some.double()
    share, rest = 1.0, w.clone()
    dims = {sym.axes[a].dim for a in sym.axes_of[name]}
    for dim in sorted(d for d in dims if d is not None):
        rest.sub_(rest.mean(dim, keepdim=True))
        share *= 1 - 1 / w.shape[dim]
    still = float(rest.norm()) < 1e-6 * float(w.norm())
    return rest.zero_() if still else rest, share
