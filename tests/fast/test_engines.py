"""Engines give what torch gives, and everything runs without them."""

import logging
from importlib.metadata import EntryPoint

import pytest
import torch
from pretended_graphs import pretend_a_gpu
from processes import fresh
from torch import nn

from lightning_bnn import likelihoods, methods, models
from weightsym import params as P
from weightsym.networks import engines

X = torch.linspace(-1, 1, 120, dtype=torch.float64).view(20, 6).sin()
Y = X[:, :2].cumsum(1)


def network(seed):
    torch.manual_seed(seed)
    return models.mlp(6, [5], 2, nn.Tanh).double()


def stack_of(net, seed):
    return P.populate(net, 3, torch.Generator().manual_seed(seed))


def predicted(seed):
    """Outputs of a stack, and the gradients of its weights."""
    net = network(seed)
    stack = {n: t.requires_grad_() for n, t in stack_of(net, seed).items()}
    outputs = P.apply(net, stack, X)
    return [outputs, *torch.autograd.grad(outputs.square().sum(), list(stack.values()))]


def trained(seed):
    """Losses along a training, and the weights at its end."""
    net, method = network(seed), methods.DeepEnsemble()
    run = methods.Run(net, likelihoods.Gaussian(std=0.5).double())
    state, losses = method.init(net, stack_of(net, seed)), []
    optimizer = torch.optim.SGD(state.parameters(), 0.01)
    for _ in range(6):
        losses.append(method.losses(state, methods.Batch((X,), Y), run)["loss"])
        optimizer.zero_grad()
        losses[-1].sum().backward()
        optimizer.step()
    return [*losses, *state.stack().values()]


def sampled(seed):
    """Energies along chains, where they end, and the gradients that they took."""
    net, method = network(seed), methods.HamiltonianMonteCarlo()
    run = methods.Run(net, likelihoods.Gaussian(std=0.5).double(), num_data=len(X))
    state = method.init(net, stack_of(net, seed))
    sampler = method.sampler(state.parameters(), step_size=0.02, leapfrog_steps=3, seed=1)
    batches = [methods.Batch((X,), Y)]
    method.before_fit(state, methods.Fit(optimizer=sampler, batches=lambda: batches), run)
    energies = [method.transition(state, run, sampler.step)["energy"] for _ in range(4)]
    return [*energies, sampler.rows(), torch.tensor(run.evaluated)]


USES = {
    "machine_code": predicted,
    "planned_chains": sampled,
    "loss_graphs": trained,
    "energy_graphs": sampled,
}


def known():
    return {p.name: p.load()() for p in engines.entry_points(group=engines.GROUP)}


def test_every_engine_has_a_law():
    assert known().keys() == USES.keys()


@pytest.mark.parametrize("name", USES)
def test_results_with_and_without_an_engine_agree(name, monkeypatch):
    if name.endswith("graphs"):
        pretend_a_gpu(monkeypatch)
    engine, ran = known()[name], []
    monkeypatch.setattr(engines, "engines", lambda: ())
    without, others = USES[name](0), USES[name](2)
    run = type(engine).run
    monkeypatch.setattr(type(engine), "run", lambda *args: ran.append(1) or run(*args))
    monkeypatch.setattr(engines, "engines", lambda: (engine,))
    found = USES[name](0)
    assert ran
    for ours, theirs, other in zip(found, without, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        assert other.ndim == 0 or not torch.allclose(other, theirs, rtol=1e-3)


NOTHING_LOADED = """
import sys, torch, weightsym
from weightsym import params as P
from weightsym.networks import engines
net = torch.nn.Linear(2, 1)
P.apply(net, P.of(net), torch.ones(3, 2))
print(engines.engines.cache_info().currsize, "weightsym_fast" in sys.modules)
P.apply(net, P.populate(net, 2), torch.ones(3, 2))
print(engines.engines.cache_info().currsize, "weightsym_fast" in sys.modules)
"""


@pytest.mark.e2e
def test_nothing_is_looked_for_before_the_first_stack():
    ((ended, printed),) = fresh(torch=[NOTHING_LOADED])
    assert (ended, printed.split()) == (0, ["0", "False", "1", "True"])


def test_reasons_are_logged_once(caplog):
    net = nn.Sequential(nn.Linear(6, 5), nn.Softmax(1)).double()
    with caplog.at_level(logging.INFO, "weightsym.params"):
        for _ in range(2):
            P.apply(net, stack_of(net, 0), X)
    assert caplog.text.count("is not run by machine code: _softmax is not one of the known") == 1


def test_an_engine_that_cannot_be_imported_is_named_once(monkeypatch, caplog):
    good = EntryPoint("good", "weightsym_fast.outputs:MachineCode", engines.GROUP)
    bad = EntryPoint("bad", "nowhere.engines:Engine", engines.GROUP)
    engines.engines.cache_clear()
    monkeypatch.setattr(engines, "entry_points", lambda group: [bad, good])
    try:
        for _ in range(2):
            predicted(0)
        assert [engine.name for engine in engines.engines()] == ["machine code"]
    finally:
        engines.engines.cache_clear()
    (message,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert message.startswith("The engine nowhere.engines:Engine is omitted")
