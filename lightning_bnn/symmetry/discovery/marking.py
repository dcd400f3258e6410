"""After a rule: what keeps channels from being mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Node
from torch.utils._pytree import tree_leaves

from lightning_bnn.symmetry.discovery.values import has_channels
from lightning_bnn.symmetry.rules.constraints import Constraints, Rule
from lightning_bnn.symmetry.rules.labels import Factored, Index, Squares, Value, is_operand
from lightning_bnn.symmetry.rules.table import (
    MARK_PARTS,
    MIXES,
    MULTIPLIES,
    OF_ROWS,
    OF_WEIGHTS,
    RULES,
)

__all__ = ["hold_complex", "mark_mixing"]


def mark_mixing(
    system: Constraints,
    name: str,
    operands: Sequence[Any],
    result: Any,
    rules: Mapping[str, Rule],
) -> None:
    """Only operations that are known to be linear leave channels that can be mixed."""
    marked = [] if _says_what_mixes(name, operands, rules) else [*operands, *_operands(result)]
    if name not in ("mean", "sum"):
        marked += [x for x in operands if isinstance(x, Squares)]
    given = rules is not OF_ROWS and rules is not OF_WEIGHTS and not _is_ours(name, rules)
    for x in marked:
        _mark_all(system, x, "an operation whose rule was given" if given else "")


def hold_complex(system: Constraints, name: str, node: Node, operands: Sequence[Any]) -> None:
    """Complex numbers times others are mixed by complex matrices, which are not looked for."""
    factors = [x for x in operands if has_channels(x)]
    if name in MULTIPLIES and len(factors) > 1 and node.meta["val"].is_complex():
        for x in factors:
            _mark_all(system, x, "a product of complex numbers")


def _mark_all(system: Constraints, x: Any, limit: str) -> None:
    """Nothing mixes the channels of an operand, or nothing is known to, through some limit."""
    parts = x.parts if isinstance(x, Factored) else [x.labels] if isinstance(x, Value) else []
    for part in parts:
        if limit:
            system.hold(part, limit)
        else:
            system.mark(part, "diagonal")


def _says_what_mixes(name: str, operands: Sequence[Any], rules: Mapping[str, Rule]) -> bool:
    """Whether the rule is one that says which channels it keeps from being mixed."""
    if rules is OF_ROWS:
        return True
    if any(isinstance(x, Index) for x in operands):
        return False
    return name in MARK_PARTS if rules is OF_WEIGHTS else name in MIXES and _is_ours(name, rules)


def _is_ours(name: str, rules: Mapping[str, Rule]) -> bool:
    """Whether the rule of an operation is not one that was given; those of batch norms are made."""
    return name in RULES and (rules[name] is RULES[name] or "batch_norm" in name)


def _operands(result: Any) -> list[Any]:
    return [x for x in tree_leaves(result, is_leaf=is_operand) if is_operand(x)]
