"""The one path by which every posterior is judged: predictions in, numbers with names out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_bnn.judging.test_sets import TestSet
from lightning_bnn.likelihoods import Categorical, Gaussian, Likelihood
from lightning_bnn.metrics import ECE, NLL, BrierScore, MutualInformation, OODDetection
from lightning_bnn.metrics.base import ExampleMean

__all__ = [
    "ClassificationJudge",
    "Judge",
    "RegressionJudge",
    "judge_of",
]


class Mean(ExampleMean):
    """Mean over examples of a number that is computed elsewhere."""

    def update(self, values: Tensor) -> None:
        """Add one value per example."""
        self.add(values.double())


class RootMean(Mean):
    """Square root of the mean."""

    def compute(self) -> Tensor:
        """The root; NaN without examples."""
        return super().compute().sqrt()


class Judge(nn.Module):
    """Collects predictions on several sets; every set but the OOD ones is compared with targets.

    Args:
        likelihood: says what outputs mean.
        sets: name and kind of each, the first being in distribution.
    """

    likelihood: Likelihood

    def __init__(self, likelihood: nn.Module, sets: Sequence[TestSet] = (("", "id"),)) -> None:
        super().__init__()
        self.__dict__["likelihood"] = likelihood
        self.sets = list(sets)
        self.quality = nn.ModuleList(
            nn.ModuleDict({} if kind == "ood" else self.quality_metrics()) for _, kind in sets
        )
        self.spread = nn.ModuleList(nn.ModuleDict(self.spread_metrics()) for _ in sets)
        ood = [name for name, kind in sets if kind == "ood"]
        self.only_ood = ood[0] if ood else ""
        self.detection = self.detection_metric(ood) if ood else None

    def quality_metrics(self) -> dict[str, Metric]:
        """Metrics that compare predictions with targets."""
        return {"nll": Mean()}

    def spread_metrics(self) -> dict[str, Metric]:
        """Metrics of the predictions alone."""
        return {}

    def detection_metric(self, ood: Sequence[str]) -> OODDetection | None:
        """Tells in and out of distribution apart; None where there is no score."""
        return None

    def add_quality(self, metrics: Any, outputs: Tensor, targets: Tensor) -> None:
        """Compare outputs ``(samples, batch, ...)`` of one batch with targets."""
        log_probs = self.likelihood.log_prob(outputs, targets).double()
        metrics["nll"].update(math.log(len(log_probs)) - log_probs.logsumexp(0))

    def add_spread(self, metrics: Any, outputs: Tensor) -> Tensor | None:
        """Add the outputs of one batch; returns what OOD examples are detected by."""
        return None

    def needs_targets(self, index: int) -> bool:
        """Whether the predictions on a set are compared with targets."""
        return self.sets[index][1] != "ood"

    def add(self, outputs: Tensor, targets: Tensor | None, index: int = 0) -> None:
        """Add one batch of set number ``index``; OOD examples need no targets."""
        name, kind = self.sets[index]
        if targets is not None and kind != "ood":
            self.add_quality(self.quality[index], outputs, targets)
        seen = self.add_spread(self.spread[index], outputs)
        if self.detection is not None and seen is not None:
            if kind == "ood":
                self.detection.update_ood(seen, name)
            elif index == 0:
                self.detection.update_id(seen)

    def values(self) -> dict[str, Tensor]:
        """Every number under the name of its set; those of the first set have no prefix."""
        found: dict[str, Tensor] = {}
        for k, (name, _) in enumerate(self.sets):
            both: list[Any] = [self.quality[k], self.spread[k]]
            for metrics in both:
                for key, metric in metrics.items():
                    found[f"{name}/{key}" if k else key] = metric.compute()
        if self.detection is not None:
            for key, value in self.detection.compute().items():
                number, _, name = key.partition("/")
                found[f"{name or self.only_ood}/{number}"] = value
        return found


class ClassificationJudge(Judge):
    """Accuracy, NLL, Brier score and ECE; mutual information; OOD detection by confidence."""

    def quality_metrics(self) -> dict[str, Metric]:
        """Metrics of probabilities."""
        return {
            "acc": Mean(),
            "nll": NLL(),
            "brier": BrierScore(),
            "ece": ECE(),
        }

    def spread_metrics(self) -> dict[str, Metric]:
        """What the networks disagree about, in nats."""
        return {"mi": MutualInformation()}

    def detection_metric(self, ood: Sequence[str]) -> OODDetection:
        """By the probability of the likeliest class, as the papers' tables."""
        return OODDetection("max_probability", ood)

    def add_quality(self, metrics: Any, outputs: Tensor, targets: Tensor) -> None:
        """Compare mean probabilities with labels."""
        probs = outputs.softmax(-1).mean(0)
        metrics["acc"].update(probs.argmax(-1) == targets)
        for name in ("nll", "brier", "ece"):
            metrics[name].update(probs, targets)

    def add_spread(self, metrics: Any, outputs: Tensor) -> Tensor:
        """Add the probabilities of all networks."""
        probs = outputs.softmax(-1)
        metrics["mi"].update(probs)
        return probs.mean(0)


class RegressionJudge(Judge):
    """Log-density, RMSE and MAE; variance between networks, which also detects OOD examples."""

    likelihood: Gaussian

    def quality_metrics(self) -> dict[str, Metric]:
        """Metrics of means and densities."""
        return {"nll": Mean(), "rmse": RootMean(), "mae": Mean()}

    def spread_metrics(self) -> dict[str, Metric]:
        """The part of the variance that comes from the weights."""
        return {"epistemic_var": Mean()}

    def detection_metric(self, ood: Sequence[str]) -> OODDetection:
        """By the variance between networks."""
        return OODDetection(None, ood)

    def add_quality(self, metrics: Any, outputs: Tensor, targets: Tensor) -> None:
        """Compare predictive mean and density with targets."""
        super().add_quality(metrics, outputs, targets)
        error = (self.likelihood.predictive(outputs).mean - targets).double()
        metrics["rmse"].update(error.square().mean(-1))
        metrics["mae"].update(error.abs().mean(-1))

    def add_spread(self, metrics: Any, outputs: Tensor) -> Tensor:
        """Add the variance between networks, summed over targets."""
        spread = self.likelihood.predictive(outputs).epistemic.sum(-1)
        metrics["epistemic_var"].update(spread)
        return spread


def judge_of(likelihood: nn.Module, sets: Sequence[TestSet] = (("", "id"),)) -> Judge:
    """The judge for a likelihood; one of the user's own is judged by its log-density."""
    if isinstance(likelihood, Categorical):
        return ClassificationJudge(likelihood, sets)
    if isinstance(likelihood, Gaussian):
        return RegressionJudge(likelihood, sets)
    return Judge(likelihood, sets)
