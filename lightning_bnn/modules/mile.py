"""Microcanonical Langevin ensembles under a trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from torch import nn

from lightning_bnn import methods, samplers
from lightning_bnn.methods.kept_networks import KeptNetworks
from lightning_bnn.modules.all_data import leave_out
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.modules.kept_in_bank import keeping

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
        prior_std: standard deviation of a Gaussian prior over all weights.
        optimizer: makes the sampler, given parameters.
        burn_in: nothing is kept of the first so many steps (or epochs): those that descend and
            adapt.
        every_n_steps: how often the members are kept, in steps; by default after each.
        every_n_epochs: the same in epochs.
        bank: folder to keep them in, instead of in memory and in the checkpoints.
        **kwargs: what every module takes, see `Bayesian`.

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

    def __init__(
        self,
        network: nn.Module,
        members: int = 4,
        prior_std: float = 1.0,
        optimizer: OptimizerCallable = samplers.MCLMC,
        burn_in: int = 300,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        bank: str | None = None,
        **kwargs: Any,
    ) -> None:
        leave_out(kwargs, "MILE")
        if every_n_epochs is None:
            every_n_steps = every_n_steps or 1
        method = methods.MILE(prior_std, keeping(burn_in, every_n_steps, every_n_epochs, bank))
        super().__init__(
            network=network, method=method, members=members, optimizer=optimizer,
            lr_scheduler=None, lr_interval="epoch", member_rates=None, **kwargs,
        )  # fmt: skip
