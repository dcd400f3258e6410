"""Regression on the path of classification: evaluator, tables, jackknife and reference agree."""

import math

import pytest
import torch
from torch import nn

from lightning_bnn import metrics as M
from lightning_bnn.calibration import calibrated
from lightning_bnn.evaluation import Evaluator, GaussianPredictions, Predictions, numbers_of
from lightning_bnn.evaluation.report import columns_of, is_regression, note_of
from lightning_bnn.likelihoods import Categorical, Gaussian

G = torch.Generator().manual_seed(0)
OUTPUTS, Y = torch.randn(6, 40, 4, generator=G), torch.randn(40, 2, generator=G)
FAR = 3 * torch.randn(6, 30, 4, generator=G)
SETS = [("test", "id"), ("ood", "ood")]
LIKELIHOODS = {
    "fixed": (Gaussian(std=0.7), 2),
    "learned": (Gaussian("learned", std=0.5, targets=2), 2),
    "heteroscedastic": (Gaussian("heteroscedastic"), 4),
}


def case(name):
    likelihood, columns = LIKELIHOODS[name]
    return likelihood, OUTPUTS[..., :columns], FAR[..., :columns]


def mixture(likelihood, outputs, targets=Y):
    return Predictions.of(
        likelihood, outputs, targets if len(targets) == outputs.shape[1] else None
    )


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_test_and_a_comparison_have_the_same_numbers_and_those_of_the_metrics(name):
    likelihood, outputs, far = case(name)
    evaluator = Evaluator(likelihood, SETS)
    for rows in (slice(0, 7), slice(7, 40)):
        evaluator.add(outputs[:, rows], Y[rows])
    evaluator.add(far, None, 1)
    tested = {key: float(value) for key, value in evaluator.values().items()}
    sets = [mixture(likelihood, o) for o in (outputs, far)]
    scale = torch.tensor([2.0, 3.0])
    found = numbers_of(sets, target_std=scale)()
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
    one = numbers_of([mixture(likelihood, outputs[:1])])()
    assert one["nll_moments"] == pytest.approx(one["nll"])  # of one network
    assert found["nll_moments"] != pytest.approx(found["nll"])
    columns = columns_of({*found, "mmd"})
    assert columns.keys() == found.keys() - {"auroc"}
    assert is_regression(found)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_mixtures_of_modes_are_those_of_all_networks(name):
    likelihood, outputs, _ = case(name)
    modes = GaussianPredictions.stacked([mixture(likelihood, half) for half in outputs.split(3)])
    whole = numbers_of([mixture(likelihood, outputs)])()
    assert numbers_of([modes.mean()])() == pytest.approx(whole)
    without = numbers_of([modes.modes(torch.tensor([1])).mean()])()
    alone = numbers_of([mixture(likelihood, outputs[3:])])()
    assert without == pytest.approx(alone)
    assert without["crps"] != pytest.approx(whole["crps"])
    uneven = [mixture(likelihood, o) for o in (outputs[:1], outputs[1:])]  # of equal weights
    assert GaussianPredictions.stacked(uneven).mean().means.shape == (40, 2, 2)


def test_examples_drawn_again_need_no_new_scores():
    likelihood, outputs, far = case("heteroscedastic")
    sets = [mixture(likelihood, o) for o in (outputs, far)]
    rows, others = torch.tensor([3, 3, 9, 20]), torch.tensor([1, 1, 2])
    reference = mixture(likelihood, outputs.flip(0)[:4])
    drawn = numbers_of(sets, reference=reference)(rows, others)
    chosen = [sets[0].rows(rows), sets[1].rows(others)]
    assert drawn == pytest.approx(numbers_of(chosen, reference=reference.rows(rows))())


def test_distances_to_a_reference_are_those_of_the_metrics():
    likelihood, outputs, _ = case("heteroscedastic")
    mine, other = outputs[:2], outputs[2:]
    found = numbers_of([mixture(likelihood, mine)], reference=mixture(likelihood, other))()
    (m, s), (n, t) = (likelihood.moments(o.double()) for o in (mine, other))
    assert found["energy"] == pytest.approx(float(M.energy_distance(m, s, n, t)))
    assert found["energy_f"] == pytest.approx(float(M.energy_distance(m, 0 * s, n, 0 * t)))
    assert found["energy"] < found["energy_f"]
    labels = torch.arange(40) % 4
    of = [Predictions.of(Categorical(), o, labels) for o in OUTPUTS.split((2, 4))]
    classes = numbers_of(of[:1], reference=of[1])()
    for name, metric in (
        ("agree", M.agreement), ("tv", M.total_variation), ("kl", M.predictive_kl)
    ):  # fmt: skip
        assert classes[name] == pytest.approx(float(metric(of[0].probs, of[1].probs)))


