"""Out-of-distribution detection: scores, ranking metrics, and a metric that combines them.

Higher scores mean more out of distribution, and OOD is the positive class by default. Scores are
compared in float64. Equal scores are accepted or rejected together.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.diversity import mutual_information
from lightning_bnn.metrics.validation import (
    IsOOD,
    Number,
    Scores,
    check_binary,
    check_choice,
    check_same_shape,
    check_scores,
    logits_of,
    probabilities,
)

__all__ = [
    "AUPR", "AUROC", "FPR95", "OODDetection", "aupr", "auroc", "energy_score", "entropy_score",
    "fpr95", "fpr_at_tpr", "max_probability_score", "mutual_information_score",
]  # fmt: skip

Positive = Literal["ood", "id"]
ScoreName = Literal["max_probability", "entropy", "mutual_information", "energy"]

_WHOLE = 2**53


# ------------------------------------------------------------ scores
def max_probability_score(probs: Tensor, from_logits: bool = False) -> Tensor:
    r"""Probability of all classes but the likeliest.

    .. math:: 1 - \max_c p_c

    >>> max_probability_score(torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    tensor([0.2500, 0.5000])
    """
    probs = predictive(probs, from_logits)  # one minus the largest would lose the small ones
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0).sum(-1)


def entropy_score(probs: Tensor, from_logits: bool = False) -> Tensor:
    r"""Entropy of the prediction, in nats.

    .. math:: -\textstyle\sum_c p_c \log p_c

    >>> entropy_score(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    tensor([0.0000, 0.6931])
    """
    return torch.special.entr(predictive(probs, from_logits)).sum(-1)


def mutual_information_score(probs: Tensor, from_logits: bool = False) -> Tensor:
    r"""Mutual information of networks ``(samples, batch, classes)``, in nats.

    .. math:: H\big(\tfrac1S \textstyle\sum_s p_s\big) - \tfrac1S \textstyle\sum_s H(p_s)

    >>> mutual_information_score(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931])
    """
    return mutual_information(probs, from_logits)


def energy_score(logits: Tensor, from_logits: bool = True) -> Tensor:
    r"""Free energy :math:`-\log \sum_c e^{z_c}` of the logits (Liu et al., 2020).

    >>> energy_score(torch.zeros(1, 2))
    tensor([-0.6931])
    """
    if not from_logits:
        raise ValueError("`score='energy'` needs logits: pass `from_logits=True`.")
    return -logits_of(logits).logsumexp(-1)


def predictive(probs: Tensor, from_logits: bool = False) -> Tensor:
    """Return predictions ``(batch, classes)``, averaged over several networks.

    >>> predictive(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([[0.5000, 0.5000]])
    """
    probs = probabilities(probs, from_logits)
    return probs.mean(0) if probs.ndim == 3 else probs


# ------------------------------------------------------------ ranking
def auroc(scores: Scores, is_ood: IsOOD) -> Number:
    r"""Probability that an OOD score exceeds an ID score, ties counting half (NaN without either).

    .. math:: P(s_{ood} > s_{id}) + \tfrac12 P(s_{ood} = s_{id})

    Args:
        scores: one number per example, higher is more out of distribution.
        is_ood: whether the example is out of distribution.

    >>> auroc(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([False, False, True]))
    tensor(0.7500, dtype=torch.float64)
    """
    positives, negatives = _sought_first(scores, is_ood)
    if min(len(positives), len(negatives)) == 0:
        return positives.new_full((), torch.nan)
    true, false = (F.pad(count, (1, 0)) for count in _counts(positives, negatives))
    twice = (false.diff() * (true[1:] + true[:-1])).sum()  # exact in integers up to the division
    return twice.double() / 2 / (float(len(positives)) * len(negatives))


def aupr(scores: Scores, is_ood: IsOOD, positive: Positive = "ood") -> Tensor:
    r"""Average precision, the area under the precision-recall curve, or NaN without either class.

    .. math:: \sum_t (R_t - R_{t-1})\, P_t

    Args:
        scores: one number per example, higher is more out of distribution.
        is_ood: whether the example is out of distribution.
        positive: the class to detect; for ``"id"`` it has low scores.

    >>> aupr(torch.zeros(10), torch.arange(10) < 4)
    tensor(0.4000, dtype=torch.float64)
    """
    positives, negatives = _sought_first(scores, is_ood, positive)
    if min(len(positives), len(negatives)) == 0:
        return positives.new_full((), torch.nan)
    true, false = _counts(positives, negatives)
    steps = F.pad(true, (1, 0)).diff().double() / len(positives)
    return (steps * true.double() / (true + false)).sum()


def fpr_at_tpr(
    scores: Scores, is_ood: IsOOD, tpr: float = 0.95, positive: Positive = "ood"
) -> Tensor:
    r"""False positive rate at the strictest threshold that finds a fraction of the positives.

    .. math:: P(s_{id} \geq t), \quad t = \max \{u : P(s_{ood} \geq u) \geq \text{tpr}\}

    Args:
        scores: one number per example, higher is more out of distribution.
        is_ood: whether the example is out of distribution.
        tpr: fraction of positives to detect.
        positive: the class to detect; for ``"id"`` it has low scores.

    >>> ood = torch.arange(10) >= 6
    >>> fpr_at_tpr(torch.arange(10.0), ood), fpr_at_tpr(torch.zeros(10), ood)
    (tensor(0., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    if not 0 < tpr <= 1:
        raise ValueError(f"`tpr` must be in (0, 1], got {tpr}.")
    positives, negatives = _sought_first(scores, is_ood, positive)
    if min(len(positives), len(negatives)) == 0:
        return positives.new_full((), torch.nan)
    needed = math.ceil(tpr * len(positives) - 1e-9)
    threshold = positives.kthvalue(len(positives) - needed + 1).values  # needs no sorting
    return (negatives >= threshold).double().mean()


def fpr95(scores: Scores, is_ood: IsOOD, positive: Positive = "ood") -> Number:
    """`fpr_at_tpr` at 95 %.

    >>> fpr95(torch.arange(10.0), torch.arange(10) < 5)
    tensor(1., dtype=torch.float64)
    """
    return fpr_at_tpr(scores, is_ood, 0.95, positive)


def check_ranking(scores: Tensor, is_ood: Tensor) -> None:
    """Require one number and one truth per example."""
    check_same_shape(scores=scores, is_ood=is_ood)
    check_binary(is_ood, "`is_ood` must be boolean, or 0 (ID) and 1 (OOD).")
    check_scores(scores)
    if scores.dtype == torch.int64 and bool((scores.abs() > _WHOLE).any()):
        raise ValueError(
            "`scores` must be at most 2**53: float64 does not distinguish larger ones."
        )


def _sought_first(
    scores: Tensor, is_ood: Tensor, positive: Positive = "ood"
) -> tuple[Tensor, Tensor]:
    """Return scores of positives and of negatives in float64, higher for positives."""
    check_choice("positive", positive, get_args(Positive))
    check_ranking(scores, is_ood)
    scores, is_ood = scores.double(), is_ood.bool()
    ood, inside = scores[is_ood], scores[~is_ood]
    return (ood, inside) if positive == "ood" else (-inside, -ood)


def _counts(positives: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Return true and false positives at every threshold, the strictest first."""
    scores, order = torch.cat([positives, negatives]).sort(descending=True, stable=True)
    last_of_tie = torch.ones_like(order, dtype=torch.bool)
    last_of_tie[:-1] = scores[1:] != scores[:-1]
    true = (order < len(positives)).cumsum(0)[last_of_tie]
    return true, last_of_tie.nonzero()[:, 0] + 1 - true


# ------------------------------------------------------------ classes
class _Ranking(ExactMetric):
    """A metric that stores every score and whether its example is OOD."""

    family = "ranking"
    scores: list[Tensor]
    is_ood: list[Tensor]
    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_list("scores")
        self.add_list("is_ood")

    def update(self, scores: Tensor, is_ood: Tensor) -> None:
        """Add a batch of scores (higher is more out of distribution) and which of them are OOD."""
        check_ranking(scores, is_ood)
        self.scores.append(scores.detach().flatten().double())
        self.is_ood.append(is_ood.flatten().double())

    def update_id(self, scores: Tensor) -> None:
        """Add scores of in-distribution examples."""
        self.update(scores, torch.zeros_like(scores, dtype=torch.bool))

    def update_ood(self, scores: Tensor) -> None:
        """Add scores of out-of-distribution examples."""
        self.update(scores, torch.ones_like(scores, dtype=torch.bool))

    def compute(self) -> Tensor:
        """Return the number, or NaN without examples of both kinds."""
        scores, is_ood = collected(self.scores), collected(self.is_ood).bool()
        if bool(is_ood.all()) or not bool(is_ood.any()):
            return self._nan("it needs ID and OOD examples")
        return self.value(scores, is_ood)

    @abstractmethod
    def value(self, scores: Tensor, is_ood: Tensor) -> Tensor:
        """Return the number, given examples of both kinds."""


class AUROC(_Ranking):
    """Area under the receiver operating characteristic, see `auroc`.

    Args:
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> AUROC()(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([False, False, True]))
    tensor(0.7500, dtype=torch.float64)
    """

    higher_is_better = True

    def value(self, scores: Tensor, is_ood: Tensor) -> Tensor:
        """Return the area under the curve of true against false positives."""
        return auroc(scores, is_ood)


class AUPR(_Ranking):
    """Average precision, see `aupr`.

    Args:
        positive: the class to detect, ``"ood"`` or ``"id"``.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> AUPR()(torch.zeros(10), torch.arange(10) < 4)
    tensor(0.4000, dtype=torch.float64)
    """

    higher_is_better = True

    def __init__(self, positive: Positive = "ood", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.positive = check_choice("positive", positive, get_args(Positive))

    def value(self, scores: Tensor, is_ood: Tensor) -> Tensor:
        """Return the area under the curve of precision against recall."""
        return aupr(scores, is_ood, self.positive)


class FPR95(_Ranking):
    """False positive rate at 95 % true positives, see `fpr95`.

    Args:
        positive: the class to detect, ``"ood"`` or ``"id"``.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> FPR95()(torch.arange(10.0), torch.arange(10) < 5)
    tensor(1., dtype=torch.float64)
    """

    higher_is_better = False

    def __init__(self, positive: Positive = "ood", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.positive = check_choice("positive", positive, get_args(Positive))

    def value(self, scores: Tensor, is_ood: Tensor) -> Tensor:
        """Return the rate of false positives."""
        return fpr95(scores, is_ood, self.positive)


class OODDetection(ExactMetric):
    """AUROC, AUPR of both classes and FPR95 of every OOD set against the same ID examples.

    Args:
        score: ranking score: ``"max_probability"``, ``"entropy"``, ``"mutual_information"``,
            ``"energy"``, or None if `update` receives scores of your own (higher is more out of
            distribution).
        ood_sets: names of the OOD sets.
        positive: the class that FPR95 detects, ``"ood"`` or ``"id"``.
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> metric = OODDetection("max_probability", ood_sets=["svhn"])
    >>> metric.update_id(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    >>> metric.update_ood(torch.tensor([[0.6, 0.4], [0.5, 0.5]]), "svhn")
    >>> {name: round(value.item(), 3) for name, value in metric.compute().items()}
    {'AUROC/svhn': 1.0, 'AUPR_out/svhn': 1.0, 'AUPR_in/svhn': 1.0, 'FPR95/svhn': 0.0}
    """

    def __init__(
        self,
        score: ScoreName | None = "max_probability",
        ood_sets: Sequence[str] = ("ood",),
        positive: Positive = "ood",
        from_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(score, from_logits, **kwargs)
        if isinstance(ood_sets, str) or not ood_sets or len(set(ood_sets)) != len(ood_sets):
            raise ValueError(f"`ood_sets` must be a list of different names, got {ood_sets!r}.")
        if score is not None:
            check_choice("score", score, get_args(ScoreName))
        self.score, self.ood_sets = score, tuple(ood_sets)
        self.positive = check_choice("positive", positive, get_args(Positive))
        self.from_logits = from_logits
        if score == "energy" and not from_logits:
            raise ValueError("`score='energy'` needs logits: pass `from_logits=True`.")
        for k in range(len(self.ood_sets) + 1):
            self.add_list(f"scores_{k}")

    def update(self, outputs: Tensor, ood_set: str | int | None = None) -> None:
        """Add a batch of one set.

        Args:
            outputs: input of the score: probabilities (or logits) ``(batch, classes)``, or
                ``(samples, batch, classes)``; scores ``(batch,)`` if ``score`` is None.
            ood_set: name or number of the OOD set; None for ID examples.
        """
        if isinstance(ood_set, int) and 0 <= ood_set < len(self.ood_sets):
            ood_set = self.ood_sets[ood_set]
        if ood_set is not None:
            check_choice("ood_set", ood_set, self.ood_sets)
        k = 0 if ood_set is None else 1 + self.ood_sets.index(str(ood_set))
        getattr(self, f"scores_{k}").append(self._scores(outputs))

    def update_id(self, outputs: Tensor) -> None:
        """Add a batch of in-distribution examples."""
        self.update(outputs)

    def update_ood(self, outputs: Tensor, ood_set: str | int | None = None) -> None:
        """Add a batch of out-of-distribution examples of one of the sets."""
        if ood_set is None and len(self.ood_sets) > 1:
            check_choice("ood_set", ood_set, self.ood_sets)
        self.update(outputs, 0 if ood_set is None else ood_set)

    def compute(self) -> dict[str, Tensor]:
        """Return all numbers by name, or NaN if ID or OOD examples are missing."""
        scores_id, *of_sets = (
            collected(getattr(self, f"scores_{k}")) for k in range(len(self.ood_sets) + 1)
        )
        result: dict[str, Tensor] = {}
        for ood_set, scores_ood in zip(self.ood_sets, of_sets, strict=True):
            if min(len(scores_id), len(scores_ood)) == 0:
                self._nan(f"there are no ID examples or none of {ood_set!r}")
            suffix = f"/{ood_set}" if self.ood_sets != ("ood",) else ""
            scores = torch.cat([scores_id, scores_ood])
            is_ood = torch.arange(len(scores), device=scores.device) >= len(scores_id)
            convention = "_id" if self.positive == "id" else ""
            result |= {
                f"AUROC{suffix}": auroc(scores, is_ood),
                f"AUPR_out{suffix}": aupr(scores, is_ood),
                f"AUPR_in{suffix}": aupr(scores, is_ood, "id"),
                f"FPR95{convention}{suffix}": fpr95(scores, is_ood, self.positive),
            }
        return result

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw all numbers, or curves of given results."""
        return self._plot(self.compute() if val is None else val, ax)

    def _scores(self, outputs: Tensor) -> Tensor:
        scores = _SCORES[self.score](outputs, self.from_logits) if self.score else outputs
        if scores.ndim != 1:
            raise ValueError(f"Scores must be one per example, got shape {tuple(scores.shape)}.")
        check_scores(scores)
        return scores.detach().double()


_SCORES: Mapping[str, Callable[[Tensor, bool], Tensor]] = {
    "max_probability": max_probability_score,
    "entropy": entropy_score,
    "mutual_information": mutual_information,
    "energy": energy_score,
}
