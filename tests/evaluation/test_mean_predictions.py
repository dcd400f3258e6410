"""Numbers of classes are those of the metrics on every path; errors equal closed forms."""

import math

import pytest
import torch

from lightning_bnn import metrics as M
from lightning_bnn.evaluation import (
    ClassPredictions,
    Evaluator,
    Predictions,
    draw,
    numbers_of,
    predictions_of_mode,
)
from lightning_bnn.evaluation.errors import bootstrap, jackknife
from lightning_bnn.likelihoods import Bernoulli, Categorical
from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian, Dropout, Empirical, Mixture
from weightsym import params as P

NET = mlp(5, [6], 3).eval()
NET.load_state_dict(P.unstack(P.populate(NET, 1, torch.Generator().manual_seed(77)))[0])
NETWORKS = P.populate(NET, 12, torch.Generator().manual_seed(1))
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 5, generator=G), torch.randint(3, (40,), generator=G)
FAR = 3 * torch.randn(30, 5, generator=G)
BATCHES = [(X[:25], Y[:25]), (X[25:], Y[25:])]


def probs(networks, x):
    return P.apply(NET, networks, x).double().softmax(-1)


def averages(networks, x):
    return Predictions.of(Categorical(), P.apply(NET, networks, x), Y if x is X else None)


def test_every_number_is_that_of_the_metrics_in_a_comparison_and_in_a_test():
    sets = [averages(NETWORKS, X), averages(NETWORKS, FAR)]
    p, q = probs(NETWORKS, X), probs(NETWORKS, FAR)
    scores = torch.cat([1 - p.mean(0).amax(-1), 1 - q.mean(0).amax(-1)])
    information, is_ood = [M.mutual_information(each) for each in (p, q)], torch.arange(70) >= 40
    wanted = {
        "acc": (p.mean(0).argmax(-1) == Y).double().mean(),
        "ece": M.ece(p.mean(0), Y),
        "ace": M.ace(p.mean(0), Y),
        "brier": (p.mean(0) - torch.eye(3)[Y]).square().sum(-1).mean(),
        "nll": -p.mean(0)[torch.arange(40), Y].log().mean(),
        "idmi": information[0].mean(),
        "oodmi": information[1].mean(),
        "aupr": M.aupr(scores, is_ood),
        "fpr95": M.fpr95(scores, is_ood),
        "auroc": M.auroc(scores, is_ood),
    }
    wanted = {name: float(value) for name, value in wanted.items()}
    assert numbers_of(sets)() == pytest.approx(wanted, abs=1e-9)
    entropies = [torch.special.entr(each.mean(0)).sum(-1) for each in (p, q)]
    for score, values in (("mutual_information", information), ("entropy", entropies)):
        other = numbers_of(sets, score)()["auroc"]
        assert other == pytest.approx(float(M.auroc(torch.cat(values), is_ood)), abs=1e-6)
        assert other != wanted["auroc"]

    evaluator = Evaluator(Categorical(), [("test", "id"), ("far", "ood")])
    for part in (slice(0, 7), slice(7, 40)):
        evaluator.add(P.apply(NET, NETWORKS, X[part]), Y[part])
    evaluator.add(P.apply(NET, NETWORKS, FAR), None, 1)
    names = {name: name for name in ("acc", "nll", "brier", "ece")}
    names |= {"idmi": "mi", "oodmi": "far/mi", "aupr": "far/AUPR_out", "fpr95": "far/FPR95"}
    tested = {name: float(evaluator.values()[key]) for name, key in names.items()}
    assert tested == pytest.approx({name: wanted[name] for name in names}, abs=1e-6)


def test_extreme_predictions():
    evaluator = Evaluator(Categorical(), [("test", "id")])
    evaluator.add(torch.tensor([[[0.0, 200.0]]]), torch.tensor([0]))  # a confident mistake
    assert float(evaluator.values()["nll"]) == pytest.approx(200)
    same = Predictions.of(Categorical(), P.apply(NET, NETWORKS, X)[:1].expand(3, -1, -1))
    low, high = same.scores()["mutual_information"].aminmax()
    assert 0 <= float(low) <= float(high) < 1e-12
    impossible = torch.tensor([[[0.0, -torch.inf]], [[-2000.0, 0.0]]])  # of two networks
    found = Predictions.of(Categorical(), impossible, torch.tensor([0]))
    assert float(found.log_densities()) == pytest.approx(-math.log(2))
    assert float(found.scores()["mutual_information"]) == pytest.approx(math.log(2))


def test_averages_of_modes_are_those_of_all_networks():
    halves = [{n: t[rows] for n, t in NETWORKS.items()} for rows in (slice(6), slice(6, None))]
    joined = ClassPredictions.stacked([averages(half, X) for half in halves]).mean()
    torch.testing.assert_close(joined.probs, averages(NETWORKS, X).probs)
    torch.testing.assert_close(joined.entropy, averages(NETWORKS, X).entropy)


POSTERIORS = {
    "networks": lambda: Empirical(NETWORKS),
    "gaussian": lambda: DiagonalGaussian(P.of(NET), 0.3),
    "mixture": lambda: Mixture([DiagonalGaussian(P.of(NET), s) for s in (0.1, 0.5)]),
}


@pytest.mark.parametrize("name", POSTERIORS)
def test_predictions_are_of_the_networks_whose_weights_are_compared(name):
    """Fewer are the first of more; all predict where fewer are there than asked for."""
    mode = POSTERIORS[name]()
    ((many, few),) = predictions_of_mode(mode, NET, Categorical(), [BATCHES], (8, 3), 7, 1)
    own = draw(mode, 8, 7, 1)
    torch.testing.assert_close(many.probs, averages(own, X).probs)
    torch.testing.assert_close(few.probs, averages({n: t[:3] for n, t in own.items()}, X).probs)
    assert not torch.allclose(own["1.weight"], draw(mode, 8, 8, 1)["1.weight"])
    assert not torch.equal(own["1.weight"], NETWORKS["1.weight"][:8])
    if name == "networks":
        ((found,),) = predictions_of_mode(mode, NET, Categorical(), [BATCHES], (100,), 0)
        torch.testing.assert_close(found.probs, averages(NETWORKS, X).probs)


def test_dropout_is_repeatable():
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 3))
    mode = Dropout(P.stack([P.of(net)]))
    runs = [
        predictions_of_mode(mode, net, Categorical(), [BATCHES], (4,), 1)[0][0].probs
        for _ in range(2)
    ]
    assert torch.equal(*runs)


def test_one_logit_gives_two_classes():
    z = torch.randn(4, 5, 1)
    probs = ClassPredictions.of_each(Bernoulli(), z).probs
    torch.testing.assert_close(probs[..., 1], z[..., 0].double().sigmoid())


# ------------------------------------------------------------ errors
def test_errors_of_a_mean_are_its_standard_error():
    values = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    few = values[:11]
    left = [{"mean": float(torch.cat([few[:k], few[k + 1 :]]).mean())} for k in range(11)]
    found = jackknife({"mean": float(few.mean())}, left)["mean"]
    assert found == pytest.approx((float(few.mean()), float(few.std()) / math.sqrt(11)))
    assert math.isnan(jackknife({"mean": 1.0}, [])["mean"].error)
    found = bootstrap([400], lambda rows: {"mean": float(values[rows].mean())}, repeats=300)
    assert found["mean"].value == pytest.approx(float(values.mean()))
    assert found["mean"].error == pytest.approx(float(values.std()) / 20, rel=0.15)
