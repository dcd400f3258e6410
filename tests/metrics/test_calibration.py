"""Calibration errors against histograms of numpy, equal splits, and the published edge cases."""

import math

import matplotlib as mpl
import numpy as np
import pytest
import torch
from refusals import refuses

from lightning_bnn import metrics as M

mpl.use("Agg")


def random_case(n, classes=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(n, classes, generator=g)).double().softmax(-1)
    return probs, torch.randint(classes, (n,), generator=g)


G = torch.Generator().manual_seed(1)
CONFIDENCES = {
    "random": lambda n_bins: torch.rand(300, generator=G).double(),
    "on the edges": lambda n_bins: torch.arange(n_bins + 1).double() / n_bins,
    "between": lambda n_bins: (torch.arange(n_bins).double() + 0.5) / n_bins,
}


@pytest.mark.parametrize("n_bins", [1, 2, 8, 16])  # edges that float64 represents exactly
@pytest.mark.parametrize("kind", CONFIDENCES)
def test_bins_are_those_of_numpy(n_bins, kind):
    """They are closed below, and the last one is closed on both sides."""
    confidence = CONFIDENCES[kind](n_bins)
    correct = torch.arange(len(confidence)) % 3 == 0
    found = M.reliability(confidence, correct, n_bins)
    values, right = confidence.numpy(), correct.double().numpy()
    count, sums, hits = (
        np.histogram(values, n_bins, (0, 1), weights=w)[0] for w in (None, values, right)
    )
    np.testing.assert_array_equal(found.count, count)
    np.testing.assert_allclose(found.confidence, sums / count, rtol=1e-13)
    np.testing.assert_allclose(found.accuracy, hits / count, rtol=1e-13)
    above = np.clip(np.ceil(values * n_bins) - 1, 0, None).astype(int)  # closed above instead
    same = np.array_equal(found.count, np.bincount(above, minlength=n_bins))
    assert same == (n_bins == 1 or kind != "on the edges")
    gaps = np.abs(hits - sums)
    assert found.largest_error.item() == pytest.approx(np.nanmax(gaps / count), abs=1e-14)
    assert found.expected_error.item() == pytest.approx(gaps.sum() / len(values), abs=1e-14)


def test_the_class_with_the_largest_probability_is_judged():
    probs, labels = random_case(300)
    confidence, predicted = probs.max(-1)
    assert M.ece(probs, labels) == M.reliability(confidence, predicted == labels).expected_error


def test_logits_are_never_guessed():
    """Logits that lie between 0 and 1 stay logits, and 1.0000001 is still a probability."""
    logits = torch.tensor([[0.2, 0.9], [0.7, 0.1]])
    labels = torch.tensor([1, 0])
    found = M.ece(logits, labels, from_logits=True)
    assert found.item() == pytest.approx(M.ece(logits.softmax(-1), labels).item(), abs=1e-9)
    nearly = torch.tensor([[0.0, 1.0000001], [1.0, 0.0]])
    assert M.ece(nearly, labels).item() == pytest.approx(0, abs=1e-6)


def test_more_than_float32_can_count():
    """Counters are integers: 2^24 + 2^22 equal examples keep their error of .03."""
    metric = M.ECE()
    probs = torch.tensor([[0.97, 0.03]], dtype=torch.float64)
    metric.update(probs.repeat(2**14, 1), torch.zeros(2**14).long())
    for _ in range(10):
        for name in ("count", "confidence"):
            setattr(metric, name, 2 * getattr(metric, name))
    metric.update(probs.repeat(2**10, 1), torch.zeros(2**10).long())
    assert metric.compute().item() == pytest.approx(0.03, abs=1e-9)
    assert metric.reliability().count.sum() == 2**24 + 2**10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_predictions(dtype):
    """Rows of rounded probabilities do not sum to one; they are accepted, and summed in float64."""
    probs, labels = random_case(500, 100)
    half = probs.to(dtype)
    assert (half.float().sum(-1) - 1).abs().max() > 1e-6
    exact = M.ece(half.double(), labels).item()
    assert M.ece(half, labels).item() == pytest.approx(exact, abs=1e-12)
    assert M.nll(half, labels).item() == pytest.approx(
        M.nll(half.double(), labels).item(), abs=1e-6
    )
    metric = M.ECE()
    metric.update(half, labels.to(torch.uint8))
    assert metric.compute().item() == pytest.approx(exact, abs=1e-12)


