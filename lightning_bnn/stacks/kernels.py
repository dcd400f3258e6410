"""Convolution and pooling of many small networks on a CPU: machine code by numba.

Examples are the last dimension, so that every tap of a kernel is a product of one number and a run
of places and examples (of examples only, with a stride). Each function does the members from
``first`` to ``last``, without Python's lock. Inputs may have one member that all share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

__all__ = ["convolve", "input_gradient", "pool", "pool_gradient", "weight_gradient"]


def _compiled(function: Callable[..., Any]) -> Any:
    """Machine code, without what a checker of annotations may have put around the function."""
    compiler = numba.njit(
        nogil=True,
        cache=True,
        error_model="numpy",
        fastmath={"contract", "reassoc", "nsz", "arcp"},  # NaN and infinity keep their meaning
    )
    return compiler(inspect.unwrap(function))


@_compiled
def convolve(x, w, out, stride, dilation, first, last):
    """``out[m, o, i, j] = sum w[m, o, c, s, t] x[m, c, i * stride + s, j * stride + t]``."""
    _, outputs, depth, height, _ = w.shape
    share = outputs // (x.shape[1] // depth)
    step, gap, length = _runs(out, stride, dilation)
    for m in range(first, last):
        mx = m if x.shape[0] > 1 else 0
        for o in range(outputs):
            start = (o // share) * depth
            for i in range(out.shape[2]):
                total = out[m, o, i].reshape(-1)
                total[:] = 0
                for c in range(depth):
                    for s in range(height):
                        line = x[mx, start + c, i * stride[0] + s * dilation[0]].reshape(-1)
                        _add_taps(total, w[m, o, c, s], line, step, gap, length)


@_compiled
def _runs(out, stride, dilation):
    """How a line of outputs is cut into runs along which inputs and outputs go side by side.

    Returns:
        How far the inputs of the next run are, those of the next tap, and the length of a run.
    """
    examples = out.shape[4]
    length = examples * out.shape[3] if stride[1] == 1 else examples
    return stride[1] * examples, dilation[1] * examples, length


@_compiled
def _add_taps(total, taps, line, step, gap, length):
    """Add the products of one line of a kernel; four at a time, for fewer reads of the total."""
    for run in range(total.shape[0] // length):
        row, at, t = total[run * length : (run + 1) * length], run * step, 0
        while t + 4 <= taps.shape[0]:
            w0, w1, w2, w3 = taps[t], taps[t + 1], taps[t + 2], taps[t + 3]
            x0, x1, x2, x3 = _four(line, at + t * gap, gap, length)
            for b in range(length):
                row[b] += w0 * x0[b] + w1 * x1[b] + w2 * x2[b] + w3 * x3[b]
            t += 4
        while t < taps.shape[0]:
            w0, x0 = taps[t], line[at + t * gap : at + t * gap + length]
            for b in range(length):
                row[b] += w0 * x0[b]
            t += 1


@_compiled
def _four(line, at, gap, length):
    return (
        line[at : at + length],
        line[at + gap : at + gap + length],
        line[at + 2 * gap : at + 2 * gap + length],
        line[at + 3 * gap : at + 3 * gap + length],
    )


@_compiled
def input_gradient(g, w, gx, stride, dilation, first, last):
    """What the gradient ``g`` of the outputs says about the inputs."""
    _, outputs, depth, height, _ = w.shape
    share = outputs // (gx.shape[1] // depth)
    step, gap, length = _runs(g, stride, dilation)
    for m in range(first, last):
        gx[m] = 0
        for o in range(outputs):
            start = (o // share) * depth
            for c in range(depth):
                for i in range(g.shape[2]):
                    row = g[m, o, i].reshape(-1)
                    for s in range(height):
                        line = gx[m, start + c, i * stride[0] + s * dilation[0]].reshape(-1)
                        _give_back(line, w[m, o, c, s], row, step, gap, length)


@_compiled
def _give_back(line, taps, row, step, gap, length):
    for run in range(row.shape[0] // length):
        g = row[run * length : (run + 1) * length]
        for t in range(taps.shape[0]):
            tap, at = taps[t], run * step + t * gap
            total = line[at : at + length]
            for b in range(length):
                total[b] += tap * g[b]


@_compiled
def weight_gradient(g, x, gw, stride, dilation, first, last):
    """What the gradient ``g`` of the outputs says about the weights."""
    _, outputs, depth, height, _ = gw.shape
    share = outputs // (x.shape[1] // depth)
    step, gap, length = _runs(g, stride, dilation)
    for m in range(first, last):
        gw[m] = 0
        mx = m if x.shape[0] > 1 else 0
        for o in range(outputs):
            start = (o // share) * depth
            for i in range(g.shape[2]):
                row = g[m, o, i].reshape(-1)
                for c in range(depth):
                    for s in range(height):
                        line = x[mx, start + c, i * stride[0] + s * dilation[0]].reshape(-1)
                        _add_dots(gw[m, o, c, s], row, line, step, gap, length)


@_compiled
def _add_dots(taps, row, line, step, gap, length):
    """Four gradients at a time, for fewer reads of the row."""
    for run in range(row.shape[0] // length):
        g, at, t = row[run * length : (run + 1) * length], run * step, 0
        while t + 4 <= taps.shape[0]:
            d0 = d1 = d2 = d3 = taps.dtype.type(0)
            x0, x1, x2, x3 = _four(line, at + t * gap, gap, length)
            for b in range(length):
                d0 += g[b] * x0[b]
                d1 += g[b] * x1[b]
                d2 += g[b] * x2[b]
                d3 += g[b] * x3[b]
            taps[t] += d0
            taps[t + 1] += d1
            taps[t + 2] += d2
            taps[t + 3] += d3
            t += 4
        while t < taps.shape[0]:
            d0, x0 = taps.dtype.type(0), line[at + t * gap : at + t * gap + length]
            for b in range(length):
                d0 += g[b] * x0[b]
            taps[t] += d0
            t += 1


@_compiled
def pool(x, out, index, size, stride, first, last):
    """The largest value of every window, and which of its places has it first."""
    for m in range(first, last):
        for c in range(out.shape[1]):
            for i in range(out.shape[2]):
                for j in range(out.shape[3]):
                    best, where = out[m, c, i, j], index[m, c, i, j]
                    best[:] = x[m, c, i * stride[0], j * stride[1]]
                    where[:] = 0
                    for p in range(size[0]):
                        for q in range(size[1]):
                            here = x[m, c, i * stride[0] + p, j * stride[1] + q]
                            place = np.int32(p * size[1] + q)
                            for b in range(here.shape[0]):
                                more = here[b] > best[b] or here[b] != here[b]
                                best[b] = here[b] if more else best[b]
                                where[b] = place if more else where[b]


@_compiled
def pool_gradient(g, index, gx, size, stride, first, last):
    """The gradient of every window goes to the place that had the largest value."""
    apart = stride[0] >= size[0] and stride[1] >= size[1]
    for m in range(first, last):
        gx[m] = 0
        for c in range(g.shape[1]):
            for i in range(g.shape[2]):
                for j in range(g.shape[3]):
                    for p in range(size[0]):
                        for q in range(size[1]):
                            there = gx[m, c, i * stride[0] + p, j * stride[1] + q]
                            place = np.int32(p * size[1] + q)
                            _route(there, g[m, c, i, j], index[m, c, i, j], place, apart)


@_compiled
def _route(there, row, where, place, apart):
    """To one place of a window; windows that overlap add."""
    if apart:
        for b in range(row.shape[0]):
            there[b] = row[b] if where[b] == place else 0
    else:
        for b in range(row.shape[0]):
            there[b] += row[b] if where[b] == place else 0
