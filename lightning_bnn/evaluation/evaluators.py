"""Scores of predictions by name: the one path for validation, test and comparisons."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_bnn import metrics as M
from lightning_bnn.evaluation.predictions import (
    ClassPredictions,
    GaussianPredictions,
    LogDensities,
    has_classes,
)
from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from lightning_bnn.metrics.base import ExampleMean
from lightning_bnn.metrics.gaussian_mixture import log_density, mixture_moments, mixture_nll
from lightning_bnn.metrics.regression import PITCalibration, crps_of_each, inside, width_of_each
from weightsym.params import where_precise

TestSet = tuple[str, str]
"""Name of a set and its kind: ``id``, ``ood`` (no targets that mean anything) or ``shift``."""


def named_sets(datamodule: Any, loaders: Any) -> list[TestSet]:
    """Name the test loaders as the datamodule's ``test_sets`` says, else as ID and OOD sets.

    Args:
        datamodule: where the loaders are from, if it is known.
        loaders: one, a list of them, or a dict with their names.

    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> data = TwoGaussians()
    >>> named_sets(data, data.test_dataloader())
    [('test', 'id'), ('ring', 'ood')]
    >>> named_sets(None, {"mnist": None, "fashion": None})
    [('test', 'id'), ('fashion', 'ood')]
    """
    count = len(loaders) if isinstance(loaders, (list, tuple, dict)) else 1
    stated = getattr(datamodule, "test_sets", None)
    if stated is not None:
        if len(stated) != count or stated[0][1] != "id":
            raise ValueError(
                f"`test_sets` of {type(datamodule).__name__} must name each of its {count} test "
                f"loaders, the first of kind 'id'; it is {stated}."
            )
        return list(stated)
    if isinstance(loaders, dict):
        names = list(loaders)[1:]
    else:
        names = [f"ood_{k}" for k in range(1, count)] if count > 2 else ["ood"] * (count - 1)
    return [("test", "id"), *((name, "ood") for name in names)]


INTERVAL = 0.9
"""Probability of the central intervals that are scored."""


@dataclass(frozen=True)
class DensityScores:
    """Scores of every example, by name, NaN for examples that are not valid.

    Attributes:
        of_each: ``(examples,)``, or ``(examples, targets)``.
    """

    of_each: Mapping[str, Tensor]

    @classmethod
    def of(cls, mixtures: GaussianPredictions, targets: Tensor | None) -> DensityScores:
        """Of predictions, compared with targets if there are any.

        Args:
            mixtures: predictions.
            targets: ``(examples, targets)``; None of what is out of distribution.
        """
        means, stds = mixtures.components()
        valid = (means.isfinite() & stds.isfinite() & (stds > 0)).all(0).all(-1)
        if targets is not None:
            _check_targets(targets, means)
            targets = where_precise(targets.detach()).double()
            valid = valid & targets.isfinite().all(-1)
            targets = torch.where(valid[:, None], targets, 0.0)
        means = torch.where(valid[:, None], means, 0.0)
        stds = torch.where(valid[:, None], stds, 1.0)
        scores = _spread(means, stds)
        if targets is not None:
            scores |= _quality(means, stds, targets, mixtures.whitening)
        unknown = ~valid
        return cls(
            {
                name: values.masked_fill(unknown.reshape(-1, *(1,) * (values.ndim - 1)), math.nan)
                for name, values in scores.items()
            }
        )

    def __getitem__(self, which: Any) -> DensityScores:
        return DensityScores({name: values[which] for name, values in self.of_each.items()})


def _spread(means: Tensor, stds: Tensor) -> dict[str, Tensor]:
    """Score the predictions alone, without targets."""
    return {
        "epistemic_var": (means - means.mean(0)).square().mean(0).sum(-1),
        "sharpness": mixture_moments(means, stds)[1].mean(-1),
    }


def _quality(
    means: Tensor, stds: Tensor, targets: Tensor, whitening: Tensor | None
) -> dict[str, Tensor]:
    """Score predictions beside targets, by log-densities of all targets of an example together."""
    if whitening is None:
        of_networks = -log_density(means, stds, targets).sum(-1)
    else:
        of_networks = correlated_nll_of_each(means, whitening.movedim(-1, 0), targets)
    mean, std = mixture_moments(means, stds)
    error = mean - targets
    u = M.pit(means, stds, targets)
    return {
        "nll": math.log(len(means)) - (-of_networks).logsumexp(0),
        "nll_moments": mixture_nll(mean[None], std[None], targets).sum(-1),
        "squares": error.square(),
        "mae": error.abs().mean(-1),
        "crps": crps_of_each(means, stds, targets).mean(-1),
        "pit": u,
        "cover90": inside(u, INTERVAL).mean(-1),
        "width90": width_of_each(means, stds, INTERVAL).mean(-1),
    }


def correlated_nll_of_each(means: Tensor, whitening: Tensor, targets: Tensor) -> Tensor:
    """Negative log-density of correlated targets under every network, ``(networks, examples)``.

    Args:
        means: of every network.
        whitening: triangular matrices that make errors independent, of variance one.
        targets: ``(examples, targets)``.
    """
    z = (whitening @ (targets - means)[..., None])[..., 0]
    logs = whitening.diagonal(dim1=-2, dim2=-1).log()
    return (z.square() / 2 - logs + math.log(2 * math.pi) / 2).sum(-1)


def _check_targets(targets: Tensor, means: Tensor) -> None:
    if targets.shape != means.shape[1:]:
        raise ValueError(
            f"`targets` must have shape {tuple(means.shape[1:])}, got {tuple(targets.shape)}"
            + (": add a dimension, `targets[:, None]`." if targets.ndim == 1 else ".")
        )


Metrics = Mapping[str, Callable[[], Metric]]
Score = Literal["max_probability", "entropy", "mutual_information"]
_SCORES: dict[str, Callable[[ClassPredictions], Tensor]] = {
    "max_probability": lambda averages: M.max_probability_score(averages.probs),
    "entropy": lambda averages: M.entropy_score(averages.probs),
    "mutual_information": ClassPredictions.information,
}
_JUST_ID: Sequence[TestSet] = (("", "id"),)
TABLE_SETS: Sequence[TestSet] = (("test", "id"), ("ood", "ood"))
"""Sets of which tables have numbers."""
_IN_TABLES = {
    **{name: name for name in ("acc", "ece", "ace", "brier", "nll", "rmse", "nll_moments", "crps",
                               "cover90", "width90", "calib", "sharpness")},
    "idmi": "mi", "idvar": "epistemic_var", "oodmi": "ood/mi", "oodvar": "ood/epistemic_var",
    "aupr": "ood/AUPR_out", "fpr95": "ood/FPR95", "auroc": "ood/AUROC",
}  # fmt: skip
"""Numbers of tables, and their names among the values of an evaluator."""


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
        """Return the root, NaN without examples."""
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
    >>> from lightning_bnn.evaluation import make_evaluator
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
        for _, role in sets:
            of_set = spread if role == "ood" else {**quality, **spread}
            self.metrics.append(nn.ModuleDict({name: metric() for name, metric in of_set.items()}))
        ood = [name for name, role in sets if role == "ood"]
        self.detection = M.OODDetection(None, ood) if ood and detects else None

    @abstractmethod
    def record(self, metrics: Any, outputs: Any, targets: Tensor | None) -> Tensor | None:
        """Update the metrics of a set by one batch, and return scores that detect OOD examples."""

    def needs_targets(self, index: int) -> bool:
        """Tell whether targets of a set are compared with predictions, or say which count."""
        marks = getattr(self.likelihood, "ignore_index", None) is not None
        return self.sets[index][1] != "ood" or marks

    def add(self, outputs: Any, targets: Tensor | None, index: int = 0) -> None:
        """Add one batch of predictions.

        Args:
            outputs: of all networks, ``(samples, batch, ...)``; also
                `ClassPredictions` or `GaussianPredictions`.
            targets: what is compared with them; OOD examples need none.
            index: number of the set.
        """
        name, role = self.sets[index]
        if isinstance(outputs, Tensor) and isinstance(self.likelihood, Categorical):
            if targets is None or (role == "ood" and self.likelihood.ignore_index is None):
                outputs = self.likelihood.every_row(outputs)
            else:
                metrics: Any = self.metrics[index]
                if "sequence_nll" in metrics:
                    logs = LogDensities.of_each(self.likelihood, outputs, targets)
                    metrics["sequence_nll"].update(-logs.mean().values)
                outputs, targets = self.likelihood.rows(outputs, targets)
        targets = None if role == "ood" else targets
        scores = self.record(self.metrics[index], outputs, targets)
        if self.detection is None or scores is None:
            return
        if role == "ood":
            self.detection.update_ood(scores, name)
        elif index == 0:
            self.detection.update_id(scores)

    def values(self) -> dict[str, Tensor]:
        """Compute every number under the name of its set, without a prefix for the first set."""
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

    def table_numbers(self, sets: Sequence[Any], targets: Tensor | None) -> dict[str, float]:
        """The numbers of tables, from predictions in and perhaps out of distribution.

        Args:
            sets: predictions of `TABLE_SETS`, as far as there are any.
            targets: of the first.
        """
        for index, predictions in enumerate(sets):
            self.add(predictions, targets if index == 0 else None, index)
        values = self.values()
        return {name: float(values[key]) for name, key in _IN_TABLES.items() if key in values}


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
        """Compare with targets, and return no score that detects OOD examples."""
        if targets is not None:
            logs = LogDensities.of_each(self.likelihood, outputs, targets)
            metrics["nll"].update(-logs.mean().values)


class RegressionEvaluator(Evaluator):
    """Scores of the mixture of the networks' Gaussians, and OOD detection by their variance.

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
        self,
        metrics: Any,
        outputs: Tensor | GaussianPredictions | DensityScores,
        targets: Tensor | None,
    ) -> Tensor:
        """Compare with targets, and return the variance between networks to detect OOD examples."""
        if isinstance(outputs, Tensor):
            outputs = GaussianPredictions.of_each(self.likelihood, outputs).mean()
        if isinstance(outputs, GaussianPredictions):
            outputs = DensityScores.of(outputs, targets)
        scores = outputs.of_each
        for name, metric in metrics.items():
            metric.update(scores[_SCORED.get(name, name)])
        return scores["epistemic_var"]


