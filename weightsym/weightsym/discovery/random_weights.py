"""Generic weights, drawn tensor by tensor, because zeros at initialisation hide errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from weightsym import params as P
from weightsym.discovery.products import LARGE, Matrix, Weights
from weightsym.groups.element import Read
from weightsym.groups.symmetries import Symmetries
from weightsym.networks.comparison import POOL, normal_pool, perturb_, tiled_, turned
from weightsym.networks.forward import (
    Inputs,
    as_real,
    called_by,
    in_precision,
    structural_copy,
    tensors_of,
)
from weightsym.networks.randomness import key_of
from weightsym.networks.shared_tensors import owners
from weightsym.params import Params

T = TypeVar("T")


class WeightDraw(NamedTuple):
    """The parameters of a draw of random weights.

    Attributes:
        seed: of the noise.
        noise: on matrices, relative to their size. All other noise is small.
        factors: what parameters are multiplied by, by name.
        offsets: what is added to parameters, by name.
    """

    seed: int = 1
    noise: float = 0.3
    factors: Mapping[str, float] = {}
    offsets: Mapping[str, Tensor] = {}


class RandomWeights:
    """Random weights of a network's shapes and magnitudes, each read into new memory.

    What is trained, what the groups move and what is given to be moved is random; other state is as
    it is. What is positive, such as a variance, stays so.

    Attributes:
        random: the names of what is random.
        buffers: the names of buffers.
    """

    def __init__(
        self,
        network: nn.Module,
        sym: Symmetries,
        moved: Collection[str] = (),
        draw: WeightDraw = WeightDraw(),  # noqa: B008
    ) -> None:
        self.state = P.of(network)
        self.sym, self.draw = sym, draw
        self.buffers = frozenset(name for name, _ in network.named_buffers())
        self._sizes: dict[str, float] = {}
        self._broken: set[str] = set()
        moved = {a.tensor for a in sym.axes} | set(P.weight_names(network)) | set(moved)
        self.random = frozenset(
            name
            for name in self.state.keys() & moved
            if self.state[name].is_floating_point() and self.state[name].numel()
        )

    @classmethod
    def of_unknown(cls, network: nn.Module) -> RandomWeights:
        """Return random weights of a network without known symmetries: parameters and vectors."""
        aliases = {name: first for name, first in owners(network).items() if name != first}
        rows = [n for n, b in network.named_buffers() if b.ndim == 1]
        return cls(network, Symmetries((), (), (), (), aliases=aliases), rows)

    def by_any_name(self, weights: Callable[[str], T]) -> Callable[[str], T]:
        """Resolve aliases: read every tensor under its first name."""
        return lambda name: weights(self.sym.aliases.get(name, name))

    def all(self) -> Params:
        """Return all weights at once."""
        return self.all_by(self.read)

    def returned(self, network: nn.Module, inputs: Inputs) -> Any:
        """Return the network's output at these weights, a few in memory at once if it is large."""
        return called_by(network, self.by_any_name(self.read), inputs)

    def outputs(self, network: nn.Module, inputs: Inputs) -> list[Tensor]:
        """Return the output tensors of a copy of the network, as real numbers."""
        returned = self.returned(structural_copy(network), inputs)
        return [as_real(t) for t in tensors_of(returned)]

    def all_by(self, weights: Read) -> Params:
        """Return all tensors that a function reads. Aliases share memory as in the network."""
        tensors = {name: weights(name) for name in self.state if name not in self.sym.aliases}
        return {name: tensors[self.sym.aliases.get(name, name)] for name in self.state}

    def __call__(self, name: str) -> Tensor | Matrix:
        """Return a tensor, or a large matrix that is read a few rows at a time."""
        if name not in self._large:
            return self.read(name)
        return Matrix(self.state[name].shape, partial(self.read, name))

    @property
    def has_large(self) -> bool:
        """True if some matrices are read by rows."""
        return bool(self._large)

    @cached_property
    def _large(self) -> frozenset[str]:
        tensors = {name: self.state[name] for name in self.random - self.buffers}
        return frozenset(
            name
            for name, t in tensors.items()
            if t.ndim == 2 and t.numel() >= LARGE and t.is_contiguous()
            if name not in self.draw.offsets
            if self._size(name, t) < math.inf and name not in self._broken
        )

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return a tensor, or some of its rows, in the network's precision and in new memory."""
        old = self.state[name]
        if name not in self.random:
            return old.clone(memory_format=torch.contiguous_format)
        size = self._size(name, old)
        if name in self._broken or not old.is_contiguous():
            old = old.contiguous().nan_to_num(0, 0, 0)
        first = key_of(name)
        if rows != slice(None):
            first, old = first + rows.start * old.stride(0), old[rows]
        row = turned(normal_pool(self.draw.seed), first % POOL, old.numel())
        if name not in self.buffers:
            noise = self.draw.noise if old.ndim > 1 else 0.3
            new = torch.empty_like(old)
            new = tiled_(torch.add, old, noise * (size or 0.1) * row, new)
            new = new.mul_(self.draw.factors[name]) if name in self.draw.factors else new
            return new.add_(self.draw.offsets[name]) if name in self.draw.offsets else new
        small = tiled_(torch.add, torch.zeros_like(old), 0.1 * row)
        return torch.where(old == 0, small, tiled_(torch.mul, old.clone(), (0.3 * row).exp()))

    def _size(self, name: str, t: Tensor) -> float:
        """Return the root mean square of a tensor's finite values."""
        if name not in self._sizes:
            size = float(t.norm()) / math.sqrt(t.numel())
            if not math.isfinite(size):
                self._broken.add(name)
                size = float(t.nan_to_num(0, 0, 0).norm()) / math.sqrt(t.numel())
            self._sizes[name] = size
        return self._sizes[name]


def perturbing(
    weights: Weights, names: frozenset[str], size: float, precision: torch.dtype | None
) -> Weights:
    """Multiply some or all tensors by random positive factors, which changes the function."""

    def perturbed(name: str) -> Tensor | Matrix:
        t = weights(name)
        t = t.to(precision) if isinstance(t, Matrix) else in_precision(t, precision)
        if names and name not in names:
            return t
        if isinstance(t, Tensor):
            return perturb_(name, t, size)
        width = t.shape[1]
        return t.changed(lambda rows, block: perturb_(name, block, size, rows.start * width))

    return perturbed


def flipping(weights: Read, names: frozenset[str], precision: torch.dtype | None) -> Read:
    """Multiply some tensors by random signs, which changes the function."""

    def flipped(name: str) -> Tensor:
        t = in_precision(weights(name), precision)
        if name not in names:
            return t
        return tiled_(torch.mul, t, turned(normal_pool(5).sign(), key_of(name) % POOL, t.numel()))

    return flipped
