"""Numbers that all networks of one orbit have in common, and a short code for people to compare.

Besides norms these are sums over the paths of a network, which no permutation, sign or rotation
changes. Every tensor is contracted with one vector along each of its axes. Positions that no group
reaches have fixed random numbers. The numbers of the others are contractions of the tensors that
share their units, so that they move, flip and turn with them. After some rounds the sum of a tensor
depends on all that is connected to it, as the outputs of a network without activations do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from weightsym.forms.min_mass import min_mass
from weightsym.forms.scales_and_signs import canonical_scales_and_signs
from weightsym.groups.actions import along_axis, multiply
from weightsym.groups.mixing import mix_some, remove_shifts
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_finite, check_one_network
from weightsym.networks.randomness import key_of, keyed_generator
from weightsym.params import Params, is_weight

__all__ = ["Fingerprint", "at_least_mass", "fingerprint", "path_sums"]

_SUMS = 8
_STEP = 1e-4  # relative width of the cells to which numbers are rounded


@dataclass(frozen=True)
class Fingerprint:
    """Numbers that permutations, scales, flips, mixing and shifts do not change.

    Attributes:
        norms: of every tensor at least mass; those of tensors that may change places, together.
        paths: of the same tensors, sums over paths: each is multiplied along all its axes by
            numbers that the tensors around it give to the units, see `path_sums`.
        code: two words, each of which rounds eight sums of these numbers, to cells of which those
            of one word end where those of the other have their middle.
        attained: whether finite scales reach the least mass; if not, the norms depend on where the
            search for it stopped.

    >>> from torch import nn
    >>> from weightsym import params as P
    >>> from weightsym import discover, fingerprint
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
    >>> found = fingerprint(P.of(net), discover(net, torch.randn(8, 2)))
    >>> list(found.norms)
    ['0.weight', '0.bias', '2.weight', '2.bias']
    >>> len(str(found))  # two words of eight hexadecimal digits
    17
    """

    norms: dict[str, float] = field(repr=False)
    code: str
    attained: bool = True
    paths: dict[str, float] = field(default_factory=dict, repr=False)

    def agrees(self, other: Fingerprint) -> bool:
        """True if both may be of one orbit: one of the two words is the same."""
        pairs = zip(self.code.split("-"), other.code.split("-"), strict=True)
        return any(a == b for a, b in pairs)

    def __str__(self) -> str:
        """The code alone, for people to compare."""
        return self.code


@torch.no_grad()
def fingerprint(params: Params, sym: Symmetries) -> Fingerprint:
    """The fingerprint of a network: equal for all networks of its orbit, up to rounding.

    Rounding of the weights moves a number over the end of its cell now and then, but hardly ever in
    both words at once, so that two fingerprints are compared by `Fingerprint.agrees`.

    That two differ says that the networks are of different orbits. That two agree proves nothing.
    Fingerprints see the size of every weight and bias tensor, and sums over the paths through it,
    which depend on the signs and places of all numbers. They do not see

    - what changes these numbers by less than one in ten thousand, such as one weight among many;
    - statistics of batch norms, and but for their norm, biases that several branches share;
    - signs that only products of several vectors show, such as those of the gains of queries and
      keys behind their norms.

    Where no finite scales reach the least mass (`attained` is False), where a stream that matrices
    mix has no full rank, or where one sign acts along two dimensions of a tensor, networks of one
    orbit may have different fingerprints.

    Args:
        params: one network.
        sym: what `discover` returned.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, fingerprint, permute, random_permutations
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1)).double()
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> code = fingerprint(w, sym)
    >>> code.agrees(fingerprint(permute(w, sym, random_permutations(sym)), sym))
    True
    >>> code.agrees(fingerprint(w | {"2.weight": 1.01 * w["2.weight"]}, sym))
    False
    """
    check_one_network(params, sym, "params")
    check_finite(params, sym)
    least, attained = at_least_mass(params, sym, mixing=True)
    norms = _norms(least, sym)
    floor = sum(norms.values()) / (10 * max(len(norms), 1)) or 1.0  # rounding is small beside it
    names = {n for n, w in least.items() if _counts(n, w, sym)} - _shared_biases(sym)
    sizes = {n: norms[sym.first_twin(n)] + floor for n in least if n in names}
    paths: dict[str, float] = {}
    for name, value in path_sums(least, sym, sizes).items():
        paths[sym.first_twin(name)] = paths.get(sym.first_twin(name), 0.0) + value
    logs = [math.log(norm + floor) for norm in norms.values()]
    code = _code(torch.tensor([*logs, *paths.values()], dtype=torch.float64))
    return Fingerprint(norms, code, bool(attained.all()), paths)


def at_least_mass(params: Params, sym: Symmetries, mixing: bool = False) -> tuple[Params, Tensor]:
    """The same functions with the least mass, and without shifts that biases take up.

    Units whose scale nothing takes up, as under weight norm, have no least mass: they get norm one.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        mixing: over the matrices that mix channels as well.

    Returns:
        The networks, and whether finite scales reach the least mass.
    """
    params = _with_unit_lengths(remove_shifts(params, sym), sym)
    if mixing and any(group.rescales for group in sym.linear):
        least = min_mass(params, sym, mixing=True, tolerance=1e-13)
        params = multiply(params, sym, {"scalings": least.scales})
        params = mix_some(params, sym, least.matrices)
        return _with_unit_lengths(params, sym), least.attained
    if not sym.scalings:
        return params, torch.tensor(True)
    least = min_mass(params, sym, tolerance=1e-16)
    params = multiply(params, sym, {"scalings": least.scales})
    return _with_unit_lengths(params, sym), least.attained


def _with_unit_lengths(params: Params, sym: Symmetries) -> Params:
    """Set the lengths of what a network normalises to one."""
    taken_up = [len({p.exponent > 0 for p in group.placements}) > 1 for group in sym.scalings]
    if all(taken_up):
        return params
    fixed = [torch.full((g.units,), t) for g, t in zip(sym.scalings, taken_up, strict=True)]
    scales, _ = canonical_scales_and_signs(params, sym, "unit-norm", unscaled=fixed)
    return multiply(params, sym, {"scalings": scales})


def _norms(params: Params, sym: Symmetries) -> dict[str, float]:
    """Norms of weights in float64, by the first of all tensors that may change places."""
    squares: dict[str, float] = {}
    for name, w in params.items():
        if _counts(name, w, sym):
            first = sym.first_twin(name)
            squares[first] = squares.get(first, 0.0) + float(w.double().square().sum())
    return {name: math.sqrt(value) for name, value in squares.items()}


def _shared_biases(sym: Symmetries) -> set[str]:
    """Biases that may change places, of which one has what another would take up for it."""
    names: set[str] = set()
    for group in sym.shifts:
        shifted = {sym.axes[placement.axis].tensor for placement in group.placements}
        for name in shifted:
            others = sym.exchangeable_tensors.get(name, frozenset())
            names |= others if len(others & shifted) > 1 else set()
    return names


def _counts(name: str, w: Tensor, sym: Symmetries) -> bool:
    return is_weight(name, w) and name not in sym.aliases


def _code(numbers: Tensor) -> str:
    """Two words of hexadecimal digits, see `Fingerprint`."""
    generator = keyed_generator("fingerprint", len(numbers))
    shares = torch.rand(_SUMS, len(numbers), generator=generator, dtype=torch.float64)
    cells = shares @ numbers / (_STEP * len(numbers) ** 0.5)
    return "-".join(_word((cells + middle).floor().tolist()) for middle in (0.0, 0.5))


def _word(cells: Sequence[float]) -> str:
    return hashlib.blake2b(repr(cells).encode(), digest_size=4).hexdigest()


# ------------------------------------------------------------ sums over paths
_KINDS = ("permutations", "signs", "linear")
_FEWEST_ROUNDS = 4
_MOST_ROUNDS = 64
_MOST_PARTS = 128  # of one unit, whose products are formed
_SMALL = 0.01  # beside a typical number: what rounding leaves of zero stays small


def path_sums(params: Params, sym: Symmetries, sizes: Mapping[str, float]) -> dict[str, float]:
    """One sum for every tensor, over all paths through it.

    Args:
        params: one network, of which only permutations, signs and rotations are left to choose.
        sym: what `discover` returned.
        sizes: the numbers by which tensors are divided; tensors without one take no part.
    """
    atoms = _atoms(sym)
    weights = {n: atoms.on_fixed_numbers(n, params[n].double() / s) for n, s in sizes.items()}
    numbers, zeros = atoms.first, -1
    for count in range(_MOST_ROUNDS):
        total = numbers.clone()
        for name, w in weights.items():
            for key, sums in atoms.contractions(name, w, numbers).items():
                total.index_add_(0, atoms.at[key], atoms.shares[key] * sums)
        total += atoms.products(numbers)
        before, zeros, numbers = zeros, int((total == 0).sum()), atoms.normalised(total)
        if count + 1 >= _FEWEST_ROUNDS and before == zeros:
            break
    return {name: atoms.sum_over_paths(name, w, numbers) for name, w in weights.items()}


@dataclass(frozen=True, eq=False)
class _Atoms:
    """Positions of several axes, by the units that move and flip them.

    Places are axes, and tensors that belong to blocks as wholes.

    Attributes:
        sym: the symmetries.
        at: for every place, the atoms of its positions; atom 0 stands for all that stays.
        shares: for every place, random factors, equal for positions that may change places.
        classes: for every atom, the number of those that may change places with it.
        first: one for every atom that nothing flips or turns, else zero.
        pairs: rows of atoms of one unit, of which the third flips as the product of the others.
    """

    sym: Symmetries
    at: dict[int | str, Tensor]
    shares: dict[int | str, Tensor]
    classes: Tensor
    first: Tensor
    pairs: Tensor

    def axes_of(self, name: str) -> list[int]:
        """The axes of a tensor along which more than shifts and scales act."""
        return [a for a in self.sym.axes_of.get(name, ()) if a in self.at]

    def on_fixed_numbers(self, name: str, w: Tensor) -> Tensor:
        """Multiply dimensions without an axis by random numbers, and add up what is no block."""
        axes = [self.sym.axes[a] for a in self.axes_of(name)]
        if any(axis.dim is None for axis in axes):
            return w
        for dim in {*range(w.ndim)} - {axis.dim for axis in axes}:
            numbers = _draw(w.shape[dim], "dimension", self.sym.first_twin(name), dim).to(w)
            w = w * numbers.reshape([-1 if d == dim else 1 for d in range(w.ndim)])
            if dim > 0 or all(axis.blocks == 1 for axis in axes):
                w = w.sum(dim, keepdim=True)
        return w

    def contractions(self, name: str, w: Tensor, numbers: Tensor) -> dict[int | str, Tensor]:
        """For every place of a tensor, the sums over all others."""
        axes = self.axes_of(name)
        along = {a: self.shares[a] * numbers[self.at[a]] for a in axes}
        factors = {a: self.sym.axes[a].spread(along[a], w.shape).to(w) for a in axes}
        if name in self.at:  # a tensor of a block
            w = w * numbers[self.at[name]].prod().to(w)
        contracted: dict[int | str, Tensor] = {}
        for a in axes:
            product = w
            for partner in (b for b in axes if b != a):
                product = product * factors[partner]
            sums = along_axis(product, self.sym.axes[a], 0)
            contracted[a] = sums.reshape(-1, sums.shape[-1]).sum(0).cpu() * sums.shape[-1] ** 0.5
        if name in self.at:
            for factor in factors.values():
                w = w * factor
            contracted[name] = w.sum().cpu().expand(len(self.at[name]))
        return contracted

    def products(self, numbers: Tensor) -> Tensor:
        """Products of the parts of a unit that flip by themselves."""
        bounded = numbers / (1 + numbers.square()).sqrt()
        a, b, result = self.pairs.unbind(-1)
        return torch.zeros_like(numbers).index_add(0, result, bounded[a] * bounded[b])

    def sum_over_paths(self, name: str, w: Tensor, numbers: Tensor) -> float:
        """The contraction of a tensor along all of its axes."""
        for a, sums in self.contractions(name, w, numbers).items():
            return float((sums * self.shares[a] * numbers[self.at[a]]).sum()) / len(sums) ** 0.5
        return float(w.sum())

    def normalised(self, numbers: Tensor) -> Tensor:
        """Make the mean square of atoms that may change places one, unless it is small."""
        squares = torch.zeros(int(self.classes.max()) + 1, dtype=numbers.dtype)
        squares.index_add_(0, self.classes, numbers.square())
        means = squares / torch.bincount(self.classes).clamp(min=1)
        scaled = numbers / (means.sqrt() + _SMALL)[self.classes]
        return scaled.index_fill(0, torch.tensor([0]), 1.0)


@lru_cache(maxsize=8)
def _atoms(sym: Symmetries) -> _Atoms:
    """Give positions one atom where the same units of all groups act."""
    marks: dict[int | str, np.ndarray] = {
        a: np.stack([_marks(sym, group_type, a) for group_type in _KINDS], -1)
        for a in range(len(sym.axes))
        if any(a in sym.placements_by_axis(group_type) for group_type in _KINDS)
    }
    for g, group in enumerate(sym.permutations):
        for row in group.tensors:
            for name, mark in zip(row, _random_marks("permutations", g, group.units), strict=True):
                old = marks.get(name, np.zeros((0, 3), np.int64))
                marks[name] = np.concatenate([old, [[mark, 0, 0]]])
    different, inverse = np.unique(
        np.concatenate([np.zeros((1, 3), np.int64), *marks.values()]), axis=0, return_inverse=True
    )
    inverse = inverse.reshape(-1)
    swapped = np.arange(len(different))
    swapped[[0, inverse[0]]] = swapped[[inverse[0], 0]]  # what nothing moves comes first
    ends = np.cumsum([1, *(len(m) for m in marks.values())])
    positions = {
        key: swapped[inverse[end - len(m) : end]]
        for (key, m), end in zip(marks.items(), ends[1:], strict=True)
    }
    orbits = {key: _orbits(sym, key, len(m)) for key, m in marks.items()}
    shares = {key: _shares(sym, key, orbit) for key, orbit in orbits.items()}
    classes = _classes(sym, positions, orbits, len(different))
    turned = np.zeros(len(different), bool)
    np.logical_or.at(turned, classes, (different[swapped, 1:] != 0).any(-1))
    return _Atoms(
        sym,
        {key: torch.from_numpy(a) for key, a in positions.items()},
        shares,
        torch.from_numpy(classes),
        torch.from_numpy((~turned[classes]).astype(np.float64)),
        torch.from_numpy(_even(_pairs(different[swapped]), classes)),
    )


def _even(pairs: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Those rows of which all atoms that may change places have as many."""
    _, kinds = np.unique(classes[pairs], axis=0, return_inverse=True)
    kinds = kinds.reshape(-1)
    sizes = np.bincount(classes, minlength=len(classes))
    rows, counts = np.unique(np.stack([kinds, pairs[:, 2]], 1), axis=0, return_counts=True)
    uneven = [
        mark
        for mark in np.unique(kinds).tolist()
        if len(set(frequencies := counts[rows[:, 0] == mark].tolist())) > 1
        or len(frequencies) < sizes[classes[rows[rows[:, 0] == mark][0, 1]]]
    ]
    return pairs[~np.isin(kinds, uneven)]


