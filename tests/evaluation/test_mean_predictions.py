"""Numbers of averages equal those of all predictions; errors equal closed forms."""

import math

import pytest
import torch

from lightning_bnn import metrics as M
from lightning_bnn.evaluation import ClassPredictions, draw, predictions_of_mode
from lightning_bnn.evaluation.errors import bootstrap, jackknife
from lightning_bnn.evaluation.evaluators import class_numbers
from lightning_bnn.evaluation.predictions import has_classes
from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian, Dropout, Empirical, Mixture
from weightsym import params as P

NET = mlp(5, [6], 3).eval()
NET.load_state_dict(P.unstack(P.populate(NET, 1, torch.Generator().manual_seed(77)))[0])
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(40, 5, generator=G), torch.randint(3, (40,), generator=G)
FAR = 3 * torch.randn(30, 5, generator=G)
BATCHES = [(X[:25], Y[:25]), (X[25:], Y[25:])]


def probs(networks, x):
    return P.apply(NET, networks, x).double().softmax(-1)


def averages(networks, x):
    p = probs(networks, x)
    return ClassPredictions(p, torch.special.entr(p).sum(-1)).mean()


@pytest.fixture
def networks():
    return P.populate(NET, 12, torch.Generator().manual_seed(1))


def test_every_number_is_that_of_the_metrics(networks):
    inside, outside = averages(networks, X), averages(networks, FAR)
    found = class_numbers(Categorical(), [inside, outside], Y)
    p, q = probs(networks, X), probs(networks, FAR)
    scores = torch.cat([1 - p.mean(0).amax(-1), 1 - q.mean(0).amax(-1)])
    is_ood = torch.arange(70) >= 40
    wanted = {
        "acc": (p.mean(0).argmax(-1) == Y).double().mean(),
        "ece": M.ece(p.mean(0), Y),
        "ace": M.ace(p.mean(0), Y),
        "brier": (p.mean(0) - torch.eye(3)[Y]).square().sum(-1).mean(),
        "nll": -p.mean(0)[torch.arange(40), Y].log().mean(),
        "idmi": M.mutual_information(p).mean(),
        "oodmi": M.mutual_information(q).mean(),
        "aupr": M.aupr(scores, is_ood),
        "fpr95": M.fpr95(scores, is_ood),
        "auroc": M.auroc(scores, is_ood),
    }
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(float(value), abs=1e-9), name


def test_information_can_detect_too_and_gives_other_numbers(networks):
    inside, outside = averages(networks, X), averages(networks, FAR)
    by = [
        class_numbers(Categorical(), [inside, outside], Y, s)["auroc"]
        for s in ("entropy", "mutual_information")
    ]
    p, q = (M.mutual_information(probs(networks, x)) for x in (X, FAR))
    is_ood = torch.arange(70) >= 40
    assert by[1] == pytest.approx(float(M.auroc(torch.cat([p, q]), is_ood)), abs=1e-6)
    assert by[0] != by[1]


def test_averages_of_modes_are_those_of_all_networks(networks):
    halves = [{n: t[:6] for n, t in networks.items()}, {n: t[6:] for n, t in networks.items()}]
    joined = ClassPredictions.stacked([averages(half, X) for half in halves]).mean()
    torch.testing.assert_close(joined.probs, averages(networks, X).probs)
    torch.testing.assert_close(joined.information(), averages(networks, X).information())


POSTERIORS = {
    "networks": lambda: Empirical(P.populate(NET, 9, torch.Generator().manual_seed(2))),
    "gaussian": lambda: DiagonalGaussian(P.of(NET), 0.3),
    "mixture": lambda: Mixture([DiagonalGaussian(P.of(NET), s) for s in (0.1, 0.5)]),
}


@pytest.mark.parametrize("name", POSTERIORS)
def test_fewer_networks_are_the_first_of_more(name):
    posterior = POSTERIORS[name]()
    ((many, few),) = predictions_of_mode(posterior, NET, Categorical(), [BATCHES], (8, 3), 4)
    ((alone,),) = predictions_of_mode(posterior, NET, Categorical(), [BATCHES], (8,), 4)
    torch.testing.assert_close(many.probs, alone.probs)
    assert many.probs.shape == (40, 3)
    assert not torch.allclose(many.probs, few.probs)
    ((other,),) = predictions_of_mode(posterior, NET, Categorical(), [BATCHES], (8,), 5)
    assert not torch.allclose(many.probs, other.probs)


def test_networks_that_are_fewer_than_asked_for_all_predict(networks):
    ((found,),) = predictions_of_mode(Empirical(networks), NET, Categorical(), [BATCHES], (100,), 0)
    torch.testing.assert_close(found.probs, averages(networks, X).probs)


def test_dropout_is_repeatable():
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 3))
    mode = Dropout(P.stack([P.of(net)]))
    runs = [
        predictions_of_mode(mode, net, Categorical(), [BATCHES], (4,), 1)[0][0].probs
        for _ in range(2)
    ]
    assert torch.equal(*runs)


# ------------------------------------------------------------ errors
def test_jackknife_of_a_mean_is_its_standard_error():
    values = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left = [{"mean": float(torch.cat([values[:k], values[k + 1 :]]).mean())} for k in range(11)]
    found = jackknife({"mean": float(values.mean())}, left)["mean"]
    assert found.value == pytest.approx(float(values.mean()))
    assert found.error == pytest.approx(float(values.std()) / math.sqrt(11))
    assert math.isnan(jackknife({"mean": 1.0}, [])["mean"].error)


def test_predictions_are_of_the_networks_whose_weights_are_compared():
    networks = P.populate(NET, 30, torch.Generator().manual_seed(2))
    for mode in (Empirical(networks), DiagonalGaussian(P.of(NET), 0.3)):
        ((many, few),) = predictions_of_mode(mode, NET, Categorical(), [BATCHES], (20, 5), 7, 1)
        own = draw(mode, 20, 7, 1)
        torch.testing.assert_close(many.probs, averages(own, X).probs)
        torch.testing.assert_close(few.probs, averages({n: t[:5] for n, t in own.items()}, X).probs)
    first = draw(Empirical(networks), 5, 7, 1)["1.weight"]
    assert not torch.equal(first, networks["1.weight"][:5])


def test_one_logit_gives_two_classes_and_a_regression_none():
    z = torch.randn(4, 5, 1)
    probs = ClassPredictions.of_each(Bernoulli(), z).probs
    torch.testing.assert_close(probs[..., 1], z[..., 0].double().sigmoid())
    assert has_classes(Bernoulli())
    assert not has_classes(Gaussian())


def test_bootstrap_of_a_mean_is_about_its_standard_error():
    values = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = bootstrap([400], lambda rows: {"mean": float(values[rows].mean())}, repeats=300)
    assert found["mean"].value == pytest.approx(float(values.mean()))
    assert found["mean"].error == pytest.approx(float(values.std()) / 20, rel=0.15)
