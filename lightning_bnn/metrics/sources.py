"""Where weights come from: a stack in memory, or anything that can read a layer in slices."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_bnn.params import Params, is_weight, stack_size

__all__ = ["RowTransform", "StackSource", "Transformed", "WeightSource", "as_source"]

RowTransform = Callable[[str, Tensor, slice], Tensor]
"""From a layer's name, some of its rows ``(rows, *shape)`` and which rows these are to the same
rows transformed, such as `lightning_bnn.symmetry.Removal`."""


@runtime_checkable
class WeightSource(Protocol):
    """A stack of networks that is read layer by layer, in slices.

    >>> from lightning_bnn.metrics import mmd
    >>> class Shifted:
    ...     def __init__(self, stack):
    ...         self.stack, self.rows = stack, len(stack["w"])
    ...         self.shapes = {name: t.shape[1:] for name, t in stack.items()}
    ...     def read(self, name, rows, columns):
    ...         return self.stack[name].flatten(1)[rows, columns] + 1
    >>> stack = {"w": torch.eye(4)}
    >>> torch.equal(mmd(stack, Shifted(stack)), mmd(stack, {"w": torch.eye(4) + 1}))
    True
    """

    @property
    def rows(self) -> int:
        """How many networks there are."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The layers, as one network has them: every tensor of weights, no buffers."""

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Some features of one flattened layer of some networks, ``(rows, columns)``."""


class StackSource:
    """A stack of networks in memory.

    Args:
        params: the stack.
        layers: names of the tensors that count as weights; by default all floating ones that are
            not BatchNorm statistics.

    >>> source = StackSource({"w": torch.arange(12.0).reshape(2, 3, 2)})
    >>> source.read("w", slice(0, 2), slice(1, 3))
    tensor([[1., 2.],
            [7., 8.]])
    """

    def __init__(self, params: Params, layers: Sequence[str] | None = None) -> None:
        self.rows = stack_size(params)
        names = layers if layers is not None else [n for n, t in params.items() if is_weight(n, t)]
        missing = [n for n in names if n not in params]
        if missing:
            raise ValueError(f"`layers` names {missing[0]!r}, which the stack does not have.")
        self._tensors = {n: params[n].detach().reshape(self.rows, -1) for n in names}
        self.shapes = {name: params[name].shape[1:] for name in names}

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Some features of one flattened layer of some networks."""
        return self._tensors[name][rows, columns]


class Transformed:
    """A source whose rows are transformed layer by layer, for example freed of symmetries.

    A transform may move features about, so a layer is transformed as a whole, some rows at a time.
    The transformed layer stays in memory if it is small, else in a temporary file.

    Args:
        source: the networks.
        transform: see `RowTransform`.
        memory: bytes that a transformed layer may take in memory; more rows than fit into a
            quarter of it are never transformed at once.

    >>> source = StackSource({"w": torch.ones(2, 3)})
    >>> Transformed(source, lambda name, w, rows: 2 * w).read("w", slice(0, 1), slice(0, 3))
    tensor([[2., 2., 2.]])
    """

    def __init__(
        self, source: Params | WeightSource, transform: RowTransform, memory: int = 2**30
    ) -> None:
        self._source, self._transform, self._memory = as_source(source), transform, memory
        self.rows, self.shapes = self._source.rows, self._source.shapes
        self._name: str | None = None
        self._layer = torch.empty(0)

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Some features of one transformed, flattened layer of some networks."""
        if name != self._name:
            self._layer = torch.empty(0)  # frees the layer before
            self._layer, self._name = self._transformed(name), name
        return self._layer[rows, columns]

    def _transformed(self, name: str) -> Tensor:
        shape, result = self.shapes[name], torch.empty(0)
        size = math.prod(shape)
        step = max(1, self._memory // 4 // max(1, 4 * size))
        for start in range(0, self.rows, step):
            block = slice(start, min(start + step, self.rows))
            values = self._source.read(name, block, slice(0, size)).reshape(-1, *shape)
            values = self._transform(name, values, block).reshape(-1, size)
            result = result if start else self._room(size, values)
            result[block] = values
        return result

    def _room(self, size: int, like: Tensor) -> Tensor:
        if self.rows * size * like.element_size() <= self._memory or like.device.type != "cpu":
            return like.new_empty(self.rows, size)
        with tempfile.TemporaryDirectory(prefix="lightning_bnn_") as folder:  # unlinked, still open
            path = str(Path(folder) / "layer")
            flat = torch.from_file(path, shared=True, size=self.rows * size, dtype=like.dtype)
        return flat.reshape(self.rows, size)


def as_source(weights: Params | WeightSource, layers: Sequence[str] | None = None) -> WeightSource:
    """A stack as a source; sources as they are.

    >>> as_source({"w": torch.ones(2, 3)}).rows
    2
    """
    if isinstance(weights, dict):
        return StackSource(weights, layers)
    if not isinstance(weights, WeightSource):
        raise ValueError(
            "Weights must be a stack (a dict of tensors with a leading dimension for networks) or "
            f"have `rows`, `shapes` and `read`, got {type(weights).__name__}."
        )
    return weights
