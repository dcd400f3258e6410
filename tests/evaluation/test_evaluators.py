"""One evaluator for everything: batches, likelihoods and paths give the same numbers."""

import math

import pytest
import torch
from torch import nn

from lightning_bnn.evaluation import ClassPredictions, make_evaluator
from lightning_bnn.evaluation.evaluators import class_numbers
from lightning_bnn.likelihoods import Categorical, Gaussian

G = torch.Generator().manual_seed(0)
LOGITS, LABELS = torch.randn(6, 40, 3, generator=G), torch.randint(3, (40,), generator=G)
FAR = torch.randn(6, 30, 3, generator=G)
SETS = [("test", "id"), ("far", "ood")]


def values(evaluator):
    return {name: float(value) for name, value in evaluator.values().items()}


def judged(likelihood, outputs, targets, far=None, sizes=(40,)):
    evaluator = make_evaluator(likelihood, SETS if far is not None else SETS[:1])
    for part, some in zip(outputs.split(sizes, 1), targets.split(sizes), strict=True):
        evaluator.add(part, some)
    if far is not None:
        evaluator.add(far, None, 1)
    return values(evaluator)


def test_a_test_and_a_comparison_have_the_same_numbers():
    tested = judged(Categorical(), LOGITS, LABELS, FAR)
    averages = [ClassPredictions.of(Categorical(), outputs) for outputs in (LOGITS, FAR)]
    compared = class_numbers(Categorical(), averages, LABELS)
    pairs = {"acc": "acc", "nll": "nll", "brier": "brier", "ece": "ece", "idmi": "mi",
             "oodmi": "far/mi", "aupr": "far/AUPR_out", "fpr95": "far/FPR95"}  # fmt: skip
    assert {name: compared[name] for name in pairs} == {n: tested[k] for n, k in pairs.items()}


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
def test_batches_do_not_matter(likelihood):
    targets = LABELS if isinstance(likelihood, Categorical) else torch.randn(40, 3, generator=G)
    whole, parts = (judged(likelihood, LOGITS, targets, FAR, s) for s in ((40,), (7, 33)))
    assert parts == pytest.approx(whole)


def test_confident_mistakes_have_a_finite_likelihood():
    outputs = torch.tensor([[[0.0, 200.0]]])
    assert judged(Categorical(), outputs, torch.tensor([0]), sizes=(1,))["nll"] == pytest.approx(
        200
    )


def test_a_likelihood_of_the_user_s_own_is_judged_by_its_density():
    class Own(nn.Module):
        def log_prob(self, outputs, targets):
            return -(outputs[..., 0] - targets).abs()

    numbers = judged(Own(), torch.zeros(2, 3, 1), torch.ones(3), sizes=(3,))
    assert numbers == {"nll": pytest.approx(1.0)}
    evaluator = make_evaluator(Own(), SETS)
    evaluator.add(torch.zeros(2, 3, 1), torch.ones(3))
    evaluator.add(torch.zeros(2, 3, 1), None, 1)
    assert values(evaluator).keys() == {"nll"}


def test_information_is_never_negative():
    same = LOGITS[:1].expand(3, -1, -1)
    assert 0 <= float(ClassPredictions.of(Categorical(), same).information().min()) < 1e-12
    assert math.isclose(judged(Categorical(), same, LABELS)["mi"], 0, abs_tol=1e-12)
