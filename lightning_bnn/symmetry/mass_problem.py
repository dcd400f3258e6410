r"""The mass of a network as a convex function of its log scales.

Aggregated over kernel positions, the squared weights form one matrix per tensor, and

.. math:: c + \sum_v (P_v e^{2 u_v} + Q_v e^{-2 u_v}) + \sum_e M_e e^{2 (a_e u_{r_e} + b_e u_{c_e})}

with exponents +1, 0, -1. What only one scale reaches is summed into P and Q; the rest stays as
small dense matrices, so that values, gradients and products with the Hessian are matrix-vector
products, batched over members. Where products of channels have further scales, a factor may be one
of several scales at once: a row of `Composites`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from lightning_bnn.params import Params, is_stacked
from lightning_bnn.symmetry.axis_actions import axes_by_tensor, broadcastable
from lightning_bnn.symmetry.composites import (
    Composites,
    factor_index,
    factor_tables,
    tables_that_meet,
)
from lightning_bnn.symmetry.groups import Axis, Symmetries
from lightning_bnn.symmetry.square_sums import matrix_squares, square_sums
from lightning_bnn.symmetry.validation import check_finite, check_params

__all__ = ["Flow", "MassProblem", "Matrix", "mass", "mass_problem"]


@dataclass(frozen=True)
class Matrix:
    """Squared weights ``(members, blocks, rows, columns)`` and where their two factors come from.

    An index ``v`` takes the factor :math:`e^{2 u_v}`, ``n`` the factor one, ``n + 1 + v`` the
    factor :math:`e^{-2 u_v}`, and ``2 n + 1 + k`` the k-th composite.
    """

    squares: Tensor
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class MassProblem:
    """The function, for all members of a stack at once, and the groups its variables belong to."""

    constant: Tensor
    plus: Tensor
    minus: Tensor
    matrices: tuple[Matrix, ...]
    sizes: tuple[int, ...]
    composites: Composites
    others: Tensor

    @property
    def variables(self) -> int:
        """The number of scales that the mass depends on."""
        return self.plus.shape[-1]

    def factors(
        self, u: Float64[Tensor, "members variables"]
    ) -> Float64[Tensor, "members factors"]:
        """The table that matrices index: :math:`e^{2u}`, one, :math:`e^{-2u}`, composites."""
        e = torch.exp(2 * u)
        parts = [e, e.new_ones(*e.shape[:-1], 1), 1 / e]
        if self.composites.count:
            parts.append(torch.exp(2 * self.composites.logs(u)))
        return torch.cat(parts, -1)

    def logs(self, factors: Tensor) -> Tensor:
        """Log scales of a table of factors."""
        return factors[..., : self.variables].log() / 2

    def value(self, u: Float64[Tensor, "members variables"]) -> Float64[Tensor, " members"]:
        """Mass at log scales ``u`` of shape ``(members, variables)``."""
        f = self.factors(u)
        n = self.variables
        e, inverse, others = f[..., :n], f[..., n + 1 : 2 * n + 1], f[..., 2 * n + 1 :]
        total = self.constant + (self.plus * e + self.minus * inverse).sum(-1)
        total = total + (self.others * others).sum(-1)
        for m in self.matrices:
            total = total + (_times(m, f) * f[..., m.rows]).sum((-1, -2))
        return total

    def flow(self, u: Tensor) -> Flow:
        """Mass that enters and leaves every unit, and what products with the Hessian need."""
        f = self.factors(u)
        ends = []
        single = [self.plus, torch.zeros_like(f[..., :1]), self.minus, self.others]
        total = torch.cat(single, -1) * f
        for m in self.matrices:
            r, c = f[..., m.rows], f[..., m.columns]
            row_mass, column_mass = r * _times(m, f), c * _times_transposed(m, f)
            total = total.index_add(-1, m.rows.reshape(-1), row_mass.flatten(-2))
            total = total.index_add(-1, m.columns.reshape(-1), column_mass.flatten(-2))
            ends.append((r, c, row_mass, column_mass))
        return Flow(self, self.entering(total, 1), self.entering(total, -1), ends, total)

    def entering(self, mass: Tensor, sign: Literal[1, -1]) -> Tensor:
        """For every unit, the mass of the factors that grow with its scale, or fall with sign -1.

        Args:
            mass: that of every factor of the table.
            sign: 1 for what enters the units, -1 for what leaves them.
        """
        n = self.variables
        own = mass[..., :n] if sign == 1 else mass[..., n + 1 : 2 * n + 1]
        if not self.composites.count:
            return own
        return own + self.composites.sums(mass[..., 2 * n + 1 :], sign)

    def log_factors(self, t: Tensor) -> Tensor:
        """Half the logs of the table of factors at log scales t."""
        parts = [t, torch.zeros_like(t[..., :1]), -t]
        if self.composites.count:
            parts.append(self.composites.logs(t))
        return torch.cat(parts, -1)

    def gathered(self, mass: Tensor) -> Tensor:
        """The transpose of `log_factors`: the derivative by every log scale."""
        n = self.variables
        own = mass[..., :n] - mass[..., n + 1 : 2 * n + 1]
        if not self.composites.count:
            return own
        return own + self.composites.sums(mass[..., 2 * n + 1 :])

    @property
    def degree(self) -> int:
        """How many log scales, counted with their powers, one term has at most."""
        return 2 * self.composites.degree


@dataclass(frozen=True)
class Flow:
    """Mass flowing through the units at one point."""

    problem: MassProblem
    inflow: Tensor
    outflow: Tensor
    ends: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
    mass: Tensor


def _times(m: Matrix, factors: Tensor) -> Tensor:
    return torch.matmul(m.squares, factors[..., m.columns][..., None])[..., 0]


def _times_transposed(m: Matrix, factors: Tensor) -> Tensor:
    return torch.matmul(m.squares.mT, factors[..., m.rows][..., None])[..., 0]


# ------------------------------------------------------------ from a network
def mass(params: Params, sym: Symmetries) -> Float64[Tensor, "*members"]:
    r"""Sum of squares of all weights and gains, biases excluded: one number per member.

    .. math:: M(\theta) = \sum_{w \in \text{weights}} w^2

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import discover, mass
    >>> net = mlp(2, [3], 1)
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


