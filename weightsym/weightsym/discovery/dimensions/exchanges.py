"""Permutations as automorphisms of one coloured graph of operations, tensors and labels.

Labels that move as one are one vertex. Twins, vertices with the same neighbours, may change places;
they are collapsed. In what remains, colour refinement splits vertices into cells, and in a cell the
smallest exchange that maps one vertex to another is grown and verified: units of channels and all
that they carry, heads, groups, experts, branches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from weightsym.discovery.dimensions.hashing import Hashes, code_of, mix
from weightsym.discovery.dimensions.nodes import is_symmetric, leaves_of, operation_of
from weightsym.discovery.dimensions.reading import Reading
from weightsym.discovery.dimensions.scales import connected
from weightsym.discovery.dimensions.system import System
from weightsym.discovery.dimensions.values import Ints, distinct, distinct_rows, occurrence, starts

Family = frozenset[frozenset[int]]
_PIECES = ("split", "split_with_sizes", "unbind")
_VIEWS = ("select", "slice", "getitem", "view")
_LARGEST_CELL = 600
_LONGEST_EXCHANGE = 4000


class Exchange(NamedTuple):
    """Units that may be exchanged: the vertices of every unit, in corresponding order."""

    units: list[list[int]]
    is_block: bool


class Exchanges(NamedTuple):
    """All exchanges, the class of every label, the number of classes, and the unsearched classes.

    That is by class the reason why exchanges of it, and of those like it, may be missing.
    """

    groups: list[Exchange]
    classes: Ints
    class_count: int
    unsearched: dict[int, str]


class _Star(NamedTuple):
    """Edges of one colour from a vertex to several distinct others."""

    centre: int
    colour: int
    ends: Ints


class _Graph(NamedTuple):
    """Vertices (classes of labels, operations, tensors), their colours, and coloured edges.

    Those to all channels of a layer are stars, so that twins are seen before they are counted.
    """

    classes: Ints
    class_count: int
    colours: Hashes
    fixed: NDArray[np.bool_]
    edges: Ints
    stars: list[_Star]
    tensor_vertices: dict[str, int]


def exchanges(reading: Reading) -> Exchanges:
    """Find the exchangeable units of a network."""
    graph = _graph_of(reading)
    placed = np.zeros(len(graph.colours), bool)
    for parameter in reading.parameters.values():
        for factor in parameter.factors:
            placed[graph.classes[factor.labels.reshape(-1).numpy()]] = True
    placed[list(graph.tensor_vertices.values())] = True
    families = _twins(graph)
    groups = [Exchange([[v] for v in f], False) for f in families if placed[f[0]]]
    representative = np.arange(len(graph.colours))
    multiplicity = np.ones(len(graph.colours), np.uint64)
    for family in families:
        representative[family] = family[0]
        multiplicity[family[0]] = len(family)
    search = _ExchangeSearch(graph, representative, multiplicity, placed)
    members = {f[0]: f for f in families}
    for units in _compatible(search.exchanges(), search.unsearched):
        whole = [[y for x in unit for y in members.get(x, [x])] for unit in units]
        groups.append(Exchange(whole, True))
    return Exchanges(groups, graph.classes, graph.class_count, search.unsearched)


def _neighbours(edges: Ints, identity: Hashes) -> Hashes:
    """Hash the multiset of neighbours of every vertex."""
    h = np.zeros(len(identity), np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(h, edges[:, 0], mix(edges[:, 2], identity[edges[:, 1]], 1))
        np.add.at(h, edges[:, 1], mix(edges[:, 2], identity[edges[:, 0]], 2))
    return h


def signatures(system: System) -> Hashes:
    """Hash how every label is tied to others. Labels with the same role have the same hash."""
    facts: list[tuple[Ints, object]] = [(t.pairs, (k, "tie")) for k, t in enumerate(system.ties)]
    facts += [(pairs, relation) for relation, pairs in system.relations]
    edges = [_edge(pairs[:, 0], pairs[:, 1], colour) for pairs, colour in facts]
    every = np.concatenate([np.zeros((0, 3), np.int64), *edges])
    colours, count = np.zeros(system.count, np.uint64), 0
    while len(np.unique(colours)) > count:
        count = len(np.unique(colours))
        colours = mix(colours, _neighbours(every, colours), 6)
    return colours


# ------------------------------------------------------------ the graph
def _graph_of(reading: Reading) -> _Graph:
    system = reading.system
    classes = connected([t.pairs for t in system.ties], system.count)
    count = int(classes.max()) + 1
    merged = _sums_of_sums(reading)
    vertex = {n: count + k for k, n in enumerate(reading.operations)}
    vertex = {n: vertex[merged.get(n, n)] for n in vertex}
    first = count + len(reading.operations)
    tensors = {name: first + k for k, name in enumerate(reading.parameters)}
    colours = np.zeros(first + len(tensors), np.uint64)
    fixed = np.zeros(len(colours), bool)
    fixed[classes[0]] = True
    colours[classes[0]] = mix(classes[0] + 1, 77)
    operation_colours = []
    for labels, keys, origin in system.colours:
        live = labels > 0
        rows = distinct_rows([classes[labels[live]], keys[live]])
        hashes = mix(rows[:, 1], code_of("colour"))
        if 0 <= origin < len(reading.operations):  # as seen by an operation
            origins = np.full(len(rows), vertex[reading.operations[origin]])
            operation_colours.append(
                np.stack([origins, rows[:, 0], (hashes >> np.uint64(2)).astype(np.int64)], 1)
            )
        else:
            with np.errstate(over="ignore"):
                np.add.at(colours, rows[:, 0], hashes)
    for node in reading.operations:
        if node not in merged:
            colours[vertex[node]] = code_of(_description(reading, node))
    for name, parameter in reading.parameters.items():
        colours[tensors[name]] = code_of((parameter.shape, parameter.is_buffer))
    edges = [
        *operation_colours,
        *_edges_of_operations(reading, vertex, tensors, classes),
        *_edges_of_relations(reading, classes),
    ]
    every = _distinct(np.concatenate([np.zeros((0, 3), np.int64), *edges]))
    stars = [*_stars(reading, vertex, tensors, classes)]
    return _Graph(classes, count, colours, fixed, every, stars, tensors)


def _edge(a: Any, b: Any, colour: object) -> Ints:
    a, b = np.broadcast_arrays(np.asarray(a, np.int64), np.asarray(b, np.int64))
    code = np.full(a.size, _code(colour), np.int64)
    return np.stack([a.ravel(), b.ravel(), code], 1)


def _code(colour: object) -> int:
    return code_of(colour) & (2**62 - 1)


def _distinct(edges: Ints) -> Ints:
    """Return the distinct edges, compared by their hashes."""
    return edges[np.unique(mix(*edges.T), return_index=True)[1]]


def _sums_of_sums(reading: Reading) -> dict[Node, Node]:
    """Map sums whose only use is another sum of the same size to that sum, except for biases."""
    into: dict[Node, Node] = {}
    for node in reversed(reading.operations):
        users = list(node.users)
        has_bias = any(reading.is_parameter(n) for n in node.all_input_nodes)
        is_plain = all(isinstance(a, Node) or a == 0 for a in node.args) and not node.kwargs
        is_once = len(users) == 1 and list(users[0].args).count(node) == 1 and not users[0].kwargs
        is_inner = operation_of(node) == "add" and is_once and is_plain and not has_bias
        if is_inner and operation_of(users[0]) == "add":
            sizes = [n.meta["val"].shape for n in (node, users[0])]
            if sizes[0] == sizes[1]:
                into[node] = into.get(users[0], users[0])
    return into


def _description(reading: Reading, node: Node) -> tuple[object, ...]:
    name = operation_of(node)
    literals: object = ()
    if name == "getitem":
        whole: Any = node.args[0]
        if operation_of(whole) in _PIECES and _acts_on_labels(reading, whole):
            return name, tuple(node.meta["val"].shape)
    moves_labels = name in ("select", "slice") and _acts_on_labels(reading, node)
    is_of_choice = name in ("eq", "ne") and reading.value_of(node.args[0]).choice is not None
    if not is_of_choice and (name not in _VIEWS or (not moves_labels and "view" not in name)):
        literals = repr([a for a in _operands(node) if not isinstance(a, Node)])
    if name == "permute":  # labels say where their own dimensions go
        value: Any = reading.value_of(node.args[0])
        dims = frozenset[int]().union(*(f.dims for f in value.factors))
        literals = repr([d for d in node.args[1] if value.varies[d] and d not in dims])  # type: ignore[union-attr]
    inputs = [
        a.name
        for a in node.all_input_nodes
        if a.op == "placeholder" and a.name not in reading.owners
    ]
    return (str(node.target), literals, inputs)


def _acts_on_labels(reading: Reading, node: Node) -> bool:
    value = reading.value_of(node.args[0])
    position = 2 if "split" in operation_of(node) else 1
    d = (node.args[position] if len(node.args) > position else 0) % len(value.shape)  # type: ignore[operator]
    return any(d in f.dims for f in value.factors)


def _edges_of_operations(
    reading: Reading, vertex: dict[Node, int], tensors: dict[str, int], classes: Ints
) -> Iterator[Ints]:
    def vertex_of(node: Any) -> int | None:
        """Return the vertex of an operation, or of a placeholder's tensor."""
        name = reading.owners.get(node.name, "") if isinstance(node, Node) else ""
        return vertex.get(node, tensors.get(name)) if isinstance(node, Node) else None

    uses = [
        (vertex[node], operand, 0 if is_symmetric(node) else position)
        for node in reading.operations
        for position, operand in enumerate(map(vertex_of, _operands(node)))
        if operand is not None and operand != vertex[node]
    ]
    for (user, used, position), times in Counter(uses).items():  # a sum of sums may take one twice
        yield _edge(user, used, ("operand", position, times))
    for labels, node in reading.stacks:
        for label, operand in zip(labels.tolist(), map(vertex_of, _operands(node)), strict=False):
            if operand is not None:
                yield _edge(operand, classes[label], "place")


