"""Regression on the path of classification: evaluator, tables, jackknife and reference agree."""

import math

import pytest
import torch
from torch import nn

from lightning_bnn import metrics as M
from lightning_bnn.evaluation import (
    GaussianPredictions,
    make_evaluator,
    numbers_of,
    reference_predictions,
)
from lightning_bnn.evaluation.predictions import predictions_of_each, predictions_of_mode
from lightning_bnn.evaluation.report import columns_of, is_regression, note_of
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.models import mlp
from lightning_bnn.posteriors import DiagonalGaussian
from weightsym import params as P

G = torch.Generator().manual_seed(0)
OUTPUTS, Y = torch.randn(6, 40, 4, generator=G), torch.randn(40, 2, generator=G)
FAR = 3 * torch.randn(6, 30, 4, generator=G)
LIKELIHOODS = {
    "fixed": (Gaussian(std=0.7), 2),
    "learned": (Gaussian("learned", std=0.5, targets=2), 2),
    "heteroscedastic": (Gaussian("heteroscedastic"), 4),
}
CASES = pytest.mark.parametrize("name", LIKELIHOODS)


def case(name):
    likelihood, columns = LIKELIHOODS[name]
    return likelihood, OUTPUTS[..., :columns], FAR[..., :columns]


def mixture(likelihood, outputs):
    return GaussianPredictions.of_each(likelihood, outputs).mean()


def regression_numbers(likelihood, sets, targets, unit=None):
    return numbers_of(likelihood, sets, targets, target_std=unit)()


