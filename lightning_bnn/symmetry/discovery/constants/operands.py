"""What stands for a tensor while constants are followed, and what is stated about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.symmetry.discovery.constants.expressions import NOTHING, Expressions, Ints
from lightning_bnn.symmetry.rules.labels import Weight, core, moving_dims, narrow_except

__all__ = [
    "Added",
    "Followed",
    "Operand",
    "Read",
    "Scores",
    "Unbiased",
    "equal_along",
    "size_of",
]


@dataclass(frozen=True, eq=False)
class Added:
    """An activation to whose elements constants may be added; in its shape, their numbers."""

    numbers: Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """An activation to which the same is added all along the last dimension, whatever it is.

    A softmax over that dimension forgets it. Everything else sees ``numbers``. ``largest`` says
    that it is the largest of each row of what another one stands for.
    """

    numbers: Tensor
    largest: Scores | None = None


@dataclass(frozen=True, eq=False)
class Read:
    """A weight that multiplies an activation.

    Attributes:
        weight: its name.
        dim: the dimension that is summed over.
        blocks: into how many its outgoing rows fall.
        size: of a block, along ``dim``.
        positions: ``(channels, places)``: where the incoming channels lie, blocks one behind the
            other.
        rows: which of the outgoing rows there are.
        incoming: what may be added to the channels.
    """

    weight: str
    dim: int
    blocks: int
    size: int
    positions: Ints
    rows: Ints
    incoming: Tensor


@dataclass(frozen=True, eq=False)
class Unbiased:
    """What a linear map has made of an activation, before a bias is added by hand."""

    weight: Weight
    out_dim: int
    incoming: Tensor


Operand = Added | Scores | Unbiased | Weight


def size_of(argument: Any) -> torch.Size:
    """The size of the tensor that an argument of a node stands for."""
    size: torch.Size = argument.meta["val"].shape
    return size


def equal_along(followed: Followed, x: Any, dim: int) -> None:
    """What is added must be the same along a dimension."""
    if isinstance(x, Scores | Unbiased):
        followed.see(x)
        return
    numbers = followed.numbers(x)
    if numbers is not None and dim % numbers.ndim in moving_dims(numbers):
        first = numbers.narrow(dim, 0, 1).expand_as(numbers)
        followed.system.stop(followed.system.combine([(numbers, 1), (first, -1)]))


@dataclass
class Followed:
    """What all graphs have stated.

    Attributes:
        system: unknowns and equations.
        elements: by tensor, the unknown of every element.
        columns: by table, the unknowns of what is added to all rows, or to all columns.
        kept: by table, the dimension along which these unknowns lie.
        reads: weights that read something, and the unknown by which each row may be taken up.
        silent: what something linear sees, and the unknowns of what it makes of it.
        uses: by tensor, what it is used for.
        reached: by tensor, which of its elements the example reaches.
    """

    system: Expressions = field(default_factory=Expressions)
    elements: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    reads: list[tuple[Read, Tensor]] = field(default_factory=list)
    silent: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    uses: dict[str, set[str]] = field(default_factory=dict)
    reached: dict[str, Tensor] = field(default_factory=dict)

    def use(self, name: str, use: str) -> None:
        """Only tensors with one use may be shifted."""
        self.uses.setdefault(name, set()).add(use)

    def elements_of(self, weight: Weight, use: str = "as it stands") -> Tensor:
        """The unknowns of the elements of a tensor of the state, or of a view of it."""
        self.use(weight.name, use)
        if weight.name not in self.elements:
            self.elements[weight.name] = self.system.fresh(*weight.full_shape)
            self.reached[weight.name] = torch.zeros(weight.full_shape, dtype=torch.bool)
        moving = moving_dims(*weight.coords) if weight.coords else []
        at = tuple(narrow_except(c, moving) for c in weight.coords)
        self.reached[weight.name][at] = True
        return self.elements[weight.name][at].expand(weight.shape)

    def columns_of(self, table: Weight, kept: int = 1) -> Tensor:
        """The unknowns of what is added to all rows of a table, or, along dimension 0, columns."""
        self.use(table.name, f"table along {kept}")
        if table.name not in self.columns:
            self.columns[table.name] = self.system.fresh(table.full_shape[kept])
            self.kept[table.name] = kept
        return self.columns[table.name]

    def numbers(self, x: Any) -> Tensor | None:
        """What may be added to an operand; None if nothing."""
        if isinstance(x, Weight):
            return self.system.live(self.elements_of(x))
        return self.system.live(x.numbers) if isinstance(x, Added | Scores) else None

    def added(self, numbers: Tensor | None) -> Added | None:
        """An activation, or None where nothing may be added to it."""
        numbers = None if numbers is None else self.system.live(numbers)
        return None if numbers is None else Added(numbers)

    def see(self, x: Any) -> None:
        """Something sees an operand: nothing may be added to it."""
        if isinstance(x, Added | Scores):
            self.system.stop(x.numbers)
        elif isinstance(x, Unbiased):
            self.system.stop(x.incoming)
        elif isinstance(x, Weight):
            self.use(x.name, "something else")

    def made_of(self, numbers: Tensor, beside: tuple[Tensor, ...] = ()) -> Tensor:
        """Unknowns of what a linear operation, known to be constant, makes of constants.

        Args:
            numbers: what it sees.
            beside: tensors along whose moving dimensions it differs, too.
        """
        tensors = torch.broadcast_tensors(numbers, *beside)
        moving = moving_dims(*tensors)
        seen = narrow_except(tensors[0], moving)
        made = self.system.fresh(*seen.shape)
        self.silent.append((seen.reshape(-1), made.reshape(-1)))
        return made.masked_fill(seen == NOTHING, NOTHING).expand(tensors[0].shape)

    def row(self, numbers: Tensor | None, dim: int, size: int) -> Tensor:
        """Numbers along one dimension; where others differ, they must be equal."""
        if numbers is None:
            return torch.zeros(size, dtype=torch.long)
        first = narrow_except(numbers, [dim % numbers.ndim])
        if len(set(moving_dims(numbers)) - {dim % numbers.ndim}):
            self.system.stop(self.system.combine([(numbers, 1), (first.expand_as(numbers), -1)]))
        left = self.system.live(first)
        row = torch.zeros(1, dtype=torch.long) if left is None else core(left).reshape(-1)
        return row.expand(size)
