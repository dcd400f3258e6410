"""From a module to its graphs in evaluation and in training, without side effects."""

from __future__ import annotations

import functools
import io
import logging
import operator
import random
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from weightsym.discovery.cache import Dropout
from weightsym.discovery.dimensions.nodes import operation_of, writes
from weightsym.discovery.dimensions.reports import check_sizes
from weightsym.discovery.graph import Graph, RandomRun
from weightsym.discovery.random_weights import RandomWeights
from weightsym.networks.comparison import agree, tolerance_of
from weightsym.networks.forward import (
    Inputs,
    UnsupportedModel,
    as_real,
    called,
    check_forward,
    doubled,
    first_line,
    structural_copy,
    tensors_of,
)
from weightsym.params import Params

_OURS = str(Path(__file__).parents[1])
_OUTSIDE = ("/torch/", "/lightning/", "/lightning_bnn/", _OURS, "<frozen", "<string>", "<eval_with")
_DATA: Any = Tensor.data  # the descriptor
_DERIVATIVES = "it takes derivatives or transforms functions inside its forward."
_MEANINGS = {
    "We found a fake tensor": _DERIVATIVES,
    "no attribute 'constant'": _DERIVATIVES,
    "functorch tensor": _DERIVATIVES,
    "does not require grad and does not have a grad_fn": _DERIVATIVES,  # torch 2.6
    "data-dependent": (
        "an `if`, a loop or a size depends on numbers that are known only when it runs (choose "
        "between results by `torch.where`, which has no branches)."
    ),
    ".numpy() is not supported": "it leaves torch for NumPy inside of its forward.",
}
"""What the tracer says, and what it means where that names only its own parts."""


