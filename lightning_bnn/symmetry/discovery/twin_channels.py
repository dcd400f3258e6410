"""The channels of branches that pair up, and which uses of them correspond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from lightning_bnn.symmetry.discovery.twins import Twins
from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import Value, core

__all__ = ["Ints", "Made", "Renaming", "TwinChannels", "channels_of_twins", "in_both"]

Ints = NDArray[np.integer[Any]]
Renaming = dict[int, int]


class Made(NamedTuple):
    """How many channels, sets of channels seen, blocks and colours there were at some time."""

    nodes: int
    seen: int
    blocks: int
    colours: int

    @classmethod
    def so_far(cls, system: Constraints) -> Made:
        """Those that there are now."""
        return cls(system.nodes, len(system.seen), len(system.blocks), len(system.colours))


@dataclass(frozen=True, eq=False)
class TwinChannels:
    """The channels of branches that pair up.

    Attributes:
        tensors: the tensors of every branch.
        places: one channel that stands for each branch.
        labels: the channels of every branch, in no order.
        ports: the channels that every branch takes from a common tensor, or gives to one, in order.
        seen, blocks, colours: by number, the one that corresponds in the first branch.
    """

    tensors: tuple[tuple[str, ...], ...]
    places: Ints
    labels: tuple[Ints, ...]
    ports: tuple[Ints, ...]
    seen: Renaming
    blocks: Renaming
    colours: Renaming


def channels_of_twins(
    system: Constraints,
    found: Sequence[Twins],
    made: Mapping[Node, tuple[Made, Made]],
    values: Mapping[Node, Any],
) -> list[TwinChannels]:
    """The channels of all branches whose operations have made as many, and of known ports.

    Args:
        system: what the rules have stated.
        found: the branches.
        made: what there was before and after every operation.
        values: what every operation has returned.
    """
    result = []
    for twins in found:
        ranges = [[made[n] for n in branch if n in made] for branch in twins.nodes]
        ports: list[list[Any]] = [[values.get(n) for n in branch] for branch in twins.ports]
        sizes = {
            tuple(tuple(np.subtract(new[1:], old[1:]).tolist()) for old, new in branch)
            for branch in ranges
        }
        if len(sizes) == 1 and all(type(x) is Value for own in ports for x in own):
            places = system.fresh(len(twins.nodes)).numpy()
            result.append(_channels(twins, places, ranges, ports))
    return result


def _channels(
    twins: Twins,
    places: Ints,
    ranges: Sequence[Sequence[tuple[Made, Made]]],
    ports: Sequence[Sequence[Value]],
) -> TwinChannels:
    empty = np.zeros(0, np.int64)
    inside = [[np.arange(old.nodes, new.nodes) for old, new in branch] for branch in ranges]
    through = [[core(x.labels).numpy().ravel() for x in own] for own in ports]
    return TwinChannels(
        twins.tensors,
        places,
        tuple(
            np.concatenate([empty, *own, *others])
            for own, others in zip(inside, through, strict=True)
        ),
        tuple(np.concatenate([empty, *own]) for own in through),
        *(_renaming(ranges, kind) for kind in (1, 2, 3)),
    )


def _renaming(ranges: Sequence[Sequence[tuple[Made, Made]]], kind: int) -> Renaming:
    """By number of a later branch, that of the first."""
    first, *others = (
        [k for old, new in branch for k in range(old[kind], new[kind])] for branch in ranges
    )
    return {k: f for other in others for k, f in zip(other, first, strict=True)}


def in_both(first: Sequence[TwinChannels], second: Sequence[TwinChannels]) -> list[TwinChannels]:
    """The branches that correspond in two graphs, with their channels in both."""
    again = {(twins.tensors[0], frozenset(twins.tensors)): twins for twins in second}
    pairs = [(twins, again.get((twins.tensors[0], frozenset(twins.tensors)))) for twins in first]
    return [_joined(one, other) for one, other in pairs if other is not None]


def _joined(one: TwinChannels, other: TwinChannels) -> TwinChannels:
    order = [other.tensors.index(names) for names in one.tensors]

    def both(a: Sequence[Ints], b: Sequence[Ints]) -> tuple[Ints, ...]:
        return tuple(np.concatenate([x, b[k]]) for x, k in zip(a, order, strict=True))

    return replace(
        one,
        labels=both(one.labels, other.labels),
        ports=both(one.ports, other.ports),
        seen=one.seen | other.seen,
        blocks=one.blocks | other.blocks,
        colours=one.colours | other.colours,
    )
