"""Ranking metrics against sklearn, brute force over thresholds, and the published edge cases."""

import math

import numpy as np
import pytest
import torch
from refusals import refuses
from sklearn import metrics as sk

from lightning_bnn import metrics as M


def pair(scores_id, scores_ood):
    scores_id, scores_ood = (torch.as_tensor(np.asarray(s, float)) for s in (scores_id, scores_ood))
    is_ood = torch.cat([torch.zeros(len(scores_id)), torch.ones(len(scores_ood))]).bool()
    return torch.cat([scores_id, scores_ood]), is_ood


def draws(kind="apart"):
    g = torch.Generator().manual_seed(3)
    scores = torch.randn(120, generator=g) * 20 - 5  # no probabilities
    is_ood = torch.rand(120, generator=g) < 0.3
    scores = scores + 8 * is_ood
    return {"apart": scores, "ties": (scores / 10).round() * 10, "whole": scores.long()}[
        kind
    ], is_ood


KINDS = pytest.mark.parametrize("kind", ["apart", "ties", "whole"])


@KINDS
@pytest.mark.parametrize("positive", ["ood", "id"])
def test_sklearn(kind, positive):
    scores, is_ood = draws(kind)
    s, y = (scores, is_ood) if positive == "ood" else (-scores, ~is_ood)
    expected = sk.average_precision_score(y, s)
    assert M.aupr(scores, is_ood, positive).item() == pytest.approx(expected, abs=1e-12)
    assert M.auroc(scores, is_ood).item() == pytest.approx(sk.roc_auc_score(y, s), abs=1e-12)
    false, true, _ = sk.roc_curve(y, s, drop_intermediate=False)
    expected = false[np.argmax(true >= 0.95)]
    assert M.fpr95(scores, is_ood, positive).item() == pytest.approx(expected, abs=1e-12)


@KINDS
@pytest.mark.parametrize("tpr", [0.05, 0.5, 0.95, 1.0])
def test_false_positives_brute_force(kind, tpr):
    scores, is_ood = draws(kind)
    ood, inside = scores[is_ood], scores[~is_ood]
    rates = [
        (int((ood >= t).sum()) / len(ood), int((inside >= t).sum()) / len(inside))
        for t in sorted(set(scores.tolist()), reverse=True)
    ]
    first = next(f for r, f in rates if r >= tpr - 1e-12)
    assert M.fpr_at_tpr(scores, is_ood, tpr).item() == pytest.approx(first, abs=1e-12)


@pytest.mark.parametrize("positives", [3, 20, 100, 333])
def test_a_recall_that_can_be_reached_exactly_asks_for_no_more(positives):
    """7 / 100 * 100 exceeds 7 in float64; between two OOD scores lies one of an ID example."""
    case = pair(np.arange(positives), np.arange(positives) + 0.5)
    for found in {1, *range(7, positives, 7), positives - 1, positives}:
        tpr = found / positives
        assert M.fpr_at_tpr(*case, tpr) * positives == pytest.approx(found - 1)
        if found < positives:  # and a little more asks for another one
            assert M.fpr_at_tpr(*case, tpr + 1e-7) * positives == pytest.approx(found)


def test_scores_are_never_squashed_nor_rounded():
    """Energies of 20: torchmetrics would apply a sigmoid to each batch that has some above 1."""
    metric, inside, outside = M.AUROC(), torch.rand(64).double(), 20 + torch.rand(64).double()
    inside[0], outside[0] = 20.5, 20.5 + 1e-12
    for k in range(0, 64, 8):
        metric.update_id(inside[k : k + 8])
        metric.update_ood(outside[k : k + 8])
    scores, is_ood = pair(inside, outside)
    expected = sk.roc_auc_score(is_ood, scores)
    assert metric.compute().item() == pytest.approx(expected, abs=1e-12)
    assert M.auroc(scores.float(), is_ood) != pytest.approx(expected, abs=1e-12)


def test_infinite_scores_rank():
    scores = torch.tensor([-math.inf, 0.0, math.inf, math.inf])
    assert M.auroc(scores, torch.tensor([0, 0, 1, 1])) == 1
    assert M.auroc(scores, torch.tensor([0, 1, 0, 1])) == 0.625


CLASSES = [M.AUROC(), M.AUPR(), M.FPR95(), M.FPR95("id")]


@pytest.mark.parametrize("metric", CLASSES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("kept", [0, 1])
def test_one_class_missing(metric, kept):
    metric.reset()
    scores, is_ood = draws()
    metric.update(scores[is_ood == kept], is_ood[is_ood == kept])
    with pytest.warns(UserWarning, match="is NaN: it needs ID and OOD examples"):
        assert math.isnan(metric.compute())
    assert math.isnan(M.auroc(scores[is_ood == kept], is_ood[is_ood == kept]))


# ------------------------------------------------------------ detection
def predictions(n, seed, sharpness):
    g = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(n, 4, generator=g)).double()


@pytest.mark.parametrize("score", ["max_probability", "entropy", "energy"])
def test_detection_equals_the_parts(score):
    logits = predictions(50, 0, 6), predictions(30, 1, 1), predictions(20, 2, 3)
    metric = M.OODDetection(score, ["svhn", "textures"], from_logits=True)
    metric.update_id(logits[0][:20])
    metric.update_ood(logits[1], "svhn")
    metric.update_ood(logits[2], 1)
    metric.update_id(logits[0][20:])
    function = getattr(M, f"{score}_score")
    s = [function(z, from_logits=True) for z in logits]
    found = metric.compute()
    assert len(found) == 8
    for name, ood in (("svhn", s[1]), ("textures", s[2])):
        case = pair(s[0], ood)
        assert found[f"AUROC/{name}"] == M.auroc(*case)
        assert found[f"AUPR_out/{name}"] == M.aupr(*case)
        assert found[f"AUPR_in/{name}"] == M.aupr(*case, positive="id")
        assert found[f"FPR95/{name}"] == M.fpr95(*case)


