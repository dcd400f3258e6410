"""Learning coefficients of networks whose laws are known, and what cannot have one."""

import itertools
import math
import sys

import lightning as L
import pytest
import torch
from runs import QUIET, Plain, Points, built, network
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_bnn.callbacks import LearningCoefficient
from lightning_bnn.likelihoods import Bernoulli, Categorical
from lightning_bnn.methods import CoefficientEstimate, learning_coefficient
from lightning_bnn.models import mlp
from lightning_bnn.modules import DeepEnsemble
from weightsym import discover
from weightsym import params as P


class Function(nn.Module):
    """Some numbers, as a function of the weights alone."""

    def __init__(self, weights, function):
        super().__init__()
        self.weights, self.function = nn.Parameter(weights.double()), function

    def forward(self, x):
        return self.function(self.weights)


def half_square(outputs, y):
    return outputs.square().sum() / 2


def estimate(network, n, **options):
    data = torch.zeros(n, 1).double(), torch.zeros(n)
    return learning_coefficient(network, half_square, data, **options)


# ------------------------------------------------------------ regular models
ROOTS = torch.tensor([0.4, 0.6, 1.0, 2.0]).double()
"""Of the curvatures."""


@pytest.mark.parametrize(("lr", "localization"), [(0.03, 30.0), (0.35, 3.0)])
@pytest.mark.filterwarnings("ignore:The learning coefficient")
def test_a_quadratic_has_half_its_dimension_less_what_holds_chains_and_more_by_steps(
    lr, localization
):
    network = Function(torch.zeros(4), lambda w: ROOTS * w)
    found = estimate(network, 50, lr=lr, localization=localization, chains=200, steps=500)
    k, strength = ROOTS.square(), 50 / math.log(50)
    shares = strength * k / (strength * k + localization)
    exact = shares / (1 - lr * (k + localization / strength) / 2) / 2
    assert abs(found.value - float(exact.sum())) < 4 * found.error + 0.01
    assert abs(found.value - 2) > 8 * found.error
    assert found.wbic == pytest.approx(50 * float(found.losses.mean()))
    assert found.rhat < 1.1
    assert found.loss == 0


# ------------------------------------------------------------ singular models
def products(rows, columns, hidden, rank):
    """A deep linear network at a matrix of lower rank: reduced rank regression."""
    target = torch.zeros(rows, columns).double()
    target[range(rank), range(rank)] = 1
    left, right = torch.zeros(rows, hidden), torch.zeros(hidden, columns)
    left[range(rank), range(rank)] = right[range(rank), range(rank)] = 1

    def function(w):
        a, b = w.split([rows * hidden, hidden * columns])
        return (a.view(rows, hidden) @ b.view(hidden, columns) - target).flatten()

    return Function(torch.cat([left.flatten(), right.flatten()]), function)


SINGULAR = {
    "w1 w2^2": (Function(torch.zeros(2), lambda w: (w[0] * w[1] ** 2)[None]), 1 / 4),
    "rank 1": (products(2, 3, 2, 1), 5 / 2),  # Aoyagi and Watanabe (2005)
}


def brute_force(network, n):
    """The same mean by weighing draws of the Gaussian that holds the chains."""
    generator, strength = torch.Generator().manual_seed(0), n / math.log(n)
    shape = 200_000, *network.weights.shape
    draws = network.weights.detach() + torch.randn(shape, generator=generator).double()
    losses = strength * torch.vmap(network.function)(draws).square().sum(1) / 2
    weights = (-losses).exp()
    return float((weights * losses).sum() / weights.sum())


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_models_have_less_than_half_their_dimension(name):
    network, coefficient = SINGULAR[name]
    options = {"localization": 1.0, "lr": 0.025, "chains": 200, "steps": 400}
    found = estimate(network, 40, **options)
    assert abs(found.value - brute_force(network, 40)) < 4 * found.error + 0.04 * found.value
    half = found.bound
    assert half == len(network.weights) / 2
    assert found.value < half - 10 * found.error
    assert abs(found.value - coefficient) < abs(found.value - half)


@pytest.mark.slow
def test_reduced_rank_regression_has_the_coefficient_of_aoyagi_and_watanabe():
    network, coefficient = SINGULAR["rank 1"]
    options = {"localization": 1.0, "lr": 0.02, "chains": 200, "steps": 12000}
    assert estimate(network, 1500, **options).value == pytest.approx(coefficient, rel=0.1)


# ------------------------------------------------------------ networks
X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(64, 1)


