"""Vector scaling: a scale and a shift for the logarithm of every class's probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_bnn.arguments import check_positive
from lightning_bnn.calibration.logits import checked_pair, pooled

__all__ = ["VectorScaling", "fit_vector"]


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
        given = torch.from_numpy(vector).to(logs).requires_grad_()
        with torch.enable_grad():
            scale, shift = given.view(2, classes)
            fit = cross_entropy(logs * scale + shift, labels, reduction="sum")
            total = fit + penalty / 2 * ((scale - 1).square().sum() + shift.square().sum())
            (gradient,) = torch.autograd.grad(total, given)
        return float(total.detach()), gradient.cpu().numpy()

    start = np.repeat([1.0, 0.0], classes)
    options = {"maxiter": 1000, "ftol": 1e-14, "gtol": 1e-8}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    scale, shift = torch.from_numpy(found.x).view(2, classes)
    return VectorScaling(scale, shift - shift.mean())
