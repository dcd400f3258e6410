r"""Weights drawn from a diagonal Gaussian, with gradients, in few passes over memory.

.. math:: \omega = \mu + e^{\rho} \epsilon, \quad
    -E_q \log p = \frac{\|\mu\|^2 + \|\sigma\|^2}{2 \sigma_p^2}
    + D \log(\sigma_p \sqrt{2 \pi}), \quad H(q) = \sum_i \rho_i + \frac{D}{2} (1 + \log 2 \pi)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.params import Params, RavelSpec
from lightning_bnn.stacks.process import keep_freed_memory

__all__ = ["Draw", "Scratch", "draw"]

_LOG_2PI = math.log(2 * math.pi)


class Draw(NamedTuple):
    """Sampled weights, and what describes their distribution, summed over weights.

    Attributes:
        weights: a stack of ``samples * members`` networks, the first sample of all members first.
        cross_entropy: with an isotropic Gaussian prior, ``(members,)``.
        entropy: of the distribution, ``(members,)``.
        noise: the standard normal numbers, ``(samples, members, weights)``.
    """

    weights: Params
    cross_entropy: Tensor
    entropy: Tensor
    noise: Tensor


class Scratch:
    """Memory that successive draws share: fresh pages cost more than the arithmetic.

    Only the last draw can be differentiated.
    """

    def __init__(self) -> None:
        self.count = 0
        self._held: tuple[Tensor, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Copies start with memory of their own."""
        return {"count": 0, "_held": ()}

    def tensors(self, mean: Tensor, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """Standard deviations, noise and weights, to be filled."""
        self.count += 1
        shape = (samples, *mean.shape)
        if not self._fits(shape, mean):
            like = mean.detach()
            if mean.device.type == "cpu":
                keep_freed_memory()
            self._held = (like.new_empty(mean.shape), like.new_empty(shape), like.new_empty(shape))
        std, noise, weights = self._held
        return std, noise, weights

    def _fits(self, shape: tuple[int, ...], mean: Tensor) -> bool:
        if not self._held:
            return False
        noise = self._held[1]
        if noise.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return (noise.shape, noise.dtype, noise.device) == (shape, mean.dtype, mean.device)


def draw(
    mean: Tensor,
    log_std: Tensor,
    spec: RavelSpec,
    prior_std: float,
    scratch: Scratch,
    samples: int = 1,
) -> Draw:
    """Weights of every member, several times, from the global random state.

    Args:
        mean: ``(members, weights)``.
        log_std: logarithms of the standard deviations.
        spec: how a row is cut into tensors.
        prior_std: of every weight under the prior.
        scratch: memory for the draw.
        samples: how many networks for each member.
    """
    noise = scratch.tensors(mean, samples)[1].normal_()
    cross, entropy, *parts = _Draw.apply(mean, log_std, spec, prior_std, scratch)
    return Draw(dict(zip(spec.names, parts, strict=True)), cross, entropy, noise)


class _Draw(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_std: Tensor, spec: RavelSpec, prior_std: float, scratch: Scratch
    ) -> tuple[Tensor, ...]:
        std, noise, weights = scratch._held
        torch.exp(log_std, out=std)
        torch.addcmul(mean, std, noise, out=weights)
        ctx.mean, ctx.scratch, ctx.count = mean, scratch, scratch.count
        ctx.precision = prior_std**-2
        size = mean.shape[1]
        squares = _squares(mean) + _squares(std)
        cross = squares * (ctx.precision / 2) + size * (math.log(prior_std) + _LOG_2PI / 2)
        entropy = log_std.sum(1) + size * (1 + _LOG_2PI) / 2
        rows = weights.view(-1, size)
        pieces = rows.split([s.numel() for s in spec.shapes], 1)
        tensors = [
            p.reshape(len(rows), *s) if len(rows) > 1 else p.view(1, *s)
            for p, s in zip(pieces, spec.shapes, strict=True)
        ]
        return cross, entropy, *tensors

    @staticmethod
    def backward(ctx: Any, of_cross: Tensor, of_entropy: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.count != ctx.scratch.count:
            raise RuntimeError("Weights were drawn again before the gradient of the first draw.")
        std, noise, _ = ctx.scratch._held
        joined = torch.cat([g.reshape(len(g), -1) for g in grads], 1).view_as(noise)
        weight = of_cross[:, None] * ctx.precision
        if len(noise) == 1:
            of_mean = joined[0]
            of_log_std = torch.mul(of_mean, noise[0])
        else:
            of_log_std = torch.einsum("smd,smd->md", joined, noise)
            of_mean = joined.sum(0)
        of_log_std = torch.addcmul(of_entropy[:, None], of_log_std.addcmul_(std, weight), std)
        of_mean.addcmul_(ctx.mean, weight)
        return of_mean, of_log_std, None, None, None


def _squares(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1).square()
