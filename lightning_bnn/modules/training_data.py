"""The training data: their number, and all batches for curvatures and statistics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_bnn._compat import trainer_of
from lightning_bnn.member_batch import MemberBatch
from lightning_bnn.methods import Batch
from lightning_bnn.methods.run import EXAMPLE_ROWS
from lightning_bnn.modules.batches import first_rows, left_over, only_loader, parameters_of
from weightsym.params import keyed_randomness

if TYPE_CHECKING:
    from lightning_bnn.modules.bayesian import Bayesian

_GIVEN = list | tuple | range
"""Attribute names of loaders that hold examples or batches instead of a sampler."""


class Data:
    """The training data of a module: their number and their source.

    Args:
        given: number of training examples set by the user, or None.

    Attributes:
        source: a datamodule or a loader, of the last fit or set by the user.
    """

    def __init__(self, given: int | None) -> None:
        self.given = given
        self.source: Any = None
        self._unused: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}

    def batches(self, module: Bayesian) -> TrainingData | None:
        """Return the batches of the trainer, of the last fit or of the set source, or None."""
        trainer, source = trainer_of(module), self.source
        if trainer is not None:
            sources = (trainer.train_dataloader, trainer.datamodule, source)
            source = next((data for data in sources if data is not None), None)
        return None if source is None else TrainingData(module, source)

    def read(self, module: Bayesian) -> None:
        """Count the training examples."""
        loader, _ = only_loader(module.trainer.train_dataloader)
        count = data_size(loader, module.trainer.num_training_batches)
        module.run.num_data = count
        message = f"{type(module).__name__}: the training set has {count} examples"
        dropped = getattr(loader, "drop_last", False) and count % loader.batch_size
        rank_zero_info(f"{message}; every epoch drops {dropped}." if dropped else f"{message}.")

    def warn_of_unused(self, batch: Any, network: nn.Module) -> None:
        """Warn once of entries of a batch that a network does not read."""
        names = [name for name in left_over(batch, network) if name not in self._unused]
        base = getattr(network, "get_base_model", None)  # of peft, whose own takes anything
        asked = set(parameters_of(base())) if callable(base) else set()
        if wanted := asked & set(names):
            raise ValueError(
                f"{', '.join(map(repr, sorted(wanted)))} of the batches would not reach "
                "the network: pass `network.get_base_model()`, which includes the "
                "adapter."
            )
        if names:
            self._unused |= set(names)
            rank_zero_warn(
                f"{', '.join(map(repr, names))} of the batches is not used: "
                f"{type(network).__name__}.forward has no positional parameter of that "
                "name."
            )


def example_of(module: Bayesian) -> tuple[Any, ...]:
    """Return the first two rows of the train loader's data, or None without a loader."""
    trainer = trainer_of(module)
    if trainer is None or trainer.train_dataloader is None:
        return ()
    with keyed_randomness(module.seed, "example", device=module.device):  # nobody else's numbers
        raw = first_rows(trainer.train_dataloader, EXAMPLE_ROWS)
        if raw is None:
            return ()
        raw = trainer.strategy.batch_to_device(raw, dataloader_idx=0)
        if isinstance(raw, MemberBatch):
            raw = tuple(x[0] for x in raw)
    return module.inputs_and_targets(raw)[0]


class TrainingData:
    """The batches of an epoch on the device, any number of times.

    Every process receives the examples of all. Loaders of this package yield them in order and
    without augmentation, see `TensorLoader.whole`.

    Args:
        module: separates inputs from targets.
        source: a train loader, or a datamodule.
    """

    def __init__(self, module: Bayesian, source: Any) -> None:
        self.module, self.source = module, source

    def __iter__(self) -> Iterator[Batch]:
        """Yield inputs and targets, in the order of the loader."""
        module, source = self.module, self.source
        loader, move = source, moved_by(module)
        if hasattr(source, "train_dataloader"):
            source.setup("fit")
            loader, move = source.train_dataloader(), moved_by(module, source)
        loader, wrap = only_loader(loader)
        whole, position = getattr(loader, "whole", None), 0
        sampler = None if whole is not None else getattr(loader, "sampler", None)
        with keyed_randomness(module.seed, "training batches", device=module.device):
            given = islice(loader if whole is None else whole(), _limit(module, loader))
            batches = (batch_for(module, move(wrap(raw))) for raw in given)
            if whole is None and not isinstance(sampler, DistributedSampler):
                yield from batches if _has_all(module, loader) else _of_all(module, batches)
                return
            for batch in batches:
                if isinstance(sampler, DistributedSampler):
                    rows, position = _first_times(sampler, position, len(batch.targets))
                    inputs = tuple(_gathered(module, x, rows) for x in batch.inputs)
                    batch = Batch(inputs, _gathered(module, batch.targets, rows))
                yield batch