def _pairs(marks: np.ndarray) -> np.ndarray:
    """Rows ``(a, b, c)`` of atoms of the same units, of which c flips as the product of a and b."""
    unit, sign, matrix = marks.T
    free = np.flatnonzero((unit != 0) & (matrix == 0))
    free = free[np.argsort(unit[free], kind="stable")]
    pairs = [np.zeros((0, 3), np.int64)]
    for atoms in np.split(free, np.flatnonzero(np.diff(unit[free])) + 1):
        if 1 < len(atoms) <= _MOST_PARTS:
            product = sign[atoms][:, None] ^ sign[atoms]
            a, b, c = np.nonzero(product[..., None] == sign[atoms])
            pairs.append(atoms[np.stack([a, b, c], -1)])
    return np.concatenate(pairs)


def _random_marks(group_type: str, group: int, units: int) -> np.ndarray:
    """Random integers, of which sets of units have different exclusive ors."""
    return np.random.default_rng(key_of(group_type, group)).integers(1, 2**63 - 1, units)


def _marks(sym: Symmetries, group_type: str, a: int) -> np.ndarray:
    """For every position of an axis, a number that names the units of one kind that act there."""
    marks = np.zeros(sym.axes[a].length, np.int64)
    for g, placement in sym.placements_by_axis(group_type).get(a, ()):
        if group_type == "signs" and placement.exponent % 2 == 0:
            continue
        positions = placement.positions.cpu().numpy()
        if group_type == "linear":  # (spaces, size, repeats)
            positions = positions.reshape(-1, positions.shape[-1])
        units = _random_marks(group_type, g, len(positions))
        np.bitwise_xor.at(marks, positions.reshape(-1), units.repeat(positions.shape[1]))
    return marks


