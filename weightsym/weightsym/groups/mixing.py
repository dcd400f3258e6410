"""Mix channels by matrices (heads, adapters, normalised streams), and shift those of biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.sparse.linalg import splu
from torch import Tensor

from weightsym.groups.actions import Element, along_axis, from_axis, members_of, tied
from weightsym.groups.placements import Placement, Reader, ShiftGroup, complex_matrices
from weightsym.groups.symmetries import LinearGroup, Symmetries, incidence
from weightsym.groups.validation import check_element, check_symmetries
from weightsym.params import Params, is_stacked


def mix(params: Params, sym: Symmetries, matrices: Element) -> Params:
    r"""Multiply what enters the channels of a space by a matrix, what leaves them by its inverse.

    .. math:: W' = G_\mathrm{out}\, W\, G_\mathrm{in}^{-1}, \quad b' = G_\mathrm{out}\, b

    Queries take the inverse transpose of what keys take, so that their products stay.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        matrices: one tensor ``(spaces, size, size)`` or ``(members, spaces, size, size)`` per group
            of ``sym.linear``: invertible for the kind ``"general"``, orthogonal for
            ``"orthogonal"``, orthogonal with the vector of ones unchanged for ``"centred"``,
            ``[[x, -y], [y, x]]`` for ``"complex"``, with determinant one for ``"unit complex"``.

    Returns:
        New parameters; tensors that no group touches are the same objects.

    >>> from weightsym import params as P
    >>> from weightsym import discover, mix
    >>> adapter = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> x, w = torch.randn(8, 4), P.of(adapter)
    >>> sym = discover(adapter, x)
    >>> mixed = mix(w, sym, [torch.tensor([[[1.0, 1.0], [0.0, 2.0]]])])
    >>> torch.allclose(mixed["0.bias"], torch.stack([w["0.bias"].sum(), 2 * w["0.bias"][1]]))
    True
    >>> torch.allclose(P.apply(adapter, mixed, x), adapter(x), atol=1e-5)
    True
    """
    return mix_some(params, sym, check_element("linear", matrices, sym, members_of(params, sym)))


def mix_some(params: Params, sym: Symmetries, matrices: Element) -> Params:
    """`mix` for a part of the tensors, without checks."""
    for group, g in zip(sym.linear, matrices, strict=True):
        params = multiplied(params, sym, group, g, torch.linalg.inv(g.double()).mT)
    return tied(params, sym)


def multiplied(
    params: Params, sym: Symmetries, group: LinearGroup, forward: Tensor, inverse_transpose: Tensor
) -> Params:
    """Multiply one side of the spaces of one group by a matrix, the other by a second one.

    Args:
        params: a network or a stack, or those tensors of it that are there.
        sym: what `discover` returned.
        group: one of ``sym.linear``.
        forward: ``(..., spaces, size, size)``, for the places with exponent 1.
        inverse_transpose: the same for those with exponent -1.
    """
    result = dict(params)
    for placement in group.placements:
        name = sym.axes[placement.axis].tensor
        if name in params:
            factor = forward if placement.exponent == 1 else inverse_transpose
            result[name] = mixed_axis(result[name], sym, placement, factor)
    return result


def mixed_axis(w: Tensor, sym: Symmetries, placement: Placement, matrices: Tensor) -> Tensor:
    """One tensor whose channels at some positions of one axis are mixed.

    By matrices ``(..., spaces, size, size)``, or by the reflections :math:`1 - 2 v v^T` of vectors
    ``(spaces, size)``, which cost two passes.
    """
    axis = sym.axes[placement.axis]
    offset = int(is_stacked({axis.tensor: w}, sym.shapes))
    rows = along_axis(w, axis, offset)
    positions = placement.positions.to(w.device)
    old = rows[..., positions]  # (members, ..., spaces, size, repeats)
    if matrices.ndim == 2:
        v = matrices.to(w)[..., None]
        new = old.addcmul_(v, (old * v).sum(-2, keepdim=True), value=-2)
    else:
        first = old.movedim((-3, -2), (offset, offset + 1))
        new = torch.matmul(matrices.to(w), first.flatten(offset + 2))
        lead = new.ndim - 3
        new = new.reshape(*new.shape[:-1], *first.shape[offset + 2 :])
        new = new.movedim((lead, lead + 1), (-3, -2))
    changed = rows.expand(*new.shape[:-3], -1).clone()
    changed[..., positions.reshape(-1)] = new.flatten(-3)
    return from_axis(changed, w, axis, offset)


# ------------------------------------------------------------ elements
def identity_mixings(sym: Symmetries, stack: Params | None = None) -> list[Tensor]:
    """The matrices that mix nothing, of one network or of every member of a stack.

    >>> from weightsym import discover, identity_mixings
    >>> adapter = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> identity_mixings(discover(adapter, torch.randn(8, 4)))[0].tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    check_symmetries(sym)
    single = [torch.eye(g.size, dtype=torch.float64).repeat(g.spaces, 1, 1) for g in sym.linear]
    if stack is None:
        return single
    like = next(iter(stack.values()))
    return [m.to(like).repeat(len(like), 1, 1, 1) for m in single]


