"""What `discover` returns: permutations, scalings and signs of units on axes of tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

__all__ = [
    "Axis",
    "Frozen",
    "Group",
    "PermutationGroup",
    "Placement",
    "ScalingGroup",
    "SignGroup",
    "SoftmaxShift",
    "Symmetries",
]


@dataclass(frozen=True)
class Axis:
    """One dimension of one tensor whose indices belong to units.

    ``dim=None`` is the flattened tensor. With ``blocks > 1`` (grouped convolutions, packed
    projections) the rows of the tensor fall into that many equal blocks, and position ``b * size +
    i`` is column ``i`` as seen by row block ``b``. ``last_read`` counts up along the graph; it is
    -1 where no layer takes its input along this axis.
    """

    tensor: str
    dim: int | None
    size: int
    role: str
    blocks: int = 1
    last_read: int = -1


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the units of a group live on one axis: ``positions[k]`` are those of unit ``k``."""

    axis: int
    positions: Tensor
    exponent: int = 1


@dataclass(frozen=True, eq=False)
class Group:
    """Units that can be exchanged, rescaled or flipped, and the places where they act."""

    units: int
    name: str
    placements: tuple[Placement, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class PermutationGroup(Group):
    """The symmetric group on its units; those of a ``block`` are heads or convolution groups.

    ``inner`` lists, for every class of interchangeable channels or of smaller blocks inside the
    blocks, the indices of the groups that permute them, one per block.
    """

    kind: str = "channel"
    inner: tuple[tuple[int, ...], ...] = field(default=(), repr=False)


class ScalingGroup(Group):
    """Units that can each be multiplied by a positive factor."""


class SignGroup(Group):
    """Units that can each be flipped."""


@dataclass(frozen=True)
class Frozen:
    """An operation that was not understood, where it stands, and why it is held fixed."""

    operation: str
    module: str
    line: str
    reason: str

    def __str__(self) -> str:
        """One line of a table: what it is, where it stands and why it is fixed."""
        where = f" in `{self.module}`" if self.module else ""
        return f"{self.operation}{where}{' at ' + self.line if self.line else ''}: {self.reason}"


@dataclass(frozen=True)
class SoftmaxShift:
    """The last layer, whose logits may all be shifted by one function of the input."""

    weight: str
    bias: str | None
    dim: int


@dataclass(frozen=True, eq=False)
class Symmetries:
    """The weight-space symmetries of a network; the functions of this package apply them.

    Attributes:
        permutations: groups of interchangeable units, in graph order, channels before the blocks
            that contain them, smaller blocks before larger ones; they act in this order.
        scalings: positive factors that pass through the network.
        signs: flips that pass through the network.
        frozen: what was not understood, and is therefore held fixed.
        softmax_shift: the layer whose outputs are the logits, if there is one.
        weights: names of the tensors that count for the mass (all parameters but biases).
        constants: buffers that were read as they are; networks whose values differ are refused.
        aliases: further names of tensors that a module holds more than once, and their first name.
        evaluation_only: why the symmetries hold in evaluation mode only; empty where they hold in
            training, too (for random layers: in law).
        unchecked: why the check could not have seen an error; empty where it could.
        log10_permutations, scaling_dof, sign_dof: their numbers.
        error: relative output error of random elements in the check at random weights.
    """

    axes: tuple[Axis, ...]
    permutations: tuple[PermutationGroup, ...]
    scalings: tuple[ScalingGroup, ...]
    signs: tuple[SignGroup, ...]
    frozen: tuple[Frozen, ...] = ()
    softmax_shift: SoftmaxShift | None = None
    weights: tuple[str, ...] = ()
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    batch_norm: str = "carrier"
    error: float = math.nan
    constants: dict[str, Tensor] = field(default_factory=dict, repr=False)
    aliases: dict[str, str] = field(default_factory=dict)
    evaluation_only: str = ""
    unchecked: str = ""

    @cached_property
    def log10_permutations(self) -> float:
        """Decimal logarithm of the number of permutations."""
        return sum(math.lgamma(g.units + 1) for g in self.permutations) / math.log(10)

    @property
    def scaling_dof(self) -> int:
        """Number of independent positive factors."""
        return sum(g.units for g in self.scalings)

    @property
    def sign_dof(self) -> int:
        """Number of independent sign flips."""
        return sum(g.units for g in self.signs)

    @cached_property
    def touched(self) -> frozenset[str]:
        """The tensors that any group moves."""
        groups = (*self.permutations, *self.scalings, *self.signs)
        names = {self.axes[p.axis].tensor for g in groups for p in g.placements}
        last = self.softmax_shift
        return frozenset(names | ({last.weight} if last is not None else set()))

    def placements_by_axis(self, kind: str) -> dict[int, list[tuple[int, Placement]]]:
        """For each axis the (group, placement) pairs of permutations, scalings or signs."""
        return self._by_axis[kind]

    def stages(self, axis: int) -> list[list[tuple[int, Placement]]]:
        """The (group, placement) pairs of an axis in the order in which they act.

        Those of one stage have no position in common: they may act at once.
        """
        return self._stages.get(axis, [])

    @cached_property
    def _stages(self) -> dict[int, list[list[tuple[int, Placement]]]]:
        tables: dict[int, list[list[tuple[int, Placement]]]] = {}
        for axis, pairs in self.placements_by_axis("permutations").items():
            stages: list[list[tuple[int, Placement]]] = []
            next_stage = torch.zeros(self.axes[axis].blocks * self.axes[axis].size, dtype=torch.int)
            for group, place in pairs:
                positions = place.positions.reshape(-1).cpu()
                at = int(next_stage[positions].max())
                next_stage[positions] = at + 1
                stages += [[]] * (at == len(stages))
                stages[at] = [*stages[at], (group, place)]
            tables[axis] = stages
        return tables

    @cached_property
    def _by_axis(self) -> dict[str, dict[int, list[tuple[int, Placement]]]]:
        tables: dict[str, dict[int, list[tuple[int, Placement]]]] = {}
        for kind in ("permutations", "scalings", "signs"):
            table: dict[int, list[tuple[int, Placement]]] = {}
            for index, group in enumerate(getattr(self, kind)):
                for place in group.placements:
                    table.setdefault(place.axis, []).append((index, place))
            tables[kind] = table
        return tables

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """A table: one line per kind of group, the counts, and what is frozen."""
        lines = [f"{'kind':<12}{'units':>7}{'groups':>8}  acts on"]
        for title, groups in (
            ("permutation", self.permutations),
            ("scaling", self.scalings),
            ("sign", self.signs),
        ):
            lines += _rows(title, groups)
        lines.append(
            f"permutations: 10^{self.log10_permutations:.1f}   free scales: {self.scaling_dof}   "
            f"free signs: {self.sign_dof}"
        )
        lines += [f"frozen: {item}" for item in self.frozen]
        if self.constants:
            lines.append(f"read as constants: {_shorten(list(self.constants))}")
        if self.evaluation_only:
            lines.append(f"evaluation only: {self.evaluation_only}")
        if self.unchecked:
            lines.append(f"not checked: {self.unchecked}")
        return "\n".join(lines)


def _rows(title: str, groups: tuple[Group, ...]) -> list[str]:
    counts: Counter[tuple[str, int]] = Counter()
    names: dict[tuple[str, int], list[str]] = {}
    for group in groups:
        label = "block perm." if getattr(group, "kind", "") == "block" else title
        counts[label, group.units] += 1
        names.setdefault((label, group.units), []).append(group.name)
    return [
        f"{label:<12}{units:>7}{count:>8}  {_shorten(names[label, units])}"
        for (label, units), count in counts.items()
    ]


def _shorten(names: list[str], most: int = 3) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (
        f", ... ({len(distinct)} tensors)" if len(distinct) > most else ""
    )
