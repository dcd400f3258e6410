"""IVON: a posterior in closed form, its formulas one by one, large batches, and the means."""

import functools
import math

import lightning as L
import numpy as np
import pytest
import torch
from module_cases import fitted as fit
from module_cases import made
from processes import on_ranks
from runs import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.callbacks import DrawnWeights
from lightning_bnn.samplers import IVON

N, PRECISION = 40, 4.0
G = torch.Generator().manual_seed(0)
MIX = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.2], [0.0, 0.0, 2.0]], dtype=torch.float64)
INPUTS = torch.randn(N, 3, generator=G, dtype=torch.float64) @ MIX
TARGETS = INPUTS @ INPUTS.new_tensor([1.0, -2.0, 0.5]) + INPUTS.new_empty(N).normal_(generator=G)


def loss(w, rows=slice(None)):
    """Mean negative log-likelihood of linear regression with unit noise, up to a constant."""
    return (INPUTS[rows] @ w.mT - TARGETS[rows, None]).square().mean(0).sum() / 2


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_gaussian_is_the_best_one_for_linear_regression(temperature):
    """Its mean is that of the posterior, its precisions are the diagonal of the posterior's."""
    w = nn.Parameter(INPUTS.new_zeros(400, 3))
    optimizer = IVON(
        [w], 0.3, N, temperature, PRECISION, hessian_momentum=0.98, hessian_init=1.0, momentum=0.5
    )
    for k in range(1200):
        optimizer.param_groups[0]["lr"] = 0.3 / (1 + k / 50)
        optimizer.step(lambda: (optimizer.zero_grad(), loss(w).backward()))
    precision = INPUTS.mT @ INPUTS + PRECISION * torch.eye(3).double()
    mean = torch.linalg.solve(precision, INPUTS.mT @ TARGETS)
    deviations = (temperature / precision.diagonal()).sqrt()
    assert ((w.mean(0) - mean).abs() < 0.05 * deviations).all()
    learned = optimizer.deviation(w).square().mean(0).sqrt()
    torch.testing.assert_close(learned, deviations, rtol=0.03, atol=0)
    marginals = (temperature * torch.linalg.inv(precision).diagonal()).sqrt()
    assert (learned < 0.98 * marginals)[:2].all()  # it is not the Gaussian of the marginals


def formulas(w, curvature, velocity, noise, gradient, step, o):
    """One step, number by number, as the paper writes it."""
    delta = o["prior_precision"] / N
    deviation = math.sqrt(o["temperature"] / (N * (curvature + delta)))
    theta = w + deviation * noise
    g = gradient(theta)
    estimate = g * (theta - w) / deviation**2
    rate = 1 - o["hessian_momentum"]
    new = (1 - rate) * curvature + rate * estimate
    new += rate**2 * (curvature - estimate) ** 2 / (2 * (curvature + delta))
    velocity = o["momentum"] * velocity + (1 - o["momentum"]) * g
    newton = (velocity / (1 - o["momentum"] ** step) + delta * w) / (new + delta)
    return w - o["lr"] * (o["hessian_init"] + delta) * newton, new, velocity


def test_every_step_follows_the_formulas_of_the_paper():
    options = {"lr": 0.2, "temperature": 0.5, "prior_precision": 3.0, "momentum": 0.8}
    options |= {"hessian_momentum": 0.9, "hessian_init": 0.3}
    values = [1.0, -2.0]
    params = [nn.Parameter(INPUTS.new_tensor(v)) for v in values]
    optimizer = IVON(params, num_data=N, **options)
    state = [(v, options["hessian_init"], 0.0) for v in values]
    for step in range(1, 9):
        optimizer.perturb()
        noise = [float(optimizer.offset(p) / optimizer.deviation(p)) for p in params]
        optimizer.zero_grad()
        sum(p.exp() + p.square() for p in params).backward()
        optimizer.step()
        state = [
            formulas(*s, x, lambda t: math.exp(t) + 2 * t, step, options)
            for s, x in zip(state, noise, strict=True)
        ]
        for p, (w, curvature, _) in zip(params, state, strict=True):
            assert p.item() == pytest.approx(w, rel=1e-12)
            assert optimizer.curvature(p).item() == pytest.approx(curvature, rel=1e-12)


