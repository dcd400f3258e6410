"""Predictions of modes, and every number that is a function of their averages.

The average over the networks of a mode, and their mean entropy, are all that the tables need; so
the numbers of one mode, of all, and of all but one (the jackknife) come from one pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import metrics as M
from lightning_bnn import params as P
from lightning_bnn.comparison.tables import Measured
from lightning_bnn.likelihoods import Bernoulli, Categorical
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical, Posterior, Predictor
from lightning_bnn.randomness import keyed_generator, keyed_randomness

__all__ = [
    "Averages",
    "bootstrap",
    "drawn",
    "jackknife",
    "predict_mode",
    "probabilities",
    "qualities",
]


@dataclass(frozen=True)
class Averages:
    """Predictions on one data set, averaged over networks.

    Attributes:
        probs: ``(..., examples, classes)``.
        entropy: mean entropy of the networks, ``(..., examples)``, in nats.
    """

    probs: Tensor
    entropy: Tensor

    def __getitem__(self, which: Any) -> Averages:
        return Averages(self.probs[which], self.entropy[which])

    def mean(self) -> Averages:
        """Over the first dimension."""
        return Averages(self.probs.mean(0), self.entropy.mean(0))

    def information(self) -> Tensor:
        """What the networks disagree about, per example."""
        return torch.special.entr(self.probs).sum(-1) - self.entropy

    @classmethod
    def stacked(cls, parts: Sequence[Averages]) -> Averages:
        """Several, along a new first dimension."""
        return cls(torch.stack([p.probs for p in parts]), torch.stack([p.entropy for p in parts]))


def probabilities(likelihood: nn.Module, outputs: Tensor) -> Tensor | None:
    """Of classes, ``(..., batch, classes)``; None where outputs are something else."""
    if isinstance(likelihood, Categorical):
        return outputs.double().softmax(-1)
    if isinstance(likelihood, Bernoulli):
        logit = outputs.double()
        return torch.cat([torch.zeros_like(logit), logit], -1).softmax(-1)
    return None


def drawn(mode: Posterior, count: int, *key: int) -> Params:
    """Networks of a mode; of networks, as many as there are. The same key draws the same."""
    count = min(count, mode.size) if isinstance(mode, Empirical) else count
    return {n: t.detach() for n, t in mode.sample(count, keyed_generator(*key, "drawn")).items()}


@torch.no_grad()
def predict_mode(
    mode: Posterior,
    model: nn.Module,
    likelihood: nn.Module,
    sets: Sequence[Iterable[tuple[Any, Tensor]]],
    counts: Sequence[int],
    *key: int,
    device: str = "cpu",
) -> list[list[Averages]]:
    """Averages over the first so many networks of a mode.

    Args:
        mode: draws networks, or predicts in a way of its own.
        model: gives the computation; it is left where it is.
        likelihood: what outputs say about classes.
        sets: batches of inputs and targets as networks take them.
        counts: numbers of networks.
        *key: of the draws.
        device: where it is computed.

    Returns:
        For every data set, for every count.
    """
    model, mode = copy.deepcopy(model).to(device).eval(), mode.to(device)
    run = _predictor(mode, max(counts), *key)
    found = []
    for which, batches in enumerate(sets):
        parts: list[list[Averages]] = []
        for index, (inputs, _) in enumerate(batches):
            with keyed_randomness(*key, "predict", which, index, device=device):
                outputs = run(model, inputs.to(device)).cpu()
            probs = probabilities(likelihood, outputs)
            assert probs is not None
            entropy = torch.special.entr(probs).sum(-1)
            parts.append([Averages(probs[:n], entropy[:n]).mean() for n in counts])
        found.append([_joined(of_count) for of_count in zip(*parts, strict=True)])
    mode.to("cpu")
    return found


def _predictor(mode: Posterior, count: int, *key: int) -> Predictor:
    """Networks are drawn in random order, so that the first few are like all."""
    if isinstance(mode, Empirical):
        networks = drawn(mode, count, *key)
        return lambda model, *x: P.apply(model, networks, *x)
    return mode.predictor(count, keyed_generator(*key, "drawn"))


def _joined(parts: Sequence[Averages]) -> Averages:
    return Averages(torch.cat([p.probs for p in parts]), torch.cat([p.entropy for p in parts]))


# ------------------------------------------------------------ numbers
SCORES: dict[str, Callable[[Averages], Tensor]] = {
    "max_probability": lambda p: M.max_probability_score(p.probs),
    "entropy": lambda p: M.entropy_score(p.probs),
    "mutual_information": lambda p: p.information(),
}
"""What out-of-distribution examples are detected by."""


def qualities(
    inside: Averages,
    labels: Tensor,
    outside: Averages | None = None,
    score: str = "max_probability",
) -> dict[str, float]:
    """Every number of the tables, as fractions and nats.

    Args:
        inside: predictions in distribution.
        labels: their classes.
        outside: predictions out of distribution.
        score: see `SCORES`.
    """
    probs = inside.probs
    found = {
        "acc": (probs.argmax(-1) == labels).double().mean(),
        "ece": M.ece(probs, labels),
        "ace": M.ace(probs, labels),
        "brier": M.brier_score(probs, labels),
        "nll": M.nll(probs, labels),
        "idmi": inside.information().mean(),
    }
    if outside is not None:
        scores = torch.cat([SCORES[score](inside), SCORES[score](outside)])
        is_ood = torch.arange(len(scores)) >= len(labels)
        found |= {
            "aupr": M.aupr(scores, is_ood),
            "fpr95": M.fpr95(scores, is_ood),
            "auroc": M.auroc(scores, is_ood),
            "oodmi": outside.information().mean(),
        }
    return {name: float(value) for name, value in found.items()}


# ------------------------------------------------------------ errors
def jackknife(
    whole: Mapping[str, float], left: Sequence[Mapping[str, float]]
) -> dict[str, Measured]:
    r"""Numbers of all parts, with standard errors from leaving out one at a time.

    .. math:: s^2 = \frac{K - 1}{K} \sum_k (\theta_{-k} - \bar\theta)^2

    Args:
        whole: numbers of all parts.
        left: the numbers that are left without each of them; without any there are no errors.

    >>> found = jackknife({"mean": 3.0}, [{"mean": 4.0}, {"mean": 3.5}, {"mean": 1.5}])
    >>> round(found["mean"].error, 6)
    1.527525
    """
    return {
        name: Measured(number, _jackknife_error([found[name] for found in left]))
        for name, number in whole.items()
    }


def _jackknife_error(values: Sequence[float]) -> float:
    if not values:
        return math.nan
    t = torch.tensor(values, dtype=torch.float64)
    return float(((len(t) - 1) / len(t) * (t - t.mean()).square().sum()).sqrt())


def bootstrap(
    sizes: Sequence[int],
    value: Callable[..., dict[str, float]],
    repeats: int = 50,
    seed: int = 0,
) -> dict[str, Measured]:
    """A number of all examples, with its standard deviation over examples drawn again.

    Args:
        sizes: of the data sets.
        value: the numbers, given indices of examples of every data set.
        repeats: how often examples are drawn.
        seed: of the draws.
    """
    generator = keyed_generator(seed, "bootstrap")
    whole = value(*(torch.arange(n) for n in sizes))
    drawn = [
        value(*(torch.randint(n, (n,), generator=generator) for n in sizes)) for _ in range(repeats)
    ]
    return {
        name: Measured(number, float(torch.tensor([found[name] for found in drawn]).std()))
        for name, number in whole.items()
    }
