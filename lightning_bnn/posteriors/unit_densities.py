r"""Log-densities of units under the Gaussians of each other, by products of matrices.

.. math:: \log A_{ij} = -\frac{1}{2} \sum_c \frac{(\omega_{ic} - \mu_{jc})^2}{\sigma_{jc}^2}
    - \sum_c \rho_{jc}

With :math:`\Gamma` the gradient by :math:`\log A`, and P the precisions, the gradients are four
products, :math:`\Gamma P`, :math:`\Gamma (\mu P)`, :math:`\Gamma^T \omega` and
:math:`\Gamma^T \omega^2`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Rows", "Squares", "log_ratios_of", "squares_of"]

_SINGLE = 1e5
"""Squares up to here can be summed in float32: their rounding is below 0.01."""


class Rows(NamedTuple):
    """Weights of units, means and logarithms of deviations, ``(networks, units, weights)``."""

    weights: Tensor
    mean: Tensor
    log_std: Tensor

    def double(self) -> Rows:
        """The same numbers in float64, with gradients."""
        return Rows(*(t.double() for t in self))


class Squares(NamedTuple):
    r"""The parts of :math:`\sum_c (w_{ic} - \mu_{jc})^2 / \sigma_{jc}^2`, and what makes them.

    Attributes:
        of_weights: of the first terms, ``(networks, units, units)``.
        without_means: with the mixed terms, too.
        of_means: of the last terms, ``(networks, 1, units)``.
        weights: without the mean of all units, ``(networks, units, weights)``.
        mean: without it, too.
        precision: the inverse variances.
    """

    of_weights: Tensor
    without_means: Tensor
    of_means: Tensor
    weights: Tensor
    mean: Tensor
    precision: Tensor

    def at(self, units: Tensor) -> Squares:
        """Those of some of the units."""
        of_weights, without_means = (t[:, units][..., units] for t in self[:2])
        weights, mean, precision = (t[:, units] for t in self[3:])
        return Squares(
            of_weights, without_means, self.of_means[..., units], weights, mean, precision
        )

    @property
    def are_exact(self) -> bool:
        """Whether the rounding of float32 does not matter, or they are not in float32."""
        peak = self.of_weights.amax() + self.of_means.amax()
        return self.of_weights.dtype == torch.float64 or bool(peak <= _SINGLE)


@torch.no_grad()
def squares_of(rows: Rows) -> Squares:
    """Squared distances of all units from all means.

    Args:
        rows: of the units.
    """
    w, mu, rho = rows
    centre = mu.mean(1, keepdim=True)
    w, mu, precision = w - centre, mu - centre, (-2 * rho).exp_()
    scaled = mu * precision
    of_weights = w.square() @ precision.mT
    without_means = torch.baddbmm(of_weights, w, scaled.mT, alpha=-2)
    of_means = scaled.mul_(mu).sum(2)[:, None]
    return Squares(of_weights, without_means, of_means, w, mu, precision)


def log_ratios_of(rows: Rows, squares: Squares | None = None) -> Tensor:
    r"""Logarithms of :math:`A_{ij} / A_{ii}`, ``(networks, units, units)``, with gradients.

    In float64 where the rounding of float32 would matter.

    Args:
        rows: of the units.
        squares: their squared distances, if they are known.
    """
    squares = squares_of(rows) if squares is None else squares
    if not squares.are_exact:
        rows = rows.double()
        squares = squares_of(rows)
    return _LogRatios.apply(*rows, squares)


class _LogRatios(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, mu: Tensor, rho: Tensor, squares: Squares) -> Tensor:
        ctx.save_for_backward(squares.weights, squares.mean, squares.precision)
        logs = (squares.without_means + (squares.of_means + 2 * rho.sum(2)[:, None])).mul_(-0.5)
        return logs.sub_(logs.diagonal(dim1=1, dim2=2)[..., None].clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, mu, precision = ctx.saved_tensors
        grad = grad.clone()
        grad.diagonal(dim1=1, dim2=2).sub_(grad.sum(2))
        of_units = grad.sum(1)[..., None]
        of_weights = (grad @ precision).mul_(w).baddbmm_(grad, mu * precision, beta=-1)
        first, second = grad.mT @ w, grad.mT @ w.square()
        second.addcmul_(mu, first, value=-2).addcmul_(mu.square(), of_units)
        of_log_std = torch.addcmul(-of_units, second, precision)
        of_mean = first.addcmul_(mu, of_units, value=-1).mul_(precision)
        return of_weights, of_mean, of_log_std, None
