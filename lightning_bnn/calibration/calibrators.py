"""Calibrators of predictions: temperatures, vectors, factors of deviations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_bnn.metrics.gaussian_mixture import (
    components,
    log_density,
    log_mean_exp,
    mixture_moments,
)
from lightning_bnn.metrics.validation import check_choice, check_finite, check_labels, logits_of
from lightning_bnn.predictions import (
    ClassPredictions,
    GaussianPredictions,
    Predictions,
    kind_of,
)
from weightsym.params import check_positive


def checked_logits(logits: Tensor) -> Tensor:
    """Convert finite logits ``(samples, batch, classes)``, or those of one network, to float64.

    Args:
        logits: of every network.
    """
    logits = logits_of(logits).double()
    logits = logits[None] if logits.ndim == 2 else logits
    if logits.ndim != 3 or not len(logits):
        raise ValueError(
            "`logits` must have shape (samples, batch, classes) or (batch, classes), got "
            f"{tuple(logits.shape)}."
        )
    return logits


def checked_pair(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and labels of calibration examples, of which there is at least one.

    Args:
        logits: of every network.
        labels: class indices.
    """
    logits = checked_logits(logits)
    check_labels(labels, logits[0])
    if not len(labels):
        raise ValueError("`labels` must be those of at least one calibration example, got none.")
    return logits, labels.long()


def pooled(logits: Tensor) -> Tensor:
    r"""The mean prediction of several networks as one network, ``(1, batch, classes)``.

    .. math:: z_c = \log \tfrac1S \textstyle\sum_s softmax(z_s)_c

    Args:
        logits: ``(samples, batch, classes)``, or those of one network.

    >>> pooled(torch.tensor([[[4.0, 0.0]], [[0.0, 4.0]]])).softmax(-1)
    tensor([[[0.5000, 0.5000]]], dtype=torch.float64)
    """
    return _pooled(checked_logits(logits))[None]


def _pooled(logits: Tensor) -> Tensor:
    return log_mean_exp(logits.log_softmax(-1))


_GRID = 41


def least_positive(loss: Callable[[float], float], low: float, high: float) -> tuple[float, bool]:
    """Minimise a function of a positive number, and tell whether the minimum is at a bound.

    A logarithmic grid finds the right valley, and Brent's method its minimum.

    Args:
        loss: of the number.
        low: lower bound.
        high: upper bound.

    >>> value, at_bound = least_positive(lambda x: (x - 3) ** 2, 0.1, 10.0)
    >>> round(value, 6), at_bound
    (3.0, False)
    """
    start, step = math.log(low), (math.log(high) - math.log(low)) / (_GRID - 1)
    values = [loss(math.exp(start + step * k)) for k in range(_GRID)]
    best = min(range(_GRID), key=values.__getitem__)
    valley = (start + step * max(0, best - 1), start + step * min(_GRID - 1, best + 1))
    result = minimize_scalar(
        lambda x: loss(math.exp(x)), bounds=valley, method="bounded", options={"xatol": 1e-9}
    )
    ends = {value: loss(value) for value in (low, high)}
    nearest = min(ends, key=ends.__getitem__)
    if ends[nearest] <= result.fun:
        return nearest, True
    return math.exp(result.x), False


BOUNDS = (0.05, 20.0)
"""Bounds of the search for a temperature."""


@dataclass(frozen=True)
class Temperature:
    r"""Divides the logits of every network and averages, :math:`\frac1S \sum_s softmax(z_s / T)`.

    Attributes:
        value: the temperature :math:`T`; above one it makes predictions less sure.
        at_bound: whether the search ended at one of `BOUNDS`.

    >>> import math
    >>> import torch
    >>> Temperature(2.0)(torch.tensor([[2 * math.log(3), 0.0]])).round(decimals=4)
    tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """

    value: float
    at_bound: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        """Calibrated probabilities ``(batch, classes)`` of ``(samples, batch, classes)``."""
        return _pooled(checked_logits(logits) / self.value).exp()


def fit_temperature(logits: Tensor, labels: Tensor) -> Temperature:
    r"""The temperature of least negative log-likelihood of the averaged prediction.

    .. math:: T = \arg\min_T -\sum_i \log \frac1S \sum_s softmax(z_{si} / T)_{y_i}

    For the temperature of the mean prediction (calibrated after averaging) pass
    ``pooled(logits)``, here and whenever the result is called.

    References:
        | On Calibration of Modern Neural Networks (Guo et al., 2017)
        | https://arxiv.org/abs/1706.04599
        | Uncertainty Quantification and Deep Ensembles (Rahaman and Thiery, 2021)
        | https://arxiv.org/abs/2007.08792

    Args:
        logits: of held-out examples, ``(samples, batch, classes)``, or those of one network.
        labels: their classes ``(batch,)``.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
    >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])).value, 4)  # 2 / log(3)
    1.8205
    """
    logits, labels = checked_pair(logits, labels)

    def loss(temperature: float) -> float:
        return -float(_pooled(logits / temperature).gather(-1, labels[:, None]).mean())

    if bool((logits == logits[..., :1]).all()):
        return Temperature(1.0)  # every temperature does the same
    value, at_bound = least_positive(loss, *BOUNDS)
    if at_bound:
        warn_of_bound("temperature", value, BOUNDS, len(labels))
    return Temperature(value, at_bound)


