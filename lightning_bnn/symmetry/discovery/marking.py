"""After a rule: what keeps channels from being mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from lightning_bnn.symmetry.rules.constraints import Constraints, Rule
from lightning_bnn.symmetry.rules.labels import Factored, Index, Squares, Value, is_operand
from lightning_bnn.symmetry.rules.table import (
    MARK_PARTS,
    MIXES,
    OF_ROWS,
    OF_WEIGHTS,
    RULES,
)

__all__ = ["mark_mixing"]


def mark_mixing(
    system: Constraints,
    name: str,
    operands: Sequence[Any],
    result: Any,
    rules: Mapping[str, Rule],
) -> None:
    """Only operations that are known to be linear leave channels that can be mixed."""
    results = [] if _says_what_mixes(name, operands, rules) else [*operands, *_operands(result)]
    if name not in ("mean", "sum"):
        results += [x for x in operands if isinstance(x, Squares)]
    for x in results:
        parts = x.parts if isinstance(x, Factored) else [x.labels] if isinstance(x, Value) else []
        for part in parts:
            system.mark(part, "diagonal")


def _says_what_mixes(name: str, operands: Sequence[Any], rules: Mapping[str, Rule]) -> bool:
    """Whether the rule is one that says which channels it keeps from being mixed."""
    if rules is OF_ROWS:
        return True
    if any(isinstance(x, Index) for x in operands):
        return False
    return name in MARK_PARTS if rules is OF_WEIGHTS else name in MIXES and _is_ours(name, rules)


def _is_ours(name: str, rules: Mapping[str, Rule]) -> bool:
    """Whether a rule is the one of this package."""
    return rules[name] is RULES.get(name, rules[name])


def _operands(result: Any) -> list[Any]:
    return [x for x in tree_leaves(result, is_leaf=is_operand) if is_operand(x)]
