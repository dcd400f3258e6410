"""The averaged predictive as a plain module and as a file."""

import io

import pytest
import torch
from module_cases import fitted, made
from torch import nn

from lightning_bnn import models
from lightning_bnn.likelihoods import Gaussian, GaussianPrediction
from lightning_bnn.modules import MFVI, DeepEnsemble

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
