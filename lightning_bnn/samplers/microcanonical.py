r"""Microcanonical dynamics of many chains: unit directions that the gradient bends.

.. math:: \dot x = u, \quad \dot u = -(1 - u u^T) \, \nabla U(x) / (d - 1)

References:
    | Microcanonical Hamiltonian Monte Carlo (Robnik et al., 2023)
    | https://arxiv.org/abs/2212.08549
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Place", "bend", "integrate", "refresh"]

_B = 0.1931833275037836
"""Of the splitting of second order whose error is least."""


class Place(NamedTuple):
    """Where chains are, all ``(chains, numbers)`` but the energy.

    Attributes:
        x: positions.
        direction: of unit length.
        energy: ``(chains,)``.
        gradient: of the energy.
    """

    x: Tensor
    direction: Tensor
    energy: Tensor
    gradient: Tensor

    def where(self, chains: Tensor, other: Place) -> Place:
        """These for some chains, the other's for the rest.

        Args:
            chains: which, ``(chains,)``.
            other: of the same chains.
        """
        pick = chains[:, None]
        return Place(
            torch.where(pick, self.x, other.x),
            torch.where(pick, self.direction, other.direction),
            torch.where(chains, self.energy, other.energy),
            torch.where(pick, self.gradient, other.gradient),
        )


def integrate(
    place: Place, sizes: Tensor, look: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Place, Tensor]:
    """One step of the minimal-norm integrator, which takes two gradients, and its energy error.

    Args:
        place: where the chains are.
        sizes: of the steps, ``(chains,)``.
        look: energies and their gradients at given positions.
    """
    half = (sizes / 2).to(place.x.dtype)[:, None]
    direction, first = bend(place.direction, place.gradient, _B * sizes)
    x = place.x + half * direction
    direction, second = bend(direction, look(x)[1], (1 - 2 * _B) * sizes)
    x = x + half * direction
    energy, gradient = look(x)
    direction, third = bend(direction, gradient, _B * sizes)
    error = first + second + third + energy - place.energy
    return Place(x, direction, energy, gradient), error


def bend(direction: Tensor, gradient: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Directions after a time in which the gradient was the same, and what kinetic energy gained.

    Args:
        direction: of unit length, ``(chains, numbers)``.
        gradient: of the energy.
        sizes: how long, ``(chains,)``.
    """
    freedom = gradient.shape[1] - 1
    norm = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64)
    down = -gradient / torch.where(norm > 0, norm, 1.0).to(gradient.dtype)[:, None]
    angle = sizes * norm / freedom
    cosine = (down * direction).sum(1, dtype=torch.float64).clamp(-1, 1)
    fade = (-angle).exp()
    along = (1 - fade) * (1 + fade + cosine * (1 - fade))
    turned = along.to(down.dtype)[:, None] * down + (2 * fade).to(down.dtype)[:, None] * direction
    gain = angle - math.log(2) + ((1 + cosine) + (1 - cosine) * fade.square()).log()
    return torch.nn.functional.normalize(turned, dim=1), freedom * gain


def refresh(direction: Tensor, noise: Tensor, sizes: Tensor, lengths: Tensor) -> Tensor:
    """Directions that forget themselves over some length.

    Args:
        direction: of unit length, ``(chains, numbers)``.
        noise: standard normal numbers.
        sizes: of the step, ``(chains,)``.
        lengths: after which a direction is forgotten.
    """
    variance = torch.expm1(2 * sizes / lengths) / direction.shape[1]
    return torch.nn.functional.normalize(
        direction + variance.sqrt().to(direction.dtype)[:, None] * noise, dim=1
    )
