"""Layers whose units can be exchanged one by one, and sets of them without shared tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weightsym import PermutationGroup, Symmetries
from weightsym.params import Params

_SCREEN = 64
"""Number of weights of each tensor that distinguish most units."""
_ASKED = 64
"""Number of units that suffice to find these weights."""


@dataclass(frozen=True, eq=False)
class UnitLayer:
    """Exchangeable units, with the positions of their weights: (tensor, dimension, positions)."""

    group: int
    units: int
    places: tuple[tuple[str, int | None, Tensor], ...]

    @property
    def log_order(self) -> float:
        """Logarithm of the number of permutations."""
        return math.lgamma(self.units + 1)

    @property
    def tensors(self) -> frozenset[str]:
        """The tensors moved by its permutations."""
        return frozenset(name for name, _, _ in self.places)

    def rows(self, params: Params, units: Tensor | None = None, multiple: int = 1) -> Tensor:
        """Return the weights of units from a stack, ``(networks, units, weights)``.

        They are padded with zeros to a multiple of a given number.
        """
        parts = []
        for name, dim, positions in self.places:
            along = _along(params[name], dim)
            if units is not None or not _are_all(positions, along.shape[1]):
                index = positions if units is None else positions[units.to(positions.device)]
                along = along.index_select(1, index.reshape(-1).to(along.device))
            count = len(positions) if units is None else len(units)
            size = positions[:1].numel() * along.shape[2:].numel()
            parts.append(along.reshape(len(along), count, size))
        missing = -sum(rows.shape[2] for rows in parts) % multiple
        if missing:
            parts.append(parts[0].new_zeros(*parts[0].shape[:2], missing))
        return torch.cat(parts, 2)

    def telling_rows(self, stacks: Sequence[Params], mean: Params, log_std: Params) -> list[Tensor]:
        """Return the most informative weights of units from several stacks, as `rows` does."""
        parts: list[list[Tensor]] = [[] for _ in stacks]
        for name, dim, positions in self.places:
            columns = _telling(mean[name], log_std[name], dim)
            for rows, params in zip(parts, stacks, strict=True):
                along = _along(params[name], dim)
                chosen = along.reshape(*along.shape[:2], -1).index_select(2, columns)
                rows.append(_at(chosen, positions).flatten(2))
        return [torch.cat(rows, 2) for rows in parts]

    def sums(self, params: Params) -> Tensor:
        """Return sums over the weights of each unit, ``(networks, units)``."""
        parts = []
        for name, dim, positions in self.places:
            along = _along(params[name], dim)
            along = along if along.ndim == 2 else along.sum(tuple(range(2, along.ndim)))
            parts.append(_at(along, positions).sum(2))
        return torch.stack(parts).sum(0)

    def square_sums(self, params: Params) -> Tensor:
        """Return sums of squares over the weights of each unit, ``(networks, units)``."""
        return self.sums({name: params[name].square() for name, _, _ in self.places})


def unit_layers(sym: Symmetries, names: Sequence[str]) -> list[UnitLayer]:
    """Return the groups whose permutations act unit by unit.

    Groups that act on both axes of a tensor, as in residual or recurrent layers, are left out, and
    so are groups that move columns within blocks.
    """
    return [
        layer
        for g, group in enumerate(sym.permutations)
        if (layer := _unit_layer(sym, g, group, set(names))) is not None
    ]


def _unit_layer(
    sym: Symmetries, index: int, group: PermutationGroup, names: set[str]
) -> UnitLayer | None:
    axes = [(sym.axes[placement.axis], placement.positions) for placement in group.placements]
    axes = [(axis, positions) for axis, positions in axes if axis.tensor in names]
    if group.tensors:
        return None
    tensors = [axis.tensor for axis, _ in axes]
    if not tensors or len(set(tensors)) < len(tensors) or any(a.blocks > 1 for a, _ in axes):
        return None
    places = tuple((axis.tensor, axis.dim, positions) for axis, positions in axes)
    return UnitLayer(index, group.units, places)


def independent_sets(layers: Sequence[UnitLayer]) -> list[list[UnitLayer]]:
    """Return sets of layers without shared tensors, which together contain all layers.

    The first has the largest total ``log n!`` of all sets. Each further one has the largest of
    those that contain a layer of no earlier set.
    """
    sets: list[list[UnitLayer]] = []
    covered: set[int] = set()
    while len(covered) < len(layers):
        first = next((k for k in range(len(layers)) if k not in covered), None) if sets else None
        chosen = _best_set(layers, first)
        sets.append([layers[k] for k in chosen])
        covered |= set(chosen)
    return sets


def _best_set(layers: Sequence[UnitLayer], contains: int | None) -> list[int]:
    """Find a maximum-weight independent set, by integer programming."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    n = len(layers)
    clashes = [(a, b) for a in range(n) for b in range(a) if layers[a].tensors & layers[b].tensors]
    matrix = np.zeros((len(clashes) + 1, n))
    for row, pair in enumerate(clashes):
        matrix[row, list(pair)] = 1
    lower = np.zeros(n)
    if contains is not None:
        lower[contains] = 1
    solved = milp(
        -np.array([layer.log_order for layer in layers]),
        integrality=np.ones(n),
        bounds=Bounds(lower, np.ones(n)),
        constraints=LinearConstraint(matrix, ub=np.ones(len(clashes) + 1)),
    )
    return [k for k in range(n) if solved.x[k] > 0.5]


def _along(stack: Tensor, dim: int | None) -> Tensor:
    """Move the dimension of the positions behind that of the networks."""
    return stack.flatten(1) if dim is None else stack.movedim(dim + 1, 1)


def _at(along: Tensor, positions: Tensor) -> Tensor:
    """Select the positions ``(units, repeats)`` of the second dimension."""
    if _are_all(positions, along.shape[1]):
        return along[:, :, None]
    return along[:, positions.to(along.device)]


@functools.lru_cache(maxsize=1024)
def _are_all(positions: Tensor, size: int) -> bool:
    """Return whether there is one position for each unit, in order, once for each tensor."""
    return torch.equal(positions, torch.arange(size, device=positions.device)[:, None])


def _telling(mean: Tensor, log_std: Tensor, dim: int | None) -> Tensor:
    """Return the columns of a tensor with the largest signal-to-noise ratio between units."""
    if dim is None or mean.ndim < 3:
        return torch.zeros(1, dtype=torch.long, device=mean.device)
    count = mean[0].numel() // mean.shape[dim + 1]
    if count <= _SCREEN:
        return torch.arange(count, device=mean.device)
    every = max(1, mean.shape[dim + 1] // _ASKED)
    mean, log_std = (_along(t, dim)[:, ::every] for t in (mean, log_std))
    signal = mean.square().mean(1) - mean.mean(1).square()
    ratio = (signal * (-2 * log_std.mean(1)).exp()).flatten(1).amax(0)
    return ratio.topk(_SCREEN).indices
