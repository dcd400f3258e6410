"""Deep ensembles: networks that are trained side by side from different starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.arguments import count, positive
from lightning_bnn.harvest import ends
from lightning_bnn.likelihoods import IsotropicGaussianPrior
from lightning_bnn.modules.base import BayesianModule
from lightning_bnn.modules.divergence import Diverged, Divergence
from lightning_bnn.modules.member_losses import Examples, member_losses
from lightning_bnn.modules.sharing import Part
from lightning_bnn.modules.side_by_side import finite_members, restart_members
from lightning_bnn.modules.templates import fixed_names
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical, Posterior
from lightning_bnn.randomness import keyed_generator
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
        max_loss: members whose mean training loss over the last epoch is above are left out of the
            posterior, as those are whose weights are not finite.
        restarts: how often a member that has diverged (weights not finite, loss not a number) may
            begin anew from other weights after an epoch, while the others go on.
        **kwargs: what every module takes, see `BayesianModule`.

    References:
        | Simple and Scalable Predictive Uncertainty Estimation (Lakshminarayanan et al., 2017)
        | https://arxiv.org/abs/1612.01474
    """

    takes_samplers = True
    can_be_shared = True
    """Whether nothing but the networks counts members."""

    def __init__(
        self,
        network: nn.Module,
        members: int = 5,
        prior_std: float | None = None,
        max_loss: float | None = None,
        restarts: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(network, members=members, **kwargs)
        for name, value in (("prior_std", prior_std), ("max_loss", max_loss)):
            if value is not None:
                positive(name, value)
        count("restarts", restarts, 0)
        self.divergence = Divergence(members, max_loss, restarts)
        self.prior = None if prior_std is None else IsotropicGaussianPrior(prior_std)
        self.networks = P.stacked_copy(self.template, self.first_networks())
        self.networks.train()

    @property
    def judged_samples(self) -> int:
        """All members predict."""
        return len(self.healthy())

    @property
    def may_recover(self) -> bool:
        """Whether members that have diverged begin anew."""
        return self.divergence.restarts > 0

    @property
    def needs_num_data(self) -> bool:
        """Only the prior is weighed against the data."""
        return self.prior is not None

    def healthy(self) -> Tensor:
        """Indices of the members that have not diverged."""
        finite = super().healthy()
        kept = finite[~self.divergence.left_out.to(finite.device)[finite]]
        if len(kept) == 0:
            means = self.divergence.means
            told = "" if means is None else f": losses are {means.min():.3g} to {means.max():.3g}"
            raise Diverged(
                f"Every member has a loss above `max_loss` {self.divergence.max_loss}, or has "
                f"diverged{told}."
            )
        return kept

    def take_share(self, first: int, last: int) -> None:
        """Let go of all members but some."""
        if not self.can_be_shared:
            super().take_share(first, last)
        for tensor in self.networks.state_dict(keep_vars=True).values():
            tensor.data = tensor.data[first:last].clone()
        self._keep_share(first, last)
        self.divergence.take_share(first, last)

    def take_whole(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Have the members of all processes, and what is known of them."""
        super().take_whole(gather)
        self.divergence.load_state_dict(self._known_of_members(gather))

    def _known_of_members(self, gather: Callable[[Tensor], Tensor] | None) -> dict[str, Any]:
        """Who has diverged, also among the members of other processes."""
        trainer = self._trainer
        state = self.divergence.state_dict(last=trainer is not None and ends(trainer))
        if gather is None:
            return state
        return {
            name: gather(value.to(self.device)).cpu() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }

    def member_names(self) -> set[str]:
        """Weights and statistics."""
        return {f"networks.{name}" for name in self.networks.state_dict()}

    def stacked_parameters(self) -> list[Tensor]:
        """The weights."""
        return list(self.networks.parameters())

    def member_stack(self) -> Params:
        """The members."""
        return P.of(self.networks)

    def posterior(self) -> Posterior:
        """The members, each as likely as the others."""
        return self._members()

    def part_of_predictions(self, before: int, total: int) -> Part:
        """All members that are here."""
        if not bool(self._well().any()):
            return Part(None)
        own = self._members()
        return Part(own.predictor(own.size, None, self.chunk_size))

    def _members(self) -> Empirical:
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

    def watch(self, terms: dict[str, Tensor]) -> None:
        """Remember the losses of the epoch."""
        self.divergence.add(terms.get("nll", terms["loss"]))

    def on_train_epoch_end(self) -> None:
        """Let members that have diverged begin anew, or leave them out; the others go on."""
        means = self.divergence.take()
        if means is not None:
            finite = finite_members(self.stacked_parameters())
            anew = self.divergence.judge(_common(means, self), finite, ends(self.trainer))
            if anew:
                rank_zero_info(f"{type(self).__name__}: members {anew} have diverged, start anew.")
                self._restart(anew)
            out = int(self.divergence.left_out.sum())
            if out:
                rank_zero_info(f"{type(self).__name__}: {out} of {self.members} are left out.")
        super().on_train_epoch_end()

    def on_train_end(self) -> None:
        """Judge the members, if the run was stopped early."""
        super().on_train_end()
        self.divergence.finish()

    def _restart(self, members: list[int]) -> None:
        numbers = [(self.first_member + m, int(self.divergence.restarted[m])) for m in members]
        fresh = [
            P.populate(self.template, 1, keyed_generator(self.seed, "restart", *number))
            for number in numbers
        ]
        stacks = {
            n: t for n, t in self._trained_stack().items() if n not in fixed_names(self.template)
        }
        joined = {name: torch.cat([network[name] for network in fresh]) for name in stacks}
        restart_members(stacks, joined, members, self.trainer.optimizers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """With what is known of diverged members."""
        super().on_save_checkpoint(checkpoint)
        gather = None
        if self.whole is not None:
            strategy: Any = self.trainer.strategy
            gather = strategy.gather_members
        checkpoint["lightning_bnn"]["divergence"] = self._known_of_members(gather)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with what is known of diverged members."""
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get("lightning_bnn", {}).get("divergence")
        if state is None or len(state["left_out"]) < self.members:
            return
        self.divergence.load_state_dict(state)
        if self.whole is not None:
            self.divergence.take_share(*self.whole)

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
            Examples(inputs, targets, self.own_examples),
            self.nll_each if self.own_examples else self.nll,
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


def _common(means: Tensor, module: DeepEnsemble) -> Tensor:
    """Processes that train the same members have seen other examples."""
    if module.trainer.world_size == 1 or module.whole is not None:
        return means
    gathered = module.all_gather(means.to(module.device))
    assert isinstance(gathered, Tensor)
    return gathered.mean(0).cpu()
