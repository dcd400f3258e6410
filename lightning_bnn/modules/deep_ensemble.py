"""Deep ensembles under a trainer."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_bnn import methods
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian

__all__ = ["DeepEnsemble"]


class DeepEnsemble(Bayesian):
    r"""Several networks, each at a maximum of the posterior (of the likelihood without a prior).

    .. math:: L_m = -\frac{1}{B} \sum_i \log p(y_i | x_i, \omega_m) - \frac{1}{N} \log p(\omega_m)

    With ``members=1`` it is ordinary training. The state dict has the names of the network, with a
    leading member dimension.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many networks.
        **kwargs: of the method, see `lightning_bnn.methods.DeepEnsemble`, and of every module, see
            `Bayesian`.

    References:
        | Simple and Scalable Predictive Uncertainty Estimation (Lakshminarayanan et al., 2017)
        | https://arxiv.org/abs/1612.01474

    >>> import torch
    >>> from lightning_bnn.models import mlp
    >>> ensemble, x = DeepEnsemble(mlp(2, [8], 3), members=4), torch.randn(5, 2)
    >>> members = torch.stack([ensemble.member(k)(x).softmax(-1) for k in range(4)])
    >>> torch.allclose(ensemble(x), members.mean(0), atol=1e-5)
    True
    """

    networks: nn.Module

    arguments = staticmethod(joint_arguments(methods.DeepEnsemble, Bayesian))

    def __init__(self, network: nn.Module, members: int = 5, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))
