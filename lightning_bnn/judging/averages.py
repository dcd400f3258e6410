"""Predictions of classes, averaged over networks: all that the numbers of a posterior need.

Mean probabilities and the mean entropy of the networks can be averaged again, over modes or over
all modes but one; so every number of one mode, of all, and of the jackknife comes from one pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.likelihoods import Bernoulli, Categorical
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical, Posterior, Predictor
from lightning_bnn.randomness import keyed_generator, keyed_randomness

__all__ = [
    "Averages", "Batches", "averages_of_mode", "averages_of_stack", "draw", "has_classes",
    "predictor_of",
]  # fmt: skip

Batches = Iterable[tuple[Any, Tensor]]
"""Inputs, as networks take them, and targets."""


@dataclass(frozen=True)
class Averages:
    """Predictions of classes on some examples, averaged over networks.

    Attributes:
        probs: ``(..., examples, classes)``, in float64.
        entropy: mean entropy of the networks' predictions, ``(..., examples)``, in nats.
    """

    probs: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, likelihood: nn.Module, outputs: Tensor) -> Averages:
        """The mean over networks, whose outputs are ``(networks, examples, ...)``."""
        return cls.of_each(likelihood, outputs).mean()

    @classmethod
    def of_each(cls, likelihood: nn.Module, outputs: Tensor) -> Averages:
        """The prediction of every single network, not averaged yet."""
        logits = outputs.double()
        if isinstance(likelihood, Bernoulli):
            logits = torch.cat([torch.zeros_like(logits), logits], -1)
        probs = logits.softmax(-1)
        return cls(probs, torch.special.entr(probs).sum(-1))

    def __getitem__(self, which: Any) -> Averages:
        return Averages(self.probs[which], self.entropy[which])

    def mean(self) -> Averages:
        """The mean over the first dimension."""
        return Averages(self.probs.mean(0), self.entropy.mean(0))

    def information(self) -> Tensor:
        """Mutual information of prediction and network: what the networks disagree about."""
        return (torch.special.entr(self.probs).sum(-1) - self.entropy).clamp_min(0)

    @classmethod
    def stacked(cls, parts: Sequence[Averages]) -> Averages:
        """Several modes along a new first dimension."""
        return cls(torch.stack([p.probs for p in parts]), torch.stack([p.entropy for p in parts]))

    @classmethod
    def joined(cls, parts: Sequence[Averages]) -> Averages:
        """Several batches as one set of examples."""
        return cls(torch.cat([p.probs for p in parts]), torch.cat([p.entropy for p in parts]))


def has_classes(likelihood: nn.Module) -> bool:
    """Whether outputs are classes, so that they have averages."""
    return isinstance(likelihood, (Categorical, Bernoulli))


def draw(mode: Posterior, count: int, *key: int) -> Params:
    """Networks of a mode in random order; one that is made of fewer networks gives all it has.

    Args:
        mode: draws the networks.
        count: how many are wanted.
        *key: decides the draw.
    """
    count = min(count, mode.size) if isinstance(mode, Empirical) else count
    return {n: t.detach() for n, t in mode.sample(count, keyed_generator(*key, "drawn")).items()}


@torch.no_grad()
def averages_of_stack(
    model: nn.Module, networks: Params, likelihood: nn.Module, batches: Batches
) -> Averages:
    """Averages over all networks of a stack; a single network counts as a stack of one.

    Args:
        model: gives the computation.
        networks: a stack, or one network.
        likelihood: what outputs say about classes.
        batches: the data set.
    """
    stacked = P.is_stacked(networks, P.of(model))
    outputs = (P.apply(model.eval(), networks, inputs) for inputs, _ in batches)
    return Averages.joined([Averages.of(likelihood, o if stacked else o[None]) for o in outputs])


@torch.no_grad()
def averages_of_mode(
    mode: Posterior,
    model: nn.Module,
    likelihood: nn.Module,
    sets: Sequence[Batches],
    counts: Sequence[int],
    *key: int,
    device: str = "cpu",
) -> list[list[Averages]]:
    """For every data set and every count, averages over the first so many networks of a mode.

    Args:
        mode: draws networks, or predicts in a way of its own.
        model: gives the computation; it is left where it is.
        likelihood: what outputs say about classes.
        sets: the data sets.
        counts: numbers of networks.
        *key: decides the draws; `draw` gives the same networks for the same key.
        device: where it is computed.
    """
    model, mode = copy.deepcopy(model).to(device).eval(), mode.to(device)
    predict = predictor_of(mode, max(counts), *key)
    averages = []
    for number, batches in enumerate(sets):
        parts: list[list[Averages]] = []
        for index, (inputs, _) in enumerate(batches):
            with keyed_randomness(*key, "predict", number, index, device=device):
                outputs = predict(model, inputs.to(device)).cpu()
            each = Averages.of_each(likelihood, outputs)
            parts.append([each[:count].mean() for count in counts])
        averages.append([Averages.joined(of_count) for of_count in zip(*parts, strict=True)])
    mode.to("cpu")
    return averages


def predictor_of(mode: Posterior, count: int, *key: int) -> Predictor:
    """Networks predict in the random order of `draw`, so that the first few are like all.

    Args:
        mode: draws networks, or predicts in a way of its own.
        count: how many networks.
        *key: decides the draw.
    """
    if isinstance(mode, Empirical):
        networks = draw(mode, count, *key)
        return lambda model, *x: P.apply(model, networks, *x)
    return mode.predictor(count, keyed_generator(*key, "drawn"))
