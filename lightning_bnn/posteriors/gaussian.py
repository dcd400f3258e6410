"""Independent Gaussians, one for each weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.params import Params, RavelSpec, is_weight, ravel, stack_size, unravel
from lightning_bnn.posteriors.alignment import Align, alignment
from lightning_bnn.posteriors.base import Posterior, check_count, standard_normal, with_constants
from lightning_bnn.symmetry import Symmetries

__all__ = ["DiagonalGaussian"]

_LOG_2PI = math.log(2 * math.pi)


class DiagonalGaussian(Posterior):
    r"""A Gaussian with a diagonal covariance over the weights of one network.

    .. math:: w \sim N\big(\mu,\; \mathrm{diag}(\sigma^2)\big)

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
        self.constants = NamedTensors({n: t for n, t in mean.items() if n not in weights})

    @classmethod
    def fit(
        cls,
        networks: Params,
        reference: Params | None = None,
        align: Align | None = None,
        symmetries: Symmetries | None = None,
        model: nn.Module | None = None,
        batches: Iterable[Any] | None = None,
        **options: Any,
    ) -> DiagonalGaussian:
        """From a stack of networks: their means and standard deviations.

        Networks that are permutations of each other average to nothing; brought into one frame
        first, they make a compact representation of the whole stack. Buffers are those of the last
        network.

        Args:
            networks: a stack.
            reference: the network that all are matched with, by default the first.
            align: match ``"weights"``, or ``"activations"`` on some data, with the reference, or
                all networks with each other, ``"joint"``; by default networks stay as they are.
            symmetries: what ``discover`` returned, for matching.
            model: gives the computation, for activations.
            batches: inputs, for activations.
            **options: of `lightning_bnn.symmetry.align`, such as ``signs``, ``scales`` and
                ``mixing``, for a joint frame.

        References:
            | A Compact Representation for Bayesian Neural Networks (Xiao, Liu, Bamler, 2023)
            | https://arxiv.org/abs/2401.00611

        >>> rows = torch.tensor([[0.0, 2.0], [2.0, 0.0]])
        >>> DiagonalGaussian.fit({"w": rows}).centre["w"]
        tensor([1., 1.])
        """
        if not isinstance(networks, dict):
            raise ValueError(
                "`networks` must be a stack, `params.stack([...])` makes one of a list, got a "
                f"{type(networks).__name__}."
            )
        size = stack_size(networks)
        if size < 2:
            raise ValueError(f"`networks` must hold at least 2 networks, got {size}.")
        if align is not None:
            move = alignment(networks, reference, align, symmetries, model, batches, **options)
            networks = move(networks)
        elif reference is not None or options:
            name = "reference" if reference is not None else min(options)
            raise ValueError(f"`{name}` is used with `align`, which is None.")
        weights = {name: t for name, t in networks.items() if is_weight(name, t)}
        least = torch.finfo(next(iter(weights.values())).dtype).tiny
        mean = {name: t.mean(0) if name in weights else t[-1] for name, t in networks.items()}
        return cls(mean, {name: t.std(0).clamp(min=least) for name, t in weights.items()})

    def extra_repr(self) -> str:
        """What ``print`` shows in brackets."""
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
        """The means, with those that are least certain set to zero.

        Args:
            fraction: of the weights to remove, those with the largest standard deviations.

        >>> q = DiagonalGaussian({"w": torch.ones(4)}, {"w": torch.tensor([1.0, 3.0, 2.0, 4.0])})
        >>> q.prune(0.5)["w"]
        tensor([1., 0., 1., 0.])
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"`fraction` must be between 0 and 1, got {fraction}.")
        gone = round(fraction * len(self.mean))
        kept = torch.ones_like(self.mean)
        kept[self.log_std.detach().argsort(descending=True, stable=True)[:gone]] = 0
        return {**self.centre, **unravel(self.mean.detach() * kept, self.spec)}

    def with_deviations_of(
        self,
        other: DiagonalGaussian,
        align: Align | None = "weights",
        symmetries: Symmetries | None = None,
        model: nn.Module | None = None,
        batches: Iterable[Any] | None = None,
    ) -> DiagonalGaussian:
        """These means, with the standard deviations of another posterior.

        Args:
            other: its means are matched with these, its deviations follow.
            align: see `fit`; None if both are matched already.
            symmetries: see `fit`.
            model: see `fit`.
            batches: see `fit`.
        """
        deviations = other.deviations
        if align is not None:
            move = alignment(other.centre, self.centre, align, symmetries, model, batches)
            deviations = move(deviations)
        return DiagonalGaussian(self.centre, deviations, self.spec.names)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """A stack of n networks; gradients flow to mean and standard deviation."""
        check_count(n)
        noise = standard_normal((n, len(self.mean)), self.mean, generator)
        weights = unravel(self.mean + self.log_std.exp() * noise, self.spec)
        return with_constants(weights, self.constants.tensors(), self.order)

    def log_prob(self, params: Params) -> Tensor:
        """Log-density of every network of a stack."""
        rows, _ = ravel(params, self.spec.names, stacked=True)
        z = (rows - self.mean) / self.log_std.exp()
        return -(z.square() / 2 + self.log_std + _LOG_2PI / 2).sum(-1)

    def entropy(self) -> Tensor:
        """Differential entropy of the Gaussian, in nats."""
        return (self.log_std + (1 + _LOG_2PI) / 2).sum()


def _deviations(std: Params | float, spec: RavelSpec, like: Tensor) -> Tensor:
    if isinstance(std, dict):
        vector = ravel(std, spec.names)[0].detach().to(like)
    else:
        vector = torch.full_like(like, std)
    if not bool((vector > 0).all()):
        raise ValueError("`std` must be positive.")
    return vector
