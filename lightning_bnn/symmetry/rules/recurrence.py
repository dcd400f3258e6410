"""How recurrence treats channels: the hidden units of cells, from their first state on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import unify
from lightning_bnn.symmetry.rules.constraints import Constraints, Record
from lightning_bnn.symmetry.rules.labels import Unsupported, Value, Weight, along, shape_of
from lightning_bnn.symmetry.rules.layer import write

__all__ = ["GRU", "LSTM", "RELU_RNN", "TANH_RNN", "Recurrence"]


@dataclass(frozen=True)
class Recurrence:
    """A kind of recurrence, as rules for sequences and for single steps.

    Attributes:
        gates_keep_sign: for every gate, whether its sign is that of the hidden state (tanh gates).
        states: one, or two where there is a cell state beside the hidden one.
        homogeneous: whether scales pass instead of signs (ReLU).
        mixes: whether the new state is a mean that the old one is part of.
    """

    gates_keep_sign: tuple[bool, ...]
    states: int = 1
    homogeneous: bool = False
    mixes: bool = True

    def sequence(
        self, system: Constraints, node: Node, x: Any, state: Any, weights: Any, *args: Any
    ) -> Any:
        """All steps of all layers and directions."""
        if not isinstance(args[0], bool) or not isinstance(x, Value):
            raise Unsupported("packed sequences")
        has_bias, layers, _, _, bidirectional, _ = args
        first = list(state) if self.states > 1 else [state]
        cells = layers * (2 if bidirectional else 1)
        per_cell = len(weights) // cells
        has_projection = per_cell == (5 if has_bias else 3)
        incoming = system.collapse(x.labels, [x.labels.ndim - 1])
        hidden: list[Tensor] = []
        units: list[Tensor] = []
        for cell in range(cells):
            parts = weights[cell * per_cell : (cell + 1) * per_cell]
            new = self._units(system, parts[0])
            out = _projected(system, new, parts[-1]) if has_projection else new
            for old, labels in zip(first, (out, new), strict=False):
                unify(system, labels, _channels(system, old, cell))
            self._write(system, new, (incoming, out), parts[: per_cell - has_projection])
            hidden.append(out)
            units.append(new)
            if (cell + 1) % (cells // layers) == 0:
                incoming = torch.cat(hidden[-(cells // layers) :])
        return _outputs(node, incoming, [hidden, units][: self.states])

    def step(self, system: Constraints, node: Node, x: Any, state: Any, *weights: Any) -> Any:
        """One step of one cell."""
        states = list(state) if self.states > 1 else [state]
        new = self._units(system, weights[0])
        read = _channels(system, states[0])
        if self.mixes:
            unify(system, new, _channels(system, states[-1]))
        if read.shape != new.shape:  # one number everywhere
            read = _of_one_size(system, read, len(new))
        labels = system.labels(x)
        incoming = system.collapse(labels, [labels.ndim - 1])
        self._write(system, new, (incoming, read), [w for w in weights if w is not None])
        if self.states == 1:
            return Value(along(new, len(shape_of(node)) - 1, shape_of(node)))
        shapes = [v.shape for v in node.meta["val"]]
        return tuple(Value(along(new, len(shape) - 1, shape)) for shape in shapes)

    def _units(self, system: Constraints, weight: Weight) -> Tensor:
        new = system.fresh(weight.shape[0] // len(self.gates_keep_sign))
        system.freeze(new, ("sign",) if self.homogeneous else ("scale",))
        system.mark(new, "diagonal")
        return new

    def _write(
        self,
        system: Constraints,
        units: Tensor,
        read: tuple[Tensor, Tensor],
        weights: Sequence[Weight],
    ) -> None:
        """The gates of units, written from the input and from the state before."""
        gates = [
            system.follow(units, ("scale", "sign") if keeps_sign else ("scale",))
            for keeps_sign in self.gates_keep_sign
        ]
        out = torch.cat(gates)
        for weight, columns in zip(weights[:2], read, strict=True):
            write(system, out, columns, weight, None)
        for bias in weights[2:]:
            system.consume(bias, Record(0, out, "bias"))


def _projected(system: Constraints, units: Tensor, weight: Weight) -> Tensor:
    """What is read of the units in place of themselves: linear maps of them."""
    out = system.fresh(weight.shape[0])
    write(system, out, units, weight, None)
    return out


def _channels(system: Constraints, state: Any, cell: int | None = None) -> Tensor:
    """The channels of a state, of one cell; one of them where all numbers are the same."""
    labels = system.labels(state)
    if cell is not None:
        labels = labels.select(0, cell if labels.shape[0] > 1 else 0)
    return system.collapse(labels, [labels.ndim - 1])


def _of_one_size(system: Constraints, read: Tensor, count: int) -> Tensor:
    if bool((read < 0).all()):
        return read.expand(count)
    same = system.fresh(count)
    system.freeze(same, ("scale", "sign"))
    return same


def _outputs(node: Node, last: Tensor, states: Sequence[Sequence[Tensor]]) -> Any:
    sequence, *shapes = (v.shape for v in node.meta["val"])
    result = [Value(along(last, len(sequence) - 1, sequence))]
    for units, shape in zip(states, shapes, strict=False):
        labels = torch.stack(list(units)).reshape(len(units), *[1] * (len(shape) - 2), -1)
        result.append(Value(labels.expand(shape)))
    return tuple(result)


LSTM = Recurrence((False, False, True, False), states=2)
GRU = Recurrence((False, False, True))
TANH_RNN = Recurrence((True,), mixes=False)
RELU_RNN = Recurrence((True,), homogeneous=True, mixes=False)
