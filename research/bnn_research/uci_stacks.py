"""Regression on many splits of a table at once: a stack of members with different data.

The width of the prior is an input of the network, so that members may differ in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bnn.calibration.calibrators import joint_log_prob
from lightning_bnn.datamodules import UCI
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.methods import Batch, Fit, Method, Progress, Purpose, Run
from lightning_bnn.methods.health import Diverged
from lightning_bnn.posteriors import Posterior
from weightsym import params as P
from weightsym.params import Params, keyed_generator

_LIKELIHOOD = Gaussian("heteroscedastic")
_NOISE = -2.0, 3.0
"""Centre and width of the prior over the noise, before the softplus, in units of the targets."""
_HELD_OUT = 0.2
"""Fraction of the training rows for the choice of settings."""


# ------------------------------------------------------------ data
class Split(NamedTuple):
    """One split of a table, standardised by its training rows.

    Attributes:
        number: index of the split.
        train, val, test: inputs and targets.
        target_std: factor from standardised errors to the unit of the target.
    """

    number: int
    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    target_std: float

    def retrained(self) -> Split:
        """Return the split with all its training rows for training, and none for choices."""
        x, y = (torch.cat(pair) for pair in zip(self.train, self.val, strict=True))
        return self._replace(train=(x, y), val=(x[:0], y[:0]))


def read_splits(table: str, root: str | None, count: int | None = None) -> list[Split]:
    """Read the splits of a table, with a fifth of the training rows held out.

    Args:
        table: name of its folder.
        root: folder of the tables.
        count: number of splits, from the first one; by default all published ones, or 20.
    """
    first = UCI(table, root)
    published = len(list(first.folder.glob("index_train_*.txt")))
    if published and count is not None and count > published:
        raise ValueError(f"`splits` must be at most {published} for {table}, got {count}.")
    held_out = max(1, int(_HELD_OUT * len(first.load().train[0])))
    splits = []
    for number in range(count or published or 20):
        data = UCI(table, root, split=number, val_size=held_out)
        loaded, std = data.load(), data.target_std
        assert loaded.val is not None and std is not None  # noqa: PT018
        splits.append(Split(number, loaded.train, loaded.val, loaded.test, float(std)))
    if len({len(split.train[0]) for split in splits}) > 1:
        raise ValueError(f"`tables`: all splits of {table} must have as many training rows.")
    return splits


class Candidate(NamedTuple):
    """A split and a width of the prior."""

    split: Split
    width: float


class _Rows(NamedTuple):
    """The training rows of all members, and the indices of their splits."""

    inputs: Tensor
    scales: Tensor
    targets: Tensor
    numbers: list[int]

    @classmethod
    def of(cls, candidates: Sequence[Candidate], members: int) -> _Rows:
        """Return the rows of some candidates, each with a number of members."""
        each = [candidate for candidate in candidates for _ in range(members)]
        inputs, targets = (torch.stack([c.split.train[k] for c in each]) for k in (0, 1))
        scales = torch.tensor([c.width for c in each])[:, None, None].expand(-1, inputs.shape[1], 1)
        return cls(inputs, scales, targets, [c.split.number for c in each])

    def whole(self) -> Batch:
        """Return all examples of every member."""
        return Batch((self.inputs, self.scales), self.targets, True)

    def epoch(self, size: int, epoch: int) -> Iterator[Batch]:
        """Yield batches in an order of the split that does not depend on other splits."""
        count, here = self.inputs.shape[1], torch.arange(len(self.numbers))[:, None]
        orders = {
            number: torch.randperm(count, generator=keyed_generator("uci", number, epoch))
            for number in set(self.numbers)
        }
        order = torch.stack([orders[number] for number in self.numbers])
        for number, rows in enumerate(order.split(size, 1)):
            inputs = self.inputs[here, rows], self.scales[:, : rows.shape[1]]
            yield Batch(inputs, self.targets[here, rows], True, number)


# ------------------------------------------------------------ what is trained
class ScaledMLP(nn.Module):
    r"""One hidden layer and a noise. Standard normal weights are prior draws of any width.

    .. math:: f(x) = \frac{s}{\sqrt{H}} \big(W_2\, \mathrm{relu}(s (W_1 x + b_1)) + b_2\big)

    Args:
        inputs: number of features.
        width: H, of the hidden layer.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, 1)
        self.noise = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        """Let the noise start from the centre of its prior."""
        nn.init.zeros_(self.noise)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """Means and raw scales of the noise, given inputs and s, one for each row."""
        hidden = torch.relu(self.first(x) * scale)
        means = self.last(hidden) * (scale / math.sqrt(self.last.in_features))
        noise = _NOISE[0] + _NOISE[1] * self.noise
        return torch.cat([means, noise.expand_as(means)], -1)


