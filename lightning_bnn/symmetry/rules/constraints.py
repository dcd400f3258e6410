"""What tracing collects: channels, ties between them, and the tensor axes that they drive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Constant,
    Unsupported,
    Value,
    Weight,
    constant_labels,
    core,
    narrow_except,
    varies,
)
from lightning_bnn.symmetry.rules.weight_views import parameter_dims, positions

__all__ = ["Constraints", "Entry", "Kind", "Product", "Record", "Rule"]

Kind = Literal["permutation", "scale", "sign"]
Rule = Callable[..., Any]
Labels = NDArray[np.int64]
ALL: tuple[Kind, ...] = ("permutation", "scale", "sign")
UNSET = -2
LARGEST_RAW_TENSOR = 4_000_000


class Record(NamedTuple):
    """How one dimension of a weight follows channels: by ``scale`` times their log factor."""

    dim: int | None
    labels: Labels
    role: str
    scale: int
    sign: int


class Product(NamedTuple):
    """Channels with log scale ``out = a + b`` (``a - b`` for a quotient), and signs likewise."""

    out: Labels
    a: Labels
    b: Labels
    inverse: bool


@dataclass
class Entry:
    """The channels along one axis of one tensor, as seen by a range of its rows.

    ``read`` marks the elements that were used, where a tensor is used element by element.
    """

    name: str
    dim: int | None
    labels: Labels
    role: str
    scale: int
    sign: int
    rows: tuple[int, int] | None = None
    last_read: int = -1
    read: NDArray[np.bool_] | None = None


def to_numpy(labels: Tensor | Labels | int) -> Labels:
    return labels.numpy() if isinstance(labels, Tensor) else np.asarray(labels)


@dataclass
class Constraints:
    """A system over channels (node 0 is fixed): ties of identity, of log scale and of sign."""

    nodes: int = 1
    uses: int = 0
    ties: dict[str, list[Labels]] = field(
        default_factory=lambda: {k: [] for k in (*ALL, "inverse scale")}
    )
    products: list[Product] = field(default_factory=list)
    blocks: list[Labels] = field(default_factory=list)
    seen: list[Labels] = field(default_factory=list)
    entries: dict[tuple[str, int | None, int, tuple[int, int] | None], Entry] = field(
        default_factory=dict
    )
    consumed: dict[tuple[str, tuple[int, int] | None], set[tuple[int | None, int]]] = field(
        default_factory=dict
    )
    conflicts: dict[str, str] = field(default_factory=dict)
    noise: dict[int, Tensor] = field(default_factory=dict)  # channels of draws that met others
    seen_noise: set[int] = field(default_factory=set)  # draws that something else looks at

    # ------------------------------------------------------------------ channels and ties
    def fresh(self, *shape: int) -> Tensor:
        """New channels."""
        count = int(np.prod(shape, dtype=np.int64))
        self.nodes += count
        return torch.arange(self.nodes - count, self.nodes).reshape(shape)

    def tie(self, a: Tensor | Labels, b: Tensor | Labels | int, kinds: Iterable[str] = ALL) -> None:
        """Make channels move, scale or flip together, element by element."""
        left, right = np.broadcast_arrays(to_numpy(a), to_numpy(b))
        left, right = left.ravel(), right.ravel()
        different = (left != right) & (left >= 0) & (right >= 0)
        if different.any():
            pairs = np.stack([left[different], right[different]])
            for kind in kinds:
                self.ties[kind].append(pairs)

    def freeze(self, labels: Tensor | Labels, kinds: Iterable[str] = ALL) -> None:
        """Hold channels fixed."""
        self.tie(core(labels) if isinstance(labels, Tensor) else labels, FROZEN, kinds)

    def block(self, rows: Labels) -> None:
        """Channels may be exchanged within a row, and rows as wholes, but nothing between."""
        self.blocks.append(rows)

    def collapse(self, labels: Tensor, keep: Sequence[int]) -> Tensor:
        """Tie the labels over all dimensions but ``keep``; return a representative along these."""
        order = [d for d in range(labels.ndim) if d not in keep]
        moved = labels.permute(*order, *keep)
        for d in range(len(order)):
            if moved.stride(d) == 0:
                moved = moved.narrow(d, 0, 1)
        shape = moved.shape[len(order) :]
        table = moved.reshape(-1, *shape)
        first = table[0].clone()
        if len(table) > 1:
            for row in table[1:] if bool((first < 0).any()) else ():
                first = torch.where(first < 0, row, first)
            self.tie(table, first[None])
        return first

    def labels(self, x: Value | Weight | Constant | float | int) -> Tensor:
        """Labels of any operand."""
        if isinstance(x, Value):
            return x.labels
        if isinstance(x, Weight):
            return self.raw(x).labels
        return constant_labels(x.tensor if isinstance(x, Constant) else torch.as_tensor(x))

    def follow(self, labels: Tensor, kinds: Sequence[str]) -> Tensor:
        """New channels that move with the old ones, follow them in ``kinds``, else are fixed."""
        small = core(labels)
        out = self.fresh(*small.shape)
        self.tie(out, small, ("permutation", *kinds))
        self.freeze(out, [k for k in ("scale", "sign") if k not in kinds])
        return out.expand(labels.shape)

    # ------------------------------------------------------------------ weights
    def raw(self, weight: Weight) -> Value:
        """A weight used as an activation: every element is a channel of its own."""
        if not weight.full_shape.numel() or weight.full_shape.numel() > LARGEST_RAW_TENSOR:
            raise Unsupported("a very large tensor used element by element")
        if len(weight.full_shape) == 0:
            weight = Weight(
                weight.name,
                (torch.zeros(weight.shape, dtype=torch.long),),
                torch.Size([1]),
                weight.is_buffer,
            )
        key = (weight.name, 0 if len(weight.full_shape) == 1 else None, 0, None)
        if key not in self.entries:
            fresh = self.fresh(weight.full_shape.numel()).numpy()
            self._add(key, Entry(weight.name, key[1], fresh, "raw", 1, 1))
            if weight.is_buffer:
                self.freeze(fresh, ("scale", "sign"))
        entry = self.entries[key]
        self._raw_beside_layers(key, entry)
        labels = torch.from_numpy(entry.labels.reshape(-1))
        stride = np.cumprod([1, *reversed(weight.full_shape[1:])])[::-1].tolist()
        moving = [d for d in range(len(weight.shape)) if any(varies(c)[d] for c in weight.coords)]
        index = sum(
            narrow_except(c, moving) * s for c, s in zip(weight.coords, stride, strict=True)
        )
        if entry.read is None:
            entry.read = np.zeros(labels.numel(), np.bool_)
        entry.read[np.ravel(index)] = True
        return Value(labels[index].expand(weight.shape))

    def _raw_beside_layers(
        self, key: tuple[str, int | None, int, tuple[int, int] | None], entry: Entry
    ) -> None:
        """A gain that is also read as it stands has no scale of its own on its incoming side."""
        name, dim, slot, rows = key
        before = self.consumed.setdefault((name, rows), {(dim, slot)})
        for other_dim, other_slot in before - {(dim, slot)}:
            self.freeze(self.entries[name, other_dim, other_slot, rows].labels, ("scale", "sign"))
        if entry.scale != 1:
            self.freeze(entry.labels, ("scale",))

    def _add(self, key: tuple[str, int | None, int, tuple[int, int] | None], entry: Entry) -> None:
        name, dim, _, rows = key
        for other in self.entries:
            if other[0] == name and other != key:
                if (other[1] is None) != (dim is None):
                    self.conflicts.setdefault(
                        name, "used both as a layer's weight and element by element"
                    )
                elif other[1] == dim and other[3] != rows and _overlap(other[3], rows):
                    self.conflicts.setdefault(name, "used through overlapping slices")
        self.entries[key] = entry

    def consume(self, weight: Weight, *records: Record) -> None:
        """State that a weight follows channels along its dimensions; later uses must agree."""
        mapping, rows = parameter_dims(weight)
        slots: dict[tuple[int | None, int], Record] = {}
        for record in records:
            dim = None if record.dim is None else mapping[record.dim]
            slots[dim, sum(d == dim for d, _ in slots)] = record
        before = self.consumed.setdefault((weight.name, rows), set(slots))
        for dim, slot in before ^ set(slots):
            self._freeze_unmatched(weight, dim, slot, rows, slots)
        for (dim, slot), record in slots.items():
            self._consume_record(weight, dim, slot, rows if dim != 0 else None, record)

    def _consume_record(
        self,
        weight: Weight,
        dim: int | None,
        slot: int,
        rows: tuple[int, int] | None,
        record: Record,
    ) -> None:
        key = (weight.name, dim, slot, rows)
        labels = np.atleast_2d(record.labels) if dim is not None else record.labels.reshape(1, -1)
        size = int(weight.full_shape.numel()) if dim is None else weight.full_shape[dim]
        at = positions(weight, dim, record.dim, labels.shape[1])
        if key not in self.entries:
            empty = np.full((labels.shape[0], size), UNSET)
            self._add(
                key, Entry(weight.name, dim, empty, record.role, record.scale, record.sign, rows)
            )
        entry = self.entries[key]
        self.uses += 1
        if record.role == "in":
            entry.last_read = self.uses
        if weight.is_buffer and record.role not in ("mean", "variance"):
            self.freeze(labels, ("scale", "sign"))
        if entry.labels.ndim == 1:
            entry.labels = entry.labels[None]
        if entry.labels.shape[0] != labels.shape[0]:
            self.conflicts.setdefault(weight.name, "used with different groupings")
            self.freeze(labels)
            return
        old = entry.labels[:, at]
        known = old != UNSET
        entry.labels[:, at] = np.where(known, old, labels)
        self._agree(entry, record, old[known], labels[known])

    def _agree(self, entry: Entry, record: Record, old: Labels, new: Labels) -> None:
        self.tie(old, new, ("permutation", "sign"))
        if entry.scale * record.scale == 0:
            self.freeze(old, ("scale",))
            self.freeze(new, ("scale",))
        elif entry.scale == record.scale:
            self.tie(old, new, ("scale",))
        else:
            self.tie(old, new, ("inverse scale",))
            self.freeze(old[old == new], ("scale",))
        if entry.sign != record.sign:
            self.freeze(old, ("sign",))
            self.freeze(new, ("sign",))

    def _freeze_unmatched(
        self,
        weight: Weight,
        dim: int | None,
        slot: int,
        rows: tuple[int, int] | None,
        slots: dict[tuple[int | None, int], Record],
    ) -> None:
        kinds = ALL if slot == 0 else ("scale", "sign")
        if (dim, slot) in slots:
            self.freeze(slots[dim, slot].labels, kinds)
        entry = self.entries.get((weight.name, dim, slot, rows if dim != 0 else None))
        if entry is not None:
            self.freeze(entry.labels, kinds)


def _overlap(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    return a is None or b is None or (a[0] < b[1] and b[0] < a[1])
