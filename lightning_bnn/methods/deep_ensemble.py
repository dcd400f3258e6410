r"""Deep ensembles: networks that are trained side by side from different starts.

.. math:: L_m = -\frac{1}{B} \sum_i \log p(y_i | x_i, \omega_m) - \frac{1}{N} \log p(\omega_m)

References:
    | Simple and Scalable Predictive Uncertainty Estimation (Lakshminarayanan et al., 2017)
    | https://arxiv.org/abs/1612.01474
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_bnn.methods.batch import Batch
from lightning_bnn.methods.method import Method
from lightning_bnn.methods.networks import (
    Networks,
    gaussian_prior,
    penalised_losses,
    refuse_second_prior,
)
from lightning_bnn.methods.run import Run
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical
from lightning_bnn.samplers import Langevin

__all__ = ["DeepEnsemble"]


@dataclass(eq=False)
class DeepEnsemble(Method):
    """Every member goes to a maximum of the posterior, or of the likelihood without a prior.

    Arguments are those of `lightning_bnn.modules.DeepEnsemble`.
    """

    prior_std: float | None = None
    max_loss: float | None = None
    restarts: int = 0

    takes_samplers = True
    can_be_shared = True

    def __post_init__(self) -> None:
        self.prior = gaussian_prior(self.prior_std)

    def init(self, network: nn.Module, stack: Params) -> Networks:
        return Networks(network, stack, self.max_loss, self.restarts)

    def losses(self, state: Networks, batch: Batch, run: Run) -> dict[str, Tensor]:
        return penalised_losses(state, batch, run, self.prior)

    def adopt(self, optimizer: Any) -> None:
        super().adopt(optimizer)
        if isinstance(optimizer, Langevin) and self.prior is not None:
            for group in optimizer.param_groups:
                refuse_second_prior(group)

    def posterior(self, state: Networks) -> Empirical:
        return state.members()
