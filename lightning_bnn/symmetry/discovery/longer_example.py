"""An example of one token shows neither what a softmax forgets nor positions: give it two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.symmetry.discovery.export import Graphs, trace_graphs
from lightning_bnn.symmetry.discovery.graph import Graph
from lightning_bnn.symmetry.forward import Inputs, UnsupportedModel, structural_copy
from lightning_bnn.symmetry.rules.labels import operation_name

__all__ = ["forgets", "trace_with_two_tokens"]


def trace_with_two_tokens(
    model: nn.Module, inputs: Inputs, batch_norm: str
) -> tuple[Graphs, Inputs]:
    """The graphs of a network, and the example that they were traced with.

    That is a longer one where a softmax runs over a single key of the one that was given, and the
    network takes another token, or a signal of twice the length.
    """
    graphs = trace_graphs(model, inputs, batch_norm)
    if forgets(graphs.evaluation):
        for longer in _lengthened(inputs):
            if _runs(model, longer):
                try:
                    others = trace_graphs(model, longer, batch_norm)
                except (UnsupportedModel, ValueError):
                    continue
                if not forgets(others.evaluation):
                    return others, longer
    return graphs, inputs


def forgets(graph: Graph | None) -> bool:
    """Whether a softmax runs over a single element, which becomes one whatever it was."""
    for node in () if graph is None else graph.module.graph.nodes:
        name = operation_name(node) if node.op == "call_function" else ""
        if name in ("softmax", "_softmax"):
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
            if isinstance(dim, int) and node.meta["val"].ndim and node.meta["val"].shape[dim] == 1:
                return True
        if name == "scaled_dot_product_attention" and node.args[1].meta["val"].shape[-2] == 1:
            return True
    return False


def _lengthened(inputs: Inputs) -> Iterator[Inputs]:
    """Examples of twice the length along one dimension after the other, first of size one."""
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    longer = dict.fromkeys((d, t.shape[d]) for t in tensors for d in range(1, t.ndim))
    sizes = [(1, 1), (0, 1), (2, 1), *(pair for pair in longer if pair[1] > 1)]
    for dim, size in sizes:
        chosen = [t for t in tensors if t.ndim > dim and t.shape[dim] == size]
        if any(not torch.equal(t, _another(t)) for t in chosen):
            yield tree_map(lambda x, dim=dim, size=size: _twice(x, dim, size), inputs)


def _twice(x: Any, dim: int, size: int) -> Any:
    if not isinstance(x, Tensor) or x.ndim <= dim or x.shape[dim] != size:
        return x
    return torch.cat([x, _another(x)], dim)


def _another(token: Tensor) -> Tensor:
    """Other numbers of the same kind; masks of ones and zeros stay what they are."""
    if token.is_floating_point() or token.is_complex():
        return token.flip(-1) - 0.5 * token.roll(1) + 0.1
    if token.dtype == torch.bool or bool(((token == 0) | (token == 1)).all()):
        return token
    return torch.where(token > 0, token - 1, token + 1)


def _runs(model: nn.Module, inputs: Inputs) -> bool:
    try:
        with torch.no_grad():
            structural_copy(model)(*inputs.args, **inputs.named)
    except Exception:  # whatever a network says of an input that does not fit
        return False
    return True
