"""Metrics of predictions: by batch in validation and test, and of any examples in tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_bnn import metrics as M
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.predictions import (
    DensityPredictions,
    Predictions,
    Scores,
    kind_of,
    number,
    numbers,
)

TestSet = tuple[str, str]
"""Name of a set and its kind: ``id``, ``ood`` (no targets that mean anything) or ``shift``."""


def named_sets(datamodule: Any, loaders: Any) -> list[TestSet]:
    """Name the test loaders by the datamodule's ``test_sets``, else as ID and OOD sets.

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
                f"loaders, the first of kind 'id'; got {stated}."
            )
        return list(stated)
    if isinstance(loaders, dict):
        names = list(loaders)[1:]
    else:
        names = [f"ood_{k}" for k in range(1, count)] if count > 2 else ["ood"] * (count - 1)
    return [("test", "id"), *((name, "ood") for name in names)]


Score = Literal["max_probability", "entropy", "mutual_information"]
"""What OOD examples are detected by, of classes; of numbers it is the variance of the means."""


class Evaluator(nn.Module):
    """Collects predictions on several sets, and computes every metric of each.

    Of examples with classes at several positions the numbers are means over positions, and
    ``sequence_nll`` is that of whole examples, where the likelihood says that they are sequences.
    Of several targets ``nll`` is that of all together, ``rmse`` the root of the mean over all, and
    the other numbers are means over them.

    Args:
        likelihood: says what outputs mean.
        sets: name and kind of each, the first being in distribution.

    >>> from lightning_bnn.evaluation import Evaluator
    >>> sets = [("test", "id"), ("rotated", "shift"), ("noise", "ood")]
    >>> evaluator = Evaluator(Categorical(), sets)
    >>> [evaluator.needs_targets(k) for k in range(3)]
    [True, True, False]
    >>> [sorted(metrics) for metrics in evaluator.metrics[1:]]
    [['acc', 'brier', 'ece', 'mi', 'nll'], ['mi']]
    >>> logits = torch.tensor([[[4.0, 0.0], [0.0, 4.0]]])  # of one network
    >>> evaluator.add(logits, torch.tensor([0, 1]))
    >>> evaluator.add(torch.zeros(1, 2, 2), None, index=2)
    >>> values = evaluator.values()
    >>> values["acc"].item(), values["noise/AUROC"].item()
    (1.0, 1.0)
    """

    likelihood: Any

    def __init__(self, likelihood: nn.Module, sets: Sequence[TestSet] = (("", "id"),)) -> None:
        super().__init__()
        self.__dict__["likelihood"] = likelihood
        self.sets = list(sets)
        kind, self.metrics = kind_of(likelihood), nn.ModuleList()
        sequences = isinstance(likelihood, Categorical) and likelihood.of_sequences
        quality = [*kind.quality, *(["sequence_nll"] if sequences else [])]
        for _, role in sets:
            names = [*([] if role == "ood" else quality), *kind.spread]
            self.metrics.append(nn.ModuleDict({name: number(name).metric() for name in names}))
        ood = [name for name, role in sets if role == "ood"]
        self.detection = M.OODDetection(None, ood) if ood and kind.spread else None

    def needs_targets(self, index: int) -> bool:
        """Return whether targets of a set are compared with predictions, or select positions."""
        marks = getattr(self.likelihood, "ignore_index", None) is not None
        return self.sets[index][1] != "ood" or marks

    def add(self, outputs: Tensor, targets: Tensor | None, index: int = 0) -> None:
        """Add one batch of predictions.

        Args:
            outputs: of all networks, ``(samples, batch, ...)``.
            targets: what is compared with them; OOD examples need none.
            index: number of the set.
        """
        name, role = self.sets[index]
        metrics: Any = self.metrics[index]
        if not metrics:  # a density says nothing without targets
            return
        scores = self._scores(outputs, targets, role)
        for key, metric in metrics.items():
            metric.update(*(scores[k] for k in number(key).scores))
        if self.detection is not None and role == "ood":
            self.detection.update_ood(detecting(scores), name)
        elif self.detection is not None and index == 0:
            self.detection.update_id(detecting(scores))

    def _scores(self, outputs: Tensor, targets: Tensor | None, role: str) -> Scores:
        """Return the scores of every example, or of every counted position."""
        likelihood = self.likelihood
        of_sequences: Scores = {}
        if isinstance(likelihood, Categorical):
            if targets is None or (role == "ood" and likelihood.ignore_index is None):
                outputs = likelihood.every_row(outputs)
            else:
                if likelihood.of_sequences and role != "ood":
                    whole = DensityPredictions.of_each(likelihood, outputs, targets).mean()
                    of_sequences["sequence_nll"] = -whole.log_densities()
                outputs, targets = likelihood.rows(outputs, targets)
        targets = None if role == "ood" else targets
        return Predictions.of(likelihood, outputs, targets).scores() | of_sequences

    def values(self) -> dict[str, Tensor]:
        """Compute every metric under the name of its set, without a prefix for the first set."""
        values: dict[str, Tensor] = {}
        for index, (name, _) in enumerate(self.sets):
            metrics: Any = self.metrics[index]
            prefix = f"{name}/" if index else ""
            values |= {prefix + key: metric.compute() for key, metric in metrics.items()}
        if self.detection is not None:
            for key, value in self.detection.compute().items():
                detected, _, name = key.partition("/")
                values[f"{name or 'ood'}/{detected}"] = value
        return values


