"""A distribution over the weights of a network: draw networks from it, predict with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.params import Params

__all__ = ["Posterior", "check_count"]


class Posterior(nn.Module, ABC):
    """What every posterior can do. It moves, saves and loads as a module does."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """A stack of n networks.

        Args:
            n: how many.
            generator: makes the draw repeatable; by default the global random state.
        """

    def predict(
        self,
        model: nn.Module,
        x: Any,
        n: int,
        generator: torch.Generator | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Outputs of n sampled networks, ``(n, batch, ...)``.

        Args:
            model: gives the computation.
            x: the input.
            n: how many networks.
            generator: makes the draw repeatable.
            chunk_size: networks that run at once, see `lightning_bnn.params.apply`.
        """
        return P.apply(model, self.sample(n, generator), x, chunk_size=chunk_size)

    def log_prob(self, params: Params) -> Tensor:
        """Log-density of every network of a stack, where the posterior has one."""
        raise NotImplementedError(f"{type(self).__name__} has no density.")


def check_count(n: int, available: int | None = None) -> None:
    """A number of networks that can be drawn."""
    if n < 1 or (available is not None and n > available):
        limit = f" and at most {available}, the networks there are" if available else ""
        raise ValueError(f"`n` must be at least 1{limit}, got {n}.")
