"""The study of what symmetrization gains: its problems, its chains, its choices."""

import json

import pytest
import torch

from lightning_bnn import params as P
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.methods import HMC, Batch, Fit, Run
from lightning_bnn.studies import symmetrization as study
from lightning_bnn.studies.small_posteriors import Problem, log_score
from lightning_bnn.studies.tuned_vi import KINDS, Choice, Effort, Fitted, best, fitted

SEEDS = (3, 4)
EFFORT = Effort(2, 2, (0.01, 0.5), (0.0,))


@pytest.mark.parametrize("task", ["sine", "moons"])
def test_seeds_have_training_sets_of_their_own(task):
    problem = Problem(examples=9, task=task)
    data = problem.training_sets(SEEDS, 2)
    (x,), y = data.inputs, data.targets
    assert torch.equal(x[0], x[1])
    assert not torch.equal(x[1], x[2])
    alone = problem.training_sets([4])
    assert torch.equal(alone.inputs[0][0], x[2])
    assert torch.equal(alone.targets[0], y[3])
    assert not set(x.flatten().tolist()) & set(problem.held_out("test")[0].flatten().tolist())


def test_scores_are_those_of_mixtures():
    outputs = torch.randn(5, 2, 3, 1, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0.3], [-1.0], [2.0]])
    density = torch.distributions.Normal(outputs, 0.7).log_prob(targets).exp().mean(0)[..., 0]
    found = log_score(Gaussian(std=0.7), outputs, targets)
    torch.testing.assert_close(found, -density.log().double().mean(1), rtol=1e-5, atol=1e-6)


def test_chains_see_the_data_of_their_seed():
    """Energies of all chains at once, and of each alone."""
    problem = Problem(width=3, examples=7)
    network, data = problem.network(), problem.training_sets(SEEDS, 2)
    stack = problem.starts(SEEDS, 2)

    def energies(rows):
        method, run = HMC(1.0), Run(network, problem.likelihood(), 7)
        state = method.init(network, {n: t[rows] for n, t in stack.items()})
        per_member = Batch((data.inputs[0][rows],), data.targets[rows], per_member=True)
        method.begin(state, Fit(batches=lambda: [per_member]), run)
        return method.energies(state, run)

    alone = torch.cat([energies(slice(k, k + 1)) for k in range(4)])
    torch.testing.assert_close(energies(slice(None)), alone)
    y = data.targets[2]
    outputs = P.apply(network, {n: t[2] for n, t in stack.items()}, data.inputs[0][2])
    nll = -torch.distributions.Normal(outputs, problem.noise).log_prob(y).sum()
    prior = sum(t[2].square().sum() / 2 for t in stack.values())
    torch.testing.assert_close(alone[2].float(), (nll + prior).detach())


def test_both_kinds_begin_alike_and_differ_by_the_objective():
    problem, choices = Problem(width=4, examples=6), [Choice(0.01, 0.0), Choice(0.5, 0.0)]
    plain, ours = (fitted(problem, kind, SEEDS, choices, EFFORT) for kind in KINDS)
    for choice in choices:
        for numbers in plain[choice][:4]:
            assert numbers.shape == (2, 2)
        assert (plain[choice].bound >= plain[choice].elbo - 1e-6).all()
    assert torch.equal(plain[choices[0]].elbo, ours[choices[0]].elbo)  # units never meet
    assert not torch.equal(plain[choices[1]].elbo, ours[choices[1]].elbo)
    again = fitted(problem, "MFVI", SEEDS[:1], choices, EFFORT)[choices[0]]
    assert again.elbo.shape == (1, 2)


def test_the_best_is_that_of_the_criterion():
    def runs(validation, elbo, bound):
        values = (torch.full((2, 2), v) for v in (0.0, validation, elbo, bound))
        return Fitted(*values, networks={})

    found = {Choice(0.1, 0): runs(1.0, -3.0, -1.0), Choice(0.3, 0): runs(2.0, -2.0, -1.5)}
    assert best(found, "validation", "MFVI").start == 0.1
    assert best(found, "objective", "MFVI").start == 0.3
    assert best(found, "objective", "symmetrized").start == 0.1
    assert best(found, "bound", "MFVI").start == best(found, "bound", "symmetrized").start == 0.1


def test_a_problem_that_is_finished_is_not_computed_again(tmp_path, monkeypatch):
    settings, problem, computed = study.SCALES["smallest"], Problem(width=3), []
    monkeypatch.setattr(study, "_numbers", lambda *_: computed.append(1) or {"a": len(computed)})
    for _ in range(2):
        assert study._remembered(problem, settings, tmp_path / "problems") == {"a": 1}
    assert study._remembered(Problem(width=4), settings, tmp_path / "problems") == {"a": 2}
    (first, *_) = (tmp_path / "problems").glob("sine_tanh_3_*.json")
    assert json.loads(first.read_text()) == {"a": 1}


def test_laws_of_the_same_posterior_do_not_differ():
    problem, generator = Problem(width=3), torch.Generator().manual_seed(0)
    shapes = {n: t.shape for n, t in P.of(problem.network()).items()}

    def stack(runs, draws, shift=0.0):
        return {
            n: torch.randn(1, runs, draws, *shape, generator=generator) + shift
            for n, shape in shapes.items()
        }

    chains = study.Chains(stack(4, 80), *torch.zeros(3, 1))
    same, other = (study._laws(problem, chains, stack(2, 20, shift), 0) for shift in (0.0, 2.0))
    assert abs(same[0]) < 3 < other[0]
    assert abs(same[1]) < 3 < other[1]
