"""How recurrence and attention treat channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.broadcasting import multiply_labels, unify
from lightning_bnn.symmetry.rules.constraints import Constraints, Record, Rule
from lightning_bnn.symmetry.rules.elementwise import nonlinear, softmax
from lightning_bnn.symmetry.rules.labels import (
    Constant,
    Unsupported,
    Value,
    Weight,
    along,
    compress,
    varies,
)
from lightning_bnn.symmetry.rules.reduction import reduce_channels

__all__ = ["SEQUENCE_RULES", "contract"]


def contract(
    system: Constraints, a: Tensor, b: Tensor, dims: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Element-wise product, then a sum: the blocks are what both operands share."""
    product = compress(multiply_labels(system, a, b))
    dims = [d % product.ndim for d in dims]
    moving = [d for d in dims if varies(product)[d]]
    if moving:
        product = reduce_channels(system, product, moving, "passes")
    for d in sorted(dims, reverse=True):
        product = product.select(d, 0)
    return product.expand(tuple(shape))


# ------------------------------------------------------------ recurrence
def recurrent(
    gates: int, new_gates: tuple[int, ...], cell: bool, homogeneous: bool = False
) -> Rule:
    """LSTM (4 gates), GRU (3) and plain RNN (1): the hidden units of every layer and direction.

    ``new_gates`` are those whose sign is the sign of the hidden state (the tanh gate).
    """

    def rule(
        system: Constraints, node: Node, x: Any, state: Any, weights: Sequence[Any], *args: Any
    ) -> Any:
        if not isinstance(args[0], bool) or not isinstance(x, Value):
            raise Unsupported("packed sequences")
        has_bias, layers, _, _, bidirectional, batch_first = args
        del batch_first
        states = state if cell else [state]
        if not all(isinstance(s, Constant) and not s.tensor.any() for s in states):
            raise Unsupported("an initial state that is not zero")
        directions = 2 if bidirectional else 1
        per_cell = len(weights) // (layers * directions)
        if per_cell != (4 if has_bias else 2):
            raise Unsupported("projected hidden states")
        incoming = system.collapse(x.labels, [x.labels.ndim - 1])
        hidden: list[Tensor] = []
        for layer in range(layers):
            found = []
            for direction in range(directions):
                start = (layer * directions + direction) * per_cell
                found.append(
                    _cell(
                        system,
                        incoming,
                        weights[start : start + per_cell],
                        gates,
                        new_gates,
                        homogeneous,
                    )
                )
            hidden += found
            incoming = torch.cat(found)
        return _recurrent_outputs(node, incoming, hidden, cell)

    return rule


def _cell(
    system: Constraints,
    incoming: Tensor,
    weights: Sequence[Weight],
    gates: int,
    new_gates: tuple[int, ...],
    scale: bool,
) -> Tensor:
    units = weights[0].shape[0] // gates
    hidden = system.fresh(units)
    if not scale:
        system.freeze(hidden, ("scale",))
    else:
        system.freeze(hidden, ("sign",))
    rows = []
    for gate in range(gates):
        channels = system.fresh(units)
        system.tie(channels, hidden, ("permutation", "scale"))
        if gate in new_gates:
            system.tie(channels, hidden, ("sign",))
        else:
            system.freeze(channels, ("sign",))
        rows.append(channels)
    out = torch.cat(rows).numpy()
    for weight, columns in zip(weights[:2], (incoming, hidden), strict=True):
        system.consume(weight, Record(0, out, "out", 1, 1), Record(1, columns.numpy(), "in", -1, 1))
    for bias in weights[2:]:
        system.consume(bias, Record(0, out, "bias", 1, 1))
    return hidden


def _recurrent_outputs(node: Node, last: Tensor, hidden: Sequence[Tensor], cell: bool) -> Any:
    values = node.meta["val"]
    sequence = Value(along(last, values[0].ndim - 1, values[0].shape))
    states = torch.stack(list(hidden))
    shaped = [
        Value(states.reshape(len(hidden), *[1] * (v.ndim - 2), -1).expand(v.shape))
        for v in values[1 : 3 if cell else 2]
    ]
    return (sequence, *shaped)


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
    """Dot-product attention: query and key meet per head, their scales cancel; values pass."""
    q, k, v = (system.labels(t) for t in (query, key, value))
    if enable_gqa:
        k, v = (compress(t.repeat_interleave(q.shape[-3] // t.shape[-3], -3)) for t in (k, v))
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    tokens = (*batch, q.shape[-2], k.shape[-2])
    scores = Value(contract(system, q[..., :, None, :], k[..., None, :, :], [-1], tokens))
    if attn_mask is not None:
        scores = Value(unify(system, [scores.labels, system.labels(attn_mask)]))
    nonlinear(system, node, scores)
    softmax(system, node, scores, -1)
    shape = node.meta["val"].shape
    return Value(contract(system, scores.labels[..., :, :, None], v[..., None, :, :], [-2], shape))


SEQUENCE_RULES: dict[str, Rule] = {
    "lstm": recurrent(4, (2,), cell=True),
    "gru": recurrent(3, (2,), cell=False),
    "rnn_tanh": recurrent(1, (0,), cell=False),
    "rnn_relu": recurrent(1, (0,), cell=False, homogeneous=True),
    "scaled_dot_product_attention": attention,
}
