"""ScalaBL: variational inference over one scale for each rank of an adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_bnn.likelihoods import IsotropicGaussianPrior
from lightning_bnn.methods.method import AS_IT_IS, Method, Purpose
from lightning_bnn.methods.networks import Networks
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.posteriors import GaussianScales, Posterior
from lightning_bnn.posteriors.empirical import mixture_of
from lightning_bnn.posteriors.scales import scaled_rows
from weightsym.params import Params, check_count, check_positive

__all__ = ["ScalaBL"]


class ScaledAdapters(Networks):
    """Networks whose adapters have rows of length one, and the scales of these rows.

    Args:
        network: gives the computation.
        stack: the members.
        init_std: initial standard deviation of the scales.
    """

    def __init__(self, network: nn.Module, stack: Params, init_std: float) -> None:
        super().__init__(network, stack)
        self.rows = scaled_matrices(network)
        trained = dict(self.networks.named_parameters())
        lengths = [trained[n].detach().flatten(2).norm(dim=2) for n in self.rows]
        mean = torch.cat([t.where(t > 0, 1.0) for t in lengths], 1)
        with torch.no_grad():
            for name, unit in scaled_rows(trained, self.rows, 1 / mean).items():
                trained[name].copy_(unit)
        self.mean = nn.Parameter(mean)
        self.log_std = nn.Parameter(torch.full_like(mean, math.log(init_std)))

    def stack(self) -> Params:
        stack = super().stack()
        return stack | scaled_rows(stack, self.rows, self.mean.detach())

    def drawn(self) -> Params:
        """Draw one set of scales for every member."""
        stack = self.trained_stack()
        scales = self.mean + self.log_std.exp() * torch.randn_like(self.mean)
        return stack | scaled_rows(stack, self.rows, scales)

    def kl(self, prior_std: float) -> Tensor:
        """Return the KL divergence of the scales of every member from their prior."""
        ratio = 2 * (self.log_std - math.log(prior_std))
        squares = (self.mean / prior_std).square() + ratio.exp()
        return (squares - 1 - ratio).sum(1) / 2

    def gaussian(self, index: int) -> GaussianScales:
        """Return the posterior of one member."""
        network = {name: t[index] for name, t in super().stack().items()}
        mean, std = self.mean[index].detach(), self.log_std[index].detach().exp()
        return GaussianScales(network, self.rows, mean, std)


@dataclass(eq=False)
class ScalaBL(Method):
    r"""Adapters with one random scale for each rank, trained together with their matrices.

    .. math:: B\, \mathrm{diag}(s)\, V, \quad s \sim N(\mu, \mathrm{diag}(\sigma^2)), \qquad
        L = E\Big[-\frac{1}{B} \sum_i \log p(y_i | x_i, s)\Big]
        + \frac{1}{N} \mathrm{KL}\big(q(s) \,\|\, N(0, \tau^2)\big)

    An adapter of rank r needs 2 r further numbers. The rows of its first factor have length one at
    first, and their lengths are the first means. All other trained weights have no distribution.
    Without adapters, the rows of every trained matrix are scaled.

    Args:
        prior_std: standard deviation of the prior of the scales.
        init_std: initial standard deviation of the scales.
        elbo_samples: number of draws per step.

    References:
        | Scalable Bayesian Low-Rank Adaptation of Large Language Models via Stochastic Variational
          Subspace Inference (Samplawski et al., 2025)
        | https://arxiv.org/abs/2506.21408

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> pair = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
    >>> net, x, y = torch.nn.Sequential(*pair), torch.randn(30, 8), torch.arange(30) % 3
    >>> method, run = methods.ScalaBL(), methods.Run(net, num_data=30)
    >>> state = method.init(net, params.populate(net, members=2))
    >>> terms = method.losses(state, methods.Batch((x,), y), run)
    >>> torch.allclose(terms["loss"], terms["nll"] + terms["kl"] / 30), state.mean.shape
    (True, torch.Size([2, 2]))
    """

    prior_std: float = 1.0
    init_std: float = 0.05
    elbo_samples: int = 1

    unfitted = "its scales are distributed as initialised"

    def __post_init__(self) -> None:
        check_positive("prior_std", self.prior_std)
        check_positive("init_std", self.init_std)
        check_count("elbo_samples", self.elbo_samples)
        self.prior = IsotropicGaussianPrior(self.prior_std)

    def init(self, network: nn.Module, stack: Params) -> ScaledAdapters:
        return ScaledAdapters(network, stack, self.init_std)

    def losses(self, state: ScaledAdapters, batch: Batch, run: Run) -> dict[str, Tensor]:
        assert run.num_data is not None
        draws = [run.losses(state.drawn(), batch) for _ in range(self.elbo_samples)]
        nll, kl = torch.stack(draws).mean(0), state.kl(self.prior_std)
        return {"loss": nll + kl / run.num_data, "nll": nll, "kl": kl}

    def posterior(self, state: ScaledAdapters, run: Run, purpose: Purpose = AS_IT_IS) -> Posterior:
        return mixture_of([state.gaussian(m) for m in state.healthy().tolist()])


def scaled_matrices(network: nn.Module) -> dict[str, int]:
    """Return the matrices whose rows are scaled, and their numbers of rows.

    They are the first factors of adapters, or else all trained matrices. An adapter is a pair of
    trained tensors whose names differ in one part, the first with fewer rows than columns, and with
    as many rows as the second one has columns.

    >>> adapter = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 4))
    >>> scaled_matrices(adapter)
    {'0.weight': 2}
    """
    trained = {n: p for n, p in network.named_parameters() if p.requires_grad and p.ndim > 1}
    if not trained:
        raise ValueError(
            "`network` has no trained matrices: load its adapter with `is_trainable=True`."
        )
    factors = [n for n in trained if any(_is_pair(n, other, trained) for other in trained)]
    return {name: len(trained[name]) for name in factors or trained}


def _is_pair(first: str, second: str, trained: Mapping[str, Tensor]) -> bool:
    parts = first.split("."), second.split(".")
    a, b = trained[first], trained[second]
    return (
        len(parts[0]) == len(parts[1])
        and sum(p != q for p, q in zip(*parts, strict=True)) == 1
        and len(a) == b.shape[1] < min(a[0].numel(), len(b))
    )
