"""The average over many networks as one plain module, to be exported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from lightning_bnn import params as P
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.params import Params

__all__ = ["Predictive"]


class Predictive(nn.Module):
    r"""Runs every network of a stack and averages what the likelihood makes of the outputs.

    .. math:: p(y | x) = \frac1S \sum_s p(y | x, \omega_s)

    Args:
        template: gives the computation.
        networks: a stack.
        likelihood: turns outputs ``(samples, batch, ...)`` into a prediction.

    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> ensemble, x = DeepEnsemble(mlp(2, [8], 3), members=4), torch.randn(5, 2)
    >>> plain = ensemble.predictive()
    >>> type(plain).__name__, torch.allclose(plain(x), ensemble(x), atol=1e-5)
    ('Predictive', True)
    """

    template: nn.Module
    likelihood: Likelihood

    def __init__(self, template: nn.Module, networks: Params, likelihood: nn.Module) -> None:
        super().__init__()
        self.networks = P.stacked_copy(template, networks).requires_grad_(False)
        self.__dict__["template"] = copy.deepcopy(template).eval()
        self.likelihood = cast(Likelihood, copy.deepcopy(likelihood))
        self.eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The template may hold tensors that no state dict names."""
        self.template._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        members = P.unstack({name: t.detach() for name, t in P.of(self.networks).items()})
        outputs = [functional_call(self.template, member, inputs, named) for member in members]
        return self.likelihood.predictive(
            tree_map(lambda *t: torch.stack(t) if isinstance(t[0], Tensor) else t[0], *outputs)
        )