@dataclass(frozen=True)
class Budget:
    """The length of all runs.

    Attributes:
        steps: number of gradient steps with batches.
        batch_size: number of examples per batch.
        transitions: number of transitions of samplers with all the data.
        draws: number of networks that predict.
    """

    steps: int
    batch_size: int
    transitions: int
    draws: int


@dataclass(frozen=True)
class Contestant:
    """A method, and its training.

    Attributes:
        title: of the method in tables.
        method: function that makes it, given a setting and the number of epochs (or of
            transitions).
        optimizer: makes what moves the parameters, given these, a setting, that number, and the
            number of training rows; by default Adam.
        settings: candidates, besides widths of the prior.
        members: number of networks per candidate.
        network: adapts the network to the method, given a setting.
        plateau: last fraction of the run, in which the rate has fallen to `floor`.
        floor: final rate, as a fraction of the first.
        warm_start: whether it starts from posterior modes.
        full_batch: whether every step is a transition with the gradients of all the data.
        longer: factor of the number of steps with batches.
    """

    title: str
    method: Callable[[Any, int], Method]
    optimizer: Callable[..., torch.optim.Optimizer] = lambda p, *_: torch.optim.Adam(p, 0.02)
    settings: Sequence[Any] = (None,)
    members: int = 1
    network: Callable[[nn.Module, Any], nn.Module] = lambda network, _: network
    plateau: float = 0.0
    floor: float = 0.0
    warm_start: bool = False
    full_batch: bool = False
    longer: int = 1

    def rate(self, progress: float) -> float:
        """Return the fraction of the first learning rate: a cosine, then a plateau."""
        done = min(1.0, progress / (1 - self.plateau))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2


class Predictions(NamedTuple):
    """Means and standard deviations of networks, ``(networks, rows)``, beside the targets."""

    means: Tensor
    stds: Tensor
    targets: Tensor


