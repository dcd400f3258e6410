"""Information in the order of units: brute force over the group, bounds, limits."""

import itertools
import math

import pytest
import torch
from torch import nn

from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian, Symmetrized
from lightning_bnn.posteriors.mutual_information import (
    Sampled,
    confusable_units,
    draw_information,
    information_bracket,
    interpolation,
    log_ratios,
    permanent_information,
)
from lightning_bnn.posteriors.permanents import log_bethe, log_capacity, log_permanent
from lightning_bnn.posteriors.unit_layers import UnitLayer, independent_sets, unit_layers
from weightsym import discover, permute, random_permutations
from weightsym import params as P

DRAWS = [(0.5, 2, 0.10067274), (1, 5, 0.41320042), (1, 20, 0.48039021), (2, 50, 0.67650584)]
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
            for k in range(150)
        ]
    )
    means = found.view(150, -1).mean(1)  # one set of draws for each group of networks
    assert abs(means.mean() - expected) <= 3 * means.std() / 150**0.5
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


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5])
def test_one_layer_against_all_permutations(spread):
    """log q - log q^G of every network, by enumeration of the group."""
    _, sym, mean, std = network((3, 5, 2), spread)
    drawn = sampled(mean, std, 200)
    base = DiagonalGaussian(mean, std)
    exact = base.log_prob(drawn.weights) - Symmetrized(base, sym).log_prob(drawn.weights)
    (layer,) = unit_layers(sym, list(mean))
    found = permanent_information(layer, drawn, log_permanent)
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)


def test_units_of_convolutions():
    torch.manual_seed(0)
    model = (
        nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten()
        )
        .double()
        .eval()
    )
    sym = discover(model, torch.randn(2, 1, 6, 6, dtype=torch.float64))
    mean = {k: t.clone() for k, t in P.of(model).items() if P.is_weight(k, t) and t.ndim > 0}
    std = {k: torch.full_like(t, 0.2) for k, t in mean.items()}
    drawn = sampled(mean, std, 100)
    layers = unit_layers(sym, list(mean))
    assert [layer.units for layer in layers] == [4]
    assert layers[0].tensors == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight"}
    base = DiagonalGaussian(mean, std)
    every = {
        **drawn.weights,
        **{k: t.expand(100, *t.shape) for k, t in P.of(model).items() if k not in mean},
    }
    exact = base.log_prob(every) - Symmetrized(
        DiagonalGaussian(P.of(model), {**P.of(model), **std}), sym
    ).log_prob(every)
    torch.testing.assert_close(permanent_information(layers[0], drawn, log_permanent), exact)


def test_independent_layers_add_up_and_bound_the_whole_group_from_below():
    """Two hidden layers that share no tensor (three weights apart), and two that share one."""
    _, sym, mean, std = network((2, 3, 2, 3, 2), 0.6)
    drawn = sampled(mean, std, 400)
    base = DiagonalGaussian(mean, std)
    whole = base.log_prob(drawn.weights) - Symmetrized(base, sym).log_prob(drawn.weights)
    layers = unit_layers(sym, list(mean))
    sets = independent_sets(layers)
    assert [[layer.group for layer in chosen] for chosen in sets] == [[0, 2], [1]]
    parts = [
        sum(permanent_information(layer, drawn, log_permanent) for layer in chosen)
        for chosen in sets
    ]
    for part in parts:
        assert 0 < part.mean() < whole.mean()


def test_independent_sets_against_brute_force():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        layers = [
            UnitLayer(k, int(torch.randint(2, 9, (), generator=generator)), tuple(
                (f"t{j}", 0, torch.zeros(1, 1, dtype=torch.long))
                for j in torch.randperm(6, generator=generator)[:2].tolist()
            ))
            for k in range(7)
        ]  # fmt: skip

        def independent(chosen):
            return all(not a.tensors & b.tensors for a, b in itertools.combinations(chosen, 2))

        every = [
            chosen
            for r in range(1, 8)
            for chosen in itertools.combinations(layers, r)
            if independent(chosen)
        ]
        best = max(sum(layer.log_order for layer in chosen) for chosen in every)
        sets = independent_sets(layers)
        assert sum(layer.log_order for layer in sets[0]) == pytest.approx(best)
        assert all(independent(chosen) for chosen in sets)
        assert {layer.group for chosen in sets for layer in chosen} == set(range(7))
    assert independent_sets([]) == []


