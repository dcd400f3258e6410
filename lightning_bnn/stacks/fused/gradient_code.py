"""The code of a stage backwards: gradients before rectifier and pooling, and those of inputs."""

from __future__ import annotations

import math

from lightning_bnn.stacks.fused.addresses import (
    Address,
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
from lightning_bnn.stacks.fused.stage import Pair, Stage
from lightning_bnn.stacks.fused.vector_code import VectorCode

__all__ = ["before_backward", "gradients", "input_gradient"]


def before_backward(code: VectorCode, stage: Stage) -> None:
    """Turn gradients of the outputs (at ``out``) to those before the last rectifier and mean.

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
            at = code.index((block, 1), (k, code.lanes))
            g = code.select(valid, code.load("%out", at), code.number(0))
            if stage.outside != 1:
                more = lets_through(code, code.load("%x", at), stage.outside)
                g = code.select(more, g, _times(code, g, stage.outside))
            if stage.pooling == "mean":
                g = code.arithmetic("fdiv", g, code.number(math.prod(stage.window)))
            code.store(g, "%out", at)


def _times(code: VectorCode, g: str, slope: float) -> str:
    return code.number(0) if slope == 0 else code.arithmetic("fmul", g, code.number(slope))


def gradients(code: VectorCode, stage: Stage, window: Address, part: Address) -> list[str]:
    """Gradients at the places of a tile of one channel, before anything is pooled.

    Args:
        code: where the instructions go.
        stage: its sizes.
        window: where the window is.
        part: where the tile is.
    """
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
            place = f"i{stage.note_bits} {place_number(code, stage, part.place, number)}"
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


def input_gradient(code: VectorCode, stage: Stage) -> None:
    """Gradients of the inputs of a stage, from those before its rectifier and pooling.

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
                    here = channel_of(code, stage, block, g, first)
                    mine = code.at(weight, weight_index(code, stage, first))
                    with windows(code, stage, here) as window, tiles(code, stage, window) as part:
                        channels = [later_channel(code, stage, window, k) for k in range(count)]
                        rows = [gradients(code, stage, channel, part) for channel in channels]
                        _channels_back(code, stage, part.x, mine, rows)


def _channels_back(
    code: VectorCode, stage: Stage, x: str, weight: str, rows: list[list[str]]
) -> None:
    """Add what some output channels give to all inputs of a tile."""
    area = math.prod(stage.padded) * code.lanes
    with code.loop(stage.depth) as c, taps_of(code, stage, code.at(x, code.index((c, area)))) as t:
        taps, inputs, start = t
        w = code.at(weight, weight_index(code, stage, "0", c, start))
        _give_back(code, stage, inputs, w, taps, rows)


def _give_back(
    code: VectorCode, stage: Stage, x: str, weight: str, taps: list[Pair], rows: list[list[str]]
) -> None:
    """Add the products of weights and gradients to the inputs that they come from."""
    cells: dict[Pair, list[tuple[int, int, int]]] = {}
    for p, place in enumerate(stage.tile.places):
        for n, tap in enumerate(taps):
            for k in range(len(rows)):
                cells.setdefault(cell_of(stage, place, tap), []).append((k, n, p))
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
