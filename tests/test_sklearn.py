"""Estimators do what scikit-learn asks of all of them, and predict as their modules do."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy.stats import norm
from sklearn.datasets import make_blobs
from sklearn.utils.estimator_checks import check_estimator

from lightning_bnn import modules, samplers
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.sklearn import BnnClassifier, BnnRegressor

SMALL = {"hidden": (16,), "epochs": 20, "batch_size": 16, "random_state": 0}
NOISE = 0.3
BAYESIAN = "HMC IVON Laplace MCDropout MFVI MILE SMILE SWAG SymmetrizedVI".split()


def noisy(n=400, seed=0):
    random = np.random.default_rng(seed)
    x = random.uniform(-2, 2, (n, 1))
    return x, 100 + 5 * (np.sin(2 * x[:, 0]) + NOISE * random.normal(size=n))


@pytest.mark.e2e
@pytest.mark.parametrize("cls", [BnnClassifier, BnnRegressor])
@pytest.mark.parametrize(
    "method",
    ["DeepEnsemble", *(pytest.param(m, marks=pytest.mark.slow) for m in ("MFVI", "Laplace"))],
)
def test_the_checks_of_scikit_learn(cls, method):
    options = {"members": 2} if method == "DeepEnsemble" else None
    check_estimator(cls(method, options=options, **SMALL), on_skip=None)


@pytest.mark.e2e
def test_intervals_hold_new_targets_and_widen_where_nothing_was_learned():
    regressor = BnnRegressor("Laplace", epochs=60, random_state=0).fit(*noisy())
    x, y = noisy(2000, seed=1)
    mean, std, low, high = regressor.predict(x, return_std=True, intervals=0.9)
    assert ((low < y) & (y < high)).mean() == pytest.approx(0.9, abs=0.03)
    assert np.median(std) == pytest.approx(5 * NOISE, rel=0.15)
    assert np.square(mean - y).mean() ** 0.5 == pytest.approx(5 * NOISE, rel=0.15)
    assert regressor.predict([[8.0]], return_std=True)[1] > 3 * std.max()
    drawn = regressor.sample(x[:50], n=500, random_state=0)
    noise = regressor.module_.likelihood.log_std.exp().item() * y.std()
    wanted = np.hypot(drawn.std(0), noise)
    assert std[:50] == pytest.approx(wanted, rel=0.1)
    assert std[:50] != pytest.approx(drawn.std(0), rel=0.1)


def test_predictions_are_those_of_the_module():
    x, index = make_blobs(90, centers=3, random_state=0)
    labels = np.array(["high", "low", "middle"])[index]
    classifier = BnnClassifier(options={"members": 3}, **SMALL).fit(x, labels)
    assert classifier.score(x, labels) > 0.8
    assert classifier.module_.members == 3
    rows = torch.from_numpy((x - x.mean(0)) / x.std(0))
    wanted = np.mean([classifier.module_.member(m)(rows).softmax(-1).detach() for m in range(3)], 0)
    assert classifier.predict_proba(x) == pytest.approx(wanted, abs=1e-5)
    assert list(classifier.predict(x)) == [classifier.classes_[k] for k in wanted.argmax(-1)]


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::UserWarning")  # that some of these runs are too short
@pytest.mark.parametrize("method", [*BAYESIAN, modules.SGHMC])
def test_every_method_learns_numbers_and_classes(method):
    x, y = noisy(60)
    x = np.concatenate([x, np.full((60, 1), 0.1)], 1)  # a constant column
    for cls, targets in ((BnnRegressor, y), (BnnClassifier, y > 100)):
        estimator = cls(method, hidden=(8,), epochs=6, random_state=0).fit(x, targets)
        assert np.isfinite(estimator.sample(x)).all()
        predicted = estimator.predict(x + [0, 0.01])
        again = pickle.loads(pickle.dumps(estimator)).predict(x + [0, 0.01])
        assert (predicted == again).all()
        assert np.abs(predicted.astype(float)).max() < 200


def test_a_likelihood_of_ones_own_stays_as_it_was():
    likelihood = Gaussian("learned", std=0.2)
    regressor = BnnRegressor(options={"likelihood": likelihood}, **SMALL | {"epochs": 2})
    one, two = (regressor.fit(*TWO).predict([[0.5]], return_std=True) for _ in range(2))
    assert likelihood.log_std.exp().item() == pytest.approx(0.2)
    assert one == two


@pytest.mark.parametrize("targets", [1, 2])
def test_densities_are_those_of_the_mixture(targets):
    x, y = noisy(60)
    y = y[:, None] * np.linspace(1, 3, targets) if targets > 1 else y
    options = {"members": 3, "likelihood": Gaussian("heteroscedastic")}
    regressor = BnnRegressor(options=options, **SMALL).fit(x, y)
    scale, mean = y.std(0), y.mean(0)
    rows = torch.from_numpy((x - x.mean(0)) / x.std(0))
    densities, bells = [], []
    for m in range(3):
        z = regressor.module_.member(m)(rows).detach().numpy()
        std = scale * (np.logaddexp(0, z[:, targets:]) + 1e-3)
        bells.append((z[:, :targets] * scale + mean, std))
        densities.append(norm.pdf(y.reshape(60, -1), *bells[-1]).prod(-1))
    assert regressor.log_prob(x, y) == pytest.approx(np.log(np.mean(densities, 0)), abs=1e-5)
    means, stds = map(np.stack, zip(*bells, strict=True))
    one = norm.logpdf(y.reshape(60, -1), means.mean(0), np.hypot(means.std(0), stds.mean(0)))
    assert regressor.log_prob(x, y) != pytest.approx(one.sum(-1), abs=1e-3)


@pytest.mark.filterwarnings("ignore:The energy errors")  # one step of tuning is too few
@pytest.mark.parametrize(("method", "steps"), [("MILE", 5), ("DeepEnsemble", 20)])
def test_an_epoch_of_chains_with_all_data_is_a_transition(method, steps):
    sampler = partial(samplers.MCLMC, steps=1, descent_steps=1, adapt_steps=1)
    options = {"optimizer": sampler, "burn_in": 3} if method == "MILE" else {}
    regressor = BnnRegressor(method, hidden=(4,), epochs=5, options=options).fit(*noisy(100))
    assert regressor.module_.trainer.global_step == steps
    assert regressor.module_.eval_samples == 100


TWO = [[0.0], [1.0]], [0, 1]


def short(**options):
    return BnnRegressor(**SMALL | {"epochs": 1}, **options).fit(*TWO)


test_bad_input = refuses(
    (lambda: BnnClassifier("Forest").fit(*TWO), "`method` must be .*MFVI"),
    (lambda: BnnRegressor().fit([[0.0], [np.nan]], [0, 1]), "contains NaN"),
    (lambda: BnnClassifier().fit([[0.0], [1.0]], [0.5, 1.2]), "Unknown label type"),
    (lambda: short().predict([[0.0]], intervals=90), "`intervals` must be between 0 and 1, got 90"),
    (lambda: BnnRegressor("HMC", learning_rate=0.1).fit(*TWO), "HMC tunes its steps: omit"),
    (lambda: short().log_prob([[0.0]], [[0.0]]), r"`y` must have shape \(1,\), got \(1, 1\)"),
    (lambda: BnnClassifier(epochs=0).fit(*TWO), "`epochs` must be at least 1, got 0"),
    (lambda: BnnRegressor(hidden=50).fit(*TWO), "`hidden` must be a list"),
)
