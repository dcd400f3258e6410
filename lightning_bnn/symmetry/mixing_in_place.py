r"""Mixings of one tensor in its own memory, for checks: reflections where rotations are free.

A dense rotation of a stream costs as much as a forward on as many rows as the stream has channels.
A reflection mixes all of them, too, and costs two passes.

.. math:: G = 1 - 2 v v^T, \quad |v| = 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_bnn.symmetry.groups import LinearGroup, Symmetries
from lightning_bnn.symmetry.mixing import mixed_axis, random_mixings
from lightning_bnn.symmetry.placements import Axis, Placement

__all__ = ["Mixing", "dense", "mix_", "random_reflections"]

_CHUNK = 2**20


@dataclass(frozen=True, eq=False)
class Mixing:
    """What one group of matrices does: reflections ``(spaces, size)`` or matrices and inverses."""

    vectors: Tensor | None = None
    matrices: Tensor | None = None
    inverses: Tensor | None = None


def random_reflections(sym: Symmetries, generator: torch.Generator) -> list[Mixing]:
    """A random element of every group; those of orthogonal groups are reflections."""
    return [_random(sym, group, generator) for group in sym.linear]


def _random(sym: Symmetries, group: LinearGroup, generator: torch.Generator) -> Mixing:
    if group.kind in ("orthogonal", "centred"):
        v = torch.randn(group.spaces, group.size, generator=generator, dtype=torch.float64)
        v = v - v.mean(-1, keepdim=True) if group.kind == "centred" else v
        return Mixing(v / v.norm(dim=-1, keepdim=True))
    (matrices,) = random_mixings(replace(sym, linear=(group,)), generator)
    return Mixing(None, matrices, torch.linalg.inv(matrices.double()).mT)


def mix_(w: Tensor, sym: Symmetries, place: Placement, mixing: Mixing) -> Tensor:
    """One tensor, in memory that nobody else needs, whose channels on one axis are mixed."""
    axis = sym.axes[place.axis]
    parts = list(_parts(w, axis, place.positions.to(w.device)))
    if not parts:
        return mixed_axis(w, sym, place, dense(mixing, place.exponent))
    for rows, positions in parts:
        for some in _chunks(rows):
            _mix_rows(some, positions, mixing, place.exponent)
    return w


def dense(mixing: Mixing, exponent: int) -> Tensor:
    """The matrices that act along axes with this exponent."""
    if mixing.vectors is not None:
        v = mixing.vectors
        return torch.eye(v.shape[-1], dtype=v.dtype) - 2 * v[..., None] * v[..., None, :]
    matrices = mixing.matrices if exponent == 1 else mixing.inverses
    assert matrices is not None
    return matrices


def _parts(w: Tensor, axis: Axis, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views whose last dimension is the axis, one per row block; none where spaces straddle."""
    if axis.dim is None or axis.blocks == 1:
        yield (w.view(-1) if axis.dim is None else w.movedim(axis.dim, -1)), positions
        return
    block = positions // axis.size
    if bool((block != block[:1, :1]).any()):
        return
    blocks = w.unflatten(0, (axis.blocks, -1)).movedim(axis.dim + 1, -1)
    for k, b in enumerate(block[0, 0].tolist()):
        yield blocks[b], positions[..., k : k + 1] % axis.size


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    if rows.ndim == 1 or not rows.numel():
        yield rows
    else:
        yield from rows.split(max(1, _CHUNK * len(rows) // rows.numel()))


def _mix_rows(rows: Tensor, positions: Tensor, mixing: Mixing, exponent: int) -> None:
    spaces, size, repeats = positions.shape
    start, flat = int(positions.min()), positions.reshape(-1)
    in_order = torch.arange(start, start + flat.numel(), device=flat.device)
    is_view = repeats == 1 and bool((flat == in_order).all())
    if is_view:
        old = rows.narrow(-1, start, flat.numel()).unflatten(-1, (spaces, size, 1))
    else:
        old = rows[..., positions]
    if mixing.vectors is not None:
        v = mixing.vectors.to(old)[..., None]
        new = old.addcmul_(v, (old * v).sum(-2, keepdim=True), value=-2)
    else:
        new = torch.einsum("sij,...sjr->...sir", dense(mixing, exponent).to(old), old)
    if not is_view:
        rows[..., flat] = new.flatten(-3)
    elif new is not old:
        old.copy_(new)
