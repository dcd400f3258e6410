"""Estimators do what scikit-learn asks of all of them, and predict as their modules do."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from refusals import refuses
from scipy.stats import beta, kstest, norm
from sklearn.datasets import make_blobs
from sklearn.utils.estimator_checks import check_estimator

from lightning_bnn import modules, samplers
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.predictions import Predictions
from lightning_bnn.sklearn import BnnClassifier, BnnRegressor
from lightning_bnn.tabular import Rows

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
    x, y = noisy(4000, seed=1)
    mean, std, low, high = regressor.predict(x, return_std=True, intervals=0.9)
    assert ((low < y) & (y < high)).mean() == pytest.approx(0.9, abs=0.06)  # 100 rows
    assert np.median(std) == pytest.approx(5 * NOISE, rel=0.15)
    assert np.square(mean - y).mean() ** 0.5 == pytest.approx(5 * NOISE, rel=0.15)
    assert regressor.predict([[8.0]], return_std=True)[1] > 3 * std.max()
    drawn = regressor.sample(x[:50], n=500, random_state=0)
    noise = regressor.module_.likelihood.log_std.exp().item() * regressor._targets_scaler.scale_[0]
    wanted = np.hypot(drawn.std(0), noise)
    assert std[:50] == pytest.approx(wanted, rel=0.1)
    assert std[:50] != pytest.approx(drawn.std(0), rel=0.1)


def test_predictions_are_those_of_the_module():
    x, index = make_blobs(90, centers=3, random_state=0)
    labels = np.array(["high", "low", "middle"])[index]
    classifier = BnnClassifier(options={"members": 3}, conformal=None, **SMALL).fit(x, labels)
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
    regressor = BnnRegressor(options=options, conformal=None, **SMALL).fit(x, y)
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


@pytest.mark.parametrize(
    ("conformal", "epochs", "rate"), [("folds", None, 0.3), ("split", 4, 0.01), (None, 4, None)]
)
def test_training_without_a_trainer_takes_its_steps(conformal, epochs, rate, monkeypatch):
    for name, value in {"_ROWS": 50, "_PATIENCE": 1}.items():
        monkeypatch.setattr(f"lightning_bnn.sklearn.estimator.{name}", value)
    x, y = noisy(120)
    settings = {
        "hidden": (4, 3), "epochs": epochs, "conformal": conformal, "random_state": 0,
        "options": {"members": 5, "prior_std": 0.5}, "learning_rate": rate, "batch_size": 32,
    }  # fmt: skip
    for cls, targets in ((BnnRegressor, y), (BnnClassifier, np.digitize(y, [97, 103]))):
        plain, usual, without_prior = (
            cls(**settings | changed).fit(x, targets).module_.member_stack()
            for changed in ({}, {"trainer": {"logger": False}}, {"options": {"members": 5}})
        )
        for name, weights in usual.items():
            torch.testing.assert_close(plain[name], weights, rtol=1e-6, atol=1e-6)
            assert not torch.allclose(without_prior[name], weights, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:The energy errors")  # one step of tuning is too few
def test_an_epoch_of_chains_with_all_data_is_a_transition():
    sampler = partial(samplers.MCLMC, steps=1, descent_steps=1, adapt_steps=1)
    settings = {"options": {"optimizer": sampler, "burn_in": 3}, "hidden": (4,), "epochs": 5}
    regressor = BnnRegressor("MILE", conformal=None, **settings).fit(*noisy(100))
    assert regressor.module_.trainer.global_step == 5
    assert regressor.module_.eval_samples == 100


# ------------------------------------------------------------ calibration
def test_calibrated_coverage_has_the_law_of_order_statistics():
    """Given 99 scores, new targets are inside with a probability that is Beta(90, 10)."""
    regressor = BnnRegressor(conformal=None, **SMALL | {"epochs": 1}).fit(*noisy(40))
    random, x = np.random.default_rng(0), np.zeros((99, 1))
    covered = []
    for _ in range(300):
        y = 100 + random.normal(size=99)
        _, low, high = regressor.calibrate(x, y).predict(x[:1], intervals=0.9)
        covered.append((norm.cdf(high - 100) - norm.cdf(low - 100)).item())
    assert kstest(covered, beta(90, 10).cdf).pvalue > 0.01
    assert kstest(covered, beta(88, 12).cdf).pvalue < 1e-3


@pytest.mark.e2e
@pytest.mark.parametrize("conformal", ["folds", "split"])
def test_intervals_hold_new_targets_where_the_noise_depends_on_the_row(conformal):
    random, shares = np.random.default_rng(0), []
    for k in range(5):
        x = random.normal(size=(1160, 3))
        noise = 0.1 + np.abs(x[:, 1])
        y = x[:, 0] + noise * random.normal(size=1160)
        regressor = BnnRegressor(conformal=conformal, random_state=k).fit(x[:160], y[:160])
        _, low, high = regressor.predict(x[160:], intervals=0.8)
        true = norm.cdf(high - x[160:, 0], scale=noise[160:])
        shares.append(np.mean(true - norm.cdf(low - x[160:, 0], scale=noise[160:])))
        assert np.corrcoef(high - low, noise[160:])[0, 1] > 0.5
    assert np.mean(shares) > 0.8 - 2 * np.std(shares) / 5**0.5
    one = {"members": 1, "prior_std": 9.0}  # overfitted
    overfitted = BnnRegressor(conformal=None, epochs=300, options=one, random_state=0)
    _, low, high = overfitted.fit(x[:160], y[:160]).predict(x[160:], intervals=0.8)
    assert ((low < y[160:]) & (y[160:] < high)).mean() < 0.7


def test_no_network_predicts_rows_that_it_was_trained_on():
    x, y = noisy(60)
    settings = {**SMALL, "options": {"members": 10}}
    regressor = BnnRegressor(**settings).fit(x, y)
    rows = torch.from_numpy((x - x.mean(0)) / x.std(0))
    folds = Rows.by_folds(60, 10, regressor.module_.seed).folds
    scores = torch.empty(60, dtype=torch.float64)
    for i in range(60):
        members = [regressor.module_.member(5 * d + int(folds[d, i])) for d in range(2)]
        outputs = torch.stack([m(rows[i : i + 1]) for m in members]).detach()
        mean, std = Predictions.of(regressor.module_.likelihood, outputs).moments()
        scores[i] = ((y[i] - y.mean()) / y.std() - mean[0, 0]).abs() / std[0, 0]
    found = regressor._held.whole[:, 0].sort().values
    torch.testing.assert_close(found, scores.sort().values, rtol=1e-4, atol=1e-4)
    other = y.copy()
    other[(folds[0] == 2) & (folds[1] == 4)] += 50  # a member does not see its fold
    again = BnnRegressor(**settings)
    again._scaled = lambda t, rows: (
        regressor._scaled(y[:, None], rows) + torch.from_numpy((t - y[:, None]) / y.std()).float()
    )
    again.fit(x, other)
    same = [
        torch.equal(*(e.module_.member(m)(rows) for e in (regressor, again))) for m in range(10)
    ]
    assert same == [m in (2, 9) for m in range(10)]


def test_sets_hold_the_class_and_temperatures_never_make_surer():
    x, index = make_blobs(2300, centers=4, cluster_std=4.0, random_state=0)
    classifier = BnnClassifier(random_state=0, epochs=20).fit(x[:300], index[:300])
    sets, truth = classifier.predict_sets(x[300:], coverage=0.8), index[300:]
    assert 0.77 < sets[range(2000), truth].mean() < 0.9
    assert (classifier.predict_sets(x[300:], coverage=0.95) >= sets).all()
    sure = classifier.predict_proba(x).max(-1)
    classifier.calibrate(x[300:500], (index[300:500] + 1) % 4)  # all wrong
    assert classifier.temperature_ > 2
    assert (classifier.predict_proba(x).max(-1) < sure).mean() > 0.9
    classifier.calibrate(x[300:500], classifier.predict(x[300:500]))  # all right
    assert classifier.temperature_ == 1


def test_a_column_of_words_is_refused_with_the_remedy():
    class Frame:  # as pandas has it
        def __init__(self, columns):
            self.columns = np.array([*columns], dtype=object)
            self.values = np.array([*columns.values()], dtype=object).T
            self.dtypes = [np.asarray(column).dtype for column in columns.values()]
            self.shape = self.values.shape

        def __array__(self, dtype=None, copy=None):
            return self.values.astype(dtype or object)

        def __len__(self):
            return len(self.values)

    y = np.arange(40.0)
    with pytest.raises(ValueError, match="Columns colour are not numbers: .*OneHotEncoder"):
        BnnRegressor().fit(Frame({"size": y, "colour": ["red", "blue"] * 20}), y)


TWO = [[0.0], [1.0]], [0, 1]

LABELLED = lambda: BnnClassifier(conformal=None, **SMALL).fit(*TWO)  # noqa: E731


def short(**options):
    return BnnRegressor(**SMALL | {"epochs": 1}, **options).fit(*TWO)


test_bad_input = refuses(
    (lambda: BnnClassifier("Forest").fit(*TWO), "`method` must be .*MFVI"),
    (lambda: BnnRegressor().fit([[0.0], [np.nan]], [0, 1]), "contains NaN: fill .*Imputer"),
    (lambda: BnnRegressor(conformal="loo").fit(*TWO), "`conformal` must be one of auto, folds"),
    (lambda: BnnRegressor("Laplace", conformal="folds").fit(*TWO), "Laplace completes all members"),
    (lambda: short(conformal="folds", options={"members": 1}), "needs at least 2 members, got 1"),
    (lambda: short().calibrate([[0.0]], [0.0, 1.0]), r"`y` must have shape \(1,\), got \(2,\)"),
    (lambda: LABELLED().calibrate(*TWO[:1], [0, 7]), r"has not seen: \[7\]"),
    (lambda: LABELLED().predict_sets([[0.0]]), "no rows to calibrate sets with"),
    (lambda: BnnClassifier().fit([[0.0], [1.0]], [0.5, 1.2]), "Unknown label type"),
    (lambda: short().predict([[0.0]], intervals=90), "`intervals` must be between 0 and 1, got 90"),
    (lambda: BnnRegressor("HMC", learning_rate=0.1).fit(*TWO), "HMC tunes its steps: omit"),
    (lambda: short().log_prob([[0.0]], [[0.0]]), r"`y` must have shape \(1,\), got \(1, 1\)"),
    (lambda: BnnClassifier(epochs=0).fit(*TWO), "`epochs` must be at least 1, got 0"),
    (lambda: BnnRegressor(hidden=50).fit(*TWO), "`hidden` must be a list"),
)
