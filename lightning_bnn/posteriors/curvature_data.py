"""Batches of which a curvature is computed, of one input or several, and for laplace-torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["Batch", "InputsByName", "Loader", "SinglePrecision", "inputs_of"]

Batch = tuple[Any, Tensor]
"""The input, or a tuple of several; and the targets."""
_TARGETS = "targets"


def inputs_of(x: Any) -> tuple[Any, ...]:
    """Inputs by position."""
    return x if isinstance(x, tuple) else (x,)


@dataclass
class SinglePrecision:
    """Batches in single precision."""

    batches: Iterable[Batch]

    def __iter__(self) -> Iterator[Batch]:
        return ((_single(x), y) for x, y in self.batches)


def _single(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_single, x))
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


@dataclass
class Loader:
    """What laplace-torch takes for a loader; several inputs are in a dict.

    Args:
        batches: inputs and targets, as often as they are asked for.
    """

    batches: Iterable[Batch]
    options = {"dict_key_x": "0", "dict_key_y": _TARGETS}
    """How laplace-torch is told where the first input and the targets are."""

    def __post_init__(self) -> None:
        sizes = [len(targets) for _, targets in self.batches]
        self.dataset, self.length = range(sum(sizes)), len(sizes)

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.batches:
            inputs = inputs_of(x)
            if len(inputs) == 1:
                yield inputs[0], y
            else:
                yield {**{str(k): value for k, value in enumerate(inputs)}, _TARGETS: y}

    def __len__(self) -> int:
        return self.length


class InputsByName(nn.Module):
    """Runs a network on what `Loader` gives.

    Args:
        network: it is not copied.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Any:
        """Outputs of the network."""
        if isinstance(x, Tensor):
            return self.network(x)
        return self.network(*(x[str(k)] for k in range(len(x) - 1)))
