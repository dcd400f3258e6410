"""One tensor in another frame of its network: flipped, permuted, and its channels mixed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bnn.symmetry import Symmetries
from lightning_bnn.symmetry.actions import (
    multiplied_tensor,
    permuted_tensor,
    reached_axes,
    source_of,
)
from lightning_bnn.symmetry.axis_actions import Element, axes_by_tensor
from lightning_bnn.symmetry.mixing import mix_some

__all__ = ["moved"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def moved(
    read: Callable[[str], Tensor],
    name: str,
    sym: Symmetries,
    permutations: Element,
    signs: Element | None = None,
    matrices: Element | None = None,
) -> Tensor:
    """Return one tensor of a network after `flip`, `permute` and `mix`, in its own type.

    Without matrices its bits do, too.

    Args:
        read: gives a tensor of the network by its name; another one where tensors change places.
        name: of the tensor that is wanted.
        sym: what `discover` returned.
        permutations: one per group.
        signs: flips that come before.
        matrices: mix channels afterwards.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import discover, permute
    >>> net, order = mlp(2, [3], 1), [torch.tensor([2, 0, 1])]
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> tensor = moved(w.__getitem__, "3.weight", sym, order)
    >>> torch.equal(tensor, permute(w, sym, order)["3.weight"])
    True
    """
    tensor = _in_order(read, name, sym, permutations, signs)
    if matrices is None or not tensor.is_floating_point():
        return tensor
    return mix_some({name: tensor.double()}, sym, matrices)[name].to(tensor.dtype)


def _in_order(
    read: Callable[[str], Tensor],
    name: str,
    sym: Symmetries,
    permutations: Element,
    signs: Element | None,
) -> Tensor:
    """One tensor after `flip` and `permute`, with the same bits."""
    source = source_of(name, sym, permutations)
    tensor = read(source)
    flips = reached_axes(sym, ("signs",)).get(source) if signs is not None else None
    if signs is not None and flips:
        tensor = multiplied_tensor(tensor, sym, flips, {"signs": signs})
    axes = axes_by_tensor(sym, "permutations").get(source)
    if not axes:
        return tensor
    bits = tensor.view(_BITS[tensor.dtype.itemsize])
    return permuted_tensor({source: bits}, sym, source, axes, permutations).view(tensor.dtype)
