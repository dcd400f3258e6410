"""Losses of several networks on one batch, without holding the activations of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.methods.batch import Batch
from lightning_bnn.params import Params
from lightning_bnn.stacks import in_threads, keep_freed_memory, threads_for

__all__ = ["member_losses"]

Loss = Callable[[Any, Tensor], Tensor]
"""From outputs with a leading member dimension, and targets, to one number per member."""


def member_losses(
    model: nn.Module,
    params: Params,
    batch: Batch,
    loss: Loss,
    shared: Sequence[Tensor] = (),
    chunk_size: int | None = None,
) -> Tensor:
    """The loss of every network of a stack, ``(members,)``, with gradients.

    As many networks run at once as fit into the cache, large ones one by one; the gradient of each
    chunk is taken before the next one starts, so that the activations of one chunk are held.

    Args:
        model: gives the computation.
        params: a stack.
        batch: what the networks see.
        loss: from outputs ``(members, ...)`` and targets to ``(members,)``.
        shared: leaf tensors that the loss depends on besides the outputs.
        chunk_size: networks that run at once, see `lightning_bnn.params.apply`.
    """
    members = P.stack_size(params)
    if members == 1:
        return _alone(model, params, batch, loss)
    leaves = [t for t in shared if t.requires_grad]
    size = P.chunk_of(model, params, batch.of(0).inputs, chunk_size)
    if leaves and size > 1:  # what is shared has a gradient of every member
        size = members
    if size >= members or not torch.is_grad_enabled() or _scaled(params):
        return loss(batch.outputs(model, params, chunk_size), batch.targets)
    keep_freed_memory()
    device = next(iter(params.values())).device
    threads = 1 if size == 1 else threads_for(model, device)
    if device.type == "cpu":
        size = min(size, -(-members // torch.get_num_threads()))
    names = list(params)

    def losses_of_some(copied: nn.Module, first: int, tensors: Sequence[Tensor]) -> Tensor:
        stack = dict(zip(names, tensors, strict=True))
        seen = batch.of(slice(first, first + size))
        if size == 1:
            return _alone(copied, stack, seen, loss)
        return loss(seen.outputs(copied, stack, None), seen.targets)

    chunks = _Chunks(model, losses_of_some, size, threads)
    return _ByChunks.apply(chunks, len(leaves), *leaves, *params.values())


def _scaled(params: Params) -> bool:
    """Whether losses are scaled before their gradients are taken, as float16 needs it."""
    device = next(iter(params.values())).device.type
    half = torch.get_autocast_dtype(device) == torch.float16
    return torch.is_autocast_enabled(device) and half


@dataclass(frozen=True)
class _Chunks:
    """How members run: so many at a time, from some first one on, on so many threads."""

    model: nn.Module
    losses: Callable[[nn.Module, int, Sequence[Tensor]], Tensor]
    size: int
    threads: int


def _alone(model: nn.Module, stack: Params, batch: Batch, loss: Loss) -> Tensor:
    """The loss of a stack of one network."""
    network = {name: t.squeeze(0) for name, t in stack.items()}
    return loss(batch.outputs_of_one(model, network), batch.targets)


class _ByChunks(torch.autograd.Function):
    """Runs members in turn, some at a time, and takes their gradients in the forward pass."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, count: int, *tensors: Tensor) -> Tensor:
        shared, stacked = tensors[:count], tensors[count:]
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[2 + count :]) if needed]
        grads = {k: torch.empty_like(stacked[k]) for k in wanted}

        def work(model: nn.Module, first: int) -> tuple[Tensor, list[Tensor]]:
            chunk = [t[first : first + chunks.size].detach() for t in stacked]
            for k in wanted:
                chunk[k].requires_grad_()
            with torch.enable_grad():
                values = chunks.losses(model, first, chunk)
                total = values.sum()
            leaves = [*(chunk[k] for k in wanted), *shared]
            found = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
            for k, grad in zip(wanted, found, strict=False):
                grads[k][first : first + chunks.size] = grad
            return values.detach(), list(found[len(wanted) :])

        starts = range(0, len(stacked[0]), chunks.size)
        losses, of_shared = zip(
            *in_threads(work, starts, chunks.model, chunks.threads), strict=True
        )
        ctx.count, ctx.total, ctx.grads = count, len(stacked), grads
        ctx.of_shared = [torch.stack(parts) for parts in zip(*of_shared, strict=True)]
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
        summed = bool((weight == 1).all())  # as nearly always: spare a copy of all gradients

        def weighed(grad: Tensor) -> Tensor:
            return grad if summed else grad * weight.to(grad).reshape(-1, *(1,) * (grad.ndim - 1))

        shared = [weighed(parts).sum(0) for parts in ctx.of_shared]
        stacked = [weighed(ctx.grads[k]) if k in ctx.grads else None for k in range(ctx.total)]
        return (None, None, *shared, *stacked)
