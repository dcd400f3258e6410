r"""Hamiltonian Monte Carlo over the weights of small networks, with all the data.

References:
    | What Are Bayesian Neural Network Posteriors Really Like? (Izmailov et al., 2021)
    | https://arxiv.org/abs/2104.14421
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_bnn import samplers
from lightning_bnn.methods.all_data import AllDataChains, AllDataSampling
from lightning_bnn.methods.method import Fit, Progress
from lightning_bnn.methods.run import Run
from lightning_bnn.params import Params

__all__ = ["HMC", "HamiltonianChains"]

_LEAST_ACCEPTANCE = 0.01


class HamiltonianChains(AllDataChains):
    """Chains, and how often they have moved.

    Attributes:
        acceptance: sum of the acceptance probabilities of every chain.
        transitions: how many they are of.
    """

    def start_counting(self) -> None:
        super().start_counting()
        self.acceptance, self.transitions = torch.zeros(self.count), 0


@dataclass(eq=False)
class HMC(AllDataSampling):
    r"""Samples of the posterior, exact but for the length of the chains.

    .. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

    Every step is one transition of `lightning_bnn.samplers.HMC`; see `AllDataSampling`.

    >>> import torch
    >>> from lightning_bnn import methods, params, samplers
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [4], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run, batch = methods.HMC(), methods.Run(net, num_data=50), methods.Batch((x,), y)
    >>> state = method.init(net, params.populate(net, members=2))
    >>> sampler = samplers.HMC(state.parameters(), step_size=0.02, leapfrog_steps=3)
    >>> method.before_fit(state, methods.Fit(optimizer=sampler, batches=lambda: [batch]), run)
    >>> for step in range(3):
    ...     energies = method.transition(state, run, sampler.step)["energy"]
    ...     kept = method.after_step(state, methods.Progress(step + 1, step, True, sampler), run)
    >>> energies.shape, method.posterior(state, run).size  # two chains, kept three times
    (torch.Size([2]), 6)
    """

    sampler = samplers.HMC

    def chains(self, network: nn.Module, stack: Params) -> HamiltonianChains:
        return HamiltonianChains(network, stack, self.keeping)

    def before_fit(self, state: AllDataChains, fit: Fit, run: Run) -> None:
        super().before_fit(state, fit, run)
        if fit.trial:
            for group in fit.optimizer.param_groups:
                group["leapfrog_steps"] = 1

    def after_step(self, state: Any, progress: Progress, run: Run) -> bool:
        state.acceptance = state.acceptance + progress.optimizer.acceptance.cpu()
        state.transitions += 1
        return super().after_step(state, progress, run)

    def after_fit(self, state: Any, run: Run) -> None:
        super().after_fit(state, run)
        few = state.acceptance < _LEAST_ACCEPTANCE * state.transitions
        stuck = few.nonzero().flatten().tolist()
        if stuck:
            run.warn(
                f"Chains {stuck} of {state.count} have hardly moved, as nearly all proposals were "
                "refused: take a smaller `step_size`, or let `adapt_steps` find one."
            )
