"""The objective of variational inference against closed forms, and its noise against its law."""

import math

import pytest
import torch
from cases import Forward
from module_cases import Blobs, adam, network, trainer
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from lightning_bnn.likelihoods import Gaussian, IsotropicGaussianPrior
from lightning_bnn.modules import MFVI, SymmetrizedVI

NOISE, PRIOR = 0.5, 1.3

pytestmark = pytest.mark.filterwarnings("ignore")


def line():
    """Two weights, no bias."""
    return Forward(lambda s, x: s.w(x), w=nn.Linear(2, 1, bias=False))


def regression():
    """Twenty rows with orthogonal columns: the posterior over the two weights is diagonal."""
    g = torch.Generator().manual_seed(0)
    x = torch.linalg.qr(torch.randn(20, 2, generator=g, dtype=torch.float64))[0]
    x = x * torch.tensor([3.0, 0.8])
    y = x @ torch.tensor([[0.7], [-1.1]], dtype=torch.float64)
    return x, y + NOISE * torch.randn(20, 1, generator=g, dtype=torch.float64)


def exact(temperature=1.0):
    """Mean and standard deviation of the tempered posterior, and the log evidence."""
    x, y = regression()
    precision = (x.T @ x).diagonal() / NOISE**2 + PRIOR**-2
    mean = (x.T @ y)[:, 0] / NOISE**2 / precision
    cov = PRIOR**2 * x @ x.T + NOISE**2 * torch.eye(20)
    evidence = MultivariateNormal(torch.zeros(20).double(), cov).log_prob(y[:, 0])
    return mean, (temperature / precision).sqrt(), evidence


def model(temperature=1.0, samples=20_000, kl="closed", **options):
    module = MFVI(
        line(), prior_std=PRIOR, likelihood=Gaussian(std=NOISE), temperature=temperature, kl=kl,
        elbo_samples=samples, num_data=20, **options,
    ).double()  # fmt: skip
    mean, std, _ = exact(temperature)
    with torch.no_grad():
        module.state.mean[0], module.state.log_std[0] = mean, std.log()
    return module


@pytest.mark.parametrize(
    ("shift", "scale", "kl"),
    [(0.0, 1.0, "closed"), (0.0, 1.0, "sampled"), (0.3, 0.5, "closed"), (-0.2, 2.0, "closed")],
)
def test_the_elbo_is_below_the_evidence_by_the_kl_divergence(shift, scale, kl):
    x, y = regression()
    module, (mean, std, evidence) = model(kl=kl), exact()
    with torch.no_grad():
        module.state.mean += shift
        module.state.log_std += math.log(scale)
    gap = kl_divergence(Normal(mean + shift, std * scale), Normal(mean, std)).sum()
    terms = module.losses((x,), y)
    assert terms["elbo"].item() == pytest.approx(float(evidence - gap), abs=0.1)
    assert -20 * terms["loss"].item() == pytest.approx(float(evidence - gap), abs=0.1)
    assert (gap > 0.2) == (shift != 0)


@pytest.mark.parametrize(("temperature", "kl"), [(0.25, "closed"), (4.0, "sampled")])
def test_the_tempered_posterior_is_the_optimum(temperature, kl):
    """Gradients vanish there, and only there."""
    x, y = regression()

    def gradient(module):
        loss = module.losses((x,), y)["loss"].sum()
        grads = torch.autograd.grad(loss, [module.state.mean, module.state.log_std])
        return torch.cat([g.flatten() for g in grads]).abs().max()

    module = model(temperature, 100_000, kl)
    assert gradient(module) < 4e-3
    module.method.temperature = 2 * temperature
    assert gradient(module) > 1e-2


def test_the_kl_weight_multiplies_all_complexity():
    x, y = regression()
    module = model(samples=3)
    torch.manual_seed(0)
    one = module.losses((x,), y)
    module.method.kl_weight = 0.0
    torch.manual_seed(0)
    none = module.losses((x,), y)
    torch.testing.assert_close(none["loss"], none["nll"])
    torch.testing.assert_close(one["loss"], one["nll"] + one["kl"] / 20)


def test_statistics_are_the_mean_over_the_samples_of_a_step():
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    module = MFVI(net, init_std=0.5, elbo_samples=5, num_data=9).train()
    module.template.train()
    x = torch.randn(9, 6)
    drawn = module.method.draw(module.state)
    module.method.draw = lambda _: drawn
    module.losses((x,), torch.randint(3, (9,)))
    first = drawn.weights
    hidden = x @ first["0.weight"].mT + first["0.bias"][:, None]
    wanted = 0.1 * hidden.mean((0, 1))
    torch.testing.assert_close(module.member_stack()["1.running_mean"][0], wanted)
    assert module.member_stack()["1.num_batches_tracked"].tolist() == [1]


