"""Which stacks run as chains of stages; the reasons why others do not are logged once."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as hooks_of_all

from lightning_bnn.stacks.choices import work_of
from lightning_bnn.stacks.copies import known_of
from lightning_bnn.stacks.fused.chains import Chain, Unsuitable, read_chain
from lightning_bnn.stacks.fused.machine_code import has_compiler, lanes_of
from lightning_bnn.stacks.fused.running import run_chain
from lightning_bnn.stacks.running import run_network

__all__ = ["chain_of", "fused_outputs"]

Params = dict[str, Tensor]
LIMIT = 10**6
"""Networks with more work than this run by torch, see `choices.work_of`."""
_TOLD = "its reason was logged"
_log = logging.getLogger("lightning_bnn.params")


def chain_of(
    model: nn.Module, params: Params, x: Any, own: bool = False, chunk_size: int | None = None
) -> Chain | None:
    """How a stack runs as a chain of stages; None if it does not.

    Args:
        model: gives the computation.
        params: a stack.
        x: the inputs, as a tuple.
        own: whether members have inputs of their own.
        chunk_size: members that shall run at once: one by one they run by torch.
    """
    if chunk_size == 1 or len(x) != 1 or not _is_plain(x[0], params, own):
        return None
    if work_of(model) > LIMIT:
        return None
    inputs = x[0][0] if own else x[0]
    settings = _settings(model)
    if settings is None:
        return None
    key = (inputs.shape, inputs.dtype, settings)
    known = known_of(model)
    if key not in known:
        known[key] = _read(model, params, inputs.detach())
    chain: Chain | None = known[key]
    return chain


def fused_outputs(
    chain: Chain, params: Params, x: Any, own: bool, by_torch: Callable[[Params, Any], Any]
) -> Tensor:
    """Outputs of all members of a stack.

    Args:
        chain: how they run.
        params: a stack.
        x: the inputs, as a tuple.
        own: whether members have inputs of their own.
        by_torch: computes the same by operations of torch, for second derivatives.
    """
    rest = {n: t for n, t in params.items() if n not in chain.weights}

    def again(inputs: Tensor, *weights: Tensor) -> Tensor:
        stack = {**rest, **dict(zip(chain.weights, weights, strict=True))}
        out: Tensor = by_torch(stack, (inputs,))
        return out

    return run_chain(chain, x[0], [params[n] for n in chain.weights], own, again)


# ------------------------------------------------------------ what is asked of a call
def _is_plain(x: Any, params: Params, own: bool) -> bool:
    """Whether ordinary tensors on the CPU meet, and nobody watches what happens to them."""
    if not _is_ordinary(x) or x.ndim < 2 + own or not x.numel() or _is_watched():
        return False
    weights = [t for t in params.values() if t.is_floating_point()]
    alike = all(_is_ordinary(t) and t.dtype == x.dtype for t in weights)
    return alike and has_compiler() and 2 * x.shape[own] >= lanes_of(x.element_size())


def _is_ordinary(x: Any) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
    return plain and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def _is_watched() -> bool:
    """Under transforms, modes, hooks and mixed precision operations mean something else."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or _keeps_tensors_elsewhere()
        or torch.is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
    )


def _keeps_tensors_elsewhere() -> bool:
    """Whether hooks take what autograd saves; torch 2.6 and 2.7 cannot tell, so there: perhaps."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


# ------------------------------------------------------------ what is known of a network
def _settings(model: nn.Module) -> Any:
    """What a network's computation may depend on besides tensors; None if hooks look at it."""
    if hooks_of_all._has_any_global_hook():
        return None
    found = []
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return None
        if module._backward_pre_hooks:
            return None
        values = vars(module).items()
        simple = [(n, repr(v) if type(v) is tuple else v) for n, v in values if type(v) in _SIMPLE]
        found.append((name, type(module), *simple))
    return tuple(found)


_SIMPLE = frozenset(
    (bool, int, float, str, tuple, type(None), types.FunctionType, types.BuiltinFunctionType)
)
"""Kinds of attributes that are looked at."""


def _read(model: nn.Module, params: Params, x: Tensor) -> Chain | None:
    """The chain of a network, if it computes what the network does."""
    first = {n: t.detach()[0].clone() for n, t in params.items()}
    for name, _ in model.named_parameters():
        first[name].requires_grad_()
    with torch.enable_grad(), torch.random.fork_rng([]):
        try:
            outputs: list[Tensor] = []

            def run() -> Any:
                outputs.append(run_network(model, first, (x,)))
                return outputs[0]

            chain = read_chain(run, x, first)
            _compare(chain, x, first, outputs[0].detach())
        except (Unsuitable, RuntimeError, ValueError, NotImplementedError, IndexError) as reason:
            if _TOLD not in known_of(model):
                known_of(model)[_TOLD] = True
                text = (str(reason).strip().splitlines() or [""])[0][:120]
                _log.info("%s runs by operations of torch: %s.", type(model).__name__, text)
            return None
    return chain


@torch.no_grad()
def _compare(chain: Chain, x: Tensor, params: Params, wanted: Tensor) -> None:
    """Refuse a chain that computes something else, whatever the reason."""
    stack = [params[n][None] for n in chain.weights]
    found = run_chain(chain, x, stack, False, lambda *_: wanted)[0]
    scale = wanted[wanted.isfinite()].abs().amax() if wanted.isfinite().any() else 1.0
    tolerance = 1e-3 if x.dtype == torch.float32 else 1e-9
    if found.shape != wanted.shape or not torch.allclose(
        found / scale, wanted / scale, rtol=tolerance, atol=tolerance, equal_nan=True
    ):
        raise Unsuitable("its stages do not give what it gives")
