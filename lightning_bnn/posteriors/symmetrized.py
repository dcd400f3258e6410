r"""A posterior averaged over the permutations of its network, so that no order is preferred.

.. math:: q^G(\omega) = \frac{1}{|G|} \sum_{g \in G} q(g^{-1} \omega)

In function space it is the posterior it is made of, so predictions are those of the base.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from lightning_bnn.params import Params, stack_size
from lightning_bnn.posteriors.base import Posterior, Predictor
from lightning_bnn.symmetry import Symmetries, permute, random_permutations

__all__ = ["Symmetrized"]

_ENUMERATE_UP_TO = 50_000
_CHUNK = 4096


class Symmetrized(Posterior):
    """The mixture of all permuted copies of a posterior.

    Args:
        base: a posterior with a density.
        sym: what `lightning_bnn.symmetry.discover` returned for its network.
        draws: how many permutations stand for the group where it is too large to be enumerated:
            the identity and uniform ones. For samples of the base the log-density is then too
            high in expectation: the entropy is bounded from below.

    References:
        | Variational Inference Failures Under Model Symmetries (Gelberg et al., 2024)
        | https://arxiv.org/abs/2408.05496
    """

    def __init__(self, base: Posterior, sym: Symmetries, draws: int = 64) -> None:
        super().__init__()
        if draws < 1:
            raise ValueError(f"`draws` must be at least 1, got {draws}.")
        self.base, self.sym, self.draws = base, sym, draws

    @property
    def order(self) -> float:
        """Number of permutations."""
        return 10**self.sym.log10_permutations if self.sym.log10_permutations < 300 else math.inf

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """A stack of n networks, each moved by a permutation of its own."""
        networks = self.base.sample(n, generator)
        return permute(networks, self.sym, random_permutations(self.sym, generator, n))

    def predictor(
        self, n: int, generator: torch.Generator | None = None, chunk_size: int | None = None
    ) -> Predictor:
        """Predict with networks of the base: permutations do not change their outputs."""
        return self.base.predictor(n, generator, chunk_size)

    def log_prob(self, params: Params, generator: torch.Generator | None = None) -> Tensor:
        """Log-density of every network of a stack.

        Args:
            params: a stack.
            generator: draws permutations, where the group is not enumerated.
        """
        exact = self.order <= _ENUMERATE_UP_TO
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

    def _drawn(self, generator: torch.Generator | None) -> list[Tensor]:
        """The identity first, then uniform permutations."""
        drawn = random_permutations(self.sym, generator, self.draws)
        for group in drawn:
            group[0] = torch.arange(group.shape[1])
        return drawn

    def _images(self, params: Params, elements: list[Tensor], count: int) -> Tensor:
        """Log-density of the base at every image of every network, ``(networks, images)``."""
        members = stack_size(params)
        copies = {name: t.repeat_interleave(count, 0) for name, t in params.items()}
        if elements:
            copies = permute(copies, self.sym, [group.repeat(members, 1) for group in elements])
        return self.base.log_prob(copies).reshape(members, count)


def _all_elements(sym: Symmetries) -> list[Tensor]:
    """Every combination of permutations of all groups, one row each."""
    groups = [torch.tensor(list(itertools.permutations(range(g.units)))) for g in sym.permutations]
    choices = torch.cartesian_prod(*(torch.arange(len(g)) for g in groups)) if groups else None
    if choices is None:
        return []
    columns = choices.reshape(len(choices), -1).T
    return [group[index] for group, index in zip(groups, columns, strict=True)]
