"""Predictions with given parameters: of one network or of every member of a stack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from weightsym.networks.dicts import (
    Params,
    fixed_weights,
    is_stacked,
    of,
    stack_size,
    unstack,
)
from weightsym.networks.engines import Outputs, compute, engine_for
from weightsym.networks.running import (
    FastLayers,
    fitting_chunk,
    remember_loop,
    remember_vmap,
    run_network,
    runs_at_once,
    undoing,
)

__all__ = ["apply", "apply_each", "chunk_of"]


def apply(model: nn.Module, params: Params, *x: Any, chunk_size: int | None = None) -> Any:
    """Run a module with other parameters: one network, or every member of a stack.

    An engine that is installed and takes the network runs all members at once. Of other networks,
    tiny ones do so by ``vmap``, larger ones run member by member; so do networks that ``vmap``
    cannot handle (recurrent layers, data-dependent control flow). Which way was taken is logged
    once per module. Hooks that ``forward`` puts on tensors are called by the loop alone.

    Args:
        model: gives the computation; its own parameters are not read, but for those without
            gradients that ``params`` lacks, and no buffer of it is changed.
        params: one network or a stack. In training mode new BatchNorm statistics are put into this
            dict; the tensors that were in it, which other networks may have as well, do not change.
        *x: the inputs, shared by all members.
        chunk_size: run that many members at once; ``1`` forces the loop.

    Returns:
        What the module returns; for a stack every tensor has a leading member dimension.

    >>> from weightsym import params as P
    >>> net, x = nn.Linear(2, 1), torch.randn(5, 2)
    >>> networks = P.populate(net, 3)
    >>> outputs = P.apply(net, networks, x)
    >>> outputs.shape
    torch.Size([3, 5, 1])
    >>> torch.allclose(outputs[1], x @ networks["weight"][1].T + networks["bias"][1], atol=1e-5)
    True
    """
    with _own_buffers(model, params) as private:
        return apply_in_place(model, private, *x, chunk_size=chunk_size)


def apply_in_place(model: nn.Module, params: Params, *x: Any, chunk_size: int | None = None) -> Any:
    """Run `apply` and update BatchNorm statistics in place."""
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}.")
    template = of(model)
    stacked = is_stacked(params, template)
    if missing := template.keys() - params.keys():
        params = _completed(model, params, missing, stacked)
    if not stacked:
        return run_network(model, params, x)
    return compute(Outputs(model, params, _by_torch, x, False, chunk_size))


@contextmanager
def _own_buffers(model: nn.Module, params: Params) -> Iterator[Params]:
    """Copy the buffers that training mode may change, then store the copies in ``params``."""
    is_training = any(m.training and m._buffers for m in model.modules())
    names = [name for name, _ in model.named_buffers() if name in params] if is_training else []
    copies = {name: params[name].clone() for name in names}
    yield {**params, **copies} if copies else params
    params.update(copies)


def _completed(model: nn.Module, params: Params, missing: set[str], stacked: bool) -> Params:
    """Add the fixed weights of the module to networks without them."""
    if others := missing - fixed_weights(model):
        raise ValueError(
            f"`params` lacks {sorted(others)[0]!r} (and {len(others) - 1} more) of "
            f"{type(model).__name__}."
        )
    lead = (stack_size(params),) if stacked else ()
    fixed = {name: model.get_parameter(name).detach() for name in missing}
    return {**params, **{name: t.expand(*lead, *t.shape) for name, t in fixed.items()}}


def apply_each(model: nn.Module, params: Params, *x: Any, chunk_size: int | None = None) -> Any:
    """Run every member of a stack on inputs of its own, otherwise as `apply` does.

    Args:
        model: gives the computation.
        params: a stack.
        *x: the inputs; the leading dimension of every tensor counts members.
        chunk_size: run that many members at once; ``1`` forces the loop.

    >>> from weightsym import params as P
    >>> net, x = nn.Linear(2, 1), torch.randn(3, 5, 2)  # five inputs for each of three networks
    >>> networks = P.populate(net, 3)
    >>> one = P.apply(net, P.unstack(networks)[1], x[1])
    >>> torch.allclose(P.apply_each(net, networks, x)[1], one, atol=1e-5)
    True
    """
    with _own_buffers(model, params) as private:
        return apply_each_in_place(model, private, *x, chunk_size=chunk_size)


def apply_each_in_place(
    model: nn.Module, params: Params, *x: Any, chunk_size: int | None = None
) -> Any:
    """Run `apply_each` and update BatchNorm statistics in place."""
    members = stack_size(params)
    sizes = {len(t) for t in tree_leaves(x) if isinstance(t, Tensor)}
    if sizes != {members}:
        raise ValueError(f"`x` must have inputs for {members} members, got {sorted(sizes)}.")
    return compute(Outputs(model, params, _by_torch, x, True, chunk_size))


def chunk_of(model: nn.Module, params: Params, x: Any, chunk_size: int | None = None) -> int:
    """Return the number of members of a stack that run at once.

    Args:
        model: gives the computation.
        params: a stack.
        x: the inputs of one network.
        chunk_size: what was asked for, if anything.

    >>> from weightsym import params as P
    >>> net, x = nn.Linear(2, 1), (torch.randn(5, 2),)
    >>> networks = P.populate(net, 10)
    >>> [P.chunk_of(net, networks, x, chunk_size=size) for size in (4, 20, 1)]
    [4, 10, 1]
    """
    members = stack_size(params)
    has_engine = engine_for(Outputs(model, params, _by_torch, x, False, chunk_size)) is not None
    if not has_engine and not runs_at_once(model, chunk_size):
        return 1
    if chunk_size is not None:
        return min(chunk_size, members)
    size = _fitting_chunk(model, params, x)
    return max(size, min(members, 2)) if has_engine else size


def _fitting_chunk(model: nn.Module, params: Params, x: Any) -> int:
    def run_first() -> Any:
        first = {name: t[0].clone() for name, t in params.items()}  # its statistics must not change
        return run_network(model, first, x)

    return fitting_chunk(model, run_first, x, stack_size(params))


def _by_torch(job: Outputs) -> Any:
    """Run all members at once, or one by one where that is faster or ``vmap`` fails."""
    model = job.network
    if not runs_at_once(model, job.chunk_size):
        return _looped(job)
    undo = undoing(model, job.stack)
    try:
        outputs = _vmapped(job)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        undo()
        outputs = _looped(job)  # raises what is wrong with the inputs
        remember_loop(model, error)
    else:
        remember_vmap(model)
    return outputs


def _vmapped(job: Outputs) -> Any:
    model, chunk_size = job.network, job.chunk_size
    if chunk_size is None and not torch.is_grad_enabled() and not model.training:
        chunk_size = _fitting_chunk(model, job.stack, _inputs_of(job, 0))
    mapped: Callable[..., Any] = torch.vmap(
        functools.partial(run_network, model),
        in_dims=(0, 0 if job.own_inputs else None),
        randomness="different",
        chunk_size=chunk_size,
    )
    with FastLayers():
        return mapped(job.stack, job.inputs)


def _looped(job: Outputs) -> Any:
    outputs = [
        run_network(job.network, network, _inputs_of(job, member))
        for member, network in enumerate(unstack(job.stack))
    ]
    return tree_map(
        lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0],
        *outputs,
    )


def _inputs_of(job: Outputs, member: int) -> Any:
    if not job.own_inputs:
        return job.inputs
    return tree_map(lambda t: t[member] if isinstance(t, Tensor) else t, job.inputs)
