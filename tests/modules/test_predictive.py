"""The averaged predictive as a plain module and as a file."""

import io
import sys
from types import ModuleType

import pytest
import torch
from module_cases import fitted, made
from torch import nn

from lightning_bnn import models
from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian, GaussianPrediction
from lightning_bnn.modules import MFVI, DeepEnsemble, Predictive
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.e2e
def test_it_exports_to_one_file():
    module = made("mfvi", batch_norm=True)
    fitted(module, max_epochs=1)
    predictive, file, batch = module.predictive(8), io.BytesIO(), torch.export.Dim("batch", min=1)
    exported = torch.export.export(
        predictive, (torch.randn(4, 6),), dynamic_shapes=(({0: batch},),)
    )
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in (1, 4, 9):
        y = torch.randn(rows, 6)
        torch.testing.assert_close(loaded(y), predictive(y))


@pytest.mark.e2e
def test_it_exports_to_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module = DeepEnsemble(models.optunet(), members=3)
    predictive, x = module.predictive(), torch.randn(2, 1, 28, 28)
    path = tmp_path / "it.onnx"
    batch = (({0: torch.export.Dim.DYNAMIC},),)
    torch.onnx.export(predictive, (x,), path, dynamo=True, verbose=False, dynamic_shapes=batch)
    session, x = onnxruntime.InferenceSession(str(path)), torch.randn(5, 1, 28, 28)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), predictive(x), rtol=1e-4, atol=1e-5)


def test_a_regression_exports_mean_and_both_variances():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    module = MFVI(net, likelihood=Gaussian("learned", 0.5), init_std=0.3)
    predictive, x = module.predictive(50), torch.randn(5, 3)
    found = predictive(x)
    assert isinstance(found, GaussianPrediction)
    assert (found.epistemic > 0).all()
    exported = torch.export.export(predictive, (x,)).module()
    for a, b in zip(exported(x), found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def probly(monkeypatch):
    """What `predict_representation` calls of probly, which `test_with_peers.py` takes itself."""
    package = ModuleType("probly")
    package.create_categorical_distribution_from_logits = lambda z: ("logits", z)
    package.create_gaussian_distribution = lambda mean, var: ("moments", mean, var)
    package.create_sample = lambda each, sample_axis: (*each, sample_axis)
    package.representation = package.distribution = package.sample = package
    for name in ("", ".representation", ".representation.distribution", ".representation.sample"):
        monkeypatch.setitem(sys.modules, f"probly{name}", package)


@pytest.mark.usefixtures("probly")
def test_its_networks_predict_what_probly_takes():
    x = torch.randn(5, 1, 4, 4)
    net = nn.Conv2d(1, 3, 3)
    stack = P.populate(net, 2)
    kind, logits, axis = Predictive(net, stack, Categorical("first")).predict_representation(x)
    each = P.apply(net, stack, x)
    assert (kind, axis) == ("logits", 0)
    torch.testing.assert_close(logits, each.permute(0, 1, 3, 4, 2))
    net = nn.Linear(16, 2)
    stack = P.populate(net, 2)
    noisy = Predictive(net, stack, Gaussian("heteroscedastic"))
    kind, mean, variance, axis = noisy.predict_representation(x.flatten(1))
    whole = noisy(x.flatten(1))
    assert (kind, axis) == ("moments", 0)
    torch.testing.assert_close(mean.mean(0), whole.mean)
    torch.testing.assert_close(variance.mean(0), whole.noise)
    torch.testing.assert_close(mean.var(0, correction=0), whole.epistemic)
    assert variance.std() > 0


@pytest.mark.bad_input
@pytest.mark.usefixtures("probly")
def test_what_probly_does_not_take():
    predictive = DeepEnsemble(nn.Linear(2, 1), 2, likelihood=Bernoulli()).predictive()
    with pytest.raises(ValueError, match="distributions for .* and Gaussian, not for Bernoulli"):
        predictive.predict_representation(torch.ones(3, 2))
