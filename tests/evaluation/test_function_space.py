"""Distances of posteriors in what they predict: against other estimators, and on one law."""

import math

import pytest
import torch

from lightning_bnn import evaluation
from lightning_bnn import metrics as M
from lightning_bnn.evaluation import function_distances
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian, Empirical, Mixture
from weightsym import discover, permute, random_permutations
from weightsym import params as P

NET = mlp(2, [6], 3)
X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))


def gaussian(std=0.5, seed=0):
    torch.manual_seed(seed)
    return DiagonalGaussian(P.of(mlp(2, [6], 3)), std)


def networks(count, seed):
    return P.populate(NET, count, torch.Generator().manual_seed(seed))


def test_distances_are_those_of_the_metrics():
    a, b = networks(20, 1), networks(30, 2)
    found = function_distances(a, b, NET, X, samples=30)
    first, second = (P.apply(NET, stack, X) for stack in (a, b))
    mmd = M.function_space_mmd(second, first)
    assert found["mmd"].value == pytest.approx(float(mmd), rel=1e-4)
    p, q = (outputs.double().softmax(-1).mean(0) for outputs in (first, second))
    assert found["tv"].value == pytest.approx(float((p - q).abs().sum(-1).mean() / 2))
    assert found["kl"].value == pytest.approx(float((q * (q / p).log()).sum(-1).mean()))
    assert found["agree"].value == pytest.approx(
        float((p.argmax(1) == q.argmax(1)).double().mean())
    )
    each = (p - q).abs().sum(-1) / 2
    assert found["tv"].error == pytest.approx(float(each.std()) / math.sqrt(len(X)), rel=0.5)


def test_one_law_is_at_distance_zero_and_another_is_not():
    same = [function_distances(gaussian(), gaussian(), NET, X, seed=k)["mmd"] for k in range(6)]
    assert all(abs(d.value) < 4 * d.error for d in same)
    other = function_distances(gaussian(0.1, 1), gaussian(0.1), NET, X)["mmd"]
    assert other.value > 5 * other.error


def test_symmetries_of_the_weights_do_not_count():
    stack = networks(40, 3)
    sym = discover(NET, X[:2])
    moved = permute(stack, sym, random_permutations(sym, members=40))
    found = function_distances(moved, stack, NET, X, samples=40)
    assert found["tv"].value == pytest.approx(0, abs=1e-6)
    assert found["agree"].value == 1
    assert not torch.equal(moved["1.weight"], stack["1.weight"])


def test_errors_of_several_modes_are_over_modes():
    one = Mixture([gaussian(0.02, k) for k in range(5)])
    few = function_distances(one, gaussian(0.02, 9), NET, X, samples=100)["mmd"]
    many = function_distances(gaussian(0.02, 0), gaussian(0.02, 9), NET, X, samples=100)["mmd"]
    assert few.error > 3 * many.error


def test_numbers_have_energy_distances():
    net = mlp(2, [6], 1)
    a, b = (P.populate(net, 20, torch.Generator().manual_seed(k)) for k in range(2))
    found = function_distances(Empirical(a), b, net, X, likelihood=Gaussian(std=0.1))
    assert [*found] == ["mmd", "energy_f", "energy"]
    outputs = [P.apply(net, stack, X) for stack in (a, b)]
    still = [torch.zeros_like(o) for o in outputs]
    wanted = M.energy_distance(outputs[0], still[0], outputs[1], still[1])
    assert found["energy_f"].value == pytest.approx(float(wanted), rel=1e-4)


def test_the_network_is_left_alone():
    net = mlp(2, [6], 3).train()
    function_distances(networks(4, 0), networks(4, 1), net, X)
    assert net.training
    assert evaluation.function_distances is function_distances
