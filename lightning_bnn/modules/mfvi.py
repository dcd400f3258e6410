"""Mean-field variational inference under a trainer."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_bnn import methods
from lightning_bnn.methods.mfvi import KL, Initialisation, InitStd
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.posteriors.perturbations import Reparameterisation

__all__ = ["MFVI"]


class MFVI(Bayesian):
    r"""A diagonal Gaussian over the weights of any network; with members, a mixture of them.

    .. math:: L = E_q\Big[-\frac{1}{B} \sum_i \log p(y_i | x_i, \omega)\Big]
        + \frac{1}{N} \big(E_q[-\log p(\omega)] - T H(q)\big)

    Complexity terms are sums over weights; at T = 1 they are the KL divergence. Weights that do not
    require gradients stay fixed.

    Args:
        network: gives the computation and the first means; it is copied, not changed.
        prior_std: standard deviation of the Gaussian prior.
        prior: another prior: a module with ``log_prob(params, names, stacked)``.
        init_std: standard deviation of all weights at the start; ``"auto"`` lets five candidates
            race for a hundred steps on the first training batches when a fit begins.
        initialisation: where means start: at the weights of the ``"network"``, or as BLiTZ does
            (``"blitz"``: means from N(0, 0.1^2), deviations softplus(-7), of convolutions
            softplus(-6); ``init_std`` is not used).
        elbo_samples: weight samples of every step.
        temperature: T, of the tempered posterior.
        kl_weight: multiplies all complexity terms, a departure from Bayes.
        kl: ``"closed"`` form, or ``"sampled"`` with the weights of the step.
        reparameterisation: noise in ``"weight"`` space, the same for a batch, or for every example,
            ``"local"`` or ``"flipout"`` (networks then run one by one).
        kl_warmup: so many epochs at the start, in which all complexity terms count less, linearly
            from nothing; the ``elbo`` that is logged is the whole one.
        **kwargs: what every module takes, see `Bayesian`.

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

    def __init__(
        self,
        network: nn.Module,
        prior_std: float = 1.0,
        prior: nn.Module | None = None,
        init_std: InitStd = 0.01,
        initialisation: Initialisation = "network",
        elbo_samples: int = 1,
        temperature: float = 1.0,
        kl_weight: float = 1.0,
        kl: KL = "closed",
        reparameterisation: Reparameterisation = "weight",
        kl_warmup: int | float = 0,
        **kwargs: Any,
    ) -> None:
        method = methods.MFVI(
            prior_std, prior, init_std, initialisation, elbo_samples, temperature, kl_weight, kl,
            reparameterisation, kl_warmup,
        )  # fmt: skip
        super().__init__(network=network, method=method, **kwargs)
