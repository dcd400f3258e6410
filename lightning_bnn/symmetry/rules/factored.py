"""Tensors that are computed from weights, and products of activations: as parts and as labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.symmetry.rules.broadcasting import multiply_labels
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Constant,
    Factored,
    Unsupported,
    Value,
    Weight,
    compress,
    constant_labels,
    core,
    is_operand,
    is_zero,
    moving_dims,
    spread,
)
from lightning_bnn.symmetry.rules.leaves import leaf, note_readers
from lightning_bnn.symmetry.rules.parts import aligned, apart, merged, outer_product, total
from lightning_bnn.symmetry.rules.reduction import reduce_channels

__all__ = [
    "as_parts",
    "as_value",
    "as_values",
    "contracted",
    "factored",
    "is_active",
    "like",
    "outer_parts",
    "parts_of",
    "sum_of",
]


def parts_of(system: Constraints, x: Any) -> list[Tensor]:
    """The parts of any operand; numbers have none."""
    if isinstance(x, Factored):
        return list(x.parts)
    if isinstance(x, Weight):
        return apart(system, leaf(system, x))
    if isinstance(x, Value | Constant):
        labels = x.labels if isinstance(x, Value) else constant_labels(x.tensor)
        if bool((core(labels) < 0).any()):
            raise Unsupported("a weight beside zeros")
        still = [d for d, n in enumerate(labels.shape) if n > 1 and d not in moving_dims(labels)]
        return [core(labels), *(_fixed_along(d, labels) for d in still)]
    return []


def _fixed_along(dim: int, labels: Tensor) -> Tensor:
    """What is at different indices differs, and no symmetry moves it."""
    return torch.full([n if d == dim else 1 for d, n in enumerate(labels.shape)], FROZEN)


def contracted(
    system: Constraints,
    operands: Sequence[Sequence[Tensor]],
    letters: Sequence[str],
    result: str,
    readers: Sequence[int] = (),
) -> list[Tensor]:
    """Parts of an einsum: along a dimension that is summed, what meets there must cancel.

    Args:
        system: gets the ties.
        operands: the parts of each operand.
        letters: one word for each operand, with a letter for each of its dimensions.
        result: the letters of the result.
        readers: the operands that are weights which read what the others write.
    """
    note_readers(system, operands, letters, result, readers)
    names = [*result, *sorted({c for t in letters for c in t} - set(result))]
    parts = [spread(p, t, names) for ps, t in zip(operands, letters, strict=True) for p in ps]
    parts = [p for p in parts if moving_dims(p) or int(p) != FROZEN]
    pending = set(range(len(result), len(names)))
    while pending:
        met, parts, summed = _meeting(parts, pending.pop(), len(result))
        pending -= summed
        parts += _summed(system, met, summed, keeps_size=not readers)
    return merged(system, [p[(...,) + (0,) * (len(names) - len(result))] for p in parts])


def _meeting(
    parts: list[Tensor], dim: int, kept: int
) -> tuple[list[Tensor], list[Tensor], set[int]]:
    """The parts that meet along a summed dimension, or along others linked to it; and the rest."""
    summed, met = {dim}, []
    while new := [p for p in parts if summed & set(moving_dims(p))]:
        parts = [p for p in parts if not summed & set(moving_dims(p))]
        met += new
        summed |= {d for p in new for d in moving_dims(p) if d >= kept}
    return met, parts, summed


def _summed(
    system: Constraints, met: Sequence[Tensor], summed: set[int], keeps_size: bool
) -> list[Tensor]:
    """What is left of parts that are summed; of one number without a weight, its size."""
    if not met:
        return []
    if len(met) == 2:  # a sum over pairs, which matrices may mix
        product = core(multiply_labels(system, met[0], met[1], summed=sorted(summed)))
    else:
        for part in met:
            system.mark(part, "diagonal")
        product = core(reduce(lambda a, b: multiply_labels(system, a, b), met))
    moving = [d for d in moving_dims(product) if d in summed]
    out = core(reduce_channels(system, product, moving))
    if moving_dims(out) or keeps_size:
        return [out]
    system.freeze(out, ("scale", "sign"))
    return []


# ------------------------------------------------------------ what comes out
def factored(parts: Sequence[Tensor], shape: Sequence[int], active: bool = False) -> Any:
    """Parts that move, for a tensor of this shape; an activation of one part is a plain value.

    A part without dimensions is a single channel, or a factor of all of the tensor.
    """
    cores = [core(p)[(None,) * (len(shape) - p.ndim)] for p in parts]
    cores = [p for p in cores if moving_dims(p) or int(p) != FROZEN]
    moved = [p for p in cores if bool((p != FROZEN).any())]
    if active and len(moved) < 2:
        labels = moved[0] if moved else torch.full((1,) * len(shape), FROZEN)
        return Value(compress(labels.expand(tuple(shape))))
    return Factored(tuple(cores), torch.Size(shape), active)


def is_active(x: Any) -> bool:
    """Whether an operand is an activation."""
    return isinstance(x, Value) or (isinstance(x, Factored) and x.active)


def like(parts: Sequence[Tensor], shape: Sequence[int], *operands: Any) -> Any:
    """What these parts stand for: a computed weight, or an activation if an operand is one."""
    return factored(parts, shape, any(map(is_active, operands)))


def outer_parts(system: Constraints, x: Tensor, y: Tensor) -> list[Tensor]:
    """Parts of a product of activations whose channels lie along dimensions of their own.

    Such as keys times values, whose two sides may be mixed by themselves.
    """
    first, second = (set(moving_dims(t)) for t in (x, y))
    if not first - second or not second - first or any(bool((core(t) < 0).any()) for t in (x, y)):
        return []
    return merged(system, [p for t in (x, y) for p in parts_of(system, Value(t))])


def sum_of(system: Constraints, shape: Sequence[int], x: Any, y: Any) -> Any:
    """A sum, part with part; zeros leave the other operand as it is."""
    first, second = ([] if is_zero(z) else aligned(parts_of(system, z), len(shape)) for z in (x, y))
    if is_zero(x) or is_zero(y):
        return like([*first, *second], shape, x, y)
    active = is_active(x) or is_active(y)
    return like(total(system, first, second, active), shape, x, y)


def as_value(system: Constraints, x: Factored, like: Tensor | None = None) -> Value:
    """As a plain value: one part stays, that along the dimensions of others, or the last.

    Of an activation every pair of channels becomes one.
    """
    if x.active:
        labels = outer_product(system, x.parts, len(x.shape))
        return Value(compress(labels.expand(x.shape)))
    parts = sorted(x.parts, key=moving_dims)
    if like is not None:
        ndim = len(x.shape)
        dims = [d - like.ndim + ndim for d in moving_dims(like)]
        parts.sort(key=lambda p: moving_dims(p) == dims)
    for part in parts[:-1]:
        system.freeze(part)
    labels = parts[-1] if parts else torch.full((1,) * len(x.shape), FROZEN)
    return Value(compress(labels).expand(x.shape))


def as_parts(system: Constraints, args: Any, kwargs: Any) -> Any:
    """Arguments whose weights are known by their parts."""
    return tree_map(
        lambda x: factored(parts_of(system, x), x.shape) if isinstance(x, Weight) else x,
        (args, kwargs),
        is_leaf=is_operand,
    )


def as_values(system: Constraints, args: Any, kwargs: Any) -> Any:
    """Arguments for a rule that knows activations only: of computed weights one part is left."""
    leaves = tree_leaves((args, kwargs), is_leaf=is_operand)
    like = next((x.labels for x in leaves if isinstance(x, Value)), None)
    return tree_map(
        lambda x: as_value(system, x, like) if isinstance(x, Factored) else x,
        (args, kwargs),
        is_leaf=is_operand,
    )
