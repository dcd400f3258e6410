"""The engine of machine code: stacks that run as chains of stages, and their plans."""

from __future__ import annotations

import pickle
import random
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.modules import module as hooks_of_all

from weightsym.networks.engines import Outputs
from weightsym.networks.running import run_network, work_of
from weightsym.networks.threads import known_of
from weightsym_fast.chains import Chain, Unsuitable
from weightsym_fast.machine_code import has_compiler, lanes_of
from weightsym_fast.reading import read_chain
from weightsym_fast.running import GradientPlan, run_chain

Params = dict[str, Tensor]
LIMIT = 10**6
"""Networks with more work than this run by torch, see `work_of`."""
LARGEST_PLAN = 2**26
"""Bytes of activations that stay in memory, so that gradients are computed without Python."""
MOST_SETTINGS = 32
"""Networks whose attributes take more values run by torch, since each has to be read anew."""


class MachineCode:
    """Outputs of small chains of layers on the CPU, by machine code generated for their sizes.

    The computation of a chain is read from one run, and again when an attribute of the network has
    changed. Changes of global variables and of class attributes are not detected, and hooks that
    ``forward`` registers on tensors are not called.
    """

    name = "machine code"
    kinds = (Outputs,)

    def takes(self, job: Outputs) -> str | None:
        try:
            job.notes["chain"] = chain_of(job)
        except Unsuitable as reason:
            return str(reason)
        return None

    def run(self, job: Outputs) -> Tensor:
        chain, stack = job.notes["chain"], job.stack

        def again(x: Tensor, *weights: Tensor) -> Tensor:
            """Compute by torch, for second derivatives."""
            replaced = {**stack, **dict(zip(chain.weights, weights, strict=True))}
            out: Tensor = job.by_torch(replace(job, stack=replaced, inputs=(x,), chunk_size=None))
            return out

        weights = [stack[n] for n in chain.weights]
        return run_chain(chain, job.inputs[0], weights, job.own_inputs, again)


def chain_of(job: Outputs) -> Chain:
    """Find how a stack runs as a chain of stages.

    Args:
        job: asks for its outputs.

    Raises:
        Unsuitable: if it does not.
    """
    if job.chunk_size == 1:
        raise Unsuitable("its members are to run one by one")
    if len(job.inputs) != 1:
        raise Unsuitable("it has several inputs, or none")
    if work_of(job.network) > LIMIT:
        raise Unsuitable("it is large")
    (x,) = job.inputs
    _refuse_unusual(x, job.stack, job.own_inputs)
    if has_hooks(job.network):
        raise Unsuitable("it has hooks")
    return _known_chain(job.network, job.stack, x[0] if job.own_inputs else x)


def plan_of(job: Outputs, gradients: Mapping[str, Tensor]) -> GradientPlan:
    """Plan the outputs and gradients of a small stack, for repeated use.

    Args:
        job: requests the outputs. Numbers of the stack may change in place later; those of a member
            are contiguous.
        gradients: where those of weights go, by name.

    Raises:
        Unsuitable: if the stack is too large, or does not run as a chain that uses weights once.
    """
    chain, stack, x = chain_of(job), job.stack, job.inputs[0]
    if len(chain.uses) > len(chain.weights):
        raise Unsuitable("it uses a weight twice")
    size = chain.bytes_of(len(x), x.element_size()) * len(next(iter(stack.values())))
    if not gradients.keys() <= {*chain.weights} or size > LARGEST_PLAN:
        raise Unsuitable("it has weights without use, or many activations")
    return GradientPlan(chain, x.detach(), {n: stack[n].detach() for n in chain.weights}, gradients)


# ------------------------------------------------------------ what is asked of a call
def _refuse_unusual(x: Any, params: Params, own_inputs: bool) -> None:
    """Require ordinary tensors on the CPU, without observers."""
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
        raise Unsuitable("llvmlite is missing, or does not work")
    if 2 * x.shape[own_inputs] < (lanes := lanes_of(x.element_size())):
        raise Unsuitable(f"batches have fewer than {lanes // 2} examples")


