"""Chains whose law is known: what can be trusted, what cannot, and why."""

import pytest
import torch
from torch import nn

from lightning_bnn.datamodules import NoisySine, TwoGaussians
from lightning_bnn.evaluation.problem import Problem
from lightning_bnn.evaluation.reference_networks import rhat_of_predictions
from lightning_bnn.evaluation.stored_posteriors import StoredPosterior
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.metrics.convergence import chain_numbers
from lightning_bnn.models import mlp
from lightning_bnn.posteriors import Empirical
from lightning_bnn.references import diagnose
from lightning_bnn.references.diagnosis import between, followed
from weightsym import params as P
from weightsym import permute, random_permutations

CHAINS, DRAWS = 8, 40
LAWS = ("law", "ns_law", "f_law")


@pytest.fixture(scope="module")
def problem():
    return Problem(mlp(1, [3], 1, nn.Tanh), NoisySine(test_size=40), Gaussian(std=0.3))


def draws(problem, seed=0):
    """Independent draws around one network, ``(chains, draws, ...)``."""
    centre, noise = (torch.Generator().manual_seed(s) for s in (7, seed))
    return {
        name: torch.randn(t.shape, generator=centre)
        + 0.05 * torch.randn(CHAINS, DRAWS, *t.shape, generator=noise)
        for name, t in P.of(problem.network).items()
    }


def stored(problem, networks):
    modes = [Empirical({n: t[k] for n, t in networks.items()}) for k in range(CHAINS)]
    return StoredPosterior("chains", modes, modes, problem.network, problem.likelihood)


def test_independent_draws_agree_in_every_space(problem):
    networks = draws(problem)
    found = diagnose(stored(problem, networks), problem)
    assert (found.chains, found.draws) == (CHAINS, DRAWS)
    for numbers in found.spaces.values():
        assert numbers["rhat_max"] < 1.08
        assert numbers["ess_min"] > CHAINS * DRAWS / 2
    assert set(LAWS) <= set(found.halves)
    assert all("effective" in failure for failure in found.failures())
    list(networks.values())[-1][0] += 3  # the negative control: one chain is elsewhere
    failures = diagnose(stored(problem, networks), problem).failures()
    assert any("largest R-hat of predictions" in failure for failure in failures)


def test_chains_in_other_copies_of_a_mode_differ_as_weights_only(problem):
    networks, sym = draws(problem), problem.symmetries()
    elements = random_permutations(sym, torch.Generator().manual_seed(1), CHAINS)
    every = [element.repeat_interleave(DRAWS, 0) for element in elements]
    moved = permute({n: t.flatten(0, 1) for n, t in networks.items()}, sym, every)
    chains = {n: t.unflatten(0, (CHAINS, DRAWS)) for n, t in moved.items()}
    spaces = diagnose(stored(problem, chains), problem).spaces
    assert spaces["weights"]["rhat_max"] > 1.3
    assert spaces["function"]["rhat_max"] < 1.08
    assert spaces["canonical"]["rhat_max"] < 1.08


def test_laws_are_close_to_those_of_other_seeds_and_far_from_others(problem):
    one, same = (stored(problem, draws(problem, seed)) for seed in (1, 2))
    wider = {n: t + 0.05 * torch.randn(t.shape) for n, t in draws(problem, 3).items()}
    near, far = (between(one, each, problem) for each in (same, stored(problem, wider)))
    for law in LAWS:
        assert near[law].value < 3 * near[law].error
        assert far[law].value > 4 * far[law].error


def confident(likelihood):
    """A problem, and draws whose logits are large enough for probabilities of almost one."""
    classes = isinstance(likelihood, Categorical)
    network = mlp(2, [3], 2, nn.Tanh) if classes else mlp(1, [3], 1, nn.Tanh)
    data = TwoGaussians() if classes else NoisySine(test_size=40)
    problem = Problem(network, data, likelihood)
    return problem, {n: 8 * t for n, t in draws(problem).items()}


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(std=0.3)], ids=str)
def test_networks_in_float32_and_float64_get_one_diagnosis(likelihood):
    problem, networks = confident(likelihood)
    found = []
    for dtype in (torch.float32, torch.float64):
        chains = stored(problem, {n: t.to(dtype) for n, t in networks.items()})
        values = followed(chains, problem, chains.networks())
        numbers = [chain_numbers(v.unflatten(0, (CHAINS, DRAWS))) for v in values.values()]
        reductions = rhat_of_predictions(chains, problem)
        found.append([*reductions, *(value for each in numbers for value in each.values())])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("chains", "times", "message"),
    [
        (8, 4, "at least eight networks, got 8 with 4"),
        (1, 40, "must have at least four chains .* got 1 with 40"),
        (3, 40, "must have at least four chains .* got 3 with 40"),
    ],
)
def test_too_few_draws_or_chains_are_refused(problem, chains, times, message):
    networks = {n: t[:, :times] for n, t in draws(problem).items()}
    with pytest.raises(ValueError, match=message):
        diagnose(stored(problem, networks).only(range(chains)), problem)
