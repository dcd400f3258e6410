"""Whether Gaussians over weights are as wide as data and prior make them."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from lightning_bnn import params as P
from lightning_bnn.doctor.baselines import constant_log_density
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Finding
from lightning_bnn.posteriors import DiagonalGaussian, Posterior, Symmetrized
from lightning_bnn.posteriors.gauss_newton import gauss_newton
from lightning_bnn.posteriors.output_curvature import curvature_root

__all__ = [
    "deviations_too_large",
    "deviations_too_small",
    "kl_term_dominates",
    "prior_dominates_weights",
]

_FACTOR = 3.0
"""Ratio of a typical deviation to that of the curvature, from which it is wrong."""
_EXAMPLES = 256
_WORK = 2**31
"""Numbers of gradients that a curvature may take."""
_DOMINATED = 0.9
_NATS = 0.05
"""Information about a weight below which its posterior counts as the prior."""
_EXPLAINED = 0.5


def deviations_too_small(e: Evidence) -> Finding | None:
    """Gaussians far narrower than the curvature of the loss and the prior allow."""
    ratio = float(e.once(_ratios).median())
    if ratio > 1 / _FACTOR:
        return None
    return Finding(
        "deviations_too_small",
        "fault",
        f"Standard deviations of weights are {ratio:.2g} of what the curvature of the loss and "
        "the prior allow (median).",
        "Draws are hardly different from the mean: the posterior is a single network, and its "
        "uncertainty is an illusion.",
        "Start wider (`init_std='auto'`) or train longer with a larger learning rate for the "
        "deviations; check `num_data`, `temperature` and `kl_weight`.",
        {"ratio": ratio},
    )


def deviations_too_large(e: Evidence) -> Finding | None:
    """Gaussians far wider than the curvature of the loss and the prior allow."""
    ratio = float(e.once(_ratios).quantile(0.75))
    if ratio < _FACTOR:
        return None
    return Finding(
        "deviations_too_large",
        "fault",
        f"Standard deviations of a quarter of the weights are more than {ratio:.2g} times what the "
        "curvature of the loss and the prior allow.",
        "Draws are noisier than the posterior, and predictions are washed out.",
        "Train longer, start narrower, and check `num_data` and `kl_weight`.",
        {"ratio": ratio},
    )


def prior_dominates_weights(e: Evidence) -> Finding | None:
    """Weights of which the data say nothing: their posterior is the prior."""
    std = _prior_std(e)
    share = float(torch.cat([_information(g, std) < _NATS for g in _gaussians(e)]).double().mean())
    if share < _DOMINATED:
        return None
    return Finding(
        "prior_dominates_weights",
        "warning",
        f"For {share:.0%} of the weights the posterior is the prior (less than {_NATS} nats "
        "between both).",
        "These weights have learned nothing: the network is larger than the data can use, or the "
        "prior is so strong that it keeps the data out.",
        "If the fit is good, a smaller network does the same; if it is not, widen `prior_std` or "
        "lower `kl_weight` while training begins (`kl_warmup`).",
        {"share": share},
    )


def kl_term_dominates(e: Evidence) -> Finding | None:
    """An objective that is mostly KL, with data that are hardly fitted."""
    settings, examples = e.settings, e.training
    size = settings.num_data or settings.seen
    if examples is None or not size:
        raise NotPossible("the training data or their number are not known")
    std, classes = _prior_std(e), e.on_training[0].shape[-1] if e.classes else None
    kl = sum(float(_information(g, std).sum()) for g in _gaussians(e)) / len(e.modes)
    classes = 2 if classes == 1 else classes
    reached = -float(e.log_density(e.on_training, examples.targets).mean())
    constant = -float(constant_log_density(examples.targets, examples.targets, classes).mean())
    data = max(reached, 0.0) * size
    share = settings.kl_weight * kl / (settings.kl_weight * kl + data + 1e-12)
    gained, gainable = constant - reached, _gainable(e, constant)
    explained = gained / gainable if gainable > 0 else math.nan
    if (
        not (settings.kl_weight > 1 or share > 0.5)
        or explained > _EXPLAINED
        or math.isnan(explained)
    ):
        return None
    return Finding(
        "kl_term_dominates",
        "fault",
        f"The KL term is {share:.0%} of the objective, and only {explained:.0%} of what inputs "
        "could explain of the training targets is explained.",
        "The fit is given up for the prior: the posterior predicts little more than frequencies.",
        "Check `num_data` (it must be the number of training examples) and `kl_weight` (1 is "
        "Bayes); widen the prior, begin with `kl_warmup`, or start with smaller deviations.",
        {"share": share, "explained": explained, "kl": kl},
    )


def _gainable(e: Evidence, constant: float) -> float:
    """How far the loss of constant answers could fall: to zero for classes, one nat for numbers."""
    return constant if e.classes else 1.0


def _gaussians(e: Evidence) -> list[DiagonalGaussian]:
    found = [g for mode in e.modes if (g := _gaussian(mode)) is not None]
    if not found:
        raise NotPossible("the posterior is no Gaussian with a deviation for every weight")
    return found


def _gaussian(mode: Posterior) -> DiagonalGaussian | None:
    mode = mode.base if isinstance(mode, Symmetrized) else mode
    return mode if isinstance(mode, DiagonalGaussian) else None


def _prior_std(e: Evidence) -> float:
    if e.settings.prior_std is None:
        raise NotPossible("the prior is not known to be a Gaussian")
    return e.settings.prior_std


@torch.no_grad()
def _information(gaussian: DiagonalGaussian, prior_std: float) -> Tensor:
    r"""KL divergence of every weight from the prior, in nats."""
    log_ratio = gaussian.log_std.double() - math.log(prior_std)
    mean = gaussian.mean.double() / prior_std
    return ((2 * log_ratio).exp() + mean.square() - 1) / 2 - log_ratio


def _ratios(e: Evidence) -> Tensor:
    """Deviations over those that are allowed, of the weights that are held by the data."""
    gaussian, std = _gaussians(e)[0], _prior_std(e)
    allowed = _allowed(e, gaussian, std)
    learned = allowed < 0.7 * std
    if int(learned.sum()) < 10:
        raise NotPossible("no weight is held by the data")
    return (gaussian.log_std.detach().double().exp() / allowed)[learned]


def _allowed(e: Evidence, gaussian: DiagonalGaussian, prior_std: float) -> Tensor:
    """Deviations that mean curvature over draws of the Gaussian, and the prior, allow."""
    if e.training is None or not e.settings.seen:
        raise NotPossible("the training data are not known")
    try:
        root = curvature_root(e.likelihood)
    except ValueError as error:
        raise NotPossible(str(error)) from None
    rows = _affordable(e, gaussian)
    inputs = tuple(x[:rows] if isinstance(x, Tensor) else x for x in e.training.inputs)
    model = copy.deepcopy(e.network).eval()
    names = [n for n, p in model.named_parameters() if n in gaussian.spec.names]
    if names != list(gaussian.spec.names):
        raise NotPossible("the weights of the Gaussian are not those of the network")
    curvature = torch.zeros_like(gaussian.mean, dtype=torch.float64)
    networks = gaussian.sample(_DRAWN, torch.Generator(gaussian.mean.device).manual_seed(0))
    for network in P.unstack({n: t.detach() for n, t in networks.items()}):
        model.load_state_dict(network, strict=False)
        batch = (inputs, e.training.targets[:rows])
        try:
            curvature += gauss_newton(model, names, [batch], root, diagonal=True).double()
        except (ValueError, RuntimeError) as error:
            raise NotPossible(f"the curvature cannot be computed: {error}") from None
    precision = curvature * e.settings.seen / (rows * _DRAWN) + prior_std**-2
    return precision.rsqrt()


_DRAWN = 2
"""Draws over which a curvature is averaged."""


def _affordable(e: Evidence, gaussian: DiagonalGaussian) -> int:
    assert e.training is not None
    outputs = max(1, e.on_training[0].shape[-1])
    affordable = _WORK // (gaussian.mean.numel() * outputs * _DRAWN)
    rows = min(_EXAMPLES, len(e.training.targets), affordable)
    if rows < 8:
        raise NotPossible("the network is too large for a curvature at every weight")
    return rows
