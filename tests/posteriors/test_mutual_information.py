"""Information in the order of units: brute force over the group, bounds, limits."""

import itertools
import math

import pytest
import torch
from cases import Forward
from torch import nn

from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian, Symmetrized
from lightning_bnn.posteriors.mutual_information import (
    Sampled,
    UnitWeights,
    confusable_units,
    draw_information,
    information_bracket,
    interpolation,
    log_ratios,
    log_ratios_of,
    permanent_information,
    squares_of,
)
from lightning_bnn.posteriors.permanents import log_bethe, log_capacity, log_permanent, quick_bethe
from lightning_bnn.posteriors.unit_layers import UnitLayer, independent_sets, unit_layers
from weightsym import discover, permute, random_permutations
from weightsym import params as P

DRAWS = [(0.5, 2, 0.10067274), (1, 5, 0.41320042), (2, 50, 0.67650584)]
"""Half distance, K, and the expectation of the estimate with K - 1 uniform draws."""


class Units(nn.Module):
    """Units that are single numbers."""

    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return torch.tanh(x * self.w).sum(-1)


def sampled(mean, std, n, seed=0):
    """Networks from a Gaussian over the tensors of ``mean``."""
    generator = torch.Generator().manual_seed(seed)
    noise = {
        k: torch.randn(n, *t.shape, generator=generator, dtype=t.dtype) for k, t in mean.items()
    }
    mu, rho = ({k: t.expand(n, *t.shape) for k, t in d.items()} for d in (mean, _logs(std)))
    weights = {k: mu[k] + rho[k].exp() * noise[k] for k in mean}
    return Sampled(weights, mu, rho, noise)


def _logs(std):
    return {k: t.log() for k, t in std.items()}


def units(mean, std, n, seed=0):
    mu, s = (torch.tensor(v, dtype=torch.float64) for v in (mean, std))
    return sampled({"w": mu}, {"w": s}, n, seed)


def layer_of(n):
    return UnitLayer(0, n, (("w", 0, torch.arange(n)[:, None]),))


@pytest.mark.parametrize(("a", "count", "expected"), DRAWS)
def test_uniform_draws_have_the_expectation_of_the_paper(a, count, expected):
    sym = discover(Units(2), torch.randn(3, 2)[:, :1])
    assert len(sym.permutations) == 1
    found = torch.cat(
        [
            draw_information(
                sym, units((a, -a), (1, 1), 500, k), count, torch.Generator().manual_seed(k)
            )
            for k in range(100)
        ]
    )
    means = found.view(100, -1).mean(1)  # one set of draws for each group of networks
    assert abs(means.mean() - expected) <= 3 * means.std() / 100**0.5
    assert (found <= math.log(count) + 1e-12).all()


def network(widths=(3, 4, 3, 2), spread=1.0, sigma=0.7, seed=0):
    """A perceptron in float64 with a Gaussian around it."""
    generator = torch.Generator().manual_seed(seed)
    model = mlp(widths[0], widths[1:-1], widths[-1], nn.Tanh).double()
    mean = {
        k: spread * torch.randn(t.shape, generator=generator, dtype=torch.float64)
        for k, t in P.of(model).items()
    }
    std = {
        k: sigma * (0.5 + torch.rand(t.shape, generator=generator, dtype=torch.float64))
        for k, t in mean.items()
    }
    sym = discover(model, torch.randn(2, widths[0], dtype=torch.float64))
    return model, sym, mean, std


def by_enumeration(sym, mean, std, drawn):
    """log q - log q^G of every network, over the whole group."""
    base = DiagonalGaussian(mean, std)
    return base.log_prob(drawn.weights) - Symmetrized(base, sym).log_prob(drawn.weights)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5])
def test_one_layer_against_all_permutations(spread):
    _, sym, mean, std = network((3, 5, 2), spread)
    drawn = sampled(mean, std, 200)
    exact = by_enumeration(sym, mean, std, drawn)
    (layer,) = unit_layers(sym, list(mean))
    found = permanent_information(layer, drawn, log_permanent)
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)


