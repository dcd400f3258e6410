"""The result of `discover`: permutations, scalings and signs of units on axes of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from weightsym.coverage import units_inside
from weightsym.groups_table import table
from weightsym.linear_groups import LinearGroup
from weightsym.placements import Axis, Placement
from weightsym.shift_groups import Reader, ShiftGroup

__all__ = [
    "Axis",
    "Frozen",
    "Group",
    "LinearGroup",
    "Reader",
    "ShiftGroup",
    "PermutationGroup",
    "Placement",
    "ScalingGroup",
    "SignGroup",
    "SoftmaxShift",
    "Symmetries",
]


@dataclass(frozen=True, eq=False)
class Group:
    """Units that can be exchanged, rescaled or flipped, and the places where they act."""

    units: int
    name: str
    placements: tuple[Placement, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class PermutationGroup(Group):
    """The symmetric group on its units, which are channels, or blocks such as heads and experts.

    ``inner`` lists, for every class of interchangeable channels or of smaller blocks inside the
    blocks, the indices of the groups that permute them, one per block. Blocks may have tensors of
    their own, such as experts that are modules: each row of ``tensors`` names one per block, which
    change places as wholes.

    >>> from torch import nn
    >>> from weightsym import discover
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> [(sym.axes[p.axis].tensor, sym.axes[p.axis].dim) for p in sym.permutations[0].placements]
    [('0.weight', 0), ('0.bias', 0), ('2.weight', 1)]
    """

    kind: str = "channel"
    inner: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    tensors: tuple[tuple[str, ...], ...] = field(default=(), repr=False)


class ScalingGroup(Group):
    """Units that can each be multiplied by a positive factor.

    A product of two factors has further scales: several groups then act at one position, and the
    exponents of their placements are integers.

    >>> from torch import nn
    >>> from weightsym import discover
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> [(sym.axes[p.axis].tensor, p.exponent) for p in sym.scalings[0].placements]
    [('0.weight', 1), ('0.bias', 1), ('2.weight', -1)]
    """


class SignGroup(Group):
    """Units that can each be flipped.

    >>> from torch import nn
    >>> from weightsym import discover
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> [(group.name, group.units) for group in sym.signs], sym.scalings
    ([('0.weight', 3)], ())
    """


@dataclass(frozen=True)
class Frozen:
    """An operation that was not understood, where it stands, and why it is held fixed.

    >>> from weightsym import discover
    >>> class Running(torch.nn.Sequential):
    ...     def forward(self, x):
    ...         return self[1](self[0](x).cumsum(-1))
    >>> net = Running(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> (item,) = discover(net, torch.randn(8, 2)).frozen
    >>> item.operation, item.reason
    ('cumsum', 'it mixes entries along dimension 1')
    """

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
    """The weight-space symmetries of a network, for the functions of this package.

    All functions read the same tables. For every axis of a tensor, ``axis.labels(shape)`` is the
    position of each element; ``group.placements`` are the positions of each unit, and the power of
    its factor there.

    - A factor of a unit multiplies all elements that have its positions, as often as the exponent
      says.
    - A permutation p of a group changes ``index``, at first ``arange(axis.length)``, at the
      positions of its placement on the axis: ``index[positions] = index[positions[p]]``, one group
      after the other. Every element of the tensor is then taken from the same place, but for index
      ``index[label] % axis.size`` in dimension ``axis.dim``; the axes act in the order of
      ``axes_of``. At last the tensors in a row of ``group.tensors`` change places.

    Attributes:
        axes: dimensions of tensors along which units lie.
        permutations: groups of interchangeable units, in graph order, channels before the blocks
            that contain them, smaller blocks before larger ones; they act in this order.
        scalings: positive factors that pass through the network.
        signs: flips that pass through the network.
        linear: channels that may be mixed by matrices: those inside heads, adapters, streams.
        shifts: biases that other biases take up, or that nothing sees (those of keys).
        frozen: what was not understood, and is therefore held fixed.
        softmax_shift: the layer whose outputs are the logits, if there is one.
        weights: names of the tensors that count for the mass (all parameters but biases).
        constants: buffers that were read as they are; networks whose values differ are refused.
        aliases: further names of tensors that a module holds more than once, and their first name.
        evaluation_only: why the symmetries hold in evaluation mode only; empty where they hold in
            training, too (for random layers: in law).
        unchecked: why the check could not have seen an error, and the parameters that the example
            does not reach; empty where it could, and there are none.
        log10_permutations, scaling_dof, sign_dof: their numbers.
        error: relative output error of random elements in the check at random weights.

    >>> from torch import nn
    >>> from weightsym import discover
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> [(group.name, group.units) for group in sym.permutations]
    [('0.weight', 5), ('2.weight', 4)]
    >>> round(10**sym.log10_permutations), sym.scaling_dof, sym.sign_dof  # 5! 4!, 5 + 4
    (2880, 9, 0)
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
    linear: tuple[LinearGroup, ...] = ()
    shifts: tuple[ShiftGroup, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, without what was computed from them and kept."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

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

    @property
    def shift_dof(self) -> int:
        """Number of independent shifts of channels."""
        return sum(g.size for g in self.shifts)

    @property
    def dimension(self) -> int:
        """Dimension of the continuous group: matrices, shifts, and scales that are no matrices."""
        covered = sum(int(inside.sum()) for inside in self.mixed_scales)
        matrices = sum(g.dimension for g in self.linear)
        return self.scaling_dof - covered + matrices + self.shift_dof

    @cached_property
    def mixed_scales(self) -> tuple[Tensor, ...]:
        """For every group of scalings, which of its units a group of matrices contains."""
        rescaling = [group for group in self.linear if group.rescales]
        return units_inside(self.axes, rescaling, self.scalings, diagonal=True)

    @cached_property
    def shared_axes(self) -> frozenset[int]:
        """Axes with positions where not just one scale acts, or not with power 1 or -1."""
        shared = set()
        for axis, pairs in self.placements_by_axis("scalings").items():
            uses = torch.zeros(self.axes[axis].blocks * self.axes[axis].size, dtype=torch.long)
            for _, placement in pairs:
                at = placement.positions.reshape(-1).cpu()
                uses.index_add_(0, at, torch.ones_like(at))
            if int(uses.max()) > 1 or any(abs(placement.exponent) > 1 for _, placement in pairs):
                shared.add(axis)
        return frozenset(shared)

    @cached_property
    def touched(self) -> frozenset[str]:
        """The tensors that any group moves."""
        groups = (*self.permutations, *self.scalings, *self.signs)
        places = [p for g in groups for p in g.placements]
        places += [p for group in self.linear for p in group.placements]
        places += [p for shift in self.shifts for p in shift.placements]
        names = {self.axes[p.axis].tensor for p in places}
        names |= {name for group in self.permutations for row in group.tensors for name in row}
        last = self.softmax_shift
        return frozenset(names | ({last.weight} if last is not None else set()))

    @cached_property
    def exchangeable_tensors(self) -> dict[str, frozenset[str]]:
        """By tensor that may change places with others, all of these and itself."""
        found: dict[str, frozenset[str]] = {}
        for row in (row for group in self.permutations for row in group.tensors):
            together = frozenset(row).union(*(found.get(name, ()) for name in row))
            found |= dict.fromkeys(together, together)
        return found

    def placements_by_axis(self, kind: str) -> dict[int, list[tuple[int, Any]]]:
        """For each axis the (group, placement) pairs of one kind of groups, as they act."""
        return self._by_axis[kind]

    @cached_property
    def _by_axis(self) -> dict[str, dict[int, list[tuple[int, Placement]]]]:
        tables: dict[str, dict[int, list[tuple[int, Placement]]]] = {}
        for kind in ("permutations", "scalings", "signs", "linear", "shifts"):
            table = tables.setdefault(kind, {})
            for index, group in enumerate(getattr(self, kind)):
                for placement in group.placements:
                    table.setdefault(placement.axis, []).append((index, placement))
        return tables

    @cached_property
    def axes_of(self) -> dict[str, list[int]]:
        """The axes of every tensor, those that see no blocks first: in this order they act."""
        tensors: dict[str, list[int]] = {}
        for k in sorted(range(len(self.axes)), key=lambda k: self.axes[k].blocks):
            tensors.setdefault(self.axes[k].tensor, []).append(k)
        return tensors

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """A table: one line per kind of group, the counts, and what is frozen."""
        return table(self)


torch.serialization.add_safe_globals(
    [
        *(Axis, Frozen, LinearGroup, PermutationGroup, Placement, Reader, ScalingGroup),
        *(ShiftGroup, SignGroup, SoftmaxShift, Symmetries),
    ]
)
