"""Generic weights of a network, made one tensor at a time: zeros of a fresh one hide errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from weightsym import params as P
from weightsym.comparison import POOL, normal_pool, perturb_, tiled_, turned
from weightsym.forward import in_precision
from weightsym.fresh_memory import copied, fresh
from weightsym.groups import Symmetries
from weightsym.params import Params
from weightsym.shared_tensors import owners
from weightsym.verify import Read

__all__ = ["RandomWeights", "perturbing", "random_weights"]


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
        self._broken: set[str] = set()
        moved = {a.tensor for a in sym.axes} | set(P.weight_names(network))
        generator = torch.Generator().manual_seed(1)
        self._starts = {
            name: int(torch.randint(POOL, (), generator=generator))
            for name in sorted(self.state.keys() & moved)
            if self.state[name].is_floating_point() and self.state[name].numel()
        }

    def by_any_name(self, read: Read) -> Read:
        """Read tensors that have several names by the first."""
        return lambda name: read(self.sym.aliases.get(name, name))

    def all_by(self, read: Read) -> Params:
        """All that is read at once. Tensors that share their memory in the network do so again."""
        made = {name: read(name) for name in self.state if name not in self.sym.aliases}
        return {name: made[self.sym.aliases.get(name, name)] for name in self.state}

    def read(self, name: str) -> Tensor:
        """One tensor, in the precision of the network and in memory of its own."""
        old = self.state[name]
        if name not in self._starts:
            return copied(old)
        size = self._size(name, old)
        if name in self._broken or not old.is_contiguous():
            old = copied(old).nan_to_num_(0, 0, 0)
        row = turned(normal_pool(1), self._starts[name], old.numel())
        if name not in self._buffers:
            new = fresh(old.shape, old.dtype, old.device)
            return tiled_(torch.add, old, 0.3 * (size or 0.1) * row, new)
        small = tiled_(torch.add, torch.zeros_like(old), 0.1 * row)
        return torch.where(old == 0, small, tiled_(torch.mul, copied(old), (0.3 * row).exp()))

    def _size(self, name: str, t: Tensor) -> float:
        """The size of the numbers of a tensor, without those that are not finite."""
        if name not in self._sizes:
            size = float(t.norm()) / math.sqrt(t.numel())
            if not math.isfinite(size):
                self._broken.add(name)
                size = float(t.nan_to_num(0, 0, 0).norm()) / math.sqrt(t.numel())
            self._sizes[name] = size
        return self._sizes[name]


def random_weights(network: nn.Module) -> Params:
    """Random weights of a network of which no symmetry is known."""
    aliases = {name: first for name, first in owners(network).items() if name != first}
    weights = RandomWeights(network, Symmetries((), (), (), (), aliases=aliases))
    return weights.all_by(weights.read)


def perturbing(
    read: Read, names: frozenset[str], size: float, precision: torch.dtype | None
) -> Read:
    """Weights of another function: some tensors (else all) times random positive factors."""

    def perturbed(name: str) -> Tensor:
        t = in_precision(read(name), precision)
        return perturb_(name, t, size) if name in names or not names else t

    return perturbed
