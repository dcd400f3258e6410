"""Dispatch of stacks that run as chains of stages. Reasons against that are logged once."""

from __future__ import annotations

import logging
import pickle
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.modules import module as hooks_of_all

from weightsym.fast.chains import Chain, Unsuitable
from weightsym.fast.machine_code import has_compiler, lanes_of
from weightsym.fast.reading import read_chain
from weightsym.fast.running import Plan, run_chain
from weightsym.networks.running import run_network, work_of
from weightsym.networks.threads import known_of

__all__ = ["chain_of", "fused_outputs", "plan_of"]

Params = dict[str, Tensor]
LIMIT = 10**6
"""Networks with more work than this run by torch, see `work_of`."""
LARGEST_PLAN = 2**26
"""Bytes of activations that stay in memory, so that gradients are computed without Python."""
MOST_SETTINGS = 32
"""Networks whose attributes take more values run by torch, since each has to be read anew."""
_log = logging.getLogger("weightsym.params")


def chain_of(
    model: nn.Module,
    params: Params,
    x: Any,
    own_inputs: bool = False,
    chunk_size: int | None = None,
) -> Chain | None:
    """Find how a stack runs as a chain of stages, None if it does not.

    Args:
        model: gives the computation.
        params: a stack.
        x: the inputs, as a tuple.
        own_inputs: whether members have inputs of their own_inputs.
        chunk_size: members that shall run at once: one by one they run by torch.
    """
    if chunk_size == 1 or len(x) != 1 or work_of(model) > LIMIT:
        return None
    try:
        _refuse_unusual(x[0], params, own_inputs)
        if has_hooks(model):
            raise Unsuitable("hooks look at it")
        return _known_chain(model, params, x[0][0] if own_inputs else x[0])
    except Unsuitable as reason:
        _tell(model, str(reason))
        return None


def fused_outputs(
    chain: Chain, params: Params, x: Any, own_inputs: bool, by_torch: Callable[[Params, Any], Any]
) -> Tensor:
    """Outputs of all members of a stack.

    Args:
        chain: how they run.
        params: a stack.
        x: the inputs, as a tuple.
        own_inputs: whether members have inputs of their own_inputs.
        by_torch: computes the same by operations of torch, for second derivatives.
    """
    others = {n: t for n, t in params.items() if n not in chain.weights}

    def again(inputs: Tensor, *weights: Tensor) -> Tensor:
        stack = {**others, **dict(zip(chain.weights, weights, strict=True))}
        out: Tensor = by_torch(stack, (inputs,))
        return out

    return run_chain(chain, x[0], [params[n] for n in chain.weights], own_inputs, again)


def plan_of(model: nn.Module, params: Params, x: Tensor, gradients: Mapping[str, Tensor]) -> Plan:
    """Plan the outputs and gradients of a small stack, once for many times.

    Args:
        model: gives the computation.
        params: a stack, whose numbers may change in place; the numbers of a member lie together.
        x: inputs, the same for all members.
        gradients: where those of weights go, by name.

    Raises:
        Unsuitable: if the stack is too large, or does not run as a chain that uses weights once.
    """
    chain = chain_of(model, params, (x,))
    if chain is None or len(chain.uses) > len(chain.weights):
        raise Unsuitable("it does not run as a chain that uses every weight once")
    size = chain.bytes_of(len(x), x.element_size()) * len(next(iter(params.values())))
    if not gradients.keys() <= {*chain.weights} or size > LARGEST_PLAN:
        raise Unsuitable("it has weights without use, or many activations")
    return Plan(chain, x.detach(), {n: params[n].detach() for n in chain.weights}, gradients)


def _tell(model: nn.Module, reason: str) -> None:
    """Log a reason, once for a network."""
    reasons = known_of(model).setdefault("told", set())
    if reason not in reasons:
        reasons.add(reason)
        _log.info("%s runs by operations of torch: %s.", type(model).__name__, reason)


# ------------------------------------------------------------ what is asked of a call
def _refuse_unusual(x: Any, params: Params, own_inputs: bool) -> None:
    """Ordinary tensors on the CPU must meet, and nobody watch what happens to them."""
    tensors = [x, *(t for t in params.values() if t.is_floating_point())]
    if _is_watched():
        raise Unsuitable("mixed precision, a transform of functions or a mode is on")
    if not all(map(_is_ordinary, tensors)):
        raise Unsuitable("it has tensors of a special kind, or on another device")
    if {t.dtype for t in tensors} not in ({torch.float32}, {torch.float64}):
        raise Unsuitable("inputs and weights are not all in single or all in double precision")
    if len({t.shape[:1] for t in params.values()}) > 1 or x.ndim < 2 + own_inputs or not x.numel():
        raise Unsuitable("its tensors do not fit together")
    if not has_compiler():
        raise Unsuitable("llvmlite does not work")
    if 2 * x.shape[own_inputs] < (lanes := lanes_of(x.element_size())):
        raise Unsuitable(f"batches have fewer than {lanes // 2} examples")


