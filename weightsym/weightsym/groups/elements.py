"""Parts of elements by kind of group: identities, random values, and the orders of an element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from weightsym.groups.axis_maps import AxisMap
from weightsym.groups.placements import LinearGroup, Placement, complex_matrices
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_symmetries
from weightsym.params import Params


def identity(sym: Symmetries, device: torch.device | str | None = None) -> list[Tensor]:
    """Return the identity permutations.

    >>> from torch import nn
    >>> from weightsym import discover, identity
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> identity(discover(net, torch.randn(8, 2)))
    [tensor([0, 1, 2, 3]), tensor([0, 1, 2])]
    """
    check_symmetries(sym)
    return [torch.arange(g.units, device=device) for g in sym.permutations]


def random_permutations(
    sym: Symmetries, generator: torch.Generator | None = None, members: int | None = None
) -> list[Tensor]:
    """Draw uniform permutations, independently for every member.

    >>> from torch import nn
    >>> from weightsym import discover, random_permutations
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> first, second = random_permutations(sym, torch.Generator().manual_seed(0), members=10)
    >>> first.shape, second.shape
    (torch.Size([10, 4]), torch.Size([10, 3]))
    >>> bool((first.sort(-1).values == torch.arange(4)).all())
    True
    """
    check_symmetries(sym)
    shape = () if members is None else (members,)
    return [torch.rand(*shape, g.units, generator=generator).argsort(-1) for g in sym.permutations]


def random_scales(
    sym: Symmetries,
    generator: torch.Generator | None = None,
    members: int | None = None,
    spread: float = 0.5,
) -> list[Tensor]:
    r"""Draw log-normal scales, whose logarithm has the standard deviation ``spread``.

    .. math:: \log s_u \sim \mathcal{N}(0, \sigma^2)

    >>> from torch import nn
    >>> from weightsym import discover, random_scales
    >>> net = nn.Sequential(nn.Linear(2, 500), nn.ReLU(), nn.Linear(500, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> (scales,) = random_scales(sym, torch.Generator().manual_seed(0), members=20, spread=0.3)
    >>> scales.shape, round(scales.log().std().item(), 1)
    (torch.Size([20, 500]), 0.3)
    """
    check_symmetries(sym)
    shape = () if members is None else (members,)
    return [
        (spread * torch.randn(*shape, g.units, generator=generator, dtype=torch.float64)).exp()
        for g in sym.scalings
    ]


def random_signs(
    sym: Symmetries, generator: torch.Generator | None = None, members: int | None = None
) -> list[Tensor]:
    """Draw a fair sign, plus or minus one, for every unit.

    >>> from torch import nn
    >>> from weightsym import discover, random_signs
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> (signs,) = random_signs(sym, torch.Generator().manual_seed(0), members=100)
    >>> signs.shape, signs.unique().tolist()
    (torch.Size([100, 3]), [-1, 1])
    """
    check_symmetries(sym)
    shape = () if members is None else (members,)
    return [torch.randint(0, 2, (*shape, g.units), generator=generator) * 2 - 1 for g in sym.signs]


# ------------------------------------------------------------ matrices and shifts
def identity_mixings(sym: Symmetries, stack: Params | None = None) -> list[Tensor]:
    """Return identity matrices for one network or for every member of a stack.

    >>> from weightsym import discover, identity_mixings
    >>> adapter = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> identity_mixings(discover(adapter, torch.randn(8, 4)))[0].tolist()
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    check_symmetries(sym)
    single = [torch.eye(g.size, dtype=torch.float64).repeat(g.spaces, 1, 1) for g in sym.linear]
    if stack is None:
        return single
    like = next(iter(stack.values()))
    return [m.to(like).repeat(len(like), 1, 1, 1) for m in single]


def random_mixings(
    sym: Symmetries,
    generator: torch.Generator | None = None,
    members: int | None = None,
    spread: float = 0.3,
) -> list[Tensor]:
    r"""Draw matrices for every group, whose log singular values have the deviation ``spread``.

    .. math:: G = Q_1\, \mathrm{diag}(e^{\sigma z})\, Q_2, \quad z \sim N(0, 1)

    Rotations and reflections are uniform.

    >>> from weightsym import discover, random_mixings
    >>> norm = torch.nn.RMSNorm(3, elementwise_affine=False)
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), norm, torch.nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> (turn,) = random_mixings(sym, torch.Generator().manual_seed(0))
    >>> sym.linear[0].kind, turn.shape
    ('orthogonal', torch.Size([1, 3, 3]))
    >>> torch.allclose(turn @ turn.mT, torch.eye(3, dtype=torch.float64))
    True
    """
    check_symmetries(sym)
    if not 0 <= spread < float("inf"):
        raise ValueError(f"`spread` must be at least 0 and finite, got {spread}.")
    lead = () if members is None else (members,)
    return [_random(g, (*lead, g.spaces), generator, spread) for g in sym.linear]


def _random(
    group: LinearGroup, shape: Sequence[int], generator: torch.Generator | None, spread: float
) -> Tensor:
    n = group.size
    if group.kind in ("complex", "unit complex"):
        return _random_complex(group, shape, generator, spread)
    turned = group.lifted(_rotations(shape, group.basis.shape[1], generator))
    if group.kind != "general":
        return turned
    logs = torch.randn(*shape, n, generator=generator, dtype=torch.float64)
    return turned * (spread * logs).exp()[..., None, :] @ _rotations(shape, n, generator)


def _rotations(shape: Sequence[int], n: int, generator: torch.Generator | None) -> Tensor:
    normal = torch.randn(*shape, n, n, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def _random_complex(
    group: LinearGroup, shape: Sequence[int], generator: torch.Generator | None, spread: float
) -> Tensor:
    angle = 2 * torch.pi * torch.rand(*shape, generator=generator, dtype=torch.float64)
    size = torch.ones(())
    if group.kind == "complex":
        size = (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).exp()
    return complex_matrices(size * angle.cos(), size * angle.sin())


def random_shifts(
    sym: Symmetries, generator: torch.Generator | None = None, members: int | None = None
) -> list[Tensor]:
    r"""Draw standard normal shifts for every group.

    .. math:: c \sim \mathcal{N}(0, 1)

    >>> from weightsym import discover, random_shifts
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 4))
    >>> (c,) = random_shifts(discover(net, torch.randn(8, 4)), members=5)
    >>> c.shape
    torch.Size([5, 2])
    """
    check_symmetries(sym)
    lead = () if members is None else (members,)
    return [
        torch.randn(*lead, group.size, generator=generator, dtype=torch.float64)
        for group in sym.shifts
    ]


# ------------------------------------------------------------ orders of an element
Axes = Mapping[int, AxisMap]
Sources = Mapping[str, str | tuple[str, ...]]


def orders_of(sym: Symmetries, axes: Axes, sources: Sources, members: int) -> list[Tensor]:
    """Return the orders of the units of every group ``(members, units)``, from the maps of axes.

    What stands in the places of a group may come from another one, if blocks have moved: the unit
    at a place tells which, and the order is that of the group where it comes from.

    Args:
        sym: what `discover` returned.
        axes: what happens to each.
        sources: by name the tensor that comes to its place.
        members: the number of networks.
    """
    orders = [torch.arange(g.units).repeat(members, 1) for g in sym.permutations]
    for together in _exchangeable_groups(sym):
        owners = _Owners(sym, axes, sources, together)
        for g in together if owners.moved else ():
            groups, units = owners.standing(g, members)
            for k in groups.unique().tolist():
                rows = groups == k
                orders[k][rows] = units[rows]
    return orders


def _exchangeable_groups(sym: Symmetries) -> list[list[int]]:
    """Collect the groups that blocks exchange with each other."""
    together = {g: [g] for g in range(len(sym.permutations))}

    def join(groups: Sequence[int]) -> None:
        every = list(dict.fromkeys(g for k in groups for g in together[k]))
        together.update(dict.fromkeys(every, every))

    for b in reversed(range(len(sym.permutations))):  # larger blocks first
        for rows in zip(*(sym.permutations[c].inner for c in together[b]), strict=True):
            join([g for row in rows for g in row])
    return list({id(groups): groups for groups in together.values()}.values())


class _Owners:
    """The units of some groups by their positions before an element moves them."""

    def __init__(
        self, sym: Symmetries, axes: Axes, sources: Sources, groups: Sequence[int]
    ) -> None:
        self.sym, self.axes, self.sources, self.groups = sym, axes, sources, groups
        first = sym.permutations[groups[0]]
        self.whole = bool(first.tensors)  # units are tensors that change places
        every = range(len(first.placements))
        self.number = next((i for i in every if not first.placements[i].meets_itself), 0)

    @property
    def moved(self) -> bool:
        """True if anything has moved at the positions of the units."""
        if self.sources or self.whole:
            return bool(self.sources)
        places = (self._place(g).axis for g in self.groups)
        return any(self._origins(a) is not None for a in dict.fromkeys(places))

    def standing(self, group: int, members: int) -> tuple[Tensor, Tensor]:
        """Return the group that replaces a given one, and its units there, for every member."""
        if self.whole:
            row = self.sym.permutations[group].tensors[0]
            pairs = [
                [self._of_tensors[self._source(name, m)] for name in row] for m in range(members)
            ]
            every = torch.tensor(pairs)
            return every[:, 0, 0], every[..., 1]
        placement = self._place(group)
        name, positions = self.sym.axes[placement.axis].tensor, placement.positions[:, 0]
        index = self._origins(placement.axis)
        origins = positions if index is None else index[..., positions]
        origins = origins.expand(members, -1)
        source = self.sources.get(name, name)
        if isinstance(source, str):
            every = self._table(self.sym.twin(placement.axis, source))[origins]
        else:
            axes = (self.sym.twin(placement.axis, s) for s in source)
            every = torch.stack([self._table(a)[p] for a, p in zip(axes, origins, strict=True)])
        return every[:, 0, 0], every[..., 1]

    def _source(self, name: str, member: int) -> str:
        source = self.sources.get(name, name)
        return source if isinstance(source, str) else source[member]

    def _place(self, group: int) -> Placement:
        return self.sym.permutations[group].placements[self.number]

    @cached_property
    def _of_tensors(self) -> dict[str, tuple[int, int]]:
        rows = [(g, row) for g in self.groups for row in self.sym.permutations[g].tensors]
        return {name: (g, unit) for g, row in rows for unit, name in enumerate(row)}

    def _table(self, axis: int) -> Tensor:
        """Return the group and unit of every position of an axis."""
        table = torch.full((self.sym.axes[axis].length, 2), -1)
        for g in self.groups:
            places = self.sym.permutations[g].placements
            first = places[: self.number + 1]  # its own place counts where several meet
            for placement in (p for p in (*places, *first) if p.axis == axis):
                units = torch.arange(len(placement.positions))[:, None].expand(
                    placement.positions.shape
                )
                table[placement.positions] = torch.stack([torch.full_like(units, g), units], -1)
        return table

    def _origins(self, a: int) -> Tensor | None:
        """Return the old position of every new one on an axis, with the block moves of its rows."""
        index = self._index(a)
        axis, rows = self.sym.axes[a], self.sym.rows_of_blocks(a)
        moving = None if rows is None else self._index(rows)
        if moving is None:
            return index
        each = moving.shape[-1] // axis.blocks
        block = moving[..., ::each].div(each, rounding_mode="floor")
        inside = torch.arange(axis.length) if index is None else index
        return block.repeat_interleave(axis.size, -1) * axis.size + inside % axis.size

    def _index(self, a: int) -> Tensor | None:
        index = self.axes[a].monomial.index if a in self.axes else None
        return None if index is None else index.cpu()