def _is_ordinary(x: Any) -> bool:
    plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_neg()
    return plain and x.device.type == "cpu"


def _is_watched() -> bool:
    """Return whether transforms, modes, hooks or mixed precision change operations."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or _keeps_tensors_elsewhere()
        or torch.is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0
        or torch.compiler.is_compiling()
    )


def _keeps_tensors_elsewhere() -> bool:
    """Return whether hooks intercept saved tensors: assumed where torch cannot tell (2.6, 2.7)."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


# ------------------------------------------------------------ what is known of a network
def _known_chain(model: nn.Module, params: Params, x: Tensor) -> Chain:
    """Return the chain for these settings, shapes and this precision, reading it if necessary."""
    cached, settings = known_of(model).setdefault("chains", {}), settings_of(model)
    if settings not in cached and len(cached) == MOST_SETTINGS:
        raise Unsuitable(f"its attributes have had more than {MOST_SETTINGS} values")
    chains = cached.setdefault(settings, {})
    key = (x.shape, x.dtype, *(t.shape[1:] for t in params.values()))
    if key not in chains:
        chains[key] = _read(model, params, x)
    if isinstance(chain := chains[key], Chain):
        return chain
    raise Unsuitable(chain)


def _read(model: nn.Module, params: Params, x: Tensor) -> Chain | str:
    """Return the verified chain of a network, or the reason why there is none."""
    try:
        with torch.inference_mode(False), torch.random.fork_rng([]):
            return _read_first(model, params, x.detach().clone())
    except (Unsuitable, RuntimeError, ValueError, NotImplementedError, IndexError) as reason:
        return (str(reason).strip().splitlines() or [""])[0][:120]


def _read_first(model: nn.Module, params: Params, x: Tensor) -> Chain:
    """Read the chain of the first network of a stack."""
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
    """Restore random states afterwards, and refuse draws from generators other than torch's."""
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
    """Refuse a chain with different outputs from the network, for any reason."""
    stack = [params[n][None] for n in chain.weights]
    output = run_chain(chain, x, stack, False, lambda *_: wanted)[0]
    scale = wanted[wanted.isfinite()].abs().amax() if wanted.isfinite().any() else 1.0
    tolerance = 1e-3 if x.dtype == torch.float32 else 1e-9
    if output.shape != wanted.shape or not torch.allclose(
        output / scale, wanted / scale, rtol=tolerance, atol=tolerance, equal_nan=True
    ):
        raise Unsuitable("its stages compute different outputs")


_DEEP = 4
"""Levels of containers and objects inside each other that are looked at."""
_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type, types.FunctionType)
    + (types.BuiltinFunctionType, types.ModuleType)
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def has_hooks(model: nn.Module) -> bool:
    """Return whether functions are called when its modules run.

    Args:
        model: the network.
    """
    return hooks_of_all._has_any_global_hook() or any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in model.modules()
    )


def settings_of(model: nn.Module) -> tuple[Any, ...]:
    """Return a value that changes with the attributes of the network.

    Containers and other objects are searched, but not globals or class attributes.

    Args:
        model: the network.
    """
    output: list[Any] = []
    for name, module in model.named_modules():
        names = [n for n in vars(module) if n not in _OF_EVERY_MODULE]
        output += (name, type(module), *names, *_seen([vars(module)[n] for n in names], _DEEP))
    return tuple(output)


def _seen(values: Iterable[Any], deep: int) -> list[Any]:
    """Collect the features that distinguish values."""
    return [
        v if type(v) in _PLAIN else (type(v), *_seen(_inside(v) if deep else (id(v),), deep - 1))
        for v in values
    ]


def _inside(value: Any) -> Iterable[Any]:
    """List the features of a value: its contents, or its identity and attributes."""
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
