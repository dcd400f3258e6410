"""Chains of stages: what a network computes, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weightsym.fast.stage import Pads, Pair, Stage

__all__ = [
    "Chain",
    "Layer",
    "Unsuitable",
    "with_room",
    "FUNCTIONS",
    "Elementwise",
    "examples_first",
    "examples_last",
]


class Unsuitable(Exception):
    """The network is no chain of stages. The message says what it does."""


@dataclass(frozen=True)
class Layer:
    """A stage with the names of its weights and biases, empty if it has none."""

    stage: Stage
    weight: str = ""
    bias: str = ""


@dataclass(frozen=True)
class Chain:
    """The computation of a network, layer by layer.

    Attributes:
        layers: in their order.
        out_shape: of the outputs of an example.
    """

    layers: tuple[Layer | Elementwise, ...]
    out_shape: tuple[int, ...]

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of weights and biases, in the order in which layers use them."""
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        return tuple(name for layer in layers for name in (layer.weight, layer.bias) if name)

    @property
    def weights(self) -> tuple[str, ...]:
        """The same names, each once."""
        return tuple(dict.fromkeys(self.uses))

    def earliest(self, names: Sequence[str]) -> int:
        """The first layer that uses one of some weights."""
        pairs = ((k, w) for k, w in enumerate(self.layers) if isinstance(w, Layer))
        return next(k for k, layer in pairs if {layer.weight, layer.bias} & {*names})

    @property
    def first(self) -> Stage:
        """The first stage: it says how inputs are laid out."""
        return next(layer.stage for layer in self.layers if isinstance(layer, Layer))

    @property
    def out_size(self) -> Pair:
        """Rows and columns of the last stage's outputs."""
        stages = [layer.stage for layer in self.layers if isinstance(layer, Layer)]
        return stages[-1].out_size

    def bytes_of(self, examples: int, size: int) -> int:
        """Bytes of the activations of one member, in numbers of so many bytes."""
        stages = [layer.stage for layer in self.layers if isinstance(layer, Layer)]
        numbers = sum(s.outputs * math.prod(s.out_padded) for s in stages)
        return numbers * examples * size

    def __deepcopy__(self, memo: Any) -> Chain:
        return self


def with_room(layers: list[Layer | Elementwise]) -> list[Layer | Elementwise]:
    """Let every stage leave the room around its outputs that the next one wants.

    Args:
        layers: in their order.
    """
    done: list[Layer | Elementwise] = []
    wanted: Pads = (0, 0, 0, 0)
    size: Pair | None = None
    for layer in reversed(layers):
        if isinstance(layer, Layer):
            stage = layer.stage
            if any(wanted) and stage.out_size != size:
                raise Unsuitable("it pads what it has reshaped")
            layer = replace(layer, stage=stage.leading_to(wanted))
            wanted, size = stage.pads, stage.size
        elif any(wanted) and not layer.keeps_zero:
            raise Unsuitable(f"it pads what comes out of {layer.name}")
        done.append(layer)
    return done[::-1]


aten = torch.ops.aten
Arguments = tuple[Any, ...]
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], bool]] = {
    "relu": (aten.relu, lambda g, y: aten.threshold_backward(g, y, 0), True),
    "leaky_relu": (
        aten.leaky_relu, lambda g, z, a=0.01: aten.leaky_relu_backward(g, z, a, False), False
    ),
    "tanh": (aten.tanh, aten.tanh_backward, True),
    "sigmoid": (aten.sigmoid, aten.sigmoid_backward, True),
    "silu": (aten.silu, aten.silu_backward, False),
    "gelu": (aten.gelu, lambda g, z: aten.gelu_backward(g, z), False),
    "gelu_tanh": (
        lambda z: aten.gelu(z, approximate="tanh"),
        lambda g, z: aten.gelu_backward(g, z, approximate="tanh"),
        False,
    ),
    "elu": (
        aten.elu,
        lambda g, z, a=1, b=1, c=1: aten.elu_backward(g, a, b, c, False, z),
        False,
    ),
    "hardtanh": (aten.hardtanh, aten.hardtanh_backward, False),  # which ReLU6 is, too
    "hardswish": (aten.hardswish, aten.hardswish_backward, False),
    "softplus": (aten.softplus, aten.softplus_backward, False),
    "mish": (aten.mish, aten.mish_backward, False),
}  # fmt: skip
"""The function, its derivative times a gradient, and whether that needs outputs, not inputs."""


@dataclass(frozen=True)
class Elementwise:
    """A function of single numbers with its further arguments.

    Attributes:
        name: a key of ``FUNCTIONS``.
        arguments: numbers.
    """

    name: str
    arguments: Arguments = ()

    @property
    def keeps_zero(self) -> bool:
        """Check whether zeros around activations stay zeros."""
        return not bool(self.forward(torch.zeros(1)))

    def forward(self, z: Tensor) -> Tensor:
        """The values of the function."""
        return FUNCTIONS[self.name][0](z, *self.arguments)

    def backward(self, g: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """The gradient before the function.

        Args:
            g: the gradient after it.
            z: what it was applied to.
            y: its values.
        """
        _, derivative, of_outputs = FUNCTIONS[self.name]
        return derivative(g, y if of_outputs else z, *self.arguments)


def examples_last(x: Tensor, channels: int, size: Pair, pads: Pads, lanes: int) -> Tensor:
    """From ``(members, examples, ...)`` to ``(members, blocks, channels, rows, columns, lanes)``.

    Always a copy, also where one number of an example is all there is, since gradients are changed
    in place.

    Args:
        x: activations of torch.
        channels: of an example.
        size: its rows and columns.
        pads: zeros around it.
        lanes: examples in a block; what is left over in the last block is zero.
    """
    members, examples = x.shape[:2]
    blocks = -(-examples // lanes)
    rows, columns = size[0] + sum(pads[:2]), size[1] + sum(pads[2:])
    flat = x.detach().reshape(members, examples, channels * math.prod(size))
    if examples < blocks * lanes:
        flat = torch.nn.functional.pad(flat, (0, 0, 0, blocks * lanes - examples))
    turned = flat.unflatten(1, (blocks, lanes)).mT
    if not any(pads):
        turned = turned.clone(memory_format=torch.contiguous_format)
        return turned.view(members, blocks, channels, rows, columns, lanes)
    out = x.new_zeros(members, blocks, channels, rows, columns, lanes)
    _inside(out, size, pads).copy_(turned.unflatten(2, (channels, *size)))
    return out


def examples_first(
    out: Tensor, examples: int, shape: tuple[int, ...], size: Pair, pads: Pads
) -> Tensor:
    """The way back, to ``(members, examples, *shape)``, in memory that others may change.

    Args:
        out: activations of stages.
        examples: how many there are.
        shape: of one of them.
        size: rows and columns without padding.
        pads: zeros around them.
    """
    inner = _inside(out, size, pads) if any(pads) else out
    turned = inner.flatten(2, 4).mT
    result = out.new_empty(len(out), examples, *shape)
    flat = result.view(len(out), examples, math.prod(shape))
    lanes = out.shape[-1]
    blocks = examples // lanes
    flat[:, : blocks * lanes].unflatten(1, (blocks, lanes)).copy_(turned[:, :blocks])
    flat[:, blocks * lanes :].copy_(turned[:, -1, : examples - blocks * lanes])
    return result


def _inside(out: Tensor, size: Pair, pads: Pads) -> Tensor:
    return out[:, :, :, pads[0] : pads[0] + size[0], pads[2] : pads[2] + size[1]]
