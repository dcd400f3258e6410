"""Chains whose gradients are planned once for a run, beside the gradients of every other method."""

import pytest
import torch
from torch import nn

from lightning_bnn import likelihoods, methods, models, params
from lightning_bnn.samplers.energy_sampler import as_rows
from weightsym_fast import outputs, planned_chains

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, CHAINS = 45, 3
G = torch.Generator().manual_seed(0)


def convolutional():
    layers = nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(12, 3))


def frozen():
    network = models.mlp(6, [5, 4], 2, nn.Tanh)
    network[1].weight.requires_grad_(False)
    return network


IMAGES = torch.randn(ROWS, 1, 4, 4, generator=G)
X, Y = torch.randn(ROWS, 6, generator=G), torch.randn(ROWS, 2, generator=G)
CLASSES = torch.randint(3, (ROWS,), generator=G)
CASES = {
    "tanh": (lambda: models.mlp(6, [5], 2, nn.Tanh), likelihoods.Gaussian(std=0.4), X, Y),
    "relu": (lambda: models.mlp(6, [5, 4], 2), likelihoods.Gaussian(std=0.4), X, Y),
    "frozen": (frozen, likelihoods.Gaussian(), X, Y),
    "classes": (lambda: models.mlp(6, [5], 3, nn.Tanh), likelihoods.Categorical(), X, CLASSES),
    "images": (convolutional, likelihoods.Categorical(), IMAGES, CLASSES),
    "by torch": (lambda: models.mlp(6, [5], 1, nn.SiLU), likelihoods.Bernoulli(), X, CLASSES % 2),
    "scales": (lambda: models.mlp(6, [5], 4), likelihoods.Gaussian("heteroscedastic"), X, Y),
}


def begun(name, kind="HMC", parts=1, dtype=torch.float32, **options):
    """A method that is about to make its first transition."""
    make, likelihood, x, y = CASES[name]
    torch.manual_seed(0)
    network = make().to(dtype)
    x, y = x.to(dtype), y.to(dtype) if y.is_floating_point() else y
    chosen = methods.HamiltonianMonteCarlo if kind == "HMC" else methods.MILE
    method = chosen(prior_std=0.8)
    run = methods.Run(network, likelihood.to(dtype), num_data=ROWS)
    state = method.init(network, params.populate(network, CHAINS))
    sampler = method.sampler([p for p in state.parameters() if p.requires_grad], **options)
    size = parts if isinstance(parts, list) else -(-ROWS // parts)
    cut = x.split(size), y.split(size)
    batches = [methods.Batch((a,), b) for a, b in zip(*cut, strict=True)]
    method.before_fit(state, methods.Fit(optimizer=sampler, batches=lambda: batches), run)
    return method, state, run, sampler


def moved(state, scale=0.1):
    """Somewhere else, so that nothing of before may be left."""
    with torch.no_grad():
        for p in state.parameters():
            p.add_(scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))


def off(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


SMALL_END = [ROWS // 2, ROWS - ROWS // 2 - 3, 3]


@pytest.mark.parametrize(
    ("parts", "dtype"), [(1, torch.float32), (2, torch.float64), (SMALL_END, torch.float64)]
)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_gives_energies_and_gradients_of_the_method(name, parts, dtype):
    method, state, run, sampler = begun(name, parts=parts, dtype=dtype)
    field, tolerance = method.field(state, run), 1e-5 if dtype == torch.float32 else 1e-12
    before, _ = field.look(sampler.rows())
    before = before.clone()
    moved(state)
    found = field.look(sampler.rows())
    energies, *gradients = method._sums(state, run)
    assert off(found[0], energies) < tolerance
    assert off(found[1], as_rows(gradients)) < 10 * tolerance
    assert off(before, energies) > 1e-3


@pytest.mark.parametrize("kind", ["HMC", "MILE"])
@pytest.mark.parametrize("name", ["tanh", "classes"])
def test_planned_chains_go_where_others_go(name, kind, monkeypatch):
    """In double precision, for so few steps that rounding has not grown."""
    options = {"HMC": {"step_size": 0.02}, "MILE": {"descent_steps": 2, "adapt_steps": 3}}[kind]
    ends = []
    for planned in (True, False):
        method, state, run, sampler = begun(name, kind, dtype=torch.float64, **options)
        if not planned:
            monkeypatch.setattr(type(method), "field", lambda *_: None)
        starts = sampler.rows()
        energies = [method.transition(state, run, sampler.step)["energy"] for _ in range(5)]
        assert (sampler.field is not None) == planned
        assert off(sampler.rows(), starts) > 0.01
        ends.append((torch.stack(energies), sampler.rows(), torch.tensor(run.evaluated)))
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)
    method.after_fit(state, run)
    assert sampler.field is None


@pytest.mark.parametrize("broken", ["fill_slopes", "energies"])
def test_a_plan_that_gives_something_else_is_not_used(broken, monkeypatch):
    method, state, run, _ = begun("classes")
    assert method.field(state, run) is not None
    right = getattr(planned_chains._CrossEntropyMisfit, broken)

    def wrong(misfit):
        result = right(misfit)
        return misfit.plan.slopes.mul_(1.01) if result is None else 1.01 * result

    monkeypatch.setattr(planned_chains._CrossEntropyMisfit, broken, wrong)
    assert method.field(state, run) is None


def test_what_has_no_plan_runs_as_before(monkeypatch):
    method, state, run, _ = begun("tanh")
    monkeypatch.setattr(outputs, "has_compiler", lambda: False)
    assert method.field(state, run) is None
    monkeypatch.undo()
    monkeypatch.setattr(outputs, "LARGEST_PLAN", 1000)
    assert method.field(state, run) is None
    monkeypatch.undo()
    state.processes = 2
    assert method.field(state, run) is None
