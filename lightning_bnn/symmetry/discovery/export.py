"""From a module to a graph without side effects, or one clear error."""

from __future__ import annotations

import copy
import functools
import io
import logging
import traceback
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from lightning_bnn.symmetry.inputs import Inputs, described, tensors_of
from lightning_bnn.symmetry.shared_tensors import named_tensors, place_of

__all__ = [
    "UnsupportedModel",
    "ancestors",
    "buffers_behind",
    "check_forward",
    "export",
    "operation_name",
    "results_of",
    "skeleton",
    "written_buffers",
]

_OUTSIDE = ("/torch/", "/lightning/", "/lightning_bnn/", "<frozen", "<string>", "<eval_with_key>")
_VIEWS = frozenset(
    (
        "view reshape permute transpose flatten unsqueeze squeeze select slice expand "
        "chunk split split_with_sizes unbind unflatten t numpy_T movedim narrow alias "
        "detach view_as expand_as mT swapaxes contiguous diagonal getitem to"
    ).split()
)


class UnsupportedModel(ValueError):
    """The network cannot be traced at all, or a symmetry found in it does not hold."""


def skeleton(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the module structure that shares the parameters: tracing leaves no mark.

    With ``dtype`` the copy holds its own parameters and buffers in that precision.
    """
    own: dict[int, Any] = {id(p): p for p in model.parameters()}
    if dtype is not None:
        own = _own_tensors(model, dtype)
    for module in model.modules():  # a LightningModule in a run holds its Trainer, data included
        own |= {id(x): x for x in (vars(module).get("_trainer"), vars(module).get("_fabric"))}
    try:
        return copy.deepcopy(model, own)
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be copied: {_first_line(error)}. "
            "Remove the attribute that holds it, or pass the submodule that has none."
        ) from error


def _own_tensors(model: nn.Module, dtype: torch.dtype) -> dict[int, Any]:
    """Parameters and buffers in a precision, by the identity of the old ones; ties stay ties."""
    cast: dict[Hashable, torch.Tensor] = {}
    own: dict[int, Any] = {}
    for _, old in named_tensors(model):
        place = place_of(old)
        if place not in cast:
            new = old.detach().to(dtype) if old.is_floating_point() else old.detach()
            trained = isinstance(old, nn.Parameter)
            cast[place] = nn.Parameter(new, requires_grad=False) if trained else new.clone()
        own[id(old)] = cast[place]
    return own


def export(model: nn.Module, inputs: Inputs) -> ExportedProgram:
    """Trace a module into a graph in which no operation writes into a tensor that is read again."""
    failure: Exception | None = None
    for strict in (False, True):
        network = _returning_tensors(skeleton(model))
        try:
            with _quiet(), torch.no_grad():
                program = torch.export.export(network, inputs.args, inputs.named, strict=strict)
                return program if _is_functional(program) else program.run_decompositions({})
        except Exception as error:  # torch.export raises many kinds: all become one clear message
            failure = failure or error
    assert failure is not None
    check_forward(model, inputs)
    raise UnsupportedModel(_explain(model, failure)) from failure


def _returning_tensors(network: nn.Module) -> nn.Module:
    """A network of ours whose outputs `torch.export` knows: the tensors in those of the forward."""
    forward = network.forward

    @functools.wraps(forward)
    def tensors(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensors_of(forward(*args, **kwargs)))

    network.forward = tensors
    return network


def _is_functional(program: ExportedProgram) -> bool:
    """Whether every in-place write hits a tensor that is not read again under its old name."""
    order = {node: k for k, node in enumerate(program.graph.nodes)}
    for node in program.graph.nodes:
        if node.op != "call_function" or not _writes(node):
            continue
        target = node.args[0]
        if not isinstance(target, Node) or operation_name(target) in _VIEWS:
            return False
        users = [u for u in target.users if u is not node]
        if any(order[u] > order[node] or operation_name(u) in _VIEWS for u in users):
            return False
        if _writes(target) and len(target.users) > 1:
            return False
    return True


def written_buffers(program: ExportedProgram) -> list[tuple[str, Node]]:
    """The buffers that a graph changes, and what it writes into them."""
    signature = program.graph_signature
    found = []
    for node in program.graph.nodes:
        name = signature.buffers_to_mutate.get(node.name)
        if node.op == "call_function" and _writes(node):
            name = signature.inputs_to_buffers.get(_target(node).name, name)
        if name is not None:
            found.append((name, node))
    return found


def buffers_behind(program: ExportedProgram, nodes: list[Node]) -> set[str]:
    """Names of the buffers that some nodes depend on."""
    names = program.graph_signature.inputs_to_buffers
    return {names[n.name] for n in ancestors(nodes) if n.op == "placeholder" and n.name in names}


def _target(node: Node) -> Node:
    """The tensor that a chain of in-place operations writes."""
    while node.op == "call_function" and _writes(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def check_forward(model: nn.Module, inputs: Inputs) -> None:
    """Tell a network that cannot be traced from an example input that does not fit."""
    network = skeleton(model)
    try:
        with torch.no_grad():
            network(*inputs.args, **inputs.named)
    except Exception as error:
        if isinstance(error, NotImplementedError) and "forward" in str(error):
            raise ValueError(
                f"`model`: {type(model).__name__} has no forward; pass the submodule that has one, "
                "such as `module.net`."
            ) from error
        what = _first_line(error) if isinstance(error, RuntimeError | ValueError) else repr(error)
        raise ValueError(
            f"`example`: the network does not accept {described(inputs)}: {what}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tracer's own log to itself: its failures end in one sentence of ours."""
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _explain(model: nn.Module, failure: BaseException) -> str:
    line = _user_line(failure)
    at = f" at {line}" if line else ""
    return (
        f"{type(model).__name__} cannot be traced by torch.export{at}: {_first_line(failure)} "
        "Pass the submodule whose forward has no such step (for example "
        "`discover(model.backbone, features)`) "
        "with an input of its own."
    )


def _user_line(failure: BaseException) -> str:
    frames = traceback.extract_tb(failure.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _OUTSIDE)]
    if own and own[-1].line:
        return f"{Path(own[-1].filename).name}:{own[-1].lineno} (`{own[-1].line.strip()}`)"
    for text in reversed(str(failure).splitlines()):
        if text.strip().startswith("File ") and not any(part in text for part in _OUTSIDE):
            return text.strip()
    return ""


def operation_name(node: Node) -> str:
    """The bare name of the operation a node calls; operations outside aten keep their namespace."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    namespace, name = schema.name.split("::")
    return str(name if namespace == "aten" else f"{namespace}.{name}")


def results_of(program: ExportedProgram) -> list[Node]:
    """The nodes that the network returns, without the buffers it updates."""
    names = set(program.graph_signature.user_outputs)
    output = next(n for n in program.graph.nodes if n.op == "output")
    return [
        n
        for n in dict.fromkeys(tree_leaves(output.args))
        if isinstance(n, Node) and n.name in names
    ]


def ancestors(nodes: list[Node]) -> set[Node]:
    """Everything the results depend on: dead code must not constrain a channel."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
