"""How attention treats channels: heads are blocks, and queries share the keys of their group."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from lightning_bnn.symmetry.rules.arithmetic import softmax
from lightning_bnn.symmetry.rules.broadcasting import unify
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.contraction import contract
from lightning_bnn.symmetry.rules.labels import Value, shape_of
from lightning_bnn.symmetry.rules.repetition import repeated

__all__ = ["attention"]


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
    of_query, of_key = (a.meta["val"].shape for a in node.args[:2] if isinstance(a, Node))
    if enable_gqa:
        groups = of_query[-3] // of_key[-3]
        k, v = (
            repeated(system, t.expand(*t.shape[:-3], of_key[-3], *t.shape[-2:]), t.ndim - 3, groups)
            for t in (k, v)
        )
    tokens = (*shape_of(node)[:-1], of_key[-2])
    scores = Value(contract(system, q[..., :, None, :], k[..., None, :, :], [-1], tokens))
    if attn_mask is not None:
        scores = Value(unify(system, scores.labels, system.labels(attn_mask)))
    softmax(system, node, scores, -1)
    weighted = scores.labels[..., :, :, None], v[..., None, :, :]
    out = contract(system, *weighted, [-2], shape_of(node))
    return Value(out)