def test_a_layer_on_both_axes_of_a_tensor_is_left_out():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.into(x)
            return self.out(h + torch.tanh(self.inner(h)))

    model = Residual()
    sym = discover(model, torch.randn(2, 3))
    assert [g.units for g in sym.permutations] == [4]
    assert unit_layers(sym, list(P.of(model))) == []


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("sigma", [0.02, 0.3, 1.0])
def test_leaving_out_units_that_cannot_meet_changes_nothing(spread, sigma):
    _, sym, mean, std = network((6, 7, 4), spread, sigma)
    (layer,) = unit_layers(sym, list(mean))
    drawn = sampled(mean, std, 5)
    for bound in (log_permanent, log_bethe):
        full = layer.log_order - bound(log_ratios(layer, drawn))
        torch.testing.assert_close(permanent_information(layer, drawn, bound), full)


def test_far_units_are_left_out_and_near_ones_are_not():
    far, near = ({"w": torch.arange(20.0).double() * d} for d in (100, 0.1))
    std = {"w": torch.ones(20).double()}
    assert len(confusable_units(layer_of(20), sampled(far, std, 3))) == 0
    assert len(confusable_units(layer_of(20), sampled(near, std, 3))) == 20
    far["w"][7] = far["w"][6] + 0.5
    assert confusable_units(layer_of(20), sampled(far, std, 3)).tolist() == [6, 7]


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


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_the_bracket_holds_the_exact_value(spread):
    _, sym, mean, std = network((3, 6, 2), spread)
    layers = unit_layers(sym, list(mean))
    drawn = sampled(mean, std, 500)
    base = DiagonalGaussian(mean, std)
    exact = base.log_prob(drawn.weights) - Symmetrized(base, sym).log_prob(drawn.weights)
    found = information_bracket(sym, layers, drawn)
    assert max(0, found.lower) <= exact.mean() <= found.upper <= layers[0].log_order + 1e-9
    assert found.capacity.mean() <= exact.mean() <= found.bethe.mean()


def test_the_bracket_of_a_deep_network_counts_all_layers():
    _, sym, mean, std = network((2, 3, 3, 2), 0.4)
    drawn = sampled(mean, std, 500)
    base = DiagonalGaussian(mean, std)
    exact = base.log_prob(drawn.weights) - Symmetrized(base, sym).log_prob(drawn.weights)
    found = information_bracket(sym, independent_sets(unit_layers(sym, list(mean)))[0], drawn)
    assert found.lower <= exact.mean() <= found.upper


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


def test_interpolation_is_zero_on_a_mode_and_one_between():
    layer = layer_of(4)
    std = {"w": torch.full((1, 4), 0.5).log()}
    between = interpolation([layer], {"w": torch.ones(1, 4)}, std)
    on_a_mode = interpolation([layer], {"w": 1000 * torch.arange(4.0)[None]}, std)
    assert between.item() == 1
    assert on_a_mode.item() < 1e-6
    # by samples: noise over total of the differences from the mean unit
    mean = {"w": torch.tensor([0.0, 1.0, 2.0, 5.0])}
    drawn = sampled(mean, {"w": torch.tensor([0.5, 1.0, 2.0, 0.1])}, 200_000)
    w = drawn.weights["w"]
    total = (w - w.mean(1, keepdim=True)).square().sum(1).mean()
    signal = (mean["w"] - mean["w"].mean()).square().sum()
    rho = {"w": drawn.log_std["w"][:1]}
    found = interpolation([layer], {"w": mean["w"][None]}, rho)
    assert found.item() == pytest.approx(float((total - signal) / total), rel=1e-2)


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