class Fitted(NamedTuple):
    """Trained candidates.

    Attributes:
        network: gives the computation.
        candidates: splits and widths of the prior.
        stack: the members.
        modes: posteriors of the members of every candidate, without those that have diverged.
    """

    network: nn.Module
    candidates: Sequence[Candidate]
    stack: Params
    modes: list[list[Posterior]]

    def predict(self, k: int, examples: tuple[Tensor, Tensor], draws: int) -> Predictions:
        """Predict with equally many networks of all modes of a candidate, without NaN.

        Args:
            k: index of the candidate.
            examples: inputs and targets.
            draws: total number of networks.
        """
        (split, width), modes, (inputs, targets) = self.candidates[k], self.modes[k], examples
        x = inputs, torch.full((len(inputs), 1), width)
        generator = keyed_generator("uci predictions", split.number)
        each = max(1, draws // max(1, len(modes)))
        with torch.no_grad():
            outputs = [
                mode.predict(self.network, x, min(each, getattr(mode, "size", each)), generator)
                for mode in modes
            ] or [torch.full((1, len(inputs), 2), math.nan)]
            means, stds = _LIKELIHOOD.moments(torch.cat(outputs).double())
        return Predictions(means[..., 0], stds[..., 0], targets[:, 0].double())


def fitted(
    contestant: Contestant, setting: Any, candidates: Sequence[Candidate], width: int,
    budget: Budget, start: Params | None = None,
) -> Fitted:  # fmt: skip
    """Train all members of all candidates side by side.

    Args:
        contestant: the method.
        setting: one of its settings.
        candidates: splits and widths of the prior.
        width: of the hidden layer.
        budget: of the run.
        start: initial network for each candidate; by default drawn ones, which depend on the split
            only.
    """
    members = contestant.members
    if len(candidates) * members == 1:
        return _first_of_two(contestant, setting, candidates, width, budget, start)
    rows = _Rows.of(candidates, members)
    network = contestant.network(ScaledMLP(rows.inputs.shape[2], width), setting)
    run = Run(
        network, _LIKELIHOOD, rows.inputs.shape[1], len(rows.inputs),
        warn=lambda _: None, rows=rows.whole().example(),
    )  # fmt: skip
    if start is None:
        keys = [keyed_generator("uci start", split.number) for split, _ in candidates]
        drawn = [P.populate(network, members, key) for key in keys]
        stack = {name: torch.cat([part[name] for part in drawn]) for name in drawn[0]}
    else:
        stack = {name: t.repeat_interleave(members, 0) for name, t in start.items()}
    modes: list[list[Posterior]] = [[] for _ in candidates]
    with torch.random.fork_rng(), suppress(Diverged):
        torch.manual_seed(0)
        method, state = _trained(contestant, setting, run, rows, stack, budget)
        for member, mode in _modes(method, state, run, rows):
            modes[member // members].append(mode)
    return Fitted(network.eval(), candidates, state.stack(), modes)


def _first_of_two(
    contestant: Contestant, setting: Any, candidates: Sequence[Candidate], width: int,
    budget: Budget, start: Params | None,
) -> Fitted:  # fmt: skip
    """Train one network like any other: a stack of one is computed and rounded differently.

    Training amplifies a rounding error: the log-likelihood of a split moves by tenths.
    """
    starts = start and {name: t.repeat_interleave(2, 0) for name, t in start.items()}
    two = fitted(contestant, setting, [*candidates] * 2, width, budget, starts)
    stack = {name: t[:1] for name, t in two.stack.items()}
    return Fitted(two.network, candidates, stack, two.modes[:1])


def _trained(
    contestant: Contestant, setting: Any, run: Run, rows: _Rows, stack: Params, budget: Budget
) -> tuple[Method, Any]:
    """Train a stack, with batches or by transitions of all the data."""
    full, count = contestant.full_batch, rows.inputs.shape[1]
    of_epoch = 1 if full else -(-count // budget.batch_size)
    length = budget.transitions if full else -(-contestant.longer * budget.steps // of_epoch)
    method: Any = contestant.method(setting, length)
    state = method.init(run.network, stack)
    parameters = [p for p in state.parameters() if p.requires_grad]
    optimizer = contestant.optimizer(parameters, setting, length, count)
    method.configure_optimizer(state, optimizer, run, None, length)
    steps, whole = length * of_epoch, [rows.whole()]
    run.network.train()
    fit = Fit(steps=steps, epochs=length, optimizer=optimizer, batches=lambda: whole)
    method.before_fit(state, fit, run)
    rates, step = [group.get("lr", 0.0) for group in optimizer.param_groups], 0
    for epoch in range(length):
        for batch in whole if full else rows.epoch(budget.batch_size, epoch):
            if full:
                method.transition(state, run, optimizer.step)
            else:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * contestant.rate(step / steps)
                optimizer.zero_grad()
                method.losses(state, batch, run)["loss"].sum().backward()
                optimizer.step()
            step += 1
            method.after_step(state, Progress(step, epoch, step % of_epoch == 0, optimizer), run)
    method.after_fit(state, run)
    return method, state


def _modes(method: Method, state: Any, run: Run, rows: _Rows) -> Iterator[tuple[int, Posterior]]:
    """Return the posterior of every healthy member, with full-data computations one by one."""
    run.network.eval()
    purpose = Purpose(predicts=True)
    healthy = state.healthy().tolist()
    if not state.lacks:
        yield from zip(healthy, method.posterior(state, run, purpose).modes(), strict=True)
        return
    for member in healthy:
        one = {name: t[member : member + 1] for name, t in state.stack().items()}
        alone, data = method.init(run.network, one), rows.whole().of(member)
        method.at_end(alone, [Batch(data.inputs, data.targets)], run)
        yield member, method.posterior(alone, run, purpose)


# ------------------------------------------------------------ scores
def log_densities(predictions: Predictions, factor: float = 1.0) -> Tensor:
    r"""Return log-densities of every target in the mixture of all networks, in standardised units.

    .. math:: \log \frac1S \sum_s N\big(y; \mu_s, (c\, \sigma_s)^2\big)

    Args:
        predictions: of the networks.
        factor: c, of the noise.
    """
    means, stds, targets = predictions
    return joint_log_prob(means, factor * stds, targets)


def scores(predictions: Predictions, factor: float, target_std: float) -> tuple[float, float]:
    """Return root mean squared error and mean log-density in the units of the target.

    Args:
        predictions: in standardised units.
        factor: of the noise.
        target_std: size of a standardised unit.
    """
    errors = predictions.means.mean(0) - predictions.targets
    rmse = errors.square().mean().sqrt() * target_std
    return float(rmse), float(log_densities(predictions, factor).mean()) - math.log(target_std)