class Graphs(NamedTuple):
    """The graphs of a network in evaluation, and in training if that can be traced.

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

    @property
    def only_written(self) -> frozenset[str]:
        """The vector buffers that a forward changes without any effect on a result."""
        both = [graph for graph in (self.evaluation, self.training) if graph is not None]
        sources = [source for graph in both for source in graph.sources.values()]
        buffers = [s for s in sources if s.kind == "buffer" and s.persistent]
        rows = {s.name for s in buffers if s.tensor.ndim and s.tensor.is_floating_point()}
        written = {name for graph in both for name, _ in graph.written}
        return frozenset(written & rows) - self.read


def trace_graphs(
    model: nn.Module, inputs: Inputs, batch_norm: str, dropouts: Sequence[Dropout] | None = None
) -> Graphs:
    """Trace a network in both modes, or once if they are known to differ in dropouts alone.

    Args:
        model: the network.
        inputs: what it is traced with.
        batch_norm: as `discover` takes it.
        dropouts: those in training, if the network is known to do else the same in both modes.
    """
    evaluation = trace(model, inputs)
    training = None if dropouts is None else evaluation.with_dropouts(dropouts)
    used, reason = inputs, ""
    if training is None:
        training, used, reason = _training_graph(model, inputs)
    graphs = [graph for graph in (evaluation, training) if graph is not None]
    mutable = frozenset(name for graph in graphs for name, _ in graph.written)
    if training is None:  # then a training step may change any of them
        mutable |= {name for name, b in model.named_buffers() if b.is_floating_point()}
    if batch_norm == "eval" and any(map(_is_batch_norm, model.modules())):
        reason = reason or "batch norm counts as a fixed map"
    return Graphs(evaluation, training, used, mutable, _read_buffers(graphs), reason)


def _training_graph(model: nn.Module, inputs: Inputs) -> tuple[Graph | None, Inputs, str]:
    """Return the graph in training, its inputs, and the reason if it cannot be traced."""
    reason = ""
    try:
        model.train()
        for tried in (inputs, doubled(inputs)):
            if tried is not None:
                try:
                    return trace(model, tried), tried, ""
                except (UnsupportedModel, ValueError) as error:
                    reason = reason or f"training could not be traced: {error}"
    finally:
        model.eval()
    return None, inputs, reason


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _read_buffers(graphs: list[Graph]) -> frozenset[str]:
    """Return the buffers that results depend on, directly or through those of a later call."""
    buffers: set[str] = set().union(*(graph.buffers_behind(graph.results) for graph in graphs))
    while True:
        reached = set(buffers)
        for graph in graphs:
            reached |= graph.buffers_behind(node for name, node in graph.written if name in buffers)
        if reached == buffers:
            return frozenset(buffers)
        buffers = reached


# ------------------------------------------------------------ one graph
def trace(model: nn.Module, inputs: Inputs) -> Graph:
    """Trace a module into a graph without writes to tensors that are read again.

    Args:
        model: in the mode that is to be traced.
        inputs: what it is traced with.
    """
    measured = check_calls(model, inputs)
    failure: Exception | None = None
    detached = _DetachedData()
    for strict in (False, True):
        mode = nullcontext() if strict else detached
        network = _returning_tensors(structural_copy(model), mode)
        try:
            with _quiet(), torch.no_grad():
                program = torch.export.export(network, inputs.args, inputs.named, strict=strict)
                _inline(program.graph_module)
                if not _is_functional(program):
                    program = program.run_decompositions({})
                _drop_assertions(program.graph_module)
                for node in program.graph.nodes:
                    check_sizes(node)
        except Exception as error:  # torch.export raises many kinds: all become one clear message
            failure = failure or error
            if detached.assigned:  # the other tracer would not see that
                break
        else:
            return Graph(program, measured)
    assert failure is not None
    check_forward(model, inputs)
    if isinstance(failure, UnsupportedModel):
        raise failure
    raise UnsupportedModel(_explain(model, failure)) from failure


def _returning_tensors(network: nn.Module, mode: AbstractContextManager[Any]) -> nn.Module:
    """Return a network whose forward returns only tensors, which `torch.export` supports."""
    forward = network.forward

    @functools.wraps(forward)
    def tensors(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        with mode:
            return tuple(tensors_of(forward(*args, **kwargs)))

    network.forward = tensors
    return network


class _DetachedData(TorchFunctionMode):
    """Read `.data` as `detach()`, which is equivalent without gradients but visible to the tracer.

    Attributes:
        assigned: whether something was assigned to `.data`.
    """

    assigned = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function == _DATA.__get__:
            return args[0].detach()
        if function == _DATA.__set__:
            self.assigned = True
            raise RuntimeError(
                "it assigns to `.data` inside its forward (use a new tensor instead)."
            )
        return function(*args, **(kwargs or {}))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tracer's log: its failures are reported in one sentence."""
    loggers = [logging.getLogger(n) for n in ("torch.export", "torch._dynamo", "torch._subclasses")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


# ------------------------------------------------------------ parts under other settings
def _inline(module: GraphModule) -> None:
    """Inline operations under `autocast` or `enable_grad`, which change no unit."""
    for node in list(module.graph.nodes):
        if not getattr(node.target, "__name__", "").startswith("wrap_with_"):
            continue
        position = next(k for k, a in enumerate(node.args) if _is_module(module, a))
        inner = getattr(module, node.args[position].target)
        _inline(inner)
        places = [n for n in inner.graph.nodes if n.op == "placeholder"]
        copies = dict(zip(places, node.args[position + 1 :], strict=True))
        with module.graph.inserting_before(node):
            for inner_node in inner.graph.nodes:
                if inner_node.op in ("call_function", "get_attr"):
                    copies[inner_node] = module.graph.node_copy(inner_node, copies.__getitem__)
                if inner_node.op == "get_attr":
                    copies[inner_node].target = f"{node.args[position].target}_{inner_node.target}"
                    setattr(module, copies[inner_node].target, getattr(inner, inner_node.target))
        results = next(n for n in inner.graph.nodes if n.op == "output").args[0]
        for piece in list(node.users):  # it stays, since the signature knows it by its name
            piece.args = (copies[results[piece.args[1]]],)
            piece.target = torch.ops.aten.alias.default
        module.graph.erase_node(node)
        module.recompile()


def _drop_assertions(module: GraphModule) -> None:
    """Remove assertions, and operations that only these use."""
    used_by_assertions: set[Node] = set()
    for node in reversed(module.graph.nodes):
        name = operation_of(node) if node.op == "call_function" else ""
        is_left_over = node in used_by_assertions and name and not writes(node)
        if not node.users and (is_left_over or name.startswith(("_assert", "sym_constrain"))):
            used_by_assertions.update(node.all_input_nodes)
            module.graph.erase_node(node)
    if used_by_assertions:
        module.recompile()


def _is_module(module: GraphModule, x: Any) -> bool:
    is_attribute = isinstance(x, Node) and x.op == "get_attr"
    return is_attribute and isinstance(getattr(module, str(x.target)), GraphModule)


# ------------------------------------------------------------ in-place operations
def _is_functional(program: ExportedProgram) -> bool:
    """Return whether no in-place write modifies a tensor that is read again under its old name."""
    order = {node: k for k, node in enumerate(program.graph.nodes)}
    for node in filter(writes, program.graph.nodes):
        target = node.args[0]
        if not isinstance(target, Node) or _is_view(target):
            return False
        users = [u for u in target.users if u is not node]
        if any(order[u] > order[node] or _is_view(u) for u in users):
            return False
        if writes(target) and len(target.users) > 1:
            return False
    return True


def _is_view(node: Node) -> bool:
    """Return whether a node returns a view of an argument that it does not write."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or writes(node):
        return node.target is operator.getitem
    return any(result.alias_info is not None for result in schema.returns)


# ------------------------------------------------------------ messages
def _explain(model: nn.Module, failure: BaseException) -> str:
    line = _user_line(failure)
    location = f" at {line}" if line else ""
    return (
        f"{type(model).__name__} cannot be traced by torch.export{location}: {_reason(failure)} "
        "Pass the submodule whose forward has no such step (for example "
        "`discover(model.backbone, features)`) "
        "with an input of its own."
    )


def _reason(failure: BaseException) -> str:
    """Return the first line of the tracer's error, or an explanation of it."""
    message = first_line(failure)
    return next((meaning for phrase, meaning in _MEANINGS.items() if phrase in message), message)


def _user_line(failure: BaseException) -> str:
    """Return the last line of the user's code in a traceback, or in the tracer's message."""
    frames = traceback.extract_tb(failure.__traceback__)
    theirs = [f for f in frames if not any(folder in f.filename for folder in _OUTSIDE)]
    if theirs and theirs[-1].line:
        return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno} (`{theirs[-1].line.strip()}`)"
    for text in reversed(str(failure).splitlines()):
        if text.strip().startswith("File ") and not any(folder in text for folder in _OUTSIDE):
            return text.strip()
    return ""