def _operands(node: Node) -> Sequence[Any]:
    """List the arguments of an operation, including those inside lists."""
    return leaves_of((node.args, node.kwargs))


def _stars(
    reading: Reading, vertex: dict[Node, int], tensors: dict[str, int], classes: Ints
) -> Iterator[_Star]:
    """Yield edges from operations to the classes of operands, and from tensors to their axes."""
    centres: dict[int, Ints] = {}
    passing: dict[tuple[int, str], dict[int, Ints]] = defaultdict(dict)
    for touch in reading.touched:
        node, key = reading.operations[touch.operation], id(touch.labels)
        if key not in centres:
            centres[key] = distinct(classes[touch.labels[touch.labels > 0]])
        role = "any" if is_symmetric(node) else str(touch.place)
        passing[vertex[node], role][key] = centres[key]
    for (centre, role), ends in passing.items():
        labels = list(ends.values())
        every = labels[0] if len(labels) == 1 else distinct(np.concatenate(labels))
        yield _Star(centre, _code(("passes", role)), every)
    for name, parameter in reading.parameters.items():
        for d, factor in enumerate(parameter.factors):
            labels = classes[factor.labels.reshape(-1).numpy()]
            again = occurrence(factor.labels.new_tensor(labels)).numpy()
            for k in range(int(again.max(initial=-1)) + 1):
                yield _Star(tensors[name], _code(("axis", d, k)), labels[again == k])