def random_mixings(
    sym: Symmetries,
    generator: torch.Generator | None = None,
    members: int | None = None,
    spread: float = 0.3,
) -> list[Tensor]:
    r"""Random matrices of every group, whose log singular values have the deviation ``spread``.

    .. math:: G = Q_1\, \mathrm{diag}(e^{\sigma z})\, Q_2, \quad z \sim N(0, 1)

    Rotations and reflections are uniform.

    >>> from weightsym import discover, random_mixings
    >>> norm = torch.nn.RMSNorm(3, elementwise_affine=False)
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), norm, torch.nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> (turn,) = random_mixings(sym, torch.Generator().manual_seed(0))
    >>> sym.linear[0].kind, turn.shape
    ('orthogonal', torch.Size([1, 3, 3]))
    >>> torch.allclose(turn @ turn.mT, torch.eye(3, dtype=torch.float64))
    True
    """
    check_symmetries(sym)
    if not 0 <= spread < float("inf"):
        raise ValueError(f"`spread` must be at least 0 and finite, got {spread}.")
    lead = () if members is None else (members,)
    return [_random(g, (*lead, g.spaces), generator, spread) for g in sym.linear]


def _random(
    group: LinearGroup, shape: Sequence[int], generator: torch.Generator | None, spread: float
) -> Tensor:
    n = group.size
    if group.kind in ("complex", "unit complex"):
        return _random_complex(group, shape, generator, spread)
    turned = group.lifted(_rotations(shape, group.basis.shape[1], generator))
    if group.kind != "general":
        return turned
    logs = torch.randn(*shape, n, generator=generator, dtype=torch.float64)
    return turned * (spread * logs).exp()[..., None, :] @ _rotations(shape, n, generator)


