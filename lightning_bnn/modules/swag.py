"""SWAG, a Gaussian through the last networks of a run, under a trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_bnn import methods
from lightning_bnn.methods.kept_networks import InMemory
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian

__all__ = ["SWAG"]


class SWAG(Bayesian):
    r"""Mean, variances and last deviations of the weights along a run.

    .. math:: \omega = \bar\omega + \sqrt{s} \Big(\tfrac{1}{\sqrt 2} \sigma \odot z_1
        + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2\Big)

    One :math:`z_2` moves all tensors; K is the number of deviations that are there; they are from
    the final mean. With members, a mixture of as many runs. While it trains, validation judges the
    members as they are; afterwards networks are drawn, and get BatchNorm statistics of their own
    from one pass over the training data.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many runs.
        **kwargs: of the method, see `lightning_bnn.methods.SWAG`, and of every module, see
            `Bayesian`.

    References:
        | A Simple Baseline for Bayesian Uncertainty in Deep Learning (Maddox et al., 2019)
        | https://arxiv.org/abs/1902.02476

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import NoisySine
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> from lightning_bnn.models import mlp
    >>> module = SWAG(mlp(1, [4], 1), start=2, likelihood=Gaussian())
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> trainer = Trainer(max_epochs=6, enable_model_summary=False, **quiet)
    >>> trainer.fit(module, NoisySine())
    >>> module.posterior().deviations.shape  # after the last four epochs, of 13 weights
    torch.Size([4, 13])
    """

    networks: nn.Module
    collected: Tensor
    last: InMemory

    arguments = staticmethod(joint_arguments(methods.SWAG, Bayesian))

    def __init__(self, network: nn.Module, members: int = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))
        if self.method.swa_lr is not None and self.lr_interval == "step":
            raise ValueError("`swa_lr` needs `lr_interval='epoch'`: its ramp counts epochs.")
