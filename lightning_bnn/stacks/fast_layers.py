"""Faster ways to run the layers that are slow under ``vmap`` over weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_bnn.stacks.convolution import conv2d, max_pool2d, takes

__all__ = ["FastLayers"]


class FastLayers(TorchFunctionMode):
    """Replaces calls of layers while it is active.

    Linear layers run as weight times input: with weights of many networks and one input that is a
    single product of matrices; the usual order is one small product for every network. Convolutions
    and pooling of batches on a CPU run by kernels of our own: ``vmap`` makes grouped convolutions
    of them, which are not faster than a loop over the networks.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if len(args) < (1 if func is F.max_pool2d else 2) or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        if func is F.linear and not kwargs and args[0].ndim == 2 and args[1].ndim == 2:
            return _linear(*args)
        if func is torch.conv2d and takes(args[0]) and args[1].dtype == args[0].dtype:
            return conv2d(*args, **kwargs)
        if func is F.max_pool2d and takes(args[0]) and (steps := _steps(*args[1:], **kwargs)):
            return max_pool2d(args[0], *steps)
        return func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = (weight @ x.mT).mT
    return y if bias is None else y + bias.to(y.dtype)


def _steps(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Any, Any] | None:
    """Size and stride of windows that lie inside the input and have no gaps; None for others."""
    inside = padding in (0, (0, 0)) and dilation in (1, (1, 1))
    return (kernel_size, stride) if inside and not (ceil_mode or return_indices) else None
