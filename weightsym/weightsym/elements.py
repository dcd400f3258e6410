"""Elements of the group: the identity, and random permutations, scales and signs."""

from __future__ import annotations

import torch
from torch import Tensor

from weightsym.groups import Symmetries

__all__ = ["identity", "random_permutations", "random_scales", "random_signs"]


def identity(sym: Symmetries, device: torch.device | str | None = None) -> list[Tensor]:
    """The permutations that leave every unit where it is.

    >>> from torch import nn
    >>> from weightsym import discover, identity
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> identity(discover(net, torch.randn(8, 2)))
    [tensor([0, 1, 2, 3]), tensor([0, 1, 2])]
    """
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
    shape = () if members is None else (members,)
    return [torch.randint(0, 2, (*shape, g.units), generator=generator) * 2 - 1 for g in sym.signs]
