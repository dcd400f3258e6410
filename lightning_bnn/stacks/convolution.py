"""Convolutions and pooling of a stack of networks, for ``vmap`` and autograd."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_bnn.stacks.threads import pool

__all__ = ["conv2d", "has_kernels", "max_pool2d", "takes"]

Pair = tuple[int, int]
FEWEST_EXAMPLES = 16
"""With fewer in a batch rows are too short to pay."""
_log = logging.getLogger("lightning_bnn.params")


@functools.lru_cache(maxsize=1)
def has_kernels() -> bool:
    """Whether numba is installed and works; a warning says once if not."""
    try:
        importlib.import_module("lightning_bnn.stacks.kernels")
    except (ImportError, RuntimeError, OSError) as error:
        _log.warning("Stacks of convolutions run slowly, numba does not work (%s).", error)
        return False
    return True


def takes(x: Tensor) -> bool:
    """Whether inputs ``(examples, channels, height, width)`` are of a kind the kernels know."""
    return (
        x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and x.dtype in (torch.float32, torch.float64)
        and x.ndim == 4
        and x.shape[0] >= FEWEST_EXAMPLES
        and has_kernels()
    )


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As ``torch.nn.functional.conv2d``; under ``vmap`` over weights by kernels of our own."""
    if x.shape[1] != groups * weight.shape[1] or weight.shape[0] % groups:
        raise RuntimeError(
            f"Weights of size {tuple(weight.shape)} in {groups} groups do not fit inputs of shape "
            f"{tuple(x.shape)}: expected {groups * weight.shape[1]} channels."
        )
    if padding == "same":
        if _pair(stride) != (1, 1):
            raise RuntimeError("padding='same' is not supported for strided convolutions")
        reach = [d * (k - 1) for d, k in zip(_pair(dilation), weight.shape[2:], strict=True)]
        x = F.pad(x, (reach[1] // 2, -(-reach[1] // 2), reach[0] // 2, -(-reach[0] // 2)))
    elif padding != "valid" and any(_pair(padding)):
        rows, columns = _pair(padding)
        x = F.pad(x, (columns, columns, rows, rows))
    out: Tensor = _Convolution.apply(x, weight, _pair(stride), _pair(dilation))
    return out if bias is None else out + bias[:, None, None]


def max_pool2d(x: Tensor, size: Any, stride: Any = None) -> Tensor:
    """As ``torch.nn.functional.max_pool2d`` without padding, by a kernel of our own."""
    size = _pair(size)
    pooled: Tensor = _Pool.apply(x, size, _pair(stride) if stride else size)
    return pooled


def _pair(value: Any) -> Pair:
    first, second = value if isinstance(value, Sequence) else (value, value)
    return int(first), int(second)


# ------------------------------------------------------------ under vmap
class _Convolution(torch.autograd.Function):
    """An ordinary convolution without ``vmap``; with it, all members in one call."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: Pair, dilation: Pair) -> Tensor:
        groups = x.shape[1] // weight.shape[1]
        return F.conv2d(x, weight, None, stride, 0, dilation, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.steps = inputs[2:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _by_autograd(lambda x, w: _Convolution.forward(x, w, *ctx.steps), ctx, g)
        return *gradients, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, weight: Tensor, stride: Pair, dilation: Pair
    ) -> tuple[Tensor, int]:
        weight = _members_first(weight, in_dims[1], info.batch_size)
        if in_dims[0] is not None or x.requires_grad:
            x = _members_first(x, in_dims[0], info.batch_size)
        else:
            x = x[None]
        # examples last, in memory too: a copy only where that is not so already
        x = x.permute(0, 2, 3, 4, 1).contiguous()
        out = _StackedConvolution.apply(x, weight.contiguous(), stride, dilation)
        return out.permute(0, 4, 1, 2, 3), 0


class _Pool(torch.autograd.Function):
    """Ordinary pooling without ``vmap``; with it, all members in one call."""

    @staticmethod
    def forward(x: Tensor, size: Pair, stride: Pair) -> Tensor:
        return F.max_pool2d(x, size, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.steps = inputs[1:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return *_by_autograd(lambda x: F.max_pool2d(x, *ctx.steps), ctx, g), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, size: Pair, stride: Pair) -> tuple[Tensor, int]:
        x = _members_first(x, in_dims[0], info.batch_size).permute(0, 2, 3, 4, 1).contiguous()
        return _StackedPool.apply(x, size, stride).permute(0, 4, 1, 2, 3), 0


def _by_autograd(run: Callable[..., Tensor], ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a layer that no member dimension has reached."""
    gradients: tuple[Tensor, ...] = torch.func.vjp(run, *ctx.saved_tensors)[1](g)
    return gradients


def _members_first(tensor: Tensor, place: int | None, members: int) -> Tensor:
    if place is None:
        return tensor.expand(members, *tensor.shape)
    return tensor.movedim(place, 0)


# ------------------------------------------------------------ all members at once
class _StackedConvolution(torch.autograd.Function):
    """Inputs ``(members, channels, height, width, examples)``; one member if all share them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, dilation: Pair) -> Tensor:
        from lightning_bnn.stacks import kernels

        ctx.save_for_backward(x, weight)
        ctx.steps = (stride, dilation)
        places = [
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(x.shape[2:4], weight.shape[3:], stride, dilation, strict=True)
        ]
        if min(places) < 1:
            raise RuntimeError(
                f"Kernel size {tuple(weight.shape[3:])} can't be greater than the input size "
                f"{tuple(x.shape[2:4])}."
            )
        out = x.new_empty(len(weight), weight.shape[1], *places, x.shape[4])
        _over_members(kernels.convolve, [x, weight, out], stride, dilation)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from lightning_bnn.stacks import kernels

        x, weight = ctx.saved_tensors
        g = g.contiguous()
        gx = gw = None
        if ctx.needs_input_grad[0]:
            gx = torch.empty_like(x)
            _over_members(kernels.input_gradient, [g, weight, gx], *ctx.steps)
        if ctx.needs_input_grad[1]:
            gw = torch.empty_like(weight)
            _over_members(kernels.weight_gradient, [g, x, gw], *ctx.steps)
        return gx, gw, None, None


class _StackedPool(torch.autograd.Function):
    """Inputs ``(members, channels, height, width, examples)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Pair, stride: Pair) -> Tensor:
        from lightning_bnn.stacks import kernels

        places = [(n - k) // s + 1 for n, k, s in zip(x.shape[2:4], size, stride, strict=True)]
        if min(places) < 1:
            raise RuntimeError(f"windows of size {size} do not fit into {tuple(x.shape[2:4])}")
        out = x.new_empty(*x.shape[:2], *places, x.shape[4])
        index = torch.empty_like(out, dtype=torch.int32)
        _over_members(kernels.pool, [x, out, index], size, stride)
        ctx.save_for_backward(index)
        ctx.shape, ctx.steps = x.shape, (size, stride)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        from lightning_bnn.stacks import kernels

        gx = g.new_empty(ctx.shape)
        _over_members(kernels.pool_gradient, [g.contiguous(), *ctx.saved_tensors, gx], *ctx.steps)
        return gx, None, None


def _over_members(kernel: Callable[..., None], tensors: list[Tensor], *steps: Pair) -> None:
    """Run a kernel, the members shared among as many threads as torch has."""
    arrays = [t.detach().numpy() for t in tensors]
    members = max(len(t) for t in tensors)
    threads = min(torch.get_num_threads(), members)
    if threads == 1:
        kernel(*arrays, *steps, 0, members)
        return
    bounds = [members * k // threads for k in range(threads + 1)]
    parts = list(zip(bounds, bounds[1:], strict=False))
    running = [pool(threads - 1).submit(kernel, *arrays, *steps, *part) for part in parts[1:]]
    kernel(*arrays, *steps, *parts[0])
    for part in running:
        part.result()
