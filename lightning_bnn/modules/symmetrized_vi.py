"""Symmetrized variational inference under a trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_bnn import methods
from lightning_bnn.methods.mfvi import KL, Initialisation, InitStd
from lightning_bnn.methods.symmetrized_vi import Estimator
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.posteriors.perturbations import Reparameterisation
from lightning_bnn.symmetry import Symmetries

__all__ = ["SymmetrizedVI"]


class SymmetrizedVI(Bayesian):
    r"""Mean-field VI whose posterior is the mixture of all permuted copies of the Gaussian.

    .. math:: L^G = L_{MFVI} - \frac{T}{N} I(g; \omega), \quad I = H(q^G) - H(q)

    Predictions are those of the Gaussian. What changes is the objective: it no longer pays to sit
    between modes that are permutations of each other.

    Args:
        network: gives the computation and the first means; it is copied, not changed.
        estimator: of the information: ``"bethe"``, the tightest approximation, an upper bound that
            is at most ``n/2 log 2`` too large (up to five units that can meet are summed exactly);
            ``"capacity"``, a lower bound, so that the objective
            stays a bound of the evidence; ``"uniform"``, the paper's, at most ``log(draws)``.
        draws: permutations of ``"uniform"``, the identity included.
        every: steps from one gradient of the information to the next; in between it is used again.
        prior_std: standard deviation of the Gaussian prior.
        prior: another prior: a module with ``log_prob(params, names, stacked)``.
        init_std: standard deviation of all weights at the start; ``"auto"`` lets five candidates
            race for a hundred steps on the first training batches when a fit begins.
        initialisation: where means start, see `MFVI`.
        elbo_samples: weight samples of every step.
        temperature: T, of the tempered posterior.
        kl_weight: multiplies all complexity terms, a departure from Bayes.
        kl: ``"closed"`` form, or ``"sampled"`` with the weights of the step.
        reparameterisation: noise in ``"weight"`` space, or for every example, see `MFVI`.
        kl_warmup: so many epochs at the start, in which all complexity terms count less, linearly
            from nothing; the ``elbo`` that is logged is the whole one.
        **kwargs: what every module takes, see `Bayesian`.

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

    def __init__(
        self,
        network: nn.Module,
        estimator: Estimator = "bethe",
        draws: int = 20,
        prior_std: float = 1.0,
        prior: nn.Module | None = None,
        init_std: InitStd = 0.01,
        initialisation: Initialisation = "network",
        elbo_samples: int = 1,
        temperature: float = 1.0,
        kl_weight: float = 1.0,
        kl: KL = "closed",
        reparameterisation: Reparameterisation = "weight",
        kl_warmup: int | float = 0,
        every: int = 1,
        **kwargs: Any,
    ) -> None:
        gaussian = methods.MFVI(
            prior_std, prior, init_std, initialisation, elbo_samples, temperature, kl_weight, kl,
            reparameterisation, kl_warmup,
        )  # fmt: skip
        method = methods.SymmetrizedVI(gaussian, estimator, draws, every)
        super().__init__(network=network, method=method, **kwargs)

    @property
    def symmetries(self) -> Symmetries:
        """What can be permuted in the network; an example of the inputs must be known."""
        self._look_at_example()
        return self.method.units(self.state).symmetries

    def bracket(self, samples: int = 8) -> dict[str, Tensor]:
        """Lower and upper bound of the information, and interpolation; means over members."""
        self._look_at_example()
        with self._randomness("bracket"):
            return self.method.bracket(self.state, samples)
