"""What goes into and comes out of every linear map of a network, by the weight that it multiplies.

Hooks see modules that are called; products are seen wherever they are computed, also inside of
attention that takes its weights as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bnn.params import Params
from lightning_bnn.symmetry.forward import in_precision_of

__all__ = ["Product", "first_inputs", "watch"]

_ATEN = torch.ops.aten


class Product(NamedTuple):
    """One linear map ``outputs = inputs @ weight.T``, vectors as rows, without its bias.

    ``rows`` says which rows of the tensor were used.
    """

    rows: slice
    inputs: Tensor
    outputs: Tensor


def watch(
    network: nn.Module, params: Params, x: Any, names: Iterable[str]
) -> dict[str, list[Product]]:
    """All products with the weights of some names during one evaluation.

    Args:
        network: gives the computation, in evaluation mode.
        params: one network.
        x: the input.
        names: tensors of two dimensions; the products with others are not seen.
    """
    watched = {n: params[n].detach().clone() for n in names if params[n].ndim == 2}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # fused layers make no products of their own
    try:
        with torch.no_grad(), _Watch(watched) as seen:
            functional_call(network, {**params, **watched}, (in_precision_of(params, x),))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return seen.products


def first_inputs(batches: Iterable[Any]) -> list[Any]:
    """The inputs of batches, which may be tuples that begin with them; refuses no batches."""
    if isinstance(batches, Tensor):
        raise ValueError("`batches` must be an iterable of inputs; put one tensor into a list.")
    inputs = [b[0] if isinstance(b, tuple | list) else b for b in batches]
    if not inputs:
        raise ValueError("`batches` is empty.")
    return inputs


class _Watch(TorchDispatchMode):
    """Keeps the factors of products whose second one is a watched weight, transposed."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {w.untyped_storage().data_ptr(): n for n, w in weights.items()}
        self.weights = weights
        self.products: dict[str, list[Product]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (_ATEN.mm.default, _ATEN.linear.default):
            self._see(args[0], args[1] if func is _ATEN.linear.default else args[1].mT)
        elif func is _ATEN.addmm.default:
            self._see(args[1], args[2].mT)
        elif func is _ATEN.bmm.default and args[1].ndim == 3 and args[1].stride(0) == 0:
            self._see(args[0].flatten(0, 1), args[1][0].mT)
        return result

    def _see(self, inputs: Tensor, weight: Tensor) -> None:
        name = self.names.get(weight.untyped_storage().data_ptr())
        if name is None:
            return
        whole = self.weights[name]
        if weight.stride() != whole.stride() or weight.shape[1] != whole.shape[1]:
            return
        start = weight.storage_offset() // whole.stride(0)
        rows = slice(start, start + weight.shape[0])
        inputs = inputs.flatten(0, -2)
        product = Product(rows, inputs, inputs @ weight.mT)
        self.products.setdefault(name, []).append(product)
