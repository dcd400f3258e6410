"""Steps off the orbit: what is left of them, and that functions do not notice a gauge."""

import lightning as L
import pytest
import torch
from runs import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.callbacks import OrbitDrift
from lightning_bnn.models import mlp
from lightning_bnn.samplers import SGHMC, Horizontal
from weightsym import discover, min_mass, orbit_directions
from weightsym import params as P

X, Y = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)).double().split([3, 2], 1)
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "decay": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
}


def network():
    torch.manual_seed(0)
    return mlp(3, [6, 5], 2).double()


def trained(make, steps=1, **options):
    """A network after some steps, its weights before the last one, and the losses."""
    net = network()
    sym, optimizer = discover(net, X), make(net.parameters())
    if options.pop("horizontal", True):
        Horizontal(optimizer, net, sym, tolerance=1e-12, **options)
    losses = []
    for _ in range(steps):
        before = {n: t.clone() for n, t in P.of(net).items()}
        optimizer.zero_grad()
        loss = (net(X) - Y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return net, sym, before, losses


def drift(net, sym, before):
    orbit = orbit_directions(before, sym)
    step = {n: t - before[n] for n, t in P.of(net).items()}
    size = sum(t.square().sum() for t in step.values()).sqrt()
    return float(sum(t.square().sum() for t in orbit.onto(step).values()).sqrt() / size)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_no_part_along_the_orbit(name):
    assert drift(*trained(OPTIMIZERS[name], 3)[:3]) < 1e-9
    plain = drift(*trained(OPTIMIZERS[name], 3, horizontal=False)[:3])
    assert plain < 1e-9 if name == "sgd" else plain > 1e-2  # gradients have none


def test_a_gauge_keeps_the_function_and_the_mass_least():
    make = OPTIMIZERS["sgd"]
    one, sym, *_ = trained(make, 1)
    other, *_ = trained(make, 1, gauge="min-mass")
    torch.testing.assert_close(other(X), one(X))
    found = min_mass(P.of(other), sym)
    assert float(found.mass / found.minimum) < 1 + 1e-9 < float(min_mass(P.of(one), sym).mass)
    losses = trained(OPTIMIZERS["adam"], 60, gauge="min-mass")[3]
    assert losses[-1] < 0.8 * losses[0]


def test_the_optimizer_gets_its_steps_back():
    net = network()
    optimizer = OPTIMIZERS["adam"](net.parameters())
    Horizontal(optimizer, net, discover(net, X)).detach()
    other = trained(OPTIMIZERS["adam"], 1, horizontal=False)[0]
    (net(X) - Y).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(t, P.of(other)[n]) for n, t in P.of(net).items())


@pytest.mark.bad_input
def test_what_steps_off_the_orbit_refuse():
    net = network()
    sym = discover(net, X)
    with pytest.raises(ValueError, match="along the orbit belongs to the posterior"):
        Horizontal(SGHMC(net.parameters(), lr=0.1, num_data=30), net, sym)
    with pytest.raises(ValueError, match="`optimizer` does not move '1.bias'"):
        Horizontal(torch.optim.SGD([p for p in net.parameters() if p.ndim > 1], 0.1), net, sym)
    with pytest.raises(ValueError, match="`gauge` must be one of min-mass"):
        Horizontal(torch.optim.SGD(net.parameters(), 0.1), net, sym, gauge="unit")


# ------------------------------------------------------------ the callback
class Plain(L.LightningModule):
    def __init__(self, make, horizontal=False):
        super().__init__()
        self.net, self.make, self.horizontal = network().float(), make, horizontal

    def training_step(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        optimizer = self.make(self.net.parameters())
        if self.horizontal:
            Horizontal(optimizer, self.net, discover(self.net, X.float()))
        return optimizer


def watched(module, steps=4):
    callback, data = OrbitDrift(every_n_steps=1), TensorDataset(X.float(), Y.float())
    trainer = L.Trainer(**QUIET, max_steps=steps, callbacks=[callback])
    trainer.fit(module, DataLoader(data, 30))
    return callback, trainer


def test_the_drift_of_a_run():
    adam, trainer = watched(Plain(OPTIMIZERS["adam"]))
    net = network()
    sym = discover(net, X)
    first = drift(*trained(OPTIMIZERS["adam"], 1, horizontal=False)[:3]) ** 2
    assert adam.history[0][1][0] == pytest.approx(first, rel=1e-3)
    assert [step for step, _ in adam.history] == [0, 1, 2, 3]
    chance = sym.dimension / sum(p.numel() for p in net.parameters())
    assert trainer.logged_metrics["orbit_drift/chance"] == pytest.approx(chance)
    drifts = [row[0] for _, row in adam.history]
    assert min(drifts) < adam.history[-1][1][1] < max(drifts)
    assert watched(Plain(OPTIMIZERS["sgd"]))[0].history[-1][1][1] < 1e-6
    assert watched(Plain(OPTIMIZERS["adam"], True))[0].history[-1][1][1] < 1e-6


def test_networks_without_continuous_symmetries_are_left_alone():
    module = Plain(OPTIMIZERS["adam"])
    module.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="switched off: the network has no continuous symmetries"):
        callback, _ = watched(module)
    assert not callback.history
