r"""Which terms of a mass with composite factors can be driven to zero, by a linear program.

A term with exponent :math:`c \cdot u` bounds a recession direction d: :math:`c \cdot d \le 0`. The
terms that some direction lets vanish are found at once, for directions add up: the sum of slacks,
of which each counts up to one, is greatest where all are one that can be. A matrix without zeros
has as many terms as weights; its rows share one bound of theirs, and its columns another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, csr_matrix, hstack, identity, vstack
from torch import Tensor

from lightning_bnn.symmetry.integer_kernel import integer_kernel
from lightning_bnn.symmetry.mass_problem import MassProblem

__all__ = ["Flat", "without_receding_terms"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_WHOLE = 60  # directions of linear programs are fractions with small denominators


class Flat(NamedTuple):
    """Log scales that can be moved without a change of the mass, as for problems of two scales.

    Attributes:
        bases: for every member, directions ``(scales, directions)`` that move no term.
        fall: a direction along which the terms that can be driven to zero fall, and no other moves.
    """

    bases: tuple[Tensor, ...]
    fall: Tensor

    def pinned(self) -> Tensor:
        """No scale: steps are least squares, which leave these directions alone."""
        return torch.zeros_like(self.fall, dtype=torch.bool)

    def centred(self, u: Tensor) -> Tensor:
        """The smallest log scales that have the same mass."""
        rows = []
        for row, basis in zip(u, self.bases, strict=True):
            if basis.shape[1]:
                row = row - basis @ torch.linalg.lstsq(basis, row[:, None]).solution[:, 0]
            rows.append(row)
        return torch.stack(rows)


def without_receding_terms(problem: MassProblem) -> tuple[MassProblem, Tensor, Flat]:
    """As `without_vanishing_terms`, for problems whose factors have several scales."""
    powers = _powers(problem)
    found: dict[bytes, tuple[_Masks, Floats, Floats]] = {}
    members = []
    for k in range(len(problem.plus)):
        member = _support(problem, k)
        key = b"".join(np.packbits(part).tobytes() for part in member)
        if key not in found:
            found[key] = _solve(_Terms(problem, powers, member), powers)
        members.append(found[key])
    kept = _only(problem, [masks for masks, _, _ in members])
    zero = torch.zeros_like(problem.plus)
    bases = tuple(torch.from_numpy(basis).to(zero) for _, _, basis in members)
    fall = torch.stack([torch.from_numpy(d).to(zero) for _, d, _ in members])
    return kept, kept.value(zero) == problem.value(zero), Flat(bases, fall)


_Masks = list[NDArray[np.bool_]]
"""Which singles, and which squares of every matrix, are there."""


def _support(problem: MassProblem, member: int) -> _Masks:
    n = problem.variables
    ground = np.zeros(1, np.bool_)
    singles = [(t[member] > 0).cpu().numpy() for t in (problem.plus, problem.minus, problem.others)]
    assert singles[0].size == n
    whole = np.concatenate([singles[0], ground, *singles[1:]])
    return [whole, *((m.squares[member] > 0).cpu().numpy() for m in problem.matrices)]


def _powers(problem: MassProblem) -> csr_matrix:
    """The powers of the log scales in every factor of the table."""
    n, composites = problem.variables, problem.composites
    own = identity(n, dtype=np.int64, format="csr")
    entries = [t.cpu().numpy() for t in (composites.power, composites.factor, composites.variable)]
    several = coo_matrix((entries[0], (entries[1], entries[2])), (composites.count, n))
    return vstack([own, csr_matrix((1, n), dtype=np.int64), -own, several]).tocsr()


class _Terms:
    """The terms of one member: sums of powers, and those of matrices without zeros by their sides.

    ``whole`` lists, as (matrix, block, rows, columns), the parts of matrices that are not zero
    anywhere; ``pairs`` the other terms, as pairs of factors.
    """

    def __init__(self, problem: MassProblem, powers: csr_matrix, support: _Masks) -> None:
        ground = problem.variables
        single = np.flatnonzero(support[0])
        pairs = [np.stack([single, np.full_like(single, ground)])]
        self.problem, self.support, self.powers = problem, support, powers
        self.whole: list[tuple[int, int, Ints, Ints]] = []
        for k, m in enumerate(problem.matrices):
            mask = support[k + 1].copy()
            for block, rows, columns in _full_parts(mask):
                self.whole.append((k, block, rows, columns))
                mask[block] = False
            b, r, c = np.nonzero(mask)
            pairs.append(np.stack([m.rows.cpu().numpy()[b, r], m.columns.cpu().numpy()[b, c]]))
        self.pairs = np.unique(np.sort(np.concatenate(pairs, 1), 0), axis=1)

    def sides(self) -> Iterator[tuple[Ints, Ints]]:
        """The factors of the rows and of the columns of every part without zeros."""
        for k, block, rows, columns in self.whole:
            m = self.problem.matrices[k]
            yield m.rows[block].cpu().numpy()[rows], m.columns[block].cpu().numpy()[columns]

    def bounds(self) -> tuple[csr_matrix, list[tuple[Ints, Ints, int]]]:
        """Sums of powers none of which may grow: pairs, then sides less their bound, and both.

        The columns are the log scales and two bounds for every part; returned with, for each part,
        its factors and the first of its rows.
        """
        parts, sides = 2 * len(self.whole), []
        head = self.powers[self.pairs[0]] + self.powers[self.pairs[1]]
        blocks = [hstack([head, csr_matrix((head.shape[0], parts), dtype=np.int64)])]
        start = head.shape[0]
        for j, (rows, columns) in enumerate(self.sides()):
            left, right = np.unique(rows), np.unique(columns)
            bound = np.repeat([2 * j, 2 * j + 1], [left.size, right.size])
            less = coo_matrix(
                (-np.ones(bound.size, np.int64), (np.arange(bound.size), bound)),
                (bound.size, parts),
            )
            blocks.append(hstack([self.powers[np.concatenate([left, right])], less]))
            both = coo_matrix(([1, 1], ([0, 0], [2 * j, 2 * j + 1])), (1, parts))
            blocks.append(hstack([csr_matrix((1, self.powers.shape[1]), dtype=np.int64), both]))
            sides.append((left, right, start))
            start += bound.size + 1
        return vstack(blocks).tocsr(), sides


def _full_parts(mask: NDArray[np.bool_]) -> Iterator[tuple[int, Ints, Ints]]:
    """Blocks that have no zero but in whole rows and columns, with the others of these."""
    if min(mask.shape[1:]) < 2:
        return
    for block, part in enumerate(mask):
        rows, columns = np.flatnonzero(part.any(1)), np.flatnonzero(part.any(0))
        if min(rows.size, columns.size) > 1 and int(part.sum()) == rows.size * columns.size:
            yield block, rows, columns


def _solve(terms: _Terms, powers: csr_matrix) -> tuple[_Masks, Floats, Floats]:
    """What stays, a direction in which all else falls, and directions in which nothing moves."""
    bounds, sides = terms.bounds()
    n, count = powers.shape[1], bounds.shape[0]
    free = bounds.shape[1]
    found = linprog(
        np.concatenate([np.zeros(free), -np.ones(count)]),
        A_ub=hstack([bounds, identity(count)]).tocsr(),
        b_ub=np.zeros(count),
        bounds=[(None, None)] * free + [(0, 1)] * count,
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"The linear program of the vanishing terms failed: {found.message}")
    falls = found.x[free:] > 0.5
    masks = _kept(terms, sides, falls)
    direction = _whole_numbers(found.x[:n]) if falls.any() else np.zeros(n)
    kept = bounds[~falls]
    rows = np.split(kept.indices, kept.indptr[1:-1])
    values = np.split(kept.data, kept.indptr[1:-1])
    equations = [
        dict(zip(v.tolist(), p.tolist(), strict=True)) for v, p in zip(rows, values, strict=True)
    ]
    solutions = [
        {v: c for v, c in row.items() if v < n} for row in integer_kernel(equations, range(n, free))
    ]
    solutions = [row for row in solutions if row]
    basis = np.zeros((n, len(solutions)))
    for j, row in enumerate(solutions):
        basis[list(row), j] = list(row.values())
    return masks, direction, basis


def _kept(terms: _Terms, sides: list[tuple[Ints, Ints, int]], falls: NDArray[np.bool_]) -> _Masks:
    """Which singles and squares do not fall."""
    size = terms.powers.shape[0]
    pairs = terms.pairs[:, falls[: terms.pairs.shape[1]]]
    falling = np.unique(pairs[0] * size + pairs[1])
    ground = terms.problem.variables
    at = np.arange(size)
    first = np.minimum(at, ground) * size + np.maximum(at, ground)
    masks = [terms.support[0] & ~np.isin(first, falling)]
    for k, m in enumerate(terms.problem.matrices):
        ends = m.rows.cpu().numpy()[:, :, None], m.columns.cpu().numpy()[:, None, :]
        code = np.minimum(*ends) * size + np.maximum(*ends) if falling.size else None
        here = terms.support[k + 1]
        masks.append(here & ~np.isin(code, falling) if code is not None else here.copy())
    for (k, block, at_rows, at_columns), (left, right, start), (rows, columns) in zip(
        terms.whole, sides, terms.sides(), strict=True
    ):
        middle = start + left.size
        row = np.isin(rows, left[~falls[start:middle]])
        column = np.isin(columns, right[~falls[middle : middle + right.size]])
        stays = row[:, None] & column & ~falls[middle + right.size]
        masks[k + 1][block] = terms.support[k + 1][block]
        masks[k + 1][block][np.ix_(at_rows, at_columns)] = stays
    return masks


def _whole_numbers(direction: Floats) -> Floats:
    """The multiple of a vector that is whole, so that no other term moves."""
    for k in range(1, _WHOLE + 1):
        multiple = k * direction
        if np.abs(multiple - multiple.round()).max() < 1e-6:
            return multiple.round()
    return direction


def _only(problem: MassProblem, masks: list[_Masks]) -> MassProblem:
    n = problem.variables

    def stacked(k: int) -> Tensor:
        return torch.from_numpy(np.stack([m[k] for m in masks])).to(problem.plus.device)

    single = stacked(0)
    matrices = tuple(
        replace(m, squares=m.squares * stacked(k + 1)) for k, m in enumerate(problem.matrices)
    )
    return replace(
        problem,
        plus=problem.plus * single[:, :n],
        minus=problem.minus * single[:, n + 1 : 2 * n + 1],
        others=problem.others * single[:, 2 * n + 1 :],
        matrices=matrices,
    )
