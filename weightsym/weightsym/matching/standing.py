"""A network on its way to another: every tensor is moved when it is read, and let go of again."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from weightsym.groups.actions import (
    axes_by_tensor,
    multiplied_tensor,
    permuted_tensor,
    reached_axes,
    reorder_units,
)
from weightsym.groups.element import Kind, source_of
from weightsym.groups.mixing import mixed_axis
from weightsym.groups.placements import Placement
from weightsym.groups.symmetries import Axis, Symmetries
from weightsym.networks.devices import at_least_single
from weightsym.params import is_stacked

K = TypeVar("K", bound=Hashable)
_KEPT = 2**28  # bytes of each kind that are held at once
_AT_ONCE = 2**24  # numbers that are converted at once


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
        tensor = super().pop(key, None)
        if tensor is None:
            return default
        self.size -= tensor.nbytes
        return tensor

    def clear(self) -> None:
        """Let go of all."""
        super().clear()
        self.size = 0


class Standing(Mapping[str, Tensor]):
    """A network or a stack after flips, then permutations, then matrices, tensor by tensor.

    Args:
        given: the tensors as they are; nothing is written to them.
        sym: what `discover` returned.
        signs: flips of all groups, or None for none.
    """

    def __init__(
        self, given: Mapping[str, Tensor], sym: Symmetries, signs: Sequence[Tensor] | None = None
    ) -> None:
        self.given, self.sym, self.signs = given, sym, signs
        self.permutations: Sequence[Tensor] | None = None
        self.matrices = dict[int, tuple[Tensor, Tensor]]()
        """By group those that act, and their inverse transposes."""
        self._recent = Recent[str]()

    def __len__(self) -> int:
        return len(self.given)

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._recent:
            moved = self._moved(name)
            self._recent[name] = moved
            return moved
        return self._recent[name]

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Move tensors anew when they are read next, by default all."""
        for name in list(self._recent) if names is None else names:
            self._recent.pop(name)

    def reorder(self, name: str, axis: Axis, placement: Placement, order: Tensor) -> None:
        """Move a tensor that is held by a further step, which `permutations` already have.

        Args:
            name: of the tensor.
            axis: whose units move.
            placement: where they are.
            order: of the units of every member.
        """
        w = self._recent.get(name)
        if w is not None:
            self._recent[name] = reorder_units(w, axis, [(placement, order)])

    def mix(self, k: int, matrices: Tensor) -> None:
        """Let other matrices act on the channels of one group.

        Args:
            k: index of the group.
            matrices: all that have acted on it, as one.
        """
        self.matrices[k] = matrices, torch.linalg.inv(matrices.double()).mT
        self.forget(self.sym.moved_by(self.sym.linear[k]))

    @property
    def stack(self) -> Mapping[str, Tensor]:
        """The same network as a stack of one."""
        return StackOfOne(self)

    # -------------------------------------------------------- one tensor
    @cached_property
    def _flipped(self) -> dict[str, dict[int, list[Kind]]]:
        return reached_axes(self.sym, ("signs",))

    @cached_property
    def _permuted(self) -> dict[str, list[int]]:
        return axes_by_tensor(self.sym, "permutations")

    @cached_property
    def _mixed(self) -> dict[str, list[tuple[int, Placement]]]:
        places: dict[str, list[tuple[int, Placement]]] = {}
        for k, group in enumerate(self.sym.linear):
            for placement in group.placements:
                places.setdefault(self.sym.axes[placement.axis].tensor, []).append((k, placement))
        return places

    def _moved(self, name: str) -> Tensor:
        source, orders = name, self.permutations
        if orders is not None and name in self.sym.exchangeable_tensors:
            first = {k: p if p.ndim == 1 else p[0] for k, p in enumerate(orders)}
            source = source_of(name, self.sym, first)
        w = self.given[source]
        axes = self._flipped.get(source, {}) if self.signs is not None else {}
        if self.signs is not None and any(self._flips(a, self.signs) for a in axes):
            offset = int(is_stacked({source: w}, self.sym.shapes))
            w = multiplied_tensor(w, self.sym, axes, {"signs": self.signs}, offset)
        if orders is not None and source in self._permuted:
            w = permuted_tensor({source: w}, self.sym, source, self._permuted[source], orders)
        for k, placement in self._mixed.get(name, ()) if self.matrices else ():
            if k in self.matrices:
                both = self.matrices[k]
                w = mixed_axis(
                    at_least_single(w), self.sym, placement, both[placement.exponent < 0]
                )
        return w

    def _flips(self, axis: int, signs: Sequence[Tensor]) -> bool:
        groups = {g for g, _ in self.sym.placements_by_axis("signs")[axis]}
        return any(bool((signs[g] < 0).any()) for g in groups)


@dataclass(frozen=True)
class StackOfOne(Mapping[str, Tensor]):
    """A network as a stack of one, tensor by tensor."""

    network: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.network)

    def __iter__(self) -> Iterator[str]:
        return iter(self.network)

    def __getitem__(self, name: str) -> Tensor:
        return self.network[name][None]


# ------------------------------------------------------------ sums over many numbers
def gram(goal: Tensor, moving: Tensor, dtype: torch.dtype) -> Tensor:
    """Inner products of all rows of two tensors, some of their columns at a time.

    Args:
        goal: rows ``(..., units, numbers)``.
        moving: others, as long.
        dtype: in which they are multiplied.
    """
    if max(goal.numel(), moving.numel()) <= _AT_ONCE:
        return goal.to(dtype) @ moving.to(dtype).mT
    total = None
    for some in column_blocks(goal.shape[-1], max(goal[..., 0].numel(), moving[..., 0].numel())):
        part = goal[..., some].to(dtype) @ moving[..., some].to(dtype).mT
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def inner_products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The inner product of every member of a stack with one tensor, or with its own.

    Args:
        a: of a stack.
        b: of one network or of as many.
        dtype: in which they are multiplied.
    """
    if a.numel() <= _AT_ONCE:
        product = a.to(dtype) * b.to(a.device, dtype)
        return product.flatten(1).sum(1, dtype=torch.float64).cpu()
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