_SCORED = {"rmse": "squares", "calib": "pit"}
"""What some numbers are computed from."""


class ClassificationEvaluator(Evaluator):
    """Accuracy, NLL, Brier score, ECE and information of mean probabilities, and OOD detection.

    Of examples with several positions these are means over positions; ``sequence_nll`` is that of
    whole examples, where the likelihood says that they are sequences.

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
        if isinstance(likelihood, Categorical) and likelihood.of_sequences:
            for (_, role), metrics in zip(self.sets, self.metrics, strict=True):
                if role != "ood":
                    cast(nn.ModuleDict, metrics)["sequence_nll"] = Mean()

    def record(
        self, metrics: Any, outputs: Tensor | ClassPredictions, targets: Tensor | None
    ) -> Tensor:
        """Compare mean probabilities with labels, and return scores that detect OOD examples."""
        if isinstance(outputs, Tensor):
            outputs = ClassPredictions.of(self.likelihood, outputs)
        if targets is not None:
            labels = targets.long() if isinstance(self.likelihood, Bernoulli) else targets
            for name in self.quality:
                metrics[name].update(outputs.probs, labels)
        metrics["mi"].update(outputs.information())
        return self.score(outputs)


def make_evaluator(likelihood: nn.Module, sets: Sequence[TestSet] = _JUST_ID) -> Evaluator:
    """Choose the evaluator for a likelihood, by log-density for one of the user's own.

    >>> from lightning_bnn.likelihoods import Categorical
    >>> [type(make_evaluator(likelihood)).__name__ for likelihood in (Categorical(), Gaussian())]
    ['ClassificationEvaluator', 'RegressionEvaluator']
    """
    if has_classes(likelihood):
        return ClassificationEvaluator(likelihood, sets)
    if isinstance(likelihood, Gaussian):
        return RegressionEvaluator(likelihood, sets)
    return DensityEvaluator(likelihood, sets)


def class_numbers(
    likelihood: nn.Module,
    sets: Sequence[ClassPredictions],
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
    >>> averages = ClassPredictions.of(Categorical(), torch.tensor([one, other]))  # of two networks
    >>> numbers = class_numbers(Categorical(), [averages], torch.tensor([0, 1]))
    >>> numbers["acc"], sorted(numbers)
    (1.0, ['acc', 'ace', 'brier', 'ece', 'idmi', 'nll'])
    """
    of_one = likelihood if isinstance(likelihood, Bernoulli) else Categorical()
    evaluator = ClassificationEvaluator(of_one, TABLE_SETS[: len(sets)], score, ace=M.ACE)
    return evaluator.table_numbers(sets, labels)
