"""Groups of shifts: biases that trade with other biases, or that nothing sees."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from weightsym.placements import Placement

__all__ = ["Reader", "ShiftGroup"]


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer that reads shifted channels, and whose bias takes the shift up.

    ``channels`` says where the channels lie along the incoming axis of the weight, and how many
    times the shift is added to them. ``rows`` are those of the weight whose outputs the elements of
    the bias are added to; by default they are the same.
    """

    channels: Placement
    bias: str
    rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ShiftGroup:
    r"""Numbers that may be added to the channels that a bias writes.

    With a shift c the bias becomes :math:`b + c`, and the bias of every layer that reads the
    channels :math:`b' - W' c`. A bias that no layer reads is dead, such as that of keys, which the
    softmax forgets. What another summand of the same sum takes up has exponent -1.

    Attributes:
        size: the number of channels.
        name: the bias, or table, that is shifted.
        placements: where the channels lie along biases and tables, that of ``name`` first; the
            shift is added as often as the exponent says.
        readers: the layers whose biases take the shift up.

    >>> import torch
    >>> from weightsym import discover
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> (group,) = discover(net, torch.randn(8, 4)).shifts
    >>> group, [reader.bias for reader in group.readers], group.is_dead
    (ShiftGroup(size=2, name='0.bias'), ['1.bias'], False)
    """

    size: int
    name: str
    placements: tuple[Placement, ...] = field(repr=False)
    readers: tuple[Reader, ...] = field(default=(), repr=False)

    @property
    def is_dead(self) -> bool:
        """True if nothing sees the shift."""
        return not self.readers and all(placement.exponent == 1 for placement in self.placements)
