"""Layers whose outputs all go through a softmax, which forgets what is added to all of them.

Routers of experts and classes whose probabilities are returned: one vector may be added to all rows
of the weight, and one number to all biases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch.fx import Node

from lightning_bnn.symmetry.discovery.graph import Graph, ancestors
from lightning_bnn.symmetry.groups import Axis, ShiftGroup
from lightning_bnn.symmetry.placements import Placement
from lightning_bnn.symmetry.rules.labels import operation_name

__all__ = ["Router", "routers", "shifts_of_routers"]


class Router(NamedTuple):
    """The weight and the bias of a layer in front of a softmax, by name."""

    weight: str
    bias: str | None = None


def routers(graph: Graph, sole: Collection[str]) -> set[Router]:
    """The layers of a graph whose outputs are seen by a softmax alone.

    Args:
        graph: what the network computes in one mode.
        sole: the tensors that have one name only, and share their memory with no other.
    """
    written = [node for _, node in graph.written]
    live = ancestors([*graph.results, *written])
    ends = {*graph.results, *written}
    layers: dict[tuple[Node, ...], set[Node]] = defaultdict(set)
    for node in live:
        layers[_weights(node)].add(node)
    found = set()
    for weights, nodes in layers.items():
        sources = [graph.sources[w] for w in weights if w in graph.sources]
        known = weights and len(sources) == len(weights)
        if not known or any(x.kind != "parameter" or x.name not in sole for x in sources):
            continue
        alone = all(set(w.users) & live <= nodes for w in weights)
        if alone and all(_is_forgotten(node, live, ends) for node in nodes):
            found.add(Router(*(x.name for x in sources)))
    return found


def _weights(node: Node) -> tuple[Node, ...]:
    """The weight and the bias of a linear map."""
    name = operation_name(node) if node.op == "call_function" else ""
    if name not in ("linear", "matmul", "mm") or len(node.args) < 2:
        return ()
    weights = tuple(n for n in node.args[1:3] if isinstance(n, Node))
    return weights if weights and weights[0].meta["val"].ndim == 2 else ()


# ------------------------------------------------------------ what is forgotten
_KEEPS = frozenset("to _to_copy type_as clone contiguous alias".split())
_SCALES = frozenset("mul div multiply divide".split())


def _is_forgotten(node: Node, live: Collection[Node], ends: Collection[Node]) -> bool:
    """Whether a number that is added to all elements of a row changes nothing."""
    users = [user for user in node.users if user in live]
    return node not in ends and bool(users) and all(_forgets(u, node, live, ends) for u in users)


def _forgets(user: Node, row: Node, live: Collection[Node], ends: Collection[Node]) -> bool:
    name = operation_name(user)
    if name in ("zeros_like", "ones_like", "full_like", "sym_size"):
        return True
    if name in ("topk", "argmax"):
        return _takes_best(user, row, live, ends)
    if not user.args or user.args[0] is not row or row in user.args[1:]:
        return False
    if name in ("softmax", "_softmax", "log_softmax", "_log_softmax"):
        return _is_last(user.args[1], row)
    other = user.args[1] if len(user.args) > 1 else None
    by_number = name in _SCALES and isinstance(other, int | float)
    passes = by_number or name in _KEEPS or name == "add"
    same = isinstance(user.meta["val"], torch.Tensor) and user.meta["val"].is_floating_point()
    same = same and user.meta["val"].shape == row.meta["val"].shape
    return bool(passes and same) and _is_forgotten(user, live, ends)


def _takes_best(user: Node, row: Node, live: Collection[Node], ends: Collection[Node]) -> bool:
    """Places of the largest do not change; the largest themselves must be forgotten again."""
    at = 2 if operation_name(user) == "topk" else 1
    dim = user.args[at] if len(user.args) > at else user.kwargs.get("dim", -1 if at == 2 else None)
    if user.args[0] is not row or not _is_last(dim, row):
        return False
    if at == 1:
        return True
    values = [n for n in user.users if n in live and n.args[1] == 0]
    return all(_is_forgotten(n, live, ends) for n in values)


def _is_last(dim: object, row: Node) -> bool:
    return dim in (-1, row.meta["val"].ndim - 1)


# ------------------------------------------------------------ shifts
def shifts_of_routers(found: Collection[Router], axes: tuple[Axis, ...]) -> Iterator[ShiftGroup]:
    """What may be added to all rows of a weight, and to all numbers of a bias."""
    for router in sorted(found, key=str):
        for name, role in ((router.weight, "in"), (router.bias, "bias")):
            mine = [k for k, axis in enumerate(axes) if axis.tensor == name]
            places = [k for k in mine if axes[k].role == role and axes[k].blocks == 1]
            if len(places) == 1 and axes[places[0]].dim is not None:
                positions = torch.arange(axes[places[0]].size)
                columns = positions[:, None] if role == "in" else positions[None]
                yield ShiftGroup(len(columns), str(name), (Placement(places[0], columns),))