def test_detection_of_several_networks():
    probs = torch.stack([predictions(8, k, 2).softmax(-1) for k in range(5)])
    metric = M.OODDetection("mutual_information")
    metric.update_id(probs[:, :4])
    metric.update_ood(probs[:, 4:])
    case = pair(M.mutual_information(probs[:, :4]), M.mutual_information(probs[:, 4:]))
    assert metric.compute()["AUROC"] == M.auroc(*case)
    mean = M.OODDetection("entropy")
    mean.update_id(probs[:, :4])
    mean.update_ood(probs.mean(0)[4:])
    case = pair(M.entropy_score(probs.mean(0)[:4]), M.entropy_score(probs.mean(0)[4:]))
    assert mean.compute()["AUROC"] == M.auroc(*case)


def test_own_scores_and_names_of_conventions():
    scores, is_ood = draws("ties")
    metric = M.OODDetection(None, positive="id")
    metric.update_id(scores[~is_ood])
    metric.update_ood(scores[is_ood])
    found = metric.compute()
    assert set(found) == {"AUROC", "AUPR_out", "AUPR_in", "FPR95_id"}
    assert found["FPR95_id"] == M.fpr95(scores, is_ood, "id")


def test_a_set_without_examples():
    metric = M.OODDetection(None, ["a", "b"])
    metric.update_id(torch.rand(3))
    metric.update_ood(torch.rand(3), "a")
    with pytest.warns(UserWarning, match="no ID examples or none of 'b'"):
        found = metric.compute()
    assert math.isnan(found["AUROC/b"])
    assert not math.isnan(found["AUROC/a"])


def test_scores_do_not_saturate():
    """Sure predictions still differ in float32, where one minus the largest is zero."""
    logits = torch.tensor([[17.5, 0.0], [22.0, 0.0], [40.0, 0.0]])
    exact = M.max_probability_score(logits.double(), True)
    for scores in (
        M.max_probability_score(logits, True),
        M.max_probability_score(logits.softmax(-1)),
    ):
        torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=0)
    low = torch.randn(400, 10).bfloat16()
    torch.testing.assert_close(M.energy_score(low), M.energy_score(low.float()))


def test_rounding_below_zero_is_no_class():
    slightly = torch.tensor([[-1e-6, 1.000001], [0.5, 0.5]])
    assert M.entropy_score(slightly)[0] == pytest.approx(0, abs=1e-4)
    assert M.nll(slightly, torch.tensor([1, 0])).isfinite()
    p = torch.tensor([1.0000002, 0.3])
    assert M.entropy_score(torch.stack([1 - p, p], -1)).isfinite().all()


def test_scores():
    logits = predictions(6, 0, 3)
    p = logits.softmax(-1).numpy()
    entropy = -(p * np.log(p)).sum(-1)
    np.testing.assert_allclose(M.entropy_score(logits, True), entropy, atol=1e-12)
    np.testing.assert_allclose(M.max_probability_score(logits, True), 1 - p.max(-1), atol=1e-12)
    energy = -np.log(np.exp(logits.numpy()).sum(-1))
    np.testing.assert_allclose(M.energy_score(logits), energy, atol=1e-12)


test_errors = refuses(
    (lambda s, o: M.auroc(s * torch.nan, o), "`scores` must not be NaN, but 120 of them are"),
    (lambda s, o: M.auroc(s, o[:-1]), "must have the same shape"),
    (lambda s, o: M.aupr(s.numpy(), o), "`scores` must be a tensor, got ndarray"),
    (lambda s, o: M.auroc(s, 2 * o.long()), "`is_ood` must be boolean"),
    (lambda s, o: M.aupr(s, o, "in"), "`positive` must be one of ood, id, got 'in'"),
    (lambda s, o: M.fpr_at_tpr(s, o, 1.5), r"`tpr` must be in \(0, 1\], got 1.5"),
    (lambda s, o: M.AUPR("x"), "`positive` must be one of"),
    (lambda s, o: M.OODDetection("msp"), "`score` must be one of max_probability, entropy"),
    (lambda s, o: M.OODDetection(ood_sets="svhn"), "`ood_sets` must be a list"),
    (lambda s, o: M.OODDetection(ood_sets=["a", "a"]), "`ood_sets` must be a list"),
    (lambda s, o: M.OODDetection(None).update_ood(s, "x"), "`ood_set` must be one of ood"),
    (lambda s, o: M.OODDetection(None).update_ood(s, 1), "`ood_set` must be one of ood"),
    (lambda s, o: M.OODDetection(None).update_id(s[None]), "Scores must be one per example"),
    (lambda s, o: M.OODDetection("energy"), "needs logits"),
    (lambda s, o: M.energy_score(s[None], False), "needs logits"),
    (lambda s, o: M.OODDetection(None, ["a", "b"]).update_ood(s), "must be one of a, b, got N"),
    given=draws,
)


@pytest.mark.bad_input
def test_whole_scores_that_float64_does_not_tell_apart_are_refused():
    truth = torch.tensor([0, 1])
    assert float(M.auroc(torch.tensor([2**53 - 1, 2**53]), truth)) == 1
    with pytest.raises(ValueError, match=r"`scores` must be at most 2\*\*53"):
        M.auroc(torch.tensor([2**53, 2**53 + 1]), truth)
