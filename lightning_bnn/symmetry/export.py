"""From a module to a graph without side effects, or one clear error."""

from __future__ import annotations

import copy
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

__all__ = ["UnsupportedModel", "export", "operation_name", "skeleton"]

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
        own = {
            id(p): nn.Parameter(_cast(p, dtype), requires_grad=False) for p in model.parameters()
        }
        own |= {id(b): _cast(b, dtype).clone() for b in model.buffers()}
    for module in model.modules():  # a LightningModule in a run holds its Trainer, data included
        own |= {id(x): x for x in (vars(module).get("_trainer"), vars(module).get("_fabric"))}
    try:
        return copy.deepcopy(model, own)
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be copied: {_first_line(error)}. "
            "Remove the attribute that holds it, or pass the submodule that has none."
        ) from error


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()


def export(model: nn.Module, example: tuple[Any, ...]) -> ExportedProgram:
    """Trace a module into a graph in which no operation writes into a tensor that is read again."""
    failure: Exception | None = None
    for strict in (False, True):
        network = skeleton(model)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                program = torch.export.export(network, example, strict=strict)
                return program if _is_functional(program) else program.run_decompositions({})
        except Exception as error:  # torch.export raises many kinds: all become one clear message
            failure = failure or error
    assert failure is not None
    _check_forward(model, example)
    raise UnsupportedModel(_explain(model, failure)) from failure


def _is_functional(program: ExportedProgram) -> bool:
    """Whether every in-place write hits a tensor that is not read again under its old name."""
    order = {node: k for k, node in enumerate(program.graph.nodes)}
    for node in program.graph.nodes:
        if node.op != "call_function" or not _writes(node):
            continue
        target = node.args[0]
        if (
            not isinstance(target, Node)
            or target.op != "call_function"
            or operation_name(target) in _VIEWS
        ):
            return False
        users = [u for u in target.users if u is not node]
        if any(order[u] > order[node] or operation_name(u) in _VIEWS for u in users):
            return False
        if _writes(target) and len(target.users) > 1:
            return False
    return True


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _check_forward(model: nn.Module, example: tuple[Any, ...]) -> None:
    """Tell a network that cannot be traced from an example input that does not fit."""
    network = skeleton(model)
    try:
        with torch.no_grad():
            network(*example)
    except Exception as error:
        shapes = ", ".join(
            str(tuple(x.shape)) if isinstance(x, torch.Tensor) else repr(x) for x in example
        )
        raise ValueError(
            f"`example`: the network does not accept an input of shape {shapes}: "
            f"{_first_line(error)}"
        ) from error


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
