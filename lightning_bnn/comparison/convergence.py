"""Whether the chains that a reference is made of agree about predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from lightning_bnn import params as P
from lightning_bnn.comparison.problem import Problem
from lightning_bnn.comparison.stored_posteriors import StoredPosterior
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.metrics import rhat
from lightning_bnn.posteriors import Empirical

__all__ = ["LARGEST", "MEDIAN", "have_converged", "rhat_of_predictions"]

MEDIAN, LARGEST = 1.01, 1.05
"""Chains whose R-hat is above these, over examples, count as not converged."""
_EXAMPLES = 100
_LEAST = 8
"""Draws of a chain below which there is no R-hat."""


def have_converged(reductions: Sequence[float]) -> bool:
    """Whether chains with such a median and largest R-hat count as converged."""
    median, largest = reductions
    return median <= MEDIAN and largest <= LARGEST


@torch.no_grad()
def rhat_of_predictions(reference: StoredPosterior, problem: Problem) -> tuple[float, float] | None:
    """Median and largest R-hat of the log-density of up to a hundred targets of the first batch.

    Args:
        reference: a posterior of several chains; another has no R-hat.
        problem: its network and data.
    """
    chains = [mode.networks for mode in reference.modes if isinstance(mode, Empirical)]
    draws = min((P.stack_size(chain) for chain in chains), default=0)
    if len(chains) < 2 or draws < _LEAST:
        return None
    last = [{name: t[-draws:] for name, t in chain.items()} for chain in chains]
    networks = {name: torch.cat([chain[name] for chain in last]) for name in last[0]}
    inputs, targets = next(iter(problem.test_set()))
    outputs = P.apply(problem.network, networks, inputs[:_EXAMPLES])
    likelihood = cast(Likelihood, reference.likelihood)
    values = likelihood.log_prob(outputs, targets[:_EXAMPLES]).double()
    reductions = rhat(values.view(len(chains), draws, -1))
    return float(reductions.median()), float(reductions.max())
