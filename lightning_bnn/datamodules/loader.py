"""Batches out of tensors, keyed by (seed, epoch, position), so that resumed runs go on alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.randomness import keyed_generator

__all__ = ["Draw", "RawBatch", "TensorLoader"]

Draw = Callable[[int, torch.Generator], Tensor]
"""Draws the random numbers that the augmentation of so many examples needs."""


class RawBatch(NamedTuple):
    """A batch before it is normalised.

    Attributes:
        inputs: of the networks.
        targets: of the networks.
        draws: the random numbers of the augmentation.
        per_member: whether every member has its own examples; the leading dimension then counts
            members.
    """

    inputs: Tensor
    targets: Tensor
    draws: Tensor | None = None
    per_member: bool = False


class TensorLoader:
    """Cuts tensors into batches. Nothing is copied example by example.

    Every process of a distributed run takes its share of each global batch: in training all get
    the same number of examples (a few come twice), otherwise every example comes exactly once.

    Args:
        inputs: one row per example.
        targets: one row per example.
        batch_size: examples in a batch of one process.
        seed: together with the epoch and the position it determines order and augmentation.
        training: shuffle.
        draw: the random numbers of the augmentation.
        rank, world_size: which process of how many this is.
        orders: numbers of orders, one for each member; every batch is then a `MemberBatch` in which
            each member has its own order, and its own augmentation. By default all share one.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        batch_size: int,
        seed: int = 0,
        training: bool = False,
        draw: Draw | None = None,
        rank: int = 0,
        world_size: int = 1,
        orders: Sequence[int] | None = None,
    ) -> None:
        self.inputs, self.targets = inputs, targets
        self.batch_size, self.seed, self.training, self.draw = batch_size, seed, training, draw
        self.rank, self.world_size = rank, world_size
        self.orders = None if orders is None else list(orders)
        self.epoch, self.position = 0, 0
        self._resumed: int | None = None

    @property
    def dataset(self) -> Tensor:
        """Something whose length is the number of examples, for Lightning."""
        return self.inputs

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """The place where Lightning looks for ``set_epoch``."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, which has an order of its own."""
        if epoch != self.epoch:
            self.position = 0
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of batches of this process."""
        return -(-self._share() // self.batch_size)

    def __iter__(self) -> Iterator[RawBatch]:
        """The rest of an epoch that was interrupted, or a whole one."""
        start = self._take_resumed()
        order = self._order()
        for position in range(start, len(self)):
            self.position = position + 1
            yield self._batch(order, position)

    def example(self, rows: int) -> RawBatch:
        """The first rows, for whoever needs to know what inputs look like."""
        return RawBatch(self.inputs[:rows], self.targets[:rows])

    def whole(self) -> TensorLoader:
        """All examples of all processes, in order and without augmentation."""
        return TensorLoader(self.inputs, self.targets, self.batch_size, self.seed)

    def state_dict(self) -> dict[str, Any]:
        """The position in this epoch."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the epoch was left."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._resumed = self.epoch if self.position < len(self) else None

    def _take_resumed(self) -> int:
        start = self.position if self._resumed == self.epoch else 0
        self._resumed = None
        return start

    def _share(self) -> int:
        """The number of examples of this process in an epoch."""
        if self.training:
            return -(-len(self.inputs) // self.world_size)
        return len(range(self.rank, len(self.inputs), self.world_size))

    def _order(self) -> Tensor:
        """Rows in the order of this epoch, one line for each of several orders."""
        n = len(self.inputs)
        if not self.training:
            return torch.arange(self.rank, n, self.world_size)
        if self.orders is None:
            return self._rows_here(torch.randperm(n, generator=self._generator(-1)))
        orders = [torch.randperm(n, generator=self._generator(-1, order)) for order in self.orders]
        return torch.stack([self._rows_here(order).int() for order in orders])  # half the memory

    def _rows_here(self, order: Tensor) -> Tensor:
        """The rows of this process, out of those of all processes."""
        padded = order[torch.arange(self._share() * self.world_size) % len(order)]
        return padded[self.rank :: self.world_size]

    def _batch(self, order: Tensor, position: int) -> RawBatch:
        rows = order[..., position * self.batch_size : (position + 1) * self.batch_size]
        draws = self._draws(rows.shape[-1], position)
        inputs, targets = (_rows_of(tensor, rows) for tensor in (self.inputs, self.targets))
        return RawBatch(inputs, targets, draws, rows.ndim > 1)

    def _draws(self, examples: int, position: int) -> Tensor | None:
        if self.draw is None:
            return None
        if self.orders is None or not self.training:
            return self.draw(examples, self._generator(position))
        draws = [self.draw(examples, self._generator(position, order)) for order in self.orders]
        return torch.stack(draws)

    def _generator(self, position: int, *order: int) -> torch.Generator:
        """Another stream for every epoch and position, and for the augmentation of every rank."""
        stream = self.rank if position >= 0 else 0
        return keyed_generator(self.seed, self.epoch, position, stream, *order)


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]``, whole rows at a time."""
    flat = tensor.index_select(0, rows.flatten().to(tensor.device))
    return flat.view(*rows.shape, *tensor.shape[1:])
