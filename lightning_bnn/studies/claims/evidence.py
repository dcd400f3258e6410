"""The stored results of studies, read by the names of tables, rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_bnn.studies.claims.numbers import Number, measured, over_seeds
from lightning_bnn.studies.compare import COLUMNS

__all__ = ["Evidence", "Missing"]

Name = str | tuple[str, ...]
"""The text that a row begins with, in one cell or in several."""


class Missing(Exception):
    """Numbers that a claim needs are not there, and why."""


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

    def tables(self, step: str, table: str) -> list[Mapping[str, Any]]:
        """A table of every seed."""
        found = [result["tables"].get(table) for result in self.of(step)]
        if any(one is None for one in found):
            raise Missing(f"the results of `{step}` have no table {table!r}")
        return [one for one in found if one is not None]

    def rows(self, step: str, table: str) -> list[list[Any]]:
        """The rows of a table, of the first seed."""
        return [list(row) for row in self.tables(step, table)[0]["rows"]]

    def cells(self, step: str, table: str, row: Name, column: str | int) -> list[Any]:
        """A cell of every seed.

        Args:
            step: whose results.
            table: name of the table.
            row: text that it begins with.
            column: name in the header, or number.
        """
        return [
            _cell(one, row, column, f"{table!r} of `{step}`") for one in self.tables(step, table)
        ]

    def values(self, step: str, table: str, row: Name, column: str | int) -> list[float]:
        """The numbers of a cell, one for each seed, without errors."""
        return [_value(cell) for cell in self.cells(step, table, row, column)]

    def number(
        self, step: str, table: str, row: Name, column: str | int, count: int | None = None
    ) -> Number:
        """A number over seeds; that of a single seed has the error that its table states.

        Args:
            step: whose results.
            table: name of the table.
            row: text that it begins with.
            column: name in the header, or number.
            count: how many were averaged for the error of the table, if it is their deviation.
        """
        cells = self.cells(step, table, row, column)
        if len(cells) == 1 and isinstance(cells[0], Mapping):
            return measured(_value(cells[0]), _error(cells[0]), count)
        return over_seeds([_value(cell) for cell in cells])

    # ------------------------------------------------------------ comparisons
    def methods(self, step: str, mode: str, name: str) -> list[str]:
        """The posteriors of a comparison that have a number.

        Args:
            step: a comparison.
            mode: one or multi.
            name: of the number.
        """
        rows = self._compared(step)
        found = [r["method"] for r in rows if r["mode"] == mode and name in r["numbers"]]
        if not found:
            raise Missing(f"the rows of `{step}` have no number {name!r}")
        return found

    def posterior(self, step: str, method: str, mode: str, name: str) -> Number:
        """A number of a comparison, with its error.

        Args:
            step: a comparison.
            method: name of the posterior.
            mode: one (deviation over modes) or multi (standard error by the jackknife).
            name: of the number.
        """
        for row in self._compared(step):
            if (row["method"], row["mode"]) == (method, mode) and name in row["numbers"]:
                value, error = row["numbers"][name]
                error = math.nan if error is None else error
                return measured(value, error, row["seeds"] if mode == "one" else None)
        raise Missing(f"the rows of `{step}` have no number {name!r} of {method}, {mode} mode")

    def pooled_floor(self, step: str, method: str, mode: str, name: str) -> Number:
        """The noise of as many pooled networks as a posterior has: P1's noise floor.

        Args:
            step: a comparison under P1's protocol.
            method: name of the posterior.
            mode: one or multi.
            name: of the distance, ``mmd`` or ``ns``.
        """
        rows = [r for r in self._compared(step) if (r["method"], r["mode"]) == (method, mode)]
        networks = rows[0].get("pooled", 0) if rows else 0
        row = ("Noise floor", f"{networks} networks")
        cell = self.cells(step, "table1", row, COLUMNS[name])[0]
        return measured(_value(cell) / 100, _error(cell) / 100)

    def _compared(self, step: str) -> Sequence[Mapping[str, Any]]:
        rows: Sequence[Mapping[str, Any]] = self.of(step)[0].get("rows", ())
        if not rows:
            raise Missing(f"`{step}` has no rows of posteriors")
        return rows


def _cell(table: Mapping[str, Any], row: Name, column: str | int, where: str) -> Any:
    """A cell by the text that its row begins with and the name of its column."""
    names = (row,) if isinstance(row, str) else row
    header = list(table["header"])
    if isinstance(column, str) and column not in header:
        raise Missing(f"{where} has no column {column!r}")
    index = header.index(column) if isinstance(column, str) else column
    for cells in table["rows"]:
        if tuple(cells[: len(names)]) == names:
            return cells[index]
    raise Missing(f"{where} has no row {', '.join(names)!r}")


def _value(cell: Any) -> float:
    number = cell["value"] if isinstance(cell, Mapping) else cell
    if isinstance(number, str):
        raise Missing(f"there is no number, but {number!r}")
    return math.nan if number is None else float(number)


def _error(cell: Any) -> float:
    error = cell["error"] if isinstance(cell, Mapping) else None
    return math.nan if error is None else float(error)
