"""Chains of a stochastic-gradient sampler under a trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_bnn import methods, samplers
from lightning_bnn.methods.kept_networks import KeptNetworks
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian

__all__ = ["SGHMC"]


class SGHMC(Bayesian):
    r"""Samples of the posterior by any sampler of `lightning_bnn.samplers`.

    .. math:: \exp\big(-(N \cdot \mathrm{NLL}(\omega) - \log p(\omega)) / T\big)

    The sampler is the ``optimizer``: `SGHMC` by default, or `SGLD`, `PreconditionedSGLD`. It is
    told N and the prior. With `CyclicalSchedule` (``lr_interval="step"``) networks are kept in the
    sampling parts of its cycles only. Members are chains that start from networks of their own.

    Args:
        network: gives the computation, and where the first chain starts.
        members: how many chains.
        optimizer: makes the sampler, given parameters.
        **kwargs: of the method, see `lightning_bnn.methods.SGMCMC`, and of every module, see
            `Bayesian`.

    References:
        | Stochastic Gradient Hamiltonian Monte Carlo (Chen et al., 2014)
        | https://arxiv.org/abs/1402.4102

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> module = SGHMC(mlp(1, [4], 1), members=2, burn_in=1, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=4, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine())
    >>> module.posterior().size  # of two chains, after the second, third and fourth epoch
    6
    """

    networks: nn.Module
    samples: KeptNetworks

    arguments = staticmethod(joint_arguments(methods.SGMCMC, Bayesian))

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        optimizer: OptimizerCallable = samplers.SGHMC,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            network=network, members=members, optimizer=optimizer, **self.arguments(**kwargs)
        )
