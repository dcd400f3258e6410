r"""Microcanonical Langevin ensembles: chains that start from trained networks, with all the data.

References:
    | Microcanonical Langevin Ensembles: Advancing the Sampling of Bayesian Neural Networks
    | (Sommer et al., 2025), https://arxiv.org/abs/2502.06335
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_bnn import samplers
from lightning_bnn.harvest import Schedule
from lightning_bnn.methods.all_data import AllDataChains, AllDataSampling
from lightning_bnn.methods.chains import Keeping
from lightning_bnn.methods.method import Fit, Progress
from lightning_bnn.methods.run import Run
from lightning_bnn.params import Params

__all__ = ["MILE", "MicrocanonicalChains"]

_MOST = 10
"""Times the wanted variance of energy errors, above which the user is warned."""


class MicrocanonicalChains(AllDataChains):
    """Chains, and how large the energy errors of their steps have been.

    Attributes:
        variances: of the energy errors over the number of weights; NaN while the steps adapt.
        failed: steps of every chain that were undone, as something was not finite.
        wanted: the variance that was asked for.
        adapting: transitions that are no draws.
    """

    def start_counting(self) -> None:
        super().start_counting()
        self.variances = torch.full((self.count,), torch.nan, dtype=torch.float64)
        self.failed = torch.zeros(self.count, dtype=torch.float64)
        self.wanted, self.adapting = torch.inf, 0


@dataclass(eq=False)
class MILE(AllDataSampling):
    r"""Samples of the posterior, off by as much as the energy errors of the steps vary.

    .. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

    Every step is one transition of `lightning_bnn.samplers.MCLMC`, which first descends to where
    each chain starts, if it is told to; see `AllDataSampling`.

    >>> import torch
    >>> from lightning_bnn import methods, params, samplers
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [4], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method = methods.MILE(keeping=methods.Keeping(burn_in=2))
    >>> run, batch = methods.Run(net, num_data=50), methods.Batch((x,), y)
    >>> state = method.init(net, params.populate(net, members=2))
    >>> sampler = samplers.MCLMC(state.parameters(), steps=2, descent_steps=1, adapt_steps=1)
    >>> method.before_fit(state, methods.Fit(optimizer=sampler, batches=lambda: [batch]), run)
    >>> for step in range(5):
    ...     energies = method.transition(state, run, sampler.step)["energy"]
    ...     kept = method.after_step(state, methods.Progress(step + 1, step, True, sampler), run)
    >>> method.posterior(state, run).size  # two chains, kept three times after the burn-in
    6
    """

    keeping: Keeping = field(default_factory=partial(Keeping, burn_in=300))

    sampler = samplers.MCLMC

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keeping.every_n_epochs is None:  # a transition is a draw
            self.keeping = replace(self.keeping, every_n_steps=self.keeping.every_n_steps or 1)

    def chains(self, network: nn.Module, stack: Params) -> MicrocanonicalChains:
        return MicrocanonicalChains(network, stack, self.keeping)

    def before_fit(self, state: Any, fit: Fit, run: Run) -> None:
        super().before_fit(state, fit, run)
        for group in fit.optimizer.param_groups:
            if fit.trial:
                group["steps"] = 1
            state.wanted = group["energy_variance"]
            state.adapting = group["descent_steps"] + group["adapt_steps"]
        if not fit.trial:
            _explain_early_draws(self.keeping.schedule, fit, state.adapting, run)

    def after_step(self, state: Any, progress: Progress, run: Run) -> bool:
        if progress.optimizer.step_sizes.numel():
            state.variances = progress.optimizer.energy_variances
            state.failed = progress.optimizer.failed_steps
        return super().after_step(state, progress, run)

    def after_fit(self, state: Any, run: Run) -> None:
        super().after_fit(state, run)
        rough = (state.variances > _MOST * state.wanted).nonzero().flatten().tolist()
        if rough:
            worst = float(state.variances[rough].max())
            run.warn(
                f"The energy errors of chains {rough} of {state.count} vary by up to {worst:.2g}, "
                f"more than {_MOST} times what was asked for ({state.wanted:.2g}), and so do their "
                "laws differ from the posterior: take a smaller `energy_variance`, or confirm "
                "the draws by HMC."
            )
        failed = (state.failed > 0).nonzero().flatten().tolist()
        if failed:
            run.warn(
                f"Chains {failed} of {state.count} have left the finite numbers while sampling, "
                f"{int(state.failed.sum())} times in all; these steps were undone."
            )


def _explain_early_draws(schedule: Schedule, fit: Fit, adapting: int, run: Run) -> None:
    """Networks that are kept too early are no draws."""
    by_steps = schedule.every_n_steps is not None
    first = schedule.start if by_steps else schedule.start * fit.epoch_steps
    if first <= adapting:
        run.warn(
            f"MILE keeps networks from step {first:.0f} on, but the first {adapting} steps descend "
            "and adapt, and give no draws of the posterior: take a larger `burn_in`."
        )
