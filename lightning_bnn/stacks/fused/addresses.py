"""Where activations, weights and notes of a stage are, as addresses and loops over them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_bnn.stacks.fused.stage import Pair, Stage
from lightning_bnn.stacks.fused.vector_code import VectorCode

__all__ = [
    "Address",
    "block_of",
    "cell_of",
    "channel_of",
    "later_channel",
    "lets_through",
    "offset_of",
    "place_number",
    "taps_of",
    "tiles",
    "valid_lanes",
    "weight_index",
    "weights_of",
    "windows",
]


@dataclass(frozen=True)
class Address:
    """Where a tile is: pointers to its first input, output and note, and the place in a window."""

    x: str
    out: str
    notes: str
    place: str


def weights_of(code: VectorCode, stage: Stage, m: str) -> tuple[str, str]:
    """Pointers to the weights and biases of a member."""
    size = math.prod(stage.weight_shape)
    weight = code.at("%weight", code.index((m, size)))
    return weight, code.at("%bias", code.index((m, stage.outputs)))


def block_of(code: VectorCode, stage: Stage, m: str, b: str) -> Address:
    """Pointers to the activations of a block of examples of a member."""
    block = code.index((m, "%blocks"), (b, 1))
    shared = code.index((code.index((m, "%shared")), "%blocks"), (b, 1))
    x = code.index((shared, stage.channels * math.prod(stage.padded) * code.lanes))
    out = code.index((block, stage.outputs * math.prod(stage.out_padded) * code.lanes))
    notes = code.index((block, stage.notes * stage.note_bits * code.lanes // 8))
    return Address(code.at("%x", x), code.at("%out", out), code.at("%notes", notes, "i8"), "0")


def channel_of(code: VectorCode, stage: Stage, at: Address, group: str, first: str) -> Address:
    """Move to the inputs of a group, and to the outputs of a channel."""
    rows, columns = stage.out_padded
    top, left = stage.out_pads[0], stage.out_pads[2]
    x = code.index((group, stage.depth * math.prod(stage.padded) * code.lanes))
    out = code.index((first, rows * columns * code.lanes))
    inner = (top * columns + left) * code.lanes
    notes = code.index((first, stage.notes // stage.outputs * stage.note_bits * code.lanes // 8))
    return Address(
        code.at(at.x, x),
        code.at(code.at(at.out, out), inner),
        code.at(at.notes, notes, "i8"),
        "0",
    )


@contextmanager
def windows(code: VectorCode, stage: Stage, at: Address) -> Iterator[Address]:
    """Loop over windows; where nothing is pooled these are tiles."""
    (rows, columns), step, _, _ = stage.steps_of_tiles
    across, width = stage.padded[1], stage.out_padded[1]
    out_step = stage.steps_of_tiles[3] if stage.pooling == "none" else (1, 1)
    with code.loop(rows) as i, code.loop(columns) as j:
        x = code.index(
            (i, step[0] * stage.stride[0] * across * code.lanes),
            (j, step[1] * stage.stride[1] * code.lanes),
        )
        out = code.index((i, out_step[0] * width * code.lanes), (j, out_step[1] * code.lanes))
        window = code.index((i, columns), (j, 1))
        size = _notes_of_window(stage) * stage.note_bits * code.lanes // 8
        notes = code.at(at.notes, code.index((window, size)), "i8")
        yield Address(code.at(at.x, x), code.at(at.out, out), notes, "0")


@contextmanager
def tiles(code: VectorCode, stage: Stage, at: Address) -> Iterator[Address]:
    """Loop over the tiles of a window."""
    _, _, (rows, columns), inner = stage.steps_of_tiles
    across = stage.padded[1]
    with code.loop(rows) as i, code.loop(columns) as j:
        x = code.index(
            (i, inner[0] * stage.stride[0] * across * code.lanes),
            (j, inner[1] * stage.stride[1] * code.lanes),
        )
        place = code.index((i, inner[0] * stage.window[1]), (j, inner[1]))
        notes = at.notes
        if stage.pooling == "mean" and stage.notes:
            notes = code.at(notes, code.index((place, code.lanes // 8)), "i8")
        yield Address(code.at(at.x, x), at.out, notes, place)


def _notes_of_window(stage: Stage) -> int:
    return (
        math.prod(stage.window) if stage.pooling == "mean" and stage.notes else min(stage.notes, 1)
    )


def later_channel(code: VectorCode, stage: Stage, at: Address, k: int) -> Address:
    """Move to the outputs of a later channel."""
    notes = k * (stage.notes // stage.outputs) * stage.note_bits * code.lanes // 8
    out = k * math.prod(stage.out_padded) * code.lanes
    return Address(at.x, code.at(at.out, out), code.at(at.notes, notes, "i8"), at.place)


def cell_of(stage: Stage, place: Pair, tap: Pair) -> Pair:
    """Which input, counted from the first of a tile, a tap meets."""
    row, column = (
        p * s + t * d for p, s, t, d in zip(place, stage.stride, tap, stage.dilation, strict=True)
    )
    return row, column


def offset_of(code: VectorCode, stage: Stage, cell: Pair) -> int:
    """How many numbers an input is behind the first of a tile."""
    return (cell[0] * stage.padded[1] + cell[1]) * code.lanes


@contextmanager
def taps_of(code: VectorCode, stage: Stage, x: str) -> Iterator[tuple[list[Pair], str, str]]:
    """Taps, inputs, first weight; of large kernels row by row, in a loop."""
    if stage.tile.whole_kernel:
        yield stage.taps, x, "0"
        return
    with code.loop(stage.kernel[0]) as s:
        moved = code.index((s, stage.dilation[0] * stage.padded[1] * code.lanes))
        row = [(0, t) for t in range(stage.kernel[1])]
        yield row, code.at(x, moved), code.index((s, stage.kernel[1]))


def weight_index(code: VectorCode, stage: Stage, channel: str, c: str = "0", tap: str = "0") -> str:
    """Where the weight of an output channel, an input channel and a tap is."""
    taps = math.prod(stage.kernel)
    return code.index((channel, stage.depth * taps), (c, taps), (tap, 1))


def valid_lanes(code: VectorCode, b: str) -> str:
    """A mask of the lanes that hold examples."""
    lanes, vector = code.lanes, f"<{code.lanes} x i64>"
    numbers = ", ".join(f"i64 {k}" for k in range(lanes))
    left = code.let(f"sub i64 %valid, {code.index((b, lanes))}")
    return code.let(f"icmp slt {vector} <{numbers}>, {code.spread(f'i64 {left}', vector)}")


def place_number(code: VectorCode, stage: Stage, start: str, number: int) -> str:
    """The number of a place in its window, as it is noted."""
    if start == "0":
        return str(number)
    wide = code.let(f"add i64 {start}, {number}")
    return code.let(f"trunc i64 {wide} to i{stage.note_bits}")


def lets_through(code: VectorCode, value: str, slope: float) -> str:
    """Where a rectifier lets gradients through; ReLU does so, as in torch, for NaN."""
    return code.compare("ugt" if slope == 0 else "ogt", value, "zeroinitializer")
