"""How recurrence and attention treat channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.arithmetic import softmax
from lightning_bnn.symmetry.rules.broadcasting import unify
from lightning_bnn.symmetry.rules.constraints import Constraints, Record, Rule
from lightning_bnn.symmetry.rules.contraction import contract
from lightning_bnn.symmetry.rules.labels import (
    Constant,
    Unsupported,
    Value,
    Weight,
    along,
    compress,
    shape_of,
)
from lightning_bnn.symmetry.rules.layer import write

__all__ = ["attention", "recurrent"]


# ------------------------------------------------------------ recurrence
def recurrent(
    gates_keep_sign: Sequence[bool], has_cell: bool = False, homogeneous: bool = False
) -> Rule:
    """LSTM, GRU and plain RNN: the hidden units of every layer and direction.

    Args:
        gates_keep_sign: for every gate, whether its sign is that of the hidden state (tanh gates).
        has_cell: whether there is a cell state beside the hidden one.
        homogeneous: whether scales pass instead of signs (ReLU).
    """

    def rule(
        system: Constraints, node: Node, x: Any, state: Any, weights: Sequence[Any], *args: Any
    ) -> Any:
        if not isinstance(args[0], bool) or not isinstance(x, Value):
            raise Unsupported("packed sequences")
        has_bias, layers, _, _, bidirectional, _ = args
        if not all(_is_zero(s) for s in (state if has_cell else [state])):
            raise Unsupported("an initial state that is not zero")
        directions = 2 if bidirectional else 1
        per_cell = 4 if has_bias else 2
        if len(weights) != per_cell * layers * directions:
            raise Unsupported("projected hidden states")
        incoming = system.collapse(x.labels, [x.labels.ndim - 1])
        hidden: list[Tensor] = []
        for layer in range(layers):
            for cell in range(layer * directions, (layer + 1) * directions):
                parts = weights[cell * per_cell : (cell + 1) * per_cell]
                hidden.append(_cell(system, incoming, parts, gates_keep_sign, homogeneous))
            incoming = torch.cat(hidden[-directions:])
        return _recurrent_outputs(node, incoming, hidden, 2 if has_cell else 1)

    return rule


def _is_zero(state: Any) -> bool:
    return isinstance(state, Constant) and not state.tensor.any()


def _cell(
    system: Constraints,
    incoming: Tensor,
    weights: Sequence[Weight],
    gates_keep_sign: Sequence[bool],
    homogeneous: bool,
) -> Tensor:
    """New hidden units, which a cell writes through its gates and reads at the next step."""
    hidden = system.fresh(weights[0].shape[0] // len(gates_keep_sign))
    system.freeze(hidden, ("sign",) if homogeneous else ("scale",))
    gates = [
        system.follow(hidden, ("scale", "sign") if keeps_sign else ("scale",))
        for keeps_sign in gates_keep_sign
    ]
    out = torch.cat(gates)
    for weight, columns in zip(weights[:2], (incoming, hidden), strict=True):
        write(system, out, columns, weight, None)
    for bias in weights[2:]:
        system.consume(bias, Record(0, out, "bias"))
    return hidden


def _recurrent_outputs(
    node: Node, last: Tensor, hidden: Sequence[Tensor], number_of_states: int
) -> Any:
    sequence, *states = node.meta["val"]
    units = torch.stack(list(hidden))
    return (
        Value(along(last, sequence.ndim - 1, sequence.shape)),
        *(
            Value(units.reshape(len(hidden), *[1] * (v.ndim - 2), -1).expand(v.shape))
            for v in states[:number_of_states]
        ),
    )


# ------------------------------------------------------------ attention
def attention(
    system: Constraints,
    node: Node,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *args: Any,
    enable_gqa: bool = False,
    **kwargs: Any,
) -> Value:
    """Dot-product attention: the scales of query and key cancel in each head; values pass."""
    q, k, v = (system.labels(t) for t in (query, key, value))
    if enable_gqa:
        k, v = (compress(t.repeat_interleave(q.shape[-3] // t.shape[-3], -3)) for t in (k, v))
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    tokens = (*batch, q.shape[-2], k.shape[-2])
    scores = Value(contract(system, q[..., :, None, :], k[..., None, :, :], [-1], tokens))
    if attn_mask is not None:
        scores = Value(unify(system, scores.labels, system.labels(attn_mask)))
    softmax(system, node, scores, -1)
    weighted = scores.labels[..., :, :, None], v[..., None, :, :]
    return Value(contract(system, *weighted, [-2], shape_of(node)))
