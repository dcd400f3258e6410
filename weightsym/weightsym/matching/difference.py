"""The difference between two networks: symmetries, step by step, and an unexplained rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from weightsym.forms.canonical import balanced_together
from weightsym.forms.fingerprint import Fingerprint, at_least_mass, fingerprint_of
from weightsym.forms.scales_and_signs import canonical_scales_and_signs
from weightsym.groups.actions import act, compose
from weightsym.groups.elements import identity, random_permutations
from weightsym.groups.placements import Placement
from weightsym.groups.symmetries import SignGroup, Symmetries
from weightsym.groups.units import unit_rows
from weightsym.groups.validation import check_finite, check_one_network
from weightsym.matching.channels import distance
from weightsym.matching.match import ByWeights, match
from weightsym.matching.match_all import match_all
from weightsym.matching.walk import Walk
from weightsym.networks.devices import precise, widest
from weightsym.networks.randomness import keyed_generator
from weightsym.params import Params, is_weight

_ORDER, _ROUNDS = "units in order", 3
_ROUNDING = 1e-9  # of squared distances
_CLOSE = 0.1  # of squared norms: nobody looks for a better start
_SMALL = 2**16  # weights, of networks that are matched from every start
_MANY = 9  # units: chance leaves no half of more in their places


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
        permutations: for every unit of B the one of A, as it was given, that matching by weights
            finds without knowing the places of units.
        agreeing: by group of permutations, how many units both parts of their weights match alike
            (see `relation`); groups with too few weights are left out.
        fingerprints: of both networks, see `fingerprint`.

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
    permutations: tuple[Tensor, ...] = field(repr=False)
    agreeing: Mapping[int, int] = field(repr=False)
    fingerprints: tuple[Fingerprint, ...] = field(default=(), repr=False)

    @property
    def rest(self) -> float:
        """The relative distance that no step explains."""
        return self.stages[-1].relative

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
    seed: int = 0,
) -> Difference:
    r"""Bring two networks together by all symmetries, and see what is left between them.

    .. math:: \text{rest}^2 = \frac{2 \|g\, a - h\, b\|^2}{\|g\, a\|^2 + \|h\, b\|^2}

    Both get the least mass that scales allow, and no shifts; then the units of A are put into the
    order of those of B, with the signs that fit; then the channels that matrices may mix are
    matched (`match_all`). What is left does not depend on which networks of their orbits A and B
    are. `relation` says what it means.

    Args:
        a: the network that moves.
        b: the network to come close to.
        sym: what `discover` returned.
        method: how units are matched, see `match`.
        seed: of the order from which units are matched.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import difference, discover, permute, random_permutations
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> difference(permute(w, sym, random_permutations(sym)), w, sym).rest < 1e-3
    True
    """
    for name, params in (("a", a), ("b", b)):
        check_one_network(params, sym, name)
        check_finite(params, sym, name)
    if not any(group.units > 1 for group in sym.permutations):
        raise ValueError("`sym` must have units that can be exchanged, and this network has none.")
    least = [at_least_mass(w, sym) for w in (a, b)]
    (moving, _), (goal, _) = least
    steps = [_Step("as stored", a, b, identity(sym))]
    if sym.scalings or sym.shifts:
        steps.append(_Step("least mass", moving, goal, identity(sym)))
    ends = _Search(sym, method, seed).in_order(moving, goal)
    matched = _closest(ends)
    steps.append(_closest([matched, replace(matched, a=moving, permutations=identity(sym))]))
    if any(group.rescales for group in sym.linear):
        least = [at_least_mass(w, sym, mixing=True) for w in (a, b)]
    prints = tuple(fingerprint_of(*each, sym) for each in least)
    walk = Walk(least[0][0], least[1][0], sym)
    if sym.linear:
        steps.append(_mixed(steps[-1], ends, walk))
    stages = tuple(_stage(step) for step in steps)
    last, orders = steps[-1], tuple(matched.permutations)
    return Difference(stages, last.a, last.b, orders, walk.agreeing, prints)


# ------------------------------------------------------------ steps
@dataclass(frozen=True, eq=False)
class _Step:
    """Both networks after a step, and how the units of the first one have moved."""

    name: str
    a: Params
    b: Params
    permutations: Sequence[Tensor]

    @cached_property
    def apart(self) -> float:
        """Squared distance of all weights."""
        return float(distance(self.a, self.b, self._names)) ** 2

    @property
    def _names(self) -> list[str]:
        return [name for name, t in self.b.items() if is_weight(name, t)]

    @property
    def is_small(self) -> bool:
        """True for networks in which a search costs little."""
        return sum(self.b[name].numel() for name in self._names) < _SMALL

    @property
    def settled(self) -> bool:
        """True if no other start would change much: little is left, or units keep their places.

        In small networks, nothing but rounding is little, in every tensor.
        """
        sizes = {name: float(self.b[name].double().square().sum()) for name in self._names}
        if self.is_small:
            pairs = ((self.a[n].double() - self.b[n].double(), size) for n, size in sizes.items())
            return all(float(d.square().sum()) <= _ROUNDING * size for d, size in pairs)
        squares = sum(sizes.values())
        many = [p for p in self.permutations if len(p) > _MANY]
        kept = [float((p == torch.arange(len(p))).double().mean()) for p in many]
        return self.apart < _CLOSE * squares or max(kept, default=0.0) > 0.5


def _closest(steps: Sequence[_Step]) -> _Step:
    """The first of the closest steps."""
    best = steps[0]
    for step in steps[1:]:
        best = step if step.apart < best.apart * (1 - _ROUNDING) else best
    return best


def _until_settled(steps: Iterator[_Step]) -> list[_Step]:
    """All ends of a search, which stops at one that is settled."""
    ends = [next(steps)]
    while not ends[-1].settled and (end := next(steps, None)) is not None:
        ends.append(end)
    return ends


@dataclass(frozen=True, eq=False)
class _Search:
    """A search for the order of units, from a random one: the labels that they had do not count."""

    sym: Symmetries
    method: ByWeights
    seed: int

    def in_order(self, moving: Params, goal: Params) -> list[_Step]:
        """Units in the order of those of the goal, with signs that fit, from several starts."""
        shuffle = random_permutations(self.sym, keyed_generator(self.seed, "labels"))
        start = _Step(_ORDER, act(moving, self.sym, {"permutations": shuffle}), goal, shuffle)
        return _until_settled(self._ends(start))

    def _ends(self, start: _Step) -> Iterator[_Step]:
        """Ends of matching with steady signs, with those of whole streams turned, and without."""
        sym, goal = self.sym, start.b
        if sym.signs:
            signs = steady_signs(goal, sym)
            steady = act(goal, sym, {"signs": signs})
            for candidate in sign_choices(start.a, sym):
                end = self._matched(replace(start, a=candidate, b=steady), signs=True)
                end = self._fitted(end)
                yield replace(end, a=act(end.a, sym, {"signs": signs}), b=goal)
        yield self._fitted(self._matched(start))

    def _fitted(self, best: _Step) -> _Step:
        """Flip what does not fit, and match small networks again while that brings them closer."""
        for _ in range(_ROUNDS if self.sym.signs else 0):
            flipped = replace(best, a=fitted_signs(best.a, best.b, self.sym))
            again = [self._matched(flipped, signs=True)] if best.is_small else []
            before, best = best.apart, _closest([best, flipped, *again])
            if best.settled or best.apart >= before:
                break
        return best

    def _matched(self, step: _Step, signs: bool = False) -> _Step:
        matched = match(step.a, step.b, self.sym, method=self.method, signs=signs, seed=self.seed)
        moved = compose(step.permutations, matched.permutations, self.sym)
        return replace(step, a=matched.element(step.a), permutations=moved)


def _mixed(best: _Step, ends: Sequence[_Step], walk: Walk) -> _Step:
    """Channels matched by matrices, where the second network is balanced.

    The first one starts where a walk through both has brought it, then as it stands beside the
    second one, then as balanced by itself from every end of matching units, of which distances do
    not tell the best before channels fit.
    """
    sym = walk.sym

    def starts() -> Iterator[_Step]:
        yield replace(best, a=walk.moving, b=walk.goal)
        goal, beside = balanced_together([best.b, best.a], sym, "min-mass")
        best_beside = replace(best, a=beside, b=goal)
        yield best_beside
        for k, end in enumerate(ends):
            (alone,) = balanced_together([end.a], sym, "min-mass")
            yield from (replace(best_beside, a=w) for w in sign_choices(alone, sym)[k : k + 1])

    def mixed() -> Iterator[_Step]:
        for start in starts():
            end = _with_matrices(replace(start, name="channels mixed"), sym)
            yield end
            if sym.signs:
                flipped = replace(end, a=fitted_signs(end.a, end.b, sym))
                yield _with_matrices(flipped, sym)

    return _closest(_until_settled(mixed()))


def _with_matrices(step: _Step, sym: Symmetries) -> _Step:
    return replace(step, a=match_all(step.a, step.b, sym).element(step.a))


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
    _, others = canonical_scales_and_signs(act(params, sym, {"signs": signs}), sym, None)
    return [
        sign if _gain(sym, group) is not None else partner
        for group, sign, partner in zip(sym.signs, signs, others, strict=True)
    ]


def sign_choices(params: Params, sym: Symmetries) -> list[Params]:
    """A network with steady signs, and with those of whole streams turned.

    One number among all that are written into a stream tells its sign, often another one after
    training; with the wrong sign none of its channels finds its place.

    Args:
        params: one network.
        sym: what `discover` returned.
    """
    if not sym.signs:
        return [params]
    steady = act(params, sym, {"signs": steady_signs(params, sym)})
    if all(group.units > 1 for group in sym.signs):
        return [steady]
    turned = [torch.full((g.units,), -1.0 if g.units == 1 else 1.0) for g in sym.signs]
    candidate = act(steady, sym, {"signs": turned})
    return [steady, act(candidate, sym, {"signs": gain_signs(candidate, sym)})]


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
                params = act(params, sym, {"signs": every})
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
