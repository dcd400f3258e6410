"""The stored results of studies, read by the names of tables, rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from lightning_bnn.studies.claims.numbers import Number, measured, over_seeds
from lightning_bnn.studies.compare import COLUMNS

__all__ = ["Evidence", "Missing", "Quantities", "Quantity"]


class Missing(Exception):
    """Numbers that a claim needs are not there, and why."""


@dataclass(frozen=True)
class Quantity:
    """A number of a study.

    Attributes:
        values: one for each seed, without errors.
        number: over seeds; that of a single seed has the error that its table states.
    """

    values: Sequence[float | int]
    number: Number


Quantities = Mapping[str, Quantity]
"""Numbers by what the wildcards of their row and column stand for; "" without wildcards."""


@dataclass(frozen=True)
class Evidence:
    """Results of steps.

    Attributes:
        results: what each study has written (``results.json``), one for each seed, by step; of a
            comparison with its rows.
        absent: why other steps have none.
    """

    results: Mapping[str, Sequence[Mapping[str, Any]]]
    absent: Mapping[str, str] = field(default_factory=dict)

    def of(self, step: str) -> Sequence[Mapping[str, Any]]:
        """The results of a step, one for each seed."""
        if not self.results.get(step):
            raise Missing(self.absent.get(step, f"`{step}` has not been run"))
        return self.results[step]

    def setting(self, step: str, path: str) -> Any:
        """A setting of a step by its dotted name, None if there is none."""
        found: Any = self.of(step)[0]["settings"]
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def read(
        self, step: str, table: str, row: str | Sequence[str], column: str, count: int | None = None
    ) -> Quantities:
        """Numbers of a table.

        Args:
            step: whose results.
            table: its name; ``one`` and ``multi`` are the posteriors of a comparison by method
                and number, and ``floor`` is the noise of as many networks as they pool.
            row: what its first cells are, with ``*``, or ``* but X``, for several rows.
            column: its heading, or a pattern with ``*``; ``first`` or ``last`` before it takes one.
            count: how many were averaged for the error of the table, if it is their deviation.
        """
        if table in ("one", "multi", "floor"):
            return self._posteriors(step, table, str(row), column)
        where, tables = f"{table!r} of `{step}`", self._tables(step, table)
        patterns = [row] if isinstance(row, str) else list(row)
        columns = _columns([str(name).strip() for name in tables[0]["header"]], column, where)
        several = "*" in column and column.split()[0] not in ("first", "last")
        names = dict.fromkeys(_row_name(cells, len(patterns)) for cells in tables[0]["rows"])
        found: dict[str, Quantity | str] = {}
        for name in names:
            if all(map(_matches, name, patterns)):
                rows = [_row(one, name, where) for one in tables]
                free = [n for n, p in zip(name, patterns, strict=True) if n != p]
                for title, index in columns.items():
                    key = ", ".join([*free, title] if several else free)
                    found[key] = _quantity([cells[index] for cells in rows], count)
        if not found:
            raise Missing(f"{where} has no row {', '.join(patterns)!r}")
        return _numeric(found)

    def _tables(self, step: str, table: str) -> list[Mapping[str, Any]]:
        found = [result["tables"].get(table) for result in self.of(step)]
        if any(one is None for one in found):
            raise Missing(f"the results of `{step}` have no table {table!r}")
        return [one for one in found if one is not None]

    def _posteriors(self, step: str, mode: str, method: str, name: str) -> Quantities:
        found: dict[str, Quantity] = {}
        for row in self.of(step)[0].get("rows", ()):
            same = row["mode"] == ("multi" if mode == "floor" else mode) and name in row["numbers"]
            if same and _matches(row["method"], method):
                key = row["method"] if "*" in method else ""
                if mode == "floor":
                    found[key] = self._floor(step, row["pooled"], COLUMNS[name])
                    continue
                value, error = row["numbers"][name]
                error, count = _finite(error), row["seeds"] if mode == "one" else None
                found[key] = Quantity([value], measured(value, error, count))
        if not found:
            raise Missing(f"the rows of `{step}` have no number {name!r} of {method}, {mode} mode")
        return found

    def _floor(self, step: str, pooled: int, column: str) -> Quantity:
        """The noise of as many pooled networks as a posterior has: P1's noise floor."""
        (cell,) = self.read(step, "table1", ("Noise floor", f"{pooled} networks"), column).values()
        n = cell.number
        return Quantity([n.value / 100], Number(n.value / 100, n.sd / 100, n.doubt / 100))


def _columns(header: Sequence[str], column: str, where: str) -> dict[str, int]:
    """Columns by heading. An exact heading goes before a pattern."""
    one, _, pattern = column.partition(" ")
    if column in header:
        return {column: header.index(column)}
    if "*" not in column:
        raise Missing(f"{where} has no column {column!r}")
    pattern = pattern if one in ("first", "last") else column
    found = {n: k for k, n in enumerate(header) if k and fnmatchcase(n, pattern)}
    if not found:
        raise Missing(f"{where} has no column {column!r}")
    chosen = {"first": [*found][:1], "last": [*found][-1:]}.get(one, [*found])
    return {name: found[name] for name in chosen}


def _matches(text: str, pattern: str) -> bool:
    pattern, _, excluded = pattern.partition(" but ")
    return text != excluded and (text == pattern or (pattern == "*"))


def _row_name(cells: Sequence[Any], length: int) -> tuple[str, ...]:
    return tuple(str(cell).strip() for cell in cells[:length])


def _row(table: Mapping[str, Any], name: tuple[str, ...], where: str) -> Sequence[Any]:
    for cells in table["rows"]:
        if _row_name(cells, len(name)) == name:
            return list(cells)
    raise Missing(f"{where} has no row {', '.join(name)!r}")


def _quantity(cells: Sequence[Any], count: int | None) -> Quantity | str:
    """A cell of every seed, or the text in its place."""
    plain = [cell["value"] if isinstance(cell, Mapping) else cell for cell in cells]
    for cell in plain:
        if isinstance(cell, str):
            return cell
    values = [_finite(value) for value in plain]
    if len(cells) == 1 and isinstance(cells[0], Mapping):
        return Quantity(values, measured(values[0], _finite(cells[0]["error"]), count))
    return Quantity(values, over_seeds(values))


def _numeric(found: Mapping[str, Quantity | str]) -> Quantities:
    """Those cells that are numbers."""
    numbers = {key: one for key, one in found.items() if not isinstance(one, str)}
    if not numbers:
        raise Missing(f"there is no number, but {next(iter(found.values()))!r}")
    return numbers


def _finite(value: float | int | None) -> float:
    return math.nan if value is None else float(value)
