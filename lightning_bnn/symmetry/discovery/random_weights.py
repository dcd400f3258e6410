"""Generic weights of a network, made one tensor at a time: zeros of a fresh one hide errors."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.params import Params
from lightning_bnn.symmetry.comparison import POOL, normal_pool, perturbed_tensor, tiled_
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.motions import Read

__all__ = ["RandomWeights", "perturbing"]


class RandomWeights:
    """Random weights of the size of those of a network, each in memory of its own when read.

    What the groups move and what is trained is random; other state is as it is. What is positive,
    such as a variance, stays so.
    """

    def __init__(self, network: nn.Module, sym: Symmetries) -> None:
        self.state = P.of(network)
        self.sym = sym
        self._buffers = {name for name, _ in network.named_buffers()}
        self._sizes: dict[str, float] = {}
        moved = {a.tensor for a in sym.axes} | set(P.weight_names(network))
        generator = torch.Generator().manual_seed(1)
        self._starts = {
            name: int(torch.randint(POOL, (), generator=generator))
            for name in sorted(self.state.keys() & moved)
            if self.state[name].is_floating_point() and self.state[name].numel()
        }

    def reading(self, dtype: torch.dtype | None) -> Read:
        """How they are read in a precision; in that of the network where none is given."""
        return lambda name: self.tensor(name, dtype)

    def by_any_name(self, read: Read) -> Read:
        """Read tensors that have several names by the first."""
        return lambda name: read(self.sym.aliases.get(name, name))

    def all_by(self, read: Read) -> Params:
        """All that is read at once; tensors that share their memory in the network do so again."""
        made = {name: read(name) for name in self.state if name not in self.sym.aliases}
        return {name: made[self.sym.aliases.get(name, name)] for name in self.state}

    def tensor(self, name: str, dtype: torch.dtype | None) -> Tensor:
        """One tensor; floats in a precision."""
        old = self.state[name]
        t = in_precision(old, dtype)
        if name not in self._starts:
            return t
        if name not in self._sizes:
            self._sizes[name] = float(old.nan_to_num(0, 0, 0).norm()) / math.sqrt(old.numel())
        t.nan_to_num_(0, 0, 0)
        row = self._pool.roll(-self._starts[name])
        if name not in self._buffers:
            return tiled_(torch.add, t, 0.3 * (self._sizes[name] or 0.1) * row)
        zero = t == 0
        small = tiled_(torch.add, torch.zeros_like(t), 0.1 * row)
        return torch.where(zero, small, tiled_(torch.mul, t, (0.3 * row).exp()))

    @cached_property
    def _pool(self) -> Tensor:
        return normal_pool(1)


def in_precision(old: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy with memory of its own, floats in a precision (if one is given) and complex alike."""
    kind: Any = old.dtype
    if dtype is not None and old.is_floating_point():
        kind = dtype
    if dtype is torch.float64 and old.is_complex():
        kind = torch.complex128
    return torch.empty(old.shape, dtype=kind, device=old.device).copy_(old.detach())


def perturbing(read: Read, names: frozenset[str] = frozenset(), size: float = 0.3) -> Read:
    """How another function is read: some tensors (else all) times random positive factors."""

    def perturbed(name: str) -> Tensor:
        t = read(name)
        return perturbed_tensor(name, t, size) if name in names or not names else t

    return perturbed
