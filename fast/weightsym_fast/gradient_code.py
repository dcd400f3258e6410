"""Code for the backward pass of a stage: gradients before rectifier and pooling, and of inputs."""

from __future__ import annotations

import math

from weightsym_fast.chains import LONGEST, Pair, StageSizes, even
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


def before_backward(code: VectorCode, stage: StageSizes) -> None:
    """Convert gradients of the outputs (at ``out``) to those before the last rectifier and mean.

    The outputs themselves stand at ``x``.

    Args:
        code: where the instructions go.
        stage: its sizes.
    """
    cells = stage.outputs * math.prod(stage.out_padded)
    with code.loop("%last", "%first") as m, code.loop("%blocks") as b:
        valid = valid_lanes(code, b)
        block = code.index((code.index((m, "%blocks"), (b, 1)), cells * code.lanes))
        with code.loop(cells) as k:
            address = code.index((block, 1), (k, code.lanes))
            g = code.select(valid, code.load("%out", address), code.number(0))
            if stage.outside != 1:
                more = lets_through(code, code.load("%x", address), stage.outside)
                g = code.select(more, g, _times(code, g, stage.outside))
            if stage.pooling == "mean":
                g = code.arithmetic("fdiv", g, code.number(math.prod(stage.window)))
            code.store(g, "%out", address)


def _times(code: VectorCode, g: str, slope: float) -> str:
    return code.number(0) if slope == 0 else code.arithmetic("fmul", g, code.number(slope))


