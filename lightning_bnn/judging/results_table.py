"""Numbers with names such as ``test/acc`` as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["results_table"]


def results_table(values: Mapping[str, Any]) -> str:
    """Numbers with names such as ``test/acc`` and ``test/svhn/AUROC``: a row for each set.

    >>> print(results_table({"test/acc": 0.9, "test/svhn/AUROC": 0.8}))
    set    acc      AUROC
    test   0.9000
    svhn            0.8000
    """
    rows: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        group, _, number = name.rpartition("/")
        rows.setdefault(group.rpartition("/")[2] or "all", {})[number] = f"{float(value):.4f}"
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [
        ["set", *columns],
        *([n, *(row.get(c, "") for c in columns)] for n, row in rows.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "   ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
