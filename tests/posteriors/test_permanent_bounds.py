"""Bounds of permanents hold for every matrix: of any range, with ties and impossible entries."""

import itertools
import math

import pytest
import torch

from lightning_bnn.posteriors import mutual_information
from lightning_bnn.posteriors.mutual_information import information_bracket
from lightning_bnn.posteriors.permanents import (
    bethe_functional,
    likeliest_permutation,
    log_bethe,
    to_unit_sums,
)
from lightning_bnn.posteriors.unit_layers import UnitLayer
from weightsym import PermutationGroup, Symmetries

SIZES = pytest.mark.parametrize("n", [2, 3, 6])


def normal(n, seed=0, count=12, width=None):
    generator = torch.Generator().manual_seed(1000 * n + seed)
    return torch.randn(count, n, width or n, generator=generator, dtype=torch.float64)


def antisymmetric(n):
    """Exchanging two units is exactly as likely as not."""
    return 30 * (normal(n) - normal(n).mT)


def graph(n):
    """Entries are one or impossible; some matrices allow no permutation at all."""
    return torch.where(normal(n) > 0.1, 0.0, -torch.inf).double()


def nearly_triangular(n):
    """One permutation, and others through a corner that is all but impossible."""
    upper = torch.ones(n, n, dtype=torch.bool).triu()
    return torch.where(upper, normal(n), normal(n, 1) - 60)


def blocks_of_two(n):
    """Bethe's functional is flat within a block whose two orders are equally likely."""
    logs = normal(n).round() - 60
    for k in range(0, n - 1, 2):
        logs[:, k : k + 2, k : k + 2] = normal(n, k, width=n)[:, :2, :2].round()
    return logs


MATRICES = {
    "normal": normal,
    "wide": lambda n: 500 * normal(n),
    "huge": lambda n: 1e12 * normal(n),
    "whole numbers": lambda n: (3 * normal(n)).round(),
    "whole numbers, wide": lambda n: (30 * normal(n, count=60)).round(),
    "antisymmetric": antisymmetric,
    "impossible": graph,
    "impossible and wide": lambda n: graph(n) + 300 * normal(n, 1),
    "triangular": lambda n: normal(n).where(torch.ones(n, n).triu().bool(), -torch.inf),
    "nearly triangular": nearly_triangular,
    "blocks of two": blocks_of_two,
    "of rank one": lambda n: 1e5 * (normal(n, width=1) + normal(n, 1)[:, :1]) + normal(n, 2),
}
EACH = pytest.mark.parametrize("name", MATRICES)


def is_doubly_stochastic(shares):
    return torch.stack([(shares.sum(k) - 1).abs().amax(-1) < 1e-12 for k in (1, 2)]).all(0)


def exactly(logs):
    """Log-permanents, by all permutations."""
    orders = torch.tensor(list(itertools.permutations(range(logs.shape[-1]))))
    return logs.double()[:, torch.arange(logs.shape[-1]), orders].sum(-1).logsumexp(-1)


def below(a, b, rounding=1e-9):
    return bool(((a == b) | (a <= b + rounding * (1 + b.abs()))).all())


@SIZES
@EACH
def test_the_bethe_permanent_is_a_lower_bound_and_within_its_distance(name, n):
    logs = MATRICES[name](n)
    exact, bethe = exactly(logs), log_bethe(logs)
    assert below(bethe, exact)
    assert below(exact, bethe + n / 2 * math.log(2))


@SIZES
@EACH
@pytest.mark.parametrize("iterations", [3])
def test_it_is_one_before_messages_have_settled(name, n, iterations):
    """In float32, too, up to its rounding."""
    logs = MATRICES[name](n)
    assert below(log_bethe(logs, iterations), exactly(logs))
    found = log_bethe(logs.float(), iterations)
    assert found.dtype == torch.float32
    assert below(found.double(), exactly(logs.float()), rounding=1e-6)


