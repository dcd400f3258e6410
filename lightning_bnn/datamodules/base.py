"""The base of data modules: named sets, resumable batches, preparation on the device."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lightning_bnn.datamodules.preprocessing import CropFlip, normalise
from lightning_bnn.member_batch import MemberBatch
from weightsym.params import check_count, free_memory, keyed_generator

__all__ = ["DataModule", "MissingData", "Splits"]

Draw = Callable[[int, torch.Generator], Tensor]
"""Draws the random numbers that the augmentation of so many examples needs."""


class RawBatch(NamedTuple):
    """A batch before it is normalised.

    Attributes:
        inputs: of the networks.
        targets: of the networks.
        draws: random numbers of the augmentation.
        per_member: whether every member has its own examples, counted by the leading dimension.
    """

    inputs: Tensor
    targets: Tensor
    draws: Tensor | None = None
    per_member: bool = False


class TensorLoader:
    """Slices tensors into batches, without copying example by example.

    Every process of a distributed run takes its share of each global batch. In training all get the
    same number of examples (a few are repeated), otherwise every example comes exactly once.

    Args:
        inputs: one row per example.
        targets: one row per example.
        batch_size: number of examples in a batch of one process.
        seed: determines order and augmentation, together with the epoch and the position.
        training: whether to shuffle.
        draw: draws the random numbers of the augmentation.
        rank, world_size: which process of how many this is.
        orders: index of an order for each member; every batch is then a `MemberBatch` in which each
            member has its own order and augmentation. By default all share one.
        rows: indices of the examples of each member, ``(members, examples)``; by default all.
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
        rows: Tensor | None = None,
    ) -> None:
        self.inputs, self.targets, self.rows = inputs, targets, rows
        self.batch_size, self.seed, self.training, self.draw = batch_size, seed, training, draw
        self.rank, self.world_size = rank, world_size
        self.orders = None if orders is None else list(orders)
        self.epoch, self.position = 0, 0
        self._resumed: int | None = None

    @property
    def dataset(self) -> Tensor:
        """An object whose length is the number of examples, for Lightning."""
        return self.inputs if self.rows is None else self.rows[0]

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """The object on which Lightning calls ``set_epoch``."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with its own order."""
        if epoch != self.epoch:
            self.position = 0
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of this process."""
        return -(-self._share() // self.batch_size)

    def __iter__(self) -> Iterator[RawBatch]:
        """Yield the batches of an epoch, or the rest of an interrupted one."""
        start = self._take_resumed()
        order = self._order()
        for position in range(start, len(self)):
            self.position = position + 1
            yield self._batch(order, position)

    def example(self, rows: int) -> RawBatch:
        """Return the first rows, as an example of the inputs."""
        return RawBatch(self.inputs[:rows], self.targets[:rows])

    def whole(self) -> TensorLoader:
        """Return a loader of all examples of all processes, in order, without augmentation."""
        return TensorLoader(self.inputs, self.targets, self.batch_size, self.seed, rows=self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this epoch."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position in an epoch."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._resumed = self.epoch if self.position < len(self) else None

    def _take_resumed(self) -> int:
        start = self.position if self._resumed == self.epoch else 0
        self._resumed = None
        return start

    def _share(self) -> int:
        """Return the number of examples of this process in an epoch."""
        if self.training:
            return -(-len(self.dataset) // self.world_size)
        return len(range(self.rank, len(self.dataset), self.world_size))

    def _order(self) -> Tensor:
        """Return rows in the order of this epoch, one line for each of several orders."""
        n = len(self.dataset)
        if not self.training:
            share = torch.arange(self.rank, n, self.world_size)
            return share if self.rows is None else self.rows[:, share]
        if self.orders is None:
            return self._rows_here(torch.randperm(n, generator=self._generator(-1)))
        orders = [torch.randperm(n, generator=self._generator(-1, order)) for order in self.orders]
        if self.rows is not None:
            orders = [rows[order] for rows, order in zip(self.rows, orders, strict=True)]
        return torch.stack([self._rows_here(order).int() for order in orders])  # half the memory

    def _rows_here(self, order: Tensor) -> Tensor:
        """Select the rows of this process from those of all processes."""
        if self.world_size == 1:
            return order
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
        """Return a generator for an epoch and position, different by rank for augmentation."""
        stream = self.rank if position >= 0 else 0
        return keyed_generator(self.seed, self.epoch, position, stream, *order)


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """Select ``tensor[rows]``, whole rows at a time."""
    flat = tensor.index_select(0, rows.flatten().to(tensor.device))
    return flat.view(*rows.shape, *tensor.shape[1:])


Examples = tuple[Tensor, Tensor]


class MissingData(FileNotFoundError):
    """Files of a data set are missing. The message names their folder and source.

    >>> from lightning_bnn.datamodules import UCI
    >>> try:
    ...     UCI("yacht", root="nowhere").load()
    ... except MissingData as error:
    ...     "yacht.csv" in str(error), isinstance(error, FileNotFoundError)
    (True, True)
    """


@dataclass
class Splits:
    """Training, validation and named test sets.

    >>> examples = torch.zeros(8, 2), torch.zeros(8)
    >>> splits = Splits(train=examples, val=None, test=examples, ood={"far": examples})
    >>> list(splits.ood), splits.shift
    (['far'], {})
    """

    train: Examples
    val: Examples | None
    test: Examples
    ood: dict[str, Examples] = field(default_factory=dict)
    shift: dict[str, Examples] = field(default_factory=dict)


class DataModule(L.LightningDataModule, ABC):
    """In-distribution data with any number of out-of-distribution and shifted test sets.

    Subclasses define `load`. Those for images also set ``mean`` and ``std`` (of inputs between 0
    and 1) and ``augmentation``. The data stay in memory as on the disk (bytes); augmentation and
    normalisation run on the device.

    Args:
        batch_size: number of examples in a training batch of one process.
        eval_batch_size: number of examples in a batch of validation and test.
        seed: determines splits, order and augmentation.
        orders: number of members with training batches of their own, in orders of their own (or the
            indices of these orders); by default all members share the batches.

    >>> class Line(DataModule):
    ...     def load(self):
    ...         x = torch.linspace(-1, 1, 100)[:, None]
    ...         return Splits(train=(x, 2 * x), val=None, test=(x, 2 * x), ood={"far": (5 * x, x)})
    >>> data = Line(batch_size=10)
    >>> data.num_data, len(data.train_dataloader()), data.test_sets
    (100, 10, [('test', 'id'), ('far', 'ood')])
    >>> inputs, targets = next(data.prepared(data.train_dataloader()))
    >>> torch.equal(targets, 2 * inputs)
    True
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augmentation: CropFlip | None = None
    rows: Tensor | None = None

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        seed: int = 0,
        orders: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        check_count("batch_size", batch_size)
        check_count("eval_batch_size", eval_batch_size)
        self.batch_size, self.eval_batch_size, self.seed = batch_size, eval_batch_size, seed
        self.orders = list(range(orders)) if isinstance(orders, int) else orders
        if self.orders is not None and not _are_numbers(self.orders):
            raise ValueError(
                f"`orders` must be a number of members, or distinct integers, got {orders}."
            )
        self.splits: Splits | None = None

    @abstractmethod
    def load(self) -> Splits:
        """Read or draw the data, and return named sets."""

    def setup(self, stage: str | None = None) -> None:
        """Read the data, unless this was done before."""
        if self.splits is None:
            self.splits = self.load()

    @property
    def _loaded(self) -> Splits:
        self.setup()
        assert self.splits is not None
        return self.splits

    @property
    def num_data(self) -> int:
        """The number of training examples, over all processes."""
        return len(self._loaded.train[0])

    @property
    def test_sets(self) -> list[tuple[str, str]]:
        """Name and kind (``id``, ``ood``, ``shift``) of the test loaders."""
        splits = self._loaded
        named = [("test", "id"), *((name, "ood") for name in splits.ood)]
        return [*named, *((name, "shift") for name in splits.shift)]

    # -------------------------------------------------------- loaders
    def train_dataloader(self) -> TensorLoader:
        """Return shuffled batches, seeded by seed, epoch and position."""
        draw = None if self.augmentation is None else self.augmentation.draw
        return self._loader(self._loaded.train, training=True, draw=draw)

    def val_dataloader(self) -> TensorLoader | list[Any]:
        """Return the held-out part of the training data, if there is one."""
        return [] if self._loaded.val is None else self._loader(self._loaded.val)

    def test_dataloader(self) -> list[TensorLoader]:
        """Return one loader for each of `test_sets`."""
        splits = self._loaded
        return [
            self._loader(examples)
            for examples in (splits.test, *splits.ood.values(), *splits.shift.values())
        ]

    def predict_dataloader(self) -> TensorLoader:
        """Return batches of the in-distribution test set."""
        return self._loader(self._loaded.test)

    def _loader(self, examples: Examples, training: bool = False, draw: Any = None) -> TensorLoader:
        trainer: Any = self.trainer
        overfit = trainer is not None and trainer.overfit_batches > 0
        rank, world_size = (0, 1) if trainer is None else _share_of(trainer)
        inputs, targets = self._placed(examples) if training else examples
        return TensorLoader(
            inputs,
            targets,
            batch_size=self.batch_size if training else self.eval_batch_size,
            seed=self.seed,
            training=training and not overfit,
            draw=None if overfit else draw,
            rank=rank,
            world_size=world_size,
            orders=self.orders if training and not overfit else None,
            rows=self.rows if training else None,
        )

    def _placed(self, examples: Examples) -> Examples:
        """Move examples to the training device if they fit into a quarter of its free memory."""
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        if device.type == "cpu":
            return examples
        size = sum(t.nbytes for t in examples)
        if 4 * size > free_memory(device):
            return examples
        inputs, targets = examples
        return inputs.to(device), targets.to(device)

    # -------------------------------------------------------- on the device
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Augment and normalise a batch on the device."""
        if not isinstance(batch, RawBatch):
            return batch
        inputs = batch.inputs
        if batch.draws is not None and self.augmentation is not None:
            lead = batch.targets.shape[: 2 if batch.per_member else 1]
            flat = inputs.reshape(-1, *inputs.shape[len(lead) :])
            flat = self.augmentation(flat, batch.draws.reshape(len(flat), -1))
            inputs = flat.reshape(*lead, *flat.shape[1:])
        inputs = self.normalise(inputs)
        return MemberBatch(inputs, batch.targets) if batch.per_member else (inputs, batch.targets)

    def prepared(self, loader: TensorLoader) -> Iterator[tuple[Any, Any]]:
        """Yield batches of a loader prepared for networks, without a trainer."""
        return (self.on_after_batch_transfer(batch, 0) for batch in loader)

    def normalise(self, inputs: Tensor) -> Tensor:
        """Convert bytes to standardised numbers, if ``mean`` and ``std`` are set."""
        return normalise(inputs, self.mean, self.std)


class InMemory(DataModule):
    """Examples in an order determined by the seed alone.

    Args:
        examples: inputs and targets.
        batch_size: number of examples in a training batch.
        seed: determines the order.
        rows: indices of the examples of each member, ``(members, examples)``; by default all
            members share all.
    """

    def __init__(
        self, examples: Examples, batch_size: int, seed: int, rows: Tensor | None = None
    ) -> None:
        super().__init__(batch_size, seed=seed, orders=None if rows is None else len(rows))
        self.examples, self.rows = examples, rows

    def load(self) -> Splits:
        return Splits(train=self.examples, val=None, test=self.examples)


def _are_numbers(orders: Sequence[int]) -> bool:
    whole = all(isinstance(order, int) and order >= 0 for order in orders)
    return whole and len(set(orders)) == len(orders) > 0


def _share_of(trainer: Any) -> tuple[int, int]:
    """Return the rank of this process, and the number of processes that share the examples."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)


