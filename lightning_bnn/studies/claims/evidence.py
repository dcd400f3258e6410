"""Numbers of studies with the doubt about them, read by the names of tables, rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_bnn.studies.compare import COLUMNS

__all__ = ["Evidence", "Missing", "Number", "Numbers", "over_seeds", "with_error"]


class Missing(Exception):
    """Numbers that a claim needs are not there, and why."""


@dataclass(frozen=True)
class Number:
    """A number of a study.

    Attributes:
        values: one for each seed.
        sd: the deviation that is shown behind their mean; NaN if there is none.
        doubt: half the width of its 95 % interval; 0 where nothing is known of it, so that the
            number alone decides.
    """

    values: Sequence[float | int]
    sd: float | int = math.nan
    doubt: float | int = 0.0

    @property
    def value(self) -> float:
        """The mean of all seeds."""
        return math.fsum(self.values) / len(self.values)

    def __str__(self) -> str:
        error = f" ± {self.sd:.2g}" if math.isfinite(self.sd) else ""
        return f"{self.value:.4g}{error}"


Numbers = Mapping[str, Number]
"""Numbers by what the wildcards of their row and column stand for; "" without wildcards."""


def over_seeds(values: Sequence[float | int]) -> Number:
    """The mean of repetitions. The doubt about it is Student's.

    Args:
        values: one for each repetition.

    >>> str(over_seeds([1.0, 2.0, 3.0]))
    '2 ± 1'
    """
    number = Number(values)
    if len(values) == 1:
        return number
    squares = math.fsum((v - number.value) ** 2 for v in values)
    return with_error(values, math.sqrt(squares / (len(values) - 1)), len(values))


def with_error(values: Sequence[float | int], sd: float | int, count: int | None = None) -> Number:
    """A number whose spread is known.

    Args:
        values: one for each repetition.
        sd: deviation of what was averaged, or a standard error.
        count: how many were averaged; None if ``sd`` is a standard error.
    """
    from scipy.stats import t

    if not math.isfinite(sd) or count == 1:
        return Number(values, sd)
    width = 1.96 if count is None else float(t.ppf(0.975, count - 1)) / math.sqrt(count)
    return Number(values, sd, width * sd)


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
        """A setting of a step by its dotted name."""
        value: Any = self.of(step)[0]["settings"]
        for name in path.split("."):
            value = value[name]
        return value

    def read(
        self, step: str, table: str, row: str | Sequence[str], column: str, count: int | None = None
    ) -> Numbers:
        """Numbers of a table.

        Args:
            step: whose results.
            table: its name; ``one`` and ``multi`` are the posteriors of a comparison by method
                and number, and ``floor`` is the noise of as many networks as they pool.
            row: its first cells, with ``*``, or ``* but X``, for several rows.
            column: its heading, ``*`` for all after the first, ``first *`` or ``last *``.
            count: how many were averaged for the error of the table, if it is their deviation.
        """
        if table in ("one", "multi", "floor"):
            return self._posteriors(step, table, str(row), column)
        tables = [result["tables"].get(table) for result in self.of(step)]
        if None in tables:
            raise Missing(f"the results of `{step}` have no table {table!r}")
        patterns = [row] if isinstance(row, str) else row
        header = [str(name).strip() for name in tables[0]["header"]]
        columns = {"*": range(1, len(header)), "first *": [1], "last *": [len(header) - 1]}.get(
            column, [k for k, name in enumerate(header) if name == column]
        )
        numbers: dict[str, Number] = {}
        by_name = [{_first(r, len(patterns)): r for r in one["rows"]} for one in tables]
        for name in by_name[0]:
            if all(map(_matches, name, patterns)) and all(name in rows for rows in by_name):
                free = [n for n, p in zip(name, patterns, strict=True) if "*" in p]
                for k in columns:
                    key = ", ".join([*free, header[k]] if column == "*" else free)
                    cells = [rows[name][k] for rows in by_name]
                    if not isinstance(cells[0], str):
                        numbers[key] = _number(cells, count)
        if not numbers:
            where = f"row {', '.join(patterns)!r} and column {column!r}"
            raise Missing(f"{table!r} of `{step}` has no number in {where}")
        return numbers

    def _posteriors(self, step: str, mode: str, method: str, name: str) -> Numbers:
        numbers: dict[str, Number] = {}
        for row in self.of(step)[0].get("rows", ()):
            in_mode = row["mode"] == ("multi" if mode == "floor" else mode)
            if not (in_mode and name in row["numbers"] and _matches(row["method"], method)):
                continue
            key = row["method"] if "*" in method else ""
            if mode == "floor":
                floor = ("Noise floor", f"{row['pooled']} networks")
                (cell,) = self.read(step, "table1", floor, COLUMNS[name].title).values()
                numbers[key] = Number([cell.value / 100], cell.sd / 100, cell.doubt / 100)
                continue
            value, error = map(_finite, row["numbers"][name])
            numbers[key] = with_error([value], error, row["seeds"] if mode == "one" else None)
        if not numbers:
            raise Missing(f"the rows of `{step}` have no number {name!r} of {method}, {mode} mode")
        return numbers


def _matches(text: str, pattern: str) -> bool:
    pattern, _, excluded = pattern.partition(" but ")
    return text != excluded and pattern in ("*", text)


def _first(cells: Sequence[Any], count: int) -> tuple[str, ...]:
    return tuple(str(cell).strip() for cell in cells[:count])


def _number(cells: Sequence[Any], count: int | None) -> Number:
    """A cell of every seed. That of a single seed has the error that its table states."""
    values = [_finite(cell["value"] if isinstance(cell, Mapping) else cell) for cell in cells]
    if len(cells) == 1 and isinstance(cells[0], Mapping):
        return with_error(values, _finite(cells[0]["error"]), count)
    return over_seeds(values)


def _finite(value: float | int | None) -> float:
    return math.nan if value is None else float(value)
