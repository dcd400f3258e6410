"""Run one network with given weights, and undo the side effects of a failed vmap."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, disable_saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsym.networks.devices import elsewhere, random_numbers, remember_randomness

_RECOMPUTES = (
    "`network` uses torch.utils.checkpoint, which runs parts of it again in the backward pass, "
    "when the weights of members are no longer in it: switch gradient checkpointing off."
)
_SEEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_VMAPPED: weakref.WeakKeyDictionary[nn.Module, set[bool]] = weakref.WeakKeyDictionary()
"""Networks that ``vmap`` has run, in training mode or not."""


def run_network(model: nn.Module, params: Mapping[str, Tensor], x: tuple[Any, ...]) -> Any:
    """Run `torch.func.functional_call`, and refuse networks for which it is wrong.

    Args:
        model: gives the computation.
        params: weights and buffers in place of its own.
        x: the inputs.
    """
    if not torch.is_grad_enabled():
        return functional_call(model, dict(params), x)
    try:
        with ExitStack() as stack:
            with suppress(RuntimeError):  # there are hooks already, such as `save_on_cpu`
                stack.enter_context(disable_saved_tensors_hooks(_RECOMPUTES))
            outputs = functional_call(model, dict(params), x)
    except RuntimeError as error:
        if _RECOMPUTES not in str(error):
            raise
        raise ValueError(_RECOMPUTES) from None
    if model not in _SEEN:
        _refuse_reentrant_checkpoints(outputs)
        _SEEN.add(model)
    return outputs


def _refuse_reentrant_checkpoints(outputs: Any) -> None:
    """Refuse reentrant checkpoints, which hide parts of a network from autograd and its hooks."""
    waiting: list[Node | None] = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, Tensor)]
    visited: set[Node | None] = {None, *waiting}
    while waiting:
        if (node := waiting.pop()) is None:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(_RECOMPUTES)
        following = {before for before, _ in node.next_functions} - visited
        visited |= following
        waiting += following


def remember_vmap(model: nn.Module) -> None:
    """Remember that ``vmap`` can run a network in its present mode, so that no undo is needed."""
    _VMAPPED.setdefault(model, set()).add(model.training)


def undoing(model: nn.Module, params: Mapping[str, Tensor]) -> Callable[[], None]:
    """Save what trying ``vmap`` may change. Return a function that restores it.

    Args:
        model: whose buffers count, in training mode.
        params: weights and buffers, which are changed in place.
    """
    if model.training in _VMAPPED.get(model, ()):
        return lambda: None
    trained = {name for name, _ in model.named_parameters()}
    buffers = [t for n, t in params.items() if model.training and n not in trained]
    copies = [t.clone() for t in buffers]
    restore_randomness = remember_randomness(elsewhere(params.values()))

    @torch.no_grad()
    def undo() -> None:
        for tensor, copy in zip(buffers, copies, strict=True):
            tensor.copy_(copy)
        restore_randomness()

    return undo


class FastLayers(TorchFunctionMode):
    """A mode that runs linear layers as weight times input, and attention as products.

    With weights of many networks and one input a layer is a single product of matrices; the usual
    order is one small product for every network. The fused attention of CPUs is not for ``vmap``.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and args[0].ndim == 2 and args[1].ndim == 2:
            return _linear(*args)
        if func is F.scaled_dot_product_attention and args and args[0].device.type == "cpu":
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = (weight @ x.mT).mT
    return y if bias is None else y + bias.to(y.dtype)


# ------------------------------------------------------------ how many members run at once
VMAP_LIMIT = 60_000, 6_000_000
"""Networks with more work than this run member by member: on the CPU, and on other devices."""
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
    """Return whether `apply` runs the members of a stack at once, not one by one.

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
    """Return the number of weights, those of convolutions counted twelve times for their reuse.

    Matrices that are buffers count as weights, as they do where a backbone is held fixed.

    Args:
        model: the network.
    """
    if model not in _WORK:
        convolutions = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        used_often = sum(p.numel() for m in convolutions for p in m.parameters(recurse=False))
        matrices = [t for t in model.buffers() if t.ndim > 1 and t.is_floating_point()]
        weights = [*model.parameters(), *matrices]
        _WORK[model] = sum(t.numel() for t in weights) + 11 * used_often
    return _WORK[model]


def remember_loop(model: nn.Module, error: Exception) -> None:
    """Mark a network that ``vmap`` cannot run, so that its members run one by one."""
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
    """A mode that counts the bytes of all results, and of batch norm outputs."""

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
