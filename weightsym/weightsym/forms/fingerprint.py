"""Numbers that all networks of one orbit share, and a short code for comparison.

At least mass the only remaining freedom is that of permutations, signs and rotations. They change
neither the size of a tensor nor the sizes of the units along its axes, except for their order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightsym.forms.mass_problem import square_sums
from weightsym.forms.min_mass import min_mass
from weightsym.forms.scales_and_signs import unit_norms
from weightsym.groups.axis_maps import along_axis
from weightsym.groups.element import Element, Values
from weightsym.groups.shift_removal import without_shifts
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_finite, check_one_network
from weightsym.networks.randomness import keyed_generator
from weightsym.params import Params, is_weight

_SUMS = 8
_STEP = 1e-4  # relative width of the cells to which numbers are rounded


@dataclass(frozen=True)
class Fingerprint:
    """Numbers that permutations, scales, flips, mixing and shifts preserve.

    Attributes:
        norms: of every tensor at least mass; those of exchangeable tensors together.
        code: two words, each of which rounds eight sums of norms and of sizes of units to cells.
            The cells of one word end at the midpoints of those of the other.
        attained: whether finite scales reach the least mass; if not, the norms depend on where the
            search stopped.

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

    def agrees(self, other: Fingerprint) -> bool:
        """Return whether both may be of one orbit: at least one of the two words is equal."""
        pairs = zip(self.code.split("-"), other.code.split("-"), strict=True)
        return any(a == b for a, b in pairs)

    def __str__(self) -> str:
        """Return the code alone."""
        return self.code


@torch.no_grad()
def fingerprint(params: Params, sym: Symmetries) -> Fingerprint:
    """Return the fingerprint of a network, equal for all networks of its orbit up to rounding.

    Rounding of the weights occasionally moves a number across the end of its cell, but hardly ever
    in both words at once. Compare fingerprints by `Fingerprint.agrees`.

    Different fingerprints prove different orbits. Equal ones prove nothing. A fingerprint includes
    the size of every weight and bias tensor at least mass, and along its axes the sizes of all
    units that permutations move. It does not include

    - what changes these numbers by less than one in ten thousand, such as one weight among many;
    - signs, and which weight of a unit is which: two networks may differ in these alone;
    - statistics of batch norms, and but for their norm, biases that several branches share.

    If no finite scales reach the least mass (`attained` is False), or if a stream that matrices mix
    has no full rank, networks of one orbit may have different fingerprints.

    Args:
        params: one network.
        sym: result of `discover`.

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
    plain = without_shifts(params, sym)
    least, attained = to_least_mass(plain, sym, mixing=True)
    return fingerprint_of(least.view(plain), attained, sym)


def fingerprint_of(least: Mapping[str, Tensor], attained: Tensor, sym: Symmetries) -> Fingerprint:
    """Return the fingerprint of a network that has the least mass.

    Args:
        least: the network without shifts, moved by the element that `to_least_mass` returns over
            matrices, too.
        attained: whether finite scales reach it.
        sym: result of `discover`.
    """
    norms = _norms(least, sym)
    floor = sum(norms.values()) / (10 * max(len(norms), 1)) or 1.0  # rounding is small beside it
    logs = [math.log(norm + floor) for norm in norms.values()]
    profiles = [
        float(torch.linspace(0, 1, len(sizes)).to(sizes) @ sizes) / (norms[name] + floor)
        for name, sizes in _sizes_of_units(least, sym)
    ]
    code = _code(torch.tensor([*logs, *profiles], dtype=torch.float64))
    return Fingerprint(norms, code, bool(attained.all()))


def to_least_mass(
    params: Mapping[str, Tensor], sym: Symmetries, mixing: bool = False
) -> tuple[Element, Tensor]:
    """Return the element that brings a network without shifts to its least mass.

    Units whose scale is not compensated, as under weight norm, have no least mass. They get norm
    one.

    Args:
        params: one network or a stack.
        sym: result of `discover`.
        mixing: whether to minimise over matrices that mix channels, too.

    Returns:
        The element, and whether finite scales reach the least mass.
    """
    mixing = mixing and any(group.rescales for group in sym.linear)
    if not mixing and not sym.scalings:
        return Element(sym), torch.tensor(True)
    least = min_mass(params, sym, mixing=mixing, tolerance=1e-13 if mixing else 1e-16)
    values: Values = {"scalings": least.scales}
    element = Element.of_values(sym, {**values, "linear": least.matrices} if mixing else values)
    if any(bool(some.any()) for some in least.falling):
        lengths = unit_norms(element.view(params), sym, least.falling)
        element = Element.of_values(sym, {"scalings": lengths}) @ element
    return element, least.attained


def _norms(params: Mapping[str, Tensor], sym: Symmetries) -> dict[str, float]:
    """Return norms of weights in float64, by the first of all exchangeable tensors."""
    squares: dict[str, float] = {}
    for name in params:
        w = params[name]
        if _counts(name, w, sym):
            first = sym.first_twin(name)
            squares[first] = squares.get(first, 0.0) + float(square_sums(w[None], ()))
    return {name: math.sqrt(value) for name, value in squares.items()}


def _sizes_of_units(params: Mapping[str, Tensor], sym: Symmetries) -> Iterator[tuple[str, Tensor]]:
    """Return sorted norms of the units that permutations move, along every such axis.

    Axes of exchangeable tensors are joined, under the name of the first of them.
    """
    sizes: dict[tuple[str, int | None, int], list[Tensor]] = {}
    left_out = _shared_biases(sym)
    for a, places in sym.placements_by_axis("permutations").items():
        axis = sym.axes[a]
        if axis.tensor not in params or axis.tensor in left_out:
            continue
        w = params[axis.tensor]
        if not _counts(axis.tensor, w, sym):
            continue
        rows = along_axis(w, axis, 0)
        squares = square_sums(rows.reshape(1, -1, axis.length), (2,)).flatten()
        for _, placement in places:
            if not _turned(sym, a, placement.positions):
                key = (sym.first_twin(axis.tensor), axis.dim, placement.positions.shape[1])
                sizes.setdefault(key, []).append(squares[placement.positions.to(w.device)].sum(1))
    for (name, *_), norms in sorted(sizes.items(), key=lambda item: repr(item[0])):
        yield name, torch.cat(norms).sqrt().sort().values.cpu()


def _turned(sym: Symmetries, a: int, positions: Tensor) -> bool:
    """Return whether matrices mix the channels of different units along an axis."""
    unit = torch.full((sym.axes[a].length,), -1)
    unit[positions.cpu()] = torch.arange(len(positions))[:, None]
    spaces = [unit[p.positions.cpu()] for _, p in sym.placements_by_axis("linear").get(a, ())]
    return any(bool((space != space[:, :1]).any()) for space in spaces)


def _shared_biases(sym: Symmetries) -> set[str]:
    """Return exchangeable biases of which one can absorb another."""
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
    """Return two words of hexadecimal digits, see `Fingerprint`."""
    generator = keyed_generator("fingerprint", len(numbers))
    shares = torch.rand(_SUMS, len(numbers), generator=generator, dtype=torch.float64)
    cells = shares @ numbers / (_STEP * len(numbers) ** 0.5)
    return "-".join(_word((cells + middle).floor().tolist()) for middle in (0.0, 0.5))


def _word(cells: Sequence[float]) -> str:
    return hashlib.blake2b(repr(cells).encode(), digest_size=4).hexdigest()
