"""Small problems with many training sets side by side, and their posteriors by long chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn import samplers
from lightning_bnn.likelihoods import Categorical, Gaussian, Likelihood
from lightning_bnn.methods import HMC, Batch, Fit, Run
from lightning_bnn.metrics.chains import effective_sample_size, rhat
from lightning_bnn.models import mlp
from lightning_bnn.params import Params
from lightning_bnn.randomness import keyed_generator

__all__ = ["Chains", "Examples", "Problem", "log_score", "sampled"]

Task = Literal["sine", "moons"]
Activation = Literal["tanh", "relu"]
Examples = tuple[Tensor, Tensor]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
_HELD_OUT, _WATCHED, _MAP_STEPS = 500, 50, 300


@dataclass(frozen=True)
class Problem:
    """A perceptron of one hidden layer on noisy values of a sine, or on two moons.

    Attributes:
        width: of the hidden layer.
        prior_std: of every weight.
        noise: standard deviation of the targets, which is known; of the moons' points.
        examples: of every training set.
        task: what is learned.
        activation: of the hidden layer.
    """

    width: int = 10
    prior_std: float = 1.0
    noise: float = 0.3
    examples: int = 40
    task: Task = "sine"
    activation: Activation = "tanh"

    @property
    def name(self) -> str:
        """What its files are called by."""
        numbers = f"{self.width}_{self.prior_std:g}_{self.noise:g}_{self.examples}"
        return f"{self.task}_{self.activation}_{numbers}"

    def network(self) -> nn.Sequential:
        """A new perceptron with random weights."""
        ends = (1, 1) if self.task == "sine" else (2, 2)
        return mlp(ends[0], [self.width], ends[1], _ACTIVATIONS[self.activation])

    def likelihood(self) -> Likelihood:
        """What outputs say about the targets."""
        return Gaussian(std=self.noise) if self.task == "sine" else Categorical()

    def run(self, network: nn.Module) -> Run:
        """What runs networks of this problem."""
        return Run(network, self.likelihood(), self.examples, warn=_ignore, inform=_ignore)

    def training_sets(self, seeds: Sequence[int], times: int = 1) -> Batch:
        """One training set for each seed, and the same again for the next members of a stack."""
        sets = [self._points(self.examples, "train", seed) for seed in seeds]
        x, y = (torch.stack(part).repeat_interleave(times, 0) for part in zip(*sets, strict=True))
        return Batch((x,), y, per_member=True)

    def held_out(self, name: str) -> Examples:
        """Examples that no seed trains on, the same for all.

        Args:
            name: of the set.
        """
        return self._points(_HELD_OUT, name)

    def starts(self, seeds: Sequence[int], times: int) -> Params:
        """Some networks for each seed, where members start."""
        stacks = [
            P.populate(self.network(), times, keyed_generator("symmetrization", "start", seed))
            for seed in seeds
        ]
        return {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}

    def _points(self, count: int, *key: int | str) -> Examples:
        generator = keyed_generator("symmetrization", self.task, *key)
        places = torch.rand(count, 1, generator=generator)
        noise = self.noise * torch.randn(count, 2, generator=generator)
        if self.task == "sine":
            x = 4 * places - 2
            return x, (2 * x).sin() + noise[:, :1]
        y = torch.arange(count) % 2
        angle, upper = math.pi * places[:, 0], y == 0
        across = torch.where(upper, angle.cos() - 0.5, 0.5 - angle.cos())
        up = torch.where(upper, angle.sin() - 0.25, 0.25 - angle.sin())
        return torch.stack([across, up], 1) + noise, y


def _ignore(message: str) -> None:
    """What is known of such small runs is no news."""


def log_score(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-density of targets under mixtures of networks, ``(mixtures,)``.

    Args:
        likelihood: of the targets.
        outputs: ``(networks, mixtures, examples, ...)``.
        targets: of the examples.
    """
    logs = likelihood.log_prob(outputs, targets).double()
    return math.log(len(logs)) - logs.logsumexp(0).mean(-1)


class Chains(NamedTuple):
    """Draws of the posterior of every seed.

    Attributes:
        networks: ``(seeds, chains, draws, ...)``.
        nll: on the test set, of all draws of a seed.
        rhat: of predictions, largest over test points.
        least: effective draws of the worst test point.
    """

    networks: Params
    nll: Tensor
    rhat: Tensor
    least: Tensor


def sampled(
    problem: Problem, seeds: Sequence[int], chains: int, transitions: int, leapfrogs: int
) -> Chains:
    """Hamiltonian Monte Carlo for all training sets side by side.

    Chains start at maxima of the posterior that Adam has found from weights of their own. The first
    third of the transitions adapts the step size and is left out.

    Args:
        problem: whose posterior.
        seeds: of the training sets.
        chains: for each of them.
        transitions: of every chain; every second one that counts is kept.
        leapfrogs: gradients of a transition.
    """
    method, network = HMC(problem.prior_std), problem.network()
    run, data = problem.run(network), problem.training_sets(seeds, chains)
    state = method.init(network, problem.starts([seed + 10_000 for seed in seeds], chains))
    method.begin(state, Fit(batches=lambda: [data]), run)
    weights = list(state.parameters())
    adam = torch.optim.Adam(weights, 0.02)
    for _ in range(min(_MAP_STEPS, transitions)):
        method.energies(state, run)
        adam.step()
    adapting = transitions // 3
    sampler = samplers.HMC(weights, 0.01, leapfrogs, adapt_steps=adapting, jitter=0.5, seed=0)
    kept = []
    for step in range(transitions):
        method.step(state, run, sampler.step)
        if step >= adapting and step % 2:
            kept.append({name: t.clone() for name, t in state.stack().items()})
    stack = {
        n: torch.stack([one[n] for one in kept], 1).unflatten(0, (-1, chains)) for n in kept[0]
    }
    return _judged(problem, network.eval(), stack)


@torch.no_grad()
def _judged(problem: Problem, network: nn.Module, stack: Params) -> Chains:
    """Scores and convergence of every seed's chains."""
    x, y = problem.held_out("test")
    first = next(iter(stack.values()))
    seeds, (chains, draws) = len(first), first.shape[1:3]
    scores, watched = [], []
    for seed in range(seeds):  # one after the other: predictions of all would not fit a cache
        outputs = P.apply(network, {n: t[seed].flatten(0, 1) for n, t in stack.items()}, x)
        scores.append(log_score(problem.likelihood(), outputs[:, None], y)[0])
        values = outputs[:, :_WATCHED]
        value = values[..., 0] - (values[..., 1] if problem.task == "moons" else 0)
        watched.append(value.unflatten(0, (chains, draws)))
    numbers = torch.cat(watched, -1).double()
    reduction, size = (f(numbers).view(seeds, -1) for f in (rhat, effective_sample_size))
    return Chains(stack, torch.stack(scores), reduction.amax(1), size.amin(1))
