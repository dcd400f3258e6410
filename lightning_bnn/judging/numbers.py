"""Numbers of tables from predictions of any kind, of all examples or of examples drawn again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.judging.densities import LogDensities, Mixtures
from lightning_bnn.judging.density_scores import DensityScores
from lightning_bnn.judging.evaluators import RegressionEvaluator, Score, class_numbers
from lightning_bnn.judging.test_sets import TestSet

__all__ = ["NumbersOf", "numbers_of", "regression_numbers"]

NumbersOf = Callable[..., dict[str, float]]
"""Numbers, given indices of examples of every set; of all examples without any."""
_IN_TABLES = {
    "rmse": "rmse", "nll": "nll", "nll_moments": "nll_moments", "crps": "crps",
    "cover90": "cover90", "width90": "width90", "calib": "calib", "sharpness": "sharpness",
    "aupr": "ood/AUPR_out", "fpr95": "ood/FPR95", "auroc": "ood/AUROC",
    "idvar": "epistemic_var", "oodvar": "ood/epistemic_var",
}  # fmt: skip


def numbers_of(
    likelihood: nn.Module,
    sets: Sequence[Any],
    targets: Tensor,
    score: Score = "max_probability",
    reference: Any = None,
    target_std: Tensor | None = None,
) -> NumbersOf:
    """A function that gives the numbers of some examples; what can be known before is computed.

    Args:
        likelihood: says what outputs mean.
        sets: predictions in distribution, and out of distribution if there are any.
        targets: of the former.
        score: what OOD examples are detected by, if these are classes.
        reference: of `reference_of`, to compare the former with.
        target_std: gives standardised errors the unit of the target, if that is known.

    >>> from lightning_bnn.judging import Averages
    >>> from lightning_bnn.likelihoods import Categorical
    >>> outputs = torch.tensor([[[2.0, 0.0], [2.0, 0.0]]])
    >>> averages = Averages.of(Categorical(), outputs)
    >>> numbers = numbers_of(Categorical(), [averages], torch.tensor([0, 1]))
    >>> numbers()["acc"], numbers(torch.tensor([0, 0]))["acc"]  # of all, and of a bootstrap sample
    (0.5, 1.0)
    """
    distances = {} if reference is None else reference.distances(sets[0])
    prepared = [_prepared(part, targets if k == 0 else None) for k, part in enumerate(sets)]

    def numbers(*rows: Tensor) -> dict[str, float]:
        chosen = [part[r] for part, r in zip(prepared, rows, strict=True)] if rows else prepared
        labels = targets[rows[0]] if rows else targets
        far = {k: float((v[rows[0]] if rows else v).mean()) for k, v in distances.items()}
        return {**_numbers(likelihood, chosen, labels, score, target_std), **far}

    return numbers


def regression_numbers(
    likelihood: Any, sets: Sequence[Any], targets: Tensor, target_std: Tensor | None = None
) -> dict[str, float]:
    """Every number of a regression's table: in the unit of the targets as networks see them.

    Args:
        likelihood: a `Gaussian`.
        sets: `Mixtures` in distribution, and out of distribution if there are any.
        targets: of the former, ``(examples, targets)``.
        target_std: gives one more RMSE, in the target's own unit.

    >>> from lightning_bnn.likelihoods import Gaussian
    >>> mixture = Mixtures.of_each(Gaussian(), torch.zeros(4, 2, 1)).mean()
    >>> targets, unit = torch.tensor([[1.0], [-1.0]]), torch.tensor(10.0)
    >>> numbers = regression_numbers(Gaussian(), [mixture], targets, unit)
    >>> numbers["rmse"], numbers["rmse_unit"], round(numbers["nll"], 3)  # log(2 pi) / 2 + 1 / 2
    (1.0, 10.0, 1.419)
    """
    return numbers_of(likelihood, sets, targets, target_std=target_std)()


def _prepared(part: Any, targets: Tensor | None) -> Any:
    """Scores do not depend on which other examples there are."""
    return DensityScores.of(part, targets) if isinstance(part, Mixtures) else part


def _numbers(
    likelihood: Any, sets: Sequence[Any], targets: Tensor, score: Score, std: Tensor | None
) -> dict[str, float]:
    if isinstance(sets[0], LogDensities):
        return {"nll": -float(sets[0].values.mean())}
    if isinstance(sets[0], DensityScores):
        return _of_scores(likelihood, sets, std)
    return class_numbers(likelihood, sets, targets, score)


def _of_scores(
    likelihood: Any, sets: Sequence[DensityScores], std: Tensor | None
) -> dict[str, float]:
    kinds: list[TestSet] = [("test", "id"), ("ood", "ood")]
    evaluator = RegressionEvaluator(likelihood, kinds[: len(sets)])
    for index, scores in enumerate(sets):
        evaluator.add(scores, None, index)
    values = evaluator.values()
    numbers = {name: float(values[key]) for name, key in _IN_TABLES.items() if key in values}
    if std is not None:
        squares = sets[0].of_each["squares"] * torch.as_tensor(std).double().square()
        numbers["rmse_unit"] = float(squares.mean().sqrt())
    return numbers
