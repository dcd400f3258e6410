"""The graphs of a network in evaluation and, where that can be traced, in training."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from lightning_bnn.symmetry.discovery.export import export
from lightning_bnn.symmetry.discovery.graph import Graph
from lightning_bnn.symmetry.forward import UnsupportedModel
from lightning_bnn.symmetry.inputs import Inputs, doubled

__all__ = ["Graphs", "trace_graphs"]


class Graphs(NamedTuple):
    """What a network computes in evaluation, and in training where that can be traced.

    Attributes:
        evaluation: the graph in evaluation mode.
        training: the graph in training mode; None where it cannot be traced.
        training_inputs: what the network was traced with in training.
        mutable: the buffers that a forward changes: they are state, as weights are.
        read: the buffers that results depend on, so that what is written there matters.
        evaluation_only: why symmetries hold in evaluation mode only; empty where they do not.
    """

    evaluation: Graph
    training: Graph | None
    training_inputs: Inputs
    mutable: frozenset[str]
    read: frozenset[str]
    evaluation_only: str


def trace_graphs(model: nn.Module, inputs: Inputs, batch_norm: str) -> Graphs:
    """Trace a network that is in evaluation mode, in both modes."""
    evaluation = export(model, inputs)
    training, used, reason = _training_graph(model, inputs)
    graphs = [graph for graph in (evaluation, training) if graph is not None]
    mutable = frozenset(name for graph in graphs for name, _ in graph.written)
    if training is None:  # then a training step may change any of them
        mutable |= {name for name, b in model.named_buffers() if b.is_floating_point()}
    if batch_norm == "eval" and any(map(_is_batch_norm, model.modules())):
        reason = reason or "batch norm counts as a fixed map"
    return Graphs(evaluation, training, used, mutable, _read_buffers(graphs), reason)


def _training_graph(model: nn.Module, inputs: Inputs) -> tuple[Graph | None, Inputs, str]:
    """The graph, the inputs that it was traced with, and why there is none."""
    reason = ""
    try:
        model.train()
        for tried in (inputs, doubled(inputs)):
            if tried is not None:
                try:
                    return export(model, tried), tried, ""
                except (UnsupportedModel, ValueError) as error:
                    reason = reason or f"training could not be traced: {error}"
    finally:
        model.eval()
    return None, inputs, reason


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _read_buffers(graphs: list[Graph]) -> frozenset[str]:
    """Those that results depend on, now or once another call has written what is read there."""
    read: set[str] = set().union(*(graph.buffers_behind(graph.results) for graph in graphs))
    while True:
        reached = set(read)
        for graph in graphs:
            reached |= graph.buffers_behind(node for name, node in graph.written if name in read)
        if reached == read:
            return frozenset(read)
        read = reached
