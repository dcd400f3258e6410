"""The base of samplers that look at the energy of all the data, chain by chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from weightsym.devices import precise

__all__ = ["EnergySampler"]


class EnergySampler(torch.optim.Optimizer):
    """A torch optimizer whose step is a transition of many chains, of several gradients each.

    The first dimension of every parameter counts chains. ``step(closure)`` needs a closure that
    sets the gradients and returns the energies, one for each chain: the negative log posterior of
    all data, not of a mean. Everything that changes lives in the parameter group and the state, so
    that a resumed run draws what the uninterrupted one would have drawn.

    Args:
        params: parameters, of one group.
        defaults: settings of the group.

    >>> from lightning_bnn.samplers import HMC
    >>> chains = torch.nn.Parameter(torch.tensor([[0.0, 1.0], [2.0, 2.0]]))
    >>> def closure():
    ...     energies = chains.square().sum(1) / 2
    ...     chains.grad = torch.autograd.grad(energies.sum(), chains)[0]
    ...     return energies
    >>> HMC([chains]).energies(closure)
    tensor([0.5000, 4.0000], dtype=torch.float64)
    """

    elementwise = True

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        if len(self.param_groups) != 1:
            raise ValueError("`params` must be one group: a trajectory moves all of them.")

    def moving(self) -> list[Tensor]:
        """Parameters that the chains move."""
        return [p for p in self.param_groups[0]["params"] if p.requires_grad]

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


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
