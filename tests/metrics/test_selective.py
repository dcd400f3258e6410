"""Risk-coverage curves against brute force over orders; coverage of sets against loops."""

import itertools

import pytest
import torch
from refusals import refuses

from lightning_bnn import metrics as M

G = torch.Generator().manual_seed(0)
PROBS = (2 * torch.randn(60, 4, generator=G)).softmax(-1).double()
LABELS = torch.randint(4, (60,), generator=G)
CORRECT = PROBS.argmax(-1) == LABELS


def by_hand(confidence, correct):
    """Mean over k of the share of errors among the k most confident, in plain Python."""
    order = sorted(range(len(confidence)), key=lambda i: -confidence[i])
    wrong, risks = 0, []
    for k, i in enumerate(order, 1):
        wrong += not correct[i]
        risks.append(wrong / k)
    return sum(risks) / len(risks)


def test_aurc_is_the_mean_risk_of_a_loop():
    confidence = PROBS.max(-1).values
    expected = by_hand(confidence.tolist(), CORRECT.tolist())
    assert float(M.aurc(PROBS, LABELS)) == pytest.approx(expected, abs=1e-12)
    assert float(M.aurc(PROBS.log(), LABELS, from_logits=True)) == pytest.approx(expected, abs=1e-9)
    shuffled = torch.randperm(60, generator=G)
    assert float(M.aurc(PROBS, LABELS[shuffled])) != pytest.approx(expected, abs=1e-3)


def test_ties_count_as_the_mean_over_their_orders():
    confidence = torch.tensor([0.9, 0.7, 0.7, 0.7, 0.3, 0.3])
    correct = torch.tensor([True, False, True, True, False, True])
    every = []
    for one in itertools.permutations([1, 2, 3]):
        for two in itertools.permutations([4, 5]):
            order = [0, *one, *two]
            wrong = (~correct[order]).double().cumsum(0)
            every.append(wrong / torch.arange(1, 7))
    curve = M.risk_coverage(confidence, correct)
    torch.testing.assert_close(curve.risk, torch.stack(every).mean(0))
    back = torch.arange(5, -1, -1)
    torch.testing.assert_close(M.risk_coverage(confidence[back], correct[back]).risk, curve.risk)


def test_sets_against_loops():
    sets = PROBS > 0.2
    rows = [(set(torch.where(s)[0].tolist()), int(y)) for s, y in zip(sets, LABELS, strict=True)]
    covered = [y in s for s, y in rows]
    assert float(M.set_coverage(sets, LABELS)) == pytest.approx(sum(covered) / 60)
    assert float(M.set_size(sets)) == pytest.approx(sum(len(s) for s, _ in rows) / 60)
    by_class = []
    for c in range(4):
        of_class = [hit for hit, (_, y) in zip(covered, rows, strict=True) if y == c]
        by_class.append(sum(of_class) / len(of_class))
    assert M.class_coverage(sets, LABELS).tolist() == pytest.approx(by_class)
    assert M.class_coverage(sets[LABELS > 0], LABELS[LABELS > 0])[0].isnan()


test_errors = refuses(
    (lambda: M.set_coverage(PROBS, LABELS), "`sets` must be boolean"),
    (lambda: M.set_coverage(PROBS > 0.2, LABELS[:3]), "`labels` must be 60 integers"),
    (lambda: M.risk_coverage(PROBS[0] / 0, CORRECT[:4]), "`confidence` must be finite"),
    (lambda: M.risk_coverage(PROBS[:2, 0], CORRECT[:1]), "must have the same shape"),
)
