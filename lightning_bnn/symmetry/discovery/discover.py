"""`discover`: read the graph of a module, follow its channels, return the symmetries."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lightning_bnn.symmetry.discovery.export import (
    UnsupportedModel,
    buffers_behind,
    export,
    results_of,
    written_buffers,
)
from lightning_bnn.symmetry.discovery.interpreter import Tracer
from lightning_bnn.symmetry.discovery.refutation import refute
from lightning_bnn.symmetry.groups import Frozen, Symmetries
from lightning_bnn.symmetry.inputs import Inputs, check_filled, doubled, on_network
from lightning_bnn.symmetry.rules.elementwise import RULES, Rule
from lightning_bnn.symmetry.rules.layer import layer_rules
from lightning_bnn.symmetry.shared_tensors import named_tensors

__all__ = ["discover"]

_log = logging.getLogger(__name__)


def discover(
    model: nn.Module,
    *example: Any,
    batch_norm: Literal["carrier", "eval"] = "carrier",
    rules: Mapping[str, Rule] | None = None,
    **named: Any,
) -> Symmetries:
    """Find the permutations, positive scalings and sign flips of a network that keep its function.

    The graphs of the network, in evaluation and in training, are read from `torch.export`; every
    activation carries the labels of its channels, shape operations are executed on the labels, all
    others tie them, and connected channels form the groups. What is not understood is held fixed
    and listed in ``.frozen``. The result is checked numerically, at random weights, before it is
    returned; ``.unchecked`` says where that was not possible, ``.evaluation_only`` where the
    network could not be read in training.

    Args:
        model: any module; it is left untouched.
        *example: example inputs, as the module takes them; they are moved to its device and type.
        batch_norm: ``"carrier"`` keeps the weights before a batch norm and lets its gain carry the
            scale (exact in training and evaluation); ``"eval"`` treats batch norm as a fixed affine
            map (exact in evaluation only).
        rules: how to treat further operations, by name (``"mylib.op"``, ``"cumsum"``); see
            `lightning_bnn.symmetry.rules`.
        **named: example inputs by name, such as ``mask=mask``.

    Raises:
        UnsupportedModel: the network cannot be traced, or a rule given by ``rules`` breaks its
            function.
        ValueError: the example does not fit the network.
    """
    if batch_norm not in ("carrier", "eval"):
        raise ValueError(f"`batch_norm` must be 'carrier' or 'eval', got {batch_norm!r}.")
    _check_model(model)
    inputs = on_network(model, Inputs(example, named))
    check_filled(inputs)
    own = {_bare(name): rule for name, rule in (rules or {}).items()}
    was_training, drawn = [m for m in model.modules() if m.training], random.getstate()
    try:
        model.eval()
        graphs = _graphs(model, inputs, batch_norm)
        tracer = Tracer(
            model, {**RULES, **layer_rules(batch_norm), **own}, graphs.mutable, graphs.read
        )
        symmetries = replace(
            _read(tracer, graphs, batch_norm),
            batch_norm=batch_norm,
            evaluation_only=graphs.evaluation_only,
        )
        for name in own.keys() - tracer.operations:
            _log.warning("discover: the network has no operation %r; its rule is not used.", name)
        trains = None if graphs.evaluation_only else graphs.training_inputs
        symmetries = refute(model, symmetries, inputs, bool(rules), trains)
    finally:
        random.setstate(drawn)  # a forward may drop layers by it
        for module in was_training:
            module.training = True
    if symmetries.unchecked:
        _log.warning("discover: nothing was checked: %s.", symmetries.unchecked)
    return symmetries


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UnsupportedModel(f"{type(model).__name__} only wraps a network: pass `model.module`.")
    empty = [n for n, t in named_tensors(model) if t.device.type == "meta"]
    if empty:
        raise UnsupportedModel(
            f"{type(model).__name__} has no numbers in {empty[0]!r} (it is on the meta device), so "
            "that nothing can be checked: give it memory with `to_empty` and load its weights."
        )


def _bare(name: str) -> str:
    """``aten.relu.default`` is ``relu``, ``mylib.op.default`` is ``mylib.op``."""
    parts = name.replace("::", ".").split(".")
    return parts[1] if parts[0] == "aten" else ".".join(parts[:2])


# ------------------------------------------------------------ graphs
class _Graphs(NamedTuple):
    """What a network computes in evaluation, and in training where that can be traced."""

    evaluation: ExportedProgram
    training: ExportedProgram | None
    training_inputs: Inputs
    mutable: frozenset[str]
    read: frozenset[str]
    evaluation_only: str


def _graphs(model: nn.Module, inputs: Inputs, batch_norm: str) -> _Graphs:
    evaluation = export(model, inputs)
    training, used, reason = _training_graph(model, inputs)
    graphs = [graph for graph in (evaluation, training) if graph is not None]
    mutable = frozenset(name for graph in graphs for name, _ in written_buffers(graph))
    if training is None:  # then a training step may change any of them
        mutable |= {name for name, b in model.named_buffers() if b.is_floating_point()}
    if batch_norm == "eval" and any(map(_is_batch_norm, model.modules())):
        reason = reason or "batch norm counts as a fixed map"
    return _Graphs(evaluation, training, used, mutable, _read_buffers(graphs), reason)


def _read_buffers(graphs: Sequence[ExportedProgram]) -> frozenset[str]:
    """Those that results depend on, now or once another call has written what is read there."""
    read: set[str] = set().union(*(buffers_behind(g, results_of(g)) for g in graphs))
    while True:
        written = [(g, node) for g in graphs for name, node in written_buffers(g) if name in read]
        more = set().union(*(buffers_behind(g, [node]) for g, node in written)) - read
        if not more:
            return frozenset(read)
        read |= more


def _training_graph(model: nn.Module, inputs: Inputs) -> tuple[ExportedProgram | None, Inputs, str]:
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


def _read(tracer: Tracer, graphs: _Graphs, batch_norm: str) -> Symmetries:
    """Follow the channels; heads that only exist in training constrain what they read, too."""
    tracer.read(graphs.evaluation)
    unread = tracer.unread_parameters()
    if graphs.training is not None and (unread or not graphs.evaluation_only):
        if not _alike(graphs.evaluation, graphs.training):
            tracer.read(graphs.training)
    elif graphs.training is None:
        reason = "not used in evaluation; training could not be traced"
        tracer.frozen += [Frozen("parameter", name, "", reason) for name in unread]
    return tracer.result()


def _alike(a: ExportedProgram, b: ExportedProgram) -> bool:
    """Whether two graphs say the same, with the same literals."""
    if a.graph_module.code != b.graph_module.code or a.constants.keys() != b.constants.keys():
        return False
    return all(_same(x, b.constants[name]) for name, x in a.constants.items())


def _same(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y