def test_units_of_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model = nn.Sequential(*model, nn.Flatten()).double().eval()
    sym = discover(model, torch.randn(2, 1, 6, 6, dtype=torch.float64))
    mean = {k: p.detach().clone() for k, p in model.named_parameters()}
    std = {k: torch.full_like(t, 0.2) for k, t in mean.items()}
    drawn = sampled(mean, std, 100)
    (layer,) = unit_layers(sym, list(mean))
    assert layer.units == 4
    assert layer.tensors == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight"}
    base = DiagonalGaussian(P.of(model), {**P.of(model), **std})
    buffers = {k: t.expand(100, *t.shape) for k, t in P.of(model).items() if k not in mean}
    every = {**drawn.weights, **buffers}
    exact = base.log_prob(every) - Symmetrized(base, sym).log_prob(every)
    torch.testing.assert_close(permanent_information(layer, drawn, log_permanent), exact)


def test_independent_sets_against_brute_force():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.zeros(1, 1, dtype=torch.long)

    def independent(chosen):
        return all(not a.tensors & b.tensors for a, b in itertools.combinations(chosen, 2))

    for _ in range(20):
        layers = []
        for k in range(7):
            pair = torch.randperm(6, generator=generator)[:2].tolist()
            units = int(torch.randint(2, 9, (), generator=generator))
            layers.append(UnitLayer(k, units, tuple((f"t{j}", 0, numbers) for j in pair)))
        every = [c for r in range(1, 8) for c in itertools.combinations(layers, r)]
        best = max(sum(one.log_order for one in c) for c in every if independent(c))
        sets = independent_sets(layers)
        assert sum(layer.log_order for layer in sets[0]) == pytest.approx(best)
        assert all(independent(chosen) for chosen in sets)
        assert {layer.group for chosen in sets for layer in chosen} == set(range(7))
    assert independent_sets([]) == []


def test_a_layer_on_both_axes_of_a_tensor_is_left_out():
    into, inner, out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def residual(net, x):
        h = net.into(x)
        return net.out(h + torch.tanh(net.inner(h)))

    model = Forward(residual, into=into, inner=inner, out=out)
    sym = discover(model, torch.randn(2, 3))
    assert [g.units for g in sym.permutations] == [4]
    assert unit_layers(sym, list(P.of(model))) == []


@pytest.mark.parametrize(
    ("spread", "sigma"),
    [(0.0, 0.3), (0.05, 0.02), (0.3, 0.02), (0.3, 1.0), (1.0, 0.3), (30.0, 1.0)],
)
def test_leaving_out_units_that_cannot_meet_changes_nothing(spread, sigma):
    _, sym, mean, std = network((6, 7, 4), spread, sigma)
    (layer,) = unit_layers(sym, list(mean))
    drawn = sampled(mean, std, 5)
    for bound in (log_permanent, log_bethe):
        full = layer.log_order - bound(log_ratios(layer, drawn))
        torch.testing.assert_close(permanent_information(layer, drawn, bound), full)


def test_rounding_does_not_hide_units_that_meet():
    """Pairs of nearly equal units, far from the mean of all, in float32."""
    mean = (1000 * torch.arange(-2, 3).float()).repeat_interleave(2)[:, None] + torch.zeros(10, 40)
    std = {"w": torch.full_like(mean, 0.5)}
    layer = layer_of(10)
    drawn = sampled({"w": mean}, std, 2)
    assert confusable_units(layer, drawn).tolist() == list(range(10))
    exact = Sampled(*({k: t.double() for k, t in part.items()} for part in drawn))
    found = permanent_information(layer, drawn, log_permanent)
    wanted = permanent_information(layer, exact, log_permanent)
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("widths", "spread"),
    [((3, 5, 2), 0.0), ((3, 5, 2), 0.3), ((3, 5, 2), 1.0), ((2, 3, 3, 2), 0.4)],
)
def test_the_bracket_holds_the_exact_value(widths, spread):
    """Of a deep network it counts all layers."""
    _, sym, mean, std = network(widths, spread)
    layers = independent_sets(unit_layers(sym, list(mean)))[0]
    drawn = sampled(mean, std, 500)
    exact = by_enumeration(sym, mean, std, drawn).mean()
    found = information_bracket(sym, layers, drawn)
    assert max(0, found.lower) <= exact <= found.upper
    if len(widths) == 3:
        assert found.upper <= layers[0].log_order + 1e-9
        assert found.capacity.mean() <= exact <= found.bethe.mean()


