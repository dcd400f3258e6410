"""Conclusions of a reading: exchanges, scales, signs and matrices, each solved once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weightsym.dimensions.exchanges import Exchanges, exchanges
from weightsym.dimensions.matrices import Mixing, Space, mixings, spaces
from weightsym.dimensions.reading import Reading
from weightsym.dimensions.scales import Units, degrees_of_freedom

__all__ = ["Dimensions"]


@dataclass(frozen=True, eq=False)
class Dimensions:
    """The reading of a network, and what follows from it."""

    reading: Reading

    @cached_property
    def exchanges(self) -> Exchanges:
        """Units that may change places."""
        return exchanges(self.reading)

    @cached_property
    def scales(self) -> Units:
        """The log scale of every label in free ones."""
        return Units(self.reading.system.scales, self.reading.system.count, "rational")

    @cached_property
    def signs(self) -> Units:
        """The sign of every label in free ones."""
        return Units(self.reading.system.signs, self.reading.system.count, "two")

    @property
    def scaling_dof(self) -> int:
        """Number of independent positive factors."""
        parts = [p.parts for p in self.reading.parameters.values()]
        return degrees_of_freedom(parts, self.reading.system.scales, self.scales, "rational")

    @property
    def sign_dof(self) -> int:
        """Number of independent sign flips."""
        parts = [p.parts for p in self.reading.parameters.values()]
        return degrees_of_freedom(parts, self.reading.system.signs, self.signs, "two")

    @cached_property
    def spaces(self) -> list[Space]:
        """The channels that matrices mix."""
        return spaces(self.reading, self.exchanges, self.scales, self.signs)

    @property
    def linear(self) -> list[Mixing]:
        """The groups of matrices, equal ones counted together."""
        return mixings(self.spaces)
