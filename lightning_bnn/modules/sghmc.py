"""Chains of a stochastic-gradient sampler under a trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_bnn import methods, samplers
from lightning_bnn.methods.kept_networks import KeptNetworks
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.modules.kept_in_bank import keeping

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
        prior_std: standard deviation of a Gaussian prior over all weights; None leaves it to
            ``prior_precision`` or ``weight_decay`` of the sampler.
        optimizer: makes the sampler, given parameters.
        burn_in: nothing is kept of the first so many steps (or epochs).
        every_n_steps: how often the members are kept, in steps.
        every_n_epochs: the same in epochs; by default after each.
        bank: folder to keep them in, instead of in memory and in the checkpoints.
        max_loss: members above it are left out, see `DeepEnsemble`.
        restarts: how often a member that has diverged begins anew, see `DeepEnsemble`.
        **kwargs: what every module takes, see `Bayesian`.

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

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        prior_std: float | None = 1.0,
        optimizer: OptimizerCallable = samplers.SGHMC,
        burn_in: int = 0,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        bank: str | None = None,
        max_loss: float | None = None,
        restarts: int = 0,
        **kwargs: Any,
    ) -> None:
        method = methods.SGMCMC(
            prior_std, keeping(burn_in, every_n_steps, every_n_epochs, bank), max_loss=max_loss,
            restarts=restarts,
        )  # fmt: skip
        super().__init__(
            network=network, method=method, members=members, optimizer=optimizer, **kwargs
        )