def _edges_of_relations(reading: Reading, classes: Ints) -> Iterator[Ints]:
    for relation, pairs in reading.system.relations:
        rows = classes[pairs]
        rows = distinct_rows(list(rows[rows[:, 0] != rows[:, 1]].T))
        if len(rows):
            yield _edge(rows[:, 0], rows[:, 1], ("relation", relation))


# ------------------------------------------------------------ twins
def _twins(graph: _Graph) -> list[list[int]]:
    """Families of classes with the same colour and the same neighbours."""
    size, count = len(graph.colours), graph.class_count
    h, used = _neighbours(graph.edges, np.arange(size).astype(np.uint64)), np.zeros(size, bool)
    used[graph.edges[:, :2].ravel()] = True
    for star in graph.stars:
        with np.errstate(over="ignore"):
            h[star.ends] += mix(star.colour, star.centre, 2)
        used[star.ends] = True
    families = _alike(np.flatnonzero(used[:count]), mix(graph.colours, h, 5))
    return [f for f in families if not graph.fixed[f].any()]


def _alike(vertices: Ints, hashes: Hashes) -> list[list[int]]:
    """Group vertices by equal hashes, in the order of the hashes, without groups of one vertex."""
    order = vertices[np.argsort(hashes[vertices], kind="stable")]
    first = np.flatnonzero(starts(hashes[order]))
    last = np.r_[first, len(order)][1:]
    several = np.stack([first, last], 1)[last - first > 1]
    return [order[i:j].tolist() for i, j in several.tolist()]


