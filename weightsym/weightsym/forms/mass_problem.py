r"""The mass of a network as a convex function of its log scales.

Squared weights, summed over entries with equal scales, are single terms and matrices of terms:

.. math:: \sum_f S_f e^{2 l_f} + \sum_{e, r, c} M_{erc} e^{2 (l_{e_r} + l_{e_c})}, \quad
    l = (u, 0, -u, Cu)

for log scales u and a table l of log factors: each scale and its inverse, one, and products of
several scales, whose integer powers are the rows of C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float64
from scipy.sparse import csr_matrix
from torch import Tensor

from weightsym.groups.symmetries import Axis, Symmetries
from weightsym.groups.validation import check_finite, check_params, check_squares
from weightsym.networks.devices import kept_on
from weightsym.params import Params, is_stacked

_FEW = 64
_AT_ONCE = 2**18  # numbers whose squares stay near the processor
_FLUSHED = 1e-30  # smaller squares than this may be zero in float32


class MatrixTerms(NamedTuple):
    """Terms ``(members, blocks, rows, columns)``, and the factors of their rows and columns.

    Attributes:
        given: the terms at log scales of zero.
        rows: the factors of the rows, ``(blocks, rows)``.
        columns: the factors of the columns.
        left: what the scales make of every row, ``(members, blocks, rows)``; None for ones.
        right: what they make of every column.
    """

    given: Tensor
    rows: Tensor
    columns: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    @property
    def terms(self) -> Tensor:
        """The current terms, written out."""
        if self.left is None or self.right is None:
            return self.given
        return self.given * (self.left[..., None] * self.right[..., None, :])

    def times(self, columns: Tensor | None = None) -> Tensor:
        """Return the sums of rows, weighted by values of the columns."""
        if columns is None or self.right is None:
            columns = self.right if columns is None else columns
        else:
            columns = columns * self.right
        if columns is None:
            return self.given.sum(-1)
        sums = (columns[..., None, :] @ self.given.mT)[..., 0, :]  # a column is slow for several
        return sums if self.left is None else sums * self.left

    def transposed_times(self, rows: Tensor | None = None) -> Tensor:
        """Return the sums of columns, weighted by values of the rows."""
        mirrored = MatrixTerms(self.given.mT, self.columns, self.rows, self.right, self.left)
        return mirrored.times(rows)


@dataclass(frozen=True, eq=False)
class Posynomial:
    """Terms at one point, for all members of a stack at once.

    Attributes:
        single: terms of one factor, ``(members, factors)``.
        matrices: terms of two factors.
        powers: of the log scales in the factors of several scales, a sparse ``(factors, scales)``.
        free: mask of the variable scales, ``(scales,)``; by default all.
        structure: tables that are shared by all points of a problem.
    """

    single: Tensor
    matrices: tuple[MatrixTerms, ...]
    powers: Tensor
    free: Tensor | None = None
    structure: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def variables(self) -> int:
        """The number of log scales."""
        return self.powers.shape[1]

    def logs(self, t: Tensor) -> Tensor:
        """Return the table of log factors ``(members, factors)`` at log scales t."""
        parts = [t, t.new_zeros(len(t), 1), -t]
        if len(self.powers):
            parts.append((self.powers @ t.T).T)
        return torch.cat(parts, -1)

    def gathered(self, mass: Tensor, sign: int = 0) -> Tensor:
        """Apply the transpose of `logs`, or of the sizes of its powers of one sign."""
        n = self.variables
        up, down = mass[:, :n], mass[:, n + 1 : 2 * n + 1]
        total = up - down if sign == 0 else up if sign > 0 else down
        if len(self.powers):
            powers = (sign * self.powers).relu() if sign else self.powers
            total = total + (powers.T @ mass[:, 2 * n + 1 :].T).T
        return total if self.free is None else total * self.free

    def moved(self, u: Tensor) -> Posynomial:
        """Return the terms at log scales u."""
        factors = (2 * self.logs(u)).exp()
        matrices = tuple(
            m._replace(left=rows, right=columns) for m, rows, columns in self._at_ends(factors)
        )
        return replace(self, single=self.single * factors, matrices=matrices)

    def without(self, direction: Tensor) -> Posynomial:
        """Remove the terms that decrease along a direction by at least one."""
        logs = self.logs(direction)
        matrices = tuple(
            m._replace(given=m.given * (rows[..., None] + columns[..., None, :] > -0.5))
            for m, rows, columns in self._at_ends(logs)
        )
        return replace(self, single=self.single * (logs > -0.5), matrices=matrices)

    def members(self, chosen: Tensor) -> Posynomial:
        """Return the terms of some members of a stack."""
        matrices = tuple(
            MatrixTerms(m.given[chosen], m.rows, m.columns, *(_rows(t, chosen) for t in m[3:]))
            for m in self.matrices
        )
        return replace(self, single=self.single[chosen], matrices=matrices)

    @cached_property
    def degree(self) -> float:
        """The largest sum of absolute powers in one term."""
        powers = self.powers.values().abs()
        sizes = powers.new_zeros(len(self.powers)).index_add(0, self.powers.indices()[0], powers)
        return max([1.0, *sizes.tolist()]) * (2 if self.matrices else 1)

    @cached_property
    def total(self) -> Tensor:
        """The sum of the terms for every factor."""
        sums = zip(self._row_sums, (m.transposed_times() for m in self.matrices), strict=True)
        return self._scattered(self.single, list(sums))

    @cached_property
    def _row_sums(self) -> list[Tensor]:
        return [m.times() for m in self.matrices]

    @cached_property
    def value(self) -> Tensor:
        """The sum of all terms for every member."""
        return torch.cat([self.single, *(sums.flatten(1) for sums in self._row_sums)], 1).sum(1)

    @property
    def support(self) -> Posynomial:
        """One for every nonzero term, so that their sum counts them."""
        matrices = tuple(MatrixTerms((m.given > 0).double(), *m[1:3]) for m in self.matrices)
        return replace(self, single=(self.single > 0).double(), matrices=matrices)

    @cached_property
    def inflow(self) -> Tensor:
        """For every scale, the mass that increases with it, times the powers."""
        return self.gathered(self.total, 1)

    @cached_property
    def outflow(self) -> Tensor:
        """For every scale, the mass that decreases with it, times the powers."""
        return self.gathered(self.total, -1)

    def laplacian(self, t: Tensor) -> Tensor:
        """Multiply a quarter of the Hessian by one vector for every member."""
        if "slopes" in vars(self):
            entering, leaving = self.slopes
            return ((entering - leaving) @ t[..., None])[..., 0]
        logs = self.logs(t)
        return self.gathered(self._scattered(self.total * logs, self._partners(logs)))

    def _partners(self, table: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return sums over the other side of every matrix, for its rows and its columns."""
        return [
            (m.times(columns), m.transposed_times(rows))
            for m, rows, columns in self._at_ends(table)
        ]

    def _at_ends(self, table: Tensor) -> Iterator[tuple[MatrixTerms, Tensor, Tensor]]:
        """Yield every matrix with the entries of a table for its rows and its columns."""
        if not self.matrices:
            return
        sizes = [end.numel() for m in self.matrices for end in (m.rows, m.columns)]
        parts = iter(table.index_select(1, self._ends).split(sizes, 1))
        for m, rows, columns in zip(self.matrices, parts, parts, strict=True):
            shape = len(table), *m.rows.shape
            yield m, rows.view(*shape), columns.view(*shape[:2], -1)

    def _scattered(self, start: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        if not pairs:
            return start
        values = torch.cat([t.flatten(1) for pair in pairs for t in pair], 1)
        return start.index_add(1, self._ends, values)

    @property
    def _ends(self) -> Tensor:
        if "ends" not in self.structure:
            ends = [e.reshape(-1) for m in self.matrices for e in (m.rows, m.columns)]
            self.structure["ends"] = torch.cat(ends)
        return self.structure["ends"]

    @cached_property
    def slopes(self) -> tuple[Tensor, Tensor]:
        """Half the derivatives of inflow and outflow by the log scales, dense."""
        n, sides = self.variables, [side for m in self.matrices for side in (m.terms, m.terms.mT)]
        table = self.total.new_zeros(len(self.total), self.total.shape[1] * n)
        if "places" not in self.structure:
            self.structure["places"] = list(self._places())
        for places, powers, pairs in self.structure["places"]:
            table.index_add_(1, places, self.total * powers)
            for terms, (where, by) in zip(sides, pairs, strict=True):
                table.index_add_(1, where.flatten(), (terms * by[:, None]).flatten(1))
        rows = table.view(*self.total.shape, n).mT.flatten(0, 1)
        entering, leaving = (
            self.gathered(rows, sign).view(len(table), n, n).mT for sign in (1, -1)
        )
        return entering, leaving

    def _places(self) -> Iterator[tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]]:
        """Return the positions of terms in a table ``(factors, scales)``, with powers of the scale.

        The order is: the total of every factor, then the matrices and their transposes. For each,
        the first scale of every factor comes first, then the next of products.
        """
        n, (rows, columns), values = self.variables, self.powers.indices(), self.powers.values()
        units, ones = torch.arange(n, device=rows.device), values.new_ones(n)
        rows = torch.cat([units, units + n + 1, rows + 2 * n + 1])
        rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
        shape = max([0, *rank.tolist()]) + 1, self.total.shape[1]
        scales, powers = rows.new_zeros(shape), values.new_zeros(shape)
        scales[rank, rows] = torch.cat([units, units, columns])
        powers[rank, rows] = torch.cat([ones, -ones, values])
        ends = [pair for m in self.matrices for pair in ((m.rows, m.columns), (m.columns, m.rows))]
        for scale, power in zip(scales, powers, strict=True):
            pairs = [(a[..., None] * n + scale[b][:, None], power[b]) for a, b in ends]
            yield torch.arange(shape[1], device=rows.device) * n + scale, power, pairs


