"""Number of members of a stack that run at once: all, some, or one."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsym.devices import elsewhere, random_numbers

__all__ = ["fitting_chunk", "remember_loop", "runs_at_once", "work_of"]

VMAP_LIMIT = 60_000, 6_000_000
"""Networks with more work than this run member by member, if they are no chains of stages
(`fused`): on the CPU, and on other devices."""
BUDGET = 8 * 2**20, 2**31
"""Bytes of activations that run at once: on a CPU they should stay in its cache."""
TRAINING_BUDGET = 64 * 2**20, 2**33
"""The same with gradients, where every chunk has a graph of its own to be made."""
NORMED_LIMIT = 2**20, math.inf
"""Bytes that batch norms of one network may give out in training: beyond them the copies that
``vmap`` makes for their statistics cost more than it spares."""
_SIZES: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[int, int]]] = (
    weakref.WeakKeyDictionary()
)
_WORK: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_NOT_VMAPPABLE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_ANNOUNCED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_log = logging.getLogger("weightsym.params")


# ------------------------------------------------------------ at once or one by one
def runs_at_once(model: nn.Module, chunk_size: int | None = None) -> bool:
    """Check whether `apply` runs the members of a stack at once, not one by one.

    >>> net = nn.Linear(2, 1)
    >>> runs_at_once(net), runs_at_once(net, chunk_size=1), runs_at_once(nn.Linear(1000, 1000))
    (True, False, False)
    """
    if chunk_size == 1 or model in _NOT_VMAPPABLE:
        return False
    device = next(model.parameters(), torch.zeros(0)).device
    if chunk_size is None and work_of(model) > VMAP_LIMIT[device.type != "cpu"]:
        _announce(model, "is large: its members run one by one (pass `chunk_size` to batch them)")
        return False
    return True


def work_of(model: nn.Module) -> int:
    """The weights of a network, those of a convolution, which is used at many places, twelve times.

    Args:
        model: the network.
    """
    if model not in _WORK:
        convolutions = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        used_often = sum(p.numel() for m in convolutions for p in m.parameters(recurse=False))
        _WORK[model] = sum(p.numel() for p in model.parameters()) + 11 * used_often
    return _WORK[model]


def remember_loop(model: nn.Module, error: Exception) -> None:
    """Networks that ``vmap`` cannot handle run one by one from now on."""
    reason = (str(error).strip().splitlines() or [""])[0]
    _NOT_VMAPPABLE.add(model)
    _announce(model, f"cannot run under vmap, its members run one by one ({reason[:120]})")


def _announce(model: nn.Module, text: str) -> None:
    if model not in _ANNOUNCED:
        _ANNOUNCED.add(model)
        _log.info("%s %s.", type(model).__name__, text)


def fitting_chunk(model: nn.Module, run: Callable[[], Any], inputs: Any, members: int) -> int:
    """Choose how many networks run at once.

    Args:
        model: whose activations count.
        run: runs one network.
        inputs: what it runs on; the size of the activations is remembered for their shapes.
        members: how many networks there are.
    """
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    if not tensors:
        return members
    key = tuple((x.shape, x.dtype, x.device) for x in tensors)
    sizes = _SIZES.setdefault(model, {})
    if key not in sizes:
        with _Bytes() as count, torch.no_grad(), random_numbers(elsewhere(tensors)):
            run()
        sizes[key] = (count.total, count.normed)
    total, normed = sizes[key]
    is_elsewhere = tensors[0].device.type != "cpu"
    if model.training and normed > NORMED_LIMIT[is_elsewhere]:
        return 1
    budget = (TRAINING_BUDGET if torch.is_grad_enabled() else BUDGET)[is_elsewhere]
    chunk = max(1, budget // max(1, total))
    return members if chunk >= members else math.ceil(members / math.ceil(members / chunk))


class _Bytes(TorchDispatchMode):
    """Counts the bytes of everything that is computed, and of what batch norms give out."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.normed = 0, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:  # views have the memory of others
            size = sum(t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor))
            self.total += size
            self.normed += size if "batch_norm" in func.__name__ else 0
        return result
