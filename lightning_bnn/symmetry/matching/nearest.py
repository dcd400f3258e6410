"""The element of a group of matrices that brings channels closest to others, from their moments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bnn.symmetry.balanced_form import balance_spaces
from lightning_bnn.symmetry.groups import LinearGroup
from lightning_bnn.symmetry.matching.channel_moments import Moments

__all__ = ["Nearest", "all_pairs", "least_squares", "nearest", "procrustes"]

_NOISE = 1e-13  # eigenvalues of moments below this share of the largest are rounding
_SHORTER = 4  # lengths of a step that are tried, each a third of the one before
_GAIN = 1e-9  # of the misfit: a step that takes less off it is the last one


class Nearest(NamedTuple):
    """Matrices, and the inner product of channels that they reach."""

    matrices: Tensor
    similarity: Tensor


def procrustes(cross: Tensor) -> Nearest:
    r"""The rotation, or reflection, R with the largest :math:`\mathrm{tr}\, R^T M`.

    With :math:`M = B A^T` it brings the rows of A closest to those of B.

    Args:
        cross: matrices M, ``(..., size, size)``.
    """
    left, singular, right = torch.linalg.svd(cross)
    return Nearest(left @ right, singular.sum(-1))


def nearest(group: LinearGroup, own: Tensor, goal: Tensor, cross: Tensor) -> Nearest:
    r"""The matrices of a group after which channels are closest to those of a reference.

    Rotations are those of Procrustes. Where sizes are free, both networks are balanced first
    (what enters a space is as large as what leaves it, :math:`A A^T = B B^T`), which leaves
    rotations free, and the matrix leads through the two balanced forms. Spaces that no matrix
    balances stay as they are.

    Args:
        group: says which matrices there are.
        own: moments of the network, ``(2, ..., size, size)``; see `Moments`.
        goal: those of the reference.
        cross: those of the reference with the network.
    """
    if group.kind == "general":
        return _general(own, goal, cross)
    if group.kind in ("complex", "unit complex"):
        return _complex(own, goal, cross, group.kind == "complex")
    both = cross[0] + cross[1]
    if group.kind == "orthogonal":
        return procrustes(both)
    n = both.shape[-1]
    ones = torch.ones(n, 1, dtype=both.dtype)
    basis = torch.linalg.qr(ones, mode="complete").Q[:, 1:].to(both)
    found = procrustes(basis.mT @ both @ basis)
    along = both.sum((-1, -2)) / n
    return Nearest(basis @ found.matrices @ basis.mT + 1 / n, found.similarity + along)


def _general(own: Tensor, goal: Tensor, cross: Tensor) -> Nearest:
    mine, theirs = (balance_spaces(*map(_root, moment)) for moment in (own, goal))
    turn = theirs.forward @ cross[0] @ mine.forward.mT
    turn = turn + theirs.inverse_transpose @ cross[1] @ mine.inverse_transpose.mT
    found = procrustes(turn)
    matrices = theirs.inverse_transpose.mT @ found.matrices @ mine.forward
    usable = (mine.full & theirs.full)[..., None, None]
    unmoved = torch.eye(matrices.shape[-1]).to(matrices).expand_as(matrices)
    return Nearest(torch.where(usable, matrices, unmoved), found.similarity)


def least_squares(matrices: Tensor, own: Tensor, cross: Tensor, steps: int = 20) -> Tensor:
    r"""Invertible matrices with the least distance of both sides together.

    .. math:: |B_1 - G A_1|^2 + |B_2 - G^{-T} A_2|^2

    Gauss-Newton on the group: a step :math:`e^X G` solves a Sylvester equation for X.

    Args:
        matrices: where to start, ``(spaces, size, size)``.
        own: moments of the network, ``(2, spaces, size, size)``.
        cross: those of the reference with the network.
        steps: at most so many.
    """
    value = _misfit(matrices, own, cross)
    for _ in range(steps):
        both = torch.stack([matrices, torch.linalg.inv(matrices).mT])
        a, b = both @ own @ both.mT
        right = cross @ both.mT
        step = _sylvester(a, b, right[0] - a - (right[1] - b).mT)
        length = torch.linalg.matrix_norm(step)[:, None, None]
        before, start = value, matrices
        for k in range(_SHORTER):  # what is far away is approached in turns of one
            tried = torch.matrix_exp(step / length.clamp_min(1) / 3**k) @ start
            reached = _misfit(tried, own, cross)
            better = reached < value
            matrices = torch.where(better[:, None, None], tried, matrices)
            value = torch.where(better, reached, value)
            if bool((value < before).all()):
                break
        if not bool((value < before - _GAIN * before.abs()).any()):
            break
    return matrices


def _misfit(matrices: Tensor, own: Tensor, cross: Tensor) -> Tensor:
    both = torch.stack([matrices, torch.linalg.inv_ex(matrices).inverse.mT])
    value = (both * (both @ own - 2 * cross)).sum((0, -2, -1))
    return torch.where(value.isfinite(), value, torch.inf)


def _sylvester(a: Tensor, b: Tensor, right: Tensor) -> Tensor:
    """The X with X A + B X equal to the right side, for positive semidefinite A and B."""
    (p, u), (q, v) = torch.linalg.eigh(a), torch.linalg.eigh(b)
    total = q[..., :, None] + p[..., None, :]
    least = 1e-12 * total.amax((-2, -1), keepdim=True)
    return v @ ((v.mT @ right @ u) / torch.maximum(total, least).clamp_min(1e-300)) @ u.mT


def _root(moment: Tensor) -> Tensor:
    """A square matrix A with A A^T equal to a moment."""
    values, vectors = torch.linalg.eigh(moment)
    values = torch.where(values > _NOISE * values[..., -1:], values, 0)
    return vectors * values.sqrt()[..., None, :]


def _complex(own: Tensor, goal: Tensor, cross: Tensor, scaled: bool) -> Nearest:
    """One complex number for every pair of channels: its size balances, its phase fits."""
    size = torch.ones((), dtype=own.dtype, device=own.device)
    if scaled:
        trace = [m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (*goal, *own)]
        ratio = trace[0] * trace[3] / (trace[1] * trace[2])
        size = torch.where((ratio > 0) & ratio.isfinite(), ratio, 1) ** 0.25
    wide = size[..., None, None]
    m = cross[0] * wide + cross[1] / wide
    x, y = m[..., 0, 0] + m[..., 1, 1], m[..., 1, 0] - m[..., 0, 1]
    length = torch.hypot(x, y)
    x, y = (torch.where(length > 0, v / length, o) for v, o in ((x, 1.0), (y, 0.0)))
    turn = torch.stack([torch.stack([x, -y], -1), torch.stack([y, x], -1)], -2)
    return Nearest(turn * wide, length)


def all_pairs(group: LinearGroup, moments: Moments) -> Tensor:
    """Similarity of every space of the reference with every one of the network, best turned."""
    own = moments.own[:, None].expand_as(moments.cross)
    goal = moments.goal[:, :, None].expand_as(moments.cross)
    return nearest(group, own, goal, moments.cross).similarity
