"""The table that `print` shows of a `Symmetries`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning_bnn.symmetry.linear_groups import LinearGroup
from lightning_bnn.symmetry.shift_groups import ShiftGroup

__all__ = ["table"]


def table(sym: Any) -> str:
    """One line per kind of group, the counts, and what is frozen."""
    lines = [f"{'kind':<12}{'units':>7}{'groups':>8}  acts on"]
    for title, groups in (
        ("permutation", sym.permutations),
        ("scaling", sym.scalings),
        ("sign", sym.signs),
    ):
        lines += _rows(title, groups)
    lines += _linear_rows(sym.linear)
    lines += _shift_rows(sym.shifts)
    lines.append(
        f"permutations: 10^{sym.log10_permutations:.1f}   free scales: {sym.scaling_dof}   "
        f"free signs: {sym.sign_dof}   continuous dimension: {_dimension(sym)}"
    )
    lines += [f"frozen: {item}" for item in sym.frozen]
    if sym.constants:
        lines.append(f"read as constants: {_shorten(list(sym.constants))}")
    if sym.evaluation_only:
        lines.append(f"evaluation only: {sym.evaluation_only}")
    if sym.unchecked:
        lines.append(f"not checked: {sym.unchecked}")
    return "\n".join(lines)


def _dimension(sym: Any) -> str:
    numbers = sum(shape.numel() for shape in sym.shapes.values())
    share = f" ({100 * sym.dimension / numbers:.2g} % of all numbers)" if numbers else ""
    return f"{sym.dimension}{share}"


def _rows(title: str, groups: Sequence[Any]) -> list[str]:
    counts: Counter[tuple[str, int]] = Counter()
    names: dict[tuple[str, int], list[str]] = {}
    for group in groups:
        label = "block perm." if getattr(group, "kind", "") == "block" else title
        counts[label, group.units] += 1
        names.setdefault((label, group.units), []).append(group.name)
    return [
        f"{label:<12}{units:>7}{count:>8}  {_shorten(names[label, units])}"
        for (label, units), count in counts.items()
    ]


def _linear_rows(groups: Sequence[LinearGroup]) -> list[str]:
    names: dict[tuple[str, int], list[str]] = {}
    spaces: Counter[tuple[str, int]] = Counter()
    for group in groups:
        spaces[group.kind, group.size] += group.spaces
        names.setdefault((group.kind, group.size), []).append(group.name)
    return [
        f"{kind:<12}{size:>7}{count:>8}  {_shorten(names[kind, size])}"
        for (kind, size), count in spaces.items()
    ]


def _shift_rows(groups: Sequence[ShiftGroup]) -> list[str]:
    lines = []
    for title, dead in (("shift", False), ("dead bias", True)):
        names = [g.name for g in groups if g.is_dead == dead]
        size = sum(g.size for g in groups if g.is_dead == dead)
        if names:
            lines.append(f"{title:<12}{size:>7}{len(names):>8}  {_shorten(names)}")
    return lines


def _shorten(names: list[str], most: int = 3) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (
        f", ... ({len(distinct)} tensors)" if len(distinct) > most else ""
    )
