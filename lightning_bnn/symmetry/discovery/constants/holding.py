"""Equations that no single operation states: what several uses of a tensor say together."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_bnn.symmetry.discovery.constants.expressions import NOTHING, Ints
from lightning_bnn.symmetry.discovery.constants.operands import Followed, Read

__all__ = ["Owners", "hold", "rows_of_bias"]


class Owners:
    """Of every unknown the tensor that it is added to, and the place in it.

    Attributes:
        names: of the tensors; those of tables after those of others.
        of: by unknown, which of them it belongs to; -1 for none.
        at: by unknown, the element or the column.
        sizes: how many elements, or columns, there are.
        dims: of every tensor the dimension along which the places lie; None for all its elements.
    """

    def __init__(self, followed: Followed) -> None:
        unknowns_of = [*followed.elements.values(), *followed.columns.values()]
        self.names = [*followed.elements, *followed.columns]
        self.sizes = [t.numel() for t in unknowns_of]
        self.dims = [0 if t.ndim == 1 else None for t in followed.elements.values()]
        self.dims += [followed.kept[name] for name in followed.columns]
        self.of = np.full(followed.system.count, -1)
        self.at = np.zeros(followed.system.count, np.int64)
        for k, unknowns in enumerate(unknowns_of):
            flat = unknowns.numpy().ravel()
            self.of[flat], self.at[flat] = k, np.arange(flat.size)


def hold(followed: Followed, owners: Owners) -> None:
    """State what the uses of tensors say together."""
    _several_uses(followed)
    _rows_beyond_the_example(followed)
    _biases_of_other_shapes(followed, owners)
    _reads_that_disagree(followed)
    _seen_without_a_bias(followed)


def _several_uses(followed: Followed) -> None:
    """A tensor that is used in two ways is not shifted, nor what it would take up."""
    for name, uses in followed.uses.items():
        if len(uses) == 1 and "something else" not in uses:
            continue
        for unknowns in (followed.elements.get(name), followed.columns.get(name)):
            if unknowns is None:
                continue
            followed.system.stop(unknowns)
            for read, taken_up in followed.reads:
                if bool(torch.isin(taken_up, unknowns).any()):
                    followed.system.stop(read.incoming)


def _rows_beyond_the_example(followed: Followed) -> None:
    """Rows of a table that the example does not reach gain what the others gain, all the same."""
    for name, reached in followed.reached.items():
        unknowns = followed.elements[name]
        dims = [d for d in range(reached.ndim) if not torch.equal(reached.all(d), reached.any(d))]
        if len(dims) == 1:
            first = unknowns.narrow(dims[0], 0, 1).expand_as(unknowns)
            followed.system.stop(followed.system.combine([(unknowns, 1), (first, -1)]))
        elif dims:
            followed.system.stop(unknowns)


def _biases_of_other_shapes(followed: Followed, owners: Owners) -> None:
    """The elements of a bias must take up rows of a weight, each one row."""
    for read, taken_up in followed.reads:
        for name in np.unique(owners.of[taken_up[taken_up != NOTHING].numpy()]):
            if not _takes_up(read, taken_up.numpy(), owners, int(name)):
                followed.system.stop(read.incoming)


def _takes_up(read: Read, taken_up: Ints, owners: Owners, name: int) -> bool:
    mine = owners.of[taken_up] == name
    elements = owners.at[taken_up[mine]]
    if np.unique(elements).size < elements.size:
        return False
    same_rows = np.array_equal(elements, read.rows[mine])
    return same_rows or elements.size == owners.sizes[name]


def rows_of_bias(read: Read, taken_up: Ints, owners: Owners, name: int) -> Ints | None:
    """Of every element of a bias the row of the weight that it is added to; None if the same."""
    mine = owners.of[taken_up] == name
    elements, rows = owners.at[taken_up[mine]], read.rows[mine]
    if np.array_equal(elements, rows):
        return None
    found = np.zeros(owners.sizes[name], np.int64)
    found[elements] = rows
    return found


def _reads_that_disagree(followed: Followed) -> None:
    """A bias that is added again must take up the same constants, by the same weight."""
    first: dict[int, tuple[Read, bytes]] = {}
    for read, taken_up in followed.reads:
        key = taken_up.numpy().tobytes()
        for unknown in {int(taken_up.max())} - {NOTHING}:
            before, same = first.setdefault(unknown, (read, key))
            if before is read:
                continue
            if (before.weight, same) == (read.weight, key) and np.array_equal(
                before.positions, read.positions
            ):
                pair = [(before.incoming, 1), (read.incoming, -1)]
                followed.system.stop(followed.system.combine(pair))
            else:
                followed.system.stop(before.incoming)
                followed.system.stop(read.incoming)


def _seen_without_a_bias(followed: Followed) -> None:
    """What a layer without a bias makes of constants must be seen by nothing."""
    system, pending = followed.system, list(followed.silent)
    while pending:
        seen = _seen(followed)
        found = {k for k, (_, made) in enumerate(pending) if seen[made.numpy()].any()}
        if not found:
            return
        for k in found:
            for numbers in pending[k]:
                system.stop(numbers)
        pending = [pair for k, pair in enumerate(pending) if k not in found]


def _seen(followed: Followed) -> NDArray[np.bool_]:
    """Unknowns that are in equations, or read by layers."""
    system = followed.system
    seen = np.zeros(system.count, np.bool_)
    for numbers in (*system.stops, *(r.incoming.numpy() for r, _ in followed.reads)):
        seen[system.every_term(np.unique(numbers)).unknowns] = True
    return seen
