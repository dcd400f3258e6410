"""Likelihood, agreement and diversity against sklearn, scipy, loops and closed forms."""

import itertools
import math

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy.special import rel_entr
from scipy.stats import entropy
from sklearn.metrics import log_loss

from lightning_bnn import metrics as M


def networks(samples=4, batch=30, classes=5, spread=1.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    base = torch.randn(1, batch, classes, generator=g, dtype=torch.float64)
    noise = spread * torch.randn(samples, batch, classes, generator=g, dtype=torch.float64)
    return (base + noise).softmax(-1).to(dtype), torch.randint(classes, (batch,), generator=g)


# ------------------------------------------------------------ likelihood
def test_nll():
    probs, labels = networks()
    expected = log_loss(labels, probs[0], labels=range(5))
    assert M.nll(probs[0], labels).item() == pytest.approx(expected, abs=1e-12)
    found = M.nll(probs[0].log() + 7, labels, from_logits=True).item()
    assert found == pytest.approx(expected, abs=1e-12)
    assert M.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == math.inf
    extreme = torch.tensor([[200.0, 0.0]])
    assert M.nll(extreme, torch.tensor([1]), from_logits=True) == 200


def test_brier():
    probs, labels = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]]), torch.tensor([0, 2])
    assert M.brier_score(probs, labels).item() == pytest.approx(0.52)
    metric = M.BrierScore()
    metric.update(probs, labels)
    assert metric.compute().item() == pytest.approx(0.52)


# ------------------------------------------------------------ agreement
def test_agreement_and_total_variation():
    probs, _ = networks()
    a, b = probs[0], probs[1]
    expected = np.mean([int(p.argmax() == q.argmax()) for p, q in zip(a, b, strict=True)])
    assert M.agreement(a, b).item() == pytest.approx(expected)
    expected = np.mean(
        [0.5 * np.abs(p - q).sum() for p, q in zip(a.numpy(), b.numpy(), strict=True)]
    )
    assert M.total_variation(a, b).item() == pytest.approx(expected, abs=1e-13)
    assert M.total_variation(a, b) != 1 - M.agreement(a, b)
    logits = a.log() + 3, b.log()
    assert M.total_variation(*logits, from_logits=True).item() == pytest.approx(expected, abs=1e-13)


def test_divergence_from_a_reference_is_that_of_scipy():
    probs, _ = networks()
    a, b = probs[0], probs[1]
    wanted = np.mean(entropy(b.numpy(), a.numpy(), axis=-1))
    assert M.predictive_kl(a, b).item() == pytest.approx(wanted, abs=1e-13)
    logits = a.log() + 3, b.log()
    assert M.predictive_kl(*logits, from_logits=True).item() == pytest.approx(wanted, abs=1e-13)
    assert M.predictive_kl(b, a).item() != pytest.approx(wanted, abs=1e-3)
    assert M.predictive_kl(a.float(), b.float()).item() == pytest.approx(wanted, rel=1e-5)


def test_divergence_is_infinite_where_a_class_is_excluded():
    sure, half = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    assert M.predictive_kl(half, sure).item() == pytest.approx(math.log(2))
    assert M.predictive_kl(sure, half) == math.inf
    logits = torch.tensor([[300.0, 0.0]]), torch.zeros(1, 2)
    assert M.predictive_kl(*logits, from_logits=True).item() == pytest.approx(150 - math.log(2))


def test_ties_go_to_the_first_class():
    tie = torch.tensor([[0.5, 0.5, 0.0]])
    assert M.agreement(tie, torch.tensor([[1.0, 0.0, 0.0]])) == 1
    assert M.agreement(tie, torch.tensor([[0.0, 1.0, 0.0]])) == 0


