"""`reasons`: the operations that tie the units of a tensor, or hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from weightsym.dimensions.reading import Reading
from weightsym.dimensions.reports import report
from weightsym.dimensions.system import System
from weightsym.dimensions.values import Ints

__all__ = ["reasons"]

_UNNAMED = ("others",)


def reasons(reading: Reading, tensor: str) -> list[str]:
    """Say which operations tie the units of a tensor to others, or hold them.

    Every line names an axis, what is said about its units, and the operation that says so, with its
    line in the code of the network.
    """
    parameters = reading.parameters
    if tensor not in parameters:
        raise ValueError(f"no output depends on a tensor {tensor!r}, but on {sorted(parameters)}.")
    lines = []
    for part in parameters[tensor].parts:
        is_own = np.zeros(reading.system.count, bool)
        is_own[part.labels.numpy()] = True
        axis = ", ".join(map(str, sorted(part.dims))) or "all"
        lines += [f"{tensor}, axis {axis}: {text}" for text in _statements(reading, is_own)]
    return list(dict.fromkeys(lines))


def _statements(reading: Reading, is_own: NDArray[np.bool_]) -> Iterator[str]:
    """By operation, with which tensors units, scales and signs go, and what is held."""
    partners: dict[int, dict[tuple[str, ...], dict[str, None]]] = {}
    for origin, relation, rows in _rows(reading.system):
        selected = rows[is_own[rows].any(1) & (rows >= 0).all(1)]
        if len(selected):
            others = _tensors_of(reading, selected[~is_own[selected]]) or _UNNAMED
            key = others if rows.shape[1] > 1 else ()
            partners.setdefault(origin, {}).setdefault(key, {})[relation] = None
    sentences: set[str] = set()
    for origin in sorted(partners):
        texts = [
            f"{_listed(kinds)} {'go with ' + _listed(others) if others else 'are held'}"
            for others, kinds in partners[origin].items()
            if others != _UNNAMED or all(partner in ((), _UNNAMED) for partner in partners[origin])
        ]
        text = f"{'; '.join(texts)}: {_operation(reading, origin)}"
        if text not in sentences:
            sentences.add(text)
            yield text + " in training" * _is_in_training(reading, origin)


def _rows(system: System) -> Iterator[tuple[int, str, Ints]]:
    """All statements: the operation that says it, what it is about, and its labels."""
    for tie in system.ties:
        yield tie.origin, "units", tie.pairs
    for equation in system.scales:
        yield equation.origin, "scales", equation.labels
    for equation in system.signs:
        yield equation.origin, "signs", equation.labels
    for labels, _, origin in system.colours:
        yield origin, "places", labels[:, None]


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _tensors_of(reading: Reading, labels: Ints) -> tuple[str, ...]:
    """The tensors that some labels belong to."""
    return tuple(
        name
        for name, parameter in reading.parameters.items()
        if any(np.isin(part.labels.numpy(), labels).any() for part in parameter.parts)
    )


def _is_in_training(reading: Reading, origin: int) -> bool:
    operations, first = reading.operations, reading.programs[0]
    is_operation = 0 <= origin < len(operations)
    return is_operation and operations[origin].graph is not first.graph


def _operation(reading: Reading, origin: int) -> str:
    operations = reading.operations
    if origin < 0:
        return "its being a statistic"
    if origin >= len(operations):
        return "what the network returns and writes"
    where = report(operations[origin], "")
    module = f" in `{where.module}`" if where.module else ""
    return f"{where.operation}{module}{f' at {where.line}' if where.line else ''}"
