"""One network with given weights. And undoing what a failed attempt to run several has changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, disable_saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from weightsym.devices import elsewhere, remember_randomness

__all__ = ["remember_vmap", "run_network", "undoing", "FastLayers"]

_RECOMPUTES = (
    "`network` uses torch.utils.checkpoint, which runs parts of it again in the backward pass, "
    "when the weights of members are no longer in it: switch gradient checkpointing off."
)
_SEEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_VMAPPED: weakref.WeakKeyDictionary[nn.Module, set[bool]] = weakref.WeakKeyDictionary()
"""Networks that ``vmap`` has run, in training mode or not."""


def run_network(model: nn.Module, params: Mapping[str, Tensor], x: tuple[Any, ...]) -> Any:
    """As `torch.func.functional_call`, but networks that it would run wrongly are refused.

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
    """Refuse checkpoints that hide parts of a network from autograd, and so from its hooks."""
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
    """Remember that ``vmap`` runs a network in its present mode: nothing will have to be undone."""
    _VMAPPED.setdefault(model, set()).add(model.training)


def undoing(model: nn.Module, params: Mapping[str, Tensor]) -> Callable[[], None]:
    """Remember what trying ``vmap`` may change. The function that is returned restores it.

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
    """Runs linear layers as weight times input while it is active.

    With weights of many networks and one input that is a single product of matrices; the usual
    order is one small product for every network.
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
        return func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = (weight @ x.mT).mT
    return y if bias is None else y + bias.to(y.dtype)
