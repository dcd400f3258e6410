"""Makes ``vmap`` over the weights of small networks fast: products that fold, pieces that fit."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["FoldedLinear", "fitting_chunk"]

BUDGET = {"cpu": 8 * 2**20, "cuda": 2**31}
"""Bytes of activations that run at once: on a CPU they should stay in its cache."""
_SIZES: weakref.WeakKeyDictionary[nn.Module, dict[Any, int]] = weakref.WeakKeyDictionary()


class FoldedLinear(TorchFunctionMode):
    """Runs linear layers as weight times input.

    With weights of many networks and one input that is a single product of matrices; the usual
    order, input times weight, is one small product for every network.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace calls of ``linear`` on a batch of vectors."""
        if func is F.linear and not kwargs and args[0].ndim == 2 and args[1].ndim == 2:
            x, weight, *bias = args
            y = (weight @ x.mT).mT
            return y if not bias or bias[0] is None else y + bias[0]
        return func(*args, **(kwargs or {}))


def fitting_chunk(
    model: nn.Module, run: Callable[[], Any], inputs: Any, members: int
) -> int | None:
    """How many networks should run at once; None for all of them.

    Args:
        model: whose activations count.
        run: runs one network.
        inputs: what it runs on; the sizes of activations are kept for their shapes.
        members: how many there are.
    """
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    if not tensors:
        return None
    key = tuple((x.shape, x.dtype, x.device) for x in tensors)
    known = _SIZES.setdefault(model, {})
    if key not in known:
        with _Bytes() as count, torch.no_grad():
            run()
        known[key] = count.total
    budget = BUDGET.get(tensors[0].device.type, BUDGET["cuda"])
    chunk = max(1, budget // max(1, known[key]))
    return None if chunk >= members else math.ceil(members / math.ceil(members / chunk))


class _Bytes(TorchDispatchMode):
    """Counts the bytes of everything that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count new tensors; views have the memory of others."""
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
        return out
