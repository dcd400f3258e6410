"""Checks of predictions: are members alive, different and enough, and as sure as they are right?"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.calibration.calibrated import split_rows
from lightning_bnn.calibration.calibrators import fit
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Finding
from lightning_bnn.evaluation.draws import draw
from lightning_bnn.metrics.gaussian_mixture import log_mean_exp
from lightning_bnn.posteriors import Empirical
from weightsym import params as P
from weightsym.params import batch_norms, refreshed

__all__ = [
    "draws_alike",
    "members_diverged",
    "miscalibrated",
    "modes_too_few",
    "no_better_than_frequencies",
    "statistics_of_other_networks",
]

_SAME = 1e-3
"""Distance of two members over the typical one, from which they are copies."""
_ALIKE = 3e-3
"""Spread of outputs over draws relative to that over examples."""
_STANDING = 0.5
"""Share of intervals in which a chain may not move."""
_TOO_FEW = 0.03
"""Nats per example that many more modes would gain, from which they are too few."""
_LEARNED = 0.1
"""Nats above an answer without a network, from which the best member counts as trained."""
_LEAST = 60
"""Held-out examples below which calibration cannot be measured."""
_GAIN = 0.01
"""Nats per example that calibration must gain on examples that it has not seen."""
_SURE = 1.15
"""Temperature from which predictions are too sure; below its inverse they are too unsure."""
_ERRORS = 2.0
_OWN_STATISTICS = 0.05
"""Nats per example that statistics of their own must gain."""
_NETWORKS = 5


def members_diverged(e: Evidence) -> Finding | None:
    """Members that are not finite, or far worse than an answer without a network."""
    outputs, examples = e.on_held_out, e.held_out_examples()
    finite = [k for k, o in enumerate(outputs) if bool(o.isfinite().all())]
    gains = [float(e.gain([outputs[k]], examples).mean()) for k in finite]
    learned = max(gains, default=0.0)
    lost: list[int] = []
    if learned > _LEARNED and float(torch.tensor(gains).median()) > learned / 2:
        lost = [k for k, gain in zip(finite, gains, strict=True) if gain < learned / 10]
    broken = sorted({*range(len(outputs))} - {*finite})
    count, members = len(broken) + len(lost) + e.left_out, len(outputs) + e.left_out
    if not count:
        return None
    names = ", ".join(str(k) for k in (broken + lost)[:5])
    return Finding(
        "fault",
        f"{count} of {members} members are not finite, were left out, or predict worse than the "
        f"frequencies of the targets{f' (number {names})' if names else ''}.",
        "One broken member spoils every average, and members that were left out make the posterior "
        "smaller than it looks.",
        "Lower their learning rate or clip gradients; `max_loss` leaves slow ones out.",
        {"diverged": count, "members": members},
    )


def draws_alike(e: Evidence) -> Finding | None:
    """Networks that are one: members, draws of a mode, or steps of a chain that does not move."""
    standing, pairs, spread = _standing(e), _pairs_alike(e), _spread(e)
    if not e.chains and len(e.modes) < 2 and math.isinf(spread):
        raise NotPossible("there is only one network")
    if standing >= _STANDING:
        says = f"In {standing:.0%} of the intervals a chain has not moved at all."
        fix = "Take a smaller `step_size` or shorter trajectories, until proposals are accepted."
    elif pairs:
        says = f"{pairs} pairs of members predict the same to {_SAME:g} of the spread of outputs."
        fix = (
            "Give every member a start of its own (another seed; `start_from` of different "
            "networks) and check that they train."
        )
    elif spread < _ALIKE:
        says = (
            f"Outputs of draws of a mode differ by {spread:.1g} of how much outputs differ between "
            "examples."
        )
        fix = (
            "Check deviations, dropout rates, noise and learning rate of the method: one of them "
            "is (nearly) zero."
        )
    else:
        return None
    return Finding(
        "fault",
        says,
        "Copies add nothing: the posterior has fewer networks than it seems, and its uncertainty "
        "is too small.",
        fix,
        {"standing": standing, "pairs": pairs, "spread": spread},
    )


def modes_too_few(e: Evidence) -> Finding | None:
    """A prediction that would still gain from more modes."""
    if e.settings.sampled:
        raise NotPossible("chains must agree, not be many")
    outputs = [o for o in e.on_held_out if bool(o.isfinite().all())]
    if len(outputs) < 2 or e.alone:
        raise NotPossible("one mode cannot tell what others would add")
    each = e.log_densities(outputs, e.held_out_examples().targets)
    modes = torch.arange(len(each))
    without = [float(log_mean_exp(each[modes != k]).mean()) for k in modes]
    # error of a mean of K modes falls as 1/K: from K-1 to K it is 1/(K-1) of what is left at K
    left = (float(log_mean_exp(each).mean()) - sum(without) / len(each)) * (len(each) - 1)
    if left < _TOO_FEW:
        return None
    return Finding(
        "warning",
        f"With {len(each)} modes the log-likelihood of held-out data would gain about {left:.2g} "
        "nats per example from many more.",
        "The modes differ as functions, and the mean over so few of them is not that over all.",
        f"Train more members (`members={2 * len(each)}` or more).",
        {"gain": left, "modes": len(each)},
    )


def miscalibrated(e: Evidence) -> Finding | None:
    """Predictions that are surer than right, or right more often than they say, out of sample."""
    value, gain, error = _calibration(e)
    if 1 / _SURE < value < _SURE or gain < max(_GAIN, _ERRORS * error):
        return None
    sure = value > 1
    correction = "a temperature" if e.classes else "a factor for standard deviations"
    return Finding(
        "warning",
        f"Predictions are too {'sure' if sure else 'unsure'}: {correction} of {value:.2f}, fitted "
        f"to one half of the held-out examples, gains {gain:.3f} ± {error:.3f} nats per example on "
        "the other half.",
        "What is predicted with 99 % is right less often; decisions by these numbers are too bold."
        if sure
        else "What is right is predicted with too little probability: draws are too different, or "
        "the noise is too large.",
        f"Calibrate on validation data{'' if e.alone else ' (`module.calibrate(datamodule)`)'}, "
        + ("train more members, or less long." if sure else "or check prior and temperature."),
        {"temperature": value, "gain": gain, "error": error},
    )


def no_better_than_frequencies(e: Evidence) -> Finding | None:
    """Predictions that know no more than frequencies of classes, or mean and variance."""
    outputs, examples = e.on_held_out, e.held_out_examples()
    if len(examples.targets) < 20:
        raise NotPossible(f"there are only {len(examples.targets)} held-out examples")
    _check_likelihood(e)
    gain = e.gain(outputs, examples)
    mean, error = float(gain.mean()), float(gain.std() / math.sqrt(len(gain)))
    better, words = _hits(e, outputs, (e.training or examples).targets, examples.targets)
    if mean > max(0.05, _ERRORS * error) or better > 0.1:
        return None
    return Finding(
        "fault",
        f"Held-out log-likelihood is {mean:+.3f} ± {error:.3f} nats per example above an answer "
        f"that ignores the inputs, and {words}.",
        "Predictions are sure and wrong."
        if mean < -max(0.05, _ERRORS * error)
        else "Nothing was learned from the data that holds for other data.",
        f"Look at the learning rate, {'' if e.alone else 'the prior, the KL weight '}and whether "
        "inputs and targets belong to each other.",
        {"gain": mean, "error": error},
    )


@torch.no_grad()
def statistics_of_other_networks(e: Evidence) -> Finding | None:
    """Draws that normalise with means and variances of activations that are not theirs."""
    if not batch_norms(e.network):
        raise NotPossible("the network has no layers with statistics")
    training, held_out = e.training_examples(), e.held_out_examples()
    if len(training.targets) < 64:
        raise NotPossible("too few training data were seen")
    if not all(isinstance(mode, Empirical) for mode in e.predictors):
        raise NotPossible("the posterior predicts by draws that are not kept")
    stacks = [draw(mode, _NETWORKS, "doctor", k) for k, mode in enumerate(e.predictors[:_NETWORKS])]
    networks = {n: torch.cat([stack[n] for stack in stacks])[:_NETWORKS] for n in stacks[0]}
    reestimated = refreshed(e.network, networks, [training.inputs])
    before, after = (
        float(e.log_density([outputs.double()], held_out.targets).mean())
        for outputs in (P.apply(e.network, s, *held_out.inputs) for s in (networks, reestimated))
    )
    if after - before < _OWN_STATISTICS:
        return None
    return Finding(
        "fault",
        f"BatchNorm statistics that are computed anew for these weights gain {after - before:.2g} "
        "nats per held-out example.",
        "Means and variances that were averaged over other weights make every prediction wrong.",
        "Estimate the statistics anew for every network that predicts (SWAG and averages of this "
        "package do; for others run training data through the network in training mode).",
        {"gain": after - before},
    )


# ------------------------------------------------------------ copies
def _standing(e: Evidence) -> float:
    """Compute the share of intervals in which chains have not moved, 0 without chains."""
    weights = (t[..., None] for t in e.chains.values() if t.is_floating_point())  # no counters
    moves = (t.diff(dim=1) for t in weights if t.shape[1] > 1)
    same = [(move == 0).flatten(2).all(2) for move in moves]
    return float(torch.stack(same).all(0).double().mean()) if same else 0.0


def _pairs_alike(e: Evidence) -> int:
    """Count the pairs of modes that predict the same."""
    means = torch.stack([o.mean(0) for o in e.on_held_out]).flatten(1)
    distances = torch.cdist(means, means)
    above = distances[tuple(torch.triu_indices(len(means), len(means), 1))]
    scale = (means - means.mean(1, keepdim=True)).norm(dim=1).mean()
    return int((above <= _SAME * scale).sum())


def _spread(e: Evidence) -> float:
    """Compare the deviation over draws of a typical mode with that over examples."""
    several = [o for o in e.on_held_out if len(o) > 1]
    if not several:
        return math.inf
    within = torch.stack([o.var(0, correction=0).mean().sqrt() for o in several])
    between = torch.stack([o.mean(0).var(0, correction=0).mean().sqrt() for o in several])
    return float((within / between.clamp_min(1e-12)).median())


# ------------------------------------------------------------ calibration
def _check_likelihood(e: Evidence) -> None:
    if not (e.classes or e.numbers):
        raise NotPossible("the likelihood is not known")


def _hits(
    e: Evidence, outputs: list[Tensor], training_targets: Tensor, targets: Tensor
) -> tuple[float, str]:
    """Compute the part of the examples that is right beyond a constant answer, and its words."""
    predictions = e.together(outputs, targets)
    if e.classes:
        right = float((predictions.log_probs.argmax(-1) == targets).double().mean())
        often = float((targets == training_targets.flatten().long().mode().values).double().mean())
        return right - often, f"{right:.0%} are right (most frequent class: {often:.0%})"
    constant = (targets - training_targets.double().mean(0)).square().mean()
    explained = 1 - float((targets - predictions.means[..., 0]).square().mean() / constant)
    return explained, f"{explained:.0%} of the variance is explained"


def _calibration(e: Evidence) -> tuple[float, float, float]:
    """A temperature that is fitted to one half of the held-out data and tested on the other.

    Both halves take turns. Returns its value, its gain in nats, and the error of that.
    """
    outputs, targets = e.on_held_out, e.held_out_examples().targets
    if len(targets) < _LEAST:
        raise NotPossible(f"there are only {len(targets)} held-out examples, {_LEAST} are needed")
    if not all(bool(o.isfinite().all()) for o in outputs):
        raise NotPossible("outputs are not finite")
    _check_likelihood(e)
    predictions, halves = e.together(outputs, targets), split_rows(len(targets), 0.5)
    method = "temperature" if e.classes else "moments"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a bound: the value says so itself
        turns = [_turn(predictions, method, *rows) for rows in (halves, halves[::-1])]
    value = math.exp(sum(math.log(v) for v, _ in turns) / len(turns))
    gains = torch.cat([gain for _, gain in turns])
    return value, float(gains.mean()), float(gains.std() / math.sqrt(len(gains)))


def _turn(predictions: Any, method: str, rows: Tensor, test_rows: Tensor) -> tuple[float, Tensor]:
    """The temperature that fits some of the examples, and its gains on the others."""
    calibrator, plain = fit(predictions.rows(rows), method), predictions.rows(test_rows)
    gains = plain.calibrated(calibrator).log_densities() - plain.log_densities()
    return calibrator.value, gains