def started(**options):
    w = nn.Parameter(INPUTS.new_ones(5, 3))
    return w, IVON([w], 0.1, N, prior_precision=1.0, hessian_momentum=0.9, **options)


def halves(rank):
    """Each process sees half of the data, and gradients are averaged, as by DDP."""
    (w, optimizer), begin = started(), 20 * rank
    for _ in range(5):
        optimizer.zero_grad()
        optimizer.perturb()
        loss(w, slice(begin, begin + 20)).backward()
        torch.distributed.all_reduce(w.grad)
        w.grad /= 2
        optimizer.step()
    return w.detach(), optimizer.curvature(w)


@pytest.mark.e2e
def test_two_processes_are_one_with_a_large_batch():
    w, optimizer = started()
    for _ in range(5):
        optimizer.step(lambda: (optimizer.zero_grad(), loss(w).backward()))
    for mean, curvature in on_ranks(halves):
        torch.testing.assert_close(mean, w.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(curvature, optimizer.curvature(w), rtol=1e-12, atol=0)


def test_means_come_back_bit_by_bit_and_draws_stay_until_a_step():
    w, optimizer = started()
    before = w.detach().clone()
    optimizer.perturb()
    drawn = w.detach().clone()
    assert not torch.equal(drawn, before)
    optimizer.restore()
    assert torch.equal(w, before)
    optimizer.perturb()
    assert torch.equal(w, drawn)
    loss(w).backward()
    optimizer.step()
    optimizer.perturb()
    assert not torch.equal(w, drawn)


@pytest.mark.bad_input
def test_gradients_at_the_means_are_refused():
    w, optimizer = started()
    loss(w).backward()
    with pytest.raises(RuntimeError, match=r"gradients at drawn weights: call `perturb\(\)`"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="Some of the gradients are not at drawn weights"):
        optimizer.step(lambda: loss(w).backward())
    optimizer.step(lambda: (optimizer.zero_grad(), loss(w).backward()))


# ------------------------------------------------------------ anybody's run
class Line(L.LightningModule):
    """A linear network that remembers which weights validation sees."""

    def __init__(self, make=lambda p: IVON(p, 0.1, N, prior_precision=1.0, hessian_momentum=0.9)):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.make, self.trained, self.judged = nn.Linear(3, 1).double(), make, [], []

    def training_step(self, batch, index):
        self.trained.append(self.net.weight.detach().clone())
        return (self.net(batch[0])[:, 0] - batch[1]).square().mean() / 2

    def validation_step(self, batch, index):
        self.judged.append(self.net.weight.detach().clone())

    def configure_optimizers(self):
        return self.make(self.parameters())


def fitted(*callbacks, batch=10, module=None, **options):
    module, data = module or Line(), DataLoader(TensorDataset(INPUTS, TARGETS), batch)
    options = {**QUIET, "max_epochs": 2, "num_sanity_val_steps": 0, **options}
    L.Trainer(callbacks=[*callbacks], **options).fit(module, data, data)
    return module


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_ones_own_learns_the_same_with_accumulated_batches():
    """Without the callback a closure is enough, unless gradients are accumulated."""
    whole = fitted(DrawnWeights(), batch=20)
    parts = fitted(DrawnWeights(), accumulate_grad_batches=2)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    alone = fitted(batch=20)
    assert torch.equal(alone.net.weight, whole.net.weight)
    with pytest.raises(RuntimeError, match="add the callback DrawnWeights"):
        fitted(accumulate_grad_batches=2)


@pytest.mark.filterwarnings("ignore")
def test_validation_sees_the_means_in_the_middle_of_a_step_too():
    drawn = DrawnWeights()
    module = fitted(drawn, accumulate_grad_batches=4, val_check_interval=2)
    start = Line().net.weight
    assert torch.equal(module.judged[0], start)
    assert not torch.equal(module.trained[0], start)
    assert torch.equal(module.judged[-1], module.net.weight)
    posterior = drawn.posterior(module.net)
    assert torch.equal(posterior.centre["weight"], module.net.weight)
    spread = posterior.sample(4000)["weight"].std(0)
    torch.testing.assert_close(spread, posterior.deviations["weight"], rtol=0.1, atol=0)
    assert np.isfinite(posterior.log_prob(posterior.sample(2)).numpy(force=True)).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.bad_input
def test_another_optimizer_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="DrawnWeights requires .* has returned Adam"):
        fitted(DrawnWeights(), module=Line(torch.optim.Adam))
    with pytest.raises(ValueError, match="IVON needs `num_data`"):
        fitted(DrawnWeights(), module=Line(IVON))
    with pytest.raises(ValueError, match="call `fit` first"):
        DrawnWeights().posterior(nn.Linear(1, 1))


