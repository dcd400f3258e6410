"""Gaussians over weights, independent ones and those with a low-rank covariance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors.base import (
    Posterior,
    check_count,
    joined,
    standard_normal,
    with_constants,
)
from weightsym.params import (
    Params,
    RavelSpec,
    at_least_single,
    check_not_negative,
    check_positive,
    is_weight,
    ravel,
    stack_size,
    unravel,
    varying_weights,
)

__all__ = ["DiagonalGaussian", "LowRankGaussian"]

_LOG_2PI = math.log(2 * math.pi)


class DiagonalGaussian(Posterior):
    r"""A Gaussian with a diagonal covariance over the weights of one network.

    .. math:: w \sim N\big(\mu,\; \mathrm{diag}(\sigma^2)\big)

    Mean and log standard deviation are two flat vectors, so that a stack of samples costs one draw.
    Buffers of the network (BatchNorm statistics) are copied into every sample.

    Args:
        mean: one network.
        std: standard deviations of its weights, or one number for all.
        names: names of the weights, by default all floating tensors but BatchNorm statistics.

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
        self.constants = NamedTensors({n: t for n, t in mean.items() if n not in weights})

    @classmethod
    def fit(cls, networks: Params) -> DiagonalGaussian:
        """Fit the means and standard deviations of a stack of networks.

        The mean of networks that are permutations of each other is useless. Bring them into one
        frame first, by `weightsym.align` or `match`, for a compact representation of the whole
        stack. Buffers, and tensors that are equal in all networks, are those of the last one.

        Args:
            networks: a stack.

        References:
            | A Compact Representation for Bayesian Neural Networks (Xiao, Liu, Bamler, 2023)
            | https://arxiv.org/abs/2401.00611

        >>> rows = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
        >>> DiagonalGaussian.fit({"w": rows}).centre["w"]
        tensor([1., 1.])
        """
        mean, std = _moments(networks, 1)
        least = torch.finfo(next(iter(std.values())).dtype).tiny
        return cls(mean, {name: t.clamp(min=least) for name, t in std.items()}, list(std))

    def extra_repr(self) -> str:
        """Return the description that ``print`` shows in parentheses."""
        return f"{len(self.mean)} weights"

    # -------------------------------------------------------- as networks
    @property
    def centre(self) -> Params:
        """The means, as a network."""
        every = {**unravel(self.mean.detach(), self.spec), **self.constants.tensors()}
        return {name: every[name] for name in self.order}

    @property
    def deviations(self) -> Params:
        """The standard deviations, by the names of the weights."""
        return unravel(self.log_std.detach().exp(), self.spec)

    def prune(self, fraction: float) -> Params:
        """Return the means, with the least certain ones set to zero.

        Args:
            fraction: of the weights, by falling standard deviation.

        >>> q = DiagonalGaussian({"w": torch.ones(4)}, {"w": torch.tensor([1.0, 3.0, 2.0, 4.0])})
        >>> q.prune(0.5)["w"]
        tensor([1., 0., 1., 0.])
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"`fraction` must be between 0 and 1, got {fraction}.")
        gone = round(fraction * len(self.mean))
        mask = torch.ones_like(self.mean)
        mask[self.log_std.detach().argsort(descending=True, stable=True)[:gone]] = 0
        return {**self.centre, **unravel(self.mean.detach() * mask, self.spec)}

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n networks. Gradients flow to mean and standard deviation."""
        check_count(n)
        noise = standard_normal((n, len(self.mean)), self.mean, generator)
        weights = unravel(self.mean + self.log_std.exp() * noise, self.spec)
        return with_constants(weights, self.constants.tensors(), self.order)

    def log_prob(self, params: Params) -> Tensor:
        """Return the log-density of every network of a stack."""
        rows = joined(params, self.spec, "params", stacked=True)
        rows, mean, log_std = map(at_least_single, (rows, self.mean, self.log_std))
        z = (rows - mean) / log_std.exp()
        return -(z.square() / 2 + log_std + _LOG_2PI / 2).sum(-1)

    def entropy(self) -> Tensor:
        """Return the differential entropy of the Gaussian, in nats."""
        return (at_least_single(self.log_std) + (1 + _LOG_2PI) / 2).sum()


def _deviations(std: Params | float, spec: RavelSpec, like: Tensor) -> Tensor:
    if isinstance(std, dict):
        vector = joined(std, spec, "std").detach().to(like)
    else:
        check_positive("std", std)
        vector = torch.full_like(like, std)
    if not bool((vector > 0).all() & vector.isfinite().all()):
        raise ValueError("`std` must be positive and finite.")
    return vector


