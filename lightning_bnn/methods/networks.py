"""Ordinary training: stacked weights, the loss with a prior, and deep ensembles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_bnn.likelihoods import IsotropicGaussianPrior
from lightning_bnn.methods.health import Divergence
from lightning_bnn.methods.method import AS_IT_IS, Fit, Method, Purpose, State
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.posteriors import Empirical
from lightning_bnn.samplers import Langevin
from weightsym import params as P
from weightsym.params import Params, check_positive

__all__ = ["DeepEnsemble"]


class Networks(State):
    """Stacked weights as a module, under the names of the network.

    Args:
        network: gives the computation.
        stack: the members.
        max_loss: limit on the loss of members of the posterior, see `Divergence`.
    """

    def __init__(self, network: nn.Module, stack: Params, max_loss: float | None = None) -> None:
        super().__init__()
        self.networks = P.stacked_copy(network, stack)
        self.networks.train()
        self.divergence = Divergence(P.stack_size(stack), max_loss)

    def stack(self) -> Params:
        return P.of(self.networks)

    def trained_stack(self) -> Params:
        """Return the members as a stack through which gradients flow to the parameters."""
        return {**P.of(self.networks), **dict(self.networks.named_parameters())}


def gaussian_prior(std: float | None) -> IsotropicGaussianPrior | None:
    """Create a Gaussian prior over all weights, or None without a standard deviation."""
    if std is None:
        return None
    check_positive("prior_std", std)
    return IsotropicGaussianPrior(std)


@dataclass(eq=False, kw_only=True)
class PenalisedTraining(Method):
    r"""Training of ordinary networks on the loss plus the prior's share per example.

    .. math:: L_m = -\frac{1}{B} \sum_i \log p(y_i | x_i, \omega_m) - \frac{1}{N} \log p(\omega_m)

    Args:
        prior_std: standard deviation of a Gaussian prior over all weights; None leaves
            regularisation to the optimizer's weight decay.
        max_loss: limit on the mean training loss of the last epoch, above which members are left
            out of the posterior, as members with non-finite weights are.
    """

    prior_std: float | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        self.prior = gaussian_prior(self.prior_std)

    def losses(self, state: Networks, batch: Batch, run: Run) -> dict[str, Tensor]:
        stack = state.trained_stack()
        nll = run.losses(stack, batch)
        if self.prior is None:
            return {"loss": nll}
        assert run.num_data is not None
        log_prior = self.prior.log_prob(stack, P.weight_names(run.network), stacked=True)
        return {"loss": nll - log_prior / run.num_data, "nll": nll}


def refuse_second_prior(group: dict[str, Any]) -> None:
    """Refuse a second prior in the parameters of a sampler."""
    names = [name for name in ("prior_precision", "weight_decay") if group[name] is not None]
    if names:
        raise ValueError(
            f"Both `prior_std` of the module and `{names[0]}` of the sampler set a prior: "
            "set only one (`prior_std=None`)."
        )


def tell_members(optimizer: Any) -> None:
    """Tell an optimizer with the option `stacked` that the first dimension counts members."""
    for group in optimizer.param_groups:
        if group.get("stacked", False) is None:
            group["stacked"] = True


def tell_prior(optimizer: Any, prior: IsotropicGaussianPrior | None) -> None:
    """Pass the prior of a method to an optimizer, unless it has one of its own."""
    if prior is None:
        return
    for group in optimizer.param_groups:
        refuse_second_prior(group)
        group["prior_precision"] = prior.std**-2


@dataclass(eq=False)
class DeepEnsemble(PenalisedTraining):
    r"""Several networks, each at a mode of the posterior, or of the likelihood without a prior.

    .. math:: L_m = -\frac{1}{B} \sum_i \log p(y_i | x_i, \omega_m) - \frac{1}{N} \log p(\omega_m)

    One member is ordinary training.

    References:
        | Simple and Scalable Predictive Uncertainty Estimation (Lakshminarayanan et al., 2017)
        | https://arxiv.org/abs/1612.01474

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [8], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run, batch = methods.DeepEnsemble(), methods.Run(net), methods.Batch((x,), y)
    >>> state = method.init(net, params.populate(net, members=3))
    >>> optimizer, losses = torch.optim.Adam(state.parameters(), 0.02), []
    >>> for _ in range(10):
    ...     losses.append(method.losses(state, batch, run)["loss"])
    ...     optimizer.zero_grad()
    ...     losses[-1].sum().backward()
    ...     optimizer.step()
    >>> bool((losses[-1] < losses[0]).all()), method.posterior(state, run).size
    (True, 3)
    """

    def init(self, network: nn.Module, stack: Params) -> Networks:
        return Networks(network, stack, self.max_loss)

    def configure_optimizer(
        self, state: Networks, optimizer: Any, run: Run, scheduler: Any = None, *fit: Any
    ) -> Any:
        tell_members(optimizer)
        if isinstance(optimizer, Langevin) and self.prior is not None:
            for group in optimizer.param_groups:
                refuse_second_prior(group)
        return scheduler

    def before_fit(self, state: Networks, fit: Fit, run: Run) -> None:
        if isinstance(fit.optimizer, Langevin) and fit.clips_gradients:
            run.warn("Gradient clipping changes the target of a sampler.")

    def posterior(self, state: Networks, run: Run, purpose: Purpose = AS_IT_IS) -> Empirical:
        return state.members()
