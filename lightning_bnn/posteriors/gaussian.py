"""Independent Gaussians, one for each weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params, RavelSpec, is_weight, ravel, stack_size, unravel
from lightning_bnn.posteriors.base import Posterior, check_count
from lightning_bnn.posteriors.constants import Constants

__all__ = ["DiagonalGaussian"]

_LOG_2PI = math.log(2 * math.pi)


class DiagonalGaussian(Posterior):
    """A Gaussian with a diagonal covariance over the weights of one network.

    Mean and log standard deviation are two flat vectors, so that a stack of samples costs one draw.
    Buffers of the network (BatchNorm statistics) are copied into every sample.

    Args:
        mean: one network.
        std: standard deviations of its weights, or one number for all.
        names: what counts as weights, by default all floating tensors but BatchNorm statistics.

    >>> posterior = DiagonalGaussian({"w": torch.zeros(3)}, std=0.1)
    >>> posterior.sample(5)["w"].shape
    torch.Size([5, 3])
    """

    def __init__(
        self, mean: Params, std: Params | float = 0.1, names: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        chosen = {n for n, t in mean.items() if is_weight(n, t)} if names is None else set(names)
        weights = {name: t for name, t in mean.items() if name in chosen}
        if not weights:
            raise ValueError("`mean` has no weights.")
        vector, self.spec = ravel(weights)
        self.mean = nn.Parameter(vector.detach().clone())
        self.log_std = nn.Parameter(_deviations(std, self.spec, vector).log())
        self.order = tuple(mean)
        self.constants = Constants({n: t for n, t in mean.items() if n not in weights})

    @classmethod
    def fitted(cls, networks: Params) -> DiagonalGaussian:
        """From a stack of networks: their means and standard deviations.

        Buffers are those of the last network.

        Args:
            networks: a stack.
        """
        size = stack_size(networks)
        if size < 2:
            raise ValueError(f"`networks` must hold at least 2 networks, got {size}.")
        weights = {name: t for name, t in networks.items() if is_weight(name, t)}
        least = torch.finfo(next(iter(weights.values())).dtype).tiny
        mean = {name: t.mean(0) if name in weights else t[-1] for name, t in networks.items()}
        return cls(mean, {name: t.std(0).clamp(min=least) for name, t in weights.items()})

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """A stack of n networks; gradients flow to mean and standard deviation."""
        check_count(n)
        noise = torch.randn(
            n,
            len(self.mean),
            generator=generator,
            device=self.mean.device if generator is None else generator.device,
            dtype=self.mean.dtype,
        )
        weights = unravel(self.mean + self.log_std.exp() * noise.to(self.mean.device), self.spec)
        rest = {k: t.expand(n, *t.shape).clone() for k, t in self.constants.tensors().items()}
        every = {**weights, **rest}
        return {name: every[name] for name in self.order}

    def log_prob(self, params: Params) -> Tensor:
        """Log-density of every network of a stack."""
        rows, _ = ravel(params, self.spec.names, stacked=True)
        z = (rows - self.mean) / self.log_std.exp()
        return -(z.square() / 2 + self.log_std + _LOG_2PI / 2).sum(-1)

    def entropy(self) -> Tensor:
        """Differential entropy, in nats."""
        return (self.log_std + (1 + _LOG_2PI) / 2).sum()


def _deviations(std: Params | float, spec: RavelSpec, like: Tensor) -> Tensor:
    if isinstance(std, dict):
        vector = ravel(std, spec.names)[0].detach().to(like)
    else:
        vector = torch.full_like(like, std)
    if not bool((vector > 0).all()):
        raise ValueError("`std` must be positive.")
    return vector
