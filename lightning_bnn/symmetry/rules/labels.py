"""Label tensors: activations that carry, in their own shape, the channel of each element.

A label tensor has stride 0 along every dimension in which the channel does not change (batch,
space, tokens), so that it costs only as much memory as there are channels. Shape operations are
executed on the labels themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

__all__ = [
    "FROZEN",
    "STRUCTURAL_ZERO",
    "Chosen",
    "Constant",
    "Counts",
    "Ends",
    "Factored",
    "Gathered",
    "Index",
    "Noise",
    "Products",
    "Squares",
    "Turned",
    "Unsupported",
    "Value",
    "Weight",
    "along",
    "compress",
    "constant_labels",
    "core",
    "fixed",
    "is_operand",
    "is_zero",
    "moving_dims",
    "narrow_except",
    "noise_of",
    "operation_name",
    "shape_of",
    "solid",
    "spread",
    "with_fixed_rest",
    "zeros",
]

FROZEN = 0
STRUCTURAL_ZERO = -1  # zero padding: equal to itself under every symmetry


class Unsupported(Exception):
    """A rule does not cover this use of its operation; what the operation touches is held fixed."""


# ------------------------------------------------------------ what stands for a tensor
@dataclass(frozen=True, eq=False)
class Value:
    """An activation, known by its labels."""

    labels: Tensor


@dataclass(frozen=True, eq=False)
class Noise(Value):
    """Independent draws: channels of the same law, which may change places, but have a size.

    Its labels are fixed, so that a rule that does not know noise freezes whatever it is combined
    with. ``source`` is the draw that it was computed from; -1 where there are several.
    """

    source: int = -1


@dataclass(frozen=True, eq=False)
class Products(Value):
    """Channels times channels, which are summed next: matrices may leave the sum as it is."""


@dataclass(frozen=True, eq=False)
class Squares(Value):
    """The squares of channels: their sum over a row does not change when the row is rotated."""


@dataclass(frozen=True, eq=False)
class Turned(Value):
    """Channels times constants that differ between them: one term of a rotation."""


@dataclass(frozen=True, eq=False)
class Chosen(Value):
    """What says which channels were chosen: it moves with them.

    Its labels are fixed; ``channels`` is the row of labels that the choice is among. An operation
    that does not know what this is must not see it.
    """

    channels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))


class Index(Chosen):
    """Positions of channels, such as those of the experts that ``topk`` picks."""


class Counts(Chosen):
    """How often every channel was chosen."""


class Ends(Chosen):
    """Running sums of counts: where the tokens of every channel end, once they are sorted by it."""


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that depends neither on the input nor on the parameters, known exactly."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """A view of a tensor of the state: the coordinates in it of every element of the view."""

    name: str
    coords: tuple[Tensor, ...]
    full_shape: torch.Size
    is_buffer: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of the view, not of the tensor behind it."""
        return self.coords[0].shape if self.coords else torch.Size(())

    @classmethod
    def whole(cls, name: str, shape: torch.Size, is_buffer: bool) -> Weight:
        """The tensor itself: the view of all of its elements."""
        coords = tuple(along(torch.arange(n), d, shape) for d, n in enumerate(shape))
        return cls(name, coords, shape, is_buffer)


@dataclass(frozen=True, eq=False)
class Factored:
    """A tensor computed from weights: an element moves as the product of what its indices say.

    ``parts`` are labels in the shape of the tensor, each along dimensions of its own: those of a
    matrix are one row of labels for its rows and one for its columns. ``active`` says that it is an
    activation, such as the outputs of all experts before they are summed.
    """

    parts: tuple[Tensor, ...]
    shape: torch.Size
    active: bool = False


@dataclass(frozen=True, eq=False)
class Gathered:
    """Rows of a stack that an `Index` picks, or what is computed from them alike.

    ``what`` has labels for all rows, along a dimension in front of those of a row, or is the stack
    itself; the first ``lead`` dimensions of the shape are those of the index, and ``order`` says
    which index it is.
    """

    what: Tensor | Weight
    at: Index
    order: Any
    shape: torch.Size
    lead: int


def is_operand(x: object) -> bool:
    """Whether something stands for a tensor."""
    return isinstance(x, Value | Weight | Constant | Factored | Gathered)


