"""Laplace approximations under a trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_bnn import methods
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.modules.training_data import TrainingData
from lightning_bnn.named_tensors import NamedTensors

__all__ = ["Laplace"]


class Laplace(Bayesian):
    r"""A maximum of the posterior, and the Gaussian that its curvature speaks for.

    .. math:: \omega \sim N\big(\hat\omega,\; T (H + \lambda I)^{-1}\big)

    H is the generalised Gauss-Newton matrix of the summed negative log-likelihood on the training
    data. It is computed after the last epoch, so that checkpoints from the end hold it, or before a
    test of networks that have none. While it trains, validation judges the members as they are.
    With members, a mixture.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many networks, each with a Gaussian of its own.
        **kwargs: of the method, see `lightning_bnn.methods.Laplace`, and of every module, see
            `Bayesian`.

    References:
        | Laplace Redux (Daxberger et al., 2021)
        | https://arxiv.org/abs/2106.14806

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> module = Laplace(mlp(1, [4], 1), structure="full", likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=1, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine())
    >>> module.posterior().sample(5)["1.weight"].shape
    torch.Size([5, 4, 1])
    """

    networks: nn.Module
    fitted: NamedTensors

    arguments = staticmethod(joint_arguments(methods.Laplace, Bayesian))

    def __init__(self, network: nn.Module, members: int = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))
        lacking = [] if self.method.layers else self.method.lacking_factors(self.template)
        if lacking:
            rank_zero_info(
                f"Laplace: {', '.join(lacking)} of {type(self.template).__name__} has no Kronecker "
                "factors, so that the curvature is that of the last layer alone (`layers='last'`)."
            )

    def fit_to(self, source: Any) -> None:
        """Compute the curvature of every member.

        Args:
            source: the training data: a datamodule, or a loader of batches as the network takes
                them.
        """
        self.method.at_end(self.state, TrainingData(self, source), self.run)
