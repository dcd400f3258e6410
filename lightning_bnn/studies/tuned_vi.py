"""Variational inference from several starts and warm-ups side by side, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_bnn import params as P
from lightning_bnn.methods import MFVI, Fit, Progress, SymmetrizedVI
from lightning_bnn.params import Params
from lightning_bnn.randomness import keyed_generator, keyed_randomness
from lightning_bnn.studies.small_posteriors import Problem, log_score

__all__ = ["CRITERIA", "KINDS", "Choice", "Effort", "Fitted", "best", "fitted", "tuned"]

Kind = Literal["MFVI", "symmetrized"]
KINDS: tuple[Kind, ...] = ("MFVI", "symmetrized")
CRITERIA = ("validation", "objective", "bound")
_RATE, _NETWORKS, _DRAWS = 0.02, 100, 50


@dataclass(frozen=True)
class Effort:
    """How long and from where the Gaussians train.

    Attributes:
        steps: of Adam, each with all examples, at a rate that falls to zero.
        inits: runs for each training set.
        starts: standard deviations to begin with.
        warmups: parts of the steps in which the complexity terms rise from zero.
    """

    steps: int
    inits: int
    starts: Sequence[float]
    warmups: Sequence[float]


class Choice(NamedTuple):
    """A start and a warm-up."""

    start: float
    warmup: float


class Fitted(NamedTuple):
    """Numbers of every run, ``(seeds, inits)``, and networks drawn from it.

    Attributes:
        test: negative log-likelihood on the test set, of the mean of a hundred networks.
        validation: the same on the validation set.
        elbo: per example.
        bound: the ELBO of all permuted copies, by the capacity bound: a bound of the evidence, too.
        networks: ``(seeds, inits, draws, ...)``.
    """

    test: Tensor
    validation: Tensor
    elbo: Tensor
    bound: Tensor
    networks: Params

    def criterion(self, name: str, kind: Kind) -> Tensor:
        """What a choice minimises, of every run.

        Args:
            name: ``"validation"``, the objective of the method, or the bound of both.
            kind: whose objective it is.
        """
        if name == "validation":
            return self.validation
        return -(self.elbo if name == "objective" and kind == "MFVI" else self.bound)


def tuned(
    problem: Problem, kind: Kind, seeds: Sequence[int], effort: Effort
) -> dict[Choice, Fitted]:
    """All starts and warm-ups, the starts side by side.

    Args:
        problem: what is learned.
        kind: of inference.
        seeds: of the training sets.
        effort: of every run.
    """
    found: dict[Choice, Fitted] = {}
    for warmup in effort.warmups:
        choices = [Choice(start, warmup) for start in effort.starts]
        found |= fitted(problem, kind, seeds, choices, effort)
    return found


def best(found: Mapping[Choice, Fitted], criterion: str, kind: Kind) -> Choice:
    """The choice whose mean over runs is best.

    Args:
        found: what came of every choice.
        criterion: one of `CRITERIA`.
        kind: of inference.
    """
    means = {c: float(of.criterion(criterion, kind).mean()) for c, of in found.items()}
    return min(means, key=lambda choice: means[choice])


def fitted(
    problem: Problem, kind: Kind, seeds: Sequence[int], choices: Sequence[Choice], effort: Effort
) -> dict[Choice, Fitted]:
    """Train and judge some choices with the same warm-up, from the same networks, side by side.

    Args:
        problem: what is learned.
        kind: of inference.
        seeds: of the training sets.
        choices: where to start.
        effort: of every run.
    """
    (warmup,) = {choice.warmup for choice in choices}
    network, times = problem.network(), len(choices)
    gaussian = MFVI(problem.prior_std, kl_warmup=warmup * effort.steps)
    symmetrized = SymmetrizedVI(gaussian)
    method = gaussian if kind == "MFVI" else symmetrized
    stack = {n: t.repeat(times, *(1,) * (t.ndim - 1)) for n, t in _starts(problem, seeds, effort)}
    state = symmetrized.init(network, stack)
    runs = len(state.mean) // times
    starts = torch.tensor([choice.start for choice in choices]).log().repeat_interleave(runs)
    state.log_std.data.copy_(starts[:, None].expand_as(state.log_std))
    _train(method, state, problem, list(seeds) * times, effort)
    return _judged(problem, symmetrized, state, list(seeds) * times, choices, effort)


def _starts(problem: Problem, seeds: Sequence[int], effort: Effort) -> Any:
    return problem.starts(seeds, effort.inits).items()


def _train(method: Any, state: Any, problem: Problem, seeds: Sequence[int], effort: Effort) -> None:
    run = problem.run(problem.network())
    data = problem.training_sets(seeds, effort.inits)
    adam = torch.optim.Adam(state.parameters(), _RATE)
    falling = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 1 / effort.steps, effort.steps)
    fit = Fit(steps=effort.steps, epochs=effort.steps, epoch_steps=1, example=data.example())
    method.begin(state, fit, run)
    for step in range(effort.steps):
        with keyed_randomness("tuned VI", step):
            losses = method.losses(state, data, run)["loss"]
        adam.zero_grad()
        losses.sum().backward()
        adam.step()
        falling.step()
        method.after_step(state, Progress(step + 1, step, True, adam), run)


@torch.no_grad()
def _judged(
    problem: Problem,
    trained: SymmetrizedVI,
    state: Any,
    seeds: Sequence[int],
    choices: Sequence[Choice],
    effort: Effort,
) -> dict[Choice, Fitted]:
    """The same numbers for both kinds of inference, by the same random numbers."""
    network = problem.network().eval()
    run, data = problem.run(network), problem.training_sets(seeds, effort.inits)
    state.notes["kl_share"] = 1.0
    judge = SymmetrizedVI(MFVI(problem.prior_std, elbo_samples=_DRAWS), estimator="capacity")
    with keyed_randomness("tuned VI", "judged"):
        terms = judge.losses(state, data, run)
    modes = [
        mode.sample(_NETWORKS, keyed_generator("tuned VI", "networks", k))
        for k, mode in enumerate(state.modes())
    ]
    networks = {n: torch.stack([mode[n] for mode in modes], 1) for n in modes[0]}
    flat = {n: t.flatten(0, 1) for n, t in networks.items()}
    scores = []
    for name in ("test", "validation"):
        x, y = problem.held_out(name)
        outputs = P.apply(network, flat, x).unflatten(0, (_NETWORKS, -1))
        scores.append(log_score(problem.likelihood(), outputs, y))
    information = terms["permutation_info"].clamp(min=0)  # where its bound says less, zero is one
    bounds = [t / problem.examples for t in (terms["elbo"], terms["elbo"] + information)]
    shape = (len(choices), -1, effort.inits)
    numbers = [t.double().reshape(shape) for t in (*scores, *bounds)]
    few = {n: t[:20].transpose(0, 1).unflatten(0, shape) for n, t in networks.items()}
    test, validation, elbo, bound = numbers
    return {
        choice: Fitted(test[k], validation[k], elbo[k], bound[k], {n: t[k] for n, t in few.items()})
        for k, choice in enumerate(choices)
    }
