"""From predictions to numbers with names: the one path for validation, test and comparisons."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_bnn import metrics as M
from lightning_bnn.judging.averages import Averages, has_classes
from lightning_bnn.judging.densities import Mixtures
from lightning_bnn.judging.density_scores import DensityScores
from lightning_bnn.judging.test_sets import TestSet
from lightning_bnn.likelihoods import Bernoulli, Gaussian, Likelihood
from lightning_bnn.metrics.base import ExampleMean
from lightning_bnn.metrics.intervals import PITCalibration

__all__ = [
    "ClassificationEvaluator",
    "DensityEvaluator",
    "Evaluator",
    "RegressionEvaluator",
    "Score",
    "class_numbers",
    "make_evaluator",
]

Metrics = Mapping[str, Callable[[], Metric]]
Score = Literal["max_probability", "entropy", "mutual_information"]
_SCORES: dict[str, Callable[[Averages], Tensor]] = {
    "max_probability": lambda averages: M.max_probability_score(averages.probs),
    "entropy": lambda averages: M.entropy_score(averages.probs),
    "mutual_information": Averages.information,
}
_JUST_ID: Sequence[TestSet] = (("", "id"),)


class Accuracy(ExampleMean):
    """Share of the examples whose likeliest class is right."""

    def update(self, probs: Tensor, labels: Tensor) -> None:
        """Add a batch of probabilities and labels."""
        self.add((probs.argmax(-1) == labels).double())


class Mean(ExampleMean):
    """Mean over examples of a number that is computed elsewhere."""

    def update(self, values: Tensor) -> None:
        """Add one value per example."""
        self.add(values.double())


class RootMean(ExampleMean):
    """Square root of the mean, over all targets of all examples."""

    def update(self, values: Tensor) -> None:
        """Add one value per example, or one per example and target."""
        self.add(values.double().flatten(1).mean(1))

    def compute(self) -> Tensor:
        """The root; NaN without examples."""
        return super().compute().sqrt()


class Evaluator(nn.Module, ABC):
    """Collects predictions on several sets, and computes every number of each.

    Args:
        likelihood: says what outputs mean.
        sets: name and kind of each, the first being in distribution.
        quality: metrics that compare predictions with targets; OOD sets have none of these.
        spread: metrics of the predictions alone.
        detects: whether there is a score that tells OOD examples from others.

    >>> import torch
    >>> from lightning_bnn.judging import make_evaluator
    >>> from lightning_bnn.likelihoods import Categorical
    >>> sets = [("test", "id"), ("rotated", "shift"), ("noise", "ood")]
    >>> evaluator = make_evaluator(Categorical(), sets)
    >>> isinstance(evaluator, Evaluator), [evaluator.needs_targets(k) for k in range(3)]
    (True, [True, True, False])
    >>> [sorted(metrics) for metrics in evaluator.metrics[1:]]
    [['acc', 'brier', 'ece', 'mi', 'nll'], ['mi']]
    """

    likelihood: Likelihood

    def __init__(
        self,
        likelihood: nn.Module,
        sets: Sequence[TestSet],
        quality: Metrics,
        spread: Metrics,
        detects: bool = True,
    ) -> None:
        super().__init__()
        self.__dict__["likelihood"] = likelihood
        self.sets = list(sets)
        self.quality = list(quality)
        self.metrics = nn.ModuleList()
        for _, kind in sets:
            of_set = spread if kind == "ood" else {**quality, **spread}
            self.metrics.append(nn.ModuleDict({name: metric() for name, metric in of_set.items()}))
        ood = [name for name, kind in sets if kind == "ood"]
        self.detection = M.OODDetection(None, ood) if ood and detects else None

    @abstractmethod
    def record(self, metrics: Any, outputs: Any, targets: Tensor | None) -> Tensor | None:
        """Update the metrics of a set by one batch; returns the scores that detect OOD examples."""

    def needs_targets(self, index: int) -> bool:
        """Whether the predictions on a set are compared with targets."""
        return self.sets[index][1] != "ood"

    def add(self, outputs: Any, targets: Tensor | None, index: int = 0) -> None:
        """Add one batch of predictions.

        Args:
            outputs: of all networks, ``(samples, batch, ...)``; also `Averages` or `Mixtures`.
            targets: what is compared with them; OOD examples need none.
            index: number of the set.
        """
        name, kind = self.sets[index]
        scores = self.record(self.metrics[index], outputs, None if kind == "ood" else targets)
        if self.detection is None or scores is None:
            return
        if kind == "ood":
            self.detection.update_ood(scores, name)
        elif index == 0:
            self.detection.update_id(scores)

    def values(self) -> dict[str, Tensor]:
        """Every number under the name of its set; those of the first set have no prefix."""
        values: dict[str, Tensor] = {}
        for index, (name, _) in enumerate(self.sets):
            metrics: Any = self.metrics[index]
            prefix = f"{name}/" if index else ""
            values |= {prefix + key: metric.compute() for key, metric in metrics.items()}
        if self.detection is not None:
            for key, value in self.detection.compute().items():
                number, _, name = key.partition("/")
                values[f"{name or 'ood'}/{number}"] = value
        return values


class DensityEvaluator(Evaluator):
    r"""The log-density of targets, for likelihoods of which nothing else is known.

    .. math:: -\tfrac1n \textstyle\sum_i \log \tfrac1S \sum_s p_s(y_i)

    >>> import torch
    >>> from lightning_bnn.likelihoods import Gaussian
    >>> evaluator = DensityEvaluator(Gaussian())
    >>> evaluator.add(torch.zeros(3, 5, 1), torch.zeros(5, 1))  # of three networks
    >>> round(evaluator.values()["nll"].item(), 4)  # log(2 pi) / 2
    0.9189
    """

    def __init__(self, likelihood: nn.Module, sets: Sequence[TestSet] = _JUST_ID) -> None:
        super().__init__(likelihood, sets, {"nll": Mean}, {}, detects=False)

    def record(self, metrics: Any, outputs: Tensor, targets: Tensor | None) -> None:
        """Compare with targets; nothing detects OOD examples."""
        if targets is not None:
            metrics["nll"].update(_negative_log_density(self.likelihood, outputs, targets))


class RegressionEvaluator(Evaluator):
    """Scores of the mixture of the networks' Gaussians; variance between networks detects OOD.

    Of several targets ``nll`` is that of all together; RMSE is the root of the mean over all, and
    the other numbers are means over them.

    >>> import torch
    >>> evaluator = RegressionEvaluator(Gaussian(std=1.0))
    >>> evaluator.add(torch.zeros(4, 2, 1), torch.tensor([[1.0], [-1.0]]))  # of four networks
    >>> values = evaluator.values()
    >>> values["rmse"].item(), values["cover90"].item(), round(values["width90"].item(), 2)
    (1.0, 1.0, 3.29)
    """

    likelihood: Gaussian

    def __init__(self, likelihood: Gaussian, sets: Sequence[TestSet] = _JUST_ID) -> None:
        quality: Metrics = {
            "nll": Mean,
            "rmse": RootMean,
            "mae": Mean,
            "nll_moments": Mean,
            "crps": Mean,
            "cover90": Mean,
            "width90": Mean,
            "calib": PITCalibration,
        }
        super().__init__(likelihood, sets, quality, {"epistemic_var": Mean, "sharpness": Mean})

    def record(
        self, metrics: Any, outputs: Tensor | Mixtures | DensityScores, targets: Tensor | None
    ) -> Tensor:
        """Compare with targets; the variance between networks detects OOD examples."""
        if isinstance(outputs, Tensor):
            outputs = Mixtures.of_each(self.likelihood, outputs).mean()
        if isinstance(outputs, Mixtures):
            outputs = DensityScores.of(outputs, targets)
        scores = outputs.of_each
        for name, metric in metrics.items():
            metric.update(scores[_SCORED.get(name, name)])
        return scores["epistemic_var"]


_SCORED = {"rmse": "squares", "calib": "pit"}
"""What some numbers are computed from."""


class ClassificationEvaluator(Evaluator):
    """Accuracy, NLL, Brier score and ECE of mean probabilities; information; OOD detection.

    Args:
        likelihood: of classes.
        sets: name and kind of each.
        score: what OOD examples are detected by.
        **more: further metrics of probabilities and labels.

    >>> import torch
    >>> from lightning_bnn.likelihoods import Categorical
    >>> evaluator = ClassificationEvaluator(Categorical(), [("test", "id"), ("noise", "ood")])
    >>> logits = torch.tensor([[[4.0, 0.0], [0.0, 4.0]]])  # of one network
    >>> evaluator.add(logits, torch.tensor([0, 1]))
    >>> evaluator.add(torch.zeros(1, 2, 2), None, index=1)
    >>> values = evaluator.values()
    >>> values["acc"].item(), values["noise/AUROC"].item()
    (1.0, 1.0)
    """

    def __init__(
        self,
        likelihood: nn.Module,
        sets: Sequence[TestSet] = _JUST_ID,
        score: Score = "max_probability",
        **more: Callable[[], Metric],
    ) -> None:
        quality: Metrics = {
            "acc": Accuracy,
            "nll": M.NLL,
            "brier": M.BrierScore,
            "ece": M.ECE,
            **more,
        }
        super().__init__(likelihood, sets, quality, {"mi": Mean})
        self.score = _SCORES[score]

    def record(self, metrics: Any, outputs: Tensor | Averages, targets: Tensor | None) -> Tensor:
        """Compare mean probabilities with labels; the chosen score detects OOD examples."""
        if isinstance(outputs, Tensor):
            outputs = Averages.of(self.likelihood, outputs)
        if targets is not None:
            labels = targets.long() if isinstance(self.likelihood, Bernoulli) else targets
            for name in self.quality:
                metrics[name].update(outputs.probs, labels)
        metrics["mi"].update(outputs.information())
        return self.score(outputs)


def make_evaluator(likelihood: nn.Module, sets: Sequence[TestSet] = _JUST_ID) -> Evaluator:
    """The evaluator for a likelihood; one of the user's own is judged by its log-density.

    >>> from lightning_bnn.likelihoods import Categorical
    >>> [type(make_evaluator(likelihood)).__name__ for likelihood in (Categorical(), Gaussian())]
    ['ClassificationEvaluator', 'RegressionEvaluator']
    """
    if has_classes(likelihood):
        return ClassificationEvaluator(likelihood, sets)
    if isinstance(likelihood, Gaussian):
        return RegressionEvaluator(likelihood, sets)
    return DensityEvaluator(likelihood, sets)


_IN_TABLES = {
    "acc": "acc", "ece": "ece", "ace": "ace", "brier": "brier", "nll": "nll", "idmi": "mi",
    "aupr": "ood/AUPR_out", "fpr95": "ood/FPR95", "auroc": "ood/AUROC", "oodmi": "ood/mi",
}  # fmt: skip


def class_numbers(
    likelihood: nn.Module,
    sets: Sequence[Averages],
    labels: Tensor,
    score: Score = "max_probability",
) -> dict[str, float]:
    """Every number of the papers' tables, as fractions and nats.

    Args:
        likelihood: of classes.
        sets: predictions in distribution, and out of distribution if there are any.
        labels: classes of the former.
        score: what OOD examples are detected by.

    >>> import torch
    >>> from lightning_bnn.likelihoods import Categorical
    >>> one, other = [[2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [0.0, 4.0]]
    >>> averages = Averages.of(Categorical(), torch.tensor([one, other]))  # of two networks
    >>> numbers = class_numbers(Categorical(), [averages], torch.tensor([0, 1]))
    >>> numbers["acc"], sorted(numbers)
    (1.0, ['acc', 'ace', 'brier', 'ece', 'idmi', 'nll'])
    """
    kinds: list[TestSet] = [("test", "id"), ("ood", "ood")]
    evaluator = ClassificationEvaluator(likelihood, kinds[: len(sets)], score, ace=M.ACE)
    for index, averages in enumerate(sets):
        evaluator.add(averages, labels if index == 0 else None, index)
    values = evaluator.values()
    return {name: float(values[key]) for name, key in _IN_TABLES.items() if key in values}


def _negative_log_density(likelihood: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """Of the mixture of all networks, one number per example."""
    log_probs = likelihood.log_prob(outputs, targets).double()
    return math.log(len(log_probs)) - log_probs.logsumexp(0)