def _stable(edges: Ints, colours: Hashes) -> Hashes:
    """Refine the colours of vertices by those of their neighbours until no class is split."""
    cells = 0
    while True:
        _, cell, size = np.unique(colours, return_inverse=True, return_counts=True)
        if len(size) == cells:
            return colours
        cells = len(size)
        several = size[cell] > 1  # what is alone in its cell stays so
        edges = edges[several[edges[:, 0]] | several[edges[:, 1]]]
        colours = np.where(several, mix(colours, _neighbours(edges, colours), 4), colours)


# ------------------------------------------------------------ larger exchanges
class _ExchangeSearch:
    """The search for exchanges in the graph whose twins are collapsed."""

    def __init__(
        self, graph: _Graph, representative: Ints, multiplicity: Hashes, placed: NDArray[np.bool_]
    ) -> None:
        e, tables = graph.edges, dict[int, Ints]()
        edges = [np.stack([representative[e[:, 0]], representative[e[:, 1]], e[:, 2]], 1)]
        for centre, colour, ends in graph.stars:
            if id(ends) not in tables:
                tables[id(ends)] = distinct(representative[ends])
            edges.append(np.stack(np.broadcast_arrays(centre, tables[id(ends)], colour), 1))
        self._edges = _distinct(np.concatenate(edges))
        self._is_live = np.zeros(len(graph.colours), bool)
        self._is_live[self._edges[:, :2]] = True
        self._fixed, self._placed = graph.fixed, placed
        self._colours = self._refined(graph, multiplicity)
        cells = _alike(np.flatnonzero(self._is_live), self._colours)
        self._cells = [c for c in cells if c[0] < graph.class_count and not self._fixed[c[0]]]
        a, b, k = self._edges.T
        self._beside = np.concatenate(
            [np.stack([a, k, a * 0 + 1, b]), np.stack([b, k, a * 0 + 2, a])], 1
        )
        self._beside = self._beside[:, np.argsort(self._beside[0], kind="stable")]
        self._known: dict[int, set[tuple[int, int, int]]] = {}
        self.unsearched: dict[int, str] = {}
        self._is_cut = False

    def _next(self, v: int) -> set[tuple[int, int, int]]:
        """Return the edges of a vertex as triples of colour, direction and other end."""
        if v not in self._known:
            first, last = np.searchsorted(self._beside[0], [v, v + 1])
            self._known[v] = {*zip(*self._beside[1:, first:last].tolist(), strict=True)}
        return self._known[v]

    def _refined(self, graph: _Graph, multiplicity: Hashes) -> Hashes:
        """Refine the colours by the neighbours and by the number of twins that a vertex represents.

        First operations and tensors among themselves: these are few, and one layer tells the next.
        """
        colours = mix(graph.colours, multiplicity, 3)
        colours[graph.fixed] = graph.colours[graph.fixed]
        live = np.flatnonzero(self._is_live)
        index = np.cumsum(self._is_live) - 1
        edges = np.concatenate([index[self._edges[:, :2]], self._edges[:, 2:]], 1)
        is_outer = (self._edges[:, :2] >= graph.class_count).all(1)
        colours[live] = _stable(edges, _stable(edges[is_outer], colours[live]))
        return colours

    def exchanges(self) -> list[list[list[int]]]:
        """Return the units of every exchange, without repetition.

        Exchanges that are known connect vertices of a cell, of which one is enough, and carry what
        is found among these to all others.
        """
        families = _Families()
        for cell in sorted(self._cells, key=lambda c: (len(c), c[0])):
            every = families.representatives(cell)
            level = every[:_LARGEST_CELL]
            if len(level) < len(every):
                self.unsearched[cell[0]] = (
                    f"of {len(every)} units that look alike, exchanges of {len(level)} were "
                    "searched"
                )
            while len(level) > 1 and not families.connect(level):
                level = self._merged(level, families)
        return families.units

    def _merged(self, level: list[int], families: _Families) -> list[int]:
        """Return a vertex of each family that a smallest exchange connects. Note the families."""
        first, smallest, self._is_cut = level[0], _LONGEST_EXCHANGE, False
        images: dict[int, dict[int, int] | None] = {}
        for v in level[1:]:  # none that is longer than one before it counts
            images[v] = self._grown(first, v, smallest)
            smallest = min(smallest, len(images[v] or range(smallest)))
        if not any(images.values()):
            if self._is_cut:
                self.unsearched[first] = (
                    f"exchanges of more than {_LONGEST_EXCHANGE // 2} things were not searched"
                )
            return level[1:]
        alone, waiting = [], list(level)
        while waiting:
            v = waiting[0]
            if v != first:
                images = {w: self._grown(v, w, smallest) for w in waiting[1:]}
            family = {w: i for w, i in images.items() if i and len(i) == smallest}
            if family and not self._note(v, family, families):
                family = dict([next(iter(family.items()))])
                self._note(v, family, families)
            alone.append(v)
            waiting = [w for w in waiting[1:] if w not in family]
        return alone if len(alone) < len(level) else []

    def _note(self, v: int, family: dict[int, dict[int, int]], families: _Families) -> bool:
        """Add an exchange, unless its units share entries of a tensor."""
        unit = _side(next(iter(family.values())), v)
        units = [unit] + [
            [image[x] for x in unit] for image in family.values() if all(x in image for x in unit)
        ]
        placed = [[x for x in u if self._placed[x]] for u in units]
        if _overlap(units):  # in pairs of units, which no tensor has entries for
            units = placed
        images = [dict(zip([*placed[0], *p], [*p, *placed[0]], strict=True)) for p in placed[1:]]
        is_known = all(families.explain(image, self._placed) for image in images)
        if not _overlap(units) and placed[0] and not is_known:
            families.add(units)
        return not _overlap(units)

    def _grown(self, u: int, v: int, most: int) -> dict[int, int] | None:
        """Return the smallest exchange from one vertex to another, or None if it moves too many."""
        image = {u: v, v: u}
        pending, doubtful = [(u, v)], list[tuple[int, int]]()
        while pending or doubtful:
            is_sure = bool(pending)
            a, b = pending.pop() if is_sure else doubtful.pop(0)
            forced = self._forced(a, b, image)
            if forced is None:
                return None
            sure = [pairs for pairs in forced if len(pairs) == 1] if is_sure else forced
            new = self._extended(image, [pair for pairs in sure for pair in pairs], most)
            if new is None:
                return None
            pending += new
            doubtful += [(a, b)] if len(sure) < len(forced) else []
        for a, b in image.items():  # what holds for one of a pair holds for the other
            if a < b and {(k, d, image.get(w, w)) for k, d, w in self._next(a)} != self._next(b):
                return None
        return image

    def _extended(
        self, image: dict[int, int], pairs: Sequence[tuple[int, int]], most: int
    ) -> list[tuple[int, int]] | None:
        """Add pairs to an exchange and return the new ones, or None if they contradict it."""
        new = []
        for x, y in pairs:
            if image.get(x) == y:
                continue
            is_taken = x in image or y in image or self._fixed[x] or self._fixed[y]
            if is_taken or len(image) >= most:
                self._is_cut |= not is_taken and most == _LONGEST_EXCHANGE
                return None
            image[x], image[y] = y, x
            new.append((x, y))
        return new

    def _forced(self, a: int, b: int, image: dict[int, int]) -> list[list[tuple[int, int]]] | None:
        """Return the further pairs to exchange so that the neighbours of a and b correspond.

        Of several that look alike, the partners become clearer as the exchange grows.
        """
        ours, theirs = self._next(a), self._next(b)
        left = [t for t in ours if (t[0], t[1], image.get(t[2], t[2])) not in theirs]
        right = [t for t in theirs if (t[0], t[1], image.get(t[2], t[2])) not in ours]
        if any(t[2] in image for t in left + right):
            return None
        tables: list[dict[tuple[int, int, int], list[int]]] = [defaultdict(list) for _ in range(2)]
        for table, side in zip(tables, (left, right), strict=True):
            for k, d, w in side:
                table[k, d, int(self._colours[w])].append(w)
        first, second = tables
        if {k: len(x) for k, x in first.items()} != {k: len(x) for k, x in second.items()}:
            return None
        return [self._paired(first[k], second[k], image) for k in first]

    def _paired(
        self, ours: list[int], theirs: list[int], image: dict[int, int]
    ) -> list[tuple[int, int]]:
        """Pair vertices that look alike: first those beside the same units of tensors."""
        if len(ours) == 1:
            return [(ours[0], theirs[0])]
        beside = defaultdict[Any, tuple[list[int], list[int]]](lambda: ([], []))
        for w in sorted(ours):
            beside[self._units_beside(w, image)][0].append(w)
        for w in sorted(theirs):
            beside[self._units_beside(w, {})][1].append(w)
        alike = [both for both in beside.values() if len(both[0]) == len(both[1])]
        others = [both for both in beside.values() if len(both[0]) != len(both[1])]
        left = [sorted(w for both in others for w in both[k]) for k in (0, 1)]
        return [pair for both in (*alike, left) for pair in zip(*both, strict=True)]

    def _units_beside(self, v: int, image: dict[int, int]) -> frozenset[tuple[int, int, int]]:
        return frozenset((k, d, image.get(w, w)) for k, d, w in self._next(v) if self._placed[w])


