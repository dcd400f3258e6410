"""Losses of several networks on one batch, without holding the activations of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn import params as P
from lightning_bnn.params import Params

__all__ = ["member_losses"]

Loss = Callable[[Any], Tensor]
"""From outputs with a leading member dimension to one number per member."""


def member_losses(
    model: nn.Module,
    params: Params,
    inputs: tuple[Any, ...],
    loss: Loss,
    shared: Sequence[Tensor] = (),
    chunk_size: int | None = None,
) -> Tensor:
    """The loss of every network of a stack, ``(members,)``, with gradients.

    Tiny networks run at once. Large ones run one by one, and the gradient of each is taken before
    the next one starts, so that the activations of one network are held at a time.

    Args:
        model: gives the computation.
        params: a stack.
        inputs: of the networks.
        loss: from outputs ``(members, ...)`` to ``(members,)``.
        shared: leaf tensors that the loss depends on besides the outputs.
        chunk_size: networks that run at once, see `lightning_bnn.params.apply`.
    """
    members = P.stack_size(params)
    if members == 1:
        outputs = P.apply(model, {n: t.squeeze(0) for n, t in params.items()}, *inputs)
        return loss(_leading(outputs))
    if P.runs_at_once(model, chunk_size) or not torch.is_grad_enabled():
        return loss(P.apply(model, params, *inputs, chunk_size=chunk_size))
    names = list(params)

    def one(member: Sequence[Tensor]) -> Tensor:
        outputs = P.apply(model, dict(zip(names, member, strict=True)), *inputs)
        return loss(_leading(outputs))[0]

    leaves = [t for t in shared if t.requires_grad]
    return _OneByOne.apply(one, len(leaves), *leaves, *params.values())


def _leading(outputs: Any) -> Any:
    return tree_map(lambda t: t[None] if isinstance(t, Tensor) else t, outputs)


class _OneByOne(torch.autograd.Function):
    """Runs members in turn and takes each gradient in the forward pass."""

    @staticmethod
    def forward(ctx: Any, one: Callable[..., Tensor], count: int, *tensors: Tensor) -> Tensor:
        shared, stacked = tensors[:count], tensors[count:]
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[2 + count :]) if needed]
        grads = {k: torch.empty_like(stacked[k]) for k in wanted}
        of_shared: list[list[Tensor]] = []
        losses = []
        for m in range(len(stacked[0])):
            member = [t[m].detach() for t in stacked]
            for k in wanted:
                member[k].requires_grad_()
            with torch.enable_grad():
                value = one(member)
            leaves = [*(member[k] for k in wanted), *shared]
            found = torch.autograd.grad(value, leaves, materialize_grads=True, allow_unused=True)
            for k, grad in zip(wanted, found, strict=False):
                grads[k][m] = grad
            of_shared.append(list(found[len(wanted) :]))
            losses.append(value.detach())
        ctx.count, ctx.total, ctx.grads = count, len(stacked), grads
        ctx.of_shared = [torch.stack(parts) for parts in zip(*of_shared, strict=True)]
        return torch.stack(losses)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
        summed = bool((weight == 1).all())  # as nearly always: spare a copy of all gradients

        def weighed(grad: Tensor) -> Tensor:
            return grad if summed else grad * weight.to(grad).reshape(-1, *(1,) * (grad.ndim - 1))

        shared = [weighed(parts).sum(0) for parts in ctx.of_shared]
        stacked = [weighed(ctx.grads[k]) if k in ctx.grads else None for k in range(ctx.total)]
        return (None, None, *shared, *stacked)
