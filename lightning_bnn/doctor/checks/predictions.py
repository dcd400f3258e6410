"""Whether predictions are as sure as they are right, and better than none."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.calibration import Spread, Temperature, fit_spread, fit_temperature
from lightning_bnn.calibration.held_out import split_rows
from lightning_bnn.calibration.logits import class_logits, log_mean_probs
from lightning_bnn.calibration.spread import joint_log_prob
from lightning_bnn.doctor.baselines import constant_log_density
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Finding

__all__ = ["no_better_than_frequencies", "overconfident", "underconfident"]  # verdicts only

_LEAST = 60
"""Held-out examples below which calibration cannot be judged."""
_GAIN = 0.01
"""Nats per example that calibration must gain on examples that it has not seen."""
_SURE = 1.15
"""Temperature from which predictions are too sure; below its inverse they are too unsure."""
_ERRORS = 2.0


def overconfident(e: Evidence) -> Finding | None:
    """Predictions that are surer than right, out of sample."""
    value, gain, error, what = e.once(_calibration)
    if value < _SURE or gain < max(_GAIN, _ERRORS * error):
        return None
    return Finding(
        "overconfident",
        "warning",
        f"Predictions are too sure: {what} of {value:.2f}, fitted to one half of the held-out "
        f"examples, gains {gain:.3f} ± {error:.3f} nats per example on the other half.",
        "What is predicted with 99 % is right less often; decisions by these numbers are too bold.",
        "Calibrate on validation data (`module.calibrate(datamodule)`), take more modes, or train "
        "less long.",
        {"temperature": value, "gain": gain, "error": error},
    )


def underconfident(e: Evidence) -> Finding | None:
    """Predictions that are right more often than they say, out of sample."""
    value, gain, error, what = e.once(_calibration)
    if value > 1 / _SURE or gain < max(_GAIN, _ERRORS * error):
        return None
    return Finding(
        "underconfident",
        "warning",
        f"Predictions are too unsure: {what} of {value:.2f}, fitted to one half of the held-out "
        f"examples, gains {gain:.3f} ± {error:.3f} nats per example on the other half.",
        "What is right is predicted with too little probability: draws are too different, or the "
        "noise is too large.",
        "Check prior, deviations and temperature of the method, or calibrate on validation data "
        "(`module.calibrate(datamodule)`).",
        {"temperature": value, "gain": gain, "error": error},
    )


def no_better_than_frequencies(e: Evidence) -> Finding | None:
    """Predictions that know no more than frequencies of classes, or mean and variance."""
    outputs = e.on_held_out
    assert e.held_out is not None
    known, targets = (e.training or e.held_out).targets, e.held_out.targets
    if len(targets) < 20:
        raise NotPossible(f"there are only {len(targets)} held-out examples")
    classes = max(2, outputs[0].shape[-1]) if e.classes else None
    if not (e.classes or e.numbers):
        raise NotPossible("the likelihood is not known")
    gain = e.log_density(outputs, targets) - constant_log_density(known, targets, classes)
    mean, error = float(gain.mean()), float(gain.std() / math.sqrt(len(gain)))
    better, what = _hits(e, outputs, known, targets)
    if mean > max(0.05, _ERRORS * error) or better > 0.1:
        return None
    return Finding(
        "no_better_than_frequencies",
        "fault",
        f"Held-out log-likelihood is {mean:+.3f} ± {error:.3f} nats per example above an answer "
        f"that ignores the inputs, and {what}.",
        "The posterior has learned nothing from the data: it predicts as the prior does.",
        "Look at the learning rate, the prior, the KL weight and whether inputs and targets belong "
        "to each other.",
        {"gain": mean, "error": error},
    )


def gain_of(e: Evidence, outputs: list[Tensor], targets: Tensor, value: float) -> float:
    """Nats per example that a temperature, or a factor of deviations, gains on some outputs.

    Args:
        e: says what outputs mean.
        outputs: of every mode.
        targets: of the examples.
        value: the temperature or the factor.
    """
    if e.classes:
        logits = _log_probs(e, outputs)
        scaled = Temperature(value)(logits).log() - logits
        return float(scaled.gather(-1, targets.long()[:, None]).mean())
    mixture, y = _mixture(e, outputs), targets.double()
    return float((joint_log_prob(*Spread(value)(*mixture), y) - joint_log_prob(*mixture, y)).mean())


def _hits(e: Evidence, outputs: list[Tensor], known: Tensor, targets: Tensor) -> tuple[float, str]:
    """What part of the examples is right beyond a constant answer, and its words."""
    if e.classes:
        right = float((_log_probs(e, outputs).argmax(-1) == targets).double().mean())
        often = float((targets == known.flatten().long().mode().values).double().mean())
        return right - often, f"{right:.0%} are right (most frequent class: {often:.0%})"
    mean = torch.stack([_moments(e, o)[0] for o in outputs]).mean(0)
    constant = (targets - known.double().mean(0)).square().mean()
    explained = 1 - float((targets - mean).square().mean() / constant)
    return explained, f"{explained:.0%} of the variance is explained"


def _calibration(e: Evidence) -> tuple[float, float, float, str]:
    """A temperature that is fitted to one half of the held-out data and judged on the other.

    Both halves take turns. Returns its value, its gain in nats, the error of that, and its name.
    """
    outputs = e.on_held_out
    assert e.held_out is not None
    targets = e.held_out.targets
    if len(targets) < _LEAST:
        raise NotPossible(f"there are only {len(targets)} held-out examples, {_LEAST} are needed")
    if not all(bool(o.isfinite().all()) for o in outputs):
        raise NotPossible("outputs are not finite")
    if not (e.classes or e.numbers):
        raise NotPossible("the likelihood is not known")
    turn = _class_turn if e.classes else _number_turn
    halves = split_rows(len(targets), 0.5)
    predictions = (_log_probs(e, outputs),) if e.classes else _mixture(e, outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a bound: the value says so itself
        turns = [turn(predictions, targets, *rows) for rows in (halves, halves[::-1])]
    value = math.exp(sum(math.log(v) for v, _ in turns) / len(turns))
    gains = torch.cat([gain for _, gain in turns])
    what = "a temperature" if e.classes else "a factor for standard deviations"
    return value, float(gains.mean()), float(gains.std() / math.sqrt(len(gains))), what


def _class_turn(
    predictions: tuple[Tensor, ...], targets: Tensor, fit: Tensor, judge: Tensor
) -> tuple[float, Tensor]:
    logits, labels = predictions[0], targets.long()
    temperature = fit_temperature(logits[fit], labels[fit])
    scaled, plain = temperature(logits[judge]).log(), logits[judge].log_softmax(-1)
    return temperature.value, (scaled - plain).gather(-1, labels[judge][:, None])[:, 0]


def _number_turn(
    predictions: tuple[Tensor, ...], targets: Tensor, fit: Tensor, judge: Tensor
) -> tuple[float, Tensor]:
    means, stds = predictions
    spread = fit_spread(means[:, fit], stds[:, fit], targets[fit].double(), "moments")
    plain, y = (means[:, judge], stds[:, judge]), targets[judge].double()
    return spread.value, joint_log_prob(*spread(*plain), y) - joint_log_prob(*plain, y)


def _log_probs(e: Evidence, outputs: list[Tensor]) -> Tensor:
    """Logarithms of the mean probabilities of all modes, ``(examples, classes)``."""
    modes = [log_mean_probs(class_logits(e.likelihood, o)) for o in outputs]
    return log_mean_probs(torch.stack(modes))


def _mixture(e: Evidence, outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of all modes together, each ``(1, examples, targets)``."""
    moments = [_moments(e, o) for o in outputs]
    mean = torch.stack([m for m, _ in moments]).mean(0)
    second = torch.stack([v + m.square() for m, v in moments]).mean(0)
    return mean[None], (second - mean.square()).clamp_min(1e-24).sqrt()[None]


def _moments(e: Evidence, outputs: Tensor) -> tuple[Tensor, Tensor]:
    likelihood: Any = e.likelihood
    prediction = likelihood.predictive(outputs)
    return prediction.mean, prediction.variance
