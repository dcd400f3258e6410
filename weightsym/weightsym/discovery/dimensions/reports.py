"""Reports of unsupported operations and their locations."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.fx import Node

from weightsym.discovery.dimensions.nodes import leaves_of, operation_of
from weightsym.groups.symmetries import Frozen
from weightsym.networks.forward import UnsupportedModel


def report(node: Node, reason: str) -> Frozen:
    """Return the location of an operation in the network and in the user's code."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = re.sub(r"@\d+$", "", stack[-1][0]) if stack else ""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    lines = [x for x in lines if "/torch/" not in x[0]] or lines
    line = f"{Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""
    return Frozen(operation_of(node), module, line, reason)


def check_sizes(node: Node) -> None:
    """Raise an error if a size depends on input values, so that channels cannot be counted."""
    values = leaves_of(node.meta.get("val"))
    numbers = [v for v in values if isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool)]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if numbers or any(isinstance(n, torch.SymInt) for t in tensors for n in t.shape):
        where = report(node, "")
        subject = "value" if numbers else "size"
        line = f" at {where.line}" if where.line else ""
        raise UnsupportedModel(
            f"The {subject} of the result of `{where.operation}`{line} depends on values in the "
            "input, so that channels cannot be followed. Pass the submodule that has no such step, "
            "with an input of its own."
        )