# ------------------------------------------------------------ diversity
def test_uncertainty_against_scipy():
    probs, _ = networks()
    p = probs.numpy()
    parts = M.decompose_uncertainty(probs)
    np.testing.assert_allclose(parts.total, entropy(p.mean(0), axis=-1), atol=1e-13)
    np.testing.assert_allclose(parts.expected, entropy(p, axis=-1).mean(0), atol=1e-13)
    divergence = rel_entr(p, p.mean(0)).sum(-1).mean(0)
    np.testing.assert_allclose(parts.epistemic, divergence, atol=1e-13)
    np.testing.assert_allclose(parts.total - parts.expected, parts.epistemic, atol=1e-13)
    for component in ("total", "expected", "epistemic"):
        metric = M.MutualInformation(component)
        metric.update(probs)
        expected = getattr(parts, component).mean().item()
        assert metric.compute().item() == pytest.approx(expected, abs=1e-13)


def test_information_of_one_hot_predictions():
    eye = torch.eye(4)[:, None]
    assert M.mutual_information(eye).item() == pytest.approx(math.log(4), rel=1e-6)
    assert M.mutual_information(eye[:1]) == 0
    assert M.mutual_information(eye[[1, 1, 1]]) == 0


@pytest.mark.parametrize(("spread", "tolerance"), [(1e-3, 1e-6), (1e-4, 1e-5)])
def test_information_does_not_cancel(spread, tolerance):
    """Networks that nearly agree: positive, and right to many digits in float32."""
    probs, _ = networks(10, 400, 10, spread)
    exact = M.mutual_information(probs)
    single = M.mutual_information(probs.float())
    assert bool((single >= 0).all())
    rounded = M.mutual_information(probs.float().double())
    assert single.mean().item() == pytest.approx(rounded.mean().item(), rel=tolerance)
    parts = M.decompose_uncertainty(probs.float())
    naive = (parts.total - parts.expected).double()
    error = ((naive - exact).abs() / exact).max()
    assert error > 10 * ((single.double() - rounded).abs() / rounded).max()
    assert bool((naive < 0).any())  # what the difference of entropies does


def test_pairwise_information():
    probs, _ = networks()
    found = M.pairwise_mutual_information(probs)
    for i, j in itertools.product(range(4), repeat=2):
        expected = M.mutual_information(probs[[i, j]]).mean().item()
        assert found[i, j].item() == pytest.approx(expected, abs=1e-13)


def test_pairs_in_chunks(monkeypatch):
    from lightning_bnn.metrics import diversity

    probs, _ = networks(7)
    whole = M.pairwise_mutual_information(probs)
    monkeypatch.setattr(diversity, "_CHUNK", (4 * probs[0].numel(),) * 2)
    torch.testing.assert_close(M.pairwise_mutual_information(probs), whole)


def test_disagreement():
    probs, _ = networks(5)
    predicted = probs.argmax(-1)
    pairs = [
        (predicted[i] != predicted[j]).double() for i, j in itertools.combinations(range(5), 2)
    ]
    torch.testing.assert_close(M.disagreement(probs), torch.stack(pairs).mean(0))


def test_disagreement_of_one_network_is_undefined():
    metric = M.Disagreement()
    metric.update(networks(1)[0])
    with pytest.warns(UserWarning, match="is NaN: one network has no pair"):
        assert math.isnan(metric.compute())


test_errors = refuses(
    (lambda p, y: M.nll(p, y), r"`probs.mean\(0\)`"),
    (lambda p, y: M.nll(p[0].log() * 0 / 0, y, True), "must be finite"),
    (lambda p, y: M.agreement(p[0], p[1][:3]), "`probs` and `reference` must have the same"),
    (lambda p, y: M.agreement(p, p), r"must have shape \(batch, classes\)"),
    (lambda p, y: M.predictive_kl(p[0], p[1][:3]), "`probs` and `reference` must have the same"),
    (lambda p, y: M.predictive_kl(-p[0], p[1]), "`probs` must be finite prob"),
    (lambda p, y: M.total_variation(p[0], 3 * p[0]), "`reference` must be finite prob"),
    (lambda p, y: M.mutual_information(p[0]), r"\(samples, batch, classes\)"),
    (lambda p, y: M.disagreement([p[0], p[1]]), "`probs` must be a tensor.*`torch.stack`"),
    (lambda p, y: M.mutual_information(p[:0]), r"\(samples, batch, classes\)"),
    (lambda p, y: M.MutualInformation("all"), "`component` must be one of epistemic, total"),
    given=networks,
)
