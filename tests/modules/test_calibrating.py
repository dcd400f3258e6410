"""Every module can be calibrated; the result predicts, is written, and is read without code."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from module_cases import OF_EACH_CLASS, Blobs, made, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.calibration import Calibrated
from lightning_bnn.calibration.calibrated import split_rows
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.metrics import nll
from lightning_bnn.modules import DeepEnsemble

pytestmark = pytest.mark.filterwarnings("ignore")
METHODS = ("temperature", "vector")


class Loaders:
    """A datamodule of nothing but loaders."""

    def __init__(self, inputs, targets):
        self.loader = DataLoader(TensorDataset(inputs, targets), batch_size=7)

    def train_dataloader(self):
        return self.loader

    def val_dataloader(self):
        return self.loader


@pytest.fixture(scope="module")
def fitted():
    data, module = Blobs(), made("ensemble")
    trainer(max_epochs=2).fit(module, data)
    return module, data


@pytest.mark.parametrize("name", OF_EACH_CLASS)
def test_every_module_can_be_calibrated(name):
    data, module = Blobs(n=20), made(name)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    found = module.calibrate(data, alpha=0.4)
    inputs, _ = data.splits.test
    probs, sets = found.probs(inputs), found.sets(inputs)
    torch.testing.assert_close(probs.sum(-1), torch.ones(37).double())
    assert sets.shape == (37, 3)
    assert found.fitted_to == 13
    assert set(found.before) == set(found.after) == {"nll", "ece", "brier", "acc", "aurc"}
    after = {k: v for k, v in module.state_dict().items() if k in before}
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_is_read_again(method, fitted, tmp_path):
    module, data = fitted
    found = module.calibrate(data, method, alpha=0.3, score="aps", by_class=True)
    found.save(tmp_path / "folder" / "it.pt")
    again = Calibrated.load(tmp_path / "folder" / "it.pt", module)
    inputs, _ = data.splits.test
    assert torch.equal(found.probs(inputs), again.probs(inputs))
    assert torch.equal(found.sets(inputs, alpha=0.4), again.sets(inputs, alpha=0.4))
    assert str(found) == str(again)
    assert "before" in str(found)
    alone = Calibrated.load(tmp_path / "folder" / "it.pt")
    outputs = module.outputs((inputs,)).detach()
    assert torch.equal(alone.probs_of(outputs), found.probs_of(outputs))
    with pytest.raises(ValueError, match="has no networks"):
        alone.probs(inputs)


def test_numbers_are_of_the_examples_that_were_kept_apart(fitted):
    module, data = fitted
    found = module.calibrate(data, alpha=0.3, held_out=0.4)
    inputs, labels = data.splits.val
    assert (found.fitted_to, len(found.rule.labels)) == (15, 10)
    logits = module.outputs((inputs,)).detach()
    every = found.probs_of(logits)
    first, rows = split_rows(25, 0.4, module.seed)
    assert sorted([*first.tolist(), *rows.tolist()]) == list(range(25))
    assert found.after["nll"] == pytest.approx(float(nll(every[rows], labels[rows])))
    assert found.before["nll"] == pytest.approx(
        float(nll(logits.double().softmax(-1).mean(0)[rows], labels[rows]))
    )
    assert found.figure().axes


@pytest.mark.parametrize("noise", ["fixed", "learned", "heteroscedastic"])
@pytest.mark.parametrize("score", ["split", "cqr"])
def test_numbers_get_intervals(noise, score, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(80, 6)
    y = torch.stack([x.sum(-1), x[:, 0]], -1) + 0.3 * torch.randn(80, 2)
    net = nn.Linear(6, 4 if noise == "heteroscedastic" else 2)
    module = DeepEnsemble(net, members=3, likelihood=Gaussian(noise, 0.1, targets=2))
    found = module.calibrate(Loaders(x, y), score=score, alpha=0.2)
    intervals = found.intervals(x)
    assert 0.7 < float(intervals.contain(y).double().mean()) < 0.95
    assert found.after["nll"] < found.before["nll"]
    found.save(tmp_path / "it.pt")
    again = Calibrated.load(tmp_path / "it.pt", module)
    assert torch.equal(again.intervals(x, alpha=0.1).high, found.intervals(x, alpha=0.1).high)
    assert str(again) == str(found)
    assert found.figure().axes


def test_tensors_and_loaders_calibrate_as_the_datamodule_does(fitted):
    module, data = fitted
    inputs, labels = data.splits.val
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=7)
    wanted = module.calibrate(data, alpha=0.3).probs(inputs)
    for given in ((inputs, labels), loader):
        torch.testing.assert_close(module.calibrate(given, alpha=0.3).probs(inputs), wanted)
    shuffled = module.calibrate((inputs, labels.roll(1)), alpha=0.3).probs(inputs)
    assert not torch.allclose(shuffled, wanted)


# ------------------------------------------------------------ what is refused
class Without(Blobs):
    """Data of which nothing is held out."""

    val_size = 0

    def load(self):
        splits = super().load()
        splits.val = None
        return splits


class Own(nn.Module):
    """A likelihood of which nothing is known."""

    def log_prob(self, outputs, targets):
        return outputs[..., 0]

    def predictive(self, outputs):
        return outputs.mean(0)


@pytest.mark.bad_input
def test_what_calibration_refuses(fitted, tmp_path):
    module, data = fitted
    own = DeepEnsemble(nn.Linear(6, 3), likelihood=Own())
    alone = Loaders(torch.zeros(1, 6), torch.zeros(1).long())
    for call, words in (
        (
            lambda: module.calibrate(Without()),
            r"no validation data \(`val_size` is 0\): give it some",
        ),
        (lambda: module.calibrate(3), r"or a tuple of tensors \(inputs, targets\), got a int"),
        (lambda: module.calibrate((torch.zeros(4, 6), [0] * 4)), "inputs, targets.* got a tuple"),
        (lambda: module.calibrate((torch.zeros(4, 6), torch.zeros(3).long())), "as many targets"),
        (lambda: module.calibrate(data.val_dataloader()), "whose batches its datamodule prepares"),
        (lambda: module.calibrate(data, "platt"), "`method` must be one of temperature"),
        (lambda: module.calibrate(data, held_out=1), "`held_out` must be between 0 and 1"),
        (lambda: module.calibrate(alone), "at least 2 validation examples, got 1"),
        (lambda: own.calibrate(data), "must be Categorical, Bernoulli or Gaussian"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    torch.save({"a": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="holds no calibration of this package"):
        Calibrated.load(tmp_path / "other.pt")
    found = module.calibrate(data, alpha=0.4)
    found.save(tmp_path / "it.pt")
    torch.save(replace(found, module=None, calibrator=Path("x")), tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="holds an object of pathlib"):
        Calibrated.load(tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="`outputs` must be finite"):
        found.probs_of(torch.full((3, 2, 3), torch.nan))
