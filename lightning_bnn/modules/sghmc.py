"""Parallel chains of a stochastic-gradient sampler, and the networks that they visit."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import samplers
from lightning_bnn.modules.chains import Chains
from lightning_bnn.modules.templates import has_dropout
from lightning_bnn.samplers import CyclicalSchedule

__all__ = ["SGHMC"]


class SGHMC(Chains):
    r"""Samples of the posterior by any sampler of `lightning_bnn.samplers`.

    .. math:: \exp\big(-(N \cdot \mathrm{NLL}(\omega) - \log p(\omega)) / T\big)

    The sampler is the ``optimizer``: `SGHMC` by default, or `SGLD`, `PreconditionedSGLD`. It is
    told N and the prior. With `CyclicalSchedule` (``lr_interval="step"``) networks are kept in the
    sampling parts of its cycles only. Members are chains that start from networks of their own.

    Args:
        network: gives the computation, and where the first chain starts.
        members: how many chains.
        prior_std: standard deviation of a Gaussian prior over all weights; None leaves it to
            ``prior_precision`` or ``weight_decay`` of the sampler.
        optimizer: makes the sampler, given parameters.
        **kwargs: what all chains take, see `Chains`, and all modules, see `BayesianModule`.

    References:
        | Stochastic Gradient Hamiltonian Monte Carlo (Chen et al., 2014)
        | https://arxiv.org/abs/1402.4102
    """

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        prior_std: float | None = 1.0,
        optimizer: OptimizerCallable = samplers.SGHMC,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            network, members=members, prior_std=prior_std, optimizer=optimizer, **kwargs
        )

    @property
    def needs_num_data(self) -> bool:
        """The sampler does."""
        return True

    def losses(self, inputs: tuple[Any, ...], targets: Tensor) -> dict[str, Tensor]:
        """Mean negative log-likelihood; the prior is the sampler's part."""
        return {"loss": self.member_nll(inputs, targets)}

    # -------------------------------------------------------- the sampler
    def configure_optimizers(self) -> Any:
        """The sampler, told of the prior."""
        configured = super().configure_optimizers()
        sampler = configured["optimizer"] if isinstance(configured, dict) else configured
        if not isinstance(sampler, samplers.Langevin):
            raise ValueError(
                f"`optimizer` {type(sampler).__name__} is no sampler: take one of "
                "lightning_bnn.samplers, such as SGHMC or SGLD."
            )
        if self.prior is not None:
            for group in sampler.param_groups:
                group["prior_precision"] = self.prior.std**-2
        return configured

    def on_train_start(self) -> None:
        """Say what changes the target."""
        super().on_train_start()
        if self.prior is None and self._flat():
            rank_zero_warn(
                "There is no prior: without `prior_std`, `prior_precision` or `weight_decay` the "
                "posterior may have no normalisation."
            )
        smoothing = any(getattr(m, "label_smoothing", 0) for m in self.likelihood.modules())
        for name, found in (
            ("Gradient clipping", self.trainer.gradient_clip_val),
            ("Label smoothing", smoothing),
            ("Dropout", has_dropout(self.template)),
        ):
            if found:
                rank_zero_warn(f"{name} changes the target of a sampler.")

    def _flat(self) -> bool:
        groups = [g for o in self.trainer.optimizers for g in o.param_groups]
        return not any(g["prior_precision"] or g["weight_decay"] for g in groups)

    # -------------------------------------------------------- what is kept
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Keep the members after the step, unless a cycle explores."""
        exploring = self._exploring()
        before = self.trainer.global_step
        super().optimizer_step(*args, **kwargs)
        if not exploring:
            self.keep_if_due(before)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """How hot the momenta are; T if steps are small and gradients exact."""
        trainer: Any = self.trainer
        sampler = trainer.optimizers[0]
        due = trainer.global_step % trainer.log_every_n_steps == 0
        if due and isinstance(sampler, samplers.SGHMC) and sampler.state:
            self.log("train/kinetic_temperature", sampler.kinetic_temperature())

    def on_fit_start(self) -> None:
        """Cycles are counted in steps."""
        cyclical = any(isinstance(c.scheduler, CyclicalSchedule) for c in self._schedules())
        if cyclical and self.lr_interval == "epoch":
            rank_zero_warn(
                "CyclicalSchedule counts steps, but is called once in an epoch: pass "
                "`lr_interval='step'`."
            )

    def _schedules(self) -> list[Any]:
        return self.trainer.lr_scheduler_configs

    def _exploring(self) -> bool:
        schedules = (config.scheduler for config in self._schedules())
        return any(isinstance(s, CyclicalSchedule) and not s.sampling for s in schedules)
