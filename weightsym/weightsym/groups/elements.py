"""Parts of elements, by kind of group: the identity, random ones, and products of permutations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weightsym.groups.axis_maps import take_along_last
from weightsym.groups.placements import LinearGroup, complex_matrices
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_symmetries
from weightsym.params import Params


def identity(sym: Symmetries, device: torch.device | str | None = None) -> list[Tensor]:
    """The permutations that leave every unit where it is.

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
    """Uniform permutations, independent for every member.

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
    r"""Log-normal scales, whose logarithm has the standard deviation ``spread``.

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
    """Fair coin flips: plus or minus one for every unit.

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
    """The matrices that mix nothing, of one network or of every member of a stack.

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
    r"""Random matrices of every group, whose log singular values have the deviation ``spread``.

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
    r"""Standard normal shifts of every group.

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


# ------------------------------------------------------------ products and inverses
def compose(first: Sequence[Tensor], second: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    r"""One element that does what ``first`` and then ``second`` do.

    .. math:: r(k) = p(q(k)) \quad \text{for } p \text{ and then } q

    Either may have a member dimension.

    >>> from torch import nn
    >>> from weightsym import compose, discover
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> compose([torch.tensor([1, 2, 0])], [torch.tensor([1, 0, 2])], sym)
    [tensor([2, 1, 0])]
    """
    return _by_member(_compose, sym, first, second)


def invert(permutations: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    r"""The element that undoes another one, with a member dimension if that has one.

    .. math:: p^{-1}(p(k)) = k

    >>> from torch import nn
    >>> from weightsym import compose, discover, invert, random_permutations
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> p = random_permutations(sym)
    >>> compose(p, invert(p, sym), sym)
    [tensor([0, 1, 2, 3, 4]), tensor([0, 1, 2, 3])]
    """
    return _by_member(_invert, sym, permutations)


def _by_member(
    act: Callable[..., list[Tensor]], sym: Symmetries, *elements: Sequence[Tensor]
) -> list[Tensor]:
    """The result for every member by itself, where blocks carry groups that differ by member."""
    members = next((len(p) for element in elements for p in element if p.ndim == 2), None)
    if members is None or not homes(sym):
        return act(sym, *elements)
    each = ([[p[m] if p.ndim == 2 else p for p in e] for e in elements] for m in range(members))
    every = [act(sym, *of_member) for of_member in each]
    return [torch.stack(rows) for rows in zip(*every, strict=True)]


def _compose(sym: Symmetries, first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    inside = homes(sym)
    result: list[Tensor] = list(first)
    for g, after in enumerate(second):
        standing = standing_at(g, first, sym, inside)
        result[standing] = take_along_last(first[standing], after)
    return result


def _invert(sym: Symmetries, permutations: Sequence[Tensor]) -> list[Tensor]:
    inside = homes(sym)
    return [
        permutations[standing_at(g, permutations, sym, inside)].argsort(-1)
        for g in range(len(permutations))
    ]


def homes(sym: Symmetries) -> dict[int, tuple[int, int, int]]:
    """Of every group inside a block: the group of blocks, its row there, the block."""
    return {
        member: (g, k, slot)
        for g, group in enumerate(sym.permutations)
        for k, row in enumerate(group.inner)
        for slot, member in enumerate(row)
    }


def standing_at(
    group: int,
    permutations: Sequence[Tensor],
    sym: Symmetries,
    inside: dict[int, tuple[int, int, int]],
) -> int:
    """The group whose units stand in the places of another one after blocks have moved.

    ``inside`` is what `homes` returns.
    """
    if group not in inside:
        return group
    home, row, slot = inside[group]
    blocks = standing_at(home, permutations, sym, inside)
    return sym.permutations[blocks].inner[row][int(permutations[blocks][slot])]
