"""The value type of the engine: a tensor whose entries are products of factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
ZERO = -1
"""The label of padding: zero has any unit, and moves with anything."""
NONE = -2
"""The label of places for which nothing was chosen: they may carry anything that others carry."""


@dataclass(frozen=True, eq=False)
class Factor:
    """Labels that broadcast to a shape, and the powers with which their units act.

    Under an element of the group an entry is multiplied by ``scale[label] ** power * sign[label] **
    parity`` for every factor, and moves to where all its labels move.

    Attributes:
        labels: integers of as many dimensions as the value, of size 1 where they do not change.
        power: of scales; 0 if the factor only says how entries move.
        parity: of signs; 0 or 1.
        axis: the parameter, and which axis of it this is, unless anything was added to it.
        is_noise: whether random numbers stand there, which move with whatever they meet.
        places: where labels stand several times because dimensions without labels, such as those of
            an image, were flattened with theirs: at which place of these an entry stands.
    """

    labels: Tensor
    power: Fraction = Fraction(1)
    parity: int = 1
    axis: tuple[str, int] | None = None
    is_noise: bool = False
    places: Tensor | None = None

    @property
    def dims(self) -> frozenset[int]:
        """The dimensions along which the labels vary."""
        return frozenset(d for d, n in enumerate(self.labels.shape) if n > 1)

    @property
    def only_moves(self) -> bool:
        """True for a factor that describes how entries move, but has no unit."""
        return self.power == 0 and self.parity == 0

    @property
    def is_free(self) -> bool:
        """True for an axis of a parameter."""
        return self.axis is not None

    def is_free_beside(self, others: Iterable[Factor]) -> bool:
        """Return whether another axis of the same parameter can absorb its units."""
        return any(
            self.axis and x.axis and x.axis[0] == self.axis[0] and x.axis != self.axis
            for x in others
        )

    def without_units(self) -> Factor:
        """Return the factor without its units."""
        return replace(self, power=Fraction(0), parity=0)

    def on(self, move: Callable[[Tensor], Tensor]) -> Factor:
        """Apply a move to the labels."""
        labels, places = move(self.labels), None
        if self.places is not None:
            places = move(self.places)
            for d, n in enumerate(labels.shape):
                places = places.narrow(d, 0, 1) if n == 1 and places.shape[d] > 1 else places
        return self.with_labels(labels, places)

    def with_labels(self, labels: Tensor, places: Tensor | None = None) -> Factor:
        """Return the factor with other labels, some of which may occur at several positions."""
        has_several = places is not None and places.numel() > 1
        return replace(self, labels=labels, places=places if has_several else None)

    def to_power(self, power: Fraction, parity: int) -> Factor:
        """Return the factor after a function of the given power and parity."""
        return replace(self, power=self.power * power, parity=self.parity * parity)


@dataclass(frozen=True, eq=False)
class Choice:
    """Values that stand for an index among labels, or for a count of one.

    Attributes:
        numbers: one choice of all; as many as there are labels where nothing is chosen.
        among: the labels.
        is_index: whether a number is the place of a label.
    """

    numbers: Tensor
    among: Tensor
    is_index: bool = True


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor: its shape, its factors, and its values if they are constant.

    ``varies`` says for every dimension whether numbers may differ along it: what was broadcast
    is the same everywhere, although its dimension is long.
    """

    shape: tuple[int, ...]
    factors: tuple[Factor, ...] = ()
    constant: Tensor | None = None
    varies: tuple[bool, ...] = ()
    choice: Choice | None = None

    @staticmethod
    def of(
        shape: Sequence[int],
        factors: Sequence[Factor] = (),
        constant: Tensor | None = None,
        varies: Sequence[bool] | None = None,
        choice: Choice | None = None,
    ) -> Value:
        """Return a value that varies along every dimension, unless known to be constant."""
        shape = tuple(shape)
        if varies is None and constant is not None and constant.numel():
            numbers = once(constant)
            varies = [
                n > 1 and not bool((numbers == numbers.narrow(d, 0, 1)).all())
                for d, n in enumerate(numbers.shape)
            ]
        elif varies is None:
            varies = [n > 1 for n in shape]
        return Value(shape, tuple(factors), constant, tuple(varies), choice)

    @staticmethod
    def constant_of(numbers: Tensor) -> Value:
        """Return a value that is the same for every network."""
        return Value.of(numbers.shape, constant=numbers)

    @property
    def is_zero(self) -> bool:
        """True for a value that is known to vanish."""
        if self.constant is None or not self.constant.numel():
            return False
        return not bool(once(self.constant).any())

    def moved(
        self, shape: Sequence[int], move: Callable[[Tensor], Tensor], varies: Sequence[bool]
    ) -> Value:
        """Apply a move to the labels. Constant values are dropped."""
        factors = tuple(f.on(lambda labels: compress(move(labels))) for f in self.factors)
        return Value(tuple(shape), factors, None, tuple(varies))