def gradients(code: VectorCode, stage: StageSizes, window: Address, piece: Address) -> list[str]:
    """Return gradients at the positions of a tile of one channel, before pooling.

    Args:
        code: where the instructions go.
        stage: its sizes.
        window: where the window is.
        piece: where the tile is.
    """
    places = stage.tile.places
    if stage.pooling == "none":
        width = stage.out_padded[1]
        return [code.load(window.out, (i * width + j) * code.lanes) for i, j in places]
    g = code.load(window.out)
    numbers = [i * stage.window[1] + j for i, j in places]
    if stage.pooling == "max":
        vector = f"<{code.lanes} x i{stage.note_bits}>"
        mask = code.let(f"load {vector}, ptr {window.notes}, align 1")
        gradients_of = []
        for number in numbers:
            position = f"i{stage.note_bits} {place_number(code, stage, piece.place, number)}"
            is_largest = code.let(f"icmp eq {vector} {mask}, {code.spread(position, vector)}")
            gradients_of.append(code.select(is_largest, g, code.number(0)))
        return gradients_of
    if stage.inside == 1:
        return [g for _ in places]
    less = _times(code, g, stage.inside)
    start = code.at(window.notes, code.index((piece.place, code.lanes // 8)), "i8")
    gradients_of = []
    for number in numbers:
        address = code.at(start, number * code.lanes // 8, "i8")
        bits = code.let(f"load i{code.lanes}, ptr {address}, align 1")
        more = code.let(f"bitcast i{code.lanes} {bits} to {code.mask}")
        gradients_of.append(code.select(more, g, less))
    return gradients_of


def input_gradient(code: VectorCode, stage: StageSizes) -> None:
    """Write gradients of the inputs of a stage, from those before its rectifier and pooling.

    Args:
        code: where the instructions go.
        stage: its sizes.
    """
    area = math.prod(stage.padded)
    with code.loop("%last", "%first") as m:
        weight, _ = weights_of(code, stage, m)
        with code.loop("%blocks") as b:
            block = block_of(code, stage, m, b)
            with code.loop(stage.channels * area) as k:
                code.store(code.number(0), block.x, code.index((k, code.lanes)))
            with code.loop(stage.groups) as g:
                for o, count in code.parts(stage.share, stage.tile.channels):
                    first = code.index((g, stage.share), (o, 1))
                    output = channel_of(code, stage, block, g, first)
                    mine = code.at(weight, weight_index(code, stage, first))
                    with (
                        windows(code, stage, output) as window,
                        tiles(code, stage, window) as piece,
                    ):
                        channels = [later_channel(code, stage, window, k) for k in range(count)]
                        rows = [gradients(code, stage, channel, piece) for channel in channels]
                        _channels_back(code, stage, piece.x, mine, rows)


def _channels_back(
    code: VectorCode, stage: StageSizes, x: str, weight: str, rows: list[list[str]]
) -> None:
    """Add the contributions of some output channels to all inputs of a tile."""
    area = math.prod(stage.padded) * code.lanes
    with code.loop(stage.depth) as c, taps_of(code, stage, code.at(x, code.index((c, area)))) as t:
        taps, inputs, start = t
        w = code.at(weight, weight_index(code, stage, "0", c, start))
        _give_back(code, stage, inputs, w, taps, rows)


def _give_back(
    code: VectorCode,
    stage: StageSizes,
    x: str,
    weight: str,
    taps: list[Pair],
    rows: list[list[str]],
) -> None:
    """Add the products of weights and gradients to the gradients of their inputs."""
    cells: dict[Pair, list[tuple[int, int, int]]] = {}
    for p, position in enumerate(stage.tile.places):
        for n, tap in enumerate(taps):
            for k in range(len(rows)):
                cells.setdefault(cell_of(stage, position, tap), []).append((k, n, p))
    size = stage.depth * math.prod(stage.kernel)
    for cell, terms in sorted(cells.items()):
        offset = offset_of(code, stage, cell)
        total = code.load(x, offset)
        for k, n, p in terms:
            if stage.weighted:
                total = code.fused(code.spread_from(weight, k * size + n), rows[k][p], total)
            else:
                total = code.arithmetic("fadd", total, rows[k][p])
        code.store(total, x, offset)


MOST_TAPS = 25
"""Kernels with more are summed row by row."""


def weight_gradient(code: VectorCode, stage: StageSizes) -> None:
    """Write gradients of weights and biases, from those before rectifier and pooling of a stage.

    Args:
        code: where the instructions go.
        stage: its sizes.
    """
    outs, depths, taps = _summed_at_once(stage)
    with code.loop("%last", "%first") as m:
        weight, bias = weights_of(code, stage, m)
        if stage.bias:
            with code.loop(stage.outputs) as o:
                _bias_gradient(code, stage, m, bias, o)
        with code.loop(stage.groups) as g, code.loop(math.prod(stage.kernel) // taps) as row:
            for o, some in code.parts(stage.share, outs):
                first = code.index((g, stage.share), (o, 1))
                for channel, deep in code.parts(stage.depth, depths):
                    where = (m, g, first, channel, row)
                    _some_weights(code, stage, where, weight, (some, deep, taps))


def _summed_at_once(stage: StageSizes) -> tuple[int, int, int]:
    """Count output channels, input channels and taps that are summed at once."""
    every = math.prod(stage.kernel)
    taps = every if every <= MOST_TAPS else stage.kernel[1]
    places = len(stage.tile.places)
    sums = stage.registers * 3 // 4
    best, cost = (1, 1), math.inf
    for outs in _sizes(stage.share, sums):
        for depths in _sizes(stage.depth, sums):
            products = outs * depths * taps
            loads = 2 * outs * places + depths * (places + taps)
            parts = -(-stage.share // outs) * -(-stage.depth // depths)
            fits = max(products / sums, products * places / LONGEST) <= 1
            if fits and loads * parts < cost:
                best, cost = (outs, depths), loads * parts
    return *best, taps


def _sizes(number: int, largest: int) -> list[int]:
    """Return the sizes of nearly equal parts."""
    return sorted({even(number, most) for most in range(1, largest + 1)})


def _bias_gradient(code: VectorCode, stage: StageSizes, m: str, bias: str, o: str) -> None:
    slot = code.slot()
    code.write(code.number(0), slot)
    with code.loop("%blocks") as b:
        output = channel_of(code, stage, block_of(code, stage, m, b), "0", o)
        with windows(code, stage, output) as window, tiles(code, stage, window) as piece:
            total = code.read(slot)
            for g in gradients(code, stage, window, piece):
                total = code.arithmetic("fadd", total, g)
            code.write(total, slot)
    code.store_number(code.total(code.read(slot)), bias, o)


def _some_weights(
    code: VectorCode,
    stage: StageSizes,
    where: tuple[str, str, str, str, str],
    weight: str,
    counts: tuple[int, int, int],
) -> None:
    """Write gradients of weights of some channels and taps, summed over positions and examples."""
    m, g, first, channel, row = where
    outs, depths, taps = counts
    every = math.prod(stage.kernel)
    names = stage.taps if taps == every else [(0, t) for t in range(taps)]
    keys = [(o, c, n) for o in range(outs) for c in range(depths) for n in range(taps)]
    slots = {key: code.slot() for key in keys}
    for slot in slots.values():
        code.write(code.number(0), slot)
    area = math.prod(stage.padded) * code.lanes
    down = stage.dilation[0] * stage.padded[1] * code.lanes
    with code.loop("%blocks") as b:
        output = channel_of(code, stage, block_of(code, stage, m, b), g, first)
        with windows(code, stage, output) as window, tiles(code, stage, window) as piece:
            x = code.at(piece.x, code.index((channel, area), (row, down)))
            channels = [later_channel(code, stage, window, o) for o in range(outs)]
            gradients_of = [gradients(code, stage, single, piece) for single in channels]
            sums = {key: code.read(slot) for key, slot in slots.items()}
            _add_products(code, stage, x, names, gradients_of, sums)
            for key, slot in slots.items():
                code.write(sums[key], slot)
    begin = code.at(weight, weight_index(code, stage, first, channel, code.index((row, taps))))
    for (o, c, n), slot in slots.items():
        total = code.total(code.read(slot))
        code.store_number(total, begin, (o * stage.depth + c) * every + n)


def _add_products(
    code: VectorCode,
    stage: StageSizes,
    x: str,
    taps: list[Pair],
    products: list[list[str]],
    sums: dict[tuple[int, int, int], str],
) -> None:
    """Add products of gradients and inputs, position by position."""
    area = math.prod(stage.padded) * code.lanes
    for p, position in enumerate(stage.tile.places):
        inputs: dict[tuple[int, int], str] = {}
        for o, c, n in sums:
            if (c, n) not in inputs:
                offset = c * area + offset_of(code, stage, cell_of(stage, position, taps[n]))
                inputs[c, n] = code.load(x, offset)
            sums[o, c, n] = code.fused(products[o][p], inputs[c, n], sums[o, c, n])
