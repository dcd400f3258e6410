"""Hamiltonian Monte Carlo under a trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_bnn import methods, samplers
from lightning_bnn.methods.kept_networks import KeptNetworks
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian

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
        optimizer: makes the sampler, given parameters.
        **kwargs: of the method, see `lightning_bnn.methods.HMC`, and of every module, see
            `Bayesian`.

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

    arguments = staticmethod(joint_arguments(methods.HMC, Bayesian))

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        optimizer: OptimizerCallable = samplers.HMC,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            network=network, members=members, optimizer=optimizer, **self.arguments(**kwargs)
        )
