"""Apply permutations, scales, signs, matrices and shifts to one network or a stack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weightsym.groups.element import Element, Kind, Values
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_element, check_params
from weightsym.params import Params


def act(params: Params, sym: Symmetries, values: Values) -> Params:
    """Return networks, or some of their tensors, moved by validated values.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        values: by kind one tensor per group, see `Element.of_groups`.
    """
    like = next(iter(params.values()), None)
    return Element.of_values(sym, values, like).on_some(params)


def multiply_sides(
    params: Params, sym: Symmetries, k: int, forward: Tensor, inverse_transpose: Tensor
) -> Params:
    """Multiply one side of a group's spaces by a matrix, and the other side by a second one.

    Args:
        params: a network or a stack, or those tensors of it that are there.
        sym: what `discover` returned.
        k: index of the group in ``sym.linear``.
        forward: ``(..., spaces, size, size)``, for the places with exponent 1.
        inverse_transpose: the same for those with exponent -1.
    """
    both = [[m if j == k else None for j in range(len(sym.linear))]
            for m in (forward, inverse_transpose)]  # fmt: skip
    values: Values = {"linear": both[0], "duals": both[1]}
    names = sym.moved_by(sym.linear[k])
    return Element.of_values(sym, values, forward, names).on_some(params)


def _act(params: Params, sym: Symmetries, kind: Kind, values: Sequence[Tensor]) -> Params:
    members = members_of(params, sym)
    return act(params, sym, {kind: check_element(kind, values, sym, members)})


def permute(params: Params, sym: Symmetries, permutations: Sequence[Tensor]) -> Params:
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
    return _act(params, sym, "permutations", permutations)


def rescale(params: Params, sym: Symmetries, scales: Sequence[Tensor]) -> Params:
    r"""Multiply the incoming weights of a unit by its scale and divide the outgoing ones by it.

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
    return _act(params, sym, "scalings", scales)


def flip(params: Params, sym: Symmetries, signs: Sequence[Tensor]) -> Params:
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
    return _act(params, sym, "signs", signs)


def mix(params: Params, sym: Symmetries, matrices: Sequence[Tensor]) -> Params:
    r"""Multiply the incoming weights of a space by a matrix, and the outgoing ones by its inverse.

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
    return _act(params, sym, "linear", matrices)


def shift(params: Params, sym: Symmetries, shifts: Sequence[Tensor]) -> Params:
    r"""Shift the channels that biases write, and correct the biases of the layers that read them.

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
    return _act(params, sym, "shifts", shifts)


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
    return act(params, sym, {"logits": [weight] if bias is None else [weight, bias]})


# ------------------------------------------------------------ products and inverses
def compose(first: Sequence[Tensor], second: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    r"""Return the permutations that act like ``first`` followed by ``second``.

    .. math:: r(k) = p(q(k)) \quad \text{for } p \text{ and then } q

    Either may have a member dimension.

    >>> from torch import nn
    >>> from weightsym import compose, discover
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> compose([torch.tensor([1, 2, 0])], [torch.tensor([1, 0, 2])], sym)
    [tensor([2, 1, 0])]
    """
    both = [Element.of_values(sym, {"permutations": list(p)}) for p in (second, first)]
    return _orders(both[0] @ both[1], [*first, *second])


def invert(permutations: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    r"""Return the inverse permutations, with a member dimension if the given ones have one.

    .. math:: p^{-1}(p(k)) = k

    >>> from torch import nn
    >>> from weightsym import compose, discover, invert, random_permutations
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> p = random_permutations(sym)
    >>> compose(p, invert(p, sym), sym)
    [tensor([0, 1, 2, 3, 4]), tensor([0, 1, 2, 3])]
    """
    element = Element.of_values(sym, {"permutations": list(permutations)})
    return _orders(element.inverse, permutations)


def _orders(element: Element, permutations: Sequence[Tensor]) -> list[Tensor]:
    """Return the permutations of an element, with the member dimension of the given ones."""
    lead = max((p.shape[:-1] for p in permutations), default=torch.Size())
    return [p.expand(*lead, -1) for p in element.permutations]


def tied(params: Params, sym: Symmetries) -> Params:
    """Give every alias of a tensor the value of its first name."""
    again = {n: params[first] for n, first in sym.aliases.items() if n in params}
    return {**params, **again} if again else params


def members_of(params: Params, sym: Symmetries) -> int | None:
    """Return the number of networks in a stack, or None for one network. Refuse anything else."""
    return len(next(iter(params.values()))) if check_params(params, sym) else None
