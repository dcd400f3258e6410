r"""Hamiltonian Monte Carlo over the weights of small networks, with all the data.

References:
    | What Are Bayesian Neural Network Posteriors Really Like? (Izmailov et al., 2021)
    | https://arxiv.org/abs/2104.14421
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    """Samples of the posterior, exact but for the length of the chains.

    Every step is one transition of `lightning_bnn.samplers.HMC`; see `AllDataSampling`.
    """

    sampler = samplers.HMC

    def chains(self, network: nn.Module, stack: Params) -> HamiltonianChains:
        return HamiltonianChains(network, stack, self.keeping)

    def begin(self, state: AllDataChains, fit: Fit, run: Run) -> None:
        super().begin(state, fit, run)
        if fit.trial:
            for group in fit.optimizer.param_groups:
                group["leapfrog_steps"] = 1

    def observed(self, optimizer: Any) -> dict[str, Tensor | float]:
        return {"acceptance": optimizer.acceptance.mean(), "step_size": optimizer.step_size}

    def after_step(self, state: Any, progress: Progress, run: Run) -> bool:
        state.acceptance = state.acceptance + progress.optimizer.acceptance.cpu()
        state.transitions += 1
        return super().after_step(state, progress, run)

    def close(self, state: Any, run: Run) -> None:
        super().close(state, run)
        few = state.acceptance < _LEAST_ACCEPTANCE * state.transitions
        stuck = few.nonzero().flatten().tolist()
        if stuck:
            run.warn(
                f"Chains {stuck} of {state.count} have hardly moved, as nearly all proposals were "
                "refused: take a smaller `step_size`, or let `adapt_steps` find one."
            )
