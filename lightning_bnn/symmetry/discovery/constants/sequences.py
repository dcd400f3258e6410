"""Recurrent layers: both biases of a gate are summed, and take up what is added to the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.discovery.constants.layers import written
from lightning_bnn.symmetry.discovery.constants.operands import Followed
from lightning_bnn.symmetry.rules.labels import Weight

__all__ = ["cell", "sequence"]


def sequence(one_gate_apart: bool = False) -> Callable[..., Any]:
    """All steps of all layers; ``one_gate_apart`` for GRUs."""

    def rule(
        followed: Followed,
        node: Node,
        x: Any,
        state: Any,
        weights: Sequence[Any],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        *args: Any,
    ) -> None:
        _see_state(followed, state)
        each = len(weights) // (layers * (1 + bidirectional))
        for k in range(layers * (1 + bidirectional)):
            own = weights[k * each : (k + 1) * each]
            biases = own[2:4] if has_biases else (None, None)
            _gates(followed, x if k <= bidirectional else None, own[:2], biases, one_gate_apart)
            for projection in own[2 + 2 * has_biases :]:
                followed.see(projection)

    return rule


def cell(one_gate_apart: bool = False) -> Callable[..., Any]:
    """One step of a recurrent cell."""

    def rule(
        followed: Followed,
        node: Node,
        x: Any,
        state: Any,
        w: Any,
        u: Any,
        b: Any = None,
        c: Any = None,
    ) -> None:
        _see_state(followed, state)
        _gates(followed, x, (w, u), (b, c), one_gate_apart)

    return rule


def _see_state(followed: Followed, state: Any) -> None:
    for s in state if isinstance(state, list | tuple) else [state]:
        followed.see(s)


def _gates(
    followed: Followed,
    x: Any,
    weights: Sequence[Any],
    biases: Sequence[Any],
    one_gate_apart: bool,
) -> None:
    """To what a gate sees nothing may be added in the end."""
    if not all(isinstance(w, Weight) for w in weights):
        for operand in (x, *weights, *biases):
            followed.see(operand)
        return
    size, columns = weights[0].shape
    inputs = [followed.row(followed.numbers(x), -1, columns)]
    inputs.append(torch.zeros(weights[1].shape[1], dtype=torch.long))
    first, second = (
        written(followed, row, w, b, size)
        for row, w, b in zip(inputs, weights, biases, strict=True)
    )
    if one_gate_apart:  # the candidate of a GRU multiplies one of its two by another gate
        last = size - size // 3
        _stop(followed, first[last:], second[last:])
        first, second = first[:last], second[:last]
    followed.system.stop(followed.system.combine([(first, 1), (second, 1)]))


def _stop(followed: Followed, *numbers: Tensor) -> None:
    for n in numbers:
        followed.system.stop(n)