@pytest.mark.parametrize("logs", [[[0, -5], [4.9, 0]], [[0, -55], [58, 0]], [[1, 2], [2, 3]]])
def test_of_two_units_it_is_the_likelier_order(logs):
    """Bethe's functional is linear in the share of an order; equal orders share the gradient."""
    logs = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
    orders = torch.stack([logs.detach().trace(), logs.detach().fliplr().trace()])
    value = log_bethe(logs)
    assert value.item() == pytest.approx(orders.max().item())
    (shares,) = torch.autograd.grad(value, logs)
    wanted = (orders == orders.max()).double() / (orders == orders.max()).sum()
    torch.testing.assert_close(shares[0], wanted)


@SIZES
@EACH
def test_gradients_are_doubly_stochastic(name, n):
    logs = MATRICES[name](n).requires_grad_()
    value = log_bethe(logs)
    (shares,) = torch.autograd.grad(value.sum(), logs)
    assert is_doubly_stochastic(shares).all()


def mixtures(n, permutations, count=40):
    """Doubly stochastic matrices: means of permutations with random weights (Birkhoff)."""
    generator = torch.Generator().manual_seed(n)
    noise = torch.rand(count, permutations, n, generator=generator)
    ones = torch.eye(n, dtype=torch.float64)[noise.argsort(-1)]
    weights = torch.rand(count, permutations, 1, 1, generator=generator, dtype=torch.float64)
    return (weights / weights.sum(1, keepdim=True) * ones).sum(1)


@pytest.mark.parametrize("permutations", [1, 2, 5, 50])
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_the_functional_is_a_bound_at_every_doubly_stochastic_matrix(n, permutations):
    shares = mixtures(n, permutations)
    assert is_doubly_stochastic(shares).all()
    for scale in (0.0, 1.0, 30.0):
        logs = scale * normal(n, 5, count=40)
        assert below(bethe_functional(logs, shares), exactly(logs))


def test_at_other_matrices_it_is_none():
    """Rows that sum to one are not enough."""
    logs = normal(4, count=40)
    shares = (3 * logs).softmax(-1)
    assert not is_doubly_stochastic(shares).any()
    assert (bethe_functional(logs, shares) > exactly(logs)).any()


@pytest.mark.parametrize("n", [2, 5, 30])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_sums_become_one_whatever_the_entries(n, spread):
    found = to_unit_sums((spread * normal(n)).exp())
    assert (found > 0).all()
    assert is_doubly_stochastic(found).all()
    torch.testing.assert_close(to_unit_sums(found), found)


def test_a_corner_that_no_permutation_needs_vanishes():
    found = to_unit_sums(torch.tensor([[[1.0, 1.0], [0.0, 1.0]]], dtype=torch.float64))
    torch.testing.assert_close(found[0], torch.eye(2).double(), atol=1e-12, rtol=0)


def test_the_likeliest_permutation():
    for logs in (*normal(5), torch.full((3, 3), -torch.inf)):
        best = max(
            sum(logs[i, j].item() for i, j in enumerate(order))
            for order in itertools.permutations(range(len(logs)))
        )
        found = likeliest_permutation(logs)
        assert torch.where(found > 0, logs, 0).sum().item() == pytest.approx(best)


@SIZES
@EACH
def test_the_bracket_of_the_information_holds(name, n, monkeypatch):
    """For densities of units under each other's laws that are as bad as that, one by one."""
    logs = MATRICES[name](n)
    logs = logs[logs.diagonal(dim1=1, dim2=2).isfinite().all(1)][:6]
    ratios = logs - logs.diagonal(dim1=1, dim2=2)[..., None]
    layer = UnitLayer(0, n, (("w", 0, torch.arange(n)[:, None]),))
    sampled = mutual_information.Sampled(*[{"w": torch.zeros(1, n)}] * 4)
    sym = Symmetries((), (PermutationGroup(n, "units", ()),), (), ())
    monkeypatch.setattr(mutual_information, "confusable_units", lambda *_: torch.arange(n))
    for one, exact in zip(ratios, math.lgamma(n + 1) - exactly(ratios), strict=True):
        monkeypatch.setattr(mutual_information, "log_ratios", lambda *_, one=one: one[None])
        found = information_bracket(sym, [layer], sampled)
        assert below(found.lower, exact.clamp(min=0))
        assert below(exact, found.upper)