def is_zero(x: object) -> bool:
    """Whether it is zero everywhere, and stays so under every symmetry."""
    if isinstance(x, Constant):
        return x.tensor.numel() > 0 and not bool(x.tensor.any())
    return isinstance(x, Value) and x.labels.numel() > 0 and bool((core(x.labels) < 0).all())


def zeros(shape: Sequence[int]) -> Value:
    """A value that is zero everywhere."""
    return Value(torch.full((1,) * len(shape), STRUCTURAL_ZERO).expand(tuple(shape)))


def fixed(shape: Sequence[int]) -> Value:
    """A value that depends on the input alone: no symmetry moves it."""
    return Value(torch.full((1,) * len(shape), FROZEN).expand(tuple(shape)))


# ------------------------------------------------------------ what a node says
def operation_name(node: Node) -> str:
    """The bare name of the operation a node calls; operations outside aten keep their namespace."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    namespace, name = schema.name.split("::")
    return str(name if namespace == "aten" else f"{namespace}.{name}")


def shape_of(node: Node) -> torch.Size:
    """Shape of the one tensor that a node computes."""
    shape: torch.Size = node.meta["val"].shape
    return shape


def noise_of(node: Node, source: int | None = None) -> Noise:
    """Noise in the shape of a node: a draw of its own, or computed from an earlier one."""
    return Noise(fixed(shape_of(node)).labels, id(node) if source is None else source)


def with_fixed_rest(node: Node, labels: Tensor) -> Any:
    """The first result of a node has these labels; statistics and masks beside it are fixed."""
    value = node.meta["val"]
    if not isinstance(value, tuple | list):
        return Value(labels)
    return (Value(labels), *(fixed(v.shape) for v in value[1:]))


# ------------------------------------------------------------ labels
def moving_dims(*labels: Tensor) -> list[int]:
    """The dimensions along which any of these tensors, of equally many dimensions, changes."""
    return [
        d for d in range(labels[0].ndim) if any(t.shape[d] > 1 and t.stride(d) != 0 for t in labels)
    ]


def narrow_except(labels: Tensor, moving: Iterable[int]) -> Tensor:
    """The labels with all dimensions narrowed to one element but those that move."""
    moving = set(moving)
    for d in range(labels.ndim):
        if d not in moving and labels.shape[d] > 1:
            labels = labels.narrow(d, 0, 1)
    return labels


def core(labels: Tensor) -> Tensor:
    """The labels with every constant dimension narrowed to one element."""
    return narrow_except(labels, moving_dims(labels))


def compress(labels: Tensor) -> Tensor:
    """Give stride 0 to every dimension along which the labels are constant."""
    small = core(labels)
    for d in range(small.ndim):
        if small.shape[d] > 1:
            first = small.narrow(d, 0, 1)
            if bool((small == first).all()):
                small = first
    return small.expand(labels.shape)


def solid(labels: Tensor) -> Tensor:
    """Structural zeros become fixed channels: what is done to them does not leave them at zero."""
    return labels.clamp_min(FROZEN) if bool((core(labels) < 0).any()) else labels


def along(row: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Labels of the given shape that change along one dimension only."""
    view = [1] * len(shape)
    view[dim] = -1
    return row.reshape(view).expand(tuple(shape))


def spread(labels: Tensor, letters: str, names: Sequence[str]) -> Tensor:
    """Labels whose dimensions have these letters, in the order of names, of size 1 elsewhere."""
    moved = labels.permute([letters.index(c) for c in names if c in letters])
    for d, name in enumerate(names):
        if name not in letters:
            moved = moved.unsqueeze(d)
    return moved


def constant_labels(tensor: Tensor) -> Tensor:
    """Labels of a known tensor: fixed channels, zeros free, size 1 where values do not change."""
    if tensor.numel() and bool((tensor == 0).all()):
        return torch.full((1,) * tensor.ndim, STRUCTURAL_ZERO)
    changing = [
        n > 1 and not bool((tensor == tensor.narrow(d, 0, 1)).all())
        for d, n in enumerate(tensor.shape)
    ]
    return fixed([n if c else 1 for n, c in zip(tensor.shape, changing, strict=True)]).labels
