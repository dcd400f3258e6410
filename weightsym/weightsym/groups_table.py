"""The table that `print` shows of a `Symmetries`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["table"]


def table(sym: Any) -> str:
    """One line per kind of group, the counts, and what is frozen."""
    rows: dict[tuple[str, int], list[str]] = {}
    counts: dict[tuple[str, int], int] = {}
    for title, units, count, name in _groups(sym):
        rows.setdefault((title, units), []).append(name)
        counts[title, units] = counts.get((title, units), 0) + count
    lines = [f"{'kind':<12}{'units':>7}{'groups':>8}  acts on"]
    for (title, units), names in rows.items():
        lines.append(f"{title:<12}{units:>7}{counts[title, units]:>8}  {_shorten(names)}")
    for title, dead in (("shift", False), ("dead bias", True)):
        shifts = [group for group in sym.shifts if group.is_dead == dead]
        if shifts:
            size, names = sum(group.size for group in shifts), [group.name for group in shifts]
            lines.append(f"{title:<12}{size:>7}{len(shifts):>8}  {_shorten(names)}")
    numbers = sum(shape.numel() for shape in sym.shapes.values())
    share = f" ({100 * sym.dimension / numbers:.2g} % of all numbers)" if numbers else ""
    lines.append(
        f"permutations: 10^{sym.log10_permutations:.1f}   free scales: {sym.scaling_dof}   "
        f"free signs: {sym.sign_dof}   continuous dimension: {sym.dimension}{share}"
    )
    lines += [f"frozen: {item}" for item in sym.frozen]
    if sym.constants:
        lines.append(f"read as constants: {_shorten(list(sym.constants))}")
    if sym.evaluation_only:
        lines.append(f"evaluation only: {sym.evaluation_only}")
    if sym.unchecked:
        lines.append(f"not checked: {sym.unchecked}")
    return "\n".join(lines)


def _groups(sym: Any) -> Iterator[tuple[str, int, int, str]]:
    """Title, units, number and name of every group but shifts."""
    for group in sym.permutations:
        title = "block perm." if group.kind == "block" else "permutation"
        yield title, group.units, 1, group.name
    for title, groups in (("scaling", sym.scalings), ("sign", sym.signs)):
        yield from ((title, group.units, 1, group.name) for group in groups)
    yield from ((group.kind, group.size, group.spaces, group.name) for group in sym.linear)


def _shorten(names: list[str], most: int = 3) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (
        f", ... ({len(distinct)} tensors)" if len(distinct) > most else ""
    )
