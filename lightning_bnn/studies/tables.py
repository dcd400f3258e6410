"""Plain text tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["mean_and_spread", "text_table"]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first is a name, the others are numbers.

    >>> print(text_table(["name", "a"], [["x", "1.0"]]))
    name    a
    x     1.0
    """
    widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]
    lines = []
    for row in (header, *rows):
        first = row[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def mean_and_spread(values: Tensor, digits: int = 3) -> str:
    """Mean and standard deviation.

    >>> import torch
    >>> mean_and_spread(torch.tensor([1.0, 2.0, 3.0]), 1)
    '2.0 +- 1.0'
    """
    return f"{float(values.mean()):.{digits}f} +- {float(values.std()):.{digits}f}"
