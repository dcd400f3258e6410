"""Numbers that all networks of one orbit have in common, and a short code for people to compare."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightsym.actions import multiply
from weightsym.groups import Symmetries
from weightsym.min_mass import min_mass
from weightsym.mixing import mix_some
from weightsym.params import Params, is_weight
from weightsym.path_sums import path_sums
from weightsym.randomness import keyed_generator
from weightsym.shifting import remove_shifts
from weightsym.validation import check_finite, check_one_network

__all__ = ["Fingerprint", "at_least_mass", "fingerprint"]

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

    Where no finite scales reach the least mass (`attained` is False), or where one sign acts along
    two dimensions of a tensor, networks of one orbit may have different fingerprints.

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

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        mixing: over the matrices that mix channels as well.

    Returns:
        The networks, and whether finite scales reach the least mass.
    """
    params = remove_shifts(params, sym)
    if mixing and any(group.rescales for group in sym.linear):
        least = min_mass(params, sym, mixing=True, tolerance=1e-13)
        params = multiply(params, sym, {"scalings": least.scales})
        return mix_some(params, sym, least.matrices), least.attained
    if not sym.scalings:
        return params, torch.tensor(True)
    least = min_mass(params, sym, tolerance=1e-16)
    return multiply(params, sym, {"scalings": least.scales}), least.attained


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
