"""Curves that lie on each other are striped, so that each of them can be seen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["FEW", "stripes"]

_STRIPE = 2.4
"""Widths of a line that a stripe is long."""
_CLOSE, _LONG = 0.012, 0.08
"""Shares of a panel: how near curves are that cover each other, and how long they do."""
FEW = 13
"""Points of a curve that are marked one by one; such curves cover each other if all of them do."""
Points = tuple[Any, Any]
"""Both coordinates of a curve as arrays, from left to right."""


def stripes(panels: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, Any]:
    """Dashes of the curves that lie on others in some panel, by name.

    Of R curves that lie on each other, the first is whole, and what is above it leaves out more and
    more of every period, so that each of them is seen for an R-th of the way.

    Args:
        panels: for every title, both coordinates by name.
    """
    groups: list[set[str]] = []
    order = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    for pair in _covering(panels):
        touched = [group for group in groups if group & pair]
        groups = [group for group in groups if not group & pair] + [pair.union(*touched)]
    dashes: dict[str, Any] = {}
    for group in groups:
        members = sorted(group, key=order.index)
        for rank, name in enumerate(members[1:], 1):
            visible_points = _STRIPE * (len(members) - rank)
            dashes[name] = (0, (visible_points, _STRIPE * len(members) - visible_points))
    return dashes


def _covering(panels: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]) -> list[set[str]]:
    """The pairs of names whose curves cover each other somewhere."""
    overlaps = []
    for curves in panels.values():
        visible = {name: _points(*curve) for name, curve in curves.items() if len(curve[0]) > 1}
        height = _height(visible)
        for (one, a), (other, b) in itertools.combinations(visible.items(), 2):
            if _cover(a, b, height):
                overlaps.append({one, other})
    return overlaps


def _points(x: Tensor, y: Tensor) -> Points:
    order = x.argsort()
    return x[order].double().numpy(), y[order].double().numpy()


def _height(curves: Mapping[str, Points]) -> float:
    """The height that all curves take up of the vertical axis."""
    import numpy as np

    joined = np.concatenate([np.zeros(0), *(y[np.isfinite(y)] for _, y in curves.values())])
    return float(np.ptp(joined)) if len(joined) else 0.0


def _cover(a: Points, b: Points, height: float) -> bool:
    """Tell whether one curve covers another over a stretch that both have."""
    import numpy as np

    low, high = max(a[0][0], b[0][0]), min(a[0][-1], b[0][-1])
    if not high > low:
        return False
    few = max(len(a[0]), len(b[0])) <= FEW
    x = a[0] if few else np.linspace(low, high, 200)
    close = np.abs(np.interp(x, *a) - np.interp(x, *b)) <= _CLOSE * height
    return bool(close.all() if few else close.mean() > _LONG)
