"""Predictions of modes, and every number that is a function of their averages.

The average over the networks of a mode, and their mean entropy, are all that the tables need; so
the numbers of one mode, of all, and of all but one (the jackknife) come from one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import metrics as M
from lightning_bnn.posteriors import Empirical, Posterior
from lightning_bnn.randomness import keyed_generator, keyed_randomness
from lightning_bnn.studies.tables import Measured

__all__ = ["Averages", "bootstrap", "jackknife", "predict_mode", "qualities"]


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


@torch.no_grad()
def predict_mode(
    mode: Posterior,
    model: nn.Module,
    loaders: Sequence[Any],
    counts: Sequence[int],
    seed: int,
) -> list[list[Averages]]:
    """Averages over the first so many networks of a mode.

    Args:
        mode: draws networks, or predicts in a way of its own.
        model: gives the computation.
        loaders: one for each data set, of inputs and targets as networks take them.
        counts: numbers of networks.
        seed: of the draws.

    Returns:
        For every data set, for every count.
    """
    most = max(counts)
    if isinstance(mode, Empirical):
        most = min(most, mode.size)
    run = mode.predictor(most, keyed_generator(seed, "predict"))
    model, device = model.eval(), next(model.parameters()).device
    found = []
    for which, loader in enumerate(loaders):
        batches: list[list[Averages]] = []
        for index, (inputs, _) in enumerate(loader):
            with keyed_randomness(seed, "predict", which, index, device=device):
                outputs = run(model, inputs.to(device)).cpu()
            probs = outputs.double().softmax(-1)
            entropy = torch.special.entr(probs).sum(-1)
            batches.append([Averages(probs[:n], entropy[:n]).mean() for n in counts])
        found.append([_joined(parts) for parts in zip(*batches, strict=True)])
    return found


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
def jackknife(parts: int, value: Callable[[list[int]], dict[str, float]]) -> dict[str, Measured]:
    r"""A number of all parts, with its standard error from leaving out one at a time.

    .. math:: s^2 = \frac{K - 1}{K} \sum_k (\theta_{-k} - \bar\theta)^2

    Args:
        parts: how many, K.
        value: the numbers of some parts.

    >>> data = [1.0, 2.0, 6.0]
    >>> jackknife(3, lambda kept: {"mean": sum(data[k] for k in kept) / len(kept)})["mean"]
    Measured(value=3.0, error=1.527525231651947)
    """
    every = list(range(parts))
    whole = value(every)
    left = [value([k for k in every if k != out]) for out in every]
    return {
        name: Measured(number, _jackknife_error([found[name] for found in left]))
        for name, number in whole.items()
    }


def _jackknife_error(values: Sequence[float]) -> float:
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
