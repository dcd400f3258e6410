"""Elements of the group: the identity, and random permutations, scales and signs."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn.symmetry.groups import Symmetries

__all__ = ["identity", "random_permutations", "random_scales", "random_signs"]


def identity(sym: Symmetries, device: torch.device | str | None = None) -> list[Tensor]:
    """The permutations that leave every unit where it is."""
    return [torch.arange(g.units, device=device) for g in sym.permutations]


def random_permutations(
    sym: Symmetries, generator: torch.Generator | None = None, members: int | None = None
) -> list[Tensor]:
    """Uniform permutations, independent for every member."""
    shape = () if members is None else (members,)
    return [torch.rand(*shape, g.units, generator=generator).argsort(-1) for g in sym.permutations]


def random_scales(
    sym: Symmetries,
    generator: torch.Generator | None = None,
    members: int | None = None,
    spread: float = 0.5,
) -> list[Tensor]:
    """Log-normal scales; ``spread`` is the standard deviation of their logarithm."""
    shape = () if members is None else (members,)
    return [
        (spread * torch.randn(*shape, g.units, generator=generator, dtype=torch.float64)).exp()
        for g in sym.scalings
    ]


def random_signs(
    sym: Symmetries, generator: torch.Generator | None = None, members: int | None = None
) -> list[Tensor]:
    """Fair coin flips: plus or minus one for every unit."""
    shape = () if members is None else (members,)
    return [torch.randint(0, 2, (*shape, g.units), generator=generator) * 2 - 1 for g in sym.signs]
