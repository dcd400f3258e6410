"""Further scales of products: one factor grows, another one or the product shrinks.

The log scales of channels obey linear equations: that of a product is the sum of those of its
factors. Where all three are free, the solutions are more than one variable for every channel can
say. Those that one variable says are held apart, and what is left of a basis is found here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_matrix, csr_matrix

from lightning_bnn.symmetry.discovery.classes import Ints
from lightning_bnn.symmetry.discovery.factors import Actions
from lightning_bnn.symmetry.integer_kernel import Row, integer_kernel
from lightning_bnn.symmetry.rules.constraints import Product

__all__ = ["FreeProducts", "SecondScales"]

MOST_EQUATIONS = 200_000


class FreeProducts(NamedTuple):
    """Products none of whose log scales is fixed, and the variables that follow from all else.

    Attributes:
        variable: of the log scale of every channel, -1 where it is fixed.
        sign: of every channel in its variable.
        products: those that relate the variables.
    """

    variable: Ints
    sign: Ints
    products: tuple[Product, ...]

    def equations(self) -> Iterator[Row]:
        """Every product says that three terms add up to zero; each is told once."""
        parts = [np.zeros((6, 0), np.int64)]
        for out, a, b, inverse, _ in self.products:
            signs = -self.sign[out], self.sign[a], (-1 if inverse else 1) * self.sign[b]
            parts.append(np.stack([*(self.variable[x] for x in (out, a, b)), *signs]))
        for row in np.unique(np.concatenate(parts, 1), axis=1).T.tolist():
            terms: Row = {}
            for v, sign in zip(row[:3], row[3:], strict=True):
                terms[v] = terms.get(v, 0) + sign
            yield terms

    def freedom_beside(self, held: Ints) -> int:
        """The number of free variables that are left if some channels are held."""
        fixed = np.unique(self.variable[held])
        equations = list(self.equations())
        if len(equations) > MOST_EQUATIONS:
            return -fixed.size
        return len(integer_kernel([*equations, *({v: 1} for v in fixed.tolist())]))


class SecondScales(NamedTuple):
    """Log scales of channels as sums of further variables.

    Attributes:
        channels: the variable of every channel before products were looked at, and its sign.
        powers: of these variables (rows) in the further ones (columns).
    """

    channels: FreeProducts
    powers: csr_matrix

    @classmethod
    def of(cls, free: FreeProducts, known: Ints) -> SecondScales | None:
        """What is free beside the variables that are known, of which every channel has at most one.

        Args:
            free: the products.
            known: the variable of every channel, -1 where it is held.
        """
        equations = list(free.equations())
        if not equations or len(equations) > MOST_EQUATIONS:
            return None
        apart = _first_of_each(free.variable, known)
        found = [row for row in integer_kernel(equations, apart) if not apart & row.keys()]
        if not found:
            return None
        terms = [(v, k, power) for k, row in enumerate(found) for v, power in row.items()]
        rows, columns, values = np.array(terms).T
        size = int(free.variable.max()) + 1, len(found)
        return cls(free, coo_matrix((values, (rows, columns)), size).tocsr())

    def kinds(self) -> Ints:
        """A number for every channel; channels of one number have one scale."""
        return np.where(
            self.channels.variable < 0,
            -1,
            2 * self.channels.variable + (self.channels.sign > 0),
        )

    def actions(self, labels: Sequence[Ints], scales: Sequence[int]) -> Actions:
        """What the further variables do.

        Args:
            labels: the channel at every position of every axis.
            scales: by which power the weights along every axis follow their channels.
        """
        parts = [np.zeros((4, 0), np.int64)]
        for axis, (nodes, scale) in enumerate(zip(labels, scales, strict=True)):
            at = np.flatnonzero(self.channels.variable[nodes] >= 0) if scale else nodes[:0]
            terms = self.powers[self.channels.variable[nodes[at]]].tocoo()
            position = at[terms.row]
            powers = scale * self.channels.sign[nodes[position]] * terms.data
            parts.append(np.stack([terms.col, position, np.full_like(position, axis), powers]))
        return Actions(*np.concatenate(parts, 1))


def _first_of_each(variable: Ints, known: Ints) -> set[int]:
    """Of all that became one known variable, the first that there was before."""
    at = np.flatnonzero(known >= 0)
    _, first = np.unique(known[at], return_index=True)
    return set(variable[at[first]].tolist())
