"""How the channels of operands meet element by element, in sums and in products."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.symmetry.rules.constraints import Constraints, Labels, Product
from lightning_bnn.symmetry.rules.labels import (
    STRUCTURAL_ZERO,
    Noise,
    Unsupported,
    core,
    narrow_except,
    varies,
)

__all__ = ["align", "meet_noise", "multiply_labels", "tie_permutations", "unify"]


def align(operands: Sequence[Tensor]) -> list[Tensor]:
    """Give the operands the same number of dimensions, as broadcasting does."""
    ndim = max(t.ndim for t in operands)
    return [t[(None,) * (ndim - t.ndim)] for t in operands]


def tie_permutations(system: Constraints, x: Tensor, y: Tensor) -> None:
    """Channels that meet element by element move together.

    A dimension that one operand broadcasts (size 1) needs no tie: then only the blocks over the
    dimensions that both have must stay together.
    """
    x, y = align([x, y])
    if bool((core(x) < 0).all()) or bool((core(y) < 0).all()):
        return
    moving = [d for d, (a, b) in enumerate(zip(varies(x), varies(y), strict=True)) if a or b]
    free = [d for d in moving if x.shape[d] == 1 or y.shape[d] == 1]
    shared = [d for d in moving if d not in free]
    x, y = narrow_except(x, moving), narrow_except(y, moving)
    if not free:
        system.tie(x, y, ("permutation",))
    elif shared:
        system.block(np.concatenate([_rows(x, shared, y), _rows(y, shared, x)], 1))


def meet_noise(system: Constraints, noise: Noise, labels: Tensor) -> None:
    """Channels that meet the same draws move together; where they first meet, the draws follow."""
    x, y = align([labels, noise.labels])
    if noise.source < 0:
        system.freeze(labels, ("permutation",))
        return
    if noise.source not in system.noise:
        moving = [m and n > 1 for m, n in zip(varies(x), y.shape, strict=True)]
        own = system.fresh(*[n if m else 1 for m, n in zip(moving, y.shape, strict=True)])
        system.noise[noise.source] = own.expand(y.shape)
    tie_permutations(system, system.noise[noise.source], labels)


def unify(system: Constraints, operands: Sequence[Tensor]) -> Tensor:
    """Labels of a sum: all three kinds are tied; returned in broadcast shape."""
    operands = align(operands)
    for i, x in enumerate(operands):
        for y in operands[:i]:
            tie_permutations(system, x, y)
    full = torch.broadcast_tensors(*operands)
    moving = [d for d in range(full[0].ndim) if any(varies(t)[d] for t in full)]
    small = [narrow_except(t, moving) for t in full]
    for other in small[1:]:
        system.tie(small[0], other, ("scale", "sign"))
    best = covering(operands, moving)
    out = torch.broadcast_to(operands[best], full[0].shape)
    if bool((core(out) < 0).any()):
        for other in full:
            out = torch.where(out < 0, other, out)
    return out


def covering(operands: Sequence[Tensor], moving: Sequence[int]) -> int:
    """Of the operands that reach along every moving dimension, the one with fewest channels."""
    candidates = [
        i
        for i, t in enumerate(operands)
        if all(t.shape[d] > 1 or all(o.shape[d] == 1 for o in operands) for d in moving)
    ]
    if not candidates:
        raise Unsupported("an outer product of channels")
    return min(
        candidates,
        key=lambda i: (not bool((core(operands[i]) > 0).any()), sum(varies(operands[i]))),
    )


def multiply_labels(system: Constraints, x: Tensor, y: Tensor, inverse: bool = False) -> Tensor:
    """Labels of a product (or quotient): permutations tied, log scales and signs added."""
    x, y = align([x, y])
    tie_permutations(system, x, y)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if bool((core(y) <= 0).all()):
        return torch.broadcast_to(x, shape)
    if bool((core(x) <= 0).all()) and not inverse:
        return torch.broadcast_to(y, shape)
    full_x, full_y = torch.broadcast_to(x, shape), torch.broadcast_to(y, shape)
    moving = [d for d in range(len(shape)) if varies(full_x)[d] or varies(full_y)[d]]
    a, b = (narrow_except(t, moving) for t in (full_x, full_y))
    out = system.fresh(*a.shape)
    try:
        base = torch.broadcast_to((x, y)[covering([x, y], moving)], shape)
        system.tie(out, narrow_except(base, moving), ("permutation",))
    except Unsupported:
        _outer_product(system, out, a, b)
    if varies(full_x).count(True) < varies(full_y).count(True) and not inverse:
        a, b = b, a
    zero = (a < 0) | (b < 0)
    parts = (np.ravel(t[~zero].numpy()) for t in (out, a.contiguous(), b.contiguous()))
    product, first, second = parts
    system.products.append(Product(product, first, second, inverse))
    return torch.where(zero, STRUCTURAL_ZERO, out).expand(shape)


def _outer_product(system: Constraints, out: Tensor, a: Tensor, b: Tensor) -> None:
    """Channels of two operands that meet in all pairs: each row and each column is a block."""
    for operand in (a, b):
        shared = [d for d, moves in enumerate(varies(operand)) if moves]
        system.block(np.concatenate([_rows(out, shared, operand), _rows(operand, shared, out)], 1))


def _rows(x: Tensor, shared: Sequence[int], other: Tensor) -> Labels:
    shape = [
        max(a, b) if d in shared else a
        for d, (a, b) in enumerate(zip(x.shape, other.shape, strict=True))
    ]
    rest = [d for d in range(x.ndim) if d not in shared]
    count = int(np.prod([shape[d] for d in shared]))
    return x.expand(shape).permute(*shared, *rest).reshape(count, -1).numpy()