def _rows(values: Tensor | None, chosen: Tensor) -> Tensor | None:
    return None if values is None else values[chosen]


# ------------------------------------------------------------ from a network
def mass(params: Params, sym: Symmetries) -> Float64[Tensor, "*members"]:
    r"""Sum the squares of all weights and gains, biases excluded: one number per member.

    .. math:: M(\theta) = \sum_{w \in \text{weights}} w^2

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, mass
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> w = {n: torch.full_like(t, 2.0) for n, t in P.of(net).items()}
    >>> mass(w, discover(net, torch.randn(8, 2)))  # 4 (2 * 3 + 3 * 1)
    tensor(36., dtype=torch.float64)
    """
    offset = 1 if check_params(params, sym) else 0
    parts = [
        square_sums(params[n] if offset else params[n][None], ())
        for n in sym.weights
        if n in params
    ]
    total = torch.stack(parts).sum(0)
    return total if offset else total[0]


class Recipe(NamedTuple):
    """The reduction of a tensor's squares to terms: the axes that are not summed."""

    axes: tuple[Axis, ...]
    whole: bool
    factors: tuple[Tensor, ...]


def mass_problem(params: Mapping[str, Tensor], sym: Symmetries) -> Posynomial:
    """Sum up the squared weights of a network or a stack, or of some of its tensors.

    Args:
        params: one network or a stack.
        sym: result of `discover`.
    """
    recipes, powers = plan(sym)
    offset = is_stacked(params, sym.shapes)
    first = next(iter(params.values()))
    members, device = len(first) if offset else 1, first.device
    size = 2 * sym.scaling_dof + 1 + len(powers)
    single = torch.zeros(members, size, dtype=torch.float64, device=device)
    shapes: dict[tuple[int, ...], list[MatrixTerms]] = {}
    for name in sym.weights:
        if name in params:
            w, recipe = params[name] if offset else params[name][None], recipes[name]
            squares, ends = _squares(w, recipe), [kept_on(f, device) for f in recipe.factors]
            if len(ends) == 2:
                shapes.setdefault(squares.shape[2:], []).append(MatrixTerms(squares, *ends))
            else:
                single.scatter_add_(1, ends[0].expand_as(squares), squares)
    problem = Posynomial(single, tuple(map(_beside, shapes.values())), kept_on(powers, device))
    if not bool(problem.value.isfinite().all()):
        check_finite(params, sym)
        check_squares(params, tensors=[n for n in sym.weights if n in params])
    return problem