def squares(outputs, y):
    return (outputs - y).square().mean() / 2


def test_the_bound_leaves_out_the_orbit_and_says_where_steps_are_too_large():
    torch.manual_seed(0)
    net = mlp(3, [4], 1)
    sym = discover(net, X)
    assert estimate_of(net, sym).bound == (21 - 4) / 2
    assert estimate_of(net).bound == 21 / 2
    dead = mlp(3, [4], 1)
    dead[1].weight.data[0], dead[1].bias.data[0], dead[3].weight.data[:, 0] = 0, 0, 0
    assert estimate_of(dead, sym).bound == (21 - 3) / 2
    net[1].weight.requires_grad_(False)
    assert estimate_of(net, sym).bound == (21 - 12) / 2
    linear = nn.Linear(3, 1)
    nn.init.zeros_(linear.weight), nn.init.zeros_(linear.bias)
    with pytest.warns(UserWarning, match="exceeds its bound for a smooth loss"):
        learning_coefficient(linear, squares, (X, Y), lr=1.2, localization=1.0, steps=200)


def estimate_of(net, sym=None, **options):
    options = {"steps": 16, "localization": 0.0, "lr": 0.01, **options}
    return learning_coefficient(net, squares, (X, net(X).detach()), sym, **options)


@pytest.mark.parametrize(
    ("sizes", "frozen"), [((3, 2, 5, 2), 3), ((2, 3, 3), 0), ((4, 1, 1, 3), 2)]
)
def test_the_bound_of_a_linear_network_is_half_the_rank_of_its_outputs(sizes, frozen, monkeypatch):
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))).double()
    x = torch.randn(9, sizes[0]).double()
    sym, weights = discover(net, x), P.of(net)
    for p in list(net.parameters())[:frozen]:
        p.requires_grad_(False)
    free = {n: weights[n].detach() for n, p in net.named_parameters() if p.requires_grad}
    outputs = torch.func.jacrev(lambda w: torch.func.functional_call(net, {**weights, **w}, (x,)))
    slopes = [t.flatten(2).flatten(0, 1) for t in outputs(free).values()]
    rank = torch.linalg.matrix_rank(torch.cat(slopes, 1))
    options = {"steps": 16, "localization": 0.0, "lr": 0.001}
    bound = learning_coefficient(net, squares, (x, net(x).detach()), sym, **options).bound
    numbers = sum(t.numel() for t in free.values())
    assert bound == rank / 2
    monkeypatch.setattr(sys.modules[CoefficientEstimate.__module__], "_TANGENTS", 9)
    bound = learning_coefficient(net, squares, (x, net(x).detach()), sym, **options).bound
    assert bound == numbers / 2


CLASSES = torch.randint(0, 2, (64,), generator=torch.Generator().manual_seed(1))


def of(likelihood):
    return lambda outputs, y: -likelihood.log_prob(outputs, y).mean()


@pytest.mark.parametrize(
    ("likelihood", "reference", "outputs"),
    [
        (Categorical(), F.cross_entropy, 2),
        (Bernoulli(), lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()), 1),
    ],
)
def test_likelihoods_of_classes_have_coefficients_by_minibatches(likelihood, reference, outputs):
    torch.manual_seed(0)
    net, options = mlp(3, [4], outputs), {"steps": 32, "batch_size": 8}
    found = learning_coefficient(net, of(likelihood), (X, CLASSES), **options)
    wanted = learning_coefficient(net, reference, (X, CLASSES), **options)
    torch.testing.assert_close(found.losses, wanted.losses)
    with pytest.raises(ValueError, match="`(labels|targets)` must be"):
        learning_coefficient(net, of(likelihood), (X, CLASSES + 7), **options)


def test_minibatches_have_the_coefficient_of_all_data():
    torch.manual_seed(0)
    net = mlp(3, [4], 1)
    options = {"steps": 200, "chains": 32, "localization": 20.0, "lr": 0.05}
    whole, parts = estimate_of(net, **options), estimate_of(net, batch_size=16, **options)
    assert abs(whole.value - parts.value) < 4 * (whole.error + parts.error)
    assert parts.losses.shape == (32, 100)
    assert whole.value > 10 * whole.error


def test_one_seed_gives_one_estimate_and_leaves_everything_alone():
    net = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 1)
    )
    state = {n: t.clone() for n, t in net.state_dict().items()}
    numbers = torch.get_rng_state()
    with torch.no_grad():
        one, again, other = (estimate_of(net.eval(), batch_size=8, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.losses, again.losses)
    assert not torch.equal(one.losses, other.losses)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(t, state[n]) for n, t in net.state_dict().items())
    assert not any(p.grad is not None for p in net.parameters())
    net.train()
    estimate_of(net)
    assert all(module.training for module in net.modules())


