"""Apply permutations, scalings and signs to one network or a stack."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from weightsym.groups.symmetries import Axis, Placement, Symmetries
from weightsym.groups.validation import check_element, check_params
from weightsym.networks.devices import kept_on
from weightsym.params import Params, is_stacked

Element = Sequence[Tensor]
Kind = Literal["permutations", "scalings", "signs"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EVERY = (*KINDS, "linear", "shifts")


def axes_by_tensor(sym: Symmetries, field: Kind) -> dict[str, list[int]]:
    """The axes of every tensor that one kind of symmetry reaches."""
    tensors: dict[str, list[int]] = {}
    for axis in sym.placements_by_axis(field):
        tensors.setdefault(sym.axes[axis].tensor, []).append(axis)
    return tensors


# ------------------------------------------------------------ permutations
def axis_permutation(
    sym: Symmetries, axis: int, permutations: Element, device: Any = None
) -> Tensor:
    """Old position of every new position on one axis, with a member dimension if one is given."""
    pairs = sym.placements_by_axis("permutations").get(axis, [])
    if len(pairs) == 1 and pairs[0][1].covers(sym.axes[axis]):
        return permutations[pairs[0][0]].to(device)
    lead = max((permutations[g].shape[:-1] for g, _ in pairs), default=())
    index = torch.arange(sym.axes[axis].length, device=device).repeat(*lead, 1)
    for g, placement in pairs:
        positions = kept_on(placement.positions, index.device)
        moved = positions[permutations[g].to(index.device)].flatten(-2)
        index[..., positions.reshape(-1)] = take_along_last(index, moved)
    return index


def take_along_last(values: Tensor, index: Tensor) -> Tensor:
    """Pick along the last dimension, where leading dimensions broadcast."""
    if values.ndim == index.ndim == 1:
        return values[index]
    lead = max(values.shape[:-1], index.shape[:-1])
    return values.expand(*lead, -1).gather(-1, index.expand(*lead, -1))


def permute_axis(w: Tensor, axis: Axis, index: Tensor, offset: int = 0) -> Tensor:
    """Put at every position of one axis what stood at ``index``."""
    if axis.dim is None:
        return _select(w.flatten(offset), index, offset).reshape(w.shape)
    if axis.blocks == 1:
        return _select(w, index, axis.dim + offset)
    # columns within every row block: whole blocks have already moved with their rows
    columns = axis.spread(index % axis.size, w.shape[offset:])
    return w.gather(axis.dim + offset, columns.expand(w.shape))


def reorder_units(w: Tensor, axis: Axis, orders: Sequence[tuple[Placement, Tensor]]) -> Tensor:
    """Put the units of some places of one axis of a stack in orders ``(members, units)``."""
    if len(orders) == 1 and orders[0][0].covers(axis):
        index = orders[0][1]
    else:
        index = torch.arange(axis.length).repeat(len(w), 1)
        for placement, order in orders:
            index[:, placement.positions.reshape(-1)] = placement.positions[order].flatten(1)
    return permute_axis(w, axis, (index if len(w) > 1 else index[0]).to(w.device), 1)


def _select(w: Tensor, index: Tensor, dim: int) -> Tensor:
    """Pick along one dimension, with one order for all members or one for each."""
    if index.ndim == 1:
        return w.index_select(dim, index)
    if dim == 1:
        return w[torch.arange(w.shape[0], device=w.device)[:, None], index]
    shape = [index.shape[1] if d == dim else 1 for d in range(w.ndim)]
    shape[0] = index.shape[0]
    return w.gather(dim, index.reshape(shape).expand(w.shape))


# ------------------------------------------------------------ factors
def axis_factors(
    sym: Symmetries, axis: int, field: Kind, values: Element, dtype: torch.dtype, device: Any
) -> Tensor:
    """Factor of every position on one axis, with a member dimension if one is given."""
    pairs = sym.placements_by_axis(field)[axis]
    powers = [
        values[g].to(device=device, dtype=dtype) ** placement.exponent for g, placement in pairs
    ]
    if len(pairs) == 1 and pairs[0][1].covers(sym.axes[axis]):
        return powers[0]
    lead = max(value.shape[:-1] for value in powers)
    factors = torch.ones(*lead, sym.axes[axis].length, dtype=dtype, device=device)
    for (_, placement), value in zip(pairs, powers, strict=True):
        positions = kept_on(placement.positions, factors.device).reshape(-1)
        each = value.repeat_interleave(placement.positions.shape[1], -1).expand(*lead, -1)
        if placement.meets_itself:
            index = positions.expand(*lead, -1)
            factors = factors.scatter_reduce(-1, index, each, "prod").clone()
        else:
            factors[..., positions] = factors[..., positions] * each
    return factors


# ------------------------------------------------------------ channels as the last dimension
def along_axis(w: Tensor, axis: Axis, offset: int) -> Tensor:
    """A view whose last dimension is the axis, with its row blocks side by side."""
    if axis.dim is None:
        return w.flatten(offset)
    if axis.blocks == 1:
        return w.movedim(axis.dim + offset, -1)
    parts = w.unflatten(offset, (axis.blocks, -1)).movedim(offset, -1)
    return parts.movedim(axis.dim + offset, -1).flatten(-2)


def from_axis(rows: Tensor, like: Tensor, axis: Axis, offset: int) -> Tensor:
    """The tensor of which `along_axis` is the view."""
    if axis.dim is None:
        return rows.reshape(like.shape)
    if axis.blocks == 1:
        return rows.movedim(-1, axis.dim + offset).contiguous()
    parts = rows.unflatten(-1, (axis.blocks, axis.size)).movedim(-1, axis.dim + offset)
    return parts.movedim(-1, offset).reshape(like.shape)


# ------------------------------------------------------------ groups acting
def permute(params: Params, sym: Symmetries, permutations: Element) -> Params:
    r"""Reorder units: unit ``k`` of the new network is unit ``p[k]`` of the old one.

    .. math:: W'_{k l} = W_{p(k)\, q(l)}, \quad b'_k = b_{p(k)}

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        permutations: one index tensor ``(units,)`` per group of ``sym.permutations``, or
            ``(members, units)`` with an order for each member of a stack. Channels move first, then
            the blocks that contain them.

    Returns:
        New parameters; tensors that no group touches are the same objects.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, permute
    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(8, 2)
    >>> sym, w = discover(net, x), P.of(net)
    >>> moved = permute(w, sym, [torch.tensor([2, 0, 1])])
    >>> torch.equal(moved["0.bias"], w["0.bias"][[2, 0, 1]])
    True
    >>> torch.allclose(P.apply(net, moved, x), net(x), atol=1e-5)
    True
    """
    members = members_of(params, sym)
    return permute_some(params, sym, check_element("permutations", permutations, sym, members))


def permute_some(params: Params, sym: Symmetries, permutations: Element) -> Params:
    """`permute` for a part of the tensors, such as the buffers of an optimizer."""
    result = dict(params)
    for tensor, axes in axes_by_tensor(sym, "permutations").items():
        if tensor in params:
            result[tensor] = permuted_tensor(params, sym, tensor, axes, permutations)
    for group, order in zip(sym.permutations, permutations, strict=True):
        for row in group.tensors:  # they change places once what is inside has its new order
            present = [name for name in row if name in result]
            if present and len(present) < len(row):
                missing = next(name for name in row if name not in result)
                raise ValueError(
                    f"`params` must hold {missing!r}: it may change places with {present[0]!r}."
                )
            if present:
                result |= _exchanged(result, row, order)
    return tied(result, sym)


def _exchanged(params: Params, row: Sequence[str], order: Tensor) -> Params:
    """Tensors of a row that have changed places."""
    if order.ndim == 1:
        return {name: params[row[k]] for name, k in zip(row, order.tolist(), strict=True)}
    together = torch.stack([params[name] for name in row], 1)
    members = torch.arange(len(together), device=together.device)[:, None]
    return dict(zip(row, together[members, order.to(together.device)].unbind(1), strict=True))


def source_of(name: str, sym: Symmetries, permutations: Element) -> str:
    """The tensor that comes to stand in the place of another one in a single network."""
    for group, order in zip(reversed(sym.permutations), reversed(permutations), strict=True):
        for row in group.tensors:
            if name in row:
                name = row[int(order[row.index(name)])]
                break
    return name


def tied(params: Params, sym: Symmetries) -> Params:
    """Give every further name of a tensor what its first name has."""
    again = {n: params[first] for n, first in sym.aliases.items() if n in params}
    return {**params, **again} if again else params


def rescale(params: Params, sym: Symmetries, scales: Element) -> Params:
    r"""Multiply what enters a unit by its scale and divide what leaves it.

    .. math:: W' = \mathrm{diag}(s_\mathrm{out})\, W\, \mathrm{diag}(s_\mathrm{in})^{-1}, \quad
        b' = s_\mathrm{out} b

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        scales: one positive tensor ``(units,)`` or ``(members, units)`` per group of
            ``sym.scalings``.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, rescale
    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(8, 2)
    >>> sym, w = discover(net, x), P.of(net)
    >>> scaled = rescale(w, sym, [torch.tensor([2.0, 1.0, 0.5])])
    >>> (scaled["0.bias"] / w["0.bias"]).tolist(), (scaled["2.weight"] / w["2.weight"]).tolist()
    ([2.0, 1.0, 0.5], [[0.5, 1.0, 2.0]])
    >>> torch.allclose(P.apply(net, scaled, x), net(x), atol=1e-5)
    True
    """
    members = members_of(params, sym)
    return multiply(params, sym, {"scalings": check_element("scalings", scales, sym, members)})


def flip(params: Params, sym: Symmetries, signs: Element) -> Params:
    r"""Flip units: +1 or -1 for each, ``(units,)`` or ``(members, units)`` per group.

    .. math:: W' = \mathrm{diag}(s_\mathrm{out})\, W\, \mathrm{diag}(s_\mathrm{in}), \quad
        b' = s_\mathrm{out} b

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, flip
    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(8, 2)
    >>> sym, w = discover(net, x), P.of(net)
    >>> flipped = flip(w, sym, [torch.tensor([-1, 1, 1])])
    >>> (flipped["2.weight"] / w["2.weight"]).tolist()
    [[-1.0, 1.0, 1.0]]
    >>> torch.allclose(P.apply(net, flipped, x), net(x), atol=1e-5)
    True
    """
    members = members_of(params, sym)
    return multiply(params, sym, {"signs": check_element("signs", signs, sym, members)})


def shift_logits(
    params: Params, sym: Symmetries, weight: Tensor, bias: Tensor | None = None
) -> Params:
    r"""Add one vector to all rows of the last weight, and one number to all of its biases.

    .. math:: W' = W + 1 v^T, \quad b' = b + c 1

    Logits change, probabilities do not. ``weight`` has the shape of one row, with the leading
    dimension of a stack; ``bias`` is a number per member.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, shift_logits
    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)), torch.randn(8, 2)
    >>> sym, w = discover(net, x), P.of(net)
    >>> shifted = shift_logits(w, sym, torch.tensor([1.0, 2.0, 3.0]), torch.tensor(4.0))
    >>> old, new = net(x), P.apply(net, shifted, x)
    >>> torch.allclose(new, old), torch.allclose(new.softmax(-1), old.softmax(-1), atol=1e-5)
    (False, True)
    """
    if sym.softmax_shift is None:
        raise ValueError("The network does not end in a layer whose outputs are its logits.")
    check_params(params, sym)
    return shift_logits_some(params, sym, weight, bias)


def shift_logits_some(
    params: Params, sym: Symmetries, weight: Tensor, bias: Tensor | None = None
) -> Params:
    """`shift_logits` for a part of the tensors, without checks."""
    last = sym.softmax_shift
    assert last is not None
    result, old = dict(params), params[last.weight]
    result[last.weight] = old + weight.to(old).unsqueeze(old.ndim - len(sym.shapes[last.weight]))
    if last.bias is not None and bias is not None:
        result[last.bias] = params[last.bias] + bias.to(old)[..., None]
    return tied(result, sym)


def members_of(params: Params, sym: Symmetries) -> int | None:
    """The number of networks of a stack, or None for one network. Refuses anything else."""
    return len(next(iter(params.values()))) if check_params(params, sym) else None


# ------------------------------------------------------------ one tensor
def permuted_tensor(
    params: Params, sym: Symmetries, name: str, axes: Sequence[int], permutations: Element
) -> Tensor:
    """One tensor after `permute`, by those of its axes that permutations reach."""
    w = params[name]
    offset = int(is_stacked({name: w}, sym.shapes))
    for a in sorted(axes, key=lambda a: sym.axes[a].blocks):
        w = permute_axis(w, sym.axes[a], axis_permutation(sym, a, permutations, w.device), offset)
    return w


def multiply(params: Params, sym: Symmetries, factors: Mapping[Kind, Element]) -> Params:
    """Multiply every tensor by the factors of its axes, in one pass per axis."""
    result, offset = dict(params), int(is_stacked(params, sym.shapes))
    axes = reached_axes(sym, factors)
    for name in axes.keys() & params.keys():
        result[name] = multiplied_tensor(params[name], sym, axes[name], factors, offset)
    return tied(result, sym)


def reached_axes(sym: Symmetries, kinds: Iterable[Kind]) -> dict[str, dict[int, list[Kind]]]:
    """By tensor, the axes that factors of some kinds reach, and the kinds that reach each."""
    axes: dict[str, dict[int, list[Kind]]] = {}
    for field in kinds:
        for name, reached in axes_by_tensor(sym, field).items():
            for axis in reached:
                axes.setdefault(name, {}).setdefault(axis, []).append(field)
    return axes


def multiplied_tensor(
    w: Tensor,
    sym: Symmetries,
    axes: Mapping[int, Sequence[Kind]],
    factors: Mapping[Kind, Element],
    offset: int = 0,
    in_place: bool = False,
) -> Tensor:
    """One tensor after `multiply`, by those of its axes that factors reach."""
    is_copy = in_place
    for axis, kinds in axes.items():
        parts = (axis_factors(sym, axis, k, factors[k], w.dtype, w.device) for k in kinds)
        factor = math.prod(
            (sym.axes[axis].spread(part, w.shape[offset:]) for part in parts),
            start=torch.ones((), dtype=w.dtype, device=w.device),
        )
        if is_copy and not factor.requires_grad and factor.ndim <= w.ndim:
            w.mul_(factor)
        else:
            w, is_copy = w * factor, True
    return w