class _Families:
    """The known exchanges, without repetition.

    Attributes:
        units: of every exchange.
    """

    def __init__(self) -> None:
        self.units: list[list[list[int]]] = []
        self._known: set[Family] = set()
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def explain(self, image: dict[int, int], placed: NDArray[np.bool_]) -> bool:
        """Return whether an exchange takes units of known ones to each other, and nothing else."""
        left = set(image)
        for k, met in self._met(image).items():
            columns = [[x for x in unit if placed[x]] for unit in self.units[k]]
            after = [[image.get(x, x) for x in columns[j]] for j in {*met.values()}]
            if all(unit in columns for unit in after):
                left -= met.keys()
        return not left

    def add(self, units: list[list[int]]) -> None:
        """Add an exchange, and its images under the known ones."""
        pending = [units]
        while pending:
            units = pending.pop()
            as_sets = frozenset(map(frozenset, units))
            if any(as_sets <= family for family in self._known):  # of which a part was searched
                continue
            pending += self._images(units)
            for j, unit in enumerate(units):
                for v in unit:
                    self._places[v].append((len(self.units), j))
            self.units.append(units)
            self._known.add(as_sets)

    def _images(self, units: list[list[int]]) -> Iterator[list[list[int]]]:
        """Yield the other images of an exchange under known exchanges that move it as a whole."""
        flat = [v for unit in units for v in unit]
        for k, met in self._met(flat).items():
            if len(set(met.values())) == 1:
                (j,) = set(met.values())
                for sibling in self.units[k][:j] + self.units[k][j + 1 :]:
                    image = dict(zip(self.units[k][j], sibling, strict=True))
                    yield [[image.get(v, v) for v in unit] for unit in units]

    def _met(self, vertices: Iterable[int]) -> dict[int, dict[int, int]]:
        """Return the units to which vertices belong, by the exchange that moves them."""
        met: dict[int, dict[int, int]] = defaultdict(dict)
        for v in vertices:
            for k, j in self._places.get(v, ()):
                met[k][v] = j
        return met

    def representatives(self, cell: Iterable[int]) -> list[int]:
        """Return the vertices of a cell that remain with one unit for all units of an exchange."""
        left = dict.fromkeys(cell)
        for k, met in sorted(self._met(left).items()):
            inside = Counter(j for v, j in met.items() if v in left)
            if len(inside) == len(self.units[k]) and len(set(inside.values())) == 1:
                for v in (v for v, j in met.items() if j):
                    left.pop(v, None)
        return [*left]

    def connect(self, level: list[int]) -> bool:
        """Return whether the vertices are one from each unit of an exchange."""
        return any(
            len(met) == len(level) == len(self.units[k]) == len(set(met.values()))
            for k, met in self._met(level).items()
        )