def test_blitz_start_and_prior():
    module = MFVI(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 30)), initialisation="blitz"
    )
    stds = {k: v[0] for k, v in module.state.deviations().items()}
    assert stds["0.weight"].unique().item() == pytest.approx(math.log1p(math.exp(-6)), rel=1e-5)
    assert stds["2.bias"].unique().item() == pytest.approx(math.log1p(math.exp(-7)), rel=1e-5)
    assert module.state.mean.std().item() == pytest.approx(0.1, rel=0.2)
    assert module.state.mean.mean().item() == pytest.approx(0, abs=0.03)


# ------------------------------------------------------------ noise
def conv_network():
    return Forward(lambda s, x: s.conv(x).flatten(1), conv=nn.Conv2d(2, 3, 2, stride=1, padding=1))


def tokens():
    return Forward(lambda s, x: s.linear(x).flatten(1), linear=nn.Linear(3, 2, bias=False))


BOTH = ("local", "flipout")
NETWORKS = {
    "linear": (lambda: nn.Linear(3, 2), (3,), BOTH),
    "conv": (conv_network, (2, 2, 2), BOTH),
    "tokens": (tokens, (2, 3), BOTH),
}


def outputs(module, x, n):
    """Outputs of n weight samples, as the module's training draws them."""
    seen = []
    module.likelihood.log_prob = lambda z, y: (seen.append(z.detach()), z.sum((-1, -2))[:, None])[1]
    module.losses((x,), torch.zeros(len(x)))
    return torch.cat(seen)


def loaded(module):
    module.load_state_dict(module.state_dict())
    return module


@pytest.mark.parametrize("name", ["linear", "tokens", pytest.param("conv", marks=pytest.mark.e2e)])
def test_every_example_sees_the_law_of_a_weight_sample(name):
    """Mean and covariance of the outputs of one example; examples are uncorrelated."""
    make, shape, kinds = NETWORKS[name]
    torch.manual_seed(0)
    n, net, x = 2500, make(), torch.randn(2, *shape)
    options = {"init_std": 0.4, "elbo_samples": n, "num_data": 10}
    modules = [MFVI(net, reparameterisation=kind, **options) for kind in kinds]
    spread = 0.5 * torch.randn_like(modules[0].state.log_std)
    with torch.no_grad():
        for module in modules:
            module.state.log_std += spread
        plain = loaded(modules[0]).posterior().predict(net, x, 10_000)
        both = [outputs(module, x, n) for module in modules]

    def correlation(z):
        a, b = (z[:, k] - z[:, k].mean(0) for k in (0, 1))
        return ((a * b).mean(0) / (a.std(0) * b.std(0))).abs().max()

    assert correlation(plain) > 0.15
    for found in both:
        for k in range(2):
            wanted, seen = (torch.cov(z[:, k].T) for z in (plain, found))
            scale = wanted.diagonal().max()
            assert (seen - wanted).abs().max() < 0.12 * scale
            assert (found[:, k].mean(0) - plain[:, k].mean(0)).abs().max() < 0.08 * scale.sqrt()
        assert correlation(found) < 0.08


def twice():
    return Forward(lambda s, x: s.layer(torch.tanh(s.layer(x))), layer=nn.Linear(4, 4))


def test_flipout_uses_one_weight_sample_where_a_layer_is_used_twice():
    """The mean over signs of a product of two uses is that of weight samples."""
    torch.manual_seed(0)
    net, x = twice(), torch.randn(2, 4)
    module = MFVI(net, reparameterisation="flipout", init_std=0.4, elbo_samples=4000, num_data=9)
    with torch.no_grad():
        found = outputs(module, x, 4000)
        plain = loaded(module).posterior().predict(net, x, 15_000)
    error = plain.std(0) / 4000**0.5
    assert ((found.mean(0) - plain.mean(0)).abs() < 5 * error).all()
    torch.testing.assert_close(found.std(0), plain.std(0), rtol=0.1, atol=0)


def mixed():
    """A weight of a layer that is used in another way, too."""
    return Forward(lambda s, x: s.layer(x) + x @ s.layer.weight, layer=nn.Linear(4, 4))


ROLES = "layer.weight is the weight of a layer, and also has"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("net", "kind", "message"),
    [(twice, "local", "used twice"), (mixed, "local", ROLES), (mixed, "flipout", ROLES)],
)
def test_weights_without_noise_for_every_example_are_refused(net, kind, message):
    module = MFVI(net(), reparameterisation=kind, num_data=9)
    with pytest.raises(ValueError, match=message):
        module.losses((torch.randn(2, 4),), torch.randint(4, (2,)))


class Biased(nn.Module):
    """A prior that prefers the first unit to be large."""

    def log_prob(self, params, names, stacked):
        w = params["0.weight"]
        return -(w * torch.arange(w.shape[1])[:, None]).square().sum((1, 2))


