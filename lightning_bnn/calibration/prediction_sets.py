"""Conformal prediction sets: classes that hold the truth as often as was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.arguments import check_count, check_not_negative
from lightning_bnn.calibration.finite_quantile import check_alpha, conformal_quantiles
from lightning_bnn.metrics.validation import (
    check_choice,
    check_labels,
    check_predictions,
    probabilities,
)
from lightning_bnn.randomness import keyed_generator

__all__ = ["ConformalSets", "Score", "SetScore", "conformal_sets"]

Score = Literal["thr", "aps", "raps"]


@dataclass(frozen=True)
class SetScore:
    r"""How strange every class would be as the truth, given a prediction.

    With classes ordered by falling probability, :math:`o` the place of class :math:`c` (from 1)
    and :math:`u` uniform in (0, 1), or 1 if not randomised:

    - ``"thr"`` (also called LAC): :math:`1 - p_c`, the smallest sets on average;
    - ``"aps"``: :math:`\sum_{j < o} p_{(j)} + u\, p_c`, sets that are larger for harder examples;
    - ``"raps"``: the same and :math:`\lambda \max(0, o - k)`, which keeps out unlikely classes.

    References:
        | Least Ambiguous Set-Valued Classifiers (Sadinle, Lei and Wasserman, 2019)
        | https://arxiv.org/abs/1609.00451
        | Classification with Valid and Adaptive Coverage (Romano, Sesia and Candes, 2020)
        | https://arxiv.org/abs/2006.02544
        | Uncertainty Sets for Image Classifiers (Angelopoulos et al., 2021)
        | https://arxiv.org/abs/2009.14193

    Args:
        score: ``"thr"``, ``"aps"`` or ``"raps"``.
        randomised: whether :math:`u` is drawn: coverage is then exact, and sets may be empty.
            Otherwise sets are larger than they must be. Nothing is drawn for ``"thr"``.
        penalty: :math:`\lambda` of ``"raps"``.
        free: :math:`k` of ``"raps"``, how many classes cost nothing.
        seed: of what is drawn.

    >>> probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    >>> SetScore("thr")(probs).tolist()
    [[0.5, 0.75, 0.875, 0.875]]
    >>> SetScore("aps", randomised=False)(probs).tolist()
    [[0.5, 0.75, 0.875, 1.0]]
    """

    score: Score = "thr"
    randomised: bool = True
    penalty: float = 0.1
    free: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("score", self.score, get_args(Score))
        check_not_negative("penalty", self.penalty)
        check_count("free", self.free, least=0)

    def __call__(self, probs: Tensor, *key: int | str) -> Tensor:
        """The scores of all classes, ``(batch, classes)``, in float64.

        Args:
            probs: predictions ``(batch, classes)``.
            *key: what is drawn depends on this and the seed.
        """
        probs = probabilities(probs).double()
        check_predictions(probs)
        if self.score == "thr":
            return 1 - probs
        sorted_probs, order = probs.sort(stable=True, dim=-1, descending=True)
        u = self._uniform(len(probs), *key).to(probs)[:, None]
        scores = sorted_probs.cumsum(-1) - (1 - u) * sorted_probs
        if self.score == "raps":
            place = torch.arange(1, probs.shape[-1] + 1).to(scores)
            scores = scores + self.penalty * (place - self.free).clamp_min(0)
        return torch.empty_like(scores).scatter(-1, order, scores)

    def _uniform(self, size: int, *key: int | str) -> Tensor:
        if not self.randomised:
            return torch.ones(size, dtype=torch.float64)
        generator = keyed_generator(self.seed, "conformal", *key)
        return torch.rand(size, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class ConformalSets:
    r"""Prediction sets, given calibration examples; called, it makes those of new predictions.

    .. math:: \{c : s_c(x) \leq q\}, \quad q = \text{quantile of } s_{y_i}(x_i)

    Attributes:
        scores: of the true classes of the calibration examples.
        labels: these classes.
        classes: how many there are.
        alpha: the share of examples whose class may be missing from its set.
        by_class: whether that holds for the examples of every class (Mondrian), not only for all.
        rule: what scores are.

    >>> from lightning_bnn.calibration import conformal_sets
    >>> probs = torch.tensor([[0.75, 0.25]]).repeat(20, 1)
    >>> rule = conformal_sets(probs, (torch.arange(20) % 4) // 3, alpha=0.5)
    >>> rule.thresholds().item(), rule.at(0.1).thresholds().item()  # 1 - 0.75, 1 - 0.25
    (0.25, 0.75)
    """

    scores: Tensor
    labels: Tensor
    classes: int
    alpha: float = 0.1
    by_class: bool = False
    rule: SetScore = SetScore()

    def thresholds(self) -> Tensor:
        """The largest scores that belong to a set: of every class, or one for all."""
        if self.by_class:
            return conformal_quantiles(self.scores, self.alpha, self.labels, self.classes)
        return conformal_quantiles(self.scores, self.alpha)

    def at(self, alpha: int | float) -> ConformalSets:
        """The same with another error rate.

        Args:
            alpha: the share of examples whose class may be missing from its set.
        """
        check_alpha(alpha)
        return replace(self, alpha=float(alpha))

    def __call__(self, probs: Tensor, batch: int = 0) -> Tensor:
        """Which classes belong to the set of each example, boolean ``(batch, classes)``.

        Args:
            probs: predictions ``(batch, classes)``.
            batch: which batch this is: every one has random numbers of its own.
        """
        scores = self.rule(probs, "new", batch)
        if scores.shape[-1] != self.classes:
            raise ValueError(f"`probs` must be of {self.classes} classes, got {scores.shape[-1]}.")
        return scores <= self.thresholds().to(scores)


def conformal_sets(
    probs: Tensor,
    labels: Tensor,
    alpha: int | float = 0.1,
    score: Score = "thr",
    by_class: bool = False,
    randomised: bool = True,
    penalty: float = 0.1,
    free: int = 1,
    seed: int = 0,
) -> ConformalSets:
    r"""Prediction sets that miss the true class of at most :math:`\alpha` of new examples.

    .. math:: \{c : s_c(x) \leq q\}, \quad q = \text{the } \lceil (n + 1)(1 - \alpha) \rceil
        \text{-th smallest of } s_{y_i}(x_i)

    That holds for any predictions, right or wrong, on average over calibration and new examples
    that are exchangeable and that the network was not trained on. Too few calibration examples
    give sets of all classes, and one warning.

    Args:
        probs: predictions for the calibration examples, ``(batch, classes)``.
        labels: their classes ``(batch,)``.
        alpha: the share of new examples whose class may be missing from its set.
        score: ``"thr"`` (LAC), ``"aps"`` or ``"raps"``, see `SetScore`.
        by_class: whether the share holds for the examples of every class (Mondrian).
        randomised: of ``"aps"`` and ``"raps"``: exact coverage, by chance.
        penalty: of ``"raps"``.
        free: of ``"raps"``, classes that cost nothing.
        seed: of what is drawn.

    Returns:
        A function from predictions to boolean masks ``(batch, classes)``.

    >>> probs = torch.tensor([[0.75, 0.25]]).repeat(9, 1)
    >>> sets = conformal_sets(probs, torch.zeros(9, dtype=torch.long))
    >>> sets(torch.tensor([[0.875, 0.125], [0.5, 0.5]]))
    tensor([[ True, False],
            [False, False]])
    """
    rule = SetScore(score, randomised, float(penalty), free, seed)
    check_alpha(alpha)
    scores = rule(probs, "calibration")
    check_labels(labels, scores)
    labels = labels.long()
    true = scores.gather(-1, labels[:, None])[:, 0]
    return ConformalSets(true, labels, scores.shape[-1], float(alpha), by_class, rule)
