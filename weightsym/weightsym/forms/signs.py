r"""The signs of all units, solved jointly where they do not follow one after the other.

A weight flips with the product of the signs of some units. Tensors are taken in graph order, and
their weights from the largest on: a weight whose sign does not follow from earlier ones becomes
positive. As in a tree of greatest weight, the result is unique if no two weights are equally large,
and it moves with the units under permutations.

.. math:: \prod_{k \in K} s_k = \mathrm{sign}\, w
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from weightsym.groups.symmetries import Symmetries, incidence
from weightsym.networks.dicts import Params, is_stacked, unstack

_ROUNDING = 64  # units in the last place
_TINY = 1e-6  # of the largest weight of a tensor: what rotations leave of zero
_NEGATIVE = -1
Equation = frozenset[int]
"""Units whose signs have a positive product, or a negative one if `_NEGATIVE` is among them."""


def joint_signs(params: Params, sym: Symmetries) -> list[Tensor]:
    """Solve for the signs of the canonical form, for every group of signs.

    Args:
        params: one network or a stack.
        sym: result of `discover`.
    """
    units, stacked = [group.units for group in sym.signs], is_stacked(params, sym.shapes)
    flips = _Flips(sym)
    solved = [flips.solved(member) for member in (unstack(params) if stacked else [params])]
    signs = torch.stack(solved) if stacked else solved[0]
    return list(signs.to(next(iter(params.values()))).split(units, -1))


class _Flips:
    """The units whose signs flip each position, by axis."""

    def __init__(self, sym: Symmetries) -> None:
        self.sym, self.units = sym, sum(group.units for group in sym.signs)
        powers = incidence(sym.axes, sym.signs)
        odd = np.split(powers.indices, powers.indptr[1:-1])
        ends = np.cumsum([axis.length for axis in sym.axes]).tolist()
        self.at: dict[int, list[Equation]] = {}
        for a in sym.placements_by_axis("signs"):
            rows = range(ends[a] - sym.axes[a].length, ends[a])
            values = (powers.data[powers.indptr[r] : powers.indptr[r + 1]] % 2 for r in rows)
            pairs = zip((odd[r] for r in rows), values, strict=True)
            self.at[a] = [frozenset(k[v == 1].tolist()) for k, v in pairs]

    def stages(self) -> list[list[str]]:
        """Return tensors in graph order, exchangeable ones together."""
        last: dict[str, int] = {}
        for a in sorted(self.at):
            name = self.sym.axes[a].tensor
            last[name] = min(a, last.get(name, a))
        stages: dict[str, list[str]] = {}
        for name in last:
            stages.setdefault(self.sym.first_twin(name), []).append(name)
        return sorted(stages.values(), key=lambda names: max(last[n] for n in names))

    def solved(self, params: Params) -> Tensor:
        """Return the signs of one network."""
        system: dict[int, Equation] = {}
        for names in self.stages():
            every = [w for n in names if n in params for w in self._weights(n, params[n], system)]
            for _, equation in sorted(every, key=lambda weight: -weight[0]):
                left = _reduced(equation, system)
                unit = next((k for k in left if k != _NEGATIVE), None)
                if unit is not None:
                    system[unit] = left
        signs = torch.ones(self.units, dtype=torch.float64)
        for unit, equation in reversed(system.items()):  # the later ones are in none before them
            others = [k for k in equation if k not in (unit, _NEGATIVE)]
            signs[unit] = signs[others].prod() * (-1 if _NEGATIVE in equation else 1)
        return signs

    def _weights(
        self, name: str, w: Tensor, system: dict[int, Equation]
    ) -> Iterator[tuple[float, Equation]]:
        """Yield the largest of the weights that flip together, and its sign equation."""
        axes = [a for a in self.sym.axes_of[name] if a in self.at]
        equations = [Equation()]
        kinds = torch.zeros((), dtype=torch.long)
        for a in axes:
            different: dict[Equation, int] = {}
            left = [_reduced(equation, system) for equation in self.at[a]]
            index = [different.setdefault(equation, len(different)) for equation in left]
            spread = self.sym.axes[a].spread(torch.tensor(index), w.shape)
            kinds = kinds * len(different) + spread
            equations = [first ^ second for first in equations for second in different]
        if not any(equation - {_NEGATIVE} for equation in equations):
            return
        kinds = kinds.expand(w.shape).to(w.device).flatten()
        flat, zeros = w.detach().flatten().double(), w.new_zeros(len(equations)).double()
        up, down = (zeros.scatter_reduce(0, kinds, s * flat, "amax") for s in (1, -1))
        size = torch.maximum(up, down)
        tied = (up - down).abs() <= _ROUNDING * torch.finfo(w.dtype).eps * size.max()
        sizes, least = torch.where(tied, 0, size).tolist(), _TINY * float(size.max())
        for equation, largest, negative in zip(equations, sizes, (up < down).tolist(), strict=True):
            if largest > least and equation - {_NEGATIVE}:
                yield largest, equation ^ {_NEGATIVE} if negative else equation


def _reduced(equation: Equation, equations: dict[int, Equation]) -> Equation:
    """Reduce an equation by earlier ones, whose leading units later ones do not contain."""
    while (unit := next((k for k in equation if k in equations), None)) is not None:
        equation = equation ^ equations[unit]
    return equation
