"""Permanents against brute force; their bounds, limits and gradients."""

import itertools
import math

import pytest
import torch

from lightning_bnn.posteriors.permanents import (
    log_bethe,
    log_capacity,
    log_permanent,
    log_transpositions,
)


def matrices(n, scale, count=20):
    generator = torch.Generator().manual_seed(n)
    return scale * torch.randn(count, n, n, generator=generator, dtype=torch.float64)


def brute_force(logs):
    n = logs.shape[-1]
    orders = torch.tensor(list(itertools.permutations(range(n))))
    return logs[:, torch.arange(n), orders].sum(-1).logsumexp(-1)


def below(a, b):
    return bool((a <= b + 1e-8 * (1 + b.abs())).all())


CASES = [(n, scale) for n in (1, 2, 3, 5, 8) for scale in (0.0, 0.3, 1.0, 5.0, 50.0, 500.0)]


@pytest.mark.parametrize(("n", "scale"), CASES)
def test_exact(n, scale):
    logs = matrices(n, scale)
    torch.testing.assert_close(log_permanent(logs), brute_force(logs))


@pytest.mark.parametrize(("n", "scale"), CASES)
def test_bounds_besides_that_of_bethe(n, scale):
    logs = matrices(n, scale)
    exact = brute_force(logs)
    assert below(exact, log_capacity(logs))
    assert below(exact, log_capacity(logs, sweeps=1))
    assert below(log_transpositions(logs), exact)


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
    logs = matrices(5, scale, 2).requires_grad_()
    assert torch.autograd.gradcheck(bound, (logs,), eps=1e-5, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("bound", [log_permanent, log_bethe, log_capacity, log_transpositions])
def test_rows_and_columns_can_be_scaled_and_reordered(bound):
    logs = matrices(6, 1.5, 4)
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