def moved_by(module: Bayesian, datamodule: Any = None) -> Callable[[Any], Any]:
    """Return a function that moves a batch to the device, through the hooks of its source.

    Args:
        module: target of the batches.
        datamodule: source of the batches, if no trainer moves them.
    """
    if datamodule is not None:
        prepare = getattr(datamodule, "on_after_batch_transfer", lambda batch, _: batch)
        return lambda batch: prepare(move_data_to_device(batch, module.device), 0)
    trainer = trainer_of(module)
    if trainer is None:
        return lambda batch: move_data_to_device(batch, module.device)
    return lambda batch: trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _limit(module: Bayesian, loader: Any) -> int | None:
    """Return the number of batches per epoch if limited: streams, samplers, trials."""
    trainer = trainer_of(module)
    if trainer is None:
        return None
    if trainer.fast_dev_run:
        return int(trainer.fast_dev_run)
    batches = trainer.num_training_batches
    cut = in_order(loader) or isinstance(getattr(loader, "dataset", None), IterableDataset)
    return int(batches) if cut and math.isfinite(batches) and batches > 0 else None


def _first_times(sampler: Any, start: int, size: int) -> tuple[Tensor, int]:
    """Return the rows of a gathered batch that are not repetitions, and the next position.

    Processes take turns, and the last turn is filled up with examples from the beginning.
    """
    turns = torch.arange(start, start + size)
    numbers = turns * sampler.num_replicas + torch.arange(sampler.num_replicas)[:, None]
    return (numbers.flatten() < len(sampler.dataset)).nonzero().flatten(), start + size


