"""Checks of Gaussians over weights: are they as wide as data and prior make them?"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from lightning_bnn.doctor.evidence import Evidence, NotPossible, constant_log_density
from lightning_bnn.doctor.findings import Finding
from lightning_bnn.posteriors import DiagonalGaussian, Posterior, Symmetrized
from lightning_bnn.posteriors.gauss_newton import gauss_newton
from weightsym import params as P

__all__ = ["prior_dominates", "wrong_deviations"]

_FACTOR = 3.0
"""Ratio of a typical deviation to that of the curvature, from which it is wrong."""
_EXAMPLES = 256
_WORK = 2**31
"""Largest size of the gradients for a curvature."""
_DRAWN = 2
"""Draws over which a curvature is averaged."""
_DOMINATED = 0.9
_NATS = 0.05
"""Information about a weight below which its posterior counts as the prior."""
_EXPLAINED = 0.5


def wrong_deviations(e: Evidence) -> Finding | None:
    """Gaussians far narrower or wider than the curvature of the loss and the prior allow."""
    ratios = _ratios(e)
    median, quartile = float(ratios.median()), float(ratios.quantile(0.75))
    if median <= 1 / _FACTOR:
        says = f"Standard deviations of weights are {median:.2g} of what"
        end = "allow (median)."
        why = "Draws are hardly different from the mean: the uncertainty is an illusion."
    elif quartile >= _FACTOR:
        says = f"Standard deviations of a quarter of the weights are over {quartile:.2g} times what"
        end = "allow."
        why = "Draws are noisier than the posterior, and predictions are washed out."
    else:
        return None
    return Finding(
        "fault",
        f"{says} the curvature of the loss and the prior {end}",
        why,
        "Train longer or with a larger learning rate for the deviations, start elsewhere "
        "(`init_std`), and check `num_data`, `temperature` and `kl_weight`.",
        {"median": median, "quartile": quartile},
    )


def prior_dominates(e: Evidence) -> Finding | None:
    """A KL term that outweighs data that are hardly fitted, or weights as in the prior."""
    std, gaussians = _prior_std(e), _gaussians(e)
    information = [_information(gaussian, std) for gaussian in gaussians]
    share, explained = _of_the_objective(e, sum(float(i.sum()) for i in information))
    if (e.settings.kl_weight > 1 or share > 0.5) and explained <= _EXPLAINED:
        return Finding(
            "fault",
            f"The KL term is {share:.0%} of the objective, and only {explained:.0%} of what inputs "
            "could explain of the training targets is explained.",
            "The fit is given up for the prior: the posterior predicts little more than "
            "frequencies.",
            "Check `num_data` (it must be the number of training examples) and `kl_weight` (1 is "
            "Bayes); widen the prior, begin with `kl_warmup`, or start with smaller deviations.",
            {"share": share, "explained": explained},
        )
    idle = float((torch.cat(information) < _NATS).double().mean())
    if idle < _DOMINATED:
        return None
    return Finding(
        "warning",
        f"For {idle:.0%} of the weights the posterior is the prior (less than {_NATS} nats between "
        "both).",
        "These weights have learned nothing: the network is larger than the data can use, or the "
        "prior is so strong that it keeps the data out.",
        "If the fit is good, a smaller network does the same; if it is not, widen `prior_std` or "
        "lower `kl_weight` while training begins (`kl_warmup`).",
        {"share": idle},
    )


def _of_the_objective(e: Evidence, information: float) -> tuple[float, float]:
    """Compute the shares of the KL term, and of what inputs could explain, where that is known."""
    settings, examples = e.settings, e.training
    size = settings.num_data or settings.seen
    if examples is None or not size:
        return math.nan, math.nan
    reached = -float(e.log_density(e.on_training, examples.targets).mean())
    targets = examples.targets
    constant = -float(constant_log_density(targets, targets, e.class_count).mean())
    kl = settings.kl_weight * information / len(e.modes)
    share = kl / (kl + max(reached, 0.0) * size + 1e-12)
    gainable = constant if e.classes else 1.0  # to zero for classes, one nat for numbers
    return share, (constant - reached) / gainable if gainable > 0 else math.nan


def _gaussians(e: Evidence) -> list[DiagonalGaussian]:
    gaussians = [g for mode in e.modes if (g := _gaussian(mode)) is not None]
    if not gaussians:
        raise NotPossible("the posterior is not a Gaussian with a deviation for every weight")
    return gaussians


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
    examples = e.training_examples()
    if not e.settings.seen:
        raise NotPossible("the number of training examples is not known")
    rows = _affordable(e, gaussian)
    inputs = tuple(x[:rows] if isinstance(x, Tensor) else x for x in examples.inputs)
    batch = (inputs, examples.targets[:rows])
    model = copy.deepcopy(e.network).eval()
    names = [n for n, p in model.named_parameters() if n in gaussian.spec.names]
    if names != list(gaussian.spec.names):
        raise NotPossible("the weights of the Gaussian are not those of the network")
    curvature = torch.zeros_like(gaussian.mean, dtype=torch.float64)
    networks = gaussian.sample(_DRAWN, torch.Generator(gaussian.mean.device).manual_seed(0))
    try:
        for network in P.unstack({n: t.detach() for n, t in networks.items()}):
            model.load_state_dict(network, strict=False)
            curvature += gauss_newton(model, names, [batch], e.likelihood, diagonal=True).double()
    except (ValueError, RuntimeError) as error:
        raise NotPossible(f"the curvature cannot be computed: {error}") from None
    precision = curvature * e.settings.seen / (rows * _DRAWN) + prior_std**-2
    return precision.rsqrt()


def _affordable(e: Evidence, gaussian: DiagonalGaussian) -> int:
    outputs = max(1, e.on_training[0].shape[-1])
    affordable = _WORK // (gaussian.mean.numel() * outputs * _DRAWN)
    rows = min(_EXAMPLES, len(e.training_examples().targets), affordable)
    if rows < 8:
        raise NotPossible("the network is too large for a curvature at every weight")
    return rows
