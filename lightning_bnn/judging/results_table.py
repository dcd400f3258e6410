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
        *sets, number = name.split("/")
        rows.setdefault(sets[-1] if sets else "all", {})[number] = f"{float(value):.4f}"
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [["set", *columns]]
    lines += [[name, *(row.get(key, "") for key in columns)] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = ([cell.ljust(n) for cell, n in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("   ".join(line).rstrip() for line in cells)