def mass_problem(params: Params, sym: Symmetries) -> MassProblem:
    """Aggregate the squared weights of a network or a stack, which must be finite."""
    builder = _Builder(params, sym)
    for name in sym.weights:
        if name in params:
            builder.add(name)
    parts = (builder.constant, builder.plus, builder.minus)
    others = builder.others
    sums = torch.stack([t.sum() for t in (*parts, others, *(m.squares for m in builder.matrices))])
    if not bool(sums.isfinite().all()):
        check_finite(params, sym)
        _refuse_overflow(params, sym)
    sizes = tuple(g.units for g in sym.scalings)
    return MassProblem(*parts, tuple(builder.matrices), sizes, builder.composites, others)


def _refuse_overflow(params: Params, sym: Symmetries) -> None:
    """The squares are not finite although the weights are."""
    sizes = {n: float(params[n].detach().abs().amax()) for n in sym.weights if params[n].numel()}
    name = max(sizes, key=sizes.__getitem__)
    raise ValueError(
        f"`params`: the squares of {name!r}, whose largest weight is {sizes[name]:.3g}, overflow "
        f"in {str(params[name].dtype).removeprefix('torch.')}."
    )


class _Builder:
    """Sums squared weights into constants, single factors and matrices."""

    def __init__(self, params: Params, sym: Symmetries) -> None:
        self.sym, self.params = sym, params
        self.offset = 1 if is_stacked(params, sym.shapes) else 0
        first = next(iter(params.values()))
        members = first.shape[0] if self.offset else 1
        self.n = sym.scaling_dof
        self.constant = torch.zeros(members, dtype=torch.float64, device=first.device)
        self.plus, self.minus = (self.constant.new_zeros(members, self.n) for _ in range(2))
        composites, self.tables = factor_tables(sym)
        self.composites = composites.to(first.device)
        self.others = self.constant.new_zeros(members, composites.count)
        self.matrices: list[Matrix] = []
        self.axes = axes_by_tensor(sym, "scalings")

    def add(self, name: str) -> None:
        """Add the squares of one tensor."""
        w = self.params[name]
        w = w if self.offset else w[None]
        axes = self.axes.get(name, [])
        dims = {self.sym.axes[a].dim for a in axes}
        if not axes:
            self.constant += square_sums(w, ())
        elif len(axes) > 1 and not _is_matrix([self.sym.axes[a] for a in axes]):
            self._element_by_element(w, axes)
        elif None in dims:
            self._single(w.reshape(len(w), -1).double().square(), axes)
        elif len(dims) == 1:
            self._one_dimension(w, axes)
        else:
            self._two_dimensions(w, axes)

    def _one_dimension(self, w: Tensor, axes: Sequence[int]) -> None:
        axis = self.sym.axes[axes[0]]
        assert axis.dim is not None
        if axis.blocks > 1:
            w = w.unflatten(1, (axis.blocks, -1))
            squares = square_sums(w, (1, axis.dim + 2)).flatten(1)
        else:
            squares = square_sums(w, (axis.dim + 1,))
        self._single(squares, axes)

    def _single(self, squares: Tensor, axes: Sequence[int]) -> None:
        """Squares along one axis; a gain has two factors there: a row of one-by-one matrices.

        So have the elements of a vector that are a matrix; parts of it do not meet each other.
        """
        tables = tables_that_meet([self._table(a) for a in axes], self.n)
        if len(tables) > 2:
            self._refuse(axes)
        if len(tables) == 2:
            rows, columns = (table[:, None] for table in tables)
            self.matrices.append(Matrix(squares[..., None, None], rows, columns))
            return
        n = self.n
        total = squares.new_zeros(squares.shape[0], 2 * n + 1 + self.composites.count)
        total.index_add_(1, tables[0], squares)
        self.plus += total[:, :n]
        self.constant += total[:, n]
        self.minus += total[:, n + 1 : 2 * n + 1]
        self.others += total[:, 2 * n + 1 :]

    def _element_by_element(self, w: Tensor, axes: Sequence[int]) -> None:
        """Any two axes: every weight is a matrix of one by one."""
        if len(axes) > 2:
            self._refuse(axes)
        rows, columns = (
            broadcastable(self._table(a), self.sym.axes[a], w[0], 0).expand(w.shape[1:])
            for a in axes
        )
        squares = w.reshape(len(w), -1).double().square()
        rows, columns = rows.reshape(-1, 1), columns.reshape(-1, 1)
        self.matrices.append(Matrix(squares[..., None, None], rows, columns))

    def _refuse(self, axes: Sequence[int]) -> None:
        raise ValueError(
            f"`sym`: {self.sym.axes[axes[0]].tensor!r} is scaled along {len(axes)} dimensions, "
            "for which no mass problem is known."
        )

    def _two_dimensions(self, w: Tensor, axes: Sequence[int]) -> None:
        first, second = (self.sym.axes[a] for a in axes[:2])
        if first.blocks > 1:
            axes, (first, second) = axes[::-1], (second, first)
        rows, columns = self._table(axes[0]), self._table(axes[1])
        rows, columns = (t.reshape(second.blocks, -1) for t in (rows, columns))
        self.matrices.append(Matrix(matrix_squares(w, first, second), rows, columns))

    def _table(self, axis: int) -> Tensor:
        table = self.tables.get(axis)
        table = factor_index(self.sym, axis) if table is None else table
        return table.to(self.constant.device)


def _is_matrix(axes: Sequence[Axis]) -> bool:
    """Two axes of a matrix, of which the second may see the rows in blocks, or all of a vector."""
    dims = {a.dim for a in axes}
    if len(dims) == 1:
        return True
    first, second = sorted(axes, key=lambda a: a.blocks)[:2]
    return (
        len(axes) == 2
        and None not in dims
        and first.blocks == 1
        and (second.blocks == 1 or first.dim == 0)
    )
