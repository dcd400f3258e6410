"""Parameters that hold a matrix for every head, group or expert, or a row for every layer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from weightsym.discovery.dimensions.moves import MOVES
from weightsym.discovery.dimensions.nodes import operation_of
from weightsym.discovery.dimensions.program import Program
from weightsym.discovery.dimensions.values import compress

Codes = list[tuple[Tensor, bool]]
"""For every factor of a tensor a number for each place, and whether the factor only moves."""


class _Use(NamedTuple):
    """The moves between a tensor and the product or grouped convolution that reads it.

    ``lead`` dimensions of what it reads count matrices.
    """

    moves: tuple[Node, ...]
    lead: int
    groups: int = 0


class _Stack(NamedTuple):
    """The positions of a tensor's entries after those moves."""

    places: Tensor
    lead: int
    counts_matrices: bool


def stack_codes(programs: Iterable[Program], tables: frozenset[str]) -> dict[str, Codes]:
    """Return the label codes of tensors that are read as stacks of matrices, or with such."""
    moved: dict[Node, tuple[str, tuple[Node, ...]]] = {}
    uses: dict[str, list[_Use]] = {}
    tensors: dict[str, Tensor] = {}
    computed: set[Node] = set()
    for program in programs:
        tensors |= program.tensors
        for node in program.nodes:
            if node.op == "placeholder" and program.is_parameter(node):
                computed.add(node)
                name = program.owners[node.name]
                if tensors[name].ndim:
                    moved[node] = name, ()
            elif node.op == "call_function":
                if not computed.isdisjoint(node.all_input_nodes):
                    computed.add(node)
                tensor, index = _picked(node)
                if tensor in moved and index in computed:
                    _add(uses, *moved[tensor], 1)
                else:
                    _follow(node, moved, uses)
    by_tensor = {name: _codes(tensors[name], nodes) for name, nodes in uses.items()}
    by_tensor |= {name: _codes_of_table(tensors[name]) for name in sorted(tables)}
    return {name: codes for name, codes in by_tensor.items() if codes is not None}


def _codes_of_table(tensor: Tensor) -> Codes:
    """Number every entry and every row."""
    rows = torch.arange(len(tensor)).reshape(-1, *(1,) * (tensor.ndim - 1))
    return [(torch.arange(tensor.numel()).reshape(tensor.shape), False), (rows, True)]


def _picked(node: Node) -> tuple[Any, Any]:
    """Return the tensor whose first dimension a computed index selects from, and the index."""
    name, args = operation_of(node), node.args
    if name == "index":
        indices: Any = args[1]
        return (args[0], indices[0]) if len(indices) == 1 else (None, None)
    if name == "index_select" and args[1] == 0:
        return args[0], args[2]
    return (args[1], args[2]) if "grouped_mm" in str(node.target) else (None, None)


def _follow(
    node: Node, moved: dict[Node, tuple[str, tuple[Node, ...]]], uses: dict[str, list[_Use]]
) -> None:
    name = operation_of(node)
    first: Any = node.args[0] if node.args else None
    is_move = node.target is operator.getitem or name in MOVES | {"expand"}
    if is_move and first in moved and len(node.all_input_nodes) == 1:
        origin, moves = moved[first]
        moved[node] = origin, (*moves, node)
    elif name == "convolution" and node.args[1] in moved:
        kernel: Any = node.args[1]
        groups: Any = node.args[8]
        out, channels = kernel.meta["val"].shape[:2]
        if groups > 1 and (out > groups or channels > 1):
            _add(uses, *moved[kernel], 1, groups)
    else:
        is_product = name in ("mm", "bmm", "matmul")
        for operand in (n for n in node.all_input_nodes if n in moved):
            if is_product or _is_piece(operand, moved[operand][1]):
                lead = max(0, operand.meta["val"].ndim - 2) if is_product else 0
                _add(uses, *moved[operand], lead)


