"""Tables of the same study with several seeds as one, with deviations over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_bnn.studies.claims.numbers import over_seeds
from lightning_bnn.tables import Cell, Measured, Table

__all__ = ["over_all_seeds"]


def over_all_seeds(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The tables of a study: numbers as mean and deviation, what is the same for all as it is.

    A table whose rows differ between seeds is that of the first.

    Args:
        results: what the study has written, one for each seed.
    """
    return [_merged([one["tables"][name] for one in results]) for name in results[0]["tables"]]


def _merged(tables: Sequence[Mapping[str, Any]]) -> Table:
    first = tables[0]
    grids = [[cell for row in table["rows"] for cell in row] for table in tables]
    alike = len({len(grid) for grid in grids}) == 1
    found = [_cell(of_seeds) for of_seeds in zip(*grids, strict=True)] if alike else [None]
    cells = [cell for cell in found if cell is not None]
    if len(cells) < len(found):
        cells = [cell for of_one in zip(grids[0]) if (cell := _cell(of_one)) is not None]
    width = len(first["header"])
    rows = [cells[k : k + width] for k in range(0, len(cells), width)]
    return Table(first["title"], first["header"], rows, note=first["note"])


def _cell(found: Sequence[Any]) -> Cell | None:
    """One cell of all seeds; None if they cannot be brought together."""
    if any(isinstance(cell, str) for cell in found):
        return found[0] if len(set(map(str, found))) == 1 else None
    if len(found) == 1 and isinstance(found[0], Mapping):
        return Measured(_number(found[0]["value"]), _number(found[0]["error"]))
    values = [_number(cell["value"] if isinstance(cell, Mapping) else cell) for cell in found]
    if len(set(values)) == 1:
        whole = isinstance(found[0], int)
        return int(values[0]) if whole else values[0]
    mean = over_seeds(values)
    return Measured(mean.value, mean.sd)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
