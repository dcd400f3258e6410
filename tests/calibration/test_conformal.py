"""Conformal sets and intervals: exact ranks, brute force, and the law that they cover."""

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import kstest, spearmanr

from lightning_bnn.calibration import FoldScores, conformal_intervals, conformal_sets, quantile_band
from lightning_bnn.calibration.conformal import (
    Band,
    conformal_quantiles,
    set_scores,
    uniform_numbers,
)
from lightning_bnn.commands.calibrate import credible_sets


def predictions(n, classes=5, seed=0, sharp=1.6):
    """Probabilities that are surer than they are right, in another way for every class."""
    g = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(n, classes, generator=g, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=g)[:, 0]
    tilt = torch.linspace(0, 2, classes, dtype=torch.float64)
    return (sharp * logits + tilt).softmax(-1), labels


# ------------------------------------------------------------ the quantile
@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("n", [1, 9, 10, 19, 20, 99])
def test_the_rank_is_exact(n, alpha):
    scores = torch.randn(n, generator=torch.Generator().manual_seed(n)).double()
    rank = math.ceil((n + 1) * (1 - Fraction(str(alpha))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = float(conformal_quantiles(scores, alpha))
    assert found == (sorted(scores.tolist())[rank - 1] if rank <= n else math.inf)


def test_groups_have_quantiles_of_their_own():
    g = torch.Generator().manual_seed(0)
    scores, groups = (
        torch.randn(200, 3, generator=g).double(),
        torch.randint(4, (200,), generator=g),
    )
    found = conformal_quantiles(scores, 0.2, groups, 4)
    for k in range(4):
        for column in range(3):
            alone = conformal_quantiles(scores[groups == k, column], 0.2)
            assert found[k, column] == alone[0]


def test_too_few_examples_are_said_once():
    with pytest.warns(
        UserWarning, match="needs 9 calibration examples, .* in 2 of 3 groups"
    ) as told:
        found = conformal_quantiles(torch.zeros(12), 0.1, torch.tensor([0] * 9 + [1] * 3), 3)
    assert len(told) == 1
    assert found.tolist() == [0.0, math.inf, math.inf]


# ------------------------------------------------------------ sets
@pytest.mark.parametrize("score", ["thr", "aps", "raps"])
def test_scores_are_those_of_a_loop(score):
    probs, _ = predictions(20)
    found, u = set_scores(probs, score, 3), uniform_numbers(probs, 3)
    for i, row in enumerate(probs.tolist()):
        order = sorted(range(5), key=lambda c: -row[c])
        for place, c in enumerate(order, 1):
            expected = sum(row[d] for d in order[: place - 1]) + float(u[i]) * row[c]
            expected += 0.1 * max(0, place - 1) if score == "raps" else 0
            expected = 1 - row[c] if score == "thr" else expected
            assert float(found[i, c]) == pytest.approx(expected, abs=1e-12)


KINDS = {
    "thr": {},
    "aps": {"score": "aps"},
    "raps": {"score": "raps"},
    "thr by class": {"by_class": True},
    "aps by class": {"score": "aps", "by_class": True},
}


def coverages(sets_of, repeats=200, known=99, new=60):
    """Covered shares of fresh data, calibrated on fresh data, again and again."""
    probs, labels = predictions(repeats * (known + new))
    found = []
    for k in range(repeats):
        rows = torch.arange(k * (known + new), (k + 1) * (known + new))
        a, b = rows[:known], rows[known:]
        sets = sets_of(probs[a], labels[a], probs[b], k)
        found.append(sets.gather(-1, labels[b, None]).double().mean())
    return torch.stack(found)


@pytest.mark.filterwarnings("ignore:An error rate")
@pytest.mark.parametrize("name", KINDS)
def test_sets_cover_as_often_as_they_say(name):
    """Of 99 scores the 90th is the threshold: 90 % of new examples, exactly."""
    found = coverages(lambda p, y, q, k: conformal_sets(p, y, 0.1, seed=k, **KINDS[name])(q))
    error = found.std() / math.sqrt(len(found))
    if "by class" in name:  # ceil((n + 1) (1 - alpha)) / (n + 1) is a bit more for small classes
        assert 0.9 - 3 * error < found.mean() < 0.96
    else:
        assert abs(found.mean() - 0.9) < 3.5 * error


@pytest.mark.parametrize("score", ["aps", "raps"])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_repeated_predictions_are_covered_as_often_as_they_say(kinds, score):
    """Also those of a network that says the same of everything."""
    rows = predictions(kinds, sharp=0.5)[0]

    def drawn(n, seed):
        g = torch.Generator().manual_seed(seed)
        probs = rows[torch.randint(kinds, (n,), generator=g)]
        return probs, torch.multinomial(probs, 1, generator=g)[:, 0]

    shares = []
    for k in range(200):
        rule = conformal_sets(*drawn(99, 2 * k), 0.1, score, seed=k)
        probs, labels = drawn(60, 2 * k + 1)
        shares.append(rule(probs).gather(-1, labels[:, None]).double().mean())
    found = torch.stack(shares)
    assert abs(found.mean() - 0.9) < 3.5 * found.std() / math.sqrt(len(found))


def test_only_the_order_of_equal_predictions_matters():
    """Equal predictions have numbers of their own, and all others keep theirs wherever they are."""
    probs, _ = predictions(50)
    mixed = torch.cat([probs, probs[:1].expand(30, -1), probs.flip(0)])
    u, alone = uniform_numbers(mixed, 0), uniform_numbers(probs, 0)
    assert torch.equal(u[:50], alone)
    assert not (u[-50:] == alone.flip(0)).any()  # their second time
    copies = torch.cat([u[:1], u[50:80], u[-1:]])
    assert len(copies.unique()) == 32
    assert kstest(uniform_numbers(probs[:1].expand(2000, -1), 0).numpy(), "uniform").pvalue > 1e-3
    known = uniform_numbers(probs[:1].expand(2000, -1), 0, known=True)
    assert abs(spearmanr(known, uniform_numbers(probs[:1].expand(2000, -1), 0)).statistic) < 0.1


def test_sets_as_predicted_do_not():
    found = coverages(lambda p, y, q, k: credible_sets(q, 0.1))
    assert abs(found.mean() - 0.9) > 8 * found.std() / math.sqrt(len(found))


def test_every_class_is_covered_only_by_class():
    probs, labels = predictions(20_000, sharp=2)
    new, truth = predictions(20_000, seed=1, sharp=2)

    def worst(by_class):
        sets = conformal_sets(probs, labels, 0.1, by_class=by_class)(new)
        covered = sets.gather(-1, truth[:, None])[:, 0].double()
        return min(float(covered[truth == c].mean()) for c in range(5))

    assert worst(True) > 0.875  # three standard errors, whatever the seed
    assert worst(False) < 0.85


@pytest.mark.parametrize("score", ["thr", "aps", "raps"])
def test_examples_have_the_same_sets_one_at_a_time(score):
    probs, labels = predictions(300)
    sets = conformal_sets(probs, labels, 0.3, score)
    alone = torch.cat([sets(row[None]) for row in probs])
    assert torch.equal(alone, sets(probs))
    noise = torch.randn(probs.shape, generator=torch.Generator().manual_seed(0))
    rounded = (sets(probs * (1 + 1e-7 * noise)) == sets(probs)).all(-1)  # as in other batches
    assert rounded.double().mean() > 0.98
    other = conformal_sets(probs, labels, 0.3, score, seed=1)
    assert torch.equal(other(probs), sets(probs)) == (score == "thr")
    assert bool((sets.at(0.1)(probs) >= sets(probs)).all())


@pytest.mark.parametrize("sharpness", [1, 5])
@pytest.mark.parametrize("classes", [2, 5, 1000])
def test_numbers_of_predictions_are_uniform_and_independent(classes, sharpness):
    """Of confident ones in single precision, too."""
    probs, _ = predictions(4000, classes)
    probs = (sharpness * probs.log()).softmax(-1).float()
    u, v = uniform_numbers(probs, 0), uniform_numbers(probs, 1)
    assert kstest(u.numpy(), "uniform").pvalue > 1e-3
    for other in (v, probs[:, 0], u.roll(1)):
        assert abs(spearmanr(u.numpy(), other.numpy()).statistic) < 4 / math.sqrt(4000)


# ------------------------------------------------------------ intervals
def regression(n, seed=0, samples=4):
    """A mixture whose noise is too small."""
    g = torch.Generator().manual_seed(seed)
    centre = torch.randn(n, 2, generator=g, dtype=torch.float64)
    means = centre + 0.3 * torch.randn(samples, n, 2, generator=g, dtype=torch.float64)
    stds = 0.2 + torch.rand(samples, n, 2, generator=g, dtype=torch.float64)
    noise = torch.randn(n, 2, generator=g, dtype=torch.float64) * 1.5
    return means, stds, centre + stds.mean(0) * noise


def test_intervals_are_those_of_a_loop():
    means, stds, targets = regression(50)
    band = quantile_band(means, stds, 0.2)
    rule = conformal_intervals(band, targets, 0.2)
    new = quantile_band(*regression(10, seed=1)[:2], 0.2)
    found = rule(new)
    for t in range(2):
        scores = [max(float(lo - y), float(y - hi)) for lo, hi, y in
                  zip(band.low[:, t], band.high[:, t], targets[:, t], strict=True)]  # fmt: skip
        q = sorted(scores)[math.ceil(51 * 0.8) - 1]
        torch.testing.assert_close(found.low[:, t], new.low[:, t] - q)
        torch.testing.assert_close(found.high[:, t], new.high[:, t] + q)


def test_bands_that_are_far_too_wide_shrink_to_points_at_most():
    zeros = torch.zeros(20)
    rule = conformal_intervals(Band(zeros - 5, zeros + 5, zeros + 1), zeros)
    found = rule(Band(zeros - 1, zeros + 1, zeros + 1))
    assert found.low.tolist() == found.high.tolist() == [0.0] * 20


# ------------------------------------------------------------ by folds
def test_scores_of_one_fold_are_those_of_split_conformal_prediction():
    g = torch.Generator().manual_seed(0)
    errors, halves = torch.rand(99, 2, generator=g), torch.rand(2, 99, 2, generator=g)
    split = FoldScores(errors, 2 * halves, 1).threshold(0.1)
    torch.testing.assert_close(split, conformal_quantiles(errors, 0.1)[0])
    assert (FoldScores(errors, 2 * halves, 5).threshold(0.1) < split).all()


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_thresholds_are_those_of_the_whole_ensemble(share):
    """In closed form: errors N(0, s + v / G) of G members, whose own part is ``share`` at G = 4.

    First order in the share, and never below the threshold of 20 members.
    """
    g, n = torch.Generator().manual_seed(0), 200_000
    noise = (1 - share) ** 0.5 * torch.randn(n, generator=g).double()
    own = (4 * share) ** 0.5 * torch.randn(4, n, generator=g).double()
    whole, first, last = ((noise + m.mean(0)).abs() for m in (own, own[:2], own[2:]))
    found = FoldScores(whole, torch.stack([first, last]), folds=5).threshold(0.1)
    wanted = 1.645 * (1 - 0.8 * ((1 + share) ** 0.5 - 1))
    assert float(found) == pytest.approx(wanted, rel=0.02)
    of_all = 1.645 * (1 - 0.8 * share) ** 0.5  # 20 members
    assert 0.98 * of_all < float(found) < (1.01 if share < 0.5 else 1.4) * of_all
    assert float(conformal_quantiles(whole, 0.1)) == pytest.approx(1.645, rel=0.02)


@pytest.mark.parametrize("own", [True, False])
def test_ensembles_by_folds_cover_as_often_as_asked(own):
    """120 tables of 100 rows, by members that are least squares of random features.

    Members differ in their features, or only in the rows that they have not seen.
    """
    random = np.random.default_rng(0)
    covered, same_folds, by_quantile = [], [], []
    for _ in range(120):
        x = random.normal(size=(400, 2))
        y = np.sin(x[:, 0]) + x[:, 1] + 0.05 * random.normal(size=400)
        size = 12 if own else 40
        draws = [(random.normal(size=(2, size)), random.normal(size=size)) for _ in range(20)]
        for divisions, shares in ((4, covered), (1, same_folds)):
            folds = np.stack([random.permutation(100) % 5 for _ in range(divisions)]).repeat(
                4 // divisions, 0
            )
            outputs = np.empty((20, 400))
            for m in range(20):
                matrix, shift = draws[m if own else 0]
                features, seen = np.tanh(x @ matrix + shift), np.flatnonzero(folds[m // 5] != m % 5)
                outputs[m] = features @ np.linalg.lstsq(features[seen], y[seen], rcond=None)[0]
            divided = outputs[:, :100].reshape(4, 5, 100)
            by_fold = np.take_along_axis(divided, folds[:, None], 1)[:, 0]
            parts = by_fold, by_fold[:2], by_fold[2:]
            whole, *halves = (torch.from_numpy(np.abs(y[:100] - p.mean(0))) for p in parts)
            errors = np.abs(y[100:] - outputs[:, 100:].mean(0))
            threshold = FoldScores(whole, torch.stack(halves), folds=5).threshold(0.1)
            shares.append((errors <= float(threshold)).mean())
        by_quantile.append((errors <= float(conformal_quantiles(whole, 0.1))).mean())
    assert np.mean(covered) == pytest.approx(0.9, abs=0.02)
    wider = by_quantile if own else same_folds  # members lack the same rows
    assert np.mean(wider) > 0.915


ZEROS = torch.zeros(12)
BAND = Band(ZEROS, ZEROS, ZEROS + 1)
SET = {
    "`score` must be one of thr, aps, raps": {"score": "lac"},
    "must be finite probabilities": {"probs": torch.full((20, 5), torch.nan)},
    "`labels` must be 20 integers": {"labels": torch.zeros(3).long()},
}
INTERVAL = {
    "`targets` must have shape": (BAND, ZEROS[:3]),
    "`targets` must be finite": (BAND, ZEROS / 0),
    "positive `scale`": (Band(ZEROS, ZEROS, ZEROS), ZEROS),
    "`targets` must be a tensor": (BAND, ZEROS.numpy()),
    "`band.low` must be a tensor": (BAND._replace(low=ZEROS.numpy()), ZEROS),
}


@pytest.mark.bad_input
def test_what_conformal_prediction_refuses():
    probs, labels = predictions(20)
    given = {"probs": probs, "labels": labels}
    alphas = [("`alpha` must be between 0 and 1", {"alpha": a}) for a in (0, 1, math.nan, True)]
    for words, options in (*alphas, *SET.items()):
        with pytest.raises(ValueError, match=words):
            conformal_sets(**{**given, **options})
    with pytest.raises(ValueError, match="`probs` must be of 5 classes"):
        conformal_sets(probs, labels)(torch.full((2, 4), 0.25))
    odd = [{name: ZEROS[:3]} for name in Band._fields]
    bands = [(BAND._replace(**o), ZEROS) for o in (*odd, dict.fromkeys(Band._fields, ZEROS[0]))]
    shapes = [("`band` must be three tensors of one shape", pair) for pair in bands]
    for words, pair in (*shapes, *INTERVAL.items()):
        with pytest.raises(ValueError, match=words):
            conformal_intervals(*pair)
