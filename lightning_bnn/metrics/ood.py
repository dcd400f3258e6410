"""Out-of-distribution detection as torchmetrics classes; several OOD sets in one test."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, collected, digest
from lightning_bnn.metrics.ranking import (
    Interpolation,
    Positive,
    Rule,
    aupr_of_counts,
    auroc_of_counts,
    check_ranking,
    check_rate,
    count_positives,
    fpr_of_scores,
)
from lightning_bnn.metrics.scores import (
    energy_score,
    entropy_score,
    max_probability_score,
    mutual_information_score,
    predictive,
)
from lightning_bnn.metrics.validation import check_labels, check_scores, option

__all__ = ["AUPR", "AUROC", "FPR95", "FPRAtTPR", "OODDetection"]

ScoreName = Literal["max_probability", "entropy", "mutual_information", "energy"]
IdFilter = Literal["all", "correct"]
_SCORES: dict[str, Callable[..., Tensor]] = {
    "max_probability": max_probability_score,
    "entropy": entropy_score,
    "mutual_information": mutual_information_score,
    "energy": energy_score,
}


# ------------------------------------------------------------ one number
class _Ranking(ExactMetric):
    """Keeps every score and whether it belongs to an OOD example."""

    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_list("ranking_scores")
        self.add_list("ranking_is_ood")

    def update(self, scores: Tensor, is_ood: Tensor) -> None:
        """Add a batch of scores (higher is more out of distribution) and which of them are OOD."""
        check_ranking(scores, is_ood)
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
        """The number, when both kinds are there."""


class AUROC(_Ranking):
    """Area under the receiver operating characteristic, see `auroc`.

    Args:
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> AUROC()(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([False, False, True]))
    tensor(0.7500, dtype=torch.float64)
    """

    higher_is_better = True

    def value(self, scores_id: Tensor, scores_ood: Tensor) -> Tensor:
        """The area."""
        return auroc_of_counts(count_positives(scores_id, scores_ood))


class AUPR(_Ranking):
    """Area under the precision-recall curve, see `aupr`.

    Args:
        positive: the class that is to be found, ``"ood"`` or ``"id"``.
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
        self.positive = option("positive", positive, get_args(Positive))
        self.interpolation = option("interpolation", interpolation, get_args(Interpolation))

    def value(self, scores_id: Tensor, scores_ood: Tensor) -> Tensor:
        """The area."""
        counts = count_positives(scores_id, scores_ood, self.positive)
        return aupr_of_counts(counts, self.interpolation)


