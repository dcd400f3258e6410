"""The base of samplers that use the energy of all the data, chain by chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.samplers.sampler import Sampler
from weightsym.params import Field, check_positive, precise

__all__ = ["EnergySampler"]


class EnergySampler(Sampler):
    """A torch optimizer whose step is a transition of many chains with several gradients each.

    The first dimension of every parameter counts chains. ``step(closure)`` needs a closure that
    sets the gradients and returns the energies, one for each chain: the negative log posterior of
    all data, not of a mean.

    Args:
        params: parameters, of one group.
        **settings: of the group.

    Attributes:
        field: computes energies and gradients instead of the closure, if set.

    >>> from lightning_bnn.samplers import HMC
    >>> chains = torch.nn.Parameter(torch.tensor([[0.0, 1.0], [2.0, 2.0]]))
    >>> def closure():
    ...     energies = chains.square().sum(1) / 2
    ...     chains.grad = torch.autograd.grad(energies.sum(), chains)[0]
    ...     return energies
    >>> HMC([chains]).energies(closure)
    tensor([0.5000, 4.0000], dtype=torch.float64)
    """

    field: Field | None = None

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        check_positive("temperature", settings["temperature"])
        super().__init__(params, **settings)
        if len(self.param_groups) != 1:
            raise ValueError("`params` must be one group, since a trajectory moves all of them.")

    def moving(self) -> list[Tensor]:
        """Return the parameters that the chains move."""
        return [p for p in self.param_groups[0]["params"] if p.requires_grad]

    def rows(self) -> Tensor:
        """Return one vector of all entries for each chain."""
        return as_rows(self.moving())

    def put(self, rows: Tensor) -> None:
        """Set the positions of the chains.

        Args:
            rows: positions, ``(chains, numbers)``.
        """
        params = self.moving()
        pieces = rows.split([p[:1].numel() for p in params], 1)
        shaped = [piece.view_as(p) for piece, p in zip(pieces, params, strict=True)]
        torch._foreach_copy_(params, shaped)

    def look(self, closure: Callable[[], Tensor] | None, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the energies at given positions, and their gradients.

        Args:
            closure: see `energies`.
            rows: positions, ``(chains, numbers)``.
        """
        if self.field is not None:
            return self.field.look(rows)
        self.put(rows)
        energies = self.energies(closure)
        return energies, as_rows(self.gradients())

    def slope(self, closure: Callable[[], Tensor] | None, rows: Tensor) -> Tensor:
        """Return the gradients alone, see `look`."""
        return self.look(closure, rows)[1] if self.field is None else self.field.slope(rows)

    def leapfrog(
        self,
        closure: Callable[[], Tensor] | None,
        x: Tensor,
        momenta: Tensor,
        steps: int,
        size: float,
        kick: float,
    ) -> None:
        """Take leapfrog steps: alternate updates of momenta and positions.

        Args:
            closure: see `energies`.
            x: positions, ``(chains, numbers)``, changed in place.
            momenta: of the same shape, changed in place.
            steps: number of steps.
            size: factor of momenta.
            kick: factor of gradients.
        """
        if self.field is not None:
            self.field.leapfrog(x, momenta, steps, size, kick)
            return
        for _ in range(steps):
            momenta.add_(self.slope(closure, x), alpha=kick)
            x.add_(momenta, alpha=size)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the moving parameters, zero if a closure has set none."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.moving()]

    def energies(self, closure: Callable[[], Tensor] | None) -> Tensor:
        """Return the energies of the chains in double precision, and set the gradients.

        Args:
            closure: sets the gradients and returns the energies, ``(chains,)``.
        """
        if closure is None:
            raise ValueError("`closure` must be given, since a transition needs many gradients.")
        with torch.enable_grad():
            energies = closure()
        chains = {p.shape[:1] for p in self.param_groups[0]["params"]}
        if not isinstance(energies, Tensor) or chains != {energies.shape}:
            raise ValueError(
                "`closure` must return one energy for each chain, and the first dimension of every "
                f"parameter must count chains: got {_shape(energies)} for parameters that begin "
                f"with {sorted(map(tuple, chains))}. The modules HMC and MILE do so for any "
                "network."
            )
        return precise(energies.detach())


def as_rows(tensors: Iterable[Tensor]) -> Tensor:
    """Flatten tensors to one vector for each chain.

    Args:
        tensors: with a leading dimension of chains.
    """
    return torch.cat([t.detach().reshape(len(t), -1) for t in tensors], 1)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
