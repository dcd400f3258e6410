"""Chains of stages, the representation of a network as layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

Pair = tuple[int, int]
Pooling = Literal["none", "max", "mean"]
Pads = tuple[int, int, int, int]
"""Zeros above, below, left and right."""
LONGEST = 640
"""Products in a row without a loop."""


@dataclass(frozen=True)
class Tile:
    """A block of outputs computed at once, of some channels at neighbouring positions.

    There may be fewer channels left for the last one.
    """

    channels: int
    rows: int
    columns: int
    whole_kernel: bool

    @property
    def places(self) -> list[Pair]:
        """The row and column of every position in the tile."""
        return [(i, j) for i in range(self.rows) for j in range(self.columns)]


@dataclass(frozen=True)
class StageSizes:
    """The sizes of a stage: a convolution, linear layer or none, then rectifier and pooling.

    Attributes:
        channels: of the inputs.
        size: rows and columns of the inputs, without padding.
        outputs: channels of the outputs.
        groups: of the convolution.
        kernel: rows and columns of its weights.
        stride: of the convolution.
        dilation: of the convolution.
        pads: of the inputs.
        weighted: whether there are weights; without them a stage only pools.
        bias: whether there is a bias.
        inside: slope below zero of the rectifier before averaging; 1 if there is none.
        outside: slope of the rectifier at the end.
        pooling: what becomes of a window.
        window: rows and columns of windows.
        step: from one window to the next.
        out_pads: zeros around the outputs, as the next stage wants them.
        registers: vectors that the processor holds at once.
    """

    channels: int
    size: Pair
    outputs: int
    groups: int = 1
    kernel: Pair = (1, 1)
    stride: Pair = (1, 1)
    dilation: Pair = (1, 1)
    pads: Pads = (0, 0, 0, 0)
    weighted: bool = True
    bias: bool = False
    inside: float = 1.0
    outside: float = 1.0
    pooling: Pooling = "none"
    window: Pair = (1, 1)
    step: Pair = (1, 1)
    out_pads: Pads = (0, 0, 0, 0)
    registers: int = 16

    # ------------------------------------------------------------ sizes
    @property
    def padded(self) -> Pair:
        """The rows and columns of the padded inputs."""
        return self.size[0] + sum(self.pads[:2]), self.size[1] + sum(self.pads[2:])

    @property
    def places(self) -> Pair:
        """The rows and columns of the convolution's output."""
        rows, columns = (
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(self.padded, self.kernel, self.stride, self.dilation, strict=True)
        )
        return rows, columns

    @property
    def out_size(self) -> Pair:
        """The rows and columns of the outputs, without padding."""
        if self.pooling == "none":
            return self.places
        rows, columns = (
            (n - k) // s + 1 for n, k, s in zip(self.places, self.window, self.step, strict=True)
        )
        return rows, columns

    @property
    def out_padded(self) -> Pair:
        """The rows and columns of the padded outputs."""
        return (
            self.out_size[0] + sum(self.out_pads[:2]),
            self.out_size[1] + sum(self.out_pads[2:]),
        )

    @property
    def depth(self) -> int:
        """The number of input channels in a group."""
        return self.channels // self.groups

    @property
    def share(self) -> int:
        """The number of output channels in a group."""
        return self.outputs // self.groups

    @property
    def taps(self) -> list[Pair]:
        """The rows and columns of the kernel."""
        return [(s, t) for s in range(self.kernel[0]) for t in range(self.kernel[1])]

    @property
    def notes(self) -> int:
        """The number of notes that an example's backward pass needs, see `note_bits`."""
        if self.pooling == "max":
            return self.outputs * math.prod(self.out_size)
        keeps = self.pooling == "mean" and self.inside != 1
        return self.outputs * math.prod(self.out_size) * math.prod(self.window) if keeps else 0

    @property
    def note_bits(self) -> int:
        """The bits of one note: the index of a window's maximum, or a sign."""
        return 1 if self.pooling == "mean" else 8 if math.prod(self.window) <= 256 else 16

    def leading_to(self, pads: Pads) -> StageSizes:
        """Return the stage with padded outputs."""
        return replace(self, out_pads=pads)

    # ------------------------------------------------------------ tiles
    @property
    def tile(self) -> Tile:
        """The largest tile that fits into registers and a program of reasonable length."""
        sums = self.registers * 5 // 8
        if self.pooling == "none":
            rows, columns = 1, _divisor(self.places[1], min(8, sums))
        else:
            columns = _divisor(self.window[1], sums)
            rows = _divisor(self.window[0], sums // columns)
        taps = math.prod(self.kernel)
        whole = rows * columns * taps <= LONGEST
        taps = taps if whole else self.kernel[1]
        most = min(sums // (rows * columns), LONGEST // (rows * columns * taps))
        return Tile(even(self.share, max(most, 1)), rows, columns, whole)

    @property
    def steps_of_tiles(self) -> tuple[Pair, Pair, Pair, Pair]:
        """Counts of windows, their strides, counts of tiles in a window, strides of tiles."""
        tile = self.tile
        inner = (tile.rows, tile.columns)
        if self.pooling == "none":
            return (self.places[0] // inner[0], self.places[1] // inner[1]), inner, (1, 1), inner
        tiles = (self.window[0] // inner[0], self.window[1] // inner[1])
        return self.out_size, self.step, tiles, inner


def even(number: int, most: int) -> int:
    """Return the size of nearly equal parts of at most ``most``.

    Args:
        number: of all things.
        most: how many one part may have.
    """
    return -(-number // -(-number // most))


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of at most ``most``."""
    return max(k for k in range(1, min(number, most) + 1) if number % k == 0)


# ------------------------------------------------------------ chains
class Unsuitable(Exception):
    """Raised for a network that is not a chain of stages. The message gives the reason."""


@dataclass(frozen=True)
class Layer:
    """A stage with the names of its weights and biases, empty if it has none."""

    stage: StageSizes
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
        """The names of weights and biases, in order of use."""
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        return tuple(name for layer in layers for name in (layer.weight, layer.bias) if name)

    @property
    def weights(self) -> tuple[str, ...]:
        """The distinct names of weights and biases."""
        return tuple(dict.fromkeys(self.uses))

    def earliest(self, names: Sequence[str]) -> int:
        """Return the index of the first layer that uses one of some weights."""
        pairs = ((k, w) for k, w in enumerate(self.layers) if isinstance(w, Layer))
        return next(k for k, layer in pairs if {layer.weight, layer.bias} & {*names})

    @property
    def first(self) -> StageSizes:
        """The first stage, which determines the layout of the inputs."""
        return next(layer.stage for layer in self.layers if isinstance(layer, Layer))

    @property
    def out_size(self) -> Pair:
        """The rows and columns of the last stage's outputs."""
        stages = [layer.stage for layer in self.layers if isinstance(layer, Layer)]
        return stages[-1].out_size

    def bytes_of(self, examples: int, size: int) -> int:
        """Return the bytes of one member's activations, for a given size of numbers."""
        stages = [layer.stage for layer in self.layers if isinstance(layer, Layer)]
        numbers = sum(s.outputs * math.prod(s.out_padded) for s in stages)
        return numbers * examples * size

    def __deepcopy__(self, memo: Any) -> Chain:
        return self


def with_room(layers: list[Layer | Elementwise]) -> list[Layer | Elementwise]:
    """Pad the outputs of every stage as the next one requires.

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
    """An elementwise function and its further arguments.

    Attributes:
        name: a key of ``FUNCTIONS``.
        arguments: numbers.
    """

    name: str
    arguments: Arguments = ()

    @property
    def keeps_zero(self) -> bool:
        """True if zero padding remains zero."""
        return not bool(self.forward(torch.zeros(1)))

    def forward(self, z: Tensor) -> Tensor:
        """Return the values of the function."""
        return FUNCTIONS[self.name][0](z, *self.arguments)

    def backward(self, g: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """Return the gradient with respect to the function's input.

        Args:
            g: the gradient after it.
            z: what it was applied to.
            y: its values.
        """
        _, derivative, of_outputs = FUNCTIONS[self.name]
        return derivative(g, y if of_outputs else z, *self.arguments)


def examples_last(x: Tensor, channels: int, size: Pair, pads: Pads, lanes: int) -> Tensor:
    """Rearrange ``(members, examples, ...)`` as ``(members, blocks, channels, *size, lanes)``.

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
    """Invert `examples_last`, to ``(members, examples, *shape)``, in new memory.

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
