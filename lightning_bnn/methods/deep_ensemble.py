"""Deep ensembles: networks that are trained side by side from different starts.

References:
    | Simple and Scalable Predictive Uncertainty Estimation (Lakshminarayanan et al., 2017)
    | https://arxiv.org/abs/1612.01474
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_bnn.methods.method import AS_IT_IS, Purpose
from lightning_bnn.methods.networks import Networks, PenalisedTraining, refuse_second_prior
from lightning_bnn.methods.run import Run
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical
from lightning_bnn.samplers import Langevin

__all__ = ["DeepEnsemble"]


@dataclass(eq=False)
class DeepEnsemble(PenalisedTraining):
    r"""Every member goes to a maximum of the posterior, or of the likelihood without a prior.

    .. math:: L_m = -\frac{1}{B} \sum_i \log p(y_i | x_i, \omega_m) - \frac{1}{N} \log p(\omega_m)

    See `PenalisedTraining` for the arguments.

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [8], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run, batch = methods.DeepEnsemble(), methods.Run(net), methods.Batch((x,), y)
    >>> state = method.init(net, params.populate(net, members=3))
    >>> optimizer, losses = torch.optim.Adam(state.parameters(), 0.02), []
    >>> for _ in range(10):
    ...     losses.append(method.losses(state, batch, run)["loss"])
    ...     optimizer.zero_grad()
    ...     losses[-1].sum().backward()
    ...     optimizer.step()
    >>> bool((losses[-1] < losses[0]).all()), method.posterior(state, run).size
    (True, 3)
    """

    takes_samplers = True
    can_be_shared = True

    def init(self, network: nn.Module, stack: Params) -> Networks:
        return Networks(network, stack, self.max_loss, self.restarts)

    def configure_optimizer(self, state: Networks, optimizer: Any, run: Run, *fit: Any) -> Any:
        if isinstance(optimizer, Langevin) and self.prior is not None:
            for group in optimizer.param_groups:
                refuse_second_prior(group)
        return super().configure_optimizer(state, optimizer, run, *fit)

    def posterior(self, state: Networks, run: Run, purpose: Purpose = AS_IT_IS) -> Empirical:
        return state.members()