def _key_numbers(sym: Symmetries, key: int | str) -> tuple[int | str, ...]:
    """Equal for places of tensors that may change places."""
    if isinstance(key, str):
        return ("tensor", sym.first_twin(key))
    axis = sym.axes[key]
    return ("axis", sym.first_twin(axis.tensor), str(axis.dim), axis.blocks, axis.role)


def _orbits(sym: Symmetries, key: int | str, length: int) -> np.ndarray:
    """For every position of a place, the first one that may change places with it."""
    if isinstance(key, str):
        return np.arange(length)
    axis, pairs = sym.axes[key], [np.zeros((0, 2), np.int64)]
    for a in sym.axes_of[axis.tensor]:
        sibling = sym.axes[a]
        if axis.dim is None and sibling.dim is not None:  # of which all entries lie on this axis
            shape = sym.shapes[axis.tensor]
            where = sibling.labels(shape).expand(shape).reshape(-1).numpy()
            positions = where.argsort(kind="stable").reshape(sibling.length, -1)
        elif a == key or (axis.dim, axis.blocks) == (sibling.dim, sibling.blocks):
            positions = np.arange(length)[:, None]
        else:
            continue
        for group_type in ("permutations", "linear"):
            for _, placement in sym.placements_by_axis(group_type).get(a, ()):
                rows = placement.positions.cpu().numpy()
                rows = positions[rows if group_type == "permutations" else rows.transpose(1, 0, 2)]
                pairs.append(np.stack(np.broadcast_arrays(rows[:1], rows), -1).reshape(-1, 2))
    return _first_of_component(np.concatenate(pairs), length)


