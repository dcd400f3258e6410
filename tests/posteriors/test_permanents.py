"""Permanents and their bounds for every matrix: of any range, with ties and impossible entries."""

import itertools
import math

import pytest
import torch

from lightning_bnn.posteriors import mutual_information
from lightning_bnn.posteriors.mutual_information import information_bracket
from lightning_bnn.posteriors.permanents import (
    likeliest_permutation,
    log_bethe,
    log_capacity,
    log_permanent,
    log_transpositions,
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
    """Before messages have settled, too, and in float32 up to its rounding."""
    logs = MATRICES[name](n).requires_grad_()
    exact, bethe = exactly(logs.detach()), log_bethe(logs)
    assert below(bethe, exact)
    assert below(exact, bethe + n / 2 * math.log(2))
    (shares,) = torch.autograd.grad(bethe.sum(), logs)
    assert is_doubly_stochastic(shares).all()
    logs = logs.detach()
    assert below(log_bethe(logs, 3), exact)
    found = log_bethe(logs.float(), 3)
    assert found.dtype == torch.float32
    assert below(found.double(), exactly(logs.float()), rounding=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1.0, 500.0])
@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_permanents_are_exact_and_the_other_bounds_hold(n, scale):
    logs = scale * normal(n)
    exact = exactly(logs)
    torch.testing.assert_close(log_permanent(logs), exact)
    assert below(exact, log_capacity(logs))
    assert below(exact, log_capacity(logs, sweeps=1))
    assert below(log_transpositions(logs), exact)


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


def test_the_likeliest_permutation():
    for logs in (*normal(5), torch.full((3, 3), -torch.inf)):
        every = itertools.permutations(range(len(logs)))
        best = max(sum(logs[i, j].item() for i, j in enumerate(order)) for order in every)
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


# ------------------------------------------------------------ closed forms, gradients, groups
@pytest.mark.parametrize("n", [3, 8, 20])
def test_identical_units_have_the_closed_forms(n):
    """All entries one: perm = n!, perm_B = (n-1)^(n(n-1)) / n^(n(n-2)), capacity = n^n."""
    logs = torch.zeros(n, n, dtype=torch.float64)
    bethe = n * (n - 1) * math.log(n - 1) - n * (n - 2) * math.log(n)
    assert log_bethe(logs).item() == pytest.approx(bethe, rel=1e-9)
    assert log_capacity(logs).item() == pytest.approx(n * math.log(n))
    assert log_transpositions(logs).item() == pytest.approx(math.log(1 + n * (n - 1) / 2))


@pytest.mark.parametrize("bound", [log_bethe, lambda x: log_capacity(x, 500), log_transpositions])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_gradients_against_finite_differences(bound, scale):
    logs = (scale * normal(5, count=2)).requires_grad_()
    assert torch.autograd.gradcheck(bound, (logs,), eps=1e-5, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("bound", [log_permanent, log_bethe, log_capacity, log_transpositions])
def test_rows_and_columns_can_be_scaled_and_reordered(bound):
    logs = 1.5 * normal(6, count=4)
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    if bound is not log_transpositions:
        scaled = logs + rows[:, None] + columns
        moved = bound(scaled) - (rows + columns).sum()
        torch.testing.assert_close(moved, bound(logs), rtol=1e-6, atol=1e-6)
    order = torch.randperm(6, generator=generator)
    torch.testing.assert_close(bound(logs[:, order][:, :, order]), bound(logs))


@pytest.mark.bad_input
def test_exact_permanents_are_for_small_matrices():
    with pytest.raises(ValueError, match="`logs` must have at most 14 rows, got 15"):
        log_permanent(torch.zeros(15, 15))
