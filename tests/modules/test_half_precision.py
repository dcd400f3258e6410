"""In half precision networks are rounded, sums over thousands of numbers are not."""

import copy

import pytest
import torch
from module_cases import MODULES, OF_EACH_CLASS, Blobs, made, trainer
from torch import nn

from lightning_bnn import posteriors as Q
from lightning_bnn.likelihoods import Categorical, Gaussian, IsotropicGaussianPrior
from lightning_bnn.methods import Run

HALF = torch.bfloat16, torch.float16
SIZE = 20_000
DRAWS = torch.Generator().manual_seed(0)
NUMBERS = torch.randn(8, SIZE, generator=DRAWS)
TARGETS = torch.randint(10, (SIZE // 10,), generator=DRAWS)


def run(likelihood):
    return Run(nn.Identity(), likelihood)


class Entropy(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.q = Q.DiagonalGaussian({"w": w[0]}, {"w": w[1].abs() + 0.1})

    def forward(self, _):
        return self.q.entropy()


class Density(nn.Module):
    def __init__(self, q):
        super().__init__()
        self.q = q

    def forward(self, w):
        return self.q.log_prob({"w": w[5:]})


SUMS = {
    "prior": lambda _: lambda w: IsotropicGaussianPrior(0.5).log_prob({"w": w}, stacked=True),
    "gaussian": lambda w: Density(Entropy(w).q),
    "entropy": Entropy,
    "low rank": lambda w: Density(
        Q.LowRankGaussian({"w": w[0]}, {"w": w[1].abs() + 0.1}, {"w": w[2:5]})
    ),
    "numbers": lambda _: lambda w: run(Gaussian()).nll(w[:, :, None], w[0][:, None]),
    "classes": lambda _: lambda w: run(Categorical()).nll(w.view(8, -1, 10), TARGETS),
}
"""Sums over thousands of weights or examples."""


def error(name, dtype):
    """Relative, against float64 for the same numbers."""
    w = NUMBERS.to(dtype)
    total = SUMS[name](w)
    exact = copy.deepcopy(total).double() if isinstance(total, nn.Module) else total
    found, wanted = total(w), exact(w.double())
    return ((found.double() - wanted) / wanted).abs().max().item()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_not_rounded(name, dtype):
    assert error(name, dtype) < 1e-5


@pytest.mark.parametrize("name", sorted(SUMS.keys() - {"low rank"}))
def test_sums_in_half_precision_would_be(name, monkeypatch):
    for module in ("likelihoods", "posteriors.gaussian", "methods.run"):
        monkeypatch.setattr(f"lightning_bnn.{module}.at_least_single", lambda t: t)
    assert error(name, torch.bfloat16) > 1e-4


@pytest.mark.parametrize("name", ["multi-mfvi", "mfvi sampled", "bethe"])
def test_terms_of_the_weights_are_in_single_precision(name):
    module = made(name, num_data=50).bfloat16()
    x, y = torch.randn(20, 6).bfloat16(), torch.arange(20) % 3
    terms = module.losses((x,), y)
    assert {t.dtype for t in terms.values()} == {torch.float32}
    state = copy.deepcopy(module.state).double()
    if name != "mfvi sampled":
        drawn = module.method.draw(state)
        exact = drawn.cross_entropy - drawn.entropy
        assert torch.allclose(terms["kl"].double(), exact, rtol=1e-3)


VARIATIONAL = {n for n in MODULES if "mfvi" in n} | {"bethe", "multi-capacity", "uniform"}
WARNED = VARIATIONAL | {"chains", "sghmc", "smile", "sgld", "ivon", "multi-ivon"}
"""Modules that move weights by less than half precision tells apart, which they say."""
REFUSED = {"hmc", "mile"}
"""Those that need exact energies."""


@pytest.fixture(scope="module")
def single():
    known = {}
    return lambda name: known.setdefault(name, loss(name, "32-true"))


def loss(name, precision):
    run = trainer(precision=precision, max_epochs=3)
    run.fit(made(name), Blobs())
    return run.callback_metrics["val/nll"].item()


@pytest.mark.parametrize("name", OF_EACH_CLASS)
def test_modules_learn_the_same_in_mixed_precision(name, single):
    assert loss(name, "bf16-mixed") == pytest.approx(single(name), abs=0.03)


@pytest.mark.parametrize("name", sorted({*OF_EACH_CLASS} - WARNED - REFUSED))
def test_modules_learn_the_same_in_half_precision(name, single):
    assert loss(name, "bf16-true") == pytest.approx(single(name), abs=0.03)


@pytest.mark.parametrize("name", [*sorted(WARNED.intersection(OF_EACH_CLASS)), "sgld"])
def test_modules_that_hardly_learn_in_half_precision_say_so(name, single):
    with pytest.warns(UserWarning, match="use a mixed precision"):
        found = loss(name, "bf16-true")
    assert found < 1.05
    assert name != "sgld" or found > single(name) + 0.1
