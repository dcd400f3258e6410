"""Monte Carlo dropout under a trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_bnn import methods
from lightning_bnn.methods.dropout_layers import with_dropout
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian

__all__ = ["MCDropout"]


class MCDropout(Bayesian):
    r"""A network with dropout that goes on when it predicts; with members, several such networks.

    .. math:: p(y | x) = \frac1S \sum_s p(y | x, \omega, z_s), \quad z_s \sim \text{dropout}

    Dropout is that of the network, modules and functions alike, or it is put into it with ``p``.
    Nothing else is active in evaluation: BatchNorm uses its statistics.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many networks.
        p: put dropout of this rate before linear layers of a network that has none.
        **kwargs: of the method, see `lightning_bnn.methods.MCDropout`, and of every module, see
            `Bayesian`.

    References:
        | Dropout as a Bayesian Approximation (Gal and Ghahramani, 2016)
        | https://arxiv.org/abs/1506.02142

    >>> import torch
    >>> from lightning_bnn.models import mlp
    >>> module, x = MCDropout(mlp(2, [8], 3), p=0.5, eval_samples=10), torch.randn(5, 2)
    >>> outputs = module.outputs([x])
    >>> outputs.shape, bool((outputs.std(0) > 0).any())
    (torch.Size([10, 5, 3]), True)
    """

    networks: nn.Module

    arguments = staticmethod(joint_arguments(methods.MCDropout, Bayesian))

    def __init__(
        self, network: nn.Module, members: int = 1, p: float | None = None, **kwargs: Any
    ) -> None:
        given = network if p is None else with_dropout(network, p, kwargs.get("layers", "all"))
        super().__init__(network=given, members=members, **self.arguments(**kwargs))
        if any(isinstance(m, nn.RNNBase) and m.dropout > 0 for m in self.template.modules()):
            rank_zero_warn("Dropout inside recurrent layers stays off in predictions.")
