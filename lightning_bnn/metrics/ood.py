"""Ranking metrics of out-of-distribution scores as torchmetrics classes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_bnn.metrics import ranking
from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.ranking import Interpolation, Positive, Rule
from lightning_bnn.metrics.validation import check_choice

__all__ = ["AUPR", "AUROC", "FPR95"]


class _Ranking(ExactMetric):
    """Keeps every score and whether it belongs to an OOD example."""

    ranking_scores: list[Tensor]
    ranking_is_ood: list[Tensor]
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_list("ranking_scores")
        self.add_list("ranking_is_ood")

    def update(self, scores: Tensor, is_ood: Tensor) -> None:
        """Add a batch of scores (higher is more out of distribution) and which of them are OOD."""
        ranking.check_ranking(scores, is_ood)
        ranking.check_exact(scores)
        self.ranking_scores.append(scores.detach().flatten().double())
        self.ranking_is_ood.append(is_ood.flatten().double())

    def update_id(self, scores: Tensor) -> None:
        """Add scores of in-distribution examples."""
        self.update(scores, torch.zeros_like(scores, dtype=torch.bool))

    def update_ood(self, scores: Tensor) -> None:
        """Add scores of out-of-distribution examples."""
        self.update(scores, torch.ones_like(scores, dtype=torch.bool))

    def compute(self) -> Tensor:
        """The number; NaN without examples of both kinds."""
        scores, is_ood = collected(self.ranking_scores), collected(self.ranking_is_ood).bool()
        scores_id, scores_ood = scores[~is_ood], scores[is_ood]
        if min(len(scores_id), len(scores_ood)) == 0:
            return self._nan("it needs ID and OOD examples")
        return self.value(scores_id, scores_ood)

    @abstractmethod
    def value(self, scores_id: Tensor, scores_ood: Tensor) -> Tensor:
        """The number, once there are examples of both kinds."""


class AUROC(_Ranking):
    """Area under the receiver operating characteristic, see `auroc`.

    Args:
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> AUROC()(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([False, False, True]))
    tensor(0.7500, dtype=torch.float64)
    """

    higher_is_better = True

    def value(self, scores_id: Tensor, scores_ood: Tensor) -> Tensor:
        """The area under the curve of true against false positives."""
        return ranking.auroc_of_counts(ranking.count_positives(scores_id, scores_ood))


class AUPR(_Ranking):
    """Area under the precision-recall curve, see `aupr`.

    Args:
        positive: the class to find, ``"ood"`` or ``"id"``.
        interpolation: ``"step"`` (average precision) or ``"trapezoid"``.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> AUPR()(torch.zeros(10), torch.arange(10) < 4)
    tensor(0.4000, dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(
        self, positive: Positive = "ood", interpolation: Interpolation = "step", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.positive = check_choice("positive", positive, get_args(Positive))
        self.interpolation = check_choice("interpolation", interpolation, get_args(Interpolation))

    def value(self, scores_id: Tensor, scores_ood: Tensor) -> Tensor:
        """The area under the curve of precision against recall."""
        counts = ranking.count_positives(scores_id, scores_ood, self.positive)
        return ranking.aupr_of_counts(counts, self.interpolation)


class FPR95(_Ranking):
    """False positive rate at 95 % true positives, see `fpr95`.

    Args:
        positive: the class to find, ``"ood"`` or ``"id"``.
        rule: ``"first"`` threshold that finds that many, or the one of ``"nearest"`` recall.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> FPR95()(torch.arange(10.0), torch.arange(10) < 5)
    tensor(1., dtype=torch.float64)
    """

    higher_is_better = False

    def __init__(self, positive: Positive = "ood", rule: Rule = "first", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.positive = check_choice("positive", positive, get_args(Positive))
        self.rule = check_choice("rule", rule, get_args(Rule))

    def value(self, scores_id: Tensor, scores_ood: Tensor) -> Tensor:
        """The rate of false positives."""
        return ranking.fpr_of_scores(scores_id, scores_ood, 0.95, self.positive, self.rule)
