"""Hamiltonian Monte Carlo under a trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_bnn import methods, samplers
from lightning_bnn.methods.kept_networks import KeptNetworks
from lightning_bnn.modules.all_data import leave_out
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.modules.kept_in_bank import keeping

__all__ = ["HMC"]


class HMC(Bayesian):
    r"""Samples of the posterior, exact but for the length of the chains.

    .. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

    Every training step is one transition, with the gradients of all the data; what batch the loader
    gives at that step does not matter, its batch size says how many examples are computed at a
    time. The data are read once, whole and without augmentation. BatchNorm uses the statistics of
    the given network; dropout is refused. Several processes share the data.

    Args:
        network: gives the computation, and where the first chain starts.
        members: how many chains.
        prior_std: standard deviation of a Gaussian prior over all weights.
        optimizer: makes the sampler, given parameters.
        burn_in: nothing is kept of the first so many steps (or epochs).
        every_n_steps: how often the members are kept, in steps.
        every_n_epochs: the same in epochs; by default after each.
        bank: folder to keep them in, instead of in memory and in the checkpoints.
        **kwargs: what every module takes, see `Bayesian`.

    References:
        | What Are Bayesian Neural Network Posteriors Really Like? (Izmailov et al., 2021)
        | https://arxiv.org/abs/2104.14421

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> module = HMC(mlp(1, [4], 1), members=2, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=3, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine(batch_size=40))  # one batch, so one transition, an epoch
    >>> module.posterior().size  # two chains, kept after each epoch
    6
    """

    networks: nn.Module
    samples: KeptNetworks

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        prior_std: float = 1.0,
        optimizer: OptimizerCallable = samplers.HMC,
        burn_in: int = 0,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        bank: str | None = None,
        **kwargs: Any,
    ) -> None:
        leave_out(kwargs, "HMC")
        method = methods.HMC(prior_std, keeping(burn_in, every_n_steps, every_n_epochs, bank))
        super().__init__(
            network=network, method=method, members=members, optimizer=optimizer,
            lr_scheduler=None, lr_interval="epoch", member_rates=None, **kwargs,
        )  # fmt: skip
