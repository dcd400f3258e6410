r"""What a likelihood adds to a curvature: that of the negative log-density at the outputs.

.. math:: \Lambda(f) = E_{y \sim p(y | f)}\big[\nabla_f \log p(y | f) \nabla_f \log p(y | f)^T\big]

This is the Hessian of the cross-entropy and of the squared error, whatever the targets are. Where
the Hessian depends on them and may be indefinite, as that of a Gaussian whose noise is an output,
it is the expected one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian

__all__ = ["Root", "curvature_root", "noise_factor"]

Root = Callable[[Tensor], Tensor]
r"""From outputs ``(batch, k)`` to matrices ``(batch, k, r)`` with :math:`R R^T = \Lambda`."""


def curvature_root(likelihood: nn.Module) -> Root:
    """A root of the curvature at the outputs.

    Args:
        likelihood: ``Categorical``, ``Bernoulli`` or ``Gaussian``.
    """
    if isinstance(likelihood, Categorical):
        return _of_logits
    if isinstance(likelihood, Bernoulli):
        return lambda outputs: torch.diag_embed((outputs.sigmoid() * (-outputs).sigmoid()).sqrt())
    if isinstance(likelihood, Gaussian):
        return lambda outputs: torch.diag_embed(_of_moments(likelihood, outputs))
    raise ValueError(
        "`likelihood` must be Categorical, Bernoulli or Gaussian, whose curvatures are known, got "
        f"{type(likelihood).__name__}."
    )


def _of_logits(outputs: Tensor) -> Tensor:
    """R with R R^T = diag(p) - p p^T, the curvature of the cross-entropy at the logits."""
    p = outputs.softmax(-1)
    return torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]


def _of_moments(likelihood: Gaussian, outputs: Tensor) -> Tensor:
    """Roots of 1 / std^2 at a mean, and of 2 (dstd / draw)^2 / std^2 at a raw scale."""
    std = likelihood.moments(outputs)[1]
    if likelihood.noise != "heteroscedastic":
        return 1 / std
    slope = outputs.chunk(2, -1)[1].sigmoid()
    return torch.cat([1 / std, 2**0.5 * slope / std], -1)


def noise_factor(likelihood: nn.Module) -> float:
    """What the curvature of half the squared error, or of the cross-entropy, is multiplied by.

    Args:
        likelihood: one that laplace-torch knows, as it does for Kronecker factors.
    """
    if isinstance(likelihood, Categorical):
        return 1.0
    if isinstance(likelihood, Gaussian) and likelihood.noise != "heteroscedastic":
        stds = likelihood.log_std.detach().exp()
        if len(stds) == 1:
            return float(stds[0]) ** -2
    got = f"{type(likelihood).__name__}({likelihood.extra_repr()})"
    raise ValueError(
        "`likelihood` must be Categorical, or Gaussian with one standard deviation of noise for "
        f"all targets, for Kronecker factors and for networks that vmap cannot run, got {got}: "
        "take `structure='diag'` or 'full'."
    )
