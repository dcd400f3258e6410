"""Deep ensembles: networks that are trained side by side from different starts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.likelihoods import IsotropicGaussianPrior
from lightning_bnn.modules.base import BayesianModule
from lightning_bnn.modules.member_losses import member_losses
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical
from lightning_bnn.samplers import Langevin

__all__ = ["DeepEnsemble"]


class DeepEnsemble(BayesianModule):
    r"""Several networks, each at a maximum of the posterior (of the likelihood without a prior).

    .. math:: L_m = -\frac{1}{B} \sum_i \log p(y_i | x_i, \omega_m) - \frac{1}{N} \log p(\omega_m)

    With ``members=1`` it is ordinary training. The state dict has the names of the network, with a
    leading member dimension.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many networks.
        prior_std: standard deviation of a Gaussian prior over all weights; None leaves
            regularisation to the optimizer's weight decay.
        **kwargs: what every module takes, see `BayesianModule`.

    References:
        | Simple and Scalable Predictive Uncertainty Estimation (Lakshminarayanan et al., 2017)
        | https://arxiv.org/abs/1612.01474
    """

    takes_samplers = True

    def __init__(
        self, network: nn.Module, members: int = 5, prior_std: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(network, members=members, **kwargs)
        self.prior = None if prior_std is None else IsotropicGaussianPrior(prior_std)
        self.networks = P.stacked_copy(self.template, self.first_networks())
        self.networks.train()

    @property
    def judged_samples(self) -> int:
        """All members predict."""
        return len(self.healthy())

    @property
    def needs_num_data(self) -> bool:
        """Only the prior is weighed against the data."""
        return self.prior is not None

    def stacked_parameters(self) -> list[Tensor]:
        """The weights."""
        return list(self.networks.parameters())

    def member_stack(self) -> Params:
        """The members."""
        return P.of(self.networks)

    def posterior(self) -> Empirical:
        """The members, each as likely as the others."""
        kept = self.healthy()
        return Empirical({name: t[kept] for name, t in self.member_stack().items()})

    def configure_optimizers(self) -> Any:
        """The optimizer; of a sampler, one that has no second prior."""
        configured = super().configure_optimizers()
        optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
        if isinstance(optimizer, Langevin) and self.prior is not None:
            for group in optimizer.param_groups:
                _check_one_prior(group)
        return configured

    def losses(self, inputs: tuple[Any, ...], targets: Tensor) -> dict[str, Tensor]:
        """Mean negative log-likelihood, with the prior's share."""
        nll = self.member_nll(inputs, targets)
        if self.prior is None:
            return {"loss": nll}
        assert self.num_data is not None
        return {"loss": nll - self.log_prior() / self.num_data, "nll": nll}

    def member_nll(self, inputs: tuple[Any, ...], targets: Tensor) -> Tensor:
        """Mean negative log-likelihood of every member."""
        return member_losses(
            self.template,
            self._trained_stack(),
            inputs,
            lambda outputs: self.nll(outputs, targets),
            list(self.likelihood.parameters()),
            self.chunk_size,
        )

    def log_prior(self) -> Tensor:
        """Log-density of the prior at every member."""
        assert self.prior is not None
        names = P.weight_names(self.template)
        return self.prior.log_prob(self._trained_stack(), names, stacked=True)

    def _trained_stack(self) -> Params:
        """The members, with gradients."""
        return {**P.of(self.networks), **dict(self.networks.named_parameters())}


def _check_one_prior(group: dict[str, Any]) -> None:
    given = [n for n in ("prior_precision", "weight_decay") if group[n] is not None]
    if given:
        raise ValueError(
            f"Both `prior_std` of the module and `{given[0]}` of the sampler are a prior: give "
            "only one (`prior_std=None`)."
        )