@CASES
def test_a_test_and_a_comparison_have_the_same_numbers_and_those_of_the_metrics(name):
    likelihood, outputs, far = case(name)
    evaluator = make_evaluator(likelihood, [("test", "id"), ("ood", "ood")])
    for rows in (slice(0, 7), slice(7, 40)):
        evaluator.add(outputs[:, rows], Y[rows])
    evaluator.add(far, None, 1)
    tested = {key: float(value) for key, value in evaluator.values().items()}
    sets = [mixture(likelihood, o) for o in (outputs, far)]
    scale = torch.tensor([2.0, 3.0])
    found = regression_numbers(likelihood, sets, Y, scale)
    means, stds = (t.double() for t in likelihood.moments(outputs))
    error = means.mean(0) - Y
    log_probs = likelihood.log_prob(outputs, Y).double()
    wanted = {
        "rmse": error.square().mean().sqrt(),
        "rmse_unit": (error * scale).square().mean().sqrt(),
        "nll": -(log_probs.logsumexp(0) - math.log(6)).mean(),
        "crps": M.crps(means, stds, Y),
        "cover90": M.interval_coverage(means, stds, Y),
        "width90": M.interval_width(means, stds),
        "calib": M.quantile_calibration(means, stds, Y),
        "sharpness": M.sharpness(means, stds),
        "idvar": means.var(0, correction=0).sum(-1).mean(),
    }
    for key, value in wanted.items():
        assert found[key] == pytest.approx(float(value.detach()), rel=1e-5), key
    for key in ("rmse", "nll", "nll_moments", "crps", "cover90", "width90", "calib", "sharpness"):
        assert tested[key] == pytest.approx(found[key]), key
    assert tested["mae"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
    assert tested["ood/AUPR_out"] == pytest.approx(found["aupr"])
    assert tested["ood/epistemic_var"] == pytest.approx(found["oodvar"])


@CASES
def test_one_gaussian_of_the_moments_is_the_mixture_of_one_network(name):
    likelihood, outputs, _ = case(name)
    one, more = (
        regression_numbers(likelihood, [mixture(likelihood, o)], Y) for o in (outputs[:1], outputs)
    )
    assert one["nll_moments"] == pytest.approx(one["nll"])
    assert more["nll_moments"] != pytest.approx(more["nll"])


@CASES
def test_mixtures_of_modes_are_those_of_all_networks(name):
    likelihood, outputs, _ = case(name)
    modes = GaussianPredictions.stacked([mixture(likelihood, half) for half in outputs.split(3)])
    whole = regression_numbers(likelihood, [mixture(likelihood, outputs)], Y)
    assert regression_numbers(likelihood, [modes.mean()], Y) == pytest.approx(whole)
    without = regression_numbers(likelihood, [modes[torch.tensor([1])].mean()], Y)
    alone = regression_numbers(likelihood, [mixture(likelihood, outputs[3:])], Y)
    assert without == pytest.approx(alone)
    assert without["crps"] != pytest.approx(whole["crps"])


def test_modes_of_several_sizes_have_equal_weights():
    likelihood, outputs, _ = case("fixed")
    parts = [mixture(likelihood, o) for o in (outputs[:1], outputs[1:])]
    assert GaussianPredictions.stacked(parts).mean().means.shape == (40, 2, 2)


def test_examples_drawn_again_need_no_new_scores():
    likelihood, outputs, far = case("heteroscedastic")
    sets = [mixture(likelihood, o) for o in (outputs, far)]
    rows, others = torch.tensor([3, 3, 9, 20]), torch.tensor([1, 1, 2])
    reference = reference_predictions(mixture(likelihood, outputs.flip(0)[:4]))
    drawn = numbers_of(likelihood, sets, Y, reference=reference)(rows, others)
    part = reference_predictions(mixture(likelihood, outputs.flip(0)[:4, rows]))
    chosen = [sets[0][rows], sets[1][others]]
    assert drawn == pytest.approx(numbers_of(likelihood, chosen, Y[rows], reference=part)())


def test_distances_to_a_reference_are_those_of_the_metrics():
    likelihood, outputs, _ = case("heteroscedastic")
    mine, other = outputs[:2], outputs[2:]
    found = numbers_of(likelihood, [mixture(likelihood, mine)], Y,
                       reference=reference_predictions(mixture(likelihood, other)))()  # fmt: skip
    (m, s), (n, t) = (likelihood.moments(o.double()) for o in (mine, other))
    assert found["energy"] == pytest.approx(float(M.energy_distance(m, s, n, t)))
    assert found["energy_f"] == pytest.approx(float(M.energy_distance(m, 0 * s, n, 0 * t)))
    assert found["energy"] < found["energy_f"]
    logits, labels = OUTPUTS, torch.arange(40) % 4
    of = [predictions_of_each(Categorical(), o, labels).mean() for o in (logits[:2], logits[2:])]
    classes = numbers_of(Categorical(), of[:1], labels, reference=reference_predictions(of[1]))()
    assert classes["agree"] == pytest.approx(float(M.agreement(of[0].probs, of[1].probs)))
    assert classes["tv"] == pytest.approx(float(M.total_variation(of[0].probs, of[1].probs)))
    assert classes["kl"] == pytest.approx(float(M.predictive_kl(of[0].probs, of[1].probs)))


def test_predictions_of_a_mode_are_mixtures():
    net, x = mlp(3, [4], 1).eval(), torch.randn(10, 3, generator=G)
    mode = DiagonalGaussian(P.of(net), 0.3)
    batches = [(x[:4], x[:4, :1]), (x[4:], x[4:, :1])]
    ((many, few),) = predictions_of_mode(mode, net, Gaussian(), [batches], (8, 3), 4)
    assert many.means.shape == (10, 1, 8)
    torch.testing.assert_close(few.means, many.means[..., :3])


class Laplacian(nn.Module):
    def log_prob(self, outputs, targets):
        return -(outputs[..., 0] - targets).abs() - math.log(2)


def test_a_likelihood_of_the_user_s_own_has_its_density():
    outputs, y = OUTPUTS[..., :1], Y[:, 0]
    own = predictions_of_each(Laplacian(), outputs, y)
    found = numbers_of(Laplacian(), [own.mean()], y)
    log_probs = Laplacian().log_prob(outputs, y).double()
    wanted = math.log(6) - log_probs.logsumexp(0)
    assert found() == {"nll": pytest.approx(float(wanted.mean()))}
    rows = torch.tensor([2, 2, 5])
    assert found(rows) == {"nll": pytest.approx(float(wanted[rows].mean()))}
    assert reference_predictions(own.mean()) is None


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_examples_that_cannot_be_judged_are_nan_and_do_not_stop_a_run(broken):
    likelihood, outputs, _ = case("fixed")
    outputs = outputs.clone()
    outputs[0, 3] = broken
    found = regression_numbers(likelihood, [mixture(likelihood, outputs)], Y)
    assert all(math.isnan(found[key]) for key in ("nll", "crps", "calib", "cover90", "rmse"))
    kept = torch.arange(40)[torch.arange(40) != 3]
    rest = numbers_of(likelihood, [mixture(likelihood, outputs)], Y)(kept)
    assert rest == pytest.approx(
        regression_numbers(likelihood, [mixture(likelihood, outputs[:, kept])], Y[kept])
    )


@pytest.mark.bad_input
def test_targets_of_another_shape_are_refused():
    evaluator = make_evaluator(Gaussian())
    with pytest.raises(ValueError, match=r"`targets` must have shape \(40, 2\).*add a dimension"):
        evaluator.add(OUTPUTS[..., :2], Y[:, 0])


def test_columns_are_those_of_the_kind_of_numbers():
    likelihood, outputs, far = case("fixed")
    sets = [mixture(likelihood, o) for o in (outputs, far)]
    found = regression_numbers(likelihood, sets, Y, torch.ones(2))
    columns = columns_of({*found, "mmd"})
    assert columns.keys() == found.keys() - {"auroc"}
    assert is_regression(found)
    assert "perfect forecaster has 3.2 with 100" in note_of(found, {"test_examples": 100})
    classes = columns_of(["acc", "nll", "mmd", "tv"])
    assert [column.title for column in classes.values()] == ["Acc", "NLL", "TV"]
    assert all("↓" in columns[name].unit for name in ("rmse", "crps", "calib", "nll"))
