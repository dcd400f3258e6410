"""Tables of numbers with errors, as text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import html
import importlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_bnn.extras import needed


class Measured(NamedTuple):
    """A number and its standard error or standard deviation, as stated by the table."""

    value: float
    error: float = math.nan


Cell = str | float | int | Measured


def spread(values: Tensor) -> Measured:
    """Return mean and standard deviation.

    >>> import torch
    >>> spread(torch.tensor([1.0, 2.0, 3.0]))
    Measured(value=2.0, error=1.0)
    """
    error = float(values.std()) if values.numel() > 1 else math.nan
    return Measured(float(values.mean()), error)


@dataclass(frozen=True, repr=False)
class Table:
    """Rows of names and numbers.

    Attributes:
        title: one line above it.
        header: names of the columns; the first ones may hold text.
        rows: cells; a number that is not finite is shown as "/".
        digits: number of decimals, optionally by column (3 by default).
        note: explanation below it.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    digits: int | Mapping[str, int] = 3
    note: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        rows: Sequence[Mapping[str, Cell]],
        digits: int | Mapping[str, int] = 3,
        note: str = "",
    ) -> Table:
        """Build a table from rows of named cells, all in the same order.

        >>> Table.of("", [{"method": "SWAG", "error": 1.0}]).header
        ['method', 'error']
        """
        return cls(title, list(rows[0]), [list(row.values()) for row in rows], digits, note)

    def cells(self) -> list[list[str]]:
        """Return every cell as text, row by row."""
        digits = self.digits
        every = [digits.get(n, 3) if isinstance(digits, Mapping) else digits for n in self.header]
        return [[_shown(cell, k) for cell, k in zip(row, every, strict=True)] for row in self.rows]

    def text(self) -> str:
        """Return the table for a terminal, with aligned columns."""
        parts = [self.title, text_table(self.header, self.cells()), self.note]
        return "\n".join(block for block in parts if block)

    def markdown(self) -> str:
        """Return the table as Markdown.

        >>> print(Table("", ["method", "error"], [["SWAG", Measured(1.0, 0.5)]], 1).markdown())
        | method | error |
        |---|---|
        | SWAG | 1.0 ± 0.5 |
        """
        header, *body = ("| " + " | ".join(row) + " |" for row in (self.header, *self.cells()))
        lines = "\n".join([header, "|" + "---|" * len(self.header), *body])
        parts = [f"**{self.title}**" if self.title else "", lines, self.note]
        return "\n\n".join(block for block in parts if block)

    def csv(self) -> str:
        """Return the table as CSV, with all digits and errors in columns of their own."""
        columns: list[Sequence[Cell]] = []
        for name, *cells in zip(self.header, *self.rows, strict=True):
            pairs = [cell if isinstance(cell, Measured) else (cell, "") for cell in cells]
            columns.append([name, *(value for value, _ in pairs)])
            if any(isinstance(cell, Measured) for cell in cells):
                columns.append([f"{name} (error)", *(error for _, error in pairs)])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
        return text.getvalue()

    def html(self, folded: bool = False) -> str:
        """Return the table for a page or a notebook.

        Args:
            folded: whether a click on the title opens it.

        >>> Table("Errors", ["method", "error"], [["SWAG", 1.0]], 1).html()[:50]
        '<div class="wide open"><table><caption>Errors</cap'
        """
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.header)
        rows = ["".join(f"<td>{html.escape(c)}</td>" for c in row) for row in self.cells()]
        body = "\n".join(f"<tr>{row}</tr>" for row in (head, *rows))
        title = html.escape(self.title)
        caption = "" if folded or not title else f"<caption>{title}</caption>"
        note = f'<p class="about">{html.escape(self.note)}</p>' if self.note else ""
        css_class = "wide" if folded else "wide open"
        table = f'<div class="{css_class}"><table>{caption}\n{body}\n</table></div>{note}'
        return f"<details><summary>{title}</summary>{table}</details>" if folded else table

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with all digits and errors in columns of their own."""
        with needed("A data frame"):
            pandas = importlib.import_module("pandas")
        return pandas.read_csv(io.StringIO(self.csv()))

    def json(self) -> dict[str, Any]:
        """Return plain types with all digits, and null for non-finite numbers."""
        return {
            "title": self.title,
            "header": list(self.header),
            "rows": [[_plain(cell) for cell in row] for row in self.rows],
            "note": self.note,
        }


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns, the first one to the left and those of numbers to the right.

    >>> print(text_table(["name", "a"], [["x", "1.0"]]))
    name    a
    x     1.0
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *numbers in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


_LARGE = 1e9


def _shown(cell: Cell, digits: int) -> str:
    if isinstance(cell, str):
        return cell
    value, error = cell if isinstance(cell, Measured) else (cell, math.nan)
    if not math.isfinite(value):
        return "/"
    number = str(value) if isinstance(value, int) else _rounded(value, digits)
    spread = f"{error:.{digits}f}" if error < _LARGE else f"{error:.0e}"
    return number if not math.isfinite(error) else f"{number} ± {spread}"


def _rounded(value: float, digits: int) -> str:
    """Round to a number of decimals, unless only zeros or noise would remain.

    >>> _rounded(0.12345, 2), _rounded(1e-9, 2), _rounded(0.0, 2), _rounded(1e15, 2)
    ('0.12', '1e-09', '0.00', '1e+15')
    """
    if value != 0 and not 10 ** -(digits + 2) <= abs(value) < _LARGE:
        return f"{value:.0e}"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _plain(cell: Cell) -> Any:
    if isinstance(cell, Measured):
        return {"value": _plain(cell.value), "error": _plain(cell.error)}
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def results_table(values: Mapping[str, Any]) -> str:
    """Arrange numbers named ``test/acc`` or ``test/svhn/AUROC`` in one row per set.

    >>> print(results_table({"test/acc": 0.9, "test/svhn/AUROC": 0.8}))
    set      acc   AUROC
    test  0.9000
    svhn          0.8000
    """
    rows: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        *sets, number = name.split("/")
        rows.setdefault(sets[-1] if sets else "all", {})[number] = f"{float(value):.4f}"
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    cells = [[name, *(row.get(key, "") for key in columns)] for name, row in rows.items()]
    return text_table(["set", *columns], cells)
