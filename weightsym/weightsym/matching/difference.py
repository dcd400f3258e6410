"""The difference between two networks: symmetries, step by step, and an unexplained rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from weightsym.arguments import check_count
from weightsym.forms.canonical import balanced_together
from weightsym.forms.fingerprint import at_least_mass
from weightsym.forms.scales_and_signs import canonical_scales_and_signs
from weightsym.groups.actions import multiply, permute_some
from weightsym.groups.elements import compose, identity, random_permutations
from weightsym.groups.mixing import mix_some, random_mixings
from weightsym.groups.placements import LinearKind, Placement
from weightsym.groups.symmetries import LinearGroup, PermutationGroup, SignGroup, Symmetries
from weightsym.groups.units import unit_rows
from weightsym.groups.validation import check_finite, check_one_network
from weightsym.matching.ascent import where_members
from weightsym.matching.channels import distance
from weightsym.matching.match import ByWeights, match
from weightsym.matching.match_all import match_all
from weightsym.networks.devices import precise, widest
from weightsym.networks.randomness import keyed_generator
from weightsym.params import Params, is_weight, unstack

_SHARE, _CHANCE = 0.5, 1e-6
_ORDER, _ROUNDS = "units in order", 3
_ROUNDING = 1e-9  # of squared distances
_EQUAL = 1e-5  # a rest that rounding explains
_CLOSE = 0.1  # of squared norms: nobody looks for a better start
_AT_ONCE = 2**23
"""Numbers of unrelated networks that are matched at once."""


@dataclass(frozen=True)
class Stage:
    r"""The distance of two networks from each other after a step.

    .. math:: \text{relative}^2 = \frac{2 \|a - b\|^2}{\|a\|^2 + \|b\|^2}

    Attributes:
        name: of the step.
        squares: squared distance, by tensor.
        sizes: mean of the squared norms of both, by tensor.

    >>> from weightsym import Stage
    >>> stage = Stage("as given", {"1.bias": 9.0, "3.bias": 16.0}, {"1.bias": 36.0, "3.bias": 64.0})
    >>> stage.distance, stage.relative, stage.by_layer()
    (5.0, 0.5, {'1': 0.5, '3': 0.5})
    """

    name: str
    squares: dict[str, float] = field(repr=False)
    sizes: dict[str, float] = field(repr=False)

    @property
    def distance(self) -> float:
        """Euclidean distance of all weights."""
        return math.sqrt(sum(self.squares.values()))

    @property
    def relative(self) -> float:
        """The distance in units of the norms, 1.41 where weights have nothing in common."""
        return _ratio(sum(self.squares.values()), sum(self.sizes.values()))

    def by_layer(self) -> dict[str, float]:
        """Relative distances of the tensors of every layer together."""
        layers: dict[str, list[str]] = {}
        for name in self.squares:
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
        return {
            layer: _ratio(sum(self.squares[n] for n in names), sum(self.sizes[n] for n in names))
            for layer, names in layers.items()
        }


@dataclass(frozen=True, eq=False)
class Difference:
    """Two networks in one frame, and what has brought them there.

    Attributes:
        stages: as the networks are given, then after every step.
        a: the first network after the last step; its function is that of the network as given.
        b: the second one.
        nulls: networks that have nothing in common with the second one, but look like the first
            (`unrelated`), after the same steps.
        kept: units of A whose partner in B has their own place, counted over all groups.
        groups: how many groups of units there are: as many units keep their place by chance.
        units: the number of all these units.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import difference, discover, rescale
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> found = difference(rescale(w, sym, [torch.full((8,), 2.0)]), w, sym)
    >>> {name: round(share, 2) for name, share in found.explained.items()}
    {'least mass': 1.0, 'units in order': 0.0}
    """

    stages: tuple[Stage, ...]
    a: Params = field(repr=False)
    b: Params = field(repr=False)
    nulls: tuple[Stage, ...] = field(repr=False)
    kept: int
    groups: int
    units: int

    @property
    def rest(self) -> float:
        """The relative distance that no step explains."""
        return self.stages[-1].relative

    @cached_property
    def null(self) -> Tensor:
        """The same of networks that have nothing in common."""
        return torch.tensor([stage.relative for stage in self.nulls], dtype=torch.float64)

    @property
    def share(self) -> float:
        """Squared rest as a share of what unrelated networks have in the mean."""
        mean = float(self.null.square().mean())
        return self.rest**2 / mean if mean > 0 else math.nan

    @property
    def z(self) -> float:
        """Standard deviations between the rest and the mean of unrelated networks."""
        deviation = float(self.null.std())
        return (self.rest - float(self.null.mean())) / deviation if deviation > 0 else math.nan

    @property
    def chance(self) -> float:
        """Probability that independent networks keep as many units in their places.

        The labels of units mean nothing, so that the permutation between independent networks is
        uniform, and the number of its fixed points nearly Poisson, one in the mean for each group.
        """
        if not self.kept:
            return 1.0
        mean, preserved = torch.tensor([self.groups, self.kept], dtype=torch.float64)
        return float(torch.special.gammainc(preserved, mean))

    @property
    def related(self) -> bool:
        """True if one network comes from the other, or both from one start.

        Either nothing but rounding is left, or the squared rest is less than half of that of every
        unrelated network, or more units are in their places than chance puts there once in a
        million times.
        """
        near = self.rest < _EQUAL or self.rest**2 < _SHARE * float(self.null.min()) ** 2
        return near or self.chance < _CHANCE

    @property
    def explained(self) -> dict[str, float]:
        """The share of the squared relative distance that every step takes off."""
        values = [stage.relative**2 for stage in self.stages]
        drops = zip(self.stages[1:], values, values[1:], strict=False)
        whole = values[0] or 1.0
        return {stage.name: (before - after) / whole for stage, before, after in drops}


@torch.no_grad()
def difference(
    a: Params,
    b: Params,
    sym: Symmetries,
    *,
    method: ByWeights = "ascent",
    nulls: int = 8,
    seed: int = 0,
) -> Difference:
    r"""Bring two networks together by all symmetries, and see what is left between them.

    .. math:: \text{rest}^2 = \frac{2 \|g\, a - h\, b\|^2}{\|g\, a\|^2 + \|h\, b\|^2}

    Both get the least mass that scales allow, and no shifts; then the units of A are put into the
    order of those of B, with the signs that fit; then the channels that matrices may mix are
    matched (`match_all`). What is left does not depend on which networks of their orbits A and B
    are. It is compared with what is left between B and networks that only look like A.

    Args:
        a: the network that moves.
        b: the network to come close to.
        sym: what `discover` returned.
        method: how units are matched, see `match`.
        nulls: how many unrelated networks are matched to B.
        seed: of the order from which units are matched, and of the unrelated networks.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import difference, discover, permute, random_permutations
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> found = difference(permute(w, sym, random_permutations(sym)), w, sym)
    >>> found.rest < 1e-3, found.related
    (True, True)
    """
    check_count("nulls", nulls, least=2)
    for name, params in (("a", a), ("b", b)):
        check_one_network(params, sym, name)
        check_finite(params, sym, name)
    if not any(group.units > 1 for group in sym.permutations):
        raise ValueError("`sym` must have units that can be exchanged, and this network has none.")
    way = _Way(sym, method, seed)
    steps = [_Step("as stored", a, b, identity(sym)), *way.steps(a, b)]
    last = steps[-1]
    groups = [k for k, group in enumerate(sym.permutations) if group.units > 1]
    places = [last.permutations[k] for k in groups]
    return Difference(
        tuple(_stage(step) for step in steps),
        last.a,
        last.b,
        tuple(_nulls(way, _with_signs_of(last, sym), b, nulls)),
        sum(int((p == torch.arange(len(p))).sum()) for p in places),
        len(groups),
        sum(map(len, places)),
    )


# ------------------------------------------------------------ steps
class _Step(NamedTuple):
    """Both networks after a step, the first of which may be a stack, and how its units moved."""

    name: str
    a: Params
    b: Params
    permutations: Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class _Way:
    """A way of bringing networks together."""

    sym: Symmetries
    method: ByWeights
    seed: int

    def steps(self, a: Params, b: Params) -> list[_Step]:
        """Both networks after each of the steps that this architecture has."""
        unmoved = identity(self.sym)
        (moving, _), (goal, _) = at_least_mass(a, self.sym), at_least_mass(b, self.sym)
        steps = []
        if self.sym.scalings or self.sym.shifts:
            steps.append(_Step("least mass", moving, goal, unmoved))
        ends = self._in_order(moving, goal)
        steps.append(_closest(ends))
        if self.sym.linear:
            steps.append(self._mixed(steps[-1], ends[bool(self.sym.signs) : -1]))
        return steps

    def _in_order(self, moving: Params, goal: Params) -> list[_Step]:
        """Units matched from a random order, so that the labels that they had do not count.

        What does not fit is flipped, and matched again. There is one end for every way to choose
        signs at first, and last the order as it was, which is taken only where it is closest.
        """
        sym = self.sym
        shuffle = random_permutations(sym, keyed_generator(self.seed, "labels"))
        start = _Step(_ORDER, permute_some(moving, sym, shuffle), goal, shuffle)
        ends = [self._fitted(self._matched(start, signs=False))]
        if sym.signs:
            signs = steady_signs(goal, sym)
            steady = multiply(goal, sym, {"signs": signs})
            for candidate in self._sign_choices(start.a):
                end = self._fitted(self._matched(start._replace(a=candidate, b=steady)))
                ends.append(end._replace(a=multiply(end.a, sym, {"signs": signs}), b=goal))
        return [*ends, start._replace(a=moving, permutations=identity(sym))]

    def _fitted(self, best: _Step) -> _Step:
        """Flip what does not fit, and match again, until that brings nothing closer."""
        for _ in range(_ROUNDS if self.sym.signs else 0):
            flipped = best._replace(a=fitted_signs(best.a, best.b, self.sym))
            before, best = best, _closest([best, flipped, self._matched(flipped)])
            if not bool((_apart(best) < _apart(before)).any()):
                break
        return best

    def _matched(self, step: _Step, signs: bool = True) -> _Step:
        """Units in the order of those of the second network."""
        matched = match(
            step.a,
            step.b,
            self.sym,
            method=self.method,
            signs=signs and bool(self.sym.signs),
            seed=self.seed,
        )
        moved = compose(step.permutations, matched.permutations, self.sym)
        return step._replace(a=matched.apply(step.a, self.sym), permutations=moved)

    def _mixed(self, before: _Step, ends: Sequence[_Step]) -> _Step:
        """Channels matched by matrices, where the second network is balanced.

        The first one starts as it stands beside the second one, then as balanced by itself from
        every end of matching units, of which distances do not tell the best before channels fit.
        """
        goal, beside = balanced_together([before.b, before.a], self.sym, "min-mass")
        best = self._mixed_from(before, beside, goal)
        for k, end in enumerate(ends):
            (alone,) = balanced_together([end.a], self.sym, "min-mass")
            best = _closest([best, self._mixed_from(end, self._sign_choices(alone)[k], goal)])
            if bool((_apart(best) < _CLOSE * _squares(best)).all()):
                break
        return best

    def _sign_choices(self, params: Params) -> list[Params]:
        """A network with steady signs, and with those of whole streams turned.

        One number among all that are written into a stream tells its sign, often another one after
        training; with the wrong sign none of its channels finds its place.
        """
        sym = self.sym
        if not sym.signs:
            return [params]
        steady = multiply(params, sym, {"signs": steady_signs(params, sym)})
        if all(group.units > 1 for group in sym.signs):
            return [steady]
        turned = [torch.full((g.units,), -1.0 if g.units == 1 else 1.0) for g in sym.signs]
        candidate = multiply(steady, sym, {"signs": turned})
        return [steady, multiply(candidate, sym, {"signs": gain_signs(candidate, sym)})]

    def _mixed_from(self, before: _Step, moving: Params, goal: Params) -> _Step:
        sym = self.sym
        end = _mixed(_Step("channels mixed", moving, goal, before.permutations), sym)
        if sym.signs:
            flipped = end._replace(a=fitted_signs(end.a, goal, sym))
            end = _closest([end, _mixed(flipped, sym)])
        return end


def _mixed(step: _Step, sym: Symmetries) -> _Step:
    """Channels and units where matrices and permutations together bring them."""
    matched = match_all(step.a, step.b, sym)
    moved = compose(step.permutations, matched.permutations, sym)
    return step._replace(a=matched.apply(step.a, sym), permutations=moved)


def _closest(steps: Sequence[_Step]) -> _Step:
    """Of every member the first of the closest steps, which share the second network."""
    best = steps[0]
    for step in steps[1:]:
        better = _apart(step) < _apart(best) * (1 - _ROUNDING)
        best = best._replace(
            a={n: where_members(better, t, best.a[n]) for n, t in step.a.items()},
            permutations=[
                where_members(better, *torch.broadcast_tensors(*pair))
                for pair in zip(step.permutations, best.permutations, strict=True)
            ],
        )
    return best


def _apart(step: _Step) -> Tensor:
    """Squared distance of all weights, of every member."""
    return distance(step.a, step.b, [n for n, t in step.b.items() if is_weight(n, t)]).square()


def _squares(step: _Step) -> float:
    """Squared norm of the second network."""
    return sum(float(t.double().square().sum()) for n, t in step.b.items() if is_weight(n, t))


def _with_signs_of(step: _Step, sym: Symmetries) -> Params:
    """The first network with the signs that make the second one steady.

    Gains of one sign have a mean that unrelated networks share, and keep.
    """
    return multiply(step.a, sym, {"signs": steady_signs(step.b, sym)}) if sym.signs else step.a


def _nulls(way: _Way, a: Params, b: Params, nulls: int) -> Iterator[Stage]:
    """The rest between B and networks that only look like A."""
    at_once = max(1, _AT_ONCE // max(1, sum(t.numel() for t in a.values())))
    for first in range(0, nulls, at_once):
        like = unrelated(a, way.sym, min(at_once, nulls - first), way.seed + first)
        last = way.steps(like, b)[-1]
        for moving in unstack(last.a):
            yield _stage(last._replace(a=moving))


# ------------------------------------------------------------ distances
def _stage(step: _Step) -> Stage:
    """The distance of two networks from each other, tensor by tensor."""
    squares, sizes = dict[str, float](), dict[str, float]()
    for name in (n for n, t in step.b.items() if is_weight(n, t)):
        moving, goal = step.a[name].double(), step.b[name].double()
        squares[name] = float((moving - goal).square().sum())
        sizes[name] = float(moving.square().sum() + goal.square().sum()) / 2
    return Stage(step.name, squares, sizes)


def _ratio(squares: int | float, sizes: int | float) -> float:
    return math.sqrt(squares / sizes) if sizes > 0 else 0.0


# ------------------------------------------------------------ unrelated networks
def unrelated(params: Params, sym: Symmetries, count: int, seed: int = 0) -> Params:
    r"""Networks whose units are random mixtures of the units of a network.

    The units of every group are multiplied by a random rotation that leaves the vector of ones
    alone. All means and covariances over the units of a layer stay what they are, of the weights
    that enter and leave them, of biases and gains, and so does the product :math:`W_2 W_1`; where
    the other side of these weights has units, too, those are rotated along. Only what a single unit
    is gets lost, and with it the function. Channels that matrices may mix are rotated on one side.

    Args:
        params: one network.
        sym: what `discover` returned.
        count: how many.
        seed: of the rotations.

    Returns:
        A stack.
    """
    mixed = replace(sym, linear=_rotated(sym))
    stack = {n: t.expand(count, *t.shape) for n, t in params.items()}
    return mix_some(stack, mixed, random_mixings(mixed, keyed_generator(seed, "unrelated"), count))


def _rotated(sym: Symmetries) -> tuple[LinearGroup, ...]:
    """The groups of permutations as groups of rotations, without modules that change places.

    Channels that matrices may mix are rotated where they are read, and not where they are written:
    otherwise the function would stay. Two units are rotated without regard to their mean, which
    nothing else would leave alone.
    """
    inside = sym.covered(sym.permutations, get_args(LinearKind))
    units = tuple(
        LinearGroup(
            "centred" if group.units > 2 else "orthogonal",
            1,
            group.units,
            group.name,
            _places(group),
        )
        for group, mixed in zip(sym.permutations, inside, strict=True)
        if group.units > 1 and not group.tensors and (group.kind == "block" or not mixed.all())
    )
    return (*units, *map(_rotated_where_read, sym.linear))


def _rotated_where_read(group: LinearGroup) -> LinearGroup:
    places = [p for p in group.placements if p.exponent == -1] or group.placements[1:]
    kind: LinearKind = "centred" if group.kind == "centred" else "orthogonal"
    return replace(group, kind=kind, placements=tuple(replace(p, exponent=1) for p in places))


def _places(group: PermutationGroup) -> tuple[Placement, ...]:
    return tuple(
        Placement(p.axis, p.positions[None]) for p in group.placements if not p.meets_itself
    )


# ------------------------------------------------------------ signs of units
_SWEEPS = 5


def steady_signs(params: Params, sym: Symmetries) -> list[Tensor]:
    """Signs that make gains positive, and elsewhere those of canonical forms.

    The largest weight of a unit may be another one after training; gains that begin at one stay
    positive.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
    """
    signs = gain_signs(params, sym)
    _, others = canonical_scales_and_signs(multiply(params, sym, {"signs": signs}), sym, None)
    return [
        sign if _gain(sym, group) is not None else partner
        for group, sign, partner in zip(sym.signs, signs, others, strict=True)
    ]


def gain_signs(params: Params, sym: Symmetries) -> list[Tensor]:
    """Signs that make gains positive, one where no gain tells.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
    """
    places = [_gain(sym, group) for group in sym.signs]
    return [
        torch.ones(group.units)
        if placement is None
        else _sign(unit_rows(params, sym, placement)[..., 0])
        for placement, group in zip(places, sym.signs, strict=True)
    ]


def fitted_signs(params: Params, reference: Params, sym: Symmetries) -> Params:
    """The same functions with the signs that bring units closest to those of a reference.

    One group after the other takes the signs that suit the rest, until none changes: every step
    lowers the distance.

    Args:
        params: one network or a stack.
        reference: one network, whose units stand in the same order.
        sym: what `discover` returned.
    """
    for _ in range(_SWEEPS):
        moved = False
        for k, group in enumerate(sym.signs):
            sign = _sign(_similarity(params, reference, sym, group))
            if bool((sign < 0).any()):
                every = [torch.ones(g.units) for g in sym.signs]
                every[k], moved = sign, True
                params = multiply(params, sym, {"signs": every})
        if not moved:
            break
    return params


def _gain(sym: Symmetries, group: SignGroup) -> Placement | None:
    """The numbers of a norm that tell the sign of each unit, if no other group changes them."""
    for placement in group.placements:
        on_axis = sym.placements_by_axis("signs")[placement.axis]
        if sym.axes[placement.axis].role.startswith("gain") and placement.positions.shape[1] == 1:
            return placement if len(on_axis) == 1 else None
    return None


def _similarity(params: Params, reference: Params, sym: Symmetries, group: SignGroup) -> Tensor:
    """Inner products of units with those of a reference, over all weights that they flip."""
    device = next(iter(params.values())).device
    total = torch.zeros(group.units, dtype=widest(device), device=device)
    for placement in group.placements:
        name = sym.axes[placement.axis].tensor
        if name in params and is_weight(name, params[name]) and placement.exponent % 2:
            rows = (precise(unit_rows(p, sym, placement)) for p in (params, reference))
            total = total + (next(rows) * next(rows)).sum(-1)
    return total


def _sign(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0)