# ------------------------------------------------------------ calls that remember others
_OF_EVERY_MODULE = vars(nn.Module()).keys()
_COMPARED = (Tensor, bool, int, float, str, type(None))


@torch.no_grad()
def check_calls(model: nn.Module, inputs: Inputs) -> RandomRun | None:
    """Call a copy of a network, and again if the first call has changed its attributes.

    Such attributes may hold what was computed once and for all; they are a state if they change
    what later calls return.

    Returns:
        What the first call returned, at random weights. None if it failed.

    Raises:
        UnsupportedModel: the forward returns no tensor, or depends on earlier calls.
    """
    network = structural_copy(model)
    before = _attributes(network)  # their tensors live on, so that no identity is used twice
    stamps = {key: list(map(_stamp, leaves)) for key, leaves in before.items()}
    try:
        weights = RandomWeights.of_unknown(model)
        returned = weights.returned(network, inputs)
    except Exception:  # the trace says what is wrong with it
        return None
    name = type(model).__name__
    if not tensors_of(returned):
        output = "None" if returned is None else f"a {type(returned).__name__} without a tensor"
        raise UnsupportedModel(
            f"The forward of {name} returns {output}, so that there is no output to preserve: "
            "return its outputs as tensors, or pass the submodule that does."
        )
    changed = [
        key
        for key, leaves in _attributes(network).items()
        if list(map(_stamp, leaves)) != stamps.get(key, [])
    ]
    if changed and not _repeats(model, inputs):
        raise UnsupportedModel(
            f"{name} keeps {', '.join(map(repr, changed))} from one call to the next, so that its "
            "outputs depend on earlier calls: store this state in buffers (`register_buffer`), "
            "or have the forward take and return it."
        )
    outputs = [as_real(t) for t in tensors_of(returned)]
    return RandomRun(weights.random, outputs)


def _attributes(network: nn.Module) -> dict[str, list[Any]]:
    """Collect tensors and plain values in module attributes other than parameters and buffers."""
    return {
        f"{name}.{key}".lstrip("."): [x for x in tree_leaves(value) if isinstance(x, _COMPARED)]
        for name, module in network.named_modules()
        for key, value in vars(module).items()
        if key not in _OF_EVERY_MODULE
    }


def _stamp(x: Any) -> Any:
    """Return a value that changes with the identity or the version of a tensor."""
    if isinstance(x, Tensor):
        return id(x), 0 if x.is_inference() else x._version
    return x


def _repeats(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether three calls of one copy at random weights have equal outputs."""
    network, params = structural_copy(model), RandomWeights.of_unknown(model).all()
    try:
        first, *others = [_call(network, params, inputs) for _ in range(3)]
    except Exception:  # what an earlier call has left does not fit
        return False
    tolerance = min(1e-4, tolerance_of(params))
    return all(agree(first, later, tolerance) for later in others)


def _call(network: nn.Module, params: Params, inputs: Inputs) -> list[Tensor]:
    state = random.getstate()
    try:
        returned = called(network, {name: t.clone() for name, t in params.items()}, inputs)
    finally:
        random.setstate(state)
    return [as_real(t).clone() for t in tensors_of(returned)]
