"""The order of the units of all groups as one matrix, in few kernels per training step.

Groups are padded to the longest with units that never move, which count neither as inversions nor
as transpositions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from weightsym.forms.counting import inversions, transpositions
from weightsym.forms.sorting import SortKey, sort_permutations
from weightsym.groups.symmetries import PermutationGroup, Symmetries
from weightsym.groups.units import Statistic, statistic, writer
from weightsym.params import Params

_STATISTICS: tuple[Statistic, ...] = ("max", "mean", "median", "norm")


class OrderChange(NamedTuple):
    """The change of the order of units in every group.

    >>> from weightsym import order_change
    >>> reversed_ = order_change(torch.tensor([0, 1, 2]), torch.tensor([2, 1, 0]), torch.tensor(3))
    >>> reversed_.tau.item(), round(reversed_.moved.item(), 3)
    (-1.0, 0.667)
    """

    tau: Tensor
    moved: Tensor


class UnitOrders:
    """Sorts the units of all groups of a network, or of every member of a stack.

    Args:
        sym: result of `discover`.
        by: sorting key of the units, see `sort_permutations`.

    >>> from weightsym import params as P
    >>> from weightsym import discover
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> orders = UnitOrders(discover(net, torch.randn(1, 2)))
    >>> orders.names, orders(P.of(net)).shape
    (('0.weight',), torch.Size([1, 3]))
    """

    def __init__(self, sym: Symmetries, by: SortKey = "max") -> None:
        self.check(by)
        self._sym, self._by = sym, by
        places = {k: writer(sym, group) for k, group in enumerate(sym.permutations)}
        self._kept = [k for k, placement in places.items() if placement is not None]
        self._places = [placement for placement in places.values() if placement is not None]
        self.groups: list[PermutationGroup] = [sym.permutations[k] for k in self._kept]
        self.names = tuple(group.name for group in self.groups)
        self.sizes = torch.tensor([group.units for group in self.groups], dtype=torch.int64)
        width = int(self.sizes.max()) if self.groups else 0
        self._shape = (len(self.groups), width)
        self._real = (torch.arange(width) < self.sizes[:, None]).flatten().nonzero()[:, 0]

    @staticmethod
    def check(by: str) -> None:
        """Require a known statistic."""
        if by not in get_args(SortKey):
            raise ValueError(f"`by` must be one of {', '.join(get_args(SortKey))}, got {by!r}.")

    def to(self, device: torch.device | str) -> UnitOrders:
        """Move the index tables to a device."""
        self.sizes, self._real = self.sizes.to(device), self._real.to(device)
        self._places = [replace(p, positions=p.positions.to(device)) for p in self._places]
        return self

    def __call__(self, params: Params) -> Tensor:
        """Return sorting permutations, ``(groups, longest)`` or ``(members, groups, longest)``."""
        return self.sorted(self.keys(params))

    @torch.no_grad()
    def keys(self, params: Params) -> list[Tensor]:
        """Return the sorting keys of the units of every group, ``(..., units)``, for `sorted`."""
        if not self.groups:
            raise ValueError("The network has no permutation symmetry.")
        by = self._by
        if by in _STATISTICS:
            return [statistic(params, self._sym, placement, by) for placement in self._places]
        permutations = sort_permutations(params, self._sym, by)
        return [permutations[k] for k in self._kept]

    def sorted(self, keys: list[Tensor]) -> Tensor:
        """Return sorting permutations from `keys`, of several networks if they are stacked.

        Args:
            keys: of every group.
        """
        if self._by in _STATISTICS:
            matrix = self._matrix(keys, keys[0].new_full(self._shape, -torch.inf))
            return matrix.argsort(dim=-1, descending=True, stable=True)
        units = torch.arange(self._shape[1], device=keys[0].device)
        return self._matrix(keys, units.expand(self._shape))

    def _matrix(self, rows: list[Tensor], padding: Tensor) -> Tensor:
        """Pad rows of different lengths to one matrix, without synchronising the device."""
        flat = torch.cat(rows, -1)
        matrix = padding.flatten().to(flat.dtype).expand(*flat.shape[:-1], -1)
        real = self._real.to(flat.device)
        return matrix.index_copy(-1, real, flat).unflatten(-1, self._shape)


def order_change(before: Tensor, after: Tensor, sizes: Tensor) -> OrderChange:
    r"""Return Kendall's tau between two orders, and the fraction of moved units.

    .. math:: \tau = 1 - \frac{4 D}{n (n - 1)}, \quad D \text{ pairs in another order}

    Args:
        before: sorting permutations ``(..., groups, longest)`` of `UnitOrders`.
        after: sorting permutations of a later step.
        sizes: number of units per group.

    >>> before, after = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 2, 1, 3]])
    >>> change = order_change(before, after, torch.tensor([4]))
    >>> change.tau.item(), change.moved.item()
    (0.6666666666666667, 0.5)
    """
    places = _new_places(before, after)
    units = torch.arange(places.shape[-1], device=places.device)
    pairs = sizes.double() * (sizes - 1)
    return OrderChange(
        1 - 4 * inversions(places) / pairs,
        (places != units).sum(-1) / sizes.double(),
    )


def transpositions_between(before: Tensor, after: Tensor) -> Tensor:
    """Return the minimum number of swaps between two orders, for every group.

    >>> transpositions_between(torch.tensor([[0, 1, 2]]), torch.tensor([[2, 0, 1]]))
    tensor([2])
    """
    return transpositions(_new_places(before, after))


def _new_places(before: Tensor, after: Tensor) -> Tensor:
    """Return for every position in the old order the new position of its unit."""
    places = torch.arange(after.shape[-1], device=after.device).expand_as(after)
    return torch.empty_like(after).scatter_(-1, after, places).gather(-1, before)
