"""Numbers derived from those that claims read: differences, ratios, the largest, the last."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning_bnn.studies.claims.evidence import Missing, Quantities, Quantity
from lightning_bnn.studies.claims.numbers import Number, minus, over_seeds

__all__ = ["DERIVED", "paired"]


def paired(*operands: Quantities) -> dict[str, tuple[Quantity, ...]]:
    """Numbers that have the same key. One without a key goes with every other.

    Args:
        *operands: numbers by key.
    """
    keyed = [one for one in operands if "" not in one]
    keys = [k for k in (keyed or operands)[0] if all(k in one for one in keyed)]
    if not keys:
        raise Missing("no row or column has all numbers that are compared")
    return {k: tuple(one[""] if "" in one else one[k] for one in operands) for k in keys}


def _difference(one: Quantity, other: Quantity) -> Quantity:
    """Its number takes the errors as independent. Its values are differences seed by seed."""
    values = [a - b for a, b in zip(one.values, other.values, strict=False)]
    return Quantity(values, minus(one.number, other.number))


def _minus(one: Quantities, other: Quantities) -> Quantities:
    return {key: _difference(a, b) for key, (a, b) in paired(one, other).items()}


def _ratio(one: Quantities, other: Quantities) -> Quantities:
    ratios = {
        key: [x / y if y else math.nan for x, y in zip(a.values, b.values, strict=True)]
        for key, (a, b) in paired(one, other).items()
    }
    return {key: Quantity(values, over_seeds(values)) for key, values in ratios.items()}


def _rises(x: Quantities) -> Quantities:
    """From each row to the next."""
    keys = [*x]
    return {b: _difference(x[b], x[a]) for a, b in zip(keys, keys[1:], strict=False)}


def _extreme(choose: Callable[..., Any]) -> Callable[[Quantities], Quantities]:
    def extreme(x: Quantities) -> Quantities:
        values = [choose(of_seed) for of_seed in zip(*(q.values for q in x.values()), strict=True)]
        chosen = choose(x.values(), key=lambda q: q.number.value)
        return {"": Quantity(values, chosen.number)}

    return extreme


def _at(place: Callable[[int], int], least: int = 1) -> Callable[[Quantities], Quantities]:
    """The row in a place, of as many as there are."""

    def at(x: Quantities) -> Quantities:
        if len(x) < least:
            raise Missing(f"there are {len(x)} rows instead of {least} at least")
        return {"": [*x.values()][place(len(x))]}

    return at


def _names(x: Quantities) -> Quantities:
    """The text that the wildcard matches, as a number."""
    return {k: Quantity([float(k)] * len(q.values), Number(float(k))) for k, q in x.items()}


def _rank_correlation(x: Quantities) -> Quantities:
    """Spearman's, of the numbers with the names of their rows, in every seed."""
    from scipy.stats import spearmanr

    names = [float(key) for key in x]
    seeds = zip(*(q.values for q in x.values()), strict=True)
    values = [float(spearmanr(names, one).statistic) for one in seeds]
    return {"": Quantity(values, over_seeds(values))}


def _bonferroni(x: Quantities) -> Quantities:
    """The least p of all rows and seeds, times their number, or NaN where a test has none."""
    values = [v for q in x.values() for v in q.values]
    least = math.nan if any(map(math.isnan, values)) else min(values) * len(values)
    return {"": Quantity([least], Number(least))}


def _finite(x: Quantities) -> Quantities:
    """Those that there are: a grid may not reach all."""
    kept = {key: [v for v in q.values if math.isfinite(v)] for key, q in x.items()}
    found = {key: Quantity(values, over_seeds(values)) for key, values in kept.items() if values}
    if not found:
        raise Missing("there is no number in any row")
    return found


def _linear(x: Quantities, factor: Quantities, shift: Quantities) -> Quantities:
    by, plus = factor[""].number.value, shift[""].number.value
    return {
        key: Quantity(
            [by * v + plus for v in q.values],
            Number(by * q.number.value + plus, abs(by) * q.number.sd, abs(by) * q.number.doubt),
        )
        for key, q in x.items()
    }


DERIVED: Mapping[str, tuple[Callable[..., Quantities], int]] = {
    "minus": (_minus, 2),
    "ratio": (_ratio, 2),
    "linear": (_linear, 3),
    "rises": (_rises, 1),
    "least": (_extreme(min), 1),
    "most": (_extreme(max), 1),
    "first": (_at(lambda n: 0), 1),
    "second": (_at(lambda n: 1, 2), 1),
    "last": (_at(lambda n: -1), 1),
    "first fifth": (_at(lambda n: (n - 1) // 5), 1),
    "two fifths": (_at(lambda n: 2 * (n - 1) // 5, 4), 1),
    "last fifth": (_at(lambda n: n - 1 - n // 5), 1),
    "names": (_names, 1),
    "rank correlation": (_rank_correlation, 1),
    "finite": (_finite, 1),
    "bonferroni": (_bonferroni, 1),
}
"""By the name that the table of claims uses, and of how many operands."""
