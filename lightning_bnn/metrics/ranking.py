"""Ranking metrics of out-of-distribution scores: AUROC, AUPR, false positives at a recall.

Higher scores mean more out of distribution, and OOD is the positive class by default.
Scores are used as they are, in float64 (integers exactly); equal scores are accepted or rejected
together.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.shapes import IsOOD, Number, Scores
from lightning_bnn.metrics.validation import (
    check_binary,
    check_choice,
    check_same_shape,
    check_scores,
)

__all__ = [
    "AUPR",
    "AUROC",
    "FPR95",
    "aupr",
    "auroc",
    "fpr95",
    "fpr_at_tpr",
]

Positive = Literal["ood", "id"]
Rule = Literal["first", "nearest"]
Interpolation = Literal["step", "trapezoid"]
_WHOLE = 2**53


class Counts(NamedTuple):
    """True and false positives at every distinct threshold, from the strictest on."""

    true: Tensor
    false: Tensor

    @property
    def complete(self) -> bool:
        """True if both classes are present."""
        return len(self.true) > 0 and bool(self.true[-1] > 0) and bool(self.false[-1] > 0)


# ------------------------------------------------------------ functions
def auroc(scores: Scores, is_ood: IsOOD) -> Number:
    r"""Probability that an OOD score exceeds an ID score, ties counting half (NaN without either).

    .. math:: P(s_{ood} > s_{id}) + \tfrac12 P(s_{ood} = s_{id})

    Args:
        scores: one number per example, higher is more out of distribution.
        is_ood: whether the example is out of distribution.

    >>> auroc(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([False, False, True]))
    tensor(0.7500, dtype=torch.float64)
    """
    return auroc_of_counts(count_positives(*split_scores(scores, is_ood)))


def aupr(
    scores: Scores,
    is_ood: IsOOD,
    positive: Positive = "ood",
    interpolation: Interpolation = "step",
) -> Tensor:
    r"""Area under the precision-recall curve, or NaN without either class.

    .. math:: \sum_t (R_t - R_{t-1})\, P_t

    Args:
        scores: one number per example, higher is more out of distribution.
        is_ood: whether the example is out of distribution.
        positive: the class to find. For ``"id"`` low scores are.
        interpolation: ``"step"`` is average precision; ``"trapezoid"`` is too high when scores
            tie, and is there to reproduce published numbers.

    >>> aupr(torch.zeros(10), torch.arange(10) < 4)
    tensor(0.4000, dtype=torch.float64)
    """
    counts = count_positives(*split_scores(scores, is_ood), positive)
    return aupr_of_counts(counts, interpolation)


def fpr_at_tpr(
    scores: Scores,
    is_ood: IsOOD,
    tpr: float = 0.95,
    positive: Positive = "ood",
    rule: Rule = "first",
) -> Tensor:
    r"""False positive rate at the threshold that finds a fraction of the positives.

    .. math:: P(s_{id} \geq t), \quad t = \max \{u : P(s_{ood} \geq u) \geq \text{tpr}\}

    Args:
        scores: one number per example, higher is more out of distribution.
        is_ood: whether the example is out of distribution.
        tpr: the fraction of positives to find.
        positive: the class to find. For ``"id"`` low scores are.
        rule: ``"first"``, the strictest threshold that finds at least that many; or
            ``"nearest"``, the threshold whose recall is nearest, which may find fewer: the rule of
            the Outlier Exposure code, to reproduce published numbers.

    >>> ood = torch.arange(10) >= 6
    >>> fpr_at_tpr(torch.arange(10.0), ood), fpr_at_tpr(torch.zeros(10), ood)
    (tensor(0., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    return fpr_of_scores(*split_scores(scores, is_ood), tpr, positive, rule)


def fpr95(
    scores: Scores, is_ood: IsOOD, positive: Positive = "ood", rule: Rule = "first"
) -> Number:
    """`fpr_at_tpr` at 95 %.

    >>> fpr95(torch.arange(10.0), torch.arange(10) < 5)
    tensor(1., dtype=torch.float64)
    """
    return fpr_at_tpr(scores, is_ood, 0.95, positive, rule)


# ------------------------------------------------------------ counts
def split_scores(scores: Tensor, is_ood: Tensor) -> tuple[Tensor, Tensor]:
    """The scores of ID and of OOD examples in float64, or the ranks of large integers.

    >>> split_scores(torch.tensor([1.0, 2.0]), torch.tensor([True, False]))[0]
    tensor([2.], dtype=torch.float64)
    """
    check_ranking(scores, is_ood)
    if not is_exact(scores):
        scores = scores.unique(return_inverse=True)[1]
    scores, is_ood = scores.double(), is_ood.bool()
    return scores[~is_ood], scores[is_ood]


def is_exact(scores: Tensor) -> bool:
    """Tell whether float64 holds all scores exactly."""
    if scores.is_floating_point() or scores.dtype == torch.bool:
        return True
    return bool(((scores >= -_WHOLE) & (scores <= _WHOLE)).all())


def check_exact(scores: Tensor) -> None:
    """Refuse integers that float64 does not hold."""
    if not is_exact(scores):
        raise ValueError(
            "`scores` are kept in float64, which holds whole numbers up to 2^53, got "
            f"{scores.dtype} from {int(scores.min())} to {int(scores.max())}: give ranks, or all "
            "scores at once to the function."
        )


def check_ranking(scores: Tensor, is_ood: Tensor) -> None:
    """Refuse all but one number and one truth per example."""
    check_same_shape(scores, is_ood, "`scores` and `is_ood`")
    check_binary(is_ood, "`is_ood` must be boolean, or 0 (ID) and 1 (OOD).")
    check_scores(scores)


def count_positives(scores_id: Tensor, scores_ood: Tensor, positive: Positive = "ood") -> Counts:
    """True and false positives at every threshold between distinct scores.

    >>> count_positives(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])).true
    tensor([1, 2, 2])
    """
    positives, negatives = _sought_first(scores_id, scores_ood, positive)
    scores, order = torch.cat([positives, negatives]).sort(descending=True, stable=True)
    is_positive = order < len(positives)
    last_of_tie = torch.ones_like(is_positive)
    last_of_tie[:-1] = scores[1:] != scores[:-1]
    true = is_positive.cumsum(0)[last_of_tie]
    return Counts(true, last_of_tie.nonzero()[:, 0] + 1 - true)


def auroc_of_counts(counts: Counts) -> Number:
    """Area under the receiver operating characteristic, exact in integers up to the division."""
    if not counts.complete:
        return _nan(counts)
    true = torch.nn.functional.pad(counts.true, (1, 0))
    steps = counts.false.diff(prepend=counts.false.new_zeros(1))
    twice = (steps * (true[1:] + true[:-1])).sum()
    return twice.double() / 2 / (counts.true[-1].double() * counts.false[-1])


def aupr_of_counts(counts: Counts, interpolation: Interpolation = "step") -> Tensor:
    """Area under the precision-recall curve."""
    check_choice("interpolation", interpolation, get_args(Interpolation))
    if not counts.complete:
        return _nan(counts)
    precision = counts.true.double() / (counts.true + counts.false)
    steps = counts.true.diff(prepend=counts.true.new_zeros(1)).double() / counts.true[-1]
    if interpolation == "trapezoid":
        previous = torch.cat([precision.new_ones(1), precision[:-1]])
        precision = (precision + previous) / 2
    return (steps * precision).sum()


def fpr_of_scores(
    scores_id: Tensor,
    scores_ood: Tensor,
    tpr: float = 0.95,
    positive: Positive = "ood",
    rule: Rule = "first",
) -> Tensor:
    """False positive rate at a recall. The first threshold needs no sorting."""
    check_choice("rule", rule, get_args(Rule))
    check_rate(tpr)
    positives, negatives = _sought_first(scores_id, scores_ood, positive)
    if min(len(positives), len(negatives)) == 0:
        return scores_id.new_full((), torch.nan)
    if rule == "nearest":
        return _nearest_fpr(count_positives(scores_id, scores_ood, positive), tpr)
    needed = math.ceil(tpr * len(positives) - 1e-9)
    threshold = positives.kthvalue(len(positives) - needed + 1).values
    return (negatives >= threshold).double().mean()


def _sought_first(
    scores_id: Tensor, scores_ood: Tensor, positive: Positive
) -> tuple[Tensor, Tensor]:
    """Scores of positives and of negatives, higher ones more positive."""
    check_choice("positive", positive, get_args(Positive))
    return (scores_ood, scores_id) if positive == "ood" else (-scores_id, -scores_ood)


def check_rate(tpr: float) -> None:
    """Refuse a fraction that no threshold can reach."""
    if not 0 < tpr <= 1:
        raise ValueError(f"`tpr` must be in (0, 1], got {tpr}.")


def _nearest_fpr(counts: Counts, tpr: float) -> Tensor:
    """The most lenient of the thresholds of nearest recall, up to the first that finds all."""
    positives = int(counts.true[-1])
    up_to = int(torch.searchsorted(counts.true, positives)) + 1
    distance = (counts.true[:up_to].double() / positives - tpr).abs()
    index = up_to - 1 - int(distance.flip(0).argmin())
    return counts.false[index].double() / counts.false[-1]


def _nan(counts: Counts) -> Tensor:
    return torch.full((), torch.nan, dtype=torch.float64, device=counts.true.device)


# ------------------------------------------------------------ classes
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
        check_ranking(scores, is_ood)
        check_exact(scores)
        self.ranking_scores.append(scores.detach().flatten().double())
        self.ranking_is_ood.append(is_ood.flatten().double())

    def update_id(self, scores: Tensor) -> None:
        """Add scores of in-distribution examples."""
        self.update(scores, torch.zeros_like(scores, dtype=torch.bool))

    def update_ood(self, scores: Tensor) -> None:
        """Add scores of out-of-distribution examples."""
        self.update(scores, torch.ones_like(scores, dtype=torch.bool))

    def compute(self) -> Tensor:
        """The number, or NaN without examples of both kinds."""
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
        return auroc_of_counts(count_positives(scores_id, scores_ood))


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
        counts = count_positives(scores_id, scores_ood, self.positive)
        return aupr_of_counts(counts, self.interpolation)


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
        return fpr_of_scores(scores_id, scores_ood, 0.95, self.positive, self.rule)
