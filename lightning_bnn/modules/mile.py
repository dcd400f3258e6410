"""Microcanonical Langevin ensembles under a trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_bnn import methods, samplers
from lightning_bnn.methods.kept_networks import KeptNetworks
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian

__all__ = ["MILE"]


class MILE(Bayesian):
    r"""Samples of the posterior by chains of constant speed, each from a trained network.

    .. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

    Every training step is one transition of `lightning_bnn.samplers.MCLMC`, of 21 gradients of all
    the data by default; what batch the loader gives at that step does not matter, its batch size
    says how many examples are computed at a time. The first 100 transitions descend by Adam, the
    next 200 adapt the steps. ``start_from`` starts from networks that were trained already; set
    ``descent_steps`` of the sampler to 0 then.

    No test corrects the law of the draws: ``train/energy_variance`` says how far to trust it, and
    `HMC` confirms it. BatchNorm uses the statistics of the given network; dropout is refused.
    Several processes share the data.

    Args:
        network: gives the computation, and where the first chain starts.
        members: how many chains.
        optimizer: makes the sampler, given parameters.
        **kwargs: of the method, see `lightning_bnn.methods.MILE`, and of every module, see
            `Bayesian`.

    References:
        | Microcanonical Langevin Ensembles: Advancing the Sampling of Bayesian Neural Networks
        | (Sommer et al., 2025), https://arxiv.org/abs/2502.06335

    >>> from functools import partial
    >>> from lightning import Trainer
    >>> from lightning_bnn import samplers
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> sampler = partial(samplers.MCLMC, steps=2, descent_steps=1, adapt_steps=2)
    >>> module = MILE(mlp(1, [4], 1), 2, optimizer=sampler, burn_in=3, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=5, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine(batch_size=40))
    >>> module.posterior().size  # of two chains, after the fourth and the fifth transition
    4
    """

    networks: nn.Module
    samples: KeptNetworks

    arguments = staticmethod(joint_arguments(methods.MILE, Bayesian))

    def __init__(
        self,
        network: nn.Module,
        members: int = 4,
        optimizer: OptimizerCallable = samplers.MCLMC,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            network=network, members=members, optimizer=optimizer, **self.arguments(**kwargs)
        )