def warn_of_bound(name: str, value: float, bounds: tuple[float, float], examples: int) -> None:
    """Warn that a search has ended at a bound.

    Args:
        name: of the number.
        value: the bound.
        bounds: both.
        examples: how many it was fitted to.
    """
    low, high = bounds
    right = "right" if value == low else "wrong"
    warnings.warn(
        f"The {name} is at its bound, {value:g} of [{low:g}, {high:g}]: the {examples} calibration "
        f"examples are predicted so {right} that the best one lies beyond; take more of them.",
        UserWarning,
        stacklevel=3,
    )


@dataclass(frozen=True)
class VectorScaling:
    r"""Calibrates the mean prediction, :math:`softmax(w \odot \log \bar p + b)`.

    Attributes:
        scale: :math:`w`, one for each class.
        shift: :math:`b`, one for each class; they sum to zero.

    >>> shift = torch.tensor([0.5, -0.5])
    >>> probs = VectorScaling(torch.ones(2), shift)(torch.zeros(1, 2))
    >>> torch.allclose(probs[0].float(), shift.softmax(0))
    True
    """

    scale: Tensor
    shift: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        """Calibrated probabilities ``(batch, classes)`` of ``(samples, batch, classes)``."""
        (logs,) = pooled(logits)
        if logs.shape[-1] != len(self.scale):
            raise ValueError(
                f"`logits` must be of {len(self.scale)} classes, got {logs.shape[-1]}."
            )
        return (logs * self.scale.to(logs) + self.shift.to(logs)).softmax(-1)


