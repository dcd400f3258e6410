"""Random numbers: they move with the values that they are combined with, and have no unit.

What is drawn is exchangeable along every dimension: its law stays the same if units change places,
as long as all that meets one draw moves together. Nothing makes up for a scale or a sign of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Node

from weightsym.discovery.dimensions.nodes import operation_of
from weightsym.discovery.dimensions.system import System
from weightsym.discovery.dimensions.values import Factor, Value, with_dims

LAWS = frozenset("normal poisson binomial _standard_gamma".split())
"""Operations whose operands say, entry by entry, by which law a number is drawn."""
_TYPES = ("_to_copy", "to", "clone", "detach", "alias", "lift_fresh_copy", "contiguous")


def is_pointwise(node: Node) -> bool:
    """Return whether an operation is elementwise."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or operation_of(node) in _TYPES


def is_noise(values: Sequence[Value]) -> bool:
    """Return whether noise is the only moving part of some values."""
    factors = [p for v in values for p in v.factors]
    return bool(factors) and all(p.is_noise for p in factors)


def noise(system: System, shape: Sequence[int]) -> Value:
    """Return independent, identically distributed random numbers."""
    return Value.of(
        shape,
        [
            Factor(
                system.new(n).reshape([-1 if k == d else 1 for k in range(len(shape))]),
                Fraction(0),
                0,
                is_noise=True,
            )
            for d, n in enumerate(shape)
            if n > 1
        ],
    )


def met(values: Sequence[Value]) -> list[Value]:
    """Align operands: noise moves along the dimensions along which other operands move."""
    factors = [(p, len(v.shape)) for v in values for p in v.factors]
    if not any(p.is_noise for p, _ in factors) or all(p.is_noise for p, _ in factors):
        return list(values)
    dims = {d - n for p, n in factors if not p.is_noise for d in p.dims}

    def moves(factor: Factor, ndim: int) -> bool:
        return not factor.is_noise or {d - ndim for d in factor.dims} <= dims

    return [
        replace(v, factors=tuple(p for p in v.factors if moves(p, len(v.shape)))) for v in values
    ]


def of_noise(system: System, values: Sequence[Value], size: Any) -> Value:
    """Apply an elementwise function to random numbers and any other values."""
    values = [with_dims(v, len(size.shape)) for v in values]
    factors: dict[frozenset[int], Factor] = {}
    for factor in (p for v in values for p in v.factors):
        first = factors.setdefault(factor.dims, factor)
        system.tie(first.labels, factor.labels, "sum")
    for value in (v for v in values if not v.factors):
        for factor in factors.values():
            system.stand_beside(factor, value)
    return Value.of(size.shape, tuple(factors.values()))