def _is_ordinary(x: Any) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_neg()
    return plain and x.device.type == "cpu"


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
    """Check whether hooks take what autograd saves: perhaps, where torch cannot tell (2.6, 2.7)."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


# ------------------------------------------------------------ what is known of a network
def _known_chain(model: nn.Module, params: Params, x: Tensor) -> Chain | None:
    """Look up the chain for these settings, shapes and this precision, or read it now."""
    cached, settings = known_of(model).setdefault("chains", {}), settings_of(model)
    if settings not in cached and len(cached) == MOST_SETTINGS:
        raise Unsuitable(f"its attributes have had more than {MOST_SETTINGS} values")
    chains = cached.setdefault(settings, {})
    key = (x.shape, x.dtype, *(t.shape[1:] for t in params.values()))
    if key not in chains:
        chains[key] = _read(model, params, x)
    chain: Chain | None = chains[key]
    return chain


def _read(model: nn.Module, params: Params, x: Tensor) -> Chain | None:
    """The chain of a network, if it computes what the network does."""
    try:
        with torch.inference_mode(False), torch.random.fork_rng([]):
            return _read_first(model, params, x.detach().clone())
    except (Unsuitable, RuntimeError, ValueError, NotImplementedError, IndexError) as reason:
        _tell(model, (str(reason).strip().splitlines() or [""])[0][:120])
        return None


def _read_first(model: nn.Module, params: Params, x: Tensor) -> Chain:
    """The chain of the first network of a stack."""
    first = {n: t.detach()[0].clone() for n, t in params.items()}
    with torch.no_grad(), _untouched_generators():
        wanted = functional_call(model, first, (x.clone(),))
    for tensor in (x, *(first[name] for name, _ in model.named_parameters())):
        tensor.requires_grad_()
    with torch.enable_grad():
        chain = read_chain(lambda: run_network(model, first, (x,)), x, first)
    _compare(chain, x, first, wanted)
    return chain


@contextmanager
def _untouched_generators() -> Iterator[None]:
    """Leave random numbers as they were. Refuse what has drawn some that are not torch's own."""
    python, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
        after = random.getstate(), np.random.get_state()  # noqa: NPY002
        if pickle.dumps(after) != pickle.dumps((python, numpys)):
            raise Unsuitable("it draws random numbers of Python or numpy")
    finally:
        random.setstate(python)
        np.random.set_state(numpys)  # noqa: NPY002


@torch.no_grad()
def _compare(chain: Chain, x: Tensor, params: Params, wanted: Tensor) -> None:
    """Refuse a chain that computes something else, whatever the reason."""
    stack = [params[n][None] for n in chain.weights]
    output = run_chain(chain, x, stack, False, lambda *_: wanted)[0]
    scale = wanted[wanted.isfinite()].abs().amax() if wanted.isfinite().any() else 1.0
    tolerance = 1e-3 if x.dtype == torch.float32 else 1e-9
    if output.shape != wanted.shape or not torch.allclose(
        output / scale, wanted / scale, rtol=tolerance, atol=tolerance, equal_nan=True
    ):
        raise Unsuitable("its stages do not give what it gives")


_DEEP = 4
"""Levels of containers and objects inside each other that are looked at."""
_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type, types.FunctionType)
    + (types.BuiltinFunctionType, types.ModuleType)
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def has_hooks(model: nn.Module) -> bool:
    """Check whether functions are called when its modules run.

    Args:
        model: the network.
    """
    return hooks_of_all._has_any_global_hook() or any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    )


def settings_of(model: nn.Module) -> tuple[Any, ...]:
    """Something that differs when attributes of the network have changed.

    Containers and other objects are looked into; what is global or belongs to classes is not seen.

    Args:
        model: the network.
    """
    output: list[Any] = []
    for name, module in model.named_modules():
        names = [n for n in vars(module) if n not in _OF_EVERY_MODULE]
        output += (name, type(module), *names, *_seen([vars(module)[n] for n in names], _DEEP))
    return tuple(output)


def _seen(values: Iterable[Any], deep: int) -> list[Any]:
    """Collect the features that tell values from others."""
    return [
        v if type(v) in _PLAIN else (type(v), *_seen(_inside(v) if deep else (id(v),), deep - 1))
        for v in values
    ]


def _inside(value: Any) -> Iterable[Any]:
    """List what tells a value from others: what it holds, or its identity and attributes."""
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, dict):
        return *value, *value.values()
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, id(value.__self__)
    attributes = getattr(value, "__dict__", {})
    return id(value), *attributes, *attributes.values()