class Laplacian(nn.Module):
    def log_prob(self, outputs, targets):
        return -(outputs[..., 0] - targets).abs() - math.log(2)


def test_a_likelihood_of_the_user_s_own_has_its_density():
    outputs, y = OUTPUTS[..., :1], Y[:, 0]
    own = Predictions.of(Laplacian(), outputs, y)
    found = numbers_of([own])
    log_probs = Laplacian().log_prob(outputs, y).double()
    wanted = math.log(6) - log_probs.logsumexp(0)
    assert found() == {"nll": pytest.approx(float(wanted.mean()))}
    rows = torch.tensor([2, 2, 5])
    assert found(rows) == {"nll": pytest.approx(float(wanted[rows].mean()))}
    assert own.distances(own) == {}
    evaluator = Evaluator(Laplacian(), SETS)
    evaluator.add(outputs, y)
    evaluator.add(outputs, None, 1)
    assert evaluator.values() == {"nll": pytest.approx(float(wanted.mean()))}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_examples_that_cannot_be_judged_are_nan_and_do_not_stop_a_run(broken):
    likelihood, outputs, _ = case("fixed")
    outputs = outputs.clone()
    outputs[0, 3] = broken
    numbers = numbers_of([mixture(likelihood, outputs)])
    found = numbers()
    assert all(math.isnan(found[key]) for key in ("nll", "crps", "calib", "cover90", "rmse"))
    kept = torch.arange(40)[torch.arange(40) != 3]
    rest = numbers_of([mixture(likelihood, outputs[:, kept], Y[kept])])()
    assert numbers(kept) == pytest.approx(rest)


@pytest.mark.bad_input
def test_targets_of_another_shape_are_refused():
    evaluator = Evaluator(Gaussian())
    with pytest.raises(ValueError, match=r"`targets` must have shape \(40, 2\).*add a dimension"):
        evaluator.add(OUTPUTS[..., :2], Y[:, 0])


def test_columns_are_those_of_the_kind_of_numbers():
    assert "perfect forecaster has 3.2 with 100" in note_of(["calib"], {"test_examples": 100})
    classes = columns_of(["acc", "nll", "mmd", "tv"])
    assert [column.title for column in classes.values()] == ["Acc", "NLL", "TV"]
    assert all("↓" in column.unit for column in columns_of(["rmse", "crps", "calib"]).values())


# ------------------------------------------------------------ after calibration
def test_classes_after_calibration():
    g = torch.Generator().manual_seed(0)
    outputs = 4 * torch.randn(3, 300, 4, generator=g)
    labels = outputs[0].div(4).softmax(-1).multinomial(1, generator=g)[:, 0]
    whole = Predictions.of(Categorical(), outputs, labels)
    known, test = whole.rows(slice(100)), whole.rows(slice(100, None))
    fitted, right = calibrated(known), labels[100:]
    numbers = numbers_of([test], calibration=fitted)
    logits = outputs.double().softmax(-1).mean(0).log()[None]
    probs, rows = fitted.calibrator(logits[:, 100:]), torch.tensor([3, 5, 5, 8])
    assert fitted.calibrator.value > 1.5
    assert numbers(rows)["nll_t"] == pytest.approx(float(M.nll(probs[rows], right[rows])))
    for name, value in (
        ("nll_t", M.nll(probs, right)),
        ("held90", M.set_coverage(fitted.rule(probs), right)),
        ("aurc", M.aurc(test.probs, right)),
    ):
        assert numbers()[name] == pytest.approx(float(value))
    assert numbers()["held90"] > 0.8


def test_numbers_after_calibration():
    g = torch.Generator().manual_seed(0)
    outputs = torch.randn(1, 400, 1, generator=g).expand(3, -1, -1)
    targets = outputs[0] + 2 * torch.randn(400, 1, generator=g)
    likelihood = Gaussian("fixed", 0.5)
    whole = mixture(likelihood, outputs, targets)
    known, test = whole.rows(slice(200)), whole.rows(slice(200, None))
    numbers = numbers_of([test], calibration=calibrated(known))()
    assert numbers["held90"] == pytest.approx(0.9, abs=0.07)
    assert numbers["interval90"] == pytest.approx(2 * 1.645 * 2, rel=0.2)
