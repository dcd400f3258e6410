"""Factors of several scales at once: where groups of scalings share the positions of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import coo_matrix, csr_matrix
from torch import Tensor

from lightning_bnn.symmetry.groups import Symmetries

__all__ = ["Composites", "axis_powers", "factor_index", "factor_tables", "tables_that_meet"]


@dataclass(frozen=True)
class Composites:
    r"""Factors :math:`e^{2 l_k}` with :math:`l_k = \sum_v p_{kv} u_v`, one entry per power.

    Attributes:
        count: the number of factors.
        variables: the number of log scales.
        factor: of every power, the factor that it belongs to.
        variable: of every power, the log scale.
        power: integers, none of which is zero.
    """

    count: int
    variables: int
    factor: Tensor
    variable: Tensor
    power: Tensor

    @property
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """The factors, log scales and powers of all entries."""
        return self.factor, self.variable, self.power

    def logs(self, u: Tensor) -> Tensor:
        """The log factors ``(..., count)`` of log scales ``(..., variables)``."""
        zero = u.new_zeros(*u.shape[:-1], self.count)
        return zero.index_add(-1, self.factor, u[..., self.variable] * self.power.to(u))

    def sums(self, mass: Tensor, sign: int = 0) -> Tensor:
        """For every log scale the mass of its factors times their powers.

        Args:
            mass: that of every factor.
            sign: 1 or -1 for the size of those powers only that have this sign.
        """
        power = self.power if sign == 0 else (sign * self.power).clamp_min(0)
        zero = mass.new_zeros(*mass.shape[:-1], self.variables)
        return zero.index_add(-1, self.variable, mass[..., self.factor] * power.to(mass))

    @property
    def degree(self) -> int:
        """The largest sum of the sizes of the powers of one factor; 1 where there is none."""
        sizes = torch.zeros(self.count, dtype=torch.int64).index_add(
            0, self.factor.cpu(), self.power.abs().cpu()
        )
        return max(1, int(sizes.max())) if self.count else 1

    def to(self, device: torch.device) -> Composites:
        """The same on another device."""
        tensors = (t.to(device) for t in (self.factor, self.variable, self.power))
        return Composites(self.count, self.variables, *tensors)


def axis_powers(sym: Symmetries, axis: int) -> csr_matrix:
    """By which power each scale acts at each position of an axis, ``(positions, scales)``."""
    starts = np.cumsum([0, *(g.units for g in sym.scalings)])
    parts = [np.zeros((3, 0), np.int64)]
    for g, place in sym.placements_by_axis("scalings").get(axis, []):
        units, repeats = place.positions.shape
        unit = np.repeat(starts[g] + np.arange(units), repeats)
        at = place.positions.cpu().numpy().reshape(-1)
        parts.append(np.stack([at, unit, np.full_like(at, place.exponent)]))
    position, unit, power = np.concatenate(parts, 1)
    size = sym.axes[axis].blocks * sym.axes[axis].size, sym.scaling_dof
    powers = coo_matrix((power, (position, unit)), size).tocsr()
    powers.eliminate_zeros()
    return powers


def factor_tables(sym: Symmetries) -> tuple[Composites, dict[int, Tensor]]:
    """All factors of several scales, and the index of the factor at every position of their axes.

    Args:
        sym: what `discover` returned.

    Returns:
        The composites, and for every axis that has any a table as `Matrix` has them: the k-th
        composite is ``2 n + 1 + k`` for n scales.
    """
    n, known = sym.scaling_dof, dict[tuple[tuple[int, ...], tuple[int, ...]], int]()
    tables = {}
    for axis in sorted(sym.shared_axes):
        powers = axis_powers(sym, axis)
        rows = np.split(powers.indices, powers.indptr[1:-1])
        values = np.split(powers.data, powers.indptr[1:-1])
        table = [
            _index(tuple(v.tolist()), tuple(p.tolist()), n, known)
            for v, p in zip(rows, values, strict=True)
        ]
        tables[axis] = torch.tensor(table, dtype=torch.long)
    entries = [(k, v, p) for (vs, ps), k in known.items() for v, p in zip(vs, ps, strict=True)]
    columns = torch.tensor(entries, dtype=torch.long).reshape(-1, 3).unbind(1)
    return Composites(len(known), n, *columns), tables


def _index(
    variables: tuple[int, ...],
    powers: tuple[int, ...],
    n: int,
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], int],
) -> int:
    if not variables:
        return n
    if powers in ((1,), (-1,)):
        return variables[0] + (n + 1 if powers[0] < 0 else 0)
    return 2 * n + 1 + known.setdefault((variables, powers), len(known))


def factor_index(sym: Symmetries, axis: int) -> Tensor:
    """Index of the factor of every position on an axis that has no composites, see `Matrix`."""
    n, start = sym.scaling_dof, 0
    table = torch.full((sym.axes[axis].blocks * sym.axes[axis].size,), n)
    starts = []
    for group in sym.scalings:
        starts.append(start)
        start += group.units
    for g, place in sym.placements_by_axis("scalings")[axis]:
        unit = starts[g] + torch.arange(sym.scalings[g].units)
        index = unit if place.exponent > 0 else unit + n + 1
        table[place.positions] = index[:, None].expand_as(place.positions)
    return table


def tables_that_meet(tables: Sequence[Tensor], one: int) -> list[Tensor]:
    """Tables of factors along one axis, those as one that have no element in common."""
    found: list[Tensor] = []
    for table in tables:
        for k, other in enumerate(found):
            if not bool(((table != one) & (other != one)).any()):
                found[k] = torch.where(table != one, table, other)
                break
        else:
            found.append(table)
    return found
