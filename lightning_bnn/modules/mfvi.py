"""Mean-field variational inference under a trainer."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_bnn import methods
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian

__all__ = ["MFVI"]


class MFVI(Bayesian):
    r"""A diagonal Gaussian over the weights of any network; with members, a mixture of them.

    .. math:: L = E_q\Big[-\frac{1}{B} \sum_i \log p(y_i | x_i, \omega)\Big]
        + \frac{1}{N} \big(E_q[-\log p(\omega)] - T H(q)\big)

    Complexity terms are sums over weights; at T = 1 they are the KL divergence. Weights that do not
    require gradients stay fixed.

    Args:
        network: gives the computation and the first means; it is copied, not changed.
        members: how many Gaussians, one for each mode that is found.
        **kwargs: of the method, see `lightning_bnn.methods.MFVI`, and of every module, see
            `Bayesian`.

    References:
        | Weight Uncertainty in Neural Networks (Blundell et al., 2015)
        | https://arxiv.org/abs/1505.05424

    >>> from lightning_bnn.models import mlp
    >>> module = MFVI(mlp(2, [8], 3), init_std=0.1)
    >>> deviations = module.posterior().sample(2000)["1.weight"].std(0)
    >>> bool(((deviations - 0.1).abs() < 0.02).all())
    True
    """

    mean: nn.Parameter
    log_std: nn.Parameter

    arguments = staticmethod(joint_arguments(methods.MFVI, Bayesian))

    def __init__(self, network: nn.Module, members: int = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))
