"""Columns after calibration are those of the calibrators, for all test examples or some."""

import pytest
import torch

from lightning_bnn import metrics as M
from lightning_bnn.calibration import calibrated
from lightning_bnn.evaluation.predictions import ClassPredictions, GaussianPredictions
from lightning_bnn.evaluation.scores import calibrated_numbers
from lightning_bnn.likelihoods import Categorical, Gaussian


def test_of_classes():
    g = torch.Generator().manual_seed(0)
    outputs = 4 * torch.randn(3, 300, 4, generator=g)
    labels = outputs[0].div(4).softmax(-1).multinomial(1, generator=g)[:, 0]
    known, test = (
        ClassPredictions.of(Categorical(), outputs[:, r]) for r in (slice(100), slice(100, 300))
    )
    numbers = calibrated_numbers(Categorical(), known, test, labels[:100], labels[100:])
    logits = outputs.double().softmax(-1).mean(0).log()[None]
    fitted = calibrated(Categorical(), (logits[:, :100],), labels[:100])
    probs, rows = fitted.calibrator(logits[:, 100:]), torch.tensor([3, 5, 5, 8])
    assert fitted.calibrator.value > 1.5
    assert numbers()["nll_t"] == pytest.approx(float(M.nll(probs, labels[100:])))
    assert numbers(rows)["nll_t"] == pytest.approx(float(M.nll(probs[rows], labels[100:][rows])))
    sets = fitted.rule(probs)
    assert numbers()["held90"] == pytest.approx(float(M.set_coverage(sets, labels[100:])))
    assert numbers()["aurc"] == pytest.approx(float(M.aurc(test.probs, labels[100:])))
    assert numbers()["held90"] > 0.8


def test_of_numbers():
    g = torch.Generator().manual_seed(0)
    outputs = torch.randn(1, 400, 1, generator=g).expand(3, -1, -1)
    targets = outputs[0] + 2 * torch.randn(400, 1, generator=g)
    likelihood = Gaussian("fixed", 0.5)
    known, test = (
        GaussianPredictions.of_each(likelihood, outputs[:, r]).mean()
        for r in (slice(200), slice(200, 400))
    )
    numbers = calibrated_numbers(likelihood, known, test, targets[:200], targets[200:])()
    assert numbers["held90"] == pytest.approx(0.9, abs=0.07)
    assert numbers["interval90"] == pytest.approx(2 * 1.645 * 2, rel=0.2)
