"""The code of the gradients of weights and biases of a stage."""

from __future__ import annotations

import math

from lightning_bnn.stacks.fused.addresses import (
    block_of,
    cell_of,
    channel_of,
    later_channel,
    offset_of,
    tiles,
    weight_index,
    weights_of,
    windows,
)
from lightning_bnn.stacks.fused.gradient_code import gradients
from lightning_bnn.stacks.fused.stage import LONGEST, Pair, Stage, even
from lightning_bnn.stacks.fused.vector_code import VectorCode

__all__ = ["weight_gradient"]

REGISTERS = 24
"""Vectors that sums are kept in at once."""
MOST_TAPS = 25
"""Kernels with more are summed row by row."""


def weight_gradient(code: VectorCode, stage: Stage) -> None:
    """Gradients of weights and biases, from those before rectifier and pooling of a stage.

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


def _summed_at_once(stage: Stage) -> tuple[int, int, int]:
    """How many output channels, input channels and taps."""
    every = math.prod(stage.kernel)
    taps = every if every <= MOST_TAPS else stage.kernel[1]
    places = len(stage.tile.places)
    best, cost = (1, 1), math.inf
    for outs in _sizes(stage.share):
        for depths in _sizes(stage.depth):
            products = outs * depths * taps
            loads = 2 * outs * places + depths * (places + taps)
            parts = -(-stage.share // outs) * -(-stage.depth // depths)
            fits = max(products / REGISTERS, products * places / LONGEST) <= 1
            if fits and loads * parts < cost:
                best, cost = (outs, depths), loads * parts
    return *best, taps


def _sizes(number: int) -> list[int]:
    """Of parts that are about equally large."""
    return sorted({even(number, most) for most in range(1, REGISTERS + 1)})


def _bias_gradient(code: VectorCode, stage: Stage, m: str, bias: str, o: str) -> None:
    slot = code.slot()
    code.write(code.number(0), slot)
    with code.loop("%blocks") as b:
        here = channel_of(code, stage, block_of(code, stage, m, b), "0", o)
        with windows(code, stage, here) as window, tiles(code, stage, window) as part:
            total = code.read(slot)
            for g in gradients(code, stage, window, part):
                total = code.arithmetic("fadd", total, g)
            code.write(total, slot)
    code.store_number(code.total(code.read(slot)), bias, o)


def _some_weights(
    code: VectorCode,
    stage: Stage,
    where: tuple[str, str, str, str, str],
    weight: str,
    counts: tuple[int, int, int],
) -> None:
    """Gradients of the weights of some channels and taps, summed over all places and examples."""
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
        here = channel_of(code, stage, block_of(code, stage, m, b), g, first)
        with windows(code, stage, here) as window, tiles(code, stage, window) as part:
            x = code.at(part.x, code.index((channel, area), (row, down)))
            channels = [later_channel(code, stage, window, o) for o in range(outs)]
            found = [gradients(code, stage, one, part) for one in channels]
            sums = {key: code.read(slot) for key, slot in slots.items()}
            _add_products(code, stage, x, names, found, sums)
            for key, slot in slots.items():
                code.write(sums[key], slot)
    begin = code.at(weight, weight_index(code, stage, first, channel, code.index((row, taps))))
    for (o, c, n), slot in slots.items():
        total = code.total(code.read(slot))
        code.store_number(total, begin, (o * stage.depth + c) * every + n)


def _add_products(
    code: VectorCode,
    stage: Stage,
    x: str,
    taps: list[Pair],
    found: list[list[str]],
    sums: dict[tuple[int, int, int], str],
) -> None:
    """Of gradients and inputs, place by place."""
    area = math.prod(stage.padded) * code.lanes
    for p, place in enumerate(stage.tile.places):
        inputs: dict[tuple[int, int], str] = {}
        for o, c, n in sums:
            if (c, n) not in inputs:
                offset = c * area + offset_of(code, stage, cell_of(stage, place, taps[n]))
                inputs[c, n] = code.load(x, offset)
            sums[o, c, n] = code.fused(found[o][p], inputs[c, n], sums[o, c, n])
