"""One tensor in another frame of its network: flipped, then permuted, with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_bnn.symmetry import Symmetries
from lightning_bnn.symmetry.actions import multiplied_tensor, permuted_tensor, reached_axes
from lightning_bnn.symmetry.axis_actions import Element, axes_by_tensor
from lightning_bnn.symmetry.exchanges import source_of

__all__ = ["moved"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def moved(
    read: Callable[[str], Tensor],
    name: str,
    sym: Symmetries,
    permutations: Element,
    signs: Element | None = None,
) -> Tensor:
    """One tensor of a network after `flip` and `permute`; types and bits stay what they are.

    Args:
        read: gives a tensor of the network by its name; another one where tensors change places.
        name: of the tensor that is wanted.
        sym: what `discover` returned.
        permutations: one per group.
        signs: flips that come before.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import discover, permute
    >>> net, order = mlp(2, [3], 1), [torch.tensor([2, 0, 1])]
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> tensor = moved(w.__getitem__, "3.weight", sym, order)
    >>> torch.equal(tensor, permute(w, sym, order)["3.weight"])
    True
    """
    name = source_of(name, sym, permutations)
    tensor = read(name)
    flips = reached_axes(sym, ("signs",)).get(name) if signs is not None else None
    if signs is not None and flips:
        tensor = multiplied_tensor(tensor, sym, flips, {"signs": signs})
    axes = axes_by_tensor(sym, "permutations").get(name)
    if not axes:
        return tensor
    bits = tensor.view(_BITS[tensor.dtype.itemsize])
    return permuted_tensor({name: bits}, sym, name, axes, permutations).view(tensor.dtype)
