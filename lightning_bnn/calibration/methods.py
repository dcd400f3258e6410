"""The calibrators by name, and what each reads from the outputs of networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.calibration.isotonic import fit_isotonic
from lightning_bnn.calibration.logits import class_logits, pooled
from lightning_bnn.calibration.spread import fit_spread
from lightning_bnn.calibration.temperature import fit_temperature
from lightning_bnn.calibration.vector import fit_vector
from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.metrics.validation import check_choice

__all__ = ["CLASS_METHODS", "GAUSSIAN_METHODS", "Predictions", "method_of", "read"]

Predictions = tuple[Tensor, ...]
"""Logits of classes, or means and standard deviations; examples are the second dimension."""
CLASS_METHODS: dict[str, Callable[..., Any]] = {
    "temperature": fit_temperature,
    "network_temperature": fit_temperature,
    "vector": fit_vector,
    "isotonic": fit_isotonic,
}
"""Of predictions of classes; all but `network_temperature` calibrate the mean prediction."""
GAUSSIAN_METHODS: dict[str, Callable[..., Any]] = {
    "spread": fit_spread,
    "moments": lambda means, stds, targets: fit_spread(means, stds, targets, "moments"),
}
"""Of predictions of numbers: the standard deviation is multiplied."""


def method_of(likelihood: nn.Module, name: str | None = None) -> str:
    """The name of a calibrator that fits a likelihood, by default the first one.

    Args:
        likelihood: ``Categorical``, ``Bernoulli`` or ``Gaussian``.
        name: of the calibrator.

    >>> method_of(Categorical()), method_of(Gaussian()), method_of(Gaussian(), "moments")
    ('temperature', 'spread', 'moments')
    """
    if isinstance(likelihood, (Categorical, Bernoulli)):
        names = tuple(CLASS_METHODS)
    elif isinstance(likelihood, Gaussian):
        names = tuple(GAUSSIAN_METHODS)
    else:
        raise ValueError(
            "`likelihood` must be Categorical, Bernoulli or Gaussian to be calibrated, got "
            f"{type(likelihood).__name__}."
        )
    return names[0] if name is None else check_choice("method", name, names)


@torch.no_grad()
def read(likelihood: Any, method: str, outputs: Tensor) -> Predictions:
    """What a calibrator takes, from the outputs of all networks on a batch.

    Args:
        likelihood: says what outputs mean.
        method: name of the calibrator.
        outputs: ``(samples, batch, ...)``.

    >>> outputs = torch.zeros(5, 8, 3)  # of five networks
    >>> [part.shape for part in read(Categorical(), "temperature", outputs)]  # their mean
    [torch.Size([1, 8, 3])]
    >>> [part.shape for part in read(Gaussian(), "spread", outputs)]  # means and deviations
    [torch.Size([5, 8, 3]), torch.Size([5, 8, 3])]
    """
    if method in GAUSSIAN_METHODS:
        means, stds = likelihood.moments(outputs.double())
        return means, stds.contiguous()
    logits = class_logits(likelihood, outputs)
    return (logits if method == "network_temperature" else pooled(logits),)
