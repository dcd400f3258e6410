"""Examples of a run: the inputs of calls of its network, and candidates for their targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.callbacks.watching import Capture
from lightning_bnn.member_batch import MemberBatch

_NAMES = "label", "target"
_PLACES = 2
"""Largest number of dimensions of targets."""


class Seen(NamedTuple):
    """Examples of the inputs of a network.

    Attributes:
        inputs: tensors of examples, by position or keyword.
        others: other arguments, by position or keyword.
        targets: tensors of the batch that may be the targets, by name, the likeliest first.
        network: name of the network in its LightningModule, if it is known.
    """

    inputs: dict[int | str, Tensor]
    others: dict[int | str, Any]
    targets: dict[int | str, Tensor]
    network: str | None = None

    def shapes(self) -> list[Any]:
        """Shapes and types that batches must share to be joined."""
        named = [*self.inputs.items(), *self.targets.items()]
        return [self.network, *((name, t.shape[1:]) for name, t in named)]


class ExampleStore:
    """The first examples of some batches, up to a given number."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._parts: list[Seen] = []
        self._count = 0

    def clear(self) -> None:
        """Remove all examples."""
        self._parts, self._count = [], 0

    @property
    def is_full(self) -> bool:
        """Check whether there are enough examples."""
        return self._count >= self.most

    def add(self, batch: Seen | None) -> None:
        """Store the examples of a batch, unless their layout is unknown or has changed."""
        wanted = batch is not None and batch.inputs and batch.targets and not self.is_full
        if batch is None or not wanted or self._parts and batch.shapes() != self._parts[0].shapes():
            return
        left = self.most - self._count
        inputs, targets = (
            {name: t[:left].detach() for name, t in tensors.items()}
            for tensors in (batch.inputs, batch.targets)
        )
        self._parts.append(batch._replace(inputs=inputs, targets=targets))
        self._count += len(next(iter(inputs.values())))

    def examples(self) -> Seen | None:
        """Return all stored examples as one, or None."""
        if not self._parts:
            return None
        first = self._parts[0]
        inputs = {n: torch.cat([p.inputs[n] for p in self._parts]) for n in first.inputs}
        targets = {n: torch.cat([p.targets[n] for p in self._parts]) for n in first.targets}
        return first._replace(inputs=inputs, targets=targets)


class ExampleListener:
    """Records the inputs of calls of a network, batch by batch.

    Args:
        module: name of the network, if the user has set one.
    """

    def __init__(self, module: str | None) -> None:
        self.module = module
        self._capture: Capture | None = None

    def listen(self, store: ExampleStore, pl_module: Any, batch: Any) -> None:
        """Record the examples of a batch, or listen to calls of a network."""
        if store.is_full:
            return
        self._batch, self._seen = batch, seen_by_module(pl_module, batch)
        if callable(getattr(pl_module, "inputs_and_targets", None)):
            store.add(self._seen)
        else:
            self._capture = Capture(pl_module, self.module)

    def hear(self, store: ExampleStore) -> None:
        """Store the inputs of calls in this batch, if there were any."""
        if self._capture is None:
            return
        self._capture.close()
        calls = (seen_in_call(*call, self._batch) for call in self._capture.called())
        store.add(next(filter(None, calls), self._seen))
        self._capture = self._batch = self._seen = None


def seen_by_module(pl_module: Any, batch: Any) -> Seen | None:
    """Read inputs and targets by the module or from a tuple, for the first member."""
    if isinstance(batch, MemberBatch):
        batch = tree_map(lambda t: t[0] if isinstance(t, Tensor) else t, tuple(batch))
    reader = getattr(pl_module, "inputs_and_targets", None)
    if callable(reader):
        inputs, targets = reader(batch)
        inputs = pl_module.cast(inputs)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        inputs, targets = tuple(batch[:-1]), batch[-1]
    else:
        return None
    tensors = *inputs, targets
    if not all(isinstance(t, Tensor) for t in tensors) or len({len(t) for t in tensors}) > 1:
        return None
    return Seen(dict(enumerate(inputs)), {}, {"targets": targets})


def seen_in_call(
    network: str, args: tuple[Any, ...], kwargs: Mapping[Any, Any], batch: Any
) -> Seen | None:
    """Read inputs from a call of a network, and candidates for targets from the batch."""
    arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    tensors = {k: v for k, v in arguments.items() if isinstance(v, Tensor) and v.ndim}
    others = {k: v for k, v in arguments.items() if k not in tensors}
    rows = next((len(t) for t in tensors.values()), 0)
    inside = any(isinstance(leaf, Tensor) and leaf.ndim for leaf in tree_leaves(others))
    if inside or any(len(t) != rows for t in tensors.values()):
        return None
    labels = {k: t for k, t in tensors.items() if is_named_as_targets(k)}
    inputs = {k: t for k, t in tensors.items() if k not in labels}
    unnamed = {
        name: t for name, t in _named_tensors(batch)
        if 0 < t.ndim <= _PLACES and len(t) == rows
        and not any(t is x for x in tensors.values())
    }  # fmt: skip
    order = sorted(unnamed, key=is_named_as_targets, reverse=True)
    return Seen(inputs, others, labels | {name: unnamed[name] for name in order}, network)


def is_named_as_targets(name: int | str) -> bool:
    """Check whether a name is a usual name of targets.

    >>> [is_named_as_targets(name) for name in ("labels", "0.y", "input_ids", 1)]
    [True, True, False, False]
    """
    last = str(name).rpartition(".")[2].lower()
    return last == "y" or any(word in last for word in _NAMES)


def _named_tensors(batch: Any, *path: Any) -> Iterator[tuple[str, Tensor]]:
    """List the tensors of a batch with their names, from last to first."""
    if isinstance(batch, Tensor):
        yield ".".join(map(str, path)), batch
    elif isinstance(batch, Mapping):
        for key in reversed([*batch]):
            yield from _named_tensors(batch[key], *path, key)
    elif isinstance(batch, (tuple, list)):
        for k in reversed(range(len(batch))):
            yield from _named_tensors(batch[k], *path, k)
