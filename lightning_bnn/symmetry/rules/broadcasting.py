"""Element by element: which channels of two operands must move together, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.symmetry.rules.constraints import Constraints, Labels, Product
from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    STRUCTURAL_ZERO,
    Noise,
    core,
    moving_dims,
    narrow_except,
)

__all__ = [
    "align",
    "copies",
    "multiply_labels",
    "tie_permutations",
    "tie_to_choice",
    "tie_to_noise",
    "unify",
]

MOST_COPIES = 200_000


def align(*operands: Tensor) -> list[Tensor]:
    """Give the operands the same number of dimensions, as broadcasting does."""
    ndim = max(t.ndim for t in operands)
    return [t[(None,) * (ndim - t.ndim)] for t in operands]


def tie_permutations(system: Constraints, x: Tensor, y: Tensor) -> None:
    """Channels that are combined element by element move together.

    A dimension that one operand broadcasts (size 1) needs no tie: then only the blocks over the
    dimensions that both have must stay together.
    """
    x, y = align(x, y)
    if bool((core(x) < 0).all()) or bool((core(y) < 0).all()):
        return
    moving = moving_dims(x, y)
    broadcast = [d for d in moving if x.shape[d] == 1 or y.shape[d] == 1]
    shared = [d for d in moving if d not in broadcast]
    x, y = narrow_except(x, moving), narrow_except(y, moving)
    if not broadcast:
        _tie_or_colour(system, x, y)
    elif shared:
        _block_over(system, shared, x, y)


def _tie_or_colour(system: Constraints, x: Tensor, y: Tensor) -> None:
    """Numbers beside channels do not move, but they do not tie the channels to each other."""
    for labels, numbers in ((x, y), (y, x)):
        if bool((numbers <= FROZEN).all()):
            system.colour(torch.where(numbers == FROZEN, labels, STRUCTURAL_ZERO))
            return
    system.tie(x, y, ("permutation",))


def tie_to_choice(system: Constraints, choice: Tensor, labels: Tensor) -> None:
    """Channels that something picks, by itself or for all of them at once, as for whole tokens."""
    tie_permutations(system, choice, labels)
    labels, choice = align(labels, choice)
    _mark_products(system, labels, choice, [])


def tie_to_noise(system: Constraints, noise: Noise, labels: Tensor) -> None:
    """Channels that are combined with the same draws move together."""
    if noise.source < 0:
        system.freeze(labels, ("permutation",))
        return
    x, y = align(labels, noise.labels)
    if noise.source not in system.noise:
        moving = moving_dims(x)
        fresh = system.fresh(*[n if d in moving else 1 for d, n in enumerate(y.shape)])
        system.noise[noise.source] = fresh.expand(y.shape)
    tie_permutations(system, system.noise[noise.source], labels)


def unify(system: Constraints, *operands: Tensor) -> Tensor:
    """Labels of a sum: all three kinds are tied; returned in broadcast shape."""
    operands = tuple(align(*operands))
    for i, x in enumerate(operands):
        for y in operands[:i]:
            tie_permutations(system, x, y)
    full = torch.broadcast_tensors(*operands)
    moving = moving_dims(*full)
    first, *others = (narrow_except(t, moving) for t in full)
    for other in others:
        system.tie(first, other, ("scale", "sign"))
    base = _covering(operands, moving)
    if base is None:
        base = _combinations(system, full, moving)
        system.tie(base, first, ("scale", "sign"))
        for labels in (base, *operands):
            system.hold(labels, "sums of all pairs of them")
    out = torch.broadcast_to(base, full[0].shape)
    if bool((core(out) < 0).any()):
        for labels in full:
            out = torch.where(out < 0, labels, out)
    return out


def _covering(operands: Sequence[Tensor], moving: Sequence[int]) -> Tensor | None:
    """Of the operands that reach along every moving dimension, the one with fewest channels."""
    shape = torch.broadcast_shapes(*(t.shape for t in operands))
    candidates = [t for t in operands if all(t.shape[d] == shape[d] for d in moving)]
    return min(
        candidates,
        key=lambda t: (not bool((core(t) > 0).any()), len(moving_dims(t))),
        default=None,
    )


def _combinations(system: Constraints, operands: Sequence[Tensor], moving: Sequence[int]) -> Tensor:
    """New channels in all pairs: each row and each column of them is a block."""
    out = system.fresh(*narrow_except(operands[0], moving).shape)
    for operand in map(core, operands):
        if bool((operand > 0).any()):
            _block_over(system, moving_dims(operand), out, operand)
    return out


def copies(system: Constraints, labels: Tensor, dim: int, number: int) -> Tensor:
    """Channels, and their copies along a dimension of size 1: new ones, which stay with theirs.

    Other than channels that are the same for all tokens, copies may be exchanged.
    """
    small = core(labels)
    shape = [*labels.shape[:dim], number, *labels.shape[dim + 1 :]]
    if bool((small <= FROZEN).any()) or small.numel() * number > MOST_COPIES:
        return labels.expand(shape)
    out = system.fresh(*small.shape[:dim], number, *small.shape[dim + 1 :])
    system.tie(out, small, ("scale", "sign"))
    rows = torch.cat([small, out], dim).movedim(dim, -1)
    system.block(rows.reshape(-1, number + 1), copies=True)
    return out.expand(shape)


def multiply_labels(
    system: Constraints,
    x: Tensor,
    y: Tensor,
    inverse: bool = False,
    summed: Sequence[int] = (),
) -> Tensor:
    """Labels of a product (or quotient): permutations tied, log scales and signs added.

    Over ``summed`` dimensions the products are summed next, so that channels may be mixed there.
    """
    x, y = align(x, y)
    alone = not moving_dims(x, y) and min(x.numel(), y.numel()) > 0
    if alone and int(core(x).min()) > FROZEN and int(core(y).min()) > FROZEN:
        return _multiply_two(system, x, y, inverse)
    tie_permutations(system, x, y)
    _mark_products(system, x, y, [d % x.ndim for d in summed])
    full_x, full_y = torch.broadcast_tensors(x, y)
    if bool((core(y) <= 0).all()):
        return full_x if inverse else _zero_where(y, full_x)
    if bool((core(x) <= 0).all()) and not inverse:
        return _zero_where(x, full_y)
    moving = moving_dims(full_x, full_y)
    a, b = (narrow_except(t, moving) for t in (full_x, full_y))
    base = _covering([x, y], moving)
    if base is None:
        out = _combinations(system, (full_x, full_y), moving)
    else:
        out = system.fresh(*a.shape)
        system.tie(out, narrow_except(base.expand(full_x.shape), moving), ("permutation",))
    if len(moving_dims(full_x)) < len(moving_dims(full_y)) and not inverse:
        a, b = b, a
    zero = (a < 0) | (b < 0)
    product, first, second = (t[~zero].numpy() for t in (out, a, b))
    system.products.append(Product(product, first, second, inverse))
    return torch.where(zero, STRUCTURAL_ZERO, out).expand(full_x.shape)


def _zero_where(constant: Tensor, labels: Tensor) -> Tensor:
    """The labels, but where a constant that they are multiplied by is zero."""
    zero = core(constant) < 0
    return torch.where(constant < 0, STRUCTURAL_ZERO, labels) if bool(zero.any()) else labels


def _multiply_two(system: Constraints, x: Tensor, y: Tensor, inverse: bool) -> Tensor:
    """One channel times another: neither they nor their product stand in the place of others."""
    a, b = core(x), core(y)
    out = system.fresh(*a.shape)
    system.colour(torch.cat([t.reshape(-1) for t in (a, b, out)]))
    for labels in (a, b):
        system.mark(labels, "diagonal")
    product, first, second = (t.numpy().ravel() for t in (out, a, b))
    system.products.append(Product(product, first, second, inverse))
    return out.expand(torch.broadcast_shapes(x.shape, y.shape))


def _mark_products(system: Constraints, x: Tensor, y: Tensor, summed: Sequence[int]) -> None:
    """Channels that are multiplied element by element, by numbers that differ, do not mix.

    An operand mixes along dimensions that the other one broadcasts, and along those that are summed
    over if both have them.
    """
    for operand, other in ((x, y), (y, x)):
        moving = moving_dims(operand)
        broadcast = [d for d in moving if other.shape[d] == 1]
        lone_sum = any(d in summed for d in broadcast)
        if lone_sum or (moving and not {*broadcast, *summed} & set(moving)):
            by_numbers = bool((core(other) <= 0).all()) and not lone_sum
            if not by_numbers:  # those have told the channels apart
                system.mark(operand, "diagonal")


def _block_over(system: Constraints, shared: Sequence[int], x: Tensor, y: Tensor) -> None:
    """Whatever two operands have at one index of the shared dimensions stays together."""
    rows = [_rows(x, shared, y), _rows(y, shared, x)]
    system.block(np.concatenate(rows, 1), min(r.shape[1] for r in rows) == 1, mixes=True)


def _rows(x: Tensor, shared: Sequence[int], other: Tensor) -> Labels:
    sizes = zip(x.shape, other.shape, strict=True)
    shape = [max(a, b) if d in shared else a for d, (a, b) in enumerate(sizes)]
    rest = [d for d in range(x.ndim) if d not in shared]
    count = int(np.prod([shape[d] for d in shared]))
    return x.expand(shape).permute(*shared, *rest).reshape(count, -1).numpy()
