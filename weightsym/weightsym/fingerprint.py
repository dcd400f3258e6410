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
        spectra: fourth root of the sum of the fourth powers of the singular values of every matrix
            at least mass; kernels as matrices by output channel. Tensors of which only parts
            move together (grouped convolutions, packed projections) have none.
        code: two words, each of which rounds eight sums of norms and spectra, to cells of which
            those of one word end where those of the other have their middle.
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
    spectra: dict[str, float] = field(default_factory=dict, repr=False)

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

    That two differ says that the networks are of different orbits. That two agree proves nothing:
    fingerprints see the norm of every tensor and the singular values of most matrices, to about one
    in ten thousand of all together. They do not see what leaves both alone: exchanged or flipped
    rows of one matrix without what reads them, flipped biases, and small changes that turn weights
    without changing their sizes.

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
    spectra = _spectra(least, sym)
    numbers = [*norms.values(), *spectra.values()]
    code = _code(torch.tensor(numbers, dtype=torch.float64))
    return Fingerprint(norms, code, bool(attained.all()), spectra)


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
        if is_weight(name, w) and name not in sym.aliases:
            _add(squares, name, sym, float(w.double().square().sum()))
    return {name: math.sqrt(value) for name, value in squares.items()}


def _spectra(params: Params, sym: Symmetries) -> dict[str, float]:
    r"""Roots :math:`\sqrt[4]{\mathrm{tr}\,(W W^T)^2}`, which no rotation of either side changes.

    At least mass every symmetry acts on both sides of a matrix by permutations, signs and
    rotations.
    """
    parts = {axis.tensor for axis in sym.axes if axis.blocks > 1 or axis.dim is None}
    powers: dict[str, float] = {}
    for name, w in params.items():
        if is_weight(name, w) and w.ndim > 1 and name not in {*sym.aliases, *parts}:
            rows = w.double().flatten(1)
            gram = rows @ rows.mT if rows.shape[0] <= rows.shape[1] else rows.mT @ rows
            _add(powers, name, sym, float(gram.square().sum()))
    return {name: value**0.25 for name, value in powers.items()}


def _add(sums: dict[str, float], name: str, sym: Symmetries, value: float) -> None:
    """Add to the number of all tensors that may change places with one."""
    key = min(sym.exchangeable_tensors.get(name, {name}))
    sums[key] = sums.get(key, 0.0) + value


def _code(numbers: Tensor) -> str:
    """Two words of hexadecimal digits, see `Fingerprint`."""
    generator = keyed_generator("fingerprint", len(numbers))
    shares = torch.rand(_SUMS, len(numbers), generator=generator, dtype=torch.float64)
    sums = (shares @ numbers).tolist()
    return "-".join(_word(sums, middle) for middle in (0.0, 0.5))


def _word(sums: Sequence[float], middle: float) -> str:
    cells = [math.floor(math.log(s) / _STEP + middle) if s > 0 else None for s in sums]
    return hashlib.blake2b(repr(cells).encode(), digest_size=4).hexdigest()
