"""The code of one stage: forward, gradients of weights and inputs, for members and blocks of examples.

Activations lie as ``(members, blocks, channels, rows, columns, lanes)``, a lane being an example, so
that every place is a constant away from the first one of its window. Lanes beyond the last example
hold zeros, whatever the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_bnn.stacks.fused.stage import Pair, Stage
from lightning_bnn.stacks.fused.vector_code import VectorCode

__all__ = ["FUNCTIONS", "code_of"]

FUNCTIONS = ("forward", "before_backward", "weight_gradient", "input_gradient")
POINTERS = ("x", "weight", "bias", "out", "notes")
"""Gradients stand where that of which they are the gradient stands."""


def code_of(stage: Stage, function: str, kind: str, lanes: int) -> str:
    """What LLVM compiles to one of ``FUNCTIONS``.

    Args:
        stage: the sizes.
        function: its name.
        kind: ``"float"`` or ``"double"``.
        lanes: examples in a block.
    """
    code = VectorCode(function, POINTERS, kind, lanes)
    {
        "forward": _forward,
        "before_backward": _before_backward,
        "weight_gradient": _weight_gradient,
        "input_gradient": _input_gradient,
    }[function](code, stage)
    return code.text()


# ------------------------------------------------------------ where things are
@dataclass(frozen=True)
class _Tile:
    """Where a tile is: pointers to its first input, output and note, and the place in a window."""

    x: str
    out: str
    notes: str
    place: str


def _member(code: VectorCode, stage: Stage, m: str) -> tuple[str, str]:
    """Pointers to the weights and biases of a member."""
    size = math.prod(stage.weight_shape)
    weight = code.at("%weight", code.index((m, size)))
    return weight, code.at("%bias", code.index((m, stage.outputs)))


def _block(code: VectorCode, stage: Stage, m: str, b: str) -> _Tile:
    """Pointers to the activations of a block of examples of a member."""
    block = code.index((m, "%blocks"), (b, 1))
    shared = code.index((code.index((m, "%shared")), "%blocks"), (b, 1))
    x = code.index((shared, stage.channels * math.prod(stage.padded) * code.lanes))
    out = code.index((block, stage.outputs * math.prod(stage.out_padded) * code.lanes))
    notes = code.index((block, stage.notes * stage.note_bits * code.lanes // 8))
    return _Tile(code.at("%x", x), code.at("%out", out), code.at("%notes", notes, "i8"), "0")


def _channels(code: VectorCode, stage: Stage, at: _Tile, group: str, first: str) -> _Tile:
    """Move to the inputs of a group, and to the outputs of a channel."""
    rows, columns = stage.out_padded
    top, left = stage.out_pads[0], stage.out_pads[2]
    x = code.index((group, stage.depth * math.prod(stage.padded) * code.lanes))
    out = code.index((first, rows * columns * code.lanes))
    inner = (top * columns + left) * code.lanes
    notes = code.index((first, stage.notes // stage.outputs * stage.note_bits * code.lanes // 8))
    return _Tile(
        code.at(at.x, x),
        code.at(code.at(at.out, out), inner),
        code.at(at.notes, notes, "i8"),
        "0",
    )


@contextmanager
def _windows(code: VectorCode, stage: Stage, at: _Tile) -> Iterator[_Tile]:
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
        yield _Tile(
            code.at(at.x, x), code.at(at.out, out), code.at(at.notes, code.index((window, size)), "i8"), "0"
        )  # fmt: skip


@contextmanager
def _tiles(code: VectorCode, stage: Stage, at: _Tile) -> Iterator[_Tile]:
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
        yield _Tile(code.at(at.x, x), at.out, notes, place)


def _notes_of_window(stage: Stage) -> int:
    return math.prod(stage.window) if stage.pooling == "mean" and stage.notes else min(stage.notes, 1)


def _out_channel(code: VectorCode, stage: Stage, at: _Tile, k: int) -> _Tile:
    """Move to the outputs of a later channel."""
    notes = k * (stage.notes // stage.outputs) * stage.note_bits * code.lanes // 8
    out = k * math.prod(stage.out_padded) * code.lanes
    return _Tile(at.x, code.at(at.out, out), code.at(at.notes, notes, "i8"), at.place)


def _cell(stage: Stage, place: Pair, tap: Pair) -> Pair:
    """Which input, counted from the first of a tile, a tap meets."""
    row, column = (
        p * s + t * d for p, s, t, d in zip(place, stage.stride, tap, stage.dilation, strict=True)
    )
    return row, column


def _offset(code: VectorCode, stage: Stage, cell: Pair) -> int:
    return (cell[0] * stage.padded[1] + cell[1]) * code.lanes


@contextmanager
def _taps(code: VectorCode, stage: Stage, x: str) -> Iterator[tuple[list[Pair], str, str]]:
    """Loop over rows of a kernel that is too large to be written out: taps, inputs, first weight."""
    if stage.tile.whole_kernel:
        yield stage.taps, x, "0"
        return
    with code.loop(stage.kernel[0]) as s:
        moved = code.index((s, stage.dilation[0] * stage.padded[1] * code.lanes))
        row = [(0, t) for t in range(stage.kernel[1])]
        yield row, code.at(x, moved), code.index((s, stage.kernel[1]))


def _weight_index(code: VectorCode, stage: Stage, channel: str, c: str, tap: str) -> str:
    taps = math.prod(stage.kernel)
    return code.index((channel, stage.depth * taps), (c, taps), (tap, 1))


def _valid(code: VectorCode, b: str) -> str:
    """A mask of the lanes that hold examples."""
    lanes, vector = code.lanes, f"<{code.lanes} x i64>"
    numbers = ", ".join(f"i64 {k}" for k in range(lanes))
    left = code.let(f"sub i64 %valid, {code.index((b, lanes))}")
    return code.let(f"icmp slt {vector} <{numbers}>, {code.spread(f'i64 {left}', vector)}")


# ------------------------------------------------------------ forward
def _forward(code: VectorCode, stage: Stage) -> None:
    tile = stage.tile
    with code.loop("%last", "%first") as m:
        weight, bias = _member(code, stage, m)
        with code.loop("%blocks") as b:
            block, valid = _block(code, stage, m, b), _valid(code, b)
            with code.loop(stage.groups) as g, code.loop(stage.share // tile.channels) as o:
                first = code.index((g, stage.share), (o, tile.channels))
                here = _channels(code, stage, block, g, first)
                with _windows(code, stage, here) as window:
                    _window(code, stage, window, weight, code.at(bias, first), first, valid)


def _window(
    code: VectorCode, stage: Stage, at: _Tile, weight: str, bias: str, first: str, valid: str
) -> None:
    """Compute one window of some output channels, or one tile where nothing is pooled."""
    tile = stage.tile
    channels = [_out_channel(code, stage, at, k) for k in range(tile.channels)]
    pooled = [_Pooled(code, stage) for _ in channels]
    with _tiles(code, stage, at) as part:
        sums = _sums(code, stage, part, weight, bias, first)
        for k, channel in enumerate(channels):
            for place, value in zip(tile.places, sums[k], strict=True):
                if stage.pooling == "none":
                    out = _rectified(code, value, stage.outside)
                    out = code.select(valid, out, code.number(0))
                    offset = (place[0] * stage.out_padded[1] + place[1]) * code.lanes
                    code.store(out, channel.out, offset)
                else:
                    number = place[0] * stage.window[1] + place[1]
                    pooled[k].take(value, part.place, number, channel.notes)
    for k, channel in enumerate(channels if stage.pooling != "none" else []):
        out = _rectified(code, pooled[k].result(channel.notes), stage.outside)
        code.store(code.select(valid, out, code.number(0)), channel.out)


def _sums(
    code: VectorCode, stage: Stage, at: _Tile, weight: str, bias: str, first: str
) -> list[list[str]]:
    """Weighted sums at the places of a tile, for each of its channels."""
    tile = stage.tile
    if not stage.weighted:
        return [[code.load(at.x, _offset(code, stage, _cell(stage, p, (0, 0)))) for p in tile.places]]
    slots = [[code.slot() for _ in tile.places] for _ in range(tile.channels)]
    for k, row in enumerate(slots):
        start = code.spread_from(bias, k) if stage.bias else code.number(0)
        for slot in row:
            code.write(start, slot)
    with code.loop(stage.depth) as c:
        x = code.at(at.x, code.index((c, math.prod(stage.padded) * code.lanes)))
        with _taps(code, stage, x) as (taps, inputs, start):
            sums = [[code.read(slot) for slot in row] for row in slots]
            here = code.at(weight, _weight_index(code, stage, first, c, start))
            _add_products(code, stage, inputs, here, taps, sums)
            for row, values in zip(slots, sums, strict=True):
                for slot, value in zip(row, values, strict=True):
                    code.write(value, slot)
    return [[code.read(slot) for slot in row] for row in slots]


def _add_products(
    code: VectorCode, stage: Stage, x: str, weight: str, taps: list[Pair], sums: list[list[str]]
) -> None:
    for n, tap in enumerate(taps):
        offsets = [_offset(code, stage, _cell(stage, place, tap)) for place in stage.tile.places]
        inputs = [code.load(x, offset) for offset in offsets]
        for k, row in enumerate(sums):
            w = code.spread_from(weight, k * stage.depth * math.prod(stage.kernel) + n)
            for p, value in enumerate(inputs):
                row[p] = code.fused(w, value, row[p])


def _rectified(code: VectorCode, value: str, slope: float) -> str:
    if slope == 1:
        return value
    rest = code.number(0) if slope == 0 else code.arithmetic("fmul", value, code.number(slope))
    return code.select(_positive(code, value, slope), value, rest)


def _positive(code: VectorCode, value: str, slope: float) -> str:
    """Where a rectifier lets gradients through; of ReLU, by torch, also where there is no number."""
    return code.compare("ugt" if slope == 0 else "ogt", value, "zeroinitializer")


class _Pooled:
    """What is known of a window while its places come one after the other."""

    def __init__(self, code: VectorCode, stage: Stage) -> None:
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
        """See the next place, ``number`` places behind ``start``."""
        (self._larger if self.stage.pooling == "max" else self._add)(value, start, number, notes)

    def _larger(self, value: str, start: str, number: int, notes: str) -> None:
        code = self.code
        best = code.read(self.best)
        more = code.let(
            f"or {code.mask} {code.compare('ogt', value, best)}, {code.compare('uno', value, value)}"
        )
        code.write(code.select(more, value, best), self.best)
        place = code.spread(f"i{self.stage.note_bits} {_place(code, self.stage, start, number)}", self.notes)
        code.write(
            code.select(more, place, code.read(self.place, self.notes), self.notes), self.place, self.notes
        )

    def _add(self, value: str, start: str, number: int, notes: str) -> None:
        code, stage = self.code, self.stage
        if stage.inside != 1:
            more = _positive(code, value, stage.inside)
            bits = code.let(f"bitcast {code.mask} {more} to i{code.lanes}")
            at = code.at(notes, code.index((start, code.lanes // 8)), "i8")
            at = code.at(at, number * code.lanes // 8, "i8")
            code.do(f"store i{code.lanes} {bits}, ptr {at}, align 1")
        value = _rectified(code, value, stage.inside)
        code.write(code.arithmetic("fadd", code.read(self.best), value), self.best)

    def result(self, notes: str) -> str:
        """The pooled value."""
        code = self.code
        if self.stage.pooling == "mean":
            count = code.number(math.prod(self.stage.window))
            return code.arithmetic("fdiv", code.read(self.best), count)
        kept = code.read(self.place, self.notes)
        code.do(f"store {self.notes} {kept}, ptr {notes}, align 1")
        return code.read(self.best)


def _place(code: VectorCode, stage: Stage, start: str, number: int) -> str:
    if start == "0":
        return str(number)
    wide = code.let(f"add i64 {start}, {number}")
    return code.let(f"trunc i64 {wide} to i{stage.note_bits}")


# ------------------------------------------------------------ backward
def _before_backward(code: VectorCode, stage: Stage) -> None:
    """Turn gradients of the outputs (at ``out``) to those before the last rectifier and mean.

    The outputs themselves stand at ``x``.
    """
    cells = stage.outputs * math.prod(stage.out_padded)
    with code.loop("%last", "%first") as m, code.loop("%blocks") as b:
        valid = _valid(code, b)
        block = code.index((code.index((m, "%blocks"), (b, 1)), cells * code.lanes))
        with code.loop(cells) as k:
            at = code.index((block, 1), (k, code.lanes))
            g = code.select(valid, code.load("%out", at), code.number(0))
            if stage.outside != 1:
                more = _positive(code, code.load("%x", at), stage.outside)
                g = code.select(more, g, _times(code, g, stage.outside))
            if stage.pooling == "mean":
                g = code.arithmetic("fdiv", g, code.number(math.prod(stage.window)))
            code.store(g, "%out", at)


def _times(code: VectorCode, g: str, slope: float) -> str:
    return code.number(0) if slope == 0 else code.arithmetic("fmul", g, code.number(slope))


def _gradients(code: VectorCode, stage: Stage, window: _Tile, part: _Tile) -> list[str]:
    """Gradients at the places of a tile of one channel, before anything is pooled."""
    places = stage.tile.places
    if stage.pooling == "none":
        width = stage.out_padded[1]
        return [code.load(window.out, (i * width + j) * code.lanes) for i, j in places]
    g = code.load(window.out)
    numbers = [i * stage.window[1] + j for i, j in places]
    if stage.pooling == "max":
        vector = f"<{code.lanes} x i{stage.note_bits}>"
        kept = code.let(f"load {vector}, ptr {window.notes}, align 1")
        found = []
        for number in numbers:
            place = f"i{stage.note_bits} {_place(code, stage, part.place, number)}"
            here = code.let(f"icmp eq {vector} {kept}, {code.spread(place, vector)}")
            found.append(code.select(here, g, code.number(0)))
        return found
    if stage.inside == 1:
        return [g for _ in places]
    less = _times(code, g, stage.inside)
    start = code.at(window.notes, code.index((part.place, code.lanes // 8)), "i8")
    found = []
    for number in numbers:
        at = code.at(start, number * code.lanes // 8, "i8")
        bits = code.let(f"load i{code.lanes}, ptr {at}, align 1")
        more = code.let(f"bitcast i{code.lanes} {bits} to {code.mask}")
        found.append(code.select(more, g, less))
    return found


def _weight_gradient(code: VectorCode, stage: Stage) -> None:
    outs, depths, taps = _weight_tile(stage)
    with code.loop("%last", "%first") as m:
        weight, bias = _member(code, stage, m)
        if stage.bias:
            with code.loop(stage.outputs) as o:
                _bias_gradient(code, stage, m, bias, o)
        with code.loop(stage.groups) as g, code.loop(stage.share // outs) as o:
            first = code.index((g, stage.share), (o, outs))
            with code.loop(stage.depth // depths) as c, _rows_of_taps(code, stage, taps) as start:
                channel = code.index((c, depths))
                _some_weights(code, stage, (m, g, first, channel, start), weight, (outs, depths, taps))


def _weight_tile(stage: Stage) -> tuple[int, int, int]:
    """How many output channels, input channels and taps are summed at once."""
    every = math.prod(stage.kernel)
    taps = every if every <= 25 else stage.kernel[1]
    places = len(stage.tile.places)
    best, cost = (1, 1), math.inf
    for outs in _divisors(stage.share):
        for depths in _divisors(stage.depth):
            products = outs * depths * taps
            if products > max(REGISTERS_OF_WEIGHTS, taps) or products * places > max(640, taps * places):
                continue
            loads = 2 * outs * places + depths * (places + taps)
            if loads / products < cost:
                best, cost = (outs, depths), loads / products
    return *best, taps


REGISTERS_OF_WEIGHTS = 24


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, min(number, REGISTERS_OF_WEIGHTS) + 1) if number % k == 0]


@contextmanager
def _rows_of_taps(code: VectorCode, stage: Stage, taps: int) -> Iterator[str]:
    with code.loop(math.prod(stage.kernel) // taps) as s:
        yield s


def _bias_gradient(code: VectorCode, stage: Stage, m: str, bias: str, o: str) -> None:
    slot = code.slot()
    code.write(code.number(0), slot)
    with code.loop("%blocks") as b:
        here = _channels(code, stage, _block(code, stage, m, b), "0", o)
        with _windows(code, stage, here) as window, _tiles(code, stage, window) as part:
            total = code.read(slot)
            for g in _gradients(code, stage, window, part):
                total = code.arithmetic("fadd", total, g)
            code.write(total, slot)
    place = code.at(bias, o)
    code.do(f"store {code.kind} {code.total(code.read(slot))}, ptr {place}, align {code.bytes}")


def _some_weights(
    code: VectorCode,
    stage: Stage,
    where: tuple[str, str, str, str, str],
    weight: str,
    counts: tuple[int, int, int],
) -> None:
    """Gradients of the weights of some channels and taps, summed over all places and examples."""
    m, g, first, channel, start = where
    outs, depths, taps = counts
    whole = taps == math.prod(stage.kernel)
    names = stage.taps if whole else [(0, t) for t in range(taps)]
    keys = [(o, c, n) for o in range(outs) for c in range(depths) for n in range(taps)]
    slots = {key: code.slot() for key in keys}
    for slot in slots.values():
        code.write(code.number(0), slot)
    area = math.prod(stage.padded) * code.lanes
    row = 0 if whole else stage.dilation[0] * stage.padded[1] * code.lanes
    with code.loop("%blocks") as b:
        here = _channels(code, stage, _block(code, stage, m, b), g, first)
        with _windows(code, stage, here) as window, _tiles(code, stage, window) as part:
            sums = {key: code.read(slot) for key, slot in slots.items()}
            x = code.at(part.x, code.index((channel, area), (start, row)))
            rows = [
                _gradients(code, stage, _out_channel(code, stage, window, o), part)
                for o in range(outs)
            ]
            _add_dots(code, stage, x, names, rows, sums)
            for key, slot in slots.items():
                code.write(sums[key], slot)
    begin = _weight_index(code, stage, first, channel, code.index((start, taps)))
    every = math.prod(stage.kernel)
    for (o, c, n), slot in slots.items():
        place = code.at(code.at(weight, begin), (o * stage.depth + c) * every + n)
        code.do(f"store {code.kind} {code.total(code.read(slot))}, ptr {place}, align {code.bytes}")


def _add_dots(
    code: VectorCode,
    stage: Stage,
    x: str,
    taps: list[Pair],
    gradients: list[list[str]],
    sums: dict[tuple[int, int, int], str],
) -> None:
    area = math.prod(stage.padded) * code.lanes
    for p, place in enumerate(stage.tile.places):
        inputs: dict[tuple[int, int], str] = {}
        for o, c, n in sums:
            if (c, n) not in inputs:
                offset = c * area + _offset(code, stage, _cell(stage, place, taps[n]))
                inputs[c, n] = code.load(x, offset)
            sums[o, c, n] = code.fused(gradients[o][p], inputs[c, n], sums[o, c, n])


def _input_gradient(code: VectorCode, stage: Stage) -> None:
    tile = stage.tile
    area = math.prod(stage.padded)
    with code.loop("%last", "%first") as m:
        weight, _ = _member(code, stage, m)
        with code.loop("%blocks") as b:
            block = _block(code, stage, m, b)
            with code.loop(stage.channels * area) as k:
                code.store(code.number(0), block.x, code.index((k, code.lanes)))
            with code.loop(stage.groups) as g, code.loop(stage.share // tile.channels) as o:
                first = code.index((g, stage.share), (o, tile.channels))
                here = _channels(code, stage, block, g, first)
                with _windows(code, stage, here) as window, _tiles(code, stage, window) as part:
                    rows = [
                        _gradients(code, stage, _out_channel(code, stage, window, k), part)
                        for k in range(tile.channels)
                    ]
                    with code.loop(stage.depth) as c:
                        x = code.at(part.x, code.index((c, area * code.lanes)))
                        with _taps(code, stage, x) as (taps, inputs, start):
                            w = code.at(weight, _weight_index(code, stage, first, c, start))
                            _give_back(code, stage, inputs, w, taps, rows)


def _give_back(
    code: VectorCode, stage: Stage, x: str, weight: str, taps: list[Pair], rows: list[list[str]]
) -> None:
    """Add the products of weights and gradients to the inputs that they come from."""
    cells: dict[Pair, list[tuple[int, int, int]]] = {}
    for p, place in enumerate(stage.tile.places):
        for n, tap in enumerate(taps):
            for k in range(len(rows)):
                cells.setdefault(_cell(stage, place, tap), []).append((k, n, p))
    size = stage.depth * math.prod(stage.kernel)
    for cell, terms in sorted(cells.items()):
        offset = _offset(code, stage, cell)
        total = code.load(x, offset)
        for k, n, p in terms:
            if stage.weighted:
                total = code.fused(code.spread_from(weight, k * size + n), rows[k][p], total)
            else:
                total = code.arithmetic("fadd", total, rows[k][p])
        code.store(total, x, offset)
