"""The base of samplers that look at the energy of all the data, chain by chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.samplers.sampler import Sampler
from weightsym.params import Field, check_positive, precise

__all__ = ["EnergySampler"]


class EnergySampler(Sampler):
    """A torch optimizer whose step is a transition of many chains, of several gradients each.

    The first dimension of every parameter counts chains. ``step(closure)`` needs a closure that
    sets the gradients and returns the energies, one for each chain: the negative log posterior of
    all data, not of a mean.

    Args:
        params: parameters, of one group.
        **settings: of the group.

    Attributes:
        field: computes what the closure does, if anything but the closure can.

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
            raise ValueError("`params` must be one group: a trajectory moves all of them.")

    def moving(self) -> list[Tensor]:
        """Parameters that the chains move."""
        return [p for p in self.param_groups[0]["params"] if p.requires_grad]

    def rows(self) -> Tensor:
        """One vector of all numbers for each chain."""
        return as_rows(self.moving())

    def put(self, rows: Tensor) -> None:
        """Send the chains somewhere.

        Args:
            rows: the numbers of every chain, ``(chains, numbers)``.
        """
        params = self.moving()
        pieces = rows.split([p[:1].numel() for p in params], 1)
        shaped = [piece.view_as(p) for piece, p in zip(pieces, params, strict=True)]
        torch._foreach_copy_(params, shaped)

    def look(self, closure: Callable[[], Tensor] | None, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Energies of the chains at given places, and their gradients.

        Args:
            closure: see `energies`.
            rows: the places, ``(chains, numbers)``.
        """
        if self.field is not None:
            return self.field.look(rows)
        self.put(rows)
        energies = self.energies(closure)
        return energies, as_rows(self.gradients())

    def slope(self, closure: Callable[[], Tensor] | None, rows: Tensor) -> Tensor:
        """The gradients alone, see `look`."""
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
        """Change momenta by the gradients and then places by the momenta, several times.

        Args:
            closure: see `energies`.
            x: the places, ``(chains, numbers)``, which are changed.
            momenta: of the same shape, which are changed.
            steps: how many times.
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
        """Gradients of the parameters that move, zero where a closure has set none."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.moving()]

    def energies(self, closure: Callable[[], Tensor] | None) -> Tensor:
        """Energies of the chains where they are, in double precision. The gradients are set, too.

        Args:
            closure: sets the gradients and returns the energies, ``(chains,)``.
        """
        if closure is None:
            raise ValueError("`closure` must be given: a transition needs many gradients.")
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
    """One vector for each chain.

    Args:
        tensors: whose first dimension counts chains.
    """
    return torch.cat([t.detach().reshape(len(t), -1) for t in tensors], 1)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
