"""Symmetrized variational inference under a trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_bnn import methods
from lightning_bnn.modules.arguments import joint_arguments
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.symmetry import Symmetries

__all__ = ["SymmetrizedVI"]


class SymmetrizedVI(Bayesian):
    r"""Mean-field VI whose posterior is the mixture of all permuted copies of the Gaussian.

    .. math:: L^G = L_{MFVI} - \frac{T}{N} I(g; \omega), \quad I = H(q^G) - H(q)

    Predictions are those of the Gaussian. What changes is the objective: it no longer pays to sit
    between modes that are permutations of each other.

    Args:
        network: gives the computation and the first means; it is copied, not changed.
        members: how many Gaussians, one for each mode that is found.
        **kwargs: of the method, see `lightning_bnn.methods.SymmetrizedVI`, and of every module, see
            `Bayesian`.

    References:
        | Variational Inference Failures Under Model Symmetries (Gelberg et al., 2024)
        | https://arxiv.org/abs/2408.05496

    >>> import math
    >>> import torch
    >>> from lightning_bnn.models import mlp
    >>> module = SymmetrizedVI(mlp(2, [8], 3), num_data=100)
    >>> terms = module.losses((torch.randn(5, 2),), torch.tensor([0, 1, 2, 0, 1]))
    >>> information = terms["permutation_info"].item()  # copies of narrow Gaussians do not overlap
    >>> math.isclose(information, math.log(math.factorial(8)), rel_tol=1e-3)
    True
    """

    mean: nn.Parameter
    log_std: nn.Parameter

    arguments = staticmethod(joint_arguments(methods.SymmetrizedVI, Bayesian))

    def __init__(self, network: nn.Module, members: int = 1, **kwargs: Any) -> None:
        super().__init__(network=network, members=members, **self.arguments(**kwargs))

    @property
    def symmetries(self) -> Symmetries:
        """What can be permuted in the network; an example of the inputs must be known."""
        return self.method.units(self.state, self.run).symmetries

    def bracket(self, samples: int = 8) -> dict[str, Tensor]:
        """Lower and upper bound of the information, and interpolation; means over members."""
        with self.randomness("bracket"):
            return self.method.bracket(self.state, self.run, samples)