def with_dims(value: Value, ndim: int) -> Value:
    """Add leading dimensions of size 1, as broadcasting does."""
    k = ndim - len(value.shape)
    if k <= 0:
        return value
    constant = None if value.constant is None else value.constant[(None,) * k]
    factors = tuple(f.on(lambda labels: labels[(None,) * k]) for f in value.factors)
    return Value((1,) * k + value.shape, factors, constant, (False,) * k + value.varies)


def once(numbers: Tensor) -> Tensor:
    """Reduce every expanded dimension to size 1."""
    for d, stride in enumerate(numbers.stride()):
        if stride == 0 and numbers.shape[d] > 1:
            numbers = numbers.narrow(d, 0, 1)
    return numbers


def compress(labels: Tensor) -> Tensor:
    """Reduce every dimension along which labels are constant to size 1."""
    for d, n in enumerate(labels.shape):
        if n > 1:
            first = labels.narrow(d, 0, 1)
            is_one = labels.stride(d) == 0 or (
                torch.equal(labels.narrow(d, n - 1, 1), first) and bool((labels == first).all())
            )
            labels = first if is_one else labels
    return labels


def chosen(labels: Tensor) -> frozenset[int]:
    """Return the dimensions of a choice: those along which only some entries are chosen."""
    none = labels == NONE
    if not bool(none.any()):
        return frozenset()
    return frozenset(d for d in range(none.ndim) if not bool((none == none.narrow(d, 0, 1)).all()))


def choice_of(labels: Tensor) -> bytes:
    """Return a key of the choice in some labels: the positions where something is chosen."""
    over = chosen(labels)
    none = labels == NONE
    for d in frozenset(range(labels.ndim)) - over:
        none = none.narrow(d, 0, 1)
    return repr(tuple(none.shape)).encode() + none.numpy().tobytes() if over else b""


def label_rows(*labels: Tensor) -> Ints:
    """Return the distinct rows of labels at equal positions, without padding."""
    rows = distinct_rows([t.numpy().ravel() for t in torch.broadcast_tensors(*labels)])
    return rows[(rows >= 0).all(1)]


def distinct(numbers: Ints) -> Ints:
    """Return the sorted distinct values, by sorting, which is faster than `np.unique`."""
    numbers = np.sort(numbers, axis=None)
    return numbers[starts(numbers)]


def starts(numbers: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Return a mask of values that differ from the previous one."""
    mask = np.ones(len(numbers), bool)
    np.not_equal(numbers[1:], numbers[:-1], out=mask[1:])
    return mask


def distinct_rows(columns: Sequence[Ints]) -> Ints:
    """Return the sorted distinct rows of some columns, packed into one integer where possible."""
    if not columns[0].size:
        return np.zeros((0, len(columns)), np.int64)
    lows = [int(c.min()) for c in columns]
    spans = [int(c.max()) - low + 1 for c, low in zip(columns, lows, strict=True)]
    if math.prod(spans) >= 2**62:
        table = np.stack(columns, 1)[np.lexsort(columns[::-1])]
        return table[np.r_[True, (table[1:] != table[:-1]).any(1)]]
    code = np.zeros(columns[0].size, np.int64)
    for column, low, span in zip(columns, lows, spans, strict=True):
        code = code * span + (column - low)
    code, rows = distinct(code), []
    for low, span in zip(reversed(lows), reversed(spans), strict=True):
        code, digit = np.divmod(code, span)
        rows.append(digit + low)
    return np.stack(rows[::-1], 1)


def occurrence(labels: Tensor, over: frozenset[int] | None = None) -> Tensor:
    """Count earlier occurrences of each position's label along some dimensions."""
    if over is not None:
        idle = [1 if d in over else n for d, n in enumerate(labels.shape)]
        labels = labels + (labels.max() + 3) * torch.arange(math.prod(idle)).reshape(idle)
    flat = np.ascontiguousarray(labels.numpy()).ravel()
    order = np.argsort(flat, kind="stable")
    start = starts(flat[order])
    first = np.maximum.accumulate(np.where(start, np.arange(flat.size), 0))
    count = np.empty(flat.size, np.int64)
    count[order] = np.arange(flat.size) - first
    return torch.from_numpy(count.reshape(tuple(labels.shape)))
