"""The example for reading a network: two rows of a batch, and at least two tokens.

Two rows show as much of a network as many do. One token shows neither what a softmax forgets nor
positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from weightsym.discovery.cache import Dropout
from weightsym.discovery.dimensions.nodes import operation_of
from weightsym.discovery.export import Graphs, trace_graphs
from weightsym.discovery.graph import Graph
from weightsym.discovery.random_weights import RandomWeights
from weightsym.networks.comparison import agree, tolerance_of
from weightsym.networks.forward import Inputs, UnsupportedModel, outputs, structural_copy

_MOST_TIMES = 64
_PLAIN = (Tensor, bool, int, float, str, type(None))


# ------------------------------------------------------------ rows
@torch.no_grad()
def two_rows(model: nn.Module, inputs: Inputs) -> Inputs:
    """Return the first two rows of a batch, or the example itself if it may not be a batch.

    At random weights, the outputs of two rows must be those rows of all outputs: of the first two,
    and of the last before the first, which would be another beginning of a sequence.

    Args:
        model: the network, in evaluation mode.
        inputs: the example.
    """
    try:
        rows = _rows_of(inputs)
        if rows <= 2:
            return inputs
        return _separate_rows(model, inputs, rows)
    except Exception:  # whatever a network says of two rows, or of an example that does not fit
        return inputs


def _rows_of(inputs: Inputs) -> int:
    """Return the number of rows that all tensors share, or 0 if they differ or may not be rows.

    A tensor of floats with equal rows does not show whether rows depend on each other.
    """
    leaves = tree_leaves(inputs)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    sizes = {x.shape[:1] for x in tensors}
    if len(sizes) != 1 or not all(isinstance(x, _PLAIN) for x in leaves):
        return 0
    rows = min(len(x) if x.ndim else 0 for x in tensors)
    if rows > 2:
        floats = [x for x in tensors if x.is_floating_point()] or tensors
        if any(torch.equal(x[0], x[k]) for x in floats for k in (1, -1)):
            return 0
    return rows


def _separate_rows(model: nn.Module, inputs: Inputs, rows: int) -> Inputs:
    params = RandomWeights.of_unknown(model).all()
    tolerance = min(1e-4, tolerance_of(params))
    whole = outputs(model, params, inputs)
    for chosen in ([rows - 1, 0], [0, 1]):
        pair = _chosen_rows(inputs, chosen)
        expected = [t[chosen] for t in whole if t.shape[:1] == (rows,)]
        same = agree(expected, outputs(model, params, pair), tolerance)
        if not (same and len(expected) == len(whole)):
            return inputs
    return pair


def _chosen_rows(inputs: Inputs, rows: list[int]) -> Inputs:
    pair: Inputs = tree_map(lambda x: x[rows] if isinstance(x, Tensor) else x, inputs)
    return pair


# ------------------------------------------------------------ tokens
def trace_with_two_tokens(
    model: nn.Module,
    inputs: Inputs,
    batch_norm: str,
    dropouts: Sequence[Dropout] | None = None,
) -> tuple[Graphs, Inputs]:
    """Return the graphs of a network and the example with which they were traced.

    That is a longer one where a softmax runs over a single key of the one that was given, and the
    network takes another token, or a signal of twice the length, or where two steps need more
    operations than one; and one of more rows where fewer tokens choose than there is to choose
    from.

    Args:
        model: the network, in evaluation mode.
        inputs: the example.
        batch_norm: as `discover` takes it.
        dropouts: those in training, if the network is known to do else the same in both modes.
    """
    graphs = trace_graphs(model, inputs, batch_norm, dropouts)
    times = _tokens_for_choices(graphs.evaluation)
    if times > 1:
        more = _repeated(inputs, times)
        if _runs(model, more):
            graphs, inputs = trace_graphs(model, more, batch_norm), more
    if forgets(graphs.evaluation):
        for others, longer in longer_graphs(model, inputs, batch_norm):
            if not forgets(others.evaluation):
                return others, longer
    for others, longer in longer_graphs(model, inputs, batch_norm, is_single=True):
        if len(others.evaluation.module.graph.nodes) > len(graphs.evaluation.module.graph.nodes):
            return others, longer
    return graphs, inputs


def longer_graphs(
    model: nn.Module, inputs: Inputs, batch_norm: str, is_single: bool = False
) -> Iterator[tuple[Graphs, Inputs]]:
    """Yield the graphs of a network for longer examples that it accepts, with these examples.

    Of two steps, or rows of a sequence, in the place of one if the example ``is_single``.
    """
    for longer in _lengthened(inputs, is_single):
        if _runs(model, longer):
            with suppress(UnsupportedModel, ValueError):
                yield trace_graphs(model, longer, batch_norm), longer


def _tokens_for_choices(graph: Graph) -> int:
    """Return how often to repeat an example so that there are more tokens than choices."""
    times = 1
    for node in graph.module.graph.nodes:
        name = operation_of(node) if node.op == "call_function" else ""
        if name in ("topk", "argmax", "argmin", "sort", "argsort", "max", "min"):
            numbers, position = node.args[0].meta["val"], 2 if name == "topk" else 1
            d = node.args[position] if len(node.args) > position else node.kwargs.get("dim", -1)
            if isinstance(d, int) and numbers.ndim and numbers.numel():
                needed = 2 * numbers.shape[d] ** 2 // numbers.numel() + 1
                times = max(times, needed if needed <= _MOST_TIMES else 1)
    return times


def _repeated(inputs: Inputs, times: int) -> Inputs:
    """Append different rows to an example."""

    def repeat(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        rows = [x]
        for _ in range(times - 1):
            rows.append(_another(rows[-1]))
        return torch.cat(rows)

    more: Inputs = tree_map(repeat, inputs)
    return more


def forgets(graph: Graph | None) -> bool:
    """Return whether a softmax runs over a single element, so that its result is always one."""
    for node in () if graph is None else graph.module.graph.nodes:
        name = operation_of(node) if node.op == "call_function" else ""
        if name in ("softmax", "_softmax"):
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
            if isinstance(dim, int) and node.meta["val"].ndim and node.meta["val"].shape[dim] == 1:
                return True
        if name == "scaled_dot_product_attention" and node.args[1].meta["val"].shape[-2] == 1:
            return True
    return False


def _lengthened(inputs: Inputs, is_single: bool) -> Iterator[Inputs]:
    """Yield examples of twice the length along each dimension in turn, size one first."""
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    longer = dict.fromkeys((d, t.shape[d]) for t in tensors for d in range(1, t.ndim))
    sizes = [(1, 1), (0, 1), (2, 1), *(pair for pair in longer if pair[1] > 1)]
    if is_single:
        may_be_steps = all(t.ndim == 3 for t in tensors)  # else the first dimension is the batch
        sizes = [(1, 1), *([(0, 1)] if may_be_steps else []), (2, 1)]
    for dim, size in sizes:
        chosen = [t for t in tensors if t.ndim > dim and t.shape[dim] == size]
        if any(not torch.equal(t, _another(t)) for t in chosen):
            yield tree_map(lambda x, dim=dim, size=size: _twice(x, dim, size), inputs)


def _twice(x: Any, dim: int, size: int) -> Any:
    if not isinstance(x, Tensor) or x.ndim <= dim or x.shape[dim] != size:
        return x
    return torch.cat([x, _another(x)], dim)


def _another(token: Tensor) -> Tensor:
    """Return different values of the same type. Masks of ones and zeros are unchanged."""
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
