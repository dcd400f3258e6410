"""Out-of-distribution detection in one test: several OOD sets, every number, any score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_bnn.metrics import ranking
from lightning_bnn.metrics import scores as score_functions
from lightning_bnn.metrics.base import ExactMetric, collected, digest
from lightning_bnn.metrics.ranking import Interpolation, Positive, Rule
from lightning_bnn.metrics.validation import check_choice, check_scores

__all__ = ["OODDetection"]

ScoreName = Literal["max_probability", "entropy", "mutual_information", "energy"]


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
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> import torch
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
        from_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        ranking.check_rate(tpr)
        _check_sets(ood_sets)
        if isinstance(score, str):
            check_choice("score", score, get_args(ScoreName))
        self.score, self.ood_sets = score, tuple(ood_sets)
        self.positive = check_choice("positive", positive, get_args(Positive))
        self.tpr = tpr
        self.rule = check_choice("rule", rule, get_args(Rule))
        self.interpolation = check_choice("interpolation", interpolation, get_args(Interpolation))
        self.from_logits = from_logits
        if score == "energy" and not from_logits:
            raise ValueError("`score='energy'` needs logits: pass `from_logits=True`.")
        self._stem = f"detection_{digest(_described(score), from_logits)}"
        for k in range(len(self.ood_sets) + 1):
            self.add_list(f"{self._stem}_{k}")

    def update(self, outputs: Tensor, ood_set: str | int | None = None) -> None:
        """Add a batch of one set.

        Args:
            outputs: what the score takes: probabilities (or logits) ``(batch, classes)``, or
                ``(samples, batch, classes)``; scores ``(batch,)`` if ``score`` is None.
            ood_set: name or number of the OOD set; None for ID examples.
        """
        state = f"{self._stem}_{self._position(ood_set)}"
        getattr(self, state).append(self._scores(outputs))

    def update_id(self, outputs: Tensor) -> None:
        """Add a batch of in-distribution examples."""
        self.update(outputs)

    def update_ood(self, outputs: Tensor, ood_set: str | int | None = None) -> None:
        """Add a batch of out-of-distribution examples of one of the sets."""
        if ood_set is None and len(self.ood_sets) > 1:
            check_choice("ood_set", ood_set, self.ood_sets)
        self.update(outputs, 0 if ood_set is None else ood_set)

    def compute(self) -> dict[str, Tensor]:
        """All numbers by name, or NaN where ID or OOD examples are missing."""
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
        """All numbers. Conventions that are not the default are part of their names."""
        out = ranking.count_positives(scores_id, scores_ood)
        inside = ranking.count_positives(scores_id, scores_ood, "id")
        rate = ranking.fpr_of_scores(scores_id, scores_ood, self.tpr, self.positive, self.rule)
        area = "_trapezoid" * (self.interpolation == "trapezoid")
        convention = "_id" * (self.positive == "id") + "_nearest" * (self.rule == "nearest")
        return {
            "AUROC": ranking.auroc_of_counts(out),
            f"AUPR_out{area}": ranking.aupr_of_counts(out, self.interpolation),
            f"AUPR_in{area}": ranking.aupr_of_counts(inside, self.interpolation),
            f"FPR{100 * self.tpr:g}{convention}": rate,
        }

    def _scores(self, outputs: Tensor) -> Tensor:
        if self.score is None:
            scores = outputs
        elif isinstance(self.score, str):
            scores = getattr(score_functions, f"{self.score}_score")(outputs, self.from_logits)
        else:
            scores = self.score(outputs)
        if scores.ndim != 1:
            raise ValueError(f"Scores must be one per example, got shape {tuple(scores.shape)}.")
        check_scores(scores)
        ranking.check_exact(scores)
        return scores.detach().double()

    def _position(self, ood_set: str | int | None) -> int:
        if ood_set is None:
            return 0
        if isinstance(ood_set, int) and 0 <= ood_set < len(self.ood_sets):
            return 1 + ood_set
        check_choice("ood_set", ood_set, self.ood_sets)
        return 1 + self.ood_sets.index(str(ood_set))


def _check_sets(ood_sets: Sequence[str]) -> None:
    if isinstance(ood_sets, str) or not ood_sets or len(set(ood_sets)) != len(ood_sets):
        raise ValueError(f"`ood_sets` must be a list of different names, got {ood_sets!r}.")


def _described(score: Any) -> str:
    """Tells scores apart, in the same words in every process."""
    name = getattr(score, "__qualname__", None) or type(score).__name__
    line = getattr(getattr(score, "__code__", None), "co_firstlineno", "")
    return score if isinstance(score, str) else f"{getattr(score, '__module__', '')}.{name}:{line}"
