"""Members that two processes share unevenly predict as in one: each counts once."""

import pytest
import torch
from module_cases import Blobs, dropping, network, trainer
from processes import on_devices

from lightning_bnn.modules import MFVI, DeepEnsemble, MCDropout, SymmetrizedVI
from lightning_bnn.strategies import MembersStrategy

MEMBERS = 3
SURE = 1e-6
"""Deviations and rates this small make no difference: what is left is who counts how often."""


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05)


def with_rate(rate):
    net = dropping(network())
    net[2].p = rate
    return net


MODULES = {
    "ensemble": lambda **o: DeepEnsemble(network(), **o),
    "mfvi": lambda **o: MFVI(network(), init_std=SURE, **o),
    "symmetrized": lambda **o: SymmetrizedVI(network(), init_std=SURE, **o),
    "dropout": lambda **o: MCDropout(with_rate(SURE), **o),
}
COUNTS = {"ensemble": [20], "mfvi": [2, 6], "symmetrized": [6], "dropout": [2, 6]}
"""Fewer networks than members, and as many of each; an ensemble predicts with all of its own."""
BROKEN = 0, 2
EACH = pytest.mark.parametrize("name", MODULES)


def made(kind, samples):
    torch.manual_seed(0)
    return kind(members=MEMBERS, optimizer=sgd, eval_samples=samples)


def places(devices):
    return {"devices": devices, "strategy": MembersStrategy() if devices > 1 else "auto"}


def judged(devices, kind, samples, broken=None):
    """Predictions and numbers of the test set, of networks that are not trained."""
    module = made(kind, samples)
    if broken is not None:
        with torch.no_grad():
            next(module.state.parameters())[broken] = torch.nan
    data = Blobs()
    tested = trainer(**places(devices)).test(module, data, verbose=False)[0]
    module.example_input_array = torch.zeros(2, 6)
    found = trainer(**places(devices)).predict(module, data)
    while isinstance(found[0], list):  # the set in distribution comes first
        found = found[0]
    return tested, torch.cat([batch.mean for batch in found])


def everything(devices):
    """Without training, by kind and number of samples, and with a member that has diverged."""
    found = {}
    for name, kind in MODULES.items():
        for samples in COUNTS[name]:
            found[name, samples] = judged(devices, kind, samples)
        for broken in BROKEN:
            found[name, "without", broken] = judged(devices, kind, 8, broken)
    # draws are those of one process, too; only dropout draws as it predicts
    found["wide", 7] = judged(devices, lambda **o: MFVI(network(), init_std=0.5, **o), 7)
    return found


@pytest.fixture(scope="module")
def shared():
    return on_devices(2, everything, 2)


@pytest.fixture(scope="module")
def alone():
    return on_devices(1, everything, 1)[0]


@pytest.mark.e2e
def test_predictions_and_numbers_are_those_of_one_process(shared, alone):
    for found in shared:
        assert found.keys() == alone.keys()
        for key, (tested, mean) in alone.items():
            torch.testing.assert_close(found[key][1], mean, rtol=1e-4, atol=1e-5, msg=str(key))
            assert found[key][0] == pytest.approx(tested, abs=1e-4), key


@pytest.mark.e2e
@EACH
def test_every_member_counts_once(name, shared):
    """By hand: the mean of three networks, or of the two that are well."""
    module = made(MODULES[name], 6)
    inputs = Blobs().load().test[0]
    probs = torch.stack([module.member(m).eval()(inputs).softmax(-1) for m in range(MEMBERS)])
    twice = shared[0][name, COUNTS[name][-1]][1]
    torch.testing.assert_close(twice, probs.mean(0), rtol=1e-4, atol=1e-4)
    assert (twice - (probs[0] / 2 + probs[1:].mean(0) / 2)).abs().max() > 0.01  # per process
    for broken in BROKEN:
        kept = [m for m in range(MEMBERS) if m != broken]
        found = shared[0][name, "without", broken][1]
        torch.testing.assert_close(found, probs[kept].mean(0), rtol=1e-4, atol=1e-4)


def fitted(devices):
    """Numbers that are logged while training; draws hardly matter."""
    found = {}
    for name, kind in MODULES.items():
        run = trainer(max_epochs=1, **places(devices))
        run.fit(made(kind, 6), Blobs())
        found[name] = {k: float(v) for k, v in run.callback_metrics.items()}
    return found


@pytest.mark.e2e
def test_losses_of_training_and_validation_are_those_of_one_process():
    one, two = on_devices(1, fitted, 1)[0], on_devices(2, fitted, 2)
    for found in two:
        for name, numbers in one.items():
            assert found[name].keys() == numbers.keys()
            assert {"train/loss", "val/nll", "val/mi"} <= numbers.keys()
            for key, value in numbers.items():
                assert found[name][key] == pytest.approx(value, rel=1e-3, abs=1e-3), (name, key)
