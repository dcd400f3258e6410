"""Products with the Hessian of the mass: those with a weighted graph Laplacian."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float64
from torch import Tensor

from lightning_bnn.symmetry.mass_problem import Flow, Matrix

__all__ = ["Laplacian"]


class Laplacian:
    """A quarter of the Hessian of the mass at one point, to be multiplied with vectors.

    Where the matrices begin and end is read and written for all of them at once: what lies between
    their products costs as much as the products do, matrix by matrix.

    Args:
        flow: the mass that flows through the units at that point.
    """

    def __init__(self, flow: Flow) -> None:
        self.single = flow.inflow + flow.outflow
        self.problem, self.mass = flow.problem, flow.mass
        self.matrices = flow.problem.matrices
        ends = [end.reshape(-1) for m in self.matrices for end in (m.rows, m.columns)]
        factors = [f.flatten(1) for r, c, _, _ in flow.ends for f in (r, c)]
        self.sizes = [len(end) for end in ends]
        self.ends = torch.cat(ends) if ends else None
        self.factors = torch.cat(factors, 1) if factors else None

    def __call__(
        self, t: Float64[Tensor, "members variables"]
    ) -> Float64[Tensor, "members variables"]:
        """The product with one vector for each member."""
        signed = self.problem.log_factors(t)
        total = self.mass * signed
        if self.ends is not None and self.factors is not None:
            at_ends = signed.index_select(1, self.ends).mul_(self.factors)
            sums = torch.cat(list(self._products(at_ends)), 1).mul_(self.factors)
            total.index_add_(1, self.ends, sums)
        return self.problem.gathered(total)

    def _products(self, at_ends: Tensor) -> Iterator[Tensor]:
        """What arrives at the rows and at the columns of every matrix from its other end."""
        parts = iter(at_ends.split(self.sizes, 1))
        for matrix, rows, columns in zip(self.matrices, parts, parts, strict=True):
            yield from _both_ways(matrix, rows, columns)


def _both_ways(matrix: Matrix, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    squares = matrix.squares
    if squares.shape[2:] == (1, 1):
        flat = squares.flatten(1)
        return flat * columns, flat * rows
    from_rows, from_columns = (
        end.unflatten(1, (squares.shape[1], -1))[..., None] for end in (rows, columns)
    )
    return (squares @ from_columns).flatten(1), (squares.mT @ from_rows).flatten(1)
