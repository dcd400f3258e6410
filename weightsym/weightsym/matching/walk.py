"""A walk through two networks that are related: each group is matched by what comes before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weightsym.groups.element import Element
from weightsym.groups.placements import LinearGroup, Placement
from weightsym.groups.symmetries import PermutationGroup, Symmetries
from weightsym.groups.units import WRITES, other_axes, unit_rows
from weightsym.matching.matrices import SpaceMap, procrustes
from weightsym.matching.moved import Moved, gram, inner_products
from weightsym.matching.plan import assign
from weightsym.matching.sketches import MANY, Sketches

Node = tuple[str, int]
"""A group of permutations or of matrices, by its kind and number."""
_Rows = tuple[Placement, Tensor, Tensor]
"""The weights of the units of both networks at a place."""
_FEWEST, _MOST = 2, 512  # directions that units are compared in, and units that tell which
_WIDE = 2**14  # weights of a unit that are compared, as those of the first tokens
_MANY = 32  # vectors for every channel, whose rotation others would change by nothing much
_EXACT = 2**18  # numbers whose directions are found in double precision
_DECIDED = 0.95  # of the units: if as many are found twice, nothing else has to be tried
_NONE, _ENOUGH = 0.05, 256  # or if no more are, of so many at least


def fixed_points(order: Tensor) -> int:
    """The number of units that a permutation leaves where they are."""
    return int((order == torch.arange(len(order))).sum())


class Walk:
    """Two networks whose groups are matched one by one, by tensors that come before each.

    Both must have the least mass, so that matrices are rotations. The weights of each unit are also
    compared in two parts, which must match it alike: the quarter of all directions in which the
    units of the goal vary most, where what networks of the same data have in common lies, and the
    other directions.

    Attributes:
        moving: the first network, as far as its element has brought it to the second one.
        goal: the second one.
        sources: by group that is matched, all tensors whose numbers have decided how.
        agreeing: by group of permutations, the units that both parts match alike.
        compared: how many were tried: of more than 512, the first 512 of the goal.
        turned: the groups of matrices that many vectors have decided.
        is_blind: True if channels were turned by fewer vectors than they are, as in a stream that
            few inputs enter: what follows need not agree.
    """

    def __init__(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], sym: Symmetries) -> None:
        self.sym = sym
        self.moving, self.goal = (Moved(w, Element(sym)) for w in (a, b))
        self.sketches = Sketches(sym, self.moving, self.goal, _WIDE)
        self.spaces = SpaceMap(sym)
        self.sources: dict[Node, frozenset[str]] = {}
        self.agreeing: dict[int, int] = {}
        self.compared: dict[int, int] = {}
        self.signed: set[int] = set()
        self.turned = frozenset[int]()
        self.is_blind = False
        self.movers = {axis: self._movers(axis) for axis in range(len(sym.axes))}
        waiting, left = list[Node](), self._nodes()
        while len(left) != len(waiting):
            waiting, left = left, [node for node in left if not self._visit(node)]

    @property
    def settled(self) -> frozenset[int]:
        """The groups of permutations that stay: unless all are sure, those that take long."""
        placed = [k for kind, k in self.sources if kind == "permutations"]
        long = [k for k in placed if self.sym.permutations[k].units >= MANY]
        return frozenset(placed if self.is_sure else long)

    @property
    def is_sure(self) -> bool:
        """True if the order of units is beyond doubt, and matrices decide what is left."""
        least = max(_DECIDED * sum(self.compared.values()), 1)
        return sum(self.agreeing.values()) >= least and not self.sym.exchangeable_tensors

    @property
    def is_apart(self) -> bool:
        """True if many units are compared, and hardly any of them is found twice."""
        units = sum(self.compared.values())
        few = sum(self.agreeing.values()) <= _NONE * units
        hidden = self.is_blind or bool(self.sym.exchangeable_tensors)
        return few and units >= _ENOUGH and not hidden

    # -------------------------------------------------------- groups
    def _nodes(self) -> list[Node]:
        """The groups that are matched, in the order of the graph: no blocks and no experts."""
        sym, exchanged = self.sym, self.sym.exchangeable_tensors.keys()
        nodes = [
            ("permutations", k)
            for k in range(len(sym.permutations))
            if k not in self.spaces.contained
        ]
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
                if kind == "linear" or k not in self.spaces.contained:
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
            twice, order = self._found_twice(first) if group.units > 1 else None, None
            if twice is not None:
                alike, compared, rows = int(twice[0].sum()), len(twice[0]), twice[1]
                self.agreeing[node[1]], self.compared[node[1]] = alike, compared
                if alike <= _NONE * compared and group.units >= MANY:
                    order = _completed(assign(self._cosines(rows)), group.units)
            self._order(node[1], first, order)
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
        cross, vectors = torch.zeros((), dtype=torch.float64), 0
        for place in first:
            _, mine, theirs = self._rows(place, None)
            cross, vectors = cross + (theirs @ mine.mT).double(), vectors + mine.shape[-1]
        self.is_blind |= vectors < group.size
        if vectors > _MANY * group.size:
            self.turned |= {k}
        basis = group.basis.to(cross)
        turn = group.lifted(procrustes(basis.mT @ cross @ basis).matrices)
        both = [turn if j == k else None for j in range(len(self.sym.linear))]
        names = self.sym.moved_by(group)
        self.moving.move(Element.of_values(self.sym, {"linear": both, "duals": both}, turn, names))

    def _order(self, k: int, first: Sequence[Placement], order: Tensor | None) -> None:
        """Put units in the order of those of the goal, or in a given one."""
        order = self._by_sketches(first) if order is None else order
        order = assign(self._cosines([self._rows(p) for p in first])) if order is None else order
        orders = [order if j == k else None for j in range(len(self.sym.permutations))]
        self.moving.move(Element.of_values(self.sym, {"permutations": orders}))

    def _by_sketches(self, first: Sequence[Placement]) -> Tensor | None:
        """The partners of many units, if projections of places with equal signs leave no doubt."""
        if len(first[0].positions) >= MANY:
            for signs in dict.fromkeys(map(self._signs, first)):
                alike = [place for place in first if self._signs(place) == signs]
                found = self.sketches.partners(alike, bool(signs))
                if found is not None and found.sure:
                    return torch.from_numpy(found.order)
        return None

    def _found_twice(self, places: Sequence[Placement]) -> tuple[Tensor, list[_Rows]] | None:
        """Which units both parts of their weights match alike, and both, if they are large."""
        parts: tuple[list[_Rows], list[_Rows]] = [], []
        for place in (p for p in places if self._is_wide(p)):
            _, mine, theirs = self._rows(place)
            whole = all(bool(rows.any(1).all()) for rows in (mine, theirs))
            along = _along_directions(mine, theirs[: _MOST if whole else None])
            seen = [rows.tensor_split([rows.shape[1] // 4], 1) for rows in along]
            if seen[0][0].shape[1] < _FEWEST:
                return None
            for part, *rows in zip(parts, *seen, strict=True):
                part.append((place, *rows))
        both = [self._cosines(part) for part in parts]
        orders = [assign(cosines) for cosines in both]
        alike = orders[0] == orders[1]
        for cosines in both:  # units without weights fit everywhere
            alike &= (cosines.gather(1, orders[0][:, None].to(cosines.device))[:, 0] > 0).cpu()
        return alike, parts[0] + parts[1]

    def _flip(self, first: Sequence[Placement]) -> None:
        """Give signs that act on what was compared the values that suit it."""
        sym, names = self.sym, {self.sym.axes[p.axis].tensor for p in first}
        flips = {k for p in first for k in self._signs(p)}
        for k in flips - self.signed:
            group, total = sym.signs[k], torch.zeros((), dtype=torch.float64)
            for place in group.placements:
                if sym.axes[place.axis].tensor in names and place.exponent % 2:
                    mine, theirs = (unit_rows(w, sym, place) for w in (self.moving, self.goal))
                    total = total + inner_products(mine, theirs)
            signs = [torch.ones(g.units) for g in sym.signs]
            signs[k] = torch.where(total < 0, -1.0, 1.0).expand(group.units)
            step = Element.of_values(sym, {"signs": signs}, names=sym.moved_by(group))
            self.moving.move(step)
        self.signed |= flips

    def _rows(self, place: Placement, most: int | None = _WIDE) -> _Rows:
        mine, theirs = (
            unit_rows(w, self.sym, place)[..., :most].float() for w in (self.moving, self.goal)
        )
        return place, mine, theirs

    def _cosines(self, every: Sequence[_Rows]) -> Tensor:
        """Cosines of all units of the goal with all others, with the signs that suit them."""
        parts: dict[frozenset[int], Tensor] = {}
        sizes = [torch.zeros(()), torch.zeros(())]
        for place, mine, theirs in every:
            rows = theirs, mine
            sizes = [s.to(r.device) + r.square().sum(-1) for s, r in zip(sizes, rows, strict=True)]
            product, signs = theirs @ mine.mT, self._signs(place)
            parts[signs] = parts[signs] + product if signs in parts else product
        total = torch.stack([p.abs() if signs else p for signs, p in parts.items()]).sum(0)
        norms = [s.sqrt().clamp_min(1e-30) for s in sizes]
        return total.div_(norms[0][:, None]).div_(norms[1])

    def _signs(self, place: Placement) -> frozenset[int]:
        """The signs that flip units at a place, and unknown ones of a stream that they read."""
        sym, by_axis = self.sym, self.sym.placements_by_axis("signs")
        there = torch.zeros(sym.axes[place.axis].length, dtype=torch.bool)
        there[place.positions.reshape(-1).cpu()] = True
        pairs = by_axis.get(place.axis, ())
        own = {k for k, p in pairs if bool(there[p.positions.reshape(-1).cpu()].any())}
        across = {k for a in other_axes(sym, place.axis) for k, _ in by_axis.get(a, ())}
        return frozenset(own | {k for k in across - self.signed if sym.signs[k].units == 1})


def _completed(partners: Tensor, units: int) -> Tensor:
    """An order that begins with the partners of some units; the others follow as they stand.

    That is by chance, since `difference` shuffles the first network before.
    """
    left = torch.ones(units, dtype=torch.bool)
    left[partners] = False
    return torch.cat([partners, left.nonzero()[:, 0]])


def _along_directions(mine: Tensor, theirs: Tensor) -> Sequence[Tensor]:
    """Rows of both networks along the directions in which those of the goal vary, most first."""
    few = theirs[:_MOST]
    is_wide = len(few) < few.shape[1]
    sides = few if is_wide else few.mT
    exact = few.numel() <= _EXACT
    squares, vectors = torch.linalg.eigh(
        gram(sides, sides, torch.float64 if exact else torch.float32)
    )
    sizes, vectors = squares.flip(0).clamp_min(0).sqrt(), vectors.flip(1)
    kept = sizes > (1e-4 if exact else 1e-3) * sizes[0]
    basis = (vectors[:, kept] / sizes[kept] if is_wide else vectors[:, kept]).to(few)
    basis = few.mT @ basis if is_wide else basis
    return [rows @ basis for rows in (mine, theirs)]