def _beside(matrices: Sequence[MatrixTerms]) -> MatrixTerms:
    """Concatenate matrices of one shape as the blocks of one."""
    if len(matrices) == 1:
        return matrices[0]
    terms, rows, columns = zip(*(m[:3] for m in matrices), strict=True)
    return MatrixTerms(torch.cat(terms, 1), torch.cat(rows), torch.cat(columns))


def _squares(w: Tensor, recipe: Recipe) -> Tensor:
    """Sum squares over entries with equal scales, in the shape of their factors."""
    blocks = recipe.axes[-1].blocks if recipe.axes else 1
    if blocks > 1:
        w = w.unflatten(1, (blocks, -1))
    start = 1 + (blocks > 1)
    keep = [*range(1, start), *(a.dim + start for a in recipe.axes if a.dim is not None)]
    sums = square_sums(w, range(1, w.ndim) if recipe.whole else keep)
    if len(recipe.factors) == 1:
        return sums.reshape(len(w), -1)
    return sums.reshape(len(w), *recipe.factors[0].shape, -1)


_plans: WeakKeyDictionary[Symmetries, tuple[dict[str, Recipe], Tensor]] = WeakKeyDictionary()


def plan(sym: Symmetries) -> tuple[dict[str, Recipe], Tensor]:
    """Return the recipes of all tensors, and the powers of the products of scales.

    Args:
        sym: result of `discover`.
    """
    if sym not in _plans:
        table = _Table(sym.scaling_dof)
        scaled = sym.placements_by_axis("scalings")
        axes = {n: [a for a in scaled if sym.axes[a].tensor == n] for n in sym.weights}
        recipes = {name: _recipe(sym, name, axes[name], table) for name in sym.weights}
        _plans[sym] = recipes, table.powers()
    return _plans[sym]


