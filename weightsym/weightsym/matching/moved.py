"""A network that an element has moved: each tensor is moved when it is read, and dropped again."""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from tempfile import NamedTemporaryFile
from typing import TypeVar

import torch
from torch import Tensor

from weightsym.groups.element import Element
from weightsym.networks.devices import at_least_single
from weightsym.networks.dicts import Computed, shape_of

K = TypeVar("K", bound=Hashable)
_KEPT = 2**27  # bytes of each kind that are held at once
_AT_ONCE = 2**18  # numbers that are converted at once


class Recent(dict[K, Tensor]):
    """The tensors that were computed last, as many as fit."""

    def __init__(self, most: int = _KEPT) -> None:
        super().__init__()
        self.most, self.size = most, 0

    def __setitem__(self, key: K, tensor: Tensor) -> None:
        if key in self:
            self.pop(key)
        size = tensor.nbytes
        if size > self.most:
            return
        while self.size + size > self.most:
            self.pop(next(iter(self)))
        self.size += size
        super().__setitem__(key, tensor)

    def pop(self, key: K, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        """Let go of one tensor."""
        tensor = super().pop(key, default)
        self.size -= 0 if tensor is None else tensor.nbytes
        return tensor

    def clear(self) -> None:
        """Let go of all."""
        super().clear()
        self.size = 0


class Moved(Mapping[str, Tensor]):
    """A network or a stack after an element of the group, tensor by tensor.

    Args:
        given: the tensors as they are; nothing is written to them.
        element: what has moved them.

    Attributes:
        noted: numbers about tensors, each of which is forgotten when its tensor moves.
    """

    def __init__(self, given: Mapping[str, Tensor], element: Element) -> None:
        self.given, self.element = given, element
        self._recent, self.noted = Recent[str](), dict[str, float]()

    def __len__(self) -> int:
        return len(self.given)

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._recent:
            moved = self.element.of(name, self._read)
            self._recent[name] = moved
            return moved
        return self._recent[name]

    def _read(self, name: str) -> Tensor:
        w = self.given[name]
        return at_least_single(w) if self.element.mixes else w

    def move(self, step: Element) -> None:
        """Let a further element act.

        Args:
            step: what acts on the network as it stands.
        """
        self.element = step @ self.element
        self._forget(step.moving)

    def stand(self, element: Element) -> None:
        """Let another element act, in place of the one that has.

        Args:
            element: what acts on the network as it was given.
        """
        self._forget(self.element.moving | element.moving)
        self.element = element

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._recent.pop(name)
            self.noted.pop(name, None)


def parked(
    network: Mapping[str, Tensor], names: Collection[str] | None = None
) -> Mapping[str, Tensor]:
    """The same network, with tensors in temporary files without names, if they are large.

    Args:
        network: tensors that are computed whenever they are read.
        names: of those that take long, by default all.
    """
    names = network if names is None else names
    sizes = {name: shape_of(network, name).numel() for name in names if name in network}
    if 8 * sum(sizes.values()) <= _KEPT:
        held = {name: network[name] for name in sizes}
    else:
        held = {}
        for name in sizes:
            tensor = network[name]
            with NamedTemporaryFile() as file:  # its pages are written out if memory is short
                file.write(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data)
                file.truncate(max(1, tensor.nbytes))
                flat = torch.from_file(file.name, True, tensor.numel(), dtype=tensor.dtype)
            held[name] = flat.view(tensor.shape)
    return Computed(tuple(network), lambda n: held[n] if n in held else network[n], network)


def stack_of_one(network: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A network as a stack of one, tensor by tensor."""
    return Computed(tuple(network), lambda name: network[name][None])


# ------------------------------------------------------------ sums over many numbers
def gram(goal: Tensor, moving: Tensor, dtype: torch.dtype) -> Tensor:
    """Inner products of all rows of two tensors, some of their columns at a time.

    Args:
        goal: rows ``(..., units, numbers)``.
        moving: others, as long.
        dtype: in which they are multiplied.
    """
    each = max(goal[..., :1].numel(), moving[..., :1].numel())
    parts = (
        goal[..., some].to(dtype) @ moving[..., some].to(dtype).mT
        for some in column_blocks(goal.shape[-1], each)
    )
    return functools.reduce(Tensor.add_, parts)


def inner_products(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The inner product of every member of a stack, or unit, with one tensor, or with its own.

    Args:
        a: of a stack.
        b: of one network or of as many.
        dtype: in which they are multiplied, by default in single precision at least.
    """
    dtype = dtype or torch.promote_types(a.dtype, torch.float32)
    rows, others = a.flatten(1), b.reshape(-1, a[0].numel())
    total = torch.zeros(len(rows), dtype=torch.float64, device=a.device)
    for some in column_blocks(rows.shape[1], len(rows)):
        product = rows[:, some].to(dtype) * others[:, some].to(a.device, dtype)
        total += product.sum(1, dtype=torch.float64)
    return total.cpu()


def column_blocks(length: int, each: int) -> Iterator[slice]:
    """Ranges of columns, few enough to be converted at once."""
    step = max(1, _AT_ONCE // max(1, each))
    yield from (slice(k, k + step) for k in range(0, max(1, length), step))