class FPRAtTPR(_Ranking):
    """False positive rate at the threshold that finds a fraction of the positives.

    Args:
        tpr: the fraction of positives to find.
        positive: the class that is to be found, ``"ood"`` or ``"id"``.
        rule: ``"first"`` threshold that finds that many, or the one of ``"nearest"`` recall.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> FPRAtTPR(0.8)(torch.arange(10.0), torch.arange(10) >= 6)
    tensor(0., dtype=torch.float64)
    """

    higher_is_better = False

    def __init__(
        self, tpr: float = 0.95, positive: Positive = "ood", rule: Rule = "first", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_rate(tpr)
        self.tpr = tpr
        self.positive = option("positive", positive, get_args(Positive))
        self.rule = option("rule", rule, get_args(Rule))

    def value(self, scores_id: Tensor, scores_ood: Tensor) -> Tensor:
        """The rate."""
        return fpr_of_scores(scores_id, scores_ood, self.tpr, self.positive, self.rule)


class FPR95(FPRAtTPR):
    """False positive rate at 95 % true positives.

    Args:
        positive: the class that is to be found, ``"ood"`` or ``"id"``.
        rule: ``"first"`` threshold that finds that many, or the one of ``"nearest"`` recall.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> FPR95()(torch.arange(10.0), torch.arange(10) < 5)
    tensor(1., dtype=torch.float64)
    """

    def __init__(self, positive: Positive = "ood", rule: Rule = "first", **kwargs: Any) -> None:
        super().__init__(0.95, positive, rule, **kwargs)


# ------------------------------------------------------------ everything at once
class OODDetection(ExactMetric):
    """AUROC, AUPR of both classes and FPR95 of every OOD set against the same ID examples.

    Args:
        score: what to rank by: ``"max_probability"``, ``"entropy"``, ``"mutual_information"``,
            ``"energy"``, a function from outputs to one score per example (higher is more out of
            distribution), or None when `update` is given scores.
        ood_sets: names of the OOD sets.
        positive: the class that FPR95 finds, ``"ood"`` or ``"id"``.
        tpr: the fraction of positives that it finds.
        rule: its threshold, see `fpr_at_tpr`.
        interpolation: of both AUPR, see `aupr`.
        id_filter: ``"correct"`` leaves out misclassified ID examples (Hendrycks and Gimpel, 2017).
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> metric = OODDetection("max_probability", ood_sets=["svhn"])
    >>> metric.update_id(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    >>> metric.update_ood(torch.tensor([[0.6, 0.4], [0.5, 0.5]]), "svhn")
    >>> {name: round(value.item(), 3) for name, value in metric.compute().items()}
    {'AUROC/svhn': 1.0, 'AUPR_out/svhn': 1.0, 'AUPR_in/svhn': 1.0, 'FPR95/svhn': 0.0}
    """

    def __init__(
        self,
        score: ScoreName | Callable[[Tensor], Tensor] | None = "max_probability",
        ood_sets: Sequence[str] = ("ood",),
        positive: Positive = "ood",
        tpr: float = 0.95,
        rule: Rule = "first",
        interpolation: Interpolation = "step",
        id_filter: IdFilter = "all",
        from_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_rate(tpr)
        _check_sets(ood_sets)
        if isinstance(score, str):
            option("score", score, get_args(ScoreName))
        self.score, self.ood_sets = score, tuple(ood_sets)
        self.positive: Positive = option("positive", positive, get_args(Positive))
        self.tpr = tpr
        self.rule: Rule = option("rule", rule, get_args(Rule))
        self.interpolation: Interpolation = option(
            "interpolation", interpolation, get_args(Interpolation)
        )
        self.id_filter = option("id_filter", id_filter, get_args(IdFilter))
        self.from_logits = from_logits
        _check_possible(score, id_filter, from_logits)
        self._stem = f"detection_{digest(_described(score), id_filter, from_logits)}"
        for k in range(len(self.ood_sets) + 1):
            self.add_list(f"{self._stem}_{k}")

    def update(
        self, outputs: Tensor, ood_set: str | int | None = None, labels: Tensor | None = None
    ) -> None:
        """Add a batch of one set.

        Args:
            outputs: what the score takes: probabilities (or logits) ``(batch, classes)``, or
                ``(samples, batch, classes)``; scores ``(batch,)`` if ``score`` is None.
            ood_set: name or number of the OOD set; None for ID examples.
            labels: true classes of ID examples, for ``id_filter="correct"``.
        """
        scores = self._scores(outputs)
        if ood_set is None and self.id_filter == "correct":
            scores = scores[_is_correct(outputs, labels, self.from_logits)]
        getattr(self, f"{self._stem}_{self._position(ood_set)}").append(scores)

    def update_id(self, outputs: Tensor, labels: Tensor | None = None) -> None:
        """Add a batch of in-distribution examples."""
        self.update(outputs, None, labels)

    def update_ood(self, outputs: Tensor, ood_set: str | int | None = None) -> None:
        """Add a batch of out-of-distribution examples; of which set, if there are several."""
        if ood_set is None and len(self.ood_sets) > 1:
            raise ValueError(f"`ood_set` must be one of {', '.join(self.ood_sets)}, got None.")
        self.update(outputs, 0 if ood_set is None else ood_set)

    def compute(self) -> dict[str, Tensor]:
        """All numbers by name; NaN where ID or OOD examples are missing."""
        scores_id = collected(getattr(self, f"{self._stem}_0"))
        result = {}
        for k, ood_set in enumerate(self.ood_sets, 1):
            scores_ood = collected(getattr(self, f"{self._stem}_{k}"))
            if min(len(scores_id), len(scores_ood)) == 0:
                self._nan(f"there are no ID examples or none of {ood_set!r}")
            for name, value in self._values(scores_id, scores_ood).items():
                suffix = f"/{ood_set}" if self.ood_sets != ("ood",) else ""
                result[name + suffix] = value
        return result

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw all numbers, or curves of given results."""
        return self._plot(self.compute() if val is None else val, ax)

    def _values(self, scores_id: Tensor, scores_ood: Tensor) -> dict[str, Tensor]:
        out = count_positives(scores_id, scores_ood)
        inside = count_positives(scores_id, scores_ood, "id")
        return {
            "AUROC": auroc_of_counts(out),
            self._area_name("AUPR_out"): aupr_of_counts(out, self.interpolation),
            self._area_name("AUPR_in"): aupr_of_counts(inside, self.interpolation),
            self._rate_name(): fpr_of_scores(
                scores_id, scores_ood, self.tpr, self.positive, self.rule
            ),
        }

    def _rate_name(self) -> str:
        """Conventions that are not the default are part of the logged name."""
        name = f"FPR{100 * self.tpr:g}"
        return name + ("_id" * (self.positive == "id")) + ("_nearest" * (self.rule == "nearest"))

    def _area_name(self, name: str) -> str:
        return name if self.interpolation == "step" else f"{name}_trapezoid"

    def _scores(self, outputs: Tensor) -> Tensor:
        if self.score is None:
            scores = outputs
        elif isinstance(self.score, str):
            scores = _SCORES[self.score](outputs, self.from_logits)
        else:
            scores = self.score(outputs)
        if scores.ndim != 1:
            raise ValueError(f"Scores must be one per example, got shape {tuple(scores.shape)}.")
        check_scores(scores)
        return scores.detach().double()

    def _position(self, ood_set: str | int | None) -> int:
        if ood_set is None:
            return 0
        if isinstance(ood_set, int) and 0 <= ood_set < len(self.ood_sets):
            return 1 + ood_set
        if ood_set in self.ood_sets:
            return 1 + self.ood_sets.index(str(ood_set))
        raise ValueError(f"`ood_set` must be one of {', '.join(self.ood_sets)}, got {ood_set!r}.")


def _check_sets(ood_sets: Sequence[str]) -> None:
    if isinstance(ood_sets, str) or not ood_sets or len(set(ood_sets)) != len(ood_sets):
        raise ValueError(f"`ood_sets` must be a list of different names, got {ood_sets!r}.")


def _check_possible(score: Any, id_filter: str, from_logits: bool) -> None:
    if score == "energy" and not from_logits:
        raise ValueError("`score='energy'` needs logits: pass `from_logits=True`.")
    if score is None and id_filter == "correct":
        raise ValueError("`id_filter='correct'` needs class outputs, not scores.")


def _described(score: Any) -> str:
    """Tells scores apart, in the same words in every process."""
    name = getattr(score, "__qualname__", None) or type(score).__name__
    line = getattr(getattr(score, "__code__", None), "co_firstlineno", "")
    return score if isinstance(score, str) else f"{getattr(score, '__module__', '')}.{name}:{line}"


def _is_correct(outputs: Tensor, labels: Tensor | None, from_logits: bool) -> Tensor:
    if labels is None or outputs.ndim < 2:
        raise ValueError(
            "`id_filter='correct'` needs the class outputs of ID examples and their `labels`."
        )
    probs = predictive(outputs, from_logits)
    check_labels(labels, probs)
    return probs.argmax(-1) == labels