def test_losses_may_look_at_values():
    def checked(outputs, y):
        assert y.sum().item() == 0
        return squares(outputs, y)

    net, options = nn.Linear(3, 1), {"steps": 16, "batch_size": 8}
    estimates = [learning_coefficient(net, loss, (X, Y), **options) for loss in (checked, squares)]
    torch.testing.assert_close(*(e.losses for e in estimates))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chains": 1}, "`chains` must be at least 2, got 1"),
        ({"steps": 15}, "`steps` must be at least 16"),
        ({"lr": 0.0}, "`lr` must be positive"),
        ({"localization": -1.0}, "`localization` must not be negative"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"lr": 1e6, "steps": 16}, r"chains \[0, 1, 2, 3\] of 4 have diverged: set"),
        ({"data": (X[:1], Y[:1])}, "`data` has 1 example"),
        ({"data": (X, Y * math.nan)}, "the loss of `network` is nan"),
        ({"network": nn.Flatten()}, "no weights that require gradients"),
        ({"data": X}, "`data` must be inputs and targets"),
        ({"loss": F.mse_loss, "reduction": "none"}, "`loss` must return one number"),
        ({"loss": lambda o, y: 1.0}, "`loss` must return a tensor, got float"),
        ({"loss": lambda o, y: squares(o, y).item()}, "`loss` must return a tensor, got float"),
        ({"loss": lambda o, y: o.logits}, "`loss` fails: AttributeError"),
        ({"symmetries": 3}, "must be a `Symmetries` from `discover`, got int"),
    ],
)
def test_what_has_no_coefficient_is_refused(options, message):
    torch.manual_seed(0)
    if options.pop("reduction", None):
        options["loss"] = lambda o, y: F.mse_loss(o, y, reduction="none")
    options = {"network": mlp(3, [4], 1), "loss": squares, "data": (X, Y), **options}
    with pytest.raises(ValueError, match=message):
        learning_coefficient(**options)


# ------------------------------------------------------------ the callback
def watched(module, steps=20, epochs=4, **options):
    callback = LearningCoefficient(steps=steps, **options)
    trainer = L.Trainer(**QUIET | {"max_epochs": epochs, "callbacks": [callback]})
    trainer.fit(module, DataLoader(Points(), 6))
    return callback, trainer


@pytest.mark.parametrize("loss", [None, F.cross_entropy])
def test_the_callback_sees_the_network_and_its_data(loss):
    module = built(Plain, 0.0)
    module.net.register_forward_hook(lambda net, _, z: setattr(net, "last", z))
    callback, trainer = watched(module, loss=loss, every_n_epochs=2, examples=30, lr=0.01)
    assert [step for step, _ in callback.history] == [12, 24]
    data = Points().x[:30], Points().y[:30]
    expected = learning_coefficient(module.net.eval(), F.cross_entropy, data, steps=20, lr=0.01)
    row = [expected.value, expected.error, expected.rhat, expected.wbic]
    assert callback.history[-1][1] == pytest.approx(row, rel=1e-4)
    assert trainer.logged_metrics["learning_coefficient/wbic"] == pytest.approx(row[-1], rel=1e-4)


def test_of_our_modules_it_sees_the_first_member():
    """By the likelihood, whose checks look at targets, and with minibatches."""
    torch.manual_seed(0)
    module = DeepEnsemble(network(), members=2)
    settings = {"steps": 20, "examples": 36, "batch_size": 8}
    callback, _ = watched(module, epochs=1, **settings)
    first = network()
    first.load_state_dict({n: t[0] for n, t in module.weights()[1].items()}, strict=False)
    data = Points().x, Points().y
    expected = learning_coefficient(first.eval(), F.cross_entropy, data, steps=20, batch_size=8)
    assert callback.history[0][1][0] == pytest.approx(expected.value, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lr": 1e8}, "chains .* have diverged"), ({"loss": lambda o, y: o.logits}, "`loss` fails")],
)
def test_what_has_no_coefficient_switches_the_callback_off(options, message):
    with pytest.warns(UserWarning, match=f"switched off: {message}"):
        callback, trainer = watched(built(Plain, 0.0), **options)
    assert not callback.history
    assert trainer.global_step == 24
