"""Agreement of chains: as functions, as weights with and without symmetries, and by halves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.evaluation import predictions_of_mode
from lightning_bnn.evaluation.problem import Problem
from lightning_bnn.evaluation.protocols import PROTOCOLS
from lightning_bnn.evaluation.reference_networks import LARGEST, MEDIAN, Reference, precise_outputs
from lightning_bnn.evaluation.stored_posteriors import StoredPosterior
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.metrics.convergence import LEAST, chain_numbers
from lightning_bnn.posteriors import Empirical
from lightning_bnn.tables import Measured
from weightsym import canonicalise
from weightsym import params as P
from weightsym.params import Params

SPACES = {"function": "predictions", "canonical": "canonical weights", "weights": "raw weights"}
"""The spaces in which chains are compared, and their names in tables."""
CHAINS, EFFECTIVE, ERRORS = 4, 400, 3
"""What gold needs at least: chains, effective draws; and at most: errors of a law above zero.

Three, as a card has a dozen laws; one below zero says nothing against it, since MMD is unbiased.
"""
_LAWS = {"law": "law", "ns_law": "law without symmetries", "f_law": "law of functions"}
_POINTS, _COMPARED = 100, 60
"""Test inputs, and networks per chain, whose laws are compared."""


@dataclass(frozen=True)
class Diagnosis:
    """Diagnostics of the draws of several chains.

    Attributes:
        chains: number of chains.
        draws: number of networks per chain.
        spaces: R-hat and effective sizes, by space and name.
        halves: distances between the first half of the chains and the second.

    >>> from lightning_bnn.references import read_reference
    >>> found = read_reference("two_gaussians")[2].diagnosis
    >>> sorted(found.spaces), found.failures()
    (['canonical', 'function', 'weights'], [])
    >>> found.spaces["function"]["rhat_max"] < found.spaces["weights"]["rhat_max"]
    True
    """

    chains: int
    draws: int
    spaces: Mapping[str, Mapping[str, float]]
    halves: Mapping[str, Measured]

    def failures(self) -> list[str]:
        """Describe the criteria of gold that these draws fail."""
        function = self.spaces["function"]
        checks = {
            f"{self.chains} chains, not {CHAINS}": self.chains >= CHAINS,
            f"median R-hat of predictions {function['rhat_median']:.3f} above {MEDIAN}":
                function["rhat_median"] <= MEDIAN,
            f"largest R-hat of predictions {function['rhat_max']:.3f} above {LARGEST}":
                function["rhat_max"] <= LARGEST,
            f"{function['ess_min']:.0f} effective draws at the worst point, not {EFFECTIVE}":
                function["ess_min"] >= EFFECTIVE,
        }  # fmt: skip
        for name, title in _LAWS.items():
            if name in self.halves:
                value, error = self.halves[name]
                apart = f"{value / error:.1f} errors apart"
                checks[(f"{title} of both halves of the chains are {apart}")] = (
                    value <= ERRORS * error
                )
        return [text for text, holds in checks.items() if not holds]


@torch.no_grad()
def diagnose(stored: StoredPosterior, problem: Problem) -> Diagnosis:
    """Compare the chains of a posterior with each other.

    Args:
        stored: four chains or more, so that each half is a law; each is a mode of at least eight
            networks.
        problem: its network and data.

    >>> from lightning_bnn.references import read_reference
    >>> posterior, problem, _ = read_reference("sine")
    >>> found = diagnose(posterior.thinned(10), problem)  # eighty of its draws are no gold
    >>> found.chains, found.draws, found.failures()[-1].partition(" ")[2]
    (8, 10, 'effective draws at the worst point, not 400')
    """
    chains = stored.stacks()
    sizes = [P.stack_size(chain) for chain in chains]
    if len(chains) < 4 or min(sizes) < LEAST:
        raise ValueError(
            f"{stored.name} must have at least four chains of at least eight networks, got "
            f"{len(chains)} with {min(sizes, default=0)}."
        )
    draws = min(sizes)
    latest = {n: torch.cat([c[n][-draws:] for c in chains]) for n in chains[0]}
    values = followed(stored, problem, latest)
    shape = len(chains), draws
    spaces = {space: chain_numbers(v.unflatten(0, shape)) for space, v in values.items()}
    half = len(chains) // 2
    halves = between(stored.only(range(half)), stored.only(range(half, 2 * half)), problem)
    return Diagnosis(len(chains), draws, spaces, halves)


def followed(stored: StoredPosterior, problem: Problem, networks: Params) -> dict[str, Tensor]:
    """Return the quantities of every network that are compared between chains, by space.

    For predictions these are the logarithms of the probabilities of up to a hundred test targets,
    or the outputs for their inputs if the likelihood is Gaussian, in float64.

    Args:
        stored: gives the computation.
        problem: its data.
        networks: a stack.
    """
    values = {
        "function": _function(stored, problem, networks),
        "canonical": _flat(stored, canonicalise(networks, problem.symmetries())),
        "weights": _flat(stored, networks),
    }
    return {space: numbers.double() for space, numbers in values.items()}


def _function(stored: StoredPosterior, problem: Problem, networks: Params) -> Tensor:
    inputs, targets = next(iter(problem.test_set()))
    outputs = precise_outputs(stored.network, networks, inputs[:_POINTS])
    likelihood: Any = stored.likelihood
    if isinstance(likelihood, Gaussian):
        return outputs.flatten(1)
    return likelihood.log_prob(outputs, targets[:_POINTS])


def _flat(stored: StoredPosterior, networks: Params) -> Tensor:
    return P.ravel(networks, P.weight_names(stored.network), stacked=True)[0]


def between(
    left: StoredPosterior, right: StoredPosterior, problem: Problem, samples: int = _COMPARED
) -> dict[str, Measured]:
    """Return distances between the laws of two posteriors, and between their predictions.

    Args:
        left: several chains.
        right: several chains of the same network.
        problem: its data.
        samples: largest number of networks per chain.
    """
    left, right = left.thinned(samples), right.thinned(samples)
    first, second = left.networks(), right.networks()
    reference = Reference(
        first, left.network, [problem.example()], PROTOCOLS["full"], samples, 0, "cpu",
        left.chains(), problem.probe(left.likelihood),
    )  # fmt: skip
    modes = [k for k, chain in enumerate(right.stacks()) for _ in range(P.stack_size(chain))]
    distances = reference.of_modes(second, modes).get("multi", {})
    laws = {name: distances[name] for name in _LAWS if name in distances}
    return {**laws, **_predictions(left, first, second, problem)}


def _predictions(
    posterior: StoredPosterior, first: Params, second: Params, problem: Problem
) -> dict[str, Measured]:
    """Return mean distances between the predictions of two stacks."""
    test, averaged = [problem.test_set()], []
    for networks in (first, second):
        ((predictions,),) = predictions_of_mode(
            Empirical(networks), posterior.network, posterior.likelihood, test,
            (P.stack_size(networks),), 0, "halves",
        )  # fmt: skip
        averaged.append(predictions)
    distances = averaged[1].distances(averaged[0])
    return {name: Measured(float(values.mean())) for name, values in distances.items()}