def _rotations(shape: Sequence[int], n: int, generator: torch.Generator | None) -> Tensor:
    normal = torch.randn(*shape, n, n, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def _random_complex(
    group: LinearGroup, shape: Sequence[int], generator: torch.Generator | None, spread: float
) -> Tensor:
    angle = 2 * torch.pi * torch.rand(*shape, generator=generator, dtype=torch.float64)
    size = torch.ones(())
    if group.kind == "complex":
        size = (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).exp()
    return complex_matrices(size * angle.cos(), size * angle.sin())


# ------------------------------------------------------------ shifts
def shift(params: Params, sym: Symmetries, shifts: Element) -> Params:
    r"""Add numbers to the channels that biases write, which the layers that read them take up.

    .. math:: b + c, \quad b' - W' c

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        shifts: one tensor ``(size,)`` or ``(members, size)`` per group of ``sym.shifts``.

    >>> from weightsym import params as P
    >>> from weightsym import discover, shift
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> x, w = torch.randn(8, 4), P.of(net)
    >>> sym = discover(net, x)
    >>> shifted = shift(w, sym, [torch.tensor([1.0, -1.0])])
    >>> (shifted["0.bias"] - w["0.bias"]).round(decimals=4)
    tensor([ 1., -1.])
    >>> torch.allclose(P.apply(net, shifted, x), net(x), atol=1e-5)
    True
    """
    return shift_some(params, sym, check_element("shifts", shifts, sym, members_of(params, sym)))


def shift_some(params: Params, sym: Symmetries, shifts: Element) -> Params:
    """Shift channels without checks of the parameters and the numbers."""
    for group, value in zip(sym.shifts, shifts, strict=True):
        params = _shift_one(params, sym, group, value)
    return params


def _shift_one(params: Params, sym: Symmetries, group: ShiftGroup, value: Tensor) -> Params:
    result = dict(params)
    for placement in group.placements:
        name = sym.axes[placement.axis].tensor
        result[name] = added(result[name], sym, placement, value)
    for reader in group.readers:
        old = result[reader.bias]
        result[reader.bias] = old - carried(params, sym, reader, value).to(old)
    return tied(result, sym)


def added(w: Tensor, sym: Symmetries, placement: Placement, value: Tensor) -> Tensor:
    """One tensor whose channels at some positions of one axis are shifted."""
    axis = sym.axes[placement.axis]
    offset = int(is_stacked({axis.tensor: w}, sym.shapes))
    rows = along_axis(w, axis, offset)
    spread = _on_axis(sym, placement, value.to(w))
    if value.ndim > 1:
        spread = spread.reshape(-1, *(1,) * (rows.ndim - 2), spread.shape[-1])
    return from_axis(rows + spread, w, axis, offset)


def _on_axis(sym: Symmetries, placement: Placement, value: Tensor) -> Tensor:
    """The shift of every position of an axis."""
    axis = sym.axes[placement.axis]
    full = value.new_zeros(*value.shape[:-1], axis.blocks * axis.size)
    positions = placement.positions.to(value.device)
    repeated = (placement.exponent * value)[..., None].expand(*value.shape, positions.shape[1])
    return full.index_add(-1, positions.reshape(-1), repeated.flatten(-2))


def carried(params: Params, sym: Symmetries, reader: Reader, value: Tensor) -> Tensor:
    """The change of the outputs of a layer under a shift of its inputs."""
    axis = sym.axes[reader.channels.axis]
    w = params[axis.tensor]
    assert axis.dim is not None
    offset = int(is_stacked({axis.tensor: w}, sym.shapes))
    spread = _on_axis(sym, reader.channels, value.to(w))
    if not offset:
        w, spread = w[None], spread.reshape(1, -1)
    spread = spread.reshape(-1, axis.blocks, axis.size)
    blocks = w.movedim(axis.dim + 1, -1)  # (members, outgoing, ..., incoming)
    if blocks.ndim > 3:
        blocks = blocks.sum(tuple(range(2, blocks.ndim - 1)))
    blocks = blocks.unflatten(1, (axis.blocks, -1))
    outgoing = torch.einsum("mbri,mbi->mbr", blocks, spread.expand(blocks.shape[0], -1, -1))
    rows = outgoing.flatten(1)
    if reader.rows is not None:
        rows = rows[:, reader.rows.to(rows.device)]
    return rows if offset else rows[0]


def remove_shifts(params: Params, sym: Symmetries) -> Params:
    """One network for all that shifts make equal: biases that may be shifted become zero.

    Of a table the mean of its rows does. Where permutations may move such a place to others of the
    same shift, all of these become as small as shifts can make them together.
    """
    together: dict[int | str, list[ShiftGroup]] = {}
    for k, group in enumerate(sym.shifts):
        is_alone = len(_exchanged(sym, group)) == 1
        together.setdefault(k if is_alone else sym.first_twin(group.name), []).append(group)
    for groups in together.values():  # in graph order: what takes a shift up may hand it on
        for group, value in zip(groups, _removing(params, sym, groups), strict=True):
            params = _shift_one(params, sym, group, value)
    return params


def _exchanged(sym: Symmetries, group: ShiftGroup) -> tuple[Placement, ...]:
    """The places of a group in its first tensor, and in those that may change places with it."""
    first = sym.first_twin(group.name)
    return tuple(p for p in group.placements if sym.first_twin(sym.axes[p.axis].tensor) == first)


def _removing(params: Params, sym: Symmetries, groups: Sequence[ShiftGroup]) -> Sequence[Tensor]:
    r"""The shifts after which least is left, in the sum of squares, where places are exchanged.

    .. math:: \min_c \|w + S c\|^2, \quad S^T S c = -S^T w
    """
    if len(_exchanged(sym, groups[0])) == 1:
        return [-_mean(params, sym, groups[0].placements[0])]
    groups = [replace(group, placements=_exchanged(sym, group)) for group in groups]
    sizes = [group.size for group in groups]
    acts = incidence(sym.axes, groups, [np.arange(size) for size in sizes])
    sums = [
        torch.stack(
            [p.exponent * p.positions.shape[1] * _mean(params, sym, p) for p in group.placements]
        ).sum(0)
        for group in groups
    ]
    right = torch.cat(sums, -1).detach()
    gram = (acts.T @ acts).tocsc().astype(np.float64)
    solved = splu(gram).solve(-right.double().cpu().numpy().T)
    return torch.from_numpy(solved.T.copy()).to(right.device).split(sizes, -1)


def _mean(params: Params, sym: Symmetries, placement: Placement) -> Tensor:
    """The mean of a tensor over everything but the channels of a place."""
    w = params[sym.axes[placement.axis].tensor]
    offset = int(is_stacked({sym.axes[placement.axis].tensor: w}, sym.shapes))
    rows = along_axis(w, sym.axes[placement.axis], offset)
    means = rows.mean(tuple(range(offset, rows.ndim - 1))) if rows.ndim > offset + 1 else rows
    return means[..., placement.positions.to(w.device)].mean(-1)


def random_shifts(
    sym: Symmetries, generator: torch.Generator | None = None, members: int | None = None
) -> list[Tensor]:
    r"""Standard normal shifts of every group.

    .. math:: c \sim \mathcal{N}(0, 1)

    >>> from weightsym import discover, random_shifts
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> (c,) = random_shifts(discover(net, torch.randn(8, 4)), members=5)
    >>> c.shape
    torch.Size([5, 2])
    """
    check_symmetries(sym)
    lead = () if members is None else (members,)
    return [_normal((*lead, group.size), generator) for group in sym.shifts]


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