def data_root(root: str | None) -> Path:
    """Return the folder of data sets: the argument, else ``LIGHTNING_BNN_DATA``, else ``data``."""
    return Path(root or os.environ.get("LIGHTNING_BNN_DATA") or "data").expanduser()


def hold_out(examples: Examples, size: int, seed: int) -> tuple[Examples, Examples | None]:
    """Hold out random examples, or none for size 0."""
    inputs, targets = examples
    if not 0 <= size < len(inputs):
        raise ValueError(f"`val_size` must be at least 0 and below {len(inputs)}, got {size}.")
    if size == 0:
        return examples, None
    order = torch.randperm(len(inputs), generator=keyed_generator(seed, "hold out"))
    val, train = order[:size].sort().values, order[size:].sort().values
    return (inputs[train], targets[train]), (inputs[val], targets[val])


def read_files(reader: Callable[[], Any], name: str, root: Path, how: str) -> Any:
    """Return the result of a reader, or raise an error that names the folder and the source."""
    try:
        return reader()
    except (RuntimeError, FileNotFoundError) as error:
        reason = f" ({str(error).strip().splitlines()[0]})"
    raise missing(name, root, how, reason)


def missing(name: str, folder: Path, how: str, reason: str = "") -> MissingData:
    """Return the error for a data set that is not in its folder."""
    return MissingData(
        f"{name} was not found in {folder.resolve()}{reason}. {how} To use another folder, "
        "set `root` or the environment variable LIGHTNING_BNN_DATA."
    )
