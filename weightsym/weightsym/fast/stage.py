"""One stage of a network: weighted sums, a rectifier, pooling. All sizes are known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["LONGEST", "Pads", "Pair", "Pooling", "Stage", "even"]

Pair = tuple[int, int]
Pooling = Literal["none", "max", "mean"]
Pads = tuple[int, int, int, int]
"""Zeros above, below, left and right."""
REGISTERS = 20
"""Vectors that sums are kept in at once."""
LONGEST = 640
"""Products in a row without a loop."""


@dataclass(frozen=True)
class Tile:
    """The outputs that are computed at once, of some channels at neighbouring places.

    There may be fewer channels left for the last one.
    """

    channels: int
    rows: int
    columns: int
    whole_kernel: bool

    @property
    def places(self) -> list[Pair]:
        """Row and column of every place in it."""
        return [(i, j) for i in range(self.rows) for j in range(self.columns)]


@dataclass(frozen=True)
class Stage:
    """Convolution (a linear layer is one over a single place) or none, rectifier, pooling.

    Attributes:
        channels: of the inputs.
        size: rows and columns of the inputs, without padding.
        outputs: channels of the outputs.
        groups: of the convolution.
        kernel: rows and columns of its weights.
        stride: of the convolution.
        dilation: of the convolution.
        pads: of the inputs.
        weighted: whether there are weights; without them a stage only pools.
        bias: whether there is a bias.
        inside: slope below zero of the rectifier before averaging; 1 if there is none.
        outside: slope of the rectifier at the end.
        pooling: what becomes of a window.
        window: rows and columns of windows.
        step: from one window to the next.
        out_pads: zeros around the outputs, as the next stage wants them.
    """

    channels: int
    size: Pair
    outputs: int
    groups: int = 1
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    pads: Pads = (0, 0, 0, 0)
    weighted: bool = True
    bias: bool = False
    inside: float = 1.0
    outside: float = 1.0
    pooling: Pooling = "none"
    window: Pair = (1, 1)
    step: Pair = (1, 1)
    out_pads: Pads = (0, 0, 0, 0)

    # ------------------------------------------------------------ sizes
    @property
    def padded(self) -> Pair:
        """Rows and columns of the inputs with their padding."""
        return self.size[0] + sum(self.pads[:2]), self.size[1] + sum(self.pads[2:])

    @property
    def places(self) -> Pair:
        """Rows and columns that the convolution gives."""
        rows, columns = (
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(self.padded, self.kernel, self.stride, self.dilation, strict=True)
        )
        return rows, columns

    @property
    def out_size(self) -> Pair:
        """Rows and columns of the outputs, without padding."""
        if self.pooling == "none":
            return self.places
        rows, columns = (
            (n - k) // s + 1 for n, k, s in zip(self.places, self.window, self.step, strict=True)
        )
        return rows, columns

    @property
    def out_padded(self) -> Pair:
        """Rows and columns of the outputs with their padding."""
        return (
            self.out_size[0] + sum(self.out_pads[:2]),
            self.out_size[1] + sum(self.out_pads[2:]),
        )

    @property
    def depth(self) -> int:
        """Input channels of a group."""
        return self.channels // self.groups

    @property
    def share(self) -> int:
        """Output channels of a group."""
        return self.outputs // self.groups

    @property
    def taps(self) -> list[Pair]:
        """Rows and columns of the kernel."""
        return [(s, t) for s in range(self.kernel[0]) for t in range(self.kernel[1])]

    @property
    def notes(self) -> int:
        """Notes of the forward pass for the backward pass of an example, see `note_bits`."""
        if self.pooling == "max":
            return self.outputs * math.prod(self.out_size)
        keeps = self.pooling == "mean" and self.inside != 1
        return self.outputs * math.prod(self.out_size) * math.prod(self.window) if keeps else 0

    @property
    def note_bits(self) -> int:
        """Bits of a note of one example: which place of a window is largest, or the sign there."""
        return 1 if self.pooling == "mean" else 8 if math.prod(self.window) <= 256 else 16

    def leading_to(self, pads: Pads) -> Stage:
        """The same stage with zeros around its outputs."""
        return replace(self, out_pads=pads)

    # ------------------------------------------------------------ tiles
    @property
    def tile(self) -> Tile:
        """As much as fits into registers and a program of reasonable length."""
        if self.pooling == "none":
            rows, columns = 1, _divisor(self.places[1], 8)
        else:
            columns = _divisor(self.window[1], REGISTERS)
            rows = _divisor(self.window[0], REGISTERS // columns)
        taps = math.prod(self.kernel)
        whole = rows * columns * taps <= LONGEST
        taps = taps if whole else self.kernel[1]
        most = min(REGISTERS // (rows * columns), LONGEST // (rows * columns * taps))
        return Tile(even(self.share, max(most, 1)), rows, columns, whole)

    @property
    def steps_of_tiles(self) -> tuple[Pair, Pair, Pair, Pair]:
        """Counts of windows, places between them, counts of tiles in a window, places in a tile."""
        tile = self.tile
        inner = (tile.rows, tile.columns)
        if self.pooling == "none":
            return (self.places[0] // inner[0], self.places[1] // inner[1]), inner, (1, 1), inner
        tiles = (self.window[0] // inner[0], self.window[1] // inner[1])
        return self.out_size, self.step, tiles, inner


def even(number: int, most: int) -> int:
    """The size of parts that are about equally large, as few as there can be.

    Args:
        number: of all things.
        most: how many one part may have.
    """
    return -(-number // -(-number // most))


def _divisor(number: int, most: int) -> int:
    """The largest divisor that is not larger than ``most``."""
    return max(k for k in range(1, min(number, most) + 1) if number % k == 0)
