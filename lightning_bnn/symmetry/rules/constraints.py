"""What the rules state: channels, ties between them, and the tensor axes that they drive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.symmetry.rules.labels import (
    FROZEN,
    Constant,
    Unsupported,
    Value,
    Weight,
    constant_labels,
    core,
    fixed,
    moving_dims,
    narrow_except,
)
from lightning_bnn.symmetry.rules.statements import (
    Entry,
    Key,
    Kind,
    Labels,
    Limit,
    Mark,
    Product,
    Record,
)
from lightning_bnn.symmetry.rules.weight_views import UNSET, RowRange, places_of

__all__ = ["Constraints", "Entry", "Key", "Kind", "Limit", "Mark", "Product", "Record", "Rule"]

Rule = Callable[..., Any]
ALL: tuple[Kind, ...] = ("permutation", "scale", "sign")
LARGEST_RAW_TENSOR = 4_000_000
LARGEST_COMPUTED_TENSOR = 2**16
PLACING = frozenset(
    "add sub subtract rsub mul multiply cat stack where index index_select gather embedding to "
    "_to_copy type_as clone dropout native_dropout pad constant_pad_nd upsample_bicubic2d "
    "upsample_bilinear2d upsample_nearest2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa".split()
)
"""What tables of positions meet: a channel for every element of a large one is worth its memory."""


def to_numpy(labels: Tensor | Labels | int) -> Labels:
    return labels.numpy() if isinstance(labels, Tensor) else np.asarray(labels)


@dataclass
class Constraints:
    """A system over channels (node 0 is fixed): ties of identity, of log scale and of sign.

    ``copies`` are the blocks that are one channel and its copies, ``mixing`` those whose rows may
    be mixed, such as these; ``noise`` holds, by draw, the channels that it was combined with; draws
    in ``seen_noise`` are also used by themselves, which gives every element a place of its own.
    ``marks`` says what keeps channels from being mixed, ``limits`` where that is a lack of rules,
    ``planes`` which ones a constant turns in pairs, and ``colours`` which ones numbers of their own
    tell apart. ``operation`` is the one whose rule is asked. ``leaves`` holds, by weight that
    others are computed from, one row of channels for each of its dimensions.
    """

    nodes: int = 1
    uses: int = 0
    operation: str = ""
    ties: dict[str, list[Labels]] = field(
        default_factory=lambda: {k: [] for k in (*ALL, "inverse scale")}
    )
    products: list[Product] = field(default_factory=list)
    blocks: list[Labels] = field(default_factory=list)
    copies: set[int] = field(default_factory=set)
    mixing: set[int] = field(default_factory=set)
    seen: list[Labels] = field(default_factory=list)
    entries: dict[Key, Entry] = field(default_factory=dict)
    consumed: dict[tuple[str, RowRange], set[tuple[int | None, int]]] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    noise: dict[int, Tensor] = field(default_factory=dict)
    seen_noise: set[int] = field(default_factory=set)
    marks: dict[Mark, list[Labels]] = field(default_factory=lambda: {m: [] for m in get_args(Mark)})
    limits: list[Limit] = field(default_factory=list)
    planes: list[Labels] = field(default_factory=list)
    colours: list[Labels] = field(default_factory=list)
    leaves: dict[str, list[Tensor]] = field(default_factory=dict)

    # ------------------------------------------------------------------ channels and ties
    def fresh(self, *shape: int) -> Tensor:
        """Make channels that are tied to nothing yet."""
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
        """Forbid channels to move, scale and flip, or some of that."""
        small = core(labels) if isinstance(labels, Tensor) else torch.from_numpy(np.asarray(labels))
        self.tie(small, FROZEN, kinds)

    def mark(self, labels: Tensor | Labels, mark: Mark) -> None:
        """Say what keeps channels from being mixed by any invertible matrix.

        Under "diagonal" nothing mixes, under "orthogonal" rotations of all channels do, under
        "centred" those that leave the sum of the channels alone.
        """
        small = core(labels).numpy() if isinstance(labels, Tensor) else labels
        self.marks[mark].append(np.unique(small))

    def hold(self, labels: Tensor, through: str, mark: Mark = "diagonal") -> None:
        """Mark channels because no rule says which matrices pass, though others might."""
        which = "no matrices" if mark == "diagonal" else "no matrices but rotations"
        reason = f"{which} that mix channels are followed through {through}"
        self.limits.append(Limit(np.unique(core(labels).numpy()), mark, reason))

    def plane(self, first: Tensor, second: Tensor) -> None:
        """Channels that a constant turns in pairs, so that complex numbers commute with it."""
        first, second = torch.broadcast_tensors(first, second)
        moving = moving_dims(first, second)
        both = [narrow_except(t, moving).numpy().ravel() for t in (first, second)]
        ordered = np.unique(np.stack(both), axis=1)
        self.planes.append(np.sort(ordered[:, (ordered > FROZEN).all(0)], 0))

    def colour(self, labels: Tensor | Labels) -> None:
        """Every one of these channels has a place of its own, as beside constants that differ."""
        self.colours.append(to_numpy(labels).ravel())

    def block(self, rows: Tensor | Labels, copies: bool = False, mixes: bool = False) -> None:
        """Channels may be exchanged within a row, and rows as wholes, but nothing between.

        Args:
            rows: one row of channels for every block.
            copies: whether a row is one channel and what it is combined with again and again.
            mixes: whether rows come from a product, which leaves it to marks what mixes them.
        """
        if copies:
            self.copies.add(len(self.blocks))
        if copies or mixes:
            self.mixing.add(len(self.blocks))
        self.blocks.append(to_numpy(rows))

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
        """Labels of any operand; a weight is taken element by element."""
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
        if weight.name in self.conflicts:  # it is held fixed anyway
            return fixed(weight.shape)
        size = weight.full_shape.numel()
        places = self.operation in PLACING
        if not size or size > (LARGEST_RAW_TENSOR if places else LARGEST_COMPUTED_TENSOR):
            raise Unsupported("a large tensor used element by element")
        if not weight.full_shape:
            first = torch.zeros(weight.shape, dtype=torch.long)
            weight = replace(weight, coords=(first,), full_shape=torch.Size([1]))
        key = Key(weight.name, 0 if len(weight.full_shape) == 1 else None)
        if key not in self.entries:
            fresh = self.fresh(weight.full_shape.numel())
            self._add(key, Entry(weight.name, key.dim, fresh.numpy(), "raw"))
            if weight.is_buffer:
                self.freeze(fresh, ("scale", "sign"))
        entry = self.entries[key]
        self._raw_beside_layers(key, entry)
        labels = torch.from_numpy(entry.labels.reshape(-1))
        stride = np.cumprod([1, *reversed(weight.full_shape[1:])])[::-1].tolist()
        moving = moving_dims(*weight.coords)
        index = sum(
            narrow_except(c, moving) * s for c, s in zip(weight.coords, stride, strict=True)
        )
        if entry.read is None:
            entry.read = np.zeros(labels.numel(), np.bool_)
        entry.read[np.ravel(index)] = True
        return Value(labels[index].expand(weight.shape))

    def _raw_beside_layers(self, key: Key, entry: Entry) -> None:
        """A gain that is also read as it stands has no scale of its own on its incoming side."""
        axis = (key.dim, key.slot)
        for dim, slot in self.consumed.setdefault((key.name, None), {axis}) - {axis}:
            self.freeze(self.entries[Key(key.name, dim, slot)].labels, ("scale", "sign"))
        if entry.scale != 1:
            self.freeze(entry.labels, ("scale",))

    def _add(self, key: Key, entry: Entry) -> None:
        for other in self.entries:
            if other.name == key.name and other != key and not self._stated_together(other, key):
                if (other.dim is None) != (key.dim is None):
                    self.conflicts.setdefault(
                        key.name, "used both as a layer's weight and element by element"
                    )
                elif other.dim == key.dim and other.rows != key.rows and other.overlaps(key):
                    self.conflicts.setdefault(key.name, "used through overlapping slices")
        self.entries[key] = entry

    def _stated_together(self, *keys: Key) -> bool:
        """Whether one use of a weight has several of its axes, the flattened one among them."""
        return any(
            name == keys[0].name and {(k.dim, k.slot) for k in keys} <= axes and len(axes) > 1
            for (name, _), axes in self.consumed.items()
            if (None, 0) in axes
        )

    def consume(self, weight: Weight, *records: Record) -> None:
        """State that a weight follows channels along its dimensions; later uses must agree."""
        rows, places = places_of(weight, records)
        slots: dict[tuple[int | None, int], tuple[Record, Labels]] = {}
        for record, (dim, table) in zip(records, places, strict=True):
            slots[dim, sum(d == dim for d, _ in slots)] = record, table

        def key(dim: int | None, slot: int) -> Key:
            in_blocks = (dim, slot) in slots and len(slots[dim, slot][1]) > 1
            return Key(weight.name, dim, slot, None if dim == 0 or in_blocks else rows)

        before = self.consumed.setdefault((weight.name, rows), set(slots))
        for axis in before ^ set(slots):
            self._freeze_unmatched(key(*axis), slots[axis][0] if axis in slots else None)
        for axis, (record, table) in slots.items():
            self._consume_record(weight, key(*axis), record, table)

    def _consume_record(self, weight: Weight, key: Key, record: Record, labels: Labels) -> None:
        """Labels in the places of the parameter, `UNSET` where the view does not reach."""
        if key not in self.entries:
            empty = np.full_like(labels, UNSET)
            role, scale, sign = record.role, record.scale, record.sign
            self._add(key, Entry(key.name, key.dim, empty, role, scale, sign, key.rows))
        entry = self.entries[key]
        self.uses += 1
        if record.role == "in":
            entry.last_read = self.uses
        if weight.is_buffer and record.role not in ("mean", "variance"):
            self.freeze(labels, ("scale", "sign"))
        entry.labels = np.atleast_2d(entry.labels)
        if entry.labels.shape[0] != labels.shape[0]:
            self.conflicts.setdefault(key.name, "used with different groupings")
            self.freeze(labels)
            return
        old = entry.labels
        known = (old >= 0) & (labels != UNSET)  # else not used so far, or met by zeros only
        entry.labels = np.where(known | (labels == UNSET), old, labels)
        self._agree(entry, record, old[known], labels[known])

    def _agree(self, entry: Entry, record: Record, old: Labels, new: Labels) -> None:
        self.tie(old, new, ("permutation", "sign"))
        both = np.concatenate([old, new])
        if entry.scale * record.scale == 0:
            self.freeze(both, ("scale",))
        elif entry.scale == record.scale:
            self.tie(old, new, ("scale",))
        else:
            self.tie(old, new, ("inverse scale",))
            self.freeze(old[old == new], ("scale",))
        if entry.sign != record.sign:
            self.freeze(both, ("sign",))

    def _freeze_unmatched(self, key: Key, record: Record | None) -> None:
        """An axis that one use of a weight has and another has not, where both must agree."""
        kinds = ALL if key.slot == 0 else ("scale", "sign")
        if record is not None:
            self.freeze(record.labels, kinds)
        if key in self.entries:
            self.freeze(self.entries[key].labels, kinds)
