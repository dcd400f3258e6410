"""Linear layers: they read constants, and their biases take them up."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.discovery.constants.expressions import NOTHING, Ints
from lightning_bnn.symmetry.discovery.constants.operands import (
    Added,
    Followed,
    Read,
    Unbiased,
    size_of,
)
from lightning_bnn.symmetry.rules.labels import (
    Unsupported,
    Weight,
    along,
    core,
    moving_dims,
    narrow_except,
    operation_name,
    shape_of,
)
from lightning_bnn.symmetry.rules.table import UNIFORM

__all__ = ["addmm", "convolution", "embedding", "layer", "linear", "with_bias", "written"]


def linear(followed: Followed, node: Node, x: Any, weight: Any, bias: Any = None) -> Added | None:
    """A matrix that is multiplied from the right, transposed."""
    size = size_of(node.args[0])[-1]
    row = followed.row(followed.numbers(x), -1, size)
    return layer(followed, node, row, weight, bias)


def addmm(
    followed: Followed, node: Node, bias: Any, x: Any, weight: Any, *args: Any, **kwargs: Any
) -> Added | None:
    """``bias + x @ weight``, where neither is multiplied by a number."""
    row = followed.row(followed.numbers(x), -1, size_of(node.args[1])[-1])
    if any(v != 1 for v in kwargs.values()):
        raise Unsupported("a multiple of a bias")
    return layer(followed, node, row, weight, bias, out_dim=1)


def convolution(
    followed: Followed,
    node: Node,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Added | None:
    """Zeros at the border are not shifted."""
    row = followed.row(followed.numbers(x), 1, size_of(node.args[0])[1])
    pads = padding != "valid" if isinstance(padding, str) else bool(np.any(padding))
    if pads:
        followed.system.stop(row)
    return layer(followed, node, row, weight, bias, groups=groups, dim=1)


def layer(
    followed: Followed,
    node: Node,
    row: Tensor,
    weight: Any,
    bias: Any,
    out_dim: int = 0,
    groups: int = 1,
    dim: int = -1,
) -> Added | None:
    """What a weight and a bias write along one dimension.

    Args:
        followed: what is stated so far.
        node: of the layer, or of the sum with its bias.
        row: what may be added to the incoming channels.
        weight: of the layer.
        bias: of the layer.
        out_dim: the dimension of the weight that writes.
        groups: of a convolution.
        dim: the dimension of the output that is written.
    """
    shape = shape_of(node)
    sole = isinstance(bias, Weight) or _is_used_once(node)
    numbers = written(followed, row, weight, bias, shape[dim], out_dim, groups, sole)
    return followed.added(along(numbers, dim % len(shape), shape))


def written(
    followed: Followed,
    row: Tensor,
    weight: Any,
    bias: Any,
    size: int,
    out_dim: int = 0,
    groups: int = 1,
    sole: bool = True,
) -> Tensor:
    """What may be added to the channels that a weight and a bias write.

    Args:
        followed: what is stated so far.
        row: what may be added to the incoming channels.
        weight: of the layer.
        bias: of the layer.
        size: how many channels are written.
        out_dim: the dimension of the weight that writes.
        groups: of a convolution.
        sole: whether a computed bias is used for nothing else.
    """
    place, name = None, "a computed weight"
    if isinstance(weight, Weight):
        followed.use(weight.name, "weight")
        place, name = _place(weight, out_dim, groups), weight.name
    else:
        followed.see(weight)
    taken_up = _of_bias(followed, bias, name, size, sole)
    row = followed.row(row, 0, len(row))
    if place is None:
        followed.system.stop(row)
        return taken_up
    followed.reads.append((Read(name, *place, row), taken_up))
    silent = taken_up == NOTHING
    if not bool(silent.any()) or not bool((row != NOTHING).any()):
        return taken_up
    made = followed.system.fresh(int(silent.sum()))
    followed.silent.append((row[row != NOTHING], made))
    return taken_up.masked_scatter(silent, made)


def _of_bias(followed: Followed, bias: Any, weight: str, size: int, sole: bool) -> Tensor:
    """By row of a layer, the unknown of the bias that takes up what is added to its inputs."""
    if isinstance(bias, Weight):  # whatever may be added to what is written, it takes up
        return followed.elements_of(bias, f"bias of {weight}").reshape(-1).expand(size)
    numbers = torch.zeros(size, dtype=torch.long)
    if isinstance(bias, Added) and len(moving_dims(bias.numbers)) < 2 and sole:
        numbers = core(bias.numbers).reshape(-1).expand(size).contiguous()
        single = torch.from_numpy(followed.system.is_unknown(numbers.numpy()))
        followed.system.stop(numbers[~single])
        return torch.where(single, numbers, NOTHING)
    followed.see(bias)
    return numbers


def _is_used_once(node: Node) -> bool:
    """Whether parts of a bias that was put together are used for nothing else."""
    pending = [a for a in node.args[2:3] if isinstance(a, Node)]
    while pending:
        part = pending.pop()
        if sum(operation_name(user) not in UNIFORM for user in part.users) > 1:
            return False
        pending += part.all_input_nodes
    return True


def with_bias(followed: Followed, node: Node, x: Unbiased, bias: Weight) -> Added | None:
    """A bias that is added by hand."""
    return layer(followed, node, x.incoming, x.weight, bias, x.out_dim)


def embedding(followed: Followed, node: Node, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """The same may be added to all rows of a table."""
    for operand in args:
        followed.see(operand)
    if not isinstance(weight, Weight) or weight.shape != weight.full_shape:
        followed.see(weight)
        return None
    shape = shape_of(node)
    return followed.added(along(followed.columns_of(weight), len(shape) - 1, shape))


# ------------------------------------------------------------ where a weight lies in its tensor
def _place(weight: Weight, out: int, groups: int) -> tuple[int, int, int, Ints, Ints] | None:
    """Dimension, blocks, size, positions and rows of a `Read`; None if it cannot say them."""
    moves = [moving_dims(c) for c in weight.coords]
    along_view = {view[0]: k for k, view in enumerate(moves) if len(view) == 1}
    wide = {d for d in range(len(weight.shape)) if weight.shape[d] > 1}
    if any(len(view) > 1 for view in moves) or not wide <= along_view.keys():
        return None
    spare = [k for k in range(len(weight.coords)) if k not in along_view.values()]
    dims = [along_view[d] if d in along_view else spare.pop(0) for d in (out, 1 - out)]
    rows, columns = (narrow_except(weight.coords[k], moves[k]).reshape(-1).numpy() for k in dims)
    total, size = (weight.full_shape[k] for k in dims)
    if groups > 1:
        whole = (len(rows), len(columns)) == (total, size)
        return (dims[1], groups, size, np.arange(groups * size)[:, None], rows) if whole else None
    if not np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return None
    step = int(np.gcd.reduce([rows[0], len(rows), total]))
    blocks = np.arange(rows[0] // step, (rows[0] + len(rows)) // step)
    return dims[1], total // step, size, columns[:, None] + blocks * size, rows
