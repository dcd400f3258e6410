"""Find units that move inside spaces that matrices mix: their factors may be such matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_matrix, csr_matrix
from torch import Tensor

from weightsym.linear_groups import LinearGroup
from weightsym.placements import Axis

__all__ = ["units_inside"]

Ints = NDArray[np.int64]


def units_inside(
    axes: Sequence[Axis],
    linear: Sequence[LinearGroup],
    groups: Sequence[Any],
    diagonal: bool = False,
) -> tuple[Tensor, ...]:
    r"""Find the units of every group whose places all lie among the channels of spaces.

    With ``diagonal`` only those scales that are diagonal matrices of these spaces: such a unit has
    a power p at all places where a matrix G acts on its channels, and -p where the inverse
    transpose does. The further scale of a product lies in spaces, too, but only on one side of
    them.

    .. math:: \Big(\sum_i s_i p_i\Big)^2 = n \sum_i p_i^2

    over the n places of a channel, with sides :math:`s_i = \pm 1`.

    Args:
        axes: those of the symmetries.
        linear: the groups of matrices that count.
        groups: of permutations, scalings or signs.
        diagonal: ask for the whole of every channel.
    """
    channels = _incidence(axes, linear, [_channels(group) for group in linear])
    powers = _incidence(axes, groups, [np.arange(g.units) for g in groups])
    free = np.asarray(abs(channels).sum(1)).ravel() == 0
    inside = abs(powers).T @ free == 0
    count = (abs(channels).T @ (powers != 0).astype(np.int64)).tocoo()
    if diagonal and count.nnz:
        at = count.row, count.col
        total, squares = channels.T @ powers, abs(channels).T @ powers.multiply(powers)
        total, squares = (np.asarray(t.tocsr()[at]).ravel() for t in (total, squares))
        places = np.asarray(abs(channels).sum(0)).ravel()
        whole = (count.data == places[count.row]) & (total**2 == count.data * squares)
        inside[count.col[~whole]] = False
    return torch.from_numpy(inside).split([g.units for g in groups])


def _channels(group: LinearGroup) -> Ints:
    """The number of every channel, ``(spaces, size)``, where the two of a plane are one."""
    each = 1 if group.kind == "complex" else group.size
    return each * np.arange(group.spaces)[:, None] + np.arange(group.size) % each


def _incidence(axes: Sequence[Axis], groups: Iterable[Any], ids: Sequence[Ints]) -> csr_matrix:
    """The powers of units, or sides of channels, at the positions of all axes in a row."""
    starts = np.cumsum([0, *(axis.length for axis in axes)])
    parts, first = [np.zeros((3, 0), np.int64)], 0
    for group, own in zip(groups, ids, strict=True):
        for placement in group.placements:
            at = placement.positions.cpu().numpy()
            column = np.broadcast_to(first + own[..., None], at.shape)
            power = np.full_like(at, placement.exponent)
            parts.append(np.stack([starts[placement.axis] + at, column, power]).reshape(3, -1))
        first += int(own.max(initial=-1)) + 1
    row, column, value = np.concatenate(parts, 1)
    return coo_matrix((value, (row, column)), (int(starts[-1]), first)).tocsr()