@pytest.mark.parametrize("bound", [log_permanent, log_bethe, lambda x: log_capacity(x, 1000)])
def test_gradients_against_finite_differences(bound):
    _, sym, mean, std = network((2, 4, 2), 0.5)
    (layer,) = unit_layers(sym, list(mean))
    noise = sampled(mean, std, 2).noise
    names = list(mean)

    def value(*tensors):
        mu = dict(zip(names, tensors[: len(names)], strict=True))
        rho = dict(zip(names, tensors[len(names) :], strict=True))
        mu, rho = ({k: t.expand(2, *t.shape) for k, t in d.items()} for d in (mu, rho))
        weights = {k: mu[k] + rho[k].exp() * noise[k] for k in names}
        return permanent_information(layer, Sampled(weights, mu, rho, noise), bound).sum()

    inputs = [mean[k].clone().requires_grad_() for k in names]
    inputs += [std[k].log().requires_grad_() for k in names]
    assert torch.autograd.gradcheck(value, inputs, eps=1e-5, atol=1e-4, fast_mode=True)


def test_interpolation_of_several_gaussians_is_that_of_each():
    g = torch.Generator().manual_seed(0)
    mean, rho = torch.randn(2, 3, 5, 4, generator=g).double()
    layer = UnitLayer(0, 5, (("w", 0, torch.arange(5)[:, None]),))
    found = interpolation([layer], {"w": mean}, {"w": rho})
    for m, r, value in zip(mean, rho, found, strict=True):
        centre = sum(m) / 5
        signal = sum(float((unit - centre) @ (unit - centre)) for unit in m)
        noise = float((2 * r).exp().sum()) * 4 / 5
        assert value.item() == pytest.approx(noise / (signal + noise))


@pytest.mark.parametrize("moved", [False, True])
def test_the_density_by_permanents_is_that_of_the_enumeration(moved, monkeypatch):
    """For networks of the Gaussian, and for such with their units in another order."""
    _, sym, mean, std = network((3, 5, 2), 0.8)
    base = DiagonalGaussian(mean, std)
    posterior = Symmetrized(base, sym)
    source = posterior if moved else base
    stack = source.sample(50, torch.Generator().manual_seed(0))
    exact = posterior.log_prob(stack)
    monkeypatch.setattr("lightning_bnn.posteriors.symmetrized._ENUMERATE_UP_TO", 1)
    torch.testing.assert_close(posterior.log_prob(stack), exact)
    drawn = Symmetrized(base, discover(mlp(3, [5, 4], 2).double(), torch.randn(2, 3).double()))
    assert drawn._layers() == []  # two layers that share a tensor


def test_the_density_of_a_wide_layer_does_not_depend_on_the_order_of_its_units():
    _, sym, mean, std = network((2, 30, 2), 0.3, 0.5)
    posterior = Symmetrized(DiagonalGaussian(mean, std), sym)
    generator = torch.Generator().manual_seed(0)
    stack = posterior.base.sample(20, generator)
    moved = permute(stack, sym, random_permutations(sym, generator, 20))
    torch.testing.assert_close(posterior.log_prob(moved), posterior.log_prob(stack))
    assert (posterior.base.log_prob(moved) < posterior.base.log_prob(stack) - 50).all()


# ------------------------------------------------------------ densities of units
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
    found = log_ratios_of(
        UnitWeights(*(t[:, units] for t in rows)), squares_of(UnitWeights(*rows)).at(units)
    )
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
