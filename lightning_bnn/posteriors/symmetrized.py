r"""A posterior averaged over the permutations of its network.

.. math:: q^G(\omega) = \frac{1}{|G|} \sum_{g \in G} q(g^{-1} \omega)

Its predictions are those of the base posterior.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.posteriors.base import Posterior, Predictor
from lightning_bnn.posteriors.gaussian import DiagonalGaussian
from lightning_bnn.posteriors.mutual_information import Sampled, permanent_information
from lightning_bnn.posteriors.permanents import log_bethe, log_permanent
from lightning_bnn.posteriors.unit_layers import UnitLayer, independent_sets, unit_layers
from weightsym import Symmetries, permute, random_permutations
from weightsym.params import Params, stack_size, unravel

__all__ = ["Symmetrized"]

_ENUMERATE_UP_TO = 50_000
_EXACT_UP_TO = 10
_CHUNK = 4096


class Symmetrized(Posterior):
    r"""The mixture of all permuted copies of a posterior.

    .. math:: q^G(w) = \frac{1}{|G|} \sum_{g \in G} q(g w)

    Args:
        base: a posterior with a density.
        sym: result of `weightsym.discover` for its network.
        draws: number of permutations (the identity and uniform ones) that represent the group if
            neither enumeration nor permanents are possible. The log-density of samples of the base
            is then too high in expectation, so that the entropy is bounded from below.

    References:
        | Variational Inference Failures Under Model Symmetries (Gelberg et al., 2024)
        | https://arxiv.org/abs/2408.05496

    >>> from weightsym import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.posteriors import DiagonalGaussian
    >>> from weightsym import discover
    >>> net = mlp(2, [4], 1)
    >>> posterior = Symmetrized(DiagonalGaussian(P.of(net)), discover(net, torch.randn(8, 2)))
    >>> network = posterior.sample(1)
    >>> copy = permute(network, posterior.sym, [torch.tensor([3, 1, 0, 2])])
    >>> torch.allclose(posterior.log_prob(network), posterior.log_prob(copy), rtol=1e-4)
    True
    """

    def __init__(self, base: Posterior, sym: Symmetries, draws: int = 64) -> None:
        super().__init__()
        if draws < 1:
            raise ValueError(f"`draws` must be at least 1, got {draws}.")
        self.base, self.sym, self.draws = base, sym, draws

    def extra_repr(self) -> str:
        """Return the description that ``print`` shows in parentheses."""
        return f"{self.base}, over 10^{self.sym.log10_permutations:.1f} permutations"

    @property
    def order(self) -> float:
        """Number of permutations in the group, infinite above 1e300."""
        return 10**self.sym.log10_permutations if self.sym.log10_permutations < 300 else math.inf

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n networks, each moved by a random permutation."""
        networks = self.base.sample(n, generator)
        return permute(networks, self.sym, random_permutations(self.sym, generator, n))

    def predictor(
        self, n: int, generator: torch.Generator | None = None, chunk_size: int | None = None
    ) -> Predictor:
        """Predict with networks of the base: permutations do not change their outputs."""
        return self.base.predictor(n, generator, chunk_size)

    def log_prob(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        """Return the log-density of every network of a stack.

        Up to 50 000 permutations are enumerated. For a diagonal Gaussian over layers without shared
        tensors, the sum over all permutations is a permanent: exact for up to ten units that may be
        confused, else the Bethe permanent, which is at most ``n/2 log 2`` too low.

        Args:
            params: a stack.
            generator: draws permutations, if they are needed.
        """
        exact = self.order <= _ENUMERATE_UP_TO
        layers = [] if exact else self._layers()
        if layers and isinstance(self.base, DiagonalGaussian):
            return self.base.log_prob(params) + _by_permanents(self.base, layers, params)
        elements = _all_elements(self.sym) if exact else self._drawn(generator)
        count = len(elements[0]) if elements else 1
        step = max(1, _CHUNK // count)
        parts = [
            self._images(
                {name: t[start : start + step] for name, t in params.items()}, elements, count
            )
            for start in range(0, stack_size(params), step)
        ]
        return torch.cat(parts).logsumexp(1) - math.log(count)

    def _layers(self) -> list[UnitLayer]:
        """Return layers whose permutations form the group, if they act unit by unit."""
        if not isinstance(self.base, DiagonalGaussian):
            return []
        layers = unit_layers(self.sym, self.base.spec.names)
        sets = independent_sets(layers)
        return layers if len(sets) == 1 and len(layers) == len(self.sym.permutations) else []

    def _drawn(self, generator: torch.Generator | None) -> list[Tensor]:
        """Return the identity, followed by uniform permutations."""
        drawn = random_permutations(self.sym, generator, self.draws)
        for group in drawn:
            group[0] = torch.arange(group.shape[1])
        return drawn

    def _images(self, params: Params, elements: list[Tensor], count: int) -> Tensor:
        """Return log-densities of the base at all images of networks, ``(networks, images)``."""
        members = stack_size(params)
        copies = {name: t.repeat_interleave(count, 0) for name, t in params.items()}
        if elements:
            copies = permute(copies, self.sym, [group.repeat(members, 1) for group in elements])
        return self.base.log_prob(copies).reshape(members, count)


def _by_permanents(base: DiagonalGaussian, layers: Sequence[UnitLayer], params: Params) -> Tensor:
    """Return the gain of the log-density by averaging over all permutations."""
    size = stack_size(params)
    weights = {name: params[name] for name in base.spec.names}
    mean, log_std = (unravel(t.expand(size, -1), base.spec) for t in (base.mean, base.log_std))
    noise = {n: (weights[n] - mean[n]) * (-log_std[n]).exp() for n in weights}
    sampled = Sampled(weights, mean, log_std, noise)
    parts = [-permanent_information(layer, sampled, _exact_or_bethe) for layer in layers]
    return torch.stack(parts).sum(0).to(base.mean)


def _exact_or_bethe(logs: Tensor) -> Tensor:
    return log_permanent(logs) if logs.shape[-1] <= _EXACT_UP_TO else log_bethe(logs)


def _all_elements(sym: Symmetries) -> list[Tensor]:
    """Return every combination of permutations of all groups, one per row."""
    groups = [torch.tensor(list(itertools.permutations(range(g.units)))) for g in sym.permutations]
    choices = torch.cartesian_prod(*(torch.arange(len(g)) for g in groups)) if groups else None
    if choices is None:
        return []
    columns = choices.reshape(len(choices), -1).T
    return [group[index] for group, index in zip(groups, columns, strict=True)]
