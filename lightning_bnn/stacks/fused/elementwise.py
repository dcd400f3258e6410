"""Functions of single numbers, by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["FUNCTIONS", "Elementwise"]

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
        """Whether zeros around activations stay zeros."""
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