class LowRankGaussian(Posterior):
    r"""A Gaussian whose covariance is half diagonal, and half that of the last networks of a run.

    .. math:: w = \mu + \sqrt{s} \Big(\tfrac{1}{\sqrt 2} \sigma \odot z_1
        + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2\Big)

    One draw of the K low-rank numbers moves all tensors, and so preserves correlations between
    layers. K is the number of deviations.

    Args:
        mean: one network.
        std: standard deviations of its weights.
        deviations: a stack of K networks minus the mean.
        scale: factor of the covariance.
        names: names of the weights, by default all floating tensors but BatchNorm statistics.

    References:
        | A Simple Baseline for Bayesian Uncertainty in Deep Learning (Maddox et al., 2019)
        | https://arxiv.org/abs/1902.02476

    >>> deviations = {"w": torch.tensor([[1.0, 2.0], [-1.0, -2.0]])}
    >>> posterior = LowRankGaussian({"w": torch.zeros(2)}, {"w": torch.zeros(2)}, deviations)
    >>> draws = posterior.sample(20_000, torch.Generator().manual_seed(0))["w"]
    >>> torch.allclose(draws[:, 1], 2 * draws[:, 0], atol=1e-5)  # both weights move together
    True
    >>> draws.std(0).round(decimals=1)
    tensor([1., 2.])
    """

    mean: Tensor
    std: Tensor
    deviations: Tensor

    def __init__(
        self,
        mean: Params,
        std: Params,
        deviations: Params,
        scale: float = 1.0,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_not_negative("scale", scale)
        vector, self.spec = ravel(mean, names)
        weights = self.spec.names
        self.register_buffer("mean", vector.detach().clone())
        self.register_buffer("std", joined(std, self.spec, "std").detach().clone())
        if not bool((self.std >= 0).all() & self.std.isfinite().all()):
            raise ValueError("`std` must be finite and not negative.")
        rows = joined(deviations, self.spec, "deviations", stacked=True)
        if len(rows) < 2:
            raise ValueError(f"`deviations` must hold at least 2 networks, got {len(rows)}.")
        self.register_buffer("deviations", rows.detach().clone())
        self.scale, self.order = scale, tuple(mean)
        self.constants = NamedTensors({n: t for n, t in mean.items() if n not in weights})

    def extra_repr(self) -> str:
        """Return the description that ``print`` shows in parentheses."""
        return f"{self.mean.numel()} weights, rank {len(self.deviations)}"

    @classmethod
    def fit(
        cls,
        networks: Params,
        rank: int | None = None,
        scale: float = 1.0,
    ) -> LowRankGaussian:
        """Fit the moments of a stack of networks, and the deviations of the last ones.

        Args:
            networks: a stack, in the order of the trajectory.
            rank: number of deviations, at most 20 by default.
            scale: factor of the covariance.
        """
        mean, std = _moments(networks, 0)
        size = stack_size(networks)
        if rank is not None and not 2 <= rank <= size:
            raise ValueError(f"`rank` must be between 2 and {size}, got {rank}.")
        last = slice(-min(rank or 20, size), None)
        deviations = {name: networks[name][last] - mean[name] for name in std}
        return cls(mean, std, deviations, scale, list(std))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n networks."""
        check_count(n)
        rank, size = self.deviations.shape
        diagonal, low_rank = (standard_normal((n, k), self.mean, generator) for k in (size, rank))
        moved = self.std * diagonal + low_rank @ self.deviations / math.sqrt(rank - 1)
        weights = unravel(self.mean + math.sqrt(self.scale / 2) * moved, self.spec)
        return with_constants(weights, self.constants.tensors(), self.order)

    def log_prob(self, params: Params) -> Tensor:
        """Return the log-density of every network of a stack."""
        rows = at_least_single(joined(params, self.spec, "params", stacked=True))
        mean, std, deviations = map(at_least_single, (self.mean, self.std, self.deviations))
        variances = self.scale / 2 * std.square()
        if fixed := int((variances == 0).sum()):
            raise ValueError(
                "`log_prob` requires weights with a positive variance: the diagonal part "
                f"of the covariance is 0 for {fixed} of {len(std)}."
            )
        factor = deviations.T * math.sqrt(self.scale / (2 * (len(deviations) - 1)))
        return torch.distributions.LowRankMultivariateNormal(mean, factor, variances).log_prob(rows)


# ------------------------------------------------------------ fits to stacks
def _moments(networks: Params, correction: int) -> tuple[Params, Params]:
    """Return means, other tensors of the last network, and deviations of the weights that vary."""
    if not isinstance(networks, dict):
        raise ValueError(
            "`networks` must be a stack, such as `params.stack([...])`, got a "
            f"{type(networks).__name__}."
        )
    if stack_size(networks) < 2:
        raise ValueError(f"`networks` must hold at least 2 networks, got {stack_size(networks)}.")
    weights = {name: networks[name] for name in varying_weights(networks)}
    if not weights:
        raise ValueError("`networks` has no weights: none of its tensors is real and floating.")
    mean = {name: t.mean(0) if name in weights else t[-1] for name, t in networks.items()}
    return mean, {name: t.std(0, correction=correction) for name, t in weights.items()}