def symmetries(net, example, **options):
    module = SymmetrizedVI(net, **options)
    module.example_input_array = example
    return module.method.units(module.state, module.run).symmetries


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MFVI(network(), prior=Biased()), "a custom `prior` has no closed form"),
        (lambda: MFVI(network()).member(1), "`index` must be between 0 and 0"),
        (lambda: loaded(SymmetrizedVI(network())).posterior(), "example of the input"),
        (
            lambda: symmetries(network(), torch.randn(2, 6), prior=Biased(), kl="sampled"),
            "`prior` Biased is not invariant to permutations of units",
        ),
        (lambda: symmetries(nn.Linear(3, 2), torch.randn(2, 3)), "Linear has no units to permute"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    prior = IsotropicGaussianPrior(0.3)
    assert symmetries(network(), torch.randn(2, 6), prior=prior, kl="sampled").permutations


# ------------------------------------------------------------ turns of layers
def deep():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    )  # fmt: skip


def test_noise_is_fresh_in_every_step_of_every_epoch():
    module, noise = MFVI(deep(), optimizer=adam), []
    draw = module.method.draw

    def seen(state):
        drawn = draw(state)
        noise.append(drawn.noise.flatten()[:3].tolist())
        return drawn

    module.method.draw = seen
    trainer(max_epochs=2).fit(module, Blobs())
    assert len({tuple(row) for row in noise}) == len(noise) == 12


def test_far_units_leave_training_as_it_is():
    """The information is a constant then: weights are those of mean-field VI, bit for bit."""

    def weights(kind, **options):
        module = kind(deep(), init_std=1e-3, optimizer=adam, **options)
        trainer(max_epochs=2).fit(module, Blobs())
        return module.state.mean.detach(), module.state.log_std.detach()

    plain = weights(MFVI)
    for options in ({}, {"estimator": "capacity"}, {"estimator": "uniform", "draws": 5}):
        for a, b in zip(plain, weights(SymmetrizedVI, **options), strict=True):
            assert torch.equal(a, b)


def test_near_units_are_driven_apart():
    def weights(kind, **options):
        module = kind(deep(), init_std=0.7, prior_std=0.7, optimizer=adam, **options)
        trainer(max_epochs=10, limit_val_batches=0).fit(module, Blobs())
        module.example_input_array = torch.randn(2, 6)
        return module

    def interpolation(module):
        return module.method.bracket(module.state, module.run)["interpolation"]

    plain, ours = weights(MFVI), weights(SymmetrizedVI)
    other = SymmetrizedVI(deep(), num_data=60)
    other.example_input_array = torch.randn(2, 6)
    other.load_state_dict(plain.state_dict())
    assert interpolation(ours) < interpolation(other)


def test_the_bracket_is_logged():
    run = trainer(max_epochs=1)
    run.fit(SymmetrizedVI(deep(), init_std=0.5, optimizer=adam), Blobs())
    found = {k: float(v) for k, v in run.callback_metrics.items()}
    low, high = (found[f"val/permutation_info_{k}"] for k in ("lower", "upper"))
    assert 0 <= low <= high <= 7.9656 + 1e-3  # log(5! 4!)
    assert 0 < found["val/interpolation"] < 1
    assert found["train/sym_elbo"] >= found["train/elbo"]


def stepped(every, numbers, kind=SymmetrizedVI, **options):
    """Gradients and information of some steps from one start, each with noise of its own."""
    given = {"every": every} if kind is SymmetrizedVI else {}
    module = kind(deep(), num_data=60, **{"init_std": 0.5, **given, **options})
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    found = []
    for k in numbers:
        module.zero_grad()
        torch.manual_seed(k)
        terms = module.losses((x,), y, False, k)
        terms["loss"].sum().backward()
        information = terms.get("permutation_info", terms["nll"]).detach()
        found.append((module.state.mean.grad, module.state.log_std.grad, information))
    return found


@pytest.mark.parametrize("options", [{}, {"members": 2}, {"estimator": "capacity"}])
def test_a_gradient_that_is_held_is_that_of_the_step_before(options):
    """What a held step adds to mean-field VI is what the step that computed it has added."""
    ours = stepped(3, range(6), **options)
    for k in (3, 4, 5):
        assert torch.equal(ours[k][2], ours[3][2])
    assert not torch.equal(ours[0][2], ours[3][2])
    if not options:
        plain = stepped(3, range(6), MFVI)
        added = [[g - p for g, p in zip(ours[k][:2], plain[k][:2], strict=True)] for k in (3, 4)]
        for anew, held in zip(*added, strict=True):
            assert anew.abs().amax() > 1e-4
            torch.testing.assert_close(held, anew, rtol=1e-3, atol=1e-7)


def test_layers_take_turns_in_the_steps_that_compute_it():
    """Far units, log 5! and log 4!: a step that computes nothing is no turn."""
    found = [float(step[2]) for step in stepped(2, range(6), init_std=1e-3)]
    assert found == pytest.approx([4.787492] * 2 + [3.178054] * 2 + [4.787492] * 2, abs=1e-4)
    assert float(stepped(2, [3], init_std=1e-3)[0][2]) > 3  # nothing was held yet