def detecting(scores: Scores, score: Score = "max_probability") -> Tensor:
    """Select the score for OOD detection.

    Args:
        scores: of classes or numbers.
        score: which one of classes.
    """
    return scores["epistemic_var"] if "epistemic_var" in scores else scores[score]


# ------------------------------------------------------------ tables
NumbersOf = Callable[..., dict[str, float]]
"""Numbers, given indices of examples of every set; of all examples without any."""
_QUALITY = ("acc", "ece", "ace", "brier", "nll", "rmse", "rmse_unit", "nll_moments", "crps",
            "cover90", "width90", "calib", "sharpness")  # fmt: skip
_SPREAD = {"mi": "mutual_information", "var": "epistemic_var"}
_DETECTION = {"aupr": M.aupr, "fpr95": M.fpr95, "auroc": M.auroc}


def numbers_of(
    sets: Sequence[Predictions],
    score: Score = "max_probability",
    reference: Predictions | None = None,
    target_std: Tensor | None = None,
    calibration: Any = None,
) -> NumbersOf:
    """Return a function that computes the metrics of some examples from precomputed scores.

    Args:
        sets: predictions in distribution with targets, and out of distribution if there are any.
        score: what OOD examples are detected by, if these are classes.
        reference: predictions of a reference, to compare the former with.
        target_std: gives standardised errors the unit of the target, if that is known.
        calibration: a `lightning_bnn.calibration.Calibrated` whose numbers are wanted, too.

    >>> outputs = torch.tensor([[[2.0, 0.0], [2.0, 0.0]]])
    >>> predictions = Predictions.of(Categorical(), outputs, torch.tensor([0, 1]))
    >>> numbers = numbers_of([predictions])
    >>> numbers()["acc"], numbers(torch.tensor([0, 0]))["acc"]  # of all, and of a bootstrap sample
    (0.5, 1.0)
    """
    tested, *others = sets
    scores = [tested.scores(), *(replace(ood_set, targets=None).scores() for ood_set in others)]
    if target_std is not None and "squares" in scores[0]:
        unit = torch.as_tensor(target_std).double()
        scores[0]["squares_unit"] = scores[0]["squares"] * unit.square()
    distances = {} if reference is None else tested.distances(reference)
    calibrated = {} if calibration is None else calibration.scores(tested)
    scores[0] |= {**distances, **calibrated}
    names = [name for name in _QUALITY if scores[0].keys() >= {*number(name).scores}]
    names += [*distances, *([] if calibration is None else calibration.measured)]

    def numbers_of_rows(*rows: Tensor) -> dict[str, float]:
        chosen = scores
        if rows:
            pairs = zip(scores, rows, strict=True)
            chosen = [{k: t[index] for k, t in of_set.items()} for of_set, index in pairs]
        return numbers(chosen[0], names) | _spread_and_detection(chosen, score)

    return numbers_of_rows


def _spread_and_detection(sets: Sequence[Scores], score: Score) -> dict[str, float]:
    """Return the disagreement of networks on ID and OOD examples, and its detection metrics."""
    values = {
        f"{prefix}{name}": float(scores[key].mean())
        for prefix, scores in zip(("id", "ood"), sets, strict=False)
        for name, key in _SPREAD.items()
        if key in scores
    }
    if len(sets) > 1:
        pair = [detecting(scores, score) for scores in sets]
        is_ood = torch.cat([torch.full((len(s),), k > 0) for k, s in enumerate(pair)])
        ranked = torch.cat(pair)
        values |= {name: float(f(ranked, is_ood)) for name, f in _DETECTION.items()}
    return values
