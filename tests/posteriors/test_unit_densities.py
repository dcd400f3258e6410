"""Densities of units by products and their gradients against autograd through the plain formula."""

import pytest
import torch
from test_mutual_information import layer_of, sampled
from torch import nn

from lightning_bnn.posteriors.mutual_information import (
    Rows,
    Sampled,
    confusable_units,
    log_ratios,
    log_ratios_of,
    permanent_information,
    squares_of,
)
from lightning_bnn.posteriors.permanents import log_bethe, quick_bethe
from lightning_bnn.posteriors.unit_layers import UnitLayer


def plainly(w, mu, rho):
    """Log-ratios by their definition, one difference for each pair of units and weight."""
    z = (w[:, :, None] - mu[:, None]) * (-rho[:, None]).exp()
    logs = -z.square().sum(-1) / 2 - rho.sum(-1)[:, None]
    return logs - logs.diagonal(dim1=1, dim2=2)[..., None]


def rows_of(n=40, weights=30, spread=0.3, log_std=0.0, networks=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    shape = (networks, n, weights)
    mu = spread * torch.randn(shape, generator=generator, dtype=torch.float64) + 2
    rho = log_std + 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    w = mu + rho.exp() * torch.randn(shape, generator=generator, dtype=torch.float64)
    return [t.to(dtype).requires_grad_() for t in (w, mu, rho)]


def test_some_of_the_units_have_the_squares_of_all():
    rows = rows_of(12, 5)
    units = torch.tensor([3, 5, 11])
    found = log_ratios_of(Rows(*(t[:, units] for t in rows)), squares_of(Rows(*rows)).at(units))
    wanted = plainly(*(t[:, units] for t in rows))
    weights = torch.randn(found.shape, dtype=torch.float64)
    grads = [torch.autograd.grad((weights * logs).sum(), rows) for logs in (found, wanted)]
    torch.testing.assert_close(*grads)


# ------------------------------------------------------------ the whole objective
@pytest.mark.parametrize(
    ("spread", "is_quick"), [(0.0, True), (0.05, True), (0.3, False), (1.5, False)]
)
def test_gradients_of_the_information_in_float32(spread, is_quick, monkeypatch):
    """Within 1e-5 of float64, by messages in float64 and autograd through the plain formula."""
    n, answers = 48, []
    quick = quick_bethe
    monkeypatch.setattr(
        "lightning_bnn.posteriors.permanents.quick_bethe",
        lambda *a: answers.append(quick(*a)) or answers[-1],
    )
    layer = UnitLayer(0, n, (("w", 0, torch.arange(n)[:, None]),))
    rows = rows_of(n, 30, spread, dtype=torch.float32)
    bound = lambda logs: log_bethe(logs, 32, 1e-5)  # noqa: E731
    noise = (rows[0] - rows[1]) * (-rows[2]).exp()
    stacks = Sampled(*({"w": t} for t in (*rows, noise)))
    found = torch.autograd.grad(permanent_information(layer, stacks, bound).sum(), rows)
    assert (answers[0] is not None) == is_quick
    doubles = [t.detach().double().requires_grad_() for t in rows]
    wanted = torch.autograd.grad(-log_bethe(plainly(*doubles), 500, 1e-12).sum(), doubles)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm() / b.norm().clamp(min=1e-3 * n)) < 1e-5


@pytest.mark.parametrize(
    "logs",
    [
        30 * torch.eye(40),
        torch.full((40, 40), torch.nan),
        torch.full((40, 40), -torch.inf),
        torch.zeros(40, 40, dtype=torch.float64),
        torch.zeros(8, 8),
        (20 * torch.randn(40, 40, generator=torch.Generator().manual_seed(0))),
    ],
    ids=["certain", "nan", "impossible", "float64", "small", "wide"],
)
def test_what_needs_float64_is_left_to_it(logs):
    assert quick_bethe(logs, 32, 1e-5) is None
    assert quick_bethe(torch.zeros(40, 40), 32, 1e-9) is None


# ------------------------------------------------------------ screening
def meeting(drawn, threshold=60.0):
    """Units with a log-ratio above minus the threshold, by the formula."""
    logs = plainly(*(stack["w"].double() for stack in drawn[:3]))
    near = (logs > -threshold).any(0)
    near.fill_diagonal_(False)
    return (near.any(0) | near.any(1)).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0, 4.0])
def test_units_that_meet_are_found_among_many(spread):
    generator = torch.Generator().manual_seed(1)
    mean = {"w": spread * torch.randn(150, 20, generator=generator)}
    mean["w"][80] = mean["w"][140] + 0.1
    drawn = sampled(mean, {"w": torch.ones(150, 20)}, 2)
    found = confusable_units(layer_of(150), drawn).tolist()
    assert set(meeting(drawn)) <= set(found) <= set(meeting(drawn, 61.0))
    assert {80, 140} <= set(found)


def test_sums_of_squares_and_rounded_up_rows():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    stack = {n: torch.stack([p, 2 * p]).detach() for n, p in net.named_parameters()}
    positions = torch.arange(16).view(4, 4)
    layer = UnitLayer(0, 4, (("0.weight", 0, torch.arange(4)[:, None]), ("2.weight", 1, positions)))
    rows = layer.rows(stack)
    assert rows.shape == (2, 4, 18 + 12)
    torch.testing.assert_close(layer.square_sums(stack), rows.square().sum(2))
    wide = layer.rows(stack, torch.tensor([2, 0]), 16)
    torch.testing.assert_close(wide[..., :30], rows[:, [2, 0]])
    assert wide.shape == (2, 2, 32)
    assert not wide[..., 30:].any()
    assert log_ratios(layer, Sampled(stack, stack, stack, stack)).shape == (2, 4, 4)