# ------------------------------------------------------------ clipped gradients
@functools.cache
def settled(clip=lambda grad: None, observe=True, steps=800):
    """What IVON learns of the regression above from gradients that something may clip."""
    w = nn.Parameter(INPUTS.new_zeros(200, 3))
    options = {"hessian_momentum": 0.98, "momentum": 0.5, "seed": 1}
    optimizer = IVON([w], 0.3, N, prior_precision=PRECISION, **options)

    def closure():
        optimizer.zero_grad()
        loss(w).backward()
        if observe:
            optimizer.observe()
        clip(w.grad)

    for k in range(steps):
        optimizer.param_groups[0]["lr"] = 0.3 / (1 + k / 50)
        optimizer.step(closure)
    return w.mean(0).detach(), optimizer.deviation(w).square().mean(0).sqrt()


def shorten(limit):
    """Clip the norm of every row, each a member."""
    return lambda grad: grad.mul_((limit / grad.norm(dim=1, keepdim=True)).clamp(max=1))


CLIPS = {"norms": shorten(0.3), "values": lambda grad: grad.clamp_(-0.2, 0.2)}


@pytest.mark.parametrize("name", CLIPS)
def test_clipping_leaves_the_gaussian_as_it_is(name):
    """With gradients that are clipped unobserved, deviations are too wide."""
    mean, deviations = settled()
    clipped, learned = settled(CLIPS[name])
    assert ((clipped - mean).abs() < 0.1 * deviations).all()
    torch.testing.assert_close(learned, deviations, rtol=0.04, atol=0)
    _, wide = settled(CLIPS[name], observe=False)
    assert (wide > 1.15 * deviations).any()


class ClipsItself(Line):
    def configure_gradient_clipping(self, optimizer, *_, **__):
        self.clip_gradients(optimizer, 0.1, "norm")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Line, {"gradient_clip_val": 0.1}),
        (Line, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        (ClipsItself, {}),
    ],
)
def test_a_run_of_ones_own_may_clip(module, options):
    """The curvature after a step is that of the whole gradient."""
    curvatures = []
    for line, clips in ((Line(), {}), (module(), options)):
        drawn = DrawnWeights()
        fitted(drawn, module=line, max_steps=1, **clips)
        curvatures.append([drawn.optimizers[0].curvature(p) for p in line.parameters()])
    for whole, clipped in zip(*curvatures, strict=True):
        torch.testing.assert_close(clipped, whole, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ivon", "multi-ivon"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_modules_may_clip_too(name, algorithm):
    """After one step the curvature is that of whole gradients; the means have moved less."""
    whole, clipped = made(name), made(name)
    fit(whole, max_steps=1)
    fit(clipped, max_steps=1, gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm)
    assert torch.equal(clipped.state.curvature, whole.state.curvature)
    start = made(name).state.mean
    moved = (whole.state.mean - clipped.state.mean).abs().max()
    assert moved > 0.5 * (whole.state.mean - start).abs().max()
