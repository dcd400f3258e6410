"""Constants that may be added to activations, as integer combinations of unknowns.

Every element of an activation carries a number in its own shape, as it carries its channel: zero
where nothing may be added to it, else that of an unknown or of a combination of unknowns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_bnn.symmetry.rules.labels import core, moving_dims, narrow_except

__all__ = ["NOTHING", "Combinations", "Expressions", "Ints", "ragged"]

Ints = NDArray[np.integer]
NOTHING = 0
_MOST_TERMS = 4_000_000


class Combinations(NamedTuple):
    """Rows of integer combinations: of every term the row, the unknown and the coefficient."""

    rows: Ints
    unknowns: Ints
    coefficients: Ints

    def simplified(self) -> Combinations:
        """Terms of one unknown joined, zeros left out, by row and then by unknown."""
        if not self.rows.size:
            return self
        order = np.lexsort((self.unknowns, self.rows))
        rows, unknowns, coefficients = (t[order] for t in self)
        new = np.r_[True, (rows[1:] != rows[:-1]) | (unknowns[1:] != unknowns[:-1])]
        first = np.flatnonzero(new)
        total = np.add.reduceat(coefficients, first)
        kept = first[total != 0]
        return Combinations(rows[kept], unknowns[kept], total[total != 0])


def ragged(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Positions of many runs one behind the other, and which run each belongs to."""
    which = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    return np.arange(len(which)) - before[which] + starts[which], which


class _Growing:
    """Numbers to whose end others are added, again and again."""

    def __init__(self, *first: int) -> None:
        self._room, self._size = np.zeros(1024, np.int64), len(first)
        self._room[: self._size] = first

    def extend(self, values: Ints) -> None:
        """Add some at the end."""
        size = self._size + len(values)
        if size > len(self._room):
            room = np.zeros(2 * size, np.int64)
            room[: self._size] = self.all
            self._room = room
        self._room[self._size : size] = values
        self._size = size

    @property
    def all(self) -> Ints:
        """The numbers that are there so far."""
        return self._room[: self._size]


class Expressions:
    """Unknowns, their combinations, and those that must be zero.

    Attributes:
        count: how many numbers there are; zero stands for nothing.
        stops: numbers that would be seen.
    """

    def __init__(self) -> None:
        self.count = 1
        self.stops: list[Ints] = []
        self._zero, self._start, self._length = _Growing(1), _Growing(0), _Growing(0)
        self._unknowns, self._coefficients = _Growing(), _Growing()

    # ------------------------------------------------------------ numbers
    def fresh(self, *shape: int) -> Tensor:
        """New unknowns, in the given shape."""
        n = int(np.prod(shape, dtype=np.int64))
        numbers = np.arange(self.count, self.count + n)
        self._append(np.ones(n, np.int64), numbers, np.ones(n, np.int64))
        return torch.from_numpy(numbers).reshape(shape)

    def _append(self, lengths: Ints, unknowns: Ints, coefficients: Ints) -> None:
        self._start.extend(len(self._unknowns.all) + np.cumsum(lengths) - lengths)
        self._length.extend(lengths)
        self._unknowns.extend(unknowns)
        self._coefficients.extend(coefficients)
        self._zero.extend(np.zeros_like(lengths))
        self.count += lengths.size

    def stop(self, numbers: Tensor | None) -> None:
        """Nothing may be added there: it would be seen."""
        if numbers is None:
            return
        found = np.unique(core(numbers).numpy())
        found = found[self._zero.all[found] == 0]
        self._zero.all[found] = 1
        self.stops.append(found)

    def live(self, numbers: Tensor) -> Tensor | None:
        """The numbers without those that are known to be zero; None if nothing is left."""
        small = core(numbers)
        zero = torch.from_numpy(self._zero.all)[small] != 0
        if bool(zero.all()):
            return None
        return (
            small.masked_fill(zero, NOTHING).expand(numbers.shape) if bool(zero.any()) else numbers
        )

    def is_unknown(self, numbers: Ints) -> NDArray[np.bool_]:
        """Which numbers are unknowns, and no combinations of them."""
        one = self._length.all[numbers] == 1
        start = np.where(one, self._start.all[numbers], 0)
        return one & (self._unknowns.all[start] == numbers)

    # ------------------------------------------------------------ combinations
    def every_term(self, numbers: Ints) -> Combinations:
        """What numbers stand for; the row is the place of a number."""
        at, which = ragged(self._start.all[numbers], self._length.all[numbers])
        return Combinations(which, self._unknowns.all[at], self._coefficients.all[at])

    def terms(self, numbers: Ints) -> Combinations:
        """The same without unknowns that are known to be zero."""
        found = self.every_term(numbers)
        kept = self._zero.all[found.unknowns] == 0
        return Combinations(*(t[kept] for t in found))

    def combine(self, parts: list[tuple[Tensor, int]]) -> Tensor | None:
        """One or two numbers times integers, summed element by element; None if nothing is left."""
        tensors = torch.broadcast_tensors(*(numbers for numbers, _ in parts))
        moving = moving_dims(*tensors)
        flat = np.stack([narrow_except(t, moving).numpy().ravel() for t in tensors])
        shape = narrow_except(tensors[0], moving).shape
        keys = flat[0] if len(flat) == 1 else flat[0] * self.count + flat[1]
        _, first, back = np.unique(keys, return_index=True, return_inverse=True)
        columns = flat[:, first]
        terms = [self.terms(row) for row in columns]
        joined = Combinations(
            np.concatenate([t.rows for t in terms]),
            np.concatenate([t.unknowns for t in terms]),
            np.concatenate(
                [t.coefficients * times for t, (_, times) in zip(terms, parts, strict=True)]
            ),
        ).simplified()
        named = self._named(joined, columns.shape[1])
        result = torch.from_numpy(named[back.reshape(-1)]).reshape(shape)
        return self.live(result.expand(tensors[0].shape))

    def _named(self, terms: Combinations, rows: int) -> Ints:
        """A number for every row: nothing, an unknown, or a new combination."""
        lengths = np.bincount(terms.rows, minlength=rows)
        starts = np.cumsum(lengths) - lengths
        named = np.zeros(rows, np.int64)
        one = np.flatnonzero(lengths == 1)
        one = one[terms.coefficients[starts[one]] == 1]
        named[one] = terms.unknowns[starts[one]]
        new = np.setdiff1d(np.flatnonzero(lengths), one)
        if new.size:
            at, _ = ragged(starts[new], lengths[new])
            if len(self._unknowns.all) + at.size > _MOST_TERMS:  # held fixed rather than followed
                self.stop(torch.from_numpy(np.unique(terms.unknowns[at])))
                return named * ~np.isin(np.arange(rows), new)
            named[new] = np.arange(self.count, self.count + new.size)
            self._append(lengths[new], terms.unknowns[at], terms.coefficients[at])
        return named