def _recipe(sym: Symmetries, name: str, indices: Sequence[int], table: _Table) -> Recipe:
    by_side: dict[tuple[int | None, int], list[int]] = {}
    for a in indices:
        by_side.setdefault((sym.axes[a].dim, sym.axes[a].blocks), []).append(a)
    powers = [
        sum((sym.scale_powers[a] for a in group[1:]), sym.scale_powers[group[0]])
        for group in by_side.values()
    ]
    axes = [sym.axes[group[0]] for group in by_side.values()]
    if not axes:
        return Recipe((), False, (torch.tensor([table.scales]),))
    order = sorted(range(len(axes)), key=lambda k: (axes[k].blocks, axes[k].dim or 0))
    axes, powers = [axes[k] for k in order], [powers[k] for k in order]
    if len(axes) == 1 and axes[0].dim is not None:
        return Recipe(tuple(axes), False, (table.index(powers[0]),))
    if _is_matrix(axes):
        rows, columns = (table.index(p).reshape(axes[1].blocks, -1) for p in powers)
        return Recipe(tuple(axes), False, (rows, columns))
    like = sym.shapes[name]
    everywhere = []
    for axis, power in zip(axes, powers, strict=True):
        position = axis.labels(like)
        everywhere.append(power[position.expand(like).reshape(-1).numpy()])
    return Recipe((), True, (table.index(sum(everywhere[1:], everywhere[0])),))


def _is_matrix(axes: Sequence[Axis]) -> bool:
    """Return whether there are two axes, of which the second may have row blocks."""
    dims = {a.dim for a in axes}
    return (
        len(axes) == len(dims) == 2
        and None not in dims
        and axes[0].blocks == 1
        and (axes[1].blocks == 1 or axes[0].dim == 0)
    )


class _Table:
    """An index of factors: scales, one, their inverses, then products in order of use."""

    def __init__(self, scales: int) -> None:
        self.scales = scales
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def index(self, powers: csr_matrix) -> Tensor:
        """Return the index of the factor of every row of powers."""
        powers.eliminate_zeros()
        powers.sort_indices()
        n, start, count = self.scales, powers.indptr, np.diff(powers.indptr)
        numbers = np.full(len(count), n)
        alone = np.flatnonzero(count == 1)
        alone = alone[np.abs(powers.data[start[alone]]) == 1]
        numbers[alone] = powers.indices[start[alone]] + (n + 1) * (powers.data[start[alone]] < 0)
        count[alone] = 0
        for k in np.flatnonzero(count):
            row = slice(start[k], start[k + 1])
            key = tuple(powers.indices[row].tolist()), tuple(powers.data[row].tolist())
            numbers[k] = 2 * n + 1 + self.known.setdefault(key, len(self.known))
        return torch.from_numpy(numbers)

    def powers(self) -> Tensor:
        """Return the sparse powers of the products."""
        entries = [
            (k, v, p) for (vs, ps), k in self.known.items() for v, p in zip(vs, ps, strict=True)
        ]
        rows, columns, values = torch.tensor(entries, dtype=torch.int64).reshape(-1, 3).unbind(1)
        size = len(self.known), self.scales
        with torch.sparse.check_sparse_tensor_invariants():
            places = torch.stack([rows, columns])
            return torch.sparse_coo_tensor(places, values.double(), size).coalesce()


# ------------------------------------------------------------ sums of squares
def square_sums(w: Tensor, keep: Sequence[int]) -> Tensor:
    """Sum squares over all dimensions but the first and given ones, mostly in the native dtype."""
    w = w.detach()
    if w.ndim > 1 and w.numel() > _AT_ONCE and w.shape[1] > 1:
        rows = max(1, w.shape[1] * _AT_ONCE // w.numel())
        parts = [square_sums(some, keep) for some in w.split(rows, 1)]
        return torch.cat(parts, 1) if 1 in keep else torch.stack(parts).sum(0)
    if w.dtype in (torch.float16, torch.bfloat16):  # squares need more than these hold
        w = w.float()
    if w.device.type != "cpu":  # float64 throughout costs less than to ask
        return _summed(w.double().square(), keep)
    total = _summed(w.square(), keep)
    if w.dtype != torch.float64 and total.numel() and bool(total.min() < _FLUSHED):
        return _summed(w.double().square(), keep)
    return total


def _summed(squares: Tensor, keep: Sequence[int]) -> Tensor:
    dims = [d for d in range(1, squares.ndim) if d not in keep]
    if dims and dims[0] == 1:
        squares = squares.sum(1, keepdim=True)
    last = 1 + max((0, *keep))
    while math.prod(squares.shape[last:]) > _FEW:
        last += 1
    if last < squares.ndim:  # places of a kernel: a product is the faster sum
        squares = squares.flatten(last)
        squares = squares @ squares.new_ones(squares.shape[-1])
        dims = [d for d in dims if d < last]
    squares = squares.double()
    return squares.sum(dims) if dims else squares
