"""Plain text tables of numbers, and files for pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

__all__ = ["check_figure", "mean_and_spread", "text_table"]


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


def check_figure(path: str) -> None:
    """Refuse a file that no picture can be written to, before the work is done."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    file = Path(path)
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if not file.parent.is_dir() or file.suffix[1:] not in known:
        raise ValueError(
            "`figure` must be a file in a folder that exists, ending in one of "
            f"{', '.join(known)}, "
            f"got {path!r}."
        )