def fit_vector(logits: Tensor, labels: Tensor, penalty: float = 1.0) -> VectorScaling:
    r"""Scales and shifts of least penalised negative log-likelihood, which is convex in them.

    .. math:: -\sum_i \log softmax(w \odot \log \bar p_i + b)_{y_i}
        + \tfrac{\lambda}{2} \left( |w - 1|^2 + |b|^2 \right)

    The penalty, that of standard normal priors around "no change", is what keeps the shift of a
    class finite that never occurs, and the scales if all examples are predicted right.

    References:
        | On Calibration of Modern Neural Networks (Guo et al., 2017)
        | https://arxiv.org/abs/1706.04599

    Args:
        logits: of held-out examples, ``(samples, batch, classes)``, or those of one network.
        labels: their classes ``(batch,)``.
        penalty: :math:`\lambda`.

    >>> logits = torch.zeros(1000, 2)
    >>> calibrator = fit_vector(logits, (torch.arange(1000) % 4) // 3)  # a quarter is of class 1
    >>> calibrator(logits)[0].round(decimals=2)
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    check_positive("penalty", penalty)
    logits, labels = checked_pair(logits, labels)
    (logs,) = pooled(logits)
    classes = logs.shape[-1]

    def loss(vector: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.from_numpy(vector).to(logs).requires_grad_()
        with torch.enable_grad():
            scale, shift = point.view(2, classes)
            fit = cross_entropy(logs * scale + shift, labels, reduction="sum")
            total = fit + penalty / 2 * ((scale - 1).square().sum() + shift.square().sum())
            (gradient,) = torch.autograd.grad(total, point)
        return float(total.detach()), gradient.cpu().numpy()

    start = np.repeat([1.0, 0.0], classes)
    options = {"maxiter": 1000, "ftol": 1e-14, "gtol": 1e-8}
    result = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    scale, shift = torch.from_numpy(result.x).view(2, classes)
    return VectorScaling(scale, shift - shift.mean())


SpreadFit = Literal["mixture", "moments"]
_BOUNDS = (0.01, 100.0)


@dataclass(frozen=True)
class Spread:
    r"""Stretches the predictive mixture around its mean: its standard deviation is multiplied.

    .. math:: \mu'_s = \bar\mu + a (\mu_s - \bar\mu), \quad \sigma'_s = a\, \sigma_s

    Attributes:
        value: the factor; above one it makes predictions less sure.
        at_bound: whether the search ended at its bound, 0.01 or 100.

    >>> means, stds = Spread(2.0)(torch.tensor([[0.0], [2.0]]), torch.ones(2, 1))
    >>> means.flatten().tolist(), stds.flatten().tolist()
    ([-1.0, 3.0], [2.0, 2.0])
    """

    value: float
    at_bound: bool = False

    def __call__(self, means: Tensor, stds: Tensor) -> tuple[Tensor, Tensor]:
        """Calibrated means and standard deviations of all networks, ``(samples, ...)``."""
        means, stds = components(means, stds)
        centre = means.mean(0)
        return torch.lerp(centre, means, self.value), self.value * stds


def fit_spread(means: Tensor, stds: Tensor, targets: Tensor, fit: SpreadFit = "mixture") -> Spread:
    r"""The factor of predictive standard deviations that fits held-out targets best.

    ``"moments"`` has a closed form, :math:`s^2 = \frac1n \sum_i (y_i - \bar\mu_i)^2 / \sigma_i^2`
    with the standard deviation of the whole mixture: the likelihood of one Gaussian of its moments
    is greatest there. ``"mixture"`` seeks the greatest likelihood of the mixture itself.

    References:
        | Evaluating and Calibrating Uncertainty Prediction in Regression Tasks (Levi et al., 2022)
        | https://arxiv.org/abs/1905.11659

    Args:
        means: of every network, ``(samples, batch, targets)`` or ``(samples, batch)``.
        stds: their standard deviations, in the same shape.
        targets: ``(batch, targets)`` or ``(batch,)``.
        fit: which likelihood is greatest.

    >>> ones = torch.ones(1, 4)
    >>> fit_spread(0 * ones, ones, torch.tensor([2.0, -2.0, 2.0, -2.0]), "moments").value
    2.0
    """
    check_choice("fit", fit, get_args(SpreadFit))
    means, stds = components(means, stds)
    check_finite(targets, "targets")
    targets = targets.double()
    if targets.shape != means.shape[1:] or not targets.numel():
        raise ValueError(
            f"`targets` must have shape {tuple(means.shape[1:])} and not be empty, got "
            f"{tuple(targets.shape)}."
        )
    if fit == "moments":
        centre, std = mixture_moments(means, stds)
        z = (targets - centre) / std
        value = float(z.square().mean().sqrt())
        bounded = min(max(value, _BOUNDS[0]), _BOUNDS[1])
        spread = Spread(bounded, bounded != value)
    else:
        spread = Spread(*least_positive(lambda s: _loss(s, means, stds, targets), *_BOUNDS))
    if spread.at_bound:
        warn_of_bound("factor of standard deviations", spread.value, _BOUNDS, len(targets))
    return spread


def joint_log_prob(means: Tensor, stds: Tensor, targets: Tensor) -> Tensor:
    """Log-density of the mixture, one number per example, whose targets are joint.

    Args:
        means: ``(samples, batch, ...)``.
        stds: in the same shape.
        targets: ``(batch, ...)``.
    """
    logs = log_density(means, stds, targets)
    return log_mean_exp(logs.reshape(*logs.shape[:2], -1).sum(-1))


def _loss(value: float, means: Tensor, stds: Tensor, targets: Tensor) -> float:
    return -float(joint_log_prob(*Spread(value)(means, stds), targets).mean())


METHODS: dict[type[Predictions], dict[str, Callable[..., Any]]] = {
    ClassPredictions: {"temperature": fit_temperature, "vector": fit_vector},
    GaussianPredictions: {"spread": fit_spread, "moments": partial(fit_spread, fit="moments")},
}
"""Functions that fit a calibrator, by the kind of predictions and by name."""


def method_of(likelihood: Any, name: str | None = None) -> str:
    """The name of a calibrator that fits a likelihood, by default the first one.

    Args:
        likelihood: ``Categorical``, ``Bernoulli`` or ``Gaussian``.
        name: of the calibrator.

    >>> from lightning_bnn.likelihoods import Categorical, Gaussian
    >>> method_of(Categorical()), method_of(Gaussian()), method_of(Gaussian(), "moments")
    ('temperature', 'spread', 'moments')
    """
    names = tuple(METHODS.get(kind_of(likelihood), ()))
    if not names:
        raise ValueError(
            "`likelihood` must be Categorical, Bernoulli or Gaussian to be calibrated, got "
            f"{type(likelihood).__name__}."
        )
    return names[0] if name is None else check_choice("method", name, names)


def fit(predictions: Predictions, method: str) -> Any:
    """Fit a calibrator to predictions and their targets.

    Args:
        predictions: of held-out examples.
        method: name of the calibrator.
    """
    return METHODS[type(predictions)][method](*predictions.components(), predictions.truth)
