"""What a rule can state: how weights follow channels, and products of channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_bnn.symmetry.rules.weight_views import RowRange

__all__ = ["Entry", "Key", "Kind", "Labels", "Limit", "Mark", "Product", "Record"]

Kind = Literal["permutation", "scale", "sign"]
Mark = Literal["diagonal", "orthogonal", "centred"]
Labels: TypeAlias = NDArray[np.int64]


class Record(NamedTuple):
    """How dimensions of a weight follow channels: by ``scale`` times their log factor.

    ``dim`` is one dimension of the view, None for the flattened tensor, or several, in whose shape
    the labels are; ``in_blocks`` says that the first of these counts blocks of rows, which move as
    wholes.
    """

    dim: int | tuple[int, ...] | None
    labels: Tensor
    role: str
    scale: int = 1
    sign: int = 1
    in_blocks: bool = False


class Product(NamedTuple):
    """Channels with log scale ``out = a + b`` (``a - b`` for a quotient), and signs likewise.

    Of squares and roots only the scales are told.
    """

    out: Labels
    a: Labels
    b: Labels
    inverse: bool
    has_signs: bool = True


class Limit(NamedTuple):
    """Channels of which less is found than might be, for a lack of rules.

    ``mark`` is what is left of their matrices; without one they do not move either.
    """

    labels: Labels
    mark: Mark | None
    reason: str


class Key(NamedTuple):
    """One axis of a tensor. A gain has two on its dimension: ``slot`` 0 leaves, 1 enters."""

    name: str
    dim: int | None
    slot: int = 0
    rows: RowRange = None

    def overlaps(self, other: Key) -> bool:
        """Whether both have a row in common."""
        if self.rows is None or other.rows is None:
            return True
        return self.rows[0] < other.rows[1] and other.rows[0] < self.rows[1]


@dataclass
class Entry:
    """The channels along one axis of one tensor, as seen by a range of its rows.

    ``read`` marks the elements that were used, where a tensor is used element by element.
    """

    name: str
    dim: int | None
    labels: Labels
    role: str
    scale: int = 1
    sign: int = 1
    rows: RowRange = None
    last_read: int = -1
    read: NDArray[np.bool_] | None = None
