"""What the rules state about shifts: who writes, reads, passes on and stops a constant per channel.

Numbers added to the channels that a bias writes go on through shape operations and averages, are
taken up by the bias of every linear layer that reads them, and are forgotten by a softmax over
keys. Every other operation stops them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Weight,
    core,
    moving_dims,
    narrow_except,
    operation_name,
)

__all__ = ["Shifts", "is_forgotten_by_softmax", "rows_sum_to_one"]


@dataclass
class Shifts:
    """Channels that cannot be shifted, pairs that are shifted alike, and the layers that read.

    Attributes:
        stops: channels at which a shift would be seen.
        same: pairs of channels with one shift.
        biases: the bias of every weight that reads channels; None where it has none, or several.
        silent: what weights without a bias read, and what they write, by name; whether that is
            forgotten is known in the end.
        clashing: weights that are read with several biases.
        vectors: how often a vector of the state is added to channels as a bias.
        raw: how often a tensor of the state is used as it stands.
        reads: the channels that a weight has read first.
        trades: pairs of sums of which only the sum is seen: the channels of their summands.
        summands: the channels of what is summed, by the last addition.
        tables: embeddings, whose rows can be shifted like biases.
    """

    stops: list[NDArray[np.int64]] = field(default_factory=list)
    same: list[NDArray[np.int64]] = field(default_factory=list)
    biases: dict[str, str | None] = field(default_factory=dict)
    silent: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    clashing: set[str] = field(default_factory=set)
    vectors: Counter[str] = field(default_factory=Counter)
    raw: Counter[str] = field(default_factory=Counter)
    reads: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)
    trades: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    summands: dict[Any, list[Tensor]] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)

    def stop(self, labels: Tensor) -> None:
        """A shift of these channels would be seen."""
        self.stops.append(core(labels).numpy().ravel())

    def tie(self, labels: Tensor, others: Tensor) -> None:
        """A shift of one is a shift of the other, element by element."""
        moving = moving_dims(labels, others)
        pair = torch.broadcast_tensors(narrow_except(labels, moving), narrow_except(others, moving))
        self.same.append(np.stack([t.numpy().ravel() for t in pair]))

    def read(self, weight: Weight, bias: Weight | None, incoming: Tensor, out: Tensor) -> None:
        """A linear layer reads channels: its bias takes a shift up. Zeros are not shifted."""
        incoming = incoming.clamp_min(FROZEN)
        whole = bias is not None and not bias.is_buffer
        name = bias.name if whole and bias is not None else None
        if self.biases.setdefault(weight.name, name) != name or weight.name in self.clashing:
            self.biases[weight.name] = None
            self.clashing.add(weight.name)
            self.stop(incoming)
        elif name is None:
            self.silent.append((weight.name, incoming, out))
        before = self.reads.setdefault((weight.name, tuple(weight.shape)), incoming)
        if before.shape == incoming.shape:  # one bias takes up the shifts of all inputs
            self.same.append(np.stack([before.numpy().ravel(), incoming.numpy().ravel()]))
        else:
            self.stop(torch.cat([before.reshape(-1), incoming.reshape(-1)]))

    def add(self, node: Node, x: Tensor, y: Tensor, is_table: Sequence[bool]) -> None:
        """A sum of channels: only the sum of their shifts is seen."""
        if bool((core(x) <= FROZEN).all()) or bool((core(y) <= FROZEN).all()):
            return
        forgotten = is_forgotten_by_softmax(node)
        for labels in (x, y):
            if not forgotten or labels.ndim - 1 in moving_dims(labels):
                self.stop(labels)
        whole = all(
            table or len(moving_dims(t)) == 1 for t, table in zip((x, y), is_table, strict=True)
        )
        plain = operation_name(node) in _SUMS and node.kwargs.get("alpha", 1) == 1
        if whole and plain and all(_is_as_it_stands(a) for a in node.args[:2]):
            left, right = (
                self.summands.get(a, [t]) for a, t in zip(node.args[:2], (x, y), strict=True)
            )
            self.trades.append((left, right))
            self.summands[node] = [*left, *right]


_SUMS = frozenset(("add", "add_"))
_NEW_CHANNELS = frozenset("embedding linear addmm conv1d conv2d conv3d".split())
_MOVES_ROWS = frozenset(
    "to _to_copy type_as clone contiguous alias view reshape expand _unsafe_view slice select "
    "narrow squeeze unsqueeze transpose permute flatten unflatten t index index_select".split()
)


def _is_as_it_stands(node: Any) -> bool:
    """Whether what is added to all rows of a table in a sum is added to the sum, and only there."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return False
    if node.op == "placeholder":
        return True
    name = operation_name(node) if node.op == "call_function" else ""
    if name in _SUMS and node.kwargs.get("alpha", 1) == 1:
        return all(_is_as_it_stands(a) for a in node.args[:2])
    return name in _NEW_CHANNELS or (name in _MOVES_ROWS and _comes_from_table(node.args[0]))


def _comes_from_table(node: Any) -> bool:
    """The same of what is only rearranged; a table may be read elsewhere, in other rows."""
    return isinstance(node, Node) and (node.op == "placeholder" or _is_as_it_stands(node))


# ------------------------------------------------------------ softmax, by hand
_KEEPS_ROWS = frozenset(
    "to _to_copy type_as clone contiguous alias view reshape expand _unsafe_view".split()
)
_ADDS = frozenset("add sub masked_fill where".split())
_MULTIPLIES = frozenset("mul div multiply divide".split())


def rows_sum_to_one(node: Any) -> bool:
    """Whether a tensor is what a softmax over its last dimension returns."""
    while isinstance(node, Node) and node.op == "call_function":
        name, size = operation_name(node).removesuffix("_"), node.meta["val"].shape[-1:]
        if name in ("softmax", "_softmax"):
            return bool(node.args[1] in (-1, node.meta["val"].ndim - 1))
        if name in ("div", "divide") and _is_sum_of_rows(node.args[1], node.args[0]):
            return True
        keeps_all = name == "dropout" and not (node.args[1] and node.args[2])
        if keeps_all or name in _KEEPS_ROWS:
            node = node.args[0]
        else:
            return False
        if not isinstance(node, Node) or node.meta["val"].shape[-1:] != size:
            return False
    return False


def _is_sum_of_rows(node: Any, rows: Any) -> bool:
    """Whether a tensor holds the sums of another one over its last dimension, which it keeps."""
    if not isinstance(node, Node) or node.op != "call_function" or operation_name(node) != "sum":
        return False
    last = node.meta["val"].ndim - 1
    return node.args[0] is rows and node.args[1:] in (([-1], True), ([last], True))


def is_forgotten_by_softmax(node: Node) -> bool:
    """Whether all that becomes of a tensor is a softmax over its last dimension."""
    if not node.meta["val"].ndim:
        return False
    size = node.meta["val"].shape[-1]
    for user in node.users:
        name = operation_name(user).removesuffix("_") if user.op == "call_function" else "output"
        if name in ("softmax", "_softmax"):
            if user.args[0] is node and user.args[1] in (-1, node.meta["val"].ndim - 1):
                continue
            return False
        scaled = name in _MULTIPLIES and user.args[0] is node and not _varies(user.args[1])
        passes = scaled or name in _ADDS or name in _KEEPS_ROWS
        if (
            not passes
            or user.meta["val"].shape[-1:] != (size,)
            or not is_forgotten_by_softmax(user)
        ):
            return False
    return bool(node.users)


def _varies(factor: Any) -> bool:
    """Whether a factor may differ between the elements of a row."""
    return isinstance(factor, Node) and bool(factor.meta["val"].ndim)
