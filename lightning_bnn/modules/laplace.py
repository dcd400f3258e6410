"""Laplace approximations under a trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_bnn import methods
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.modules.training_data import TrainingData
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors.dropout import Layers
from lightning_bnn.posteriors.laplace import Prediction
from lightning_bnn.posteriors.laplace_fit import Structure

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
        structure: of the curvature: a ``"full"`` matrix, Kronecker factors of each layer
            (``"kron"``) or its ``"diag"``-onal.
        layers: ``"all"`` weights are random, or those of the ``"last"`` linear layer; by default
            all, or the last for Kronecker factors of a network with layers that have none
            (BatchNorm).
        prior_std: standard deviation of a Gaussian prior over all weights, in training; None leaves
            regularisation to the optimizer's weight decay.
        prior_precision: :math:`\lambda`; by default that of largest marginal likelihood.
        temperature: T.
        prediction: by ``"linearised"`` networks, or by the ``"network"`` itself.
        max_loss: members above it are left out, see `DeepEnsemble`.
        restarts: how often a member that has diverged begins anew, see `DeepEnsemble`.
        **kwargs: what every module takes, see `Bayesian`.

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

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        structure: Structure = "kron",
        layers: Layers | None = None,
        prior_std: float | None = None,
        prior_precision: float | None = None,
        temperature: float = 1.0,
        prediction: Prediction = "linearised",
        max_loss: float | None = None,
        restarts: int = 0,
        **kwargs: Any,
    ) -> None:
        method = methods.Laplace(
            structure, layers, prior_std, prior_precision, temperature, prediction,
            max_loss=max_loss, restarts=restarts,
        )  # fmt: skip
        super().__init__(network=network, method=method, members=members, **kwargs)
        lacking = [] if layers else method.lacking_factors(self.template)
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