# ------------------------------------------------------------ adaptive
@pytest.mark.parametrize(("examples", "n_bins"), [(120, 6), (4, 15)])
def test_adaptive_equals_equal_splits_without_ties(examples, n_bins):
    probs, labels = random_case(examples)
    confidence, predicted = probs.max(-1)
    order = confidence.argsort()
    shape = min(n_bins, examples), -1
    c, r = confidence[order].reshape(shape), (predicted == labels)[order].double().reshape(shape)
    expected = (c.mean(1) - r.mean(1)).abs().mean()
    assert M.ace(probs, labels, n_bins).item() == pytest.approx(expected.item(), abs=1e-14)


def test_adaptive_ties_do_not_depend_on_the_order():
    probs = torch.tensor([[0.8, 0.2]]).repeat(10, 1).double()
    labels = torch.tensor([0] * 5 + [1] * 5)
    for _ in range(5):
        order = torch.randperm(10)
        assert M.ace(probs[order], labels[order], 2).item() == pytest.approx(0.3)
    probs, labels = random_case(200)
    probs = (probs * 8).round() / 8 + 1e-3
    probs /= probs.sum(-1, keepdim=True)
    order = torch.randperm(200)
    expected = M.ace(probs, labels, 7).item()
    assert M.ace(probs[order], labels[order], 7).item() == pytest.approx(expected, abs=1e-14)


# ------------------------------------------------------------ picture, errors
@pytest.mark.parametrize("metric", [M.ECE(), M.ACE()])
def test_plot(metric):
    probs, labels = random_case(500)
    metric.update(probs, labels)
    line = metric.plot()[1].get_lines()[1]
    data = metric.reliability()
    used = data.count > 0
    np.testing.assert_allclose(line.get_xdata(), data.confidence[used])
    np.testing.assert_allclose(line.get_ydata(), data.accuracy[used])
    axes = mpl.figure.Figure().subplots()
    assert metric.plot(ax=axes)[1] is axes


def test_no_examples():
    assert math.isnan(M.ece(torch.zeros(0, 3), torch.zeros(0).long()))
    assert math.isnan(M.reliability(torch.zeros(0), torch.zeros(0).bool()).largest_error)
    assert math.isnan(M.ace(torch.zeros(0, 3), torch.zeros(0).long()))


GOOD = torch.tensor([[0.4, 0.6], [0.5, 0.5]])
LABELS = torch.tensor([0, 1])


test_errors = refuses(
    (lambda: M.ece(10 * GOOD, LABELS), "off by 9.*Pass `from_logits=True`"),
    (lambda: M.ece(GOOD * torch.nan, LABELS), "must be finite probabilities"),
    (lambda: M.ece(torch.tensor([[1.5, -0.5]]), LABELS[:1]), "off by 0.5"),
    (lambda: M.ece(GOOD * torch.nan, LABELS, from_logits=True), "NaN or infinite logits"),
    (lambda: M.ece(GOOD, LABELS, 2.5), "`n_bins` must be a whole number, got 2.5"),
    (lambda: M.ECE(n_bins="a"), "`n_bins` must be a whole number, got 'a'"),
    (lambda: M.ece(GOOD[:, :1], LABELS), r"torch.stack\(\[1 - p, p\], -1\)"),
    (lambda: M.ece(GOOD[:, 0], LABELS), "must be a float tensor"),
    (lambda: M.ece([0.5], LABELS), "`probs` must be a tensor, got list: .*`torch.as_tensor`"),
    (lambda: M.ece(GOOD, LABELS.numpy()), "`labels` must be a tensor, got ndarray"),
    (lambda: M.reliability(GOOD[0], [1, 0]), "`correct` must be a tensor, got list"),
    (lambda: M.ece(GOOD[None], LABELS), r"`probs.mean\(0\)`"),
    (lambda: M.ece(GOOD, LABELS[:1]), "`labels` must be 2 integers"),
    (lambda: M.ece(GOOD, LABELS + 1), r"`labels` must be in 0..1, got 2"),
    (lambda: M.ece(GOOD, LABELS - 1), r"`labels` must be in 0..1, got -1"),
    (lambda: M.ECE(0), "`n_bins` must be at least 1, got 0"),
    (lambda: M.reliability(GOOD[0] + 1, LABELS), "`confidence` must lie between 0 and 1"),
    (lambda: M.reliability(GOOD, LABELS), "must have the same shape"),
    (lambda: M.reliability(GOOD[0], GOOD[0]), "`correct` must be boolean"),
    (lambda: M.nll(GOOD[:, :1], LABELS, True), "has 1 class"),
    (lambda: M.ece(GOOD + 0.006, LABELS), "off by 0.012"),
)
