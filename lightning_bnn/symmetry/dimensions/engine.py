"""`read`: the symmetries of a network by dimensional analysis, and why a unit is held."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn
from torch.fx import Node

from lightning_bnn.symmetry.dimensions.exchanges import Exchanges, exchanges
from lightning_bnn.symmetry.dimensions.export import operation_of, trace
from lightning_bnn.symmetry.dimensions.matrices import Mixing, Space, mixings, spaces
from lightning_bnn.symmetry.dimensions.reading import Reading
from lightning_bnn.symmetry.dimensions.scales import Units, degrees_of_freedom

__all__ = ["Dimensions", "read"]


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
            f"{operation_of(operations[k])}{_line(operations[k])}: {why}"
            for k, why in self.reading.unfollowed.items()
        ]

    def explain(self, name: str) -> list[str]:
        """The operations that tie channels of a tensor, or hold their scales or signs.

        Raises:
            ValueError: the network has no tensor of that name.
        """
        parameters = self.reading.parameters
        if name not in parameters:
            raise ValueError(f"the network has no tensor {name!r}; it has {sorted(parameters)}.")
        lines = []
        for d, part in enumerate(parameters[name].parts):
            labels = np.unique(part.labels.numpy())
            lines += [f"{name}, axis {d}: {text}" for text in self._statements(labels)]
        return list(dict.fromkeys(lines))

    def _statements(self, labels: Any) -> Iterator[str]:
        """What was said of these labels themselves, in the order of the network."""
        system = self.reading.system
        said = [(t.origin, "moves with others", t.pairs) for t in system.ties]
        for kind, equations in (("scale", system.scales), ("sign", system.signs)):
            for e in equations:
                verb = "is held" if len(e.coefficients) == 1 else "is tied"
                said.append((e.origin, f"its {kind} {verb}", e.labels))
        said += [(o, "its places are told apart", own) for own, _, o in system.colours]
        here = {(origin, text) for origin, text, own in said if np.isin(own, labels).any()}
        for origin, text in sorted(here):
            yield f"{text} by {self._operation(origin)}"

    def _operation(self, origin: int) -> str:
        operations = self.reading.operations
        if origin < 0:
            return "its being a statistic"
        if origin >= len(operations):
            return "the outputs of the network"
        return f"{operation_of(operations[origin])}{_line(operations[origin])}"


def _line(node: Node) -> str:
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
