"""SWAG: a Gaussian through the last networks of a training run at a high rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_bnn.harvest import Schedule
from lightning_bnn.methods.kept_networks import NetworksInMemory
from lightning_bnn.methods.method import AS_IT_IS, Fit, Progress, Purpose
from lightning_bnn.methods.networks import Networks, PenalisedTraining
from lightning_bnn.methods.run import Run
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors import LowRankGaussian, Posterior
from lightning_bnn.posteriors.empirical import mixture_of
from lightning_bnn.samplers.cyclical import interval_of
from weightsym import params as P
from weightsym.params import Params, check_count, check_not_negative, check_positive

__all__ = ["SWAG"]


class Moments(Networks):
    """Networks, and the mean, squared deviations and last values of their weights."""

    collected: Tensor

    def __init__(self, network: nn.Module, stack: Params, method: SWAG) -> None:
        super().__init__(network, stack, method.max_loss)
        trained = {n for n, p in network.named_parameters() if p.requires_grad}
        self.weights = [n for n in P.weight_names(network) if n in trained]
        zeros = {n: torch.zeros_like(stack[n]) for n in self.weights}
        self.mean, self.squares = NamedTensors(zeros), NamedTensors(zeros)
        for moment in (self.mean, self.squares):  # the same in all processes: not sent at each step
            moment.hold({n: t.clone() for n, t in zeros.items()})
        self.register_buffer("collected", torch.zeros((), dtype=torch.long))
        self.last, self.scale = NetworksInMemory(method.rank), method.scale
        self.notes["start"] = self.given_start = method.start

    def recall(self, notes: dict[str, Any]) -> None:
        """Restore the state, with the same start even if the resumed run is longer."""
        if self.given_start is None:
            super().recall(notes)

    @property
    def start(self) -> int | None:
        """The epoch after which weights are collected."""
        return self.notes["start"]

    @property
    def lacks(self) -> str:  # type: ignore[override]  # it changes
        """The part that is missing, a second collection of weights, or an empty string."""
        return "" if int(self.collected) >= 2 else "second collection of weights"

    @torch.no_grad()
    def collect(self) -> None:
        """Add the current weights to the moments."""
        stack = self.stack()
        self.collected += 1
        values = [stack[n] for n in self.weights]
        means, squares = (
            [moment.tensors()[n] for n in self.weights] for moment in (self.mean, self.squares)
        )
        before = torch._foreach_sub(values, means)
        torch._foreach_add_(means, before, alpha=1 / int(self.collected))
        torch._foreach_addcmul_(squares, before, torch._foreach_sub(values, means))
        self.last.append({n: stack[n] for n in self.weights})

    def forget(self) -> None:
        """Discard the moments before another run."""
        self.collected.zero_()
        for moment in (self.mean, self.squares):
            torch._foreach_zero_(list(moment.tensors().values()))
        self.last.forget()

    def modes(self) -> list[LowRankGaussian]:
        """Return the Gaussian of each healthy member."""
        means = P.unstack({**self.stack(), **self.mean.tensors()})
        times = int(self.collected)
        stds = P.unstack({n: (t / times).sqrt() for n, t in self.squares.tensors().items()})
        last = self.last.tensors()
        return [
            LowRankGaussian(
                means[m],
                stds[m],
                {name: t[:, m] - means[m][name] for name, t in last.items()},
                self.scale,
                self.weights,
            )
            for m in self.healthy().tolist()
        ]


@dataclass(eq=False)
class SWAG(PenalisedTraining):
    r"""A Gaussian with the mean, variances and last deviations of the weights during a run.

    .. math:: \omega = \bar\omega + \sqrt{s} \Big(\tfrac{1}{\sqrt 2} \sigma \odot z_1
        + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2\Big)

    One :math:`z_2` moves all tensors. K is the number of stored deviations, which are taken from
    the final mean. With several members, the posterior is a mixture of as many runs. During
    training, validation evaluates the members themselves. Afterwards networks are drawn, and get
    BatchNorm statistics from one pass over the training data.

    Args:
        start: epoch after which weights are collected and the rate rises; by default half of the
            run.
        every_n_epochs: number of epochs between two collections.
        swa_lr: the high learning rate; by default the user's schedule continues, and should end at
            a rate at which the weights still move.
        ramp: number of epochs until the high rate is reached.
        rank: number of deviations to store.
        scale: factor of the covariance. 1 is the paper's, and 2 s is what its code calls s.

    References:
        | A Simple Baseline for Bayesian Uncertainty in Deep Learning (Maddox et al., 2019)
        | https://arxiv.org/abs/1902.02476

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net = mlp(2, [8], 2)
    >>> method, run = methods.SWAG(start=0), methods.Run(net)
    >>> state = method.init(net, params.populate(net, members=1))
    >>> for epoch in range(2):  # all weights are 1, then 3
    ...     _ = [p.data.fill_(2.0 * epoch + 1) for p in state.parameters()]
    ...     due = method.after_step(state, methods.Progress(epoch + 1, epoch, True), run)
    >>> posterior = method.posterior(state, run)
    >>> posterior.mean.unique(), posterior.std.unique(), posterior.deviations.unique()
    (tensor([2.]), tensor([1.]), tensor([-1.,  1.]))
    """

    start: int | None = None
    every_n_epochs: int = 1
    swa_lr: float | None = None
    ramp: int = 5
    rank: int = 20
    scale: float = 1.0

    refreshes_statistics = True
    keeps_networks = True
    unfitted = "its members are evaluated themselves, without Gaussians"

    def __post_init__(self) -> None:
        check_count("start", self.start, 0, optional=True)
        check_count("ramp", self.ramp, 0)
        check_count("rank", self.rank, 2)
        check_not_negative("scale", self.scale)
        check_positive("swa_lr", self.swa_lr, optional=True)
        Schedule(every_n_epochs=self.every_n_epochs)
        super().__post_init__()

    def init(self, network: nn.Module, stack: Params) -> Moments:
        return Moments(network, stack, self)

    # ------------------------------------------------------------ the run
    def configure_optimizer(
        self,
        state: Moments,
        optimizer: Any,
        run: Run,
        scheduler: Any = None,
        epochs: int | float = math.inf,
        resumed: bool = False,
    ) -> Any:
        super().configure_optimizer(state, optimizer, run)
        if self.start is None and not (resumed and state.start is not None):
            if math.isinf(epochs):
                raise ValueError("`start` must be set, since the run has no last epoch.")
            state.notes["start"] = int(epochs) // 2
        if self.swa_lr is None:
            return scheduler
        assert state.start is not None
        return HighRate(optimizer, self.swa_lr, state.start, self.ramp, scheduler)

    def schedule(self, state: Moments) -> Schedule:
        """Return the epochs after which weights are collected."""
        return Schedule(every_n_epochs=self.every_n_epochs, start=(state.start or 0) + 1)

    def before_fit(self, state: Moments, fit: Fit, run: Run) -> None:
        if self.schedule(state).count(fit.steps, fit.epochs) < 2:
            run.warn(
                "SWAG will collect weights fewer than twice: set an earlier `start`, or collect "
                "more often. Then the final members are evaluated."
            )
        if fit.anew:
            state.forget()

    def after_step(self, state: Moments, progress: Progress, run: Run) -> bool:
        due = progress.epoch_ends and self.schedule(state).after_epoch(progress.epoch + 1)
        if due:
            state.collect()
        return due

    # ------------------------------------------------------------ the posterior
    def posterior(self, state: Moments, run: Run, purpose: Purpose = AS_IT_IS) -> Posterior:
        if state.lacks or purpose.fitting:
            return state.members()
        return mixture_of(state.modes())


class HighRate(LRScheduler):
    """A schedule that follows another one up to some epoch, then ramps linearly to a high rate.

    Args:
        optimizer: its rates are set.
        rate: the high one.
        start: epoch at which the ramp starts.
        ramp: length of the ramp, in epochs.
        before: schedule of the earlier epochs; by default the rate is constant.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rate: float,
        start: int,
        ramp: int = 5,
        before: LRScheduler | None = None,
    ) -> None:
        of_steps = before is not None and interval_of(before) == "step"
        if of_steps or isinstance(before, ReduceLROnPlateau):
            raise ValueError(
                f"`lr_scheduler` {type(before).__name__} cannot precede the high rate of "
                "`swa_lr`: use one that counts epochs."
            )
        self.rate, self.begin, self.ramp, self.before = rate, start, ramp, before
        self.reached = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Return the rate of every parameter group in this epoch."""
        beyond = self.last_epoch - self.begin
        if beyond > 0:
            progress = min(1.0, beyond / max(1, self.ramp))
            return [lr + progress * (self.rate - lr) for lr in self.reached]
        if self.before is not None and self.last_epoch > 0:
            self.before.step()
        self.reached = [group["lr"] for group in self.optimizer.param_groups]
        return list(self.reached)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of the earlier schedule."""
        saved = {k: v for k, v in super().state_dict().items() if k != "before"}
        return {**saved, "before": None if self.before is None else self.before.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, with that of the earlier schedule."""
        state = dict(state_dict)
        before = state.pop("before")
        super().load_state_dict(state)
        if self.before is not None:
            self.before.load_state_dict(before)
