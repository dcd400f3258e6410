"""`read`: the symmetries of a network by dimensional analysis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from torch.fx import Node

from weightsym.dimensions.exchanges import Exchanges, exchanges
from weightsym.dimensions.export import operation_of, trace
from weightsym.dimensions.matrices import Mixing, Space, mixings, spaces
from weightsym.dimensions.reading import Reading
from weightsym.dimensions.scales import Units, degrees_of_freedom

__all__ = ["Dimensions", "line_of", "read"]


@dataclass(frozen=True, eq=False)
class Dimensions:
    """What was read of a network, and what follows from it."""

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
    def log10_permutations(self) -> float:
        """Decimal logarithm of the number of permutations."""
        groups = self.exchanges.groups
        return sum(math.lgamma(len(g.units) + 1) for g in groups) / math.log(10)

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

    @property
    def frozen(self) -> list[str]:
        """The operations that were not followed, and why."""
        operations = self.reading.operations
        return [
            f"{operation_of(operations[k])}{line_of(operations[k])}: {why}"
            for k, why in self.reading.unfollowed.items()
        ]


def line_of(node: Node) -> str:
    """Where an operation stands in the code of the network."""
    trace_ = node.meta.get("stack_trace") or ""
    lines = [x.strip() for x in trace_.splitlines() if x.strip().startswith("File ")]
    own = [x for x in lines if "/torch/" not in x]
    if not own:
        return ""
    path, number = own[-1].split(", ")[:2]
    return f" ({path.split('/')[-1].strip(chr(34))}, {number})"


def read(model: nn.Module, *example: Any, **named: Any) -> Dimensions:
    """Read a network in evaluation mode by dimensional analysis.

    Args:
        model: the network; it must be in evaluation mode.
        *example: inputs, as the module takes them.
        **named: inputs by name.
    """
    return Dimensions(Reading.of(trace(model, example, named)))