def _gathered(module: Bayesian, value: Any, rows: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    gathered = module.all_gather(value)
    assert isinstance(gathered, Tensor)
    return gathered.flatten(0, 1)[rows.to(gathered.device)]


def _has_all(module: Bayesian, loader: Any) -> bool:
    """Return whether a process sees all the data by itself, as far as can be known.

    Data in a random order may differ between processes, and yet be the same.
    """
    trainer = trainer_of(module)
    if trainer is None or trainer.world_size == 1:
        return True
    if module.num_data is None or isinstance(_chooser_of(loader), SequentialSampler):
        return False
    with contextlib.suppress(ValueError):  # of streams, and of samplers that nobody knows
        return data_size(loader) >= module.num_data
    return False


def _of_all(module: Bayesian, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Join the batches of processes that already divide the data among themselves.

    Loaders that begin alike yield all the data in every process, and are used as they are.
    """
    processes = module.trainer.world_size
    parts = _parts(next(batches, None), processes)
    if len(parts) == processes and all(_equal(batch, parts[0]) for batch in parts):
        yield _joined(module, parts[:1])
        yield from batches
        return
    while parts:  # until the last process has none left
        yield _joined(module, parts)
        parts = _parts(next(batches, None), processes)


def _parts(batch: Batch | None, processes: int) -> list[Batch]:
    """Return the next batch of every process, with None for exhausted ones."""
    mine = batch and replace(
        batch, inputs=move_data_to_device(batch.inputs, "cpu"), targets=batch.targets.cpu()
    )
    parts: list[Batch | None] = [None] * processes
    dist.all_gather_object(parts, mine)
    return [entry for entry in parts if entry is not None]


def _equal(a: Batch, b: Batch) -> bool:
    """Return whether two batches have equal tensors."""
    pairs = zip(tree_leaves((a.inputs, a.targets)), tree_leaves((b.inputs, b.targets)), strict=True)
    return all(torch.equal(x, y) for x, y in pairs if isinstance(x, Tensor))


def _joined(module: Bayesian, parts: Sequence[Batch]) -> Batch:
    """Join several batches on the device."""
    first = parts[0]

    def joined(*values: Any) -> Any:
        is_tensor = isinstance(values[0], Tensor)
        return torch.cat(values, int(first.per_member)) if is_tensor else values[0]

    inputs = tree_map(joined, *(batch.inputs for batch in parts))
    targets = joined(*(batch.targets for batch in parts))
    return replace(
        first,
        inputs=move_data_to_device(inputs, module.device),
        targets=targets.to(module.device),
    )


def fault_of(data: TrainingData) -> str:
    """Describe the first non-finite example, or return an empty string.

    Data that another pass would change are not searched: streams, and persistent workers.

    Args:
        data: the batches to look through.
    """
    (loader, _), position = only_loader(data.source), 0
    dataset = getattr(loader, "dataset", None)
    moves_on = isinstance(dataset, IterableDataset) or getattr(loader, "persistent_workers", False)
    if moves_on or not isinstance(dataset, Sized):
        return ""
    is_ordered = isinstance(_chooser_of(loader), SequentialSampler) or hasattr(loader, "whole")
    for batch in data:
        for name, tensors in (("inputs", batch.inputs), ("targets", (batch.targets,))):
            for tensor in tensors:
                if isinstance(tensor, Tensor) and not bool(tensor.isfinite().all()):
                    row = (~tensor.isfinite()).nonzero()[0, int(batch.per_member)]
                    where = f", first in example {position + int(row)}" if is_ordered else ""
                    return f"{name} of the training data hold NaN or infinite values{where}"
        position += batch.examples
    return ""


def data_size(loader: Any, batches: int | float | None = None) -> int:
    """Return the number of distinct examples that a loader yields, over processes and epochs.

    Args:
        loader: for training.
        batches: number of batches used per epoch, which matters only for loaders that do not
            shuffle.
    """
    loader, _ = only_loader(loader)
    dataset = getattr(loader, "dataset", None)
    batched = isinstance(loader, DataLoader) and loader.batch_size is None
    batched = batched and loader.batch_sampler is None
    if batched or not isinstance(dataset, Sized):
        raise ValueError(
            f"`num_data` cannot be read from {type(loader).__name__}, which has no data "
            "set whose length counts examples: pass the number of training examples to "
            "the module."
        )
    is_stream = isinstance(dataset, IterableDataset) or not isinstance(loader, DataLoader)
    sampler = None if is_stream else _sampler_of(loader)
    used = len(dataset)
    if in_order(loader) and batches is not None and batches < math.inf:
        sizes: Any = loader if loader.batch_size else loader.batch_sampler
        used = int(batches * getattr(sizes, "batch_size", 1))  # of batches that are given, one each
    if isinstance(sampler, _GIVEN):
        rows = sampler[:used] if in_order(loader) else sampler
        return len({k for row in rows for k in (row if isinstance(row, Iterable) else [row])})
    if isinstance(sampler, SubsetRandomSampler):
        return len(set(sampler.indices))
    if isinstance(sampler, WeightedRandomSampler):
        return int((sampler.weights > 0).sum())
    if not isinstance(sampler, SequentialSampler | RandomSampler | DistributedSampler | None):
        raise ValueError(
            f"`num_data` cannot be read from a loader with {type(sampler).__name__}, which "
            "may omit examples: pass the number of training examples to the module."
        )
    count = len(getattr(sampler, "data_source", dataset))  # which may be the first rows only
    return min(count, used)


def in_order(loader: Any) -> bool:
    """Return whether a loader yields the same batches in every epoch."""
    keeps_order = isinstance(_chooser_of(loader), SequentialSampler | _GIVEN)
    return keeps_order or getattr(loader, "training", None) is False


def _sampler_of(loader: Any) -> Any:
    """Find the sampler that chooses the examples of a loader."""
    sampler = _chooser_of(loader)
    if isinstance(sampler, DistributedSampler):  # Lightning shares out what another one chooses
        return getattr(sampler.dataset, "_sampler", sampler)
    return sampler


def _chooser_of(loader: Any) -> Any:
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and type(batches) is not BatchSampler:
        return batches
    return getattr(loader if batches is None else batches, "sampler", None)


def batch_for(module: Bayesian, raw: Any, number: int = 0) -> Batch:
    """Convert a batch of a loader for methods.

    Args:
        module: separates inputs from targets.
        raw: of the loader; a `MemberBatch` has examples for every member.
        number: index of the batch in the run.
    """
    if module.method.needs_targets:
        inputs, targets = module.inputs_and_targets(raw)
    else:
        inputs = module.inputs_only(raw)
        first = next(x for x in inputs if isinstance(x, Tensor))
        targets = torch.zeros(first.shape[: 1 + isinstance(raw, MemberBatch)])
    if not isinstance(targets, Tensor):
        raise ValueError(
            f"The targets of a batch must be a tensor, got {type(targets).__name__}: use "
            "numbers or classes from 0, or override `inputs_and_targets`."
        )
    batch = Batch(module.cast(inputs), targets, isinstance(raw, MemberBatch), number)
    if not batch.per_member:
        return batch
    if len(targets) != module.members:
        raise ValueError(
            f"A batch has examples for {len(targets)} members, but the module has "
            f"{module.members}: set as many `orders` in the data."
        )
    return batch