def _compatible(
    candidates: Sequence[list[list[int]]], reasons: dict[int, str]
) -> list[list[list[int]]]:
    """Select exchanges that generate a group whose order is the product of their orders.

    Each must leave every unit of another one as it is, or take them all elsewhere: so do rows and
    columns, and heads with what is in them. Or it must turn one that is known into another, as
    where rows change places with columns. Two that exchange pairs of units, (0, 1) and (0, 2), do
    not where entries stand for pairs: of these the first is kept.
    """
    chosen: list[list[list[int]]] = []
    users: dict[int, set[int]] = defaultdict(set)
    families: set[Family] = set()
    for units in candidates:
        flat = [x for unit in units for x in unit]
        beside = [chosen[k] for k in set[int]().union(*(users[x] for x in flat))]
        if not all(_agree(units, second, families) for second in beside):
            reasons[units[0][0]] = "exchanges that share entries with others were omitted"
            continue
        for x in flat:
            users[x].add(len(chosen))
        chosen.append(units)
        families.add(frozenset(map(frozenset, units)))
    return chosen


def _agree(units: list[list[int]], second: list[list[int]], families: set[Family]) -> bool:
    """Return whether two exchanges generate a group whose order is the product of theirs."""
    effects = _effects(units, second, families)
    if None in effects:
        return False
    return "turned" in effects or None not in _effects(second, units, families)


def _effects(
    units: list[list[int]], second: list[list[int]], families: set[Family]
) -> set[str | None]:
    """Return the effects of some exchanges on another, with None for one that tears it apart."""
    effects, index = set[str | None](), {x: j for j, unit in enumerate(second) for x in unit}
    for unit in units[1:]:
        image = dict(zip([*units[0], *unit], [*unit, *units[0]], strict=True))
        after = {x: index.get(image[x]) for x in image if x in index}
        stays = all(j == index[x] for x, j in after.items())
        if stays or (len(after) == len(index) and not any(j is not None for j in after.values())):
            effects.add("left")
        else:
            turned = frozenset(frozenset(image.get(x, x) for x in old) for old in second)
            is_another = turned != frozenset(map(frozenset, second)) and turned in families
            effects.add("turned" if is_another else None)
    return effects


def _overlap(units: list[list[int]]) -> bool:
    flat = [x for unit in units for x in unit]
    return len(set(flat)) < len(flat)


def _side(image: dict[int, int], v: int) -> list[int]:
    """Return the half of an exchange that contains a vertex, in order of discovery."""
    order = list(image)
    parity = order.index(v) % 2
    return [order[k + parity] for k in range(0, len(order), 2)]
