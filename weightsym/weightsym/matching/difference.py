"""The difference between two networks: symmetries, step by step, and an unexplained rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from weightsym.forms.canonical import balanced_together
from weightsym.forms.fingerprint import Fingerprint, fingerprint_of, to_least_mass
from weightsym.forms.scales_and_signs import canonical_scales_and_signs
from weightsym.groups.actions import compose
from weightsym.groups.element import Element
from weightsym.groups.elements import identity, random_permutations
from weightsym.groups.placements import Placement
from weightsym.groups.shift_removal import without_shifts
from weightsym.groups.symmetries import SignGroup, Symmetries
from weightsym.groups.units import unit_rows
from weightsym.groups.validation import check_finite, check_one_network
from weightsym.matching.match import ordered
from weightsym.matching.match_all import match_all, with_matrices
from weightsym.matching.moved import Moved, column_blocks, inner_products, parked
from weightsym.matching.walk import Walk, fixed_points
from weightsym.networks.devices import at_least_single
from weightsym.networks.dicts import shape_of
from weightsym.networks.randomness import keyed_generator
from weightsym.params import Params, is_weight

Network = Mapping[str, Tensor]
_ORDER, _MIXED, _ROUNDS = "units in order", "channels mixed", 3
_ROUNDING = 1e-9  # of squared distances
_CLOSE = 0.1  # of squared norms: nobody looks for a better start
_SMALL = 2**16  # weights, of networks that are matched from every start
_GAIN = 0.01  # of a round, which is the last one if it gains less, where a walk tells enough
_LIKE, _LARGE = 0.5, 2**12  # share of its norm by which one tensor of as many numbers tells
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
        moved: both networks after the last step, of which each tensor is computed when it is read.
        permutations: for every unit of B the one of A, as it was given, that matching by weights
            finds without knowing the places of units.
        agreeing: by group of permutations, how many units both parts of their weights match alike
            (see `relation`); groups with too few weights are left out.
        compared: how many units of each of these groups were looked for.
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
    moved: tuple[Network, Network] = field(repr=False)
    permutations: tuple[Tensor, ...] = field(repr=False)
    agreeing: Mapping[int, int] = field(repr=False)
    compared: Mapping[int, int] = field(default_factory=dict, repr=False)
    fingerprints: tuple[Fingerprint, ...] = field(default=(), repr=False)

    @cached_property
    def a(self) -> Params:
        """The first network after the last step; its function is that of the network as given."""
        return dict(self.moved[0])

    @cached_property
    def b(self) -> Params:
        """The second one."""
        return dict(self.moved[1])

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
    a: Network,
    b: Network,
    sym: Symmetries,
    *,
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
    still = Element(sym)
    pair = without_shifts(a, sym), without_shifts(b, sym)
    least = [to_least_mass(w, sym) for w in pair]
    first = _Step("as stored", sym, (a, b), (still, still), identity(sym))
    balanced = _Step("least mass", sym, pair, (least[0][0], least[1][0]), identity(sym))
    steps = [first, balanced] if sym.scalings or sym.shifts else [first]
    if any(group.rescales for group in sym.linear):
        least = [to_least_mass(w, sym, mixing=True) for w in pair]
    search = _Search(sym, seed)
    if not (balanced.is_small or sym.exchangeable_tensors):
        least[0] = (search.shuffle @ least[0][0], least[0][1])
    views = (g.view(w) for w, (g, _) in zip(pair, least, strict=True))
    one, other = (parked(w, g.moving) for w, (g, _) in zip(views, least, strict=True))
    prints = tuple(
        fingerprint_of(w, at, sym) for w, (_, at) in zip((one, other), least, strict=True)
    )
    walk = Walk(one, other, sym)
    walked = _Step(_MIXED, sym, (one, other), (walk.moving.element, still), identity(sym))
    end = None if balanced.is_small else _told(walk, walked)
    ways = [at @ g.inverse for at, (g, _) in zip(balanced.elements, least, strict=True)]
    whole = walk.moving.element if end is None else end.elements[0] @ walk.moving.element
    orders = walk.spaces.nearest_orders(ways[1] @ whole @ ways[0].inverse)
    matched = balanced.then(Element.of_values(sym, {"permutations": orders}))
    if walk.is_sure or balanced.is_small:
        matched = matched.then(fitted_signs(matched.a, matched.b, sym))
    matched = replace(matched, name=_ORDER, permutations=orders)
    ends = [matched] if end else _until_settled(search.ends(balanced, matched))
    matched = _closest(ends)
    nearer = _closest([matched, balanced])
    steps.append(nearer if nearer is matched else replace(balanced, name=_ORDER))
    if sym.linear:
        walked = replace(walked, permutations=steps[-1].permutations)
        steps.append(end or _mixed(steps[-1], ends, walked))
    stages, last = tuple(step.stage for step in steps), steps[-1]
    counts = walk.agreeing, walk.compared
    return Difference(stages, (last.a, last.b), tuple(matched.permutations), *counts, prints)


# ------------------------------------------------------------ steps
@dataclass(frozen=True, eq=False)
class _Step:
    """Both networks after a step, by the elements that have moved them."""

    name: str
    sym: Symmetries
    given: tuple[Network, Network]
    elements: tuple[Element, Element]
    permutations: Sequence[Tensor]

    @cached_property
    def a(self) -> Network:
        """The first network where it stands."""
        return self.elements[0].view(self.given[0])

    @cached_property
    def b(self) -> Network:
        """The second network where it stands."""
        return self.elements[1].view(self.given[1])

    @property
    def parked(self) -> _Step:
        """The same step from there on, with what takes long to compute in files."""
        a, b = self.elements
        given = parked(self.a, a.moving), parked(self.b, b.moving) if b.moving else self.b
        return replace(self, given=given, elements=(Element(self.sym), Element(self.sym)))

    def then(self, first: Element, second: Element | None = None) -> _Step:
        """Let further elements act."""
        a, b = self.elements
        return replace(self, elements=(first @ a, b if second is None else second @ b))

    @cached_property
    def _squares(self) -> dict[str, tuple[float, float, float]]:
        """By tensor, the squared distance and the squared norms."""
        return {n: _squares(self.a[n], self.b[n]) for n in _weights(self.given[1])}

    @property
    def stage(self) -> Stage:
        """The distance of both networks from each other, tensor by tensor."""
        apart = {n: d for n, (d, _, _) in self._squares.items()}
        return Stage(self.name, apart, {n: (x + y) / 2 for n, (_, x, y) in self._squares.items()})

    @property
    def apart(self) -> float:
        """Squared distance of all weights."""
        return sum(d for d, _, _ in self._squares.values())

    @property
    def is_small(self) -> bool:
        """True for networks in which a search costs little."""
        return sum(shape_of(self.given[1], n).numel() for n in _weights(self.given[1])) < _SMALL

    @property
    def is_far(self) -> bool:
        """True if no tensor with many numbers is like its partner."""
        every = ((self.a[n].numel(), x + y - d, x + y) for n, (d, x, y) in self._squares.items())
        return not any(k >= _LARGE and like > _LIKE * sizes for k, like, sizes in every)

    @property
    def settled(self) -> bool:
        """True if no other start would change much: little is left, or units keep their places.

        In small networks, nothing but rounding is little, in every tensor.
        """
        if self.is_small:
            return all(d <= _ROUNDING * y for d, _, y in self._squares.values())
        many = [p for p in self.permutations if len(p) > _MANY]
        kept = max((fixed_points(p) / len(p) for p in many), default=0.0)
        return kept > 0.5 or self.apart < _CLOSE * sum(y for *_, y in self._squares.values())


def _weights(network: Network) -> list[str]:
    return [name for name in network if is_weight(name, network[name])]


def _squares(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """The squared distance of two tensors, and their squared norms, some numbers at a time."""
    total, rows = [0.0, 0.0, 0.0], (a.reshape(-1), b.to(a.device).reshape(-1))
    for some in column_blocks(a.numel(), 1):
        x, y = (at_least_single(w[some]) for w in rows)
        norms = (torch.linalg.vector_norm(t) for t in (x - y, x, y))
        total = [sum_ + float(norm) ** 2 for sum_, norm in zip(total, norms, strict=True)]
    return total[0], total[1], total[2]


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
    seed: int

    @property
    def shuffle(self) -> Element:
        """Units in a random order."""
        orders = random_permutations(self.sym, keyed_generator(self.seed, "labels"))
        return Element.of_values(self.sym, {"permutations": orders})

    def ends(self, step: _Step, walked: _Step) -> Iterator[_Step]:
        """Ends of matching with steady signs, with those of whole streams turned, and without.

        The last one of a small network starts where a walk has ended.
        """
        sym, orders = self.sym, self.shuffle.permutations
        start = replace(step.then(self.shuffle), name=_ORDER, permutations=orders)
        if sym.signs:
            steady = Element.of_values(sym, {"signs": steady_signs(start.b, sym)})
            for choice in sign_choices(start.a, sym):
                end = self._matched(start.then(choice, steady), signs=True)
                yield self._fitted(end).then(steady, steady)
        yield self._fitted(self._matched(start))
        if walked.is_small:
            yield self._fitted(self._matched(walked))

    def _fitted(self, best: _Step) -> _Step:
        """Flip what does not fit, and match small networks again while that brings them closer."""
        for _ in range(_ROUNDS if self.sym.signs else 0):
            signs = fitted_signs(best.a, best.b, self.sym)
            if not signs.steps and not best.is_small:
                break
            flipped = best.then(signs)
            again = [self._matched(flipped, signs=True)] if best.is_small else []
            before, best = best.apart, _closest([best, flipped, *again])
            if best.settled or best.apart >= before:
                break
        return best

    def _matched(self, step: _Step, signs: bool = False) -> _Step:
        found, _ = ordered(step.a, step.b, self.sym, signs, self.seed)
        moved = compose(step.permutations, found.permutations, self.sym)
        return replace(step.then(found.element), permutations=moved)


def _told(walk: Walk, walked: _Step) -> _Step | None:
    """Both networks in one frame, if a walk leaves no doubt; None if all has to be searched.

    Where it has found all units, matrices are left; where it has found nothing, small groups are
    matched once. Networks that are far apart then are no closer from elsewhere.
    """
    if not (walk.is_sure or walk.is_apart):
        return None
    turned, start = walk.turned if walk.is_sure else (), walked.parked
    end = start.then(with_matrices(*start.given, walk.sym, walk.settled, turned, _GAIN))
    return end if walk.is_sure or end.is_far else None


def _mixed(best: _Step, ends: Sequence[_Step], walked: _Step) -> _Step:
    """Channels matched by matrices, where the second network is balanced.

    The first one starts where a walk through both has brought it, then as it stands beside the
    second one, then as balanced by itself from every end of matching units, of which distances do
    not tell the best before channels fit.
    """
    sym = best.sym

    def starts() -> Iterator[_Step]:
        yield walked
        together = balanced_together([dict(best.b), dict(best.a)], sym, "min-mass")
        still = Element(sym), Element(sym)
        beside = replace(best, given=(together[1], together[0]), elements=still)
        yield beside
        for k, end in enumerate(ends):
            (alone,) = balanced_together([dict(end.a)], sym, "min-mass")
            start = replace(beside, given=(alone, together[0]))
            yield from (start.then(choice) for choice in sign_choices(alone, sym)[k : k + 1])

    def mixed() -> Iterator[_Step]:
        for start in starts():
            end = _fully(replace(start, name=_MIXED))
            yield end
            if sym.signs:
                yield _fully(end.then(fitted_signs(end.a, end.b, sym)))

    return _closest(_until_settled(mixed()))


def _fully(step: _Step) -> _Step:
    start = step.parked
    return start.then(match_all(*start.given, step.sym).element)


def _ratio(squares: int | float, sizes: int | float) -> float:
    return math.sqrt(squares / sizes) if sizes > 0 else 0.0


# ------------------------------------------------------------ signs of units
_SWEEPS = 5


def steady_signs(params: Network, sym: Symmetries) -> list[Tensor]:
    """Signs that make gains positive, and elsewhere those of canonical forms.

    The largest weight of a unit may be another one after training; gains that begin at one stay
    positive.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
    """
    signs = gain_signs(params, sym)
    positive = Element.of_values(sym, {"signs": signs}).view(params)
    _, others = canonical_scales_and_signs(positive, sym, None)
    return [
        sign if _gain(sym, group) is not None else partner
        for group, sign, partner in zip(sym.signs, signs, others, strict=True)
    ]


def sign_choices(params: Network, sym: Symmetries) -> list[Element]:
    """Elements that give a network steady signs, and those of whole streams turned.

    One number among all that are written into a stream tells its sign, often another one after
    training; with the wrong sign none of its channels finds its place.

    Args:
        params: one network.
        sym: what `discover` returned.
    """
    if not sym.signs:
        return [Element(sym)]
    steady = Element.of_values(sym, {"signs": steady_signs(params, sym)})
    if all(group.units > 1 for group in sym.signs):
        return [steady]
    turned = [torch.full((g.units,), -1.0 if g.units == 1 else 1.0) for g in sym.signs]
    candidate = Element.of_values(sym, {"signs": turned}) @ steady
    gains = gain_signs(candidate.view(params), sym)
    return [steady, Element.of_values(sym, {"signs": gains}) @ candidate]


def gain_signs(params: Network, sym: Symmetries) -> list[Tensor]:
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


def fitted_signs(params: Network, reference: Network, sym: Symmetries) -> Element:
    """The signs that bring the units of a network closest to those of a reference.

    One group after the other takes the signs that suit the rest, until none changes: every step
    lowers the distance.

    Args:
        params: one network.
        reference: another one, whose units stand in the same order.
        sym: what `discover` returned.
    """
    moving, reference = (Moved(w, Element(sym)) for w in (params, reference))
    for _ in range(_SWEEPS):
        before = moving.element
        for k, group in enumerate(sym.signs):
            sign = _sign(_similarity(moving, reference, sym, group))
            if bool((sign < 0).any()):
                every = [sign if j == k else None for j in range(len(sym.signs))]
                moving.move(Element.of_values(sym, {"signs": every}, names=sym.moved_by(group)))
        if moving.element is before:
            break
    return moving.element


def _gain(sym: Symmetries, group: SignGroup) -> Placement | None:
    """The numbers of a norm that tell the sign of each unit, if no other group changes them."""
    for placement in group.placements:
        on_axis = sym.placements_by_axis("signs")[placement.axis]
        if sym.axes[placement.axis].role.startswith("gain") and placement.positions.shape[1] == 1:
            return placement if len(on_axis) == 1 else None
    return None


def _similarity(params: Network, reference: Network, sym: Symmetries, group: SignGroup) -> Tensor:
    """Inner products of units with those of a reference, over all weights that they flip."""
    total = torch.zeros(group.units, dtype=torch.float64)
    for placement in group.placements:
        name = sym.axes[placement.axis].tensor
        if name in params and is_weight(name, params[name]) and placement.exponent % 2:
            mine, theirs = (unit_rows(p, sym, placement) for p in (params, reference))
            total += inner_products(mine, theirs)
    return total


def _sign(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0)