def _is_piece(node: Node, moves: Sequence[Node]) -> bool:
    """Return whether the moves select a part of a tensor."""
    whole: Any = moves[0].args[0] if moves else node
    return node.meta["val"].numel() < whole.meta["val"].numel()


def _add(
    uses: dict[str, list[_Use]], name: str, moves: tuple[Node, ...], lead: int, groups: int = 0
) -> None:
    uses.setdefault(name, []).append(_Use(moves, lead, groups))


def _stacks(tensor: Tensor, uses: Iterable[_Use]) -> list[_Stack]:
    """List the positions of entries in all uses, without repetition."""
    stacks: list[_Stack] = []
    for moves, lead, groups in uses:
        index = torch.arange(tensor.numel()).reshape(tensor.shape)
        try:
            for node in moves:
                index = _moved(node, index)
        except Exception:  # moves of floating point only
            continue
        index = (
            index.reshape(groups, index.shape[0] // groups, *index.shape[1:]) if groups else index
        )
        if lead and bool((index == index[:1]).all()):
            index, lead = index[0], 0
        if not any(
            s.places.shape == index.shape and bool((s.places == index).all()) for s in stacks
        ):
            stacks.append(_Stack(index, lead, not groups))
    return stacks


def _moved(node: Node, index: Any) -> Any:
    target: Any = node.target
    if "view" in operation_of(node):
        return index.reshape(node.args[1])
    return target(index, *node.args[1:], **node.kwargs)


def _codes(tensor: Tensor, uses: Sequence[_Use]) -> Codes | None:
    """Return the codes of a stack. None for a single matrix, or entries not read exactly once."""
    is_matrix = tensor.ndim < 3 and not any(u.lead for u in uses)
    if is_matrix and len({_words(u) for u in uses}) == 1:
        return None
    return _codes_of_stacks(tensor, _stacks(tensor, uses))


def _words(use: _Use) -> str:
    return repr([(str(n.target), n.args[1:], n.kwargs) for n in use.moves])


def _codes_of_stacks(tensor: Tensor, uses: Sequence[_Stack]) -> Codes | None:
    is_plain = len(uses) == 1 and tensor.ndim < 3 and not uses[0].lead
    if is_plain or len({(u.places.ndim, u.lead) for u in uses}) != 1:
        return None
    every = torch.cat([u.places.reshape(-1) for u in uses])
    if len(every) != tensor.numel() or not bool((every.bincount() == 1).all()):
        return None
    first = uses[0]
    ndim, lead = first.places.ndim, list(range(first.lead))
    codes = [
        (_code(tensor, uses, [*lead, d]), False)
        for d in range(first.lead, min(ndim, first.lead + 2))
        if any(u.places.shape[d] > 1 for u in uses)
    ]
    codes += [
        (_code(tensor, uses, [d]), False)
        for d in range(first.lead + 2, ndim)
        if first.places.shape[d] > 1
    ]
    if first.counts_matrices and lead and first.places.shape[0] > 1:
        count = _code(tensor, uses, lead)
        if all(code.shape != count.shape for code, _ in codes):  # else rows tell matrices, too
            codes.append((count, True))
    elif len(uses) > 1 and tensor.ndim > 1 and len(codes) == 1:  # rows, each as a whole
        codes.append((_code(tensor, uses, []), True))
    return codes


def _code(tensor: Tensor, uses: Sequence[_Stack], dims: Sequence[int]) -> Tensor:
    """Encode the position of every entry along some dimensions of its use."""
    result = torch.full((tensor.numel(),), -1)
    for k, use in enumerate(uses):
        code = torch.full((), k)
        for d in dims:
            along = [-1 if j == d else 1 for j in range(use.places.ndim)]
            code = code * use.places.shape[d] + torch.arange(use.places.shape[d]).reshape(along)
        result[use.places.reshape(-1)] = (
            (code + k * tensor.numel()).expand(use.places.shape).reshape(-1)
        )
    return compress(result.reshape(tensor.shape))