def _first_of_component(edges: np.ndarray, length: int) -> np.ndarray:
    graph = coo_matrix((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), (length, length))
    _, component = connected_components(graph, directed=False)
    _, first = np.unique(component, return_index=True)
    return first[component]


def _shares(sym: Symmetries, key: int | str, orbits: np.ndarray) -> Tensor:
    return _draw(len(orbits), *_key_numbers(sym, key))[torch.from_numpy(orbits)]


def _classes(
    sym: Symmetries, positions: Mapping[int | str, np.ndarray],
    orbits: Mapping[int | str, np.ndarray], count: int,
) -> np.ndarray:  # fmt: skip
    """Number atoms so that those which may change places have one number."""
    keys = {key: k for k, key in enumerate(dict.fromkeys(_key_numbers(sym, p) for p in positions))}
    rows = [
        np.stack([np.full(len(atoms), keys[_key_numbers(sym, p)]), orbits[p], atoms], 1)
        for p, atoms in positions.items()
    ]
    every = np.concatenate([np.zeros((0, 3), np.int64), *rows])
    every = every[every[:, 2] > 0]
    _, first, index = np.unique(every[:, :2], axis=0, return_index=True, return_inverse=True)
    edges = np.stack([every[first[index.reshape(-1)], 2], every[:, 2]], 1)
    return _first_of_component(edges, count)


def _draw(count: int, *key: int | str) -> Tensor:
    return torch.randn(count, generator=keyed_generator("path", *key), dtype=torch.float64)
