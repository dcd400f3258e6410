"""Code for the forward pass of a stage: weighted sums, rectifier and pooling in registers."""

from __future__ import annotations

import math

from weightsym_fast.chains import Pair, StageSizes
from weightsym_fast.vector_code import (
    Address,
    VectorCode,
    block_of,
    cell_of,
    channel_of,
    later_channel,
    lets_through,
    offset_of,
    place_number,
    taps_of,
    tiles,
    valid_lanes,
    weight_index,
    weights_of,
    windows,
)


def forward(code: VectorCode, stage: StageSizes) -> None:
    """Write the outputs of a stage, and notes for the backward pass.

    Args:
        code: where the instructions go.
        stage: its sizes.
    """
    with code.loop("%last", "%first") as m:
        weight, bias = weights_of(code, stage, m)
        with code.loop("%blocks") as b:
            block, valid = block_of(code, stage, m, b), valid_lanes(code, b)
            with code.loop(stage.groups) as g:
                for o, count in code.parts(stage.share, stage.tile.channels):
                    first = code.index((g, stage.share), (o, 1))
                    output = channel_of(code, stage, block, g, first)
                    mine = (code.at(weight, weight_index(code, stage, first)), code.at(bias, first))
                    with windows(code, stage, output) as window:
                        channels = [later_channel(code, stage, window, k) for k in range(count)]
                        _window(code, stage, channels, *mine, valid)


def _window(
    code: VectorCode, stage: StageSizes, channels: list[Address], weight: str, bias: str, valid: str
) -> None:
    """Compute one window of some output channels, or one tile without pooling."""
    pooled = [_Pooled(code, stage) for _ in channels]
    with tiles(code, stage, channels[0]) as piece:
        sums = _sums(code, stage, piece, len(channels), weight, bias)
        for k, channel in enumerate(channels):
            for position, value in zip(stage.tile.places, sums[k], strict=True):
                if stage.pooling == "none":
                    out = _rectified(code, value, stage.outside)
                    out = code.select(valid, out, code.number(0))
                    offset = (position[0] * stage.out_padded[1] + position[1]) * code.lanes
                    code.store(out, channel.out, offset)
                else:
                    number = position[0] * stage.window[1] + position[1]
                    pooled[k].take(value, piece.place, number, channel.notes)
    for k, channel in enumerate(channels if stage.pooling != "none" else []):
        out = _rectified(code, pooled[k].result(channel.notes), stage.outside)
        code.store(code.select(valid, out, code.number(0)), channel.out)


def _sums(
    code: VectorCode, stage: StageSizes, address: Address, count: int, weight: str, bias: str
) -> list[list[str]]:
    """Return weighted sums at the positions of a tile, for each of some channels."""
    tile = stage.tile
    if not stage.weighted:
        return [
            [
                code.load(address.x, offset_of(code, stage, cell_of(stage, p, (0, 0))))
                for p in tile.places
            ]
        ]
    slots = [[code.slot() for _ in tile.places] for _ in range(count)]
    for k, row in enumerate(slots):
        start = code.spread_from(bias, k) if stage.bias else code.number(0)
        for slot in row:
            code.write(start, slot)
    with code.loop(stage.depth) as c:
        x = code.at(address.x, code.index((c, math.prod(stage.padded) * code.lanes)))
        with taps_of(code, stage, x) as (taps, inputs, start):
            sums = [[code.read(slot) for slot in row] for row in slots]
            weight_address = code.at(weight, weight_index(code, stage, "0", c, start))
            _add_products(code, stage, inputs, weight_address, taps, sums)
            for row, values in zip(slots, sums, strict=True):
                for slot, value in zip(row, values, strict=True):
                    code.write(value, slot)
    return [[code.read(slot) for slot in row] for row in slots]


def _add_products(
    code: VectorCode,
    stage: StageSizes,
    x: str,
    weight: str,
    taps: list[Pair],
    sums: list[list[str]],
) -> None:
    for n, tap in enumerate(taps):
        offsets = [
            offset_of(code, stage, cell_of(stage, position, tap)) for position in stage.tile.places
        ]
        inputs = [code.load(x, offset) for offset in offsets]
        for k, row in enumerate(sums):
            w = code.spread_from(weight, k * stage.depth * math.prod(stage.kernel) + n)
            for p, value in enumerate(inputs):
                row[p] = code.fused(w, value, row[p])


def _rectified(code: VectorCode, value: str, slope: float) -> str:
    if slope == 1:
        return value
    remainder = code.number(0) if slope == 0 else code.arithmetic("fmul", value, code.number(slope))
    return code.select(lets_through(code, value, slope), value, remainder)


class _Pooled:
    """The state of a window during the loop over its positions."""

    def __init__(self, code: VectorCode, stage: StageSizes) -> None:
        self.code, self.stage = code, stage
        if stage.pooling == "none":
            return
        self.best = code.slot()
        code.write(code.number(-math.inf if stage.pooling == "max" else 0), self.best)
        if stage.pooling == "max":
            self.notes = f"<{code.lanes} x i{stage.note_bits}>"
            self.place = code.slot(self.notes)
            code.write("zeroinitializer", self.place, self.notes)

    def take(self, value: str, start: str, number: int, notes: str) -> None:
        """Process the next position, ``number`` positions after ``start``."""
        (self._larger if self.stage.pooling == "max" else self._add)(value, start, number, notes)

    def _larger(self, value: str, start: str, number: int, notes: str) -> None:
        code = self.code
        best = code.read(self.best)
        larger, broken = code.compare("ogt", value, best), code.compare("uno", value, value)
        more = code.let(f"or {code.mask} {larger}, {broken}")
        code.write(code.select(more, value, best), self.best)
        spread = code.spread(
            f"i{self.stage.note_bits} {place_number(code, self.stage, start, number)}", self.notes
        )
        code.write(
            code.select(more, spread, code.read(self.place, self.notes), self.notes),
            self.place,
            self.notes,
        )

    def _add(self, value: str, start: str, number: int, notes: str) -> None:
        code, stage = self.code, self.stage
        if stage.inside != 1:
            more = lets_through(code, value, stage.inside)
            bits = code.let(f"bitcast {code.mask} {more} to i{code.lanes}")
            address = code.at(notes, code.index((start, code.lanes // 8)), "i8")
            address = code.at(address, number * code.lanes // 8, "i8")
            code.do(f"store i{code.lanes} {bits}, ptr {address}, align 1")
        value = _rectified(code, value, stage.inside)
        code.write(code.arithmetic("fadd", code.read(self.best), value), self.best)

    def result(self, notes: str) -> str:
        """Return the pooled value after all positions."""
        code = self.code
        if self.stage.pooling == "mean":
            count = code.number(math.prod(self.stage.window))
            return code.arithmetic("fdiv", code.read(self.best), count)
        notes_kept = code.read(self.place, self.notes)
        code.do(f"store {self.notes} {notes_kept}, ptr {notes}, align 1")
        return code.read(self.best)
