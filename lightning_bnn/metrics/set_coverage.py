"""Prediction sets: how often they hold the truth, over all and class by class, and their size."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from lightning_bnn.metrics.shapes import Labels, Number
from lightning_bnn.metrics.validation import check_labels

__all__ = [
    "class_coverage",
    "coverage_gap",
    "set_coverage",
    "set_size",
]

Sets = Bool[Tensor, "batch classes"]


# ------------------------------------------------------------ functions
def set_coverage(sets: Sets, labels: Labels) -> Number:
    r"""Share of the examples whose set holds their class.

    .. math:: \frac1n \sum_i [y_i \in S_i]

    Args:
        sets: which classes belong to the set of each example, boolean ``(batch, classes)``.
        labels: ``(batch,)`` class indices.

    >>> set_coverage(torch.tensor([[True, True], [True, False]]), torch.tensor([1, 1]))
    tensor(0.5000, dtype=torch.float64)
    """
    return _covered(sets, labels).mean()


def set_size(sets: Sets) -> Number:
    r"""Mean number of classes in a set.

    .. math:: \frac1n \sum_i |S_i|

    Args:
        sets: which classes belong to the set of each example, boolean ``(batch, classes)``.

    >>> set_size(torch.tensor([[True, True], [True, False]]))
    tensor(1.5000, dtype=torch.float64)
    """
    check_sets(sets)
    return sets.sum(-1).double().mean()


def class_coverage(sets: Sets, labels: Labels) -> Float64[Tensor, " classes"]:
    r"""Share of covered examples of every class, or NaN for classes that do not occur.

    .. math:: \frac{1}{n_c} \sum_{i: y_i = c} [y_i \in S_i]

    Args:
        sets: which classes belong to the set of each example, boolean ``(batch, classes)``.
        labels: ``(batch,)`` class indices.

    >>> class_coverage(torch.tensor([[True, True], [True, False]]), torch.tensor([0, 1]))
    tensor([1., 0.], dtype=torch.float64)
    """
    covered, total = _by_class(sets, labels)
    return covered.double() / total


def coverage_gap(sets: Sets, labels: Labels, alpha: int | float = 0.1) -> Number:
    r"""Mean distance over classes of their coverage to what was asked for (CovGap).

    .. math:: \frac1C \sum_c \left| coverage_c - (1 - \alpha) \right|

    References:
        | Class-Conditional Conformal Prediction with Many Classes (Ding et al., 2023)
        | https://arxiv.org/abs/2306.09335

    Args:
        sets: which classes belong to the set of each example, boolean ``(batch, classes)``.
        labels: ``(batch,)`` class indices; classes that do not occur do not count.
        alpha: the share of examples that may be missed.

    >>> coverage_gap(torch.tensor([[True, True], [True, False]]), torch.tensor([0, 1]))
    tensor(0.5000, dtype=torch.float64)
    """
    check_alpha(alpha)
    return _gap(*_by_class(sets, labels), alpha)


def check_sets(sets: Any) -> None:
    """Refuse all but one truth value for every example and class."""
    if not isinstance(sets, Tensor) or sets.dtype != torch.bool or sets.ndim != 2:
        what = f"{sets.dtype} {tuple(sets.shape)}" if isinstance(sets, Tensor) else repr(sets)
        raise ValueError(f"`sets` must be boolean of shape (batch, classes), got {what}.")


def check_alpha(alpha: int | float) -> None:
    """Refuse shares that are not between 0 and 1."""
    if not 0 < alpha < 1:
        raise ValueError(f"`alpha` must be between 0 and 1, such as 0.1, got {alpha!r}.")


def _covered(sets: Tensor, labels: Tensor) -> Tensor:
    check_sets(sets)
    check_labels(labels, sets)
    return sets.gather(-1, labels.long()[:, None])[:, 0].double()


def _by_class(sets: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Covered examples and all examples of every class."""
    covered, labels = _covered(sets, labels).bool(), labels.long()
    classes = sets.shape[-1]
    return (
        torch.bincount(labels[covered], minlength=classes),
        torch.bincount(labels, minlength=classes),
    )


def _gap(covered: Tensor, total: Tensor, alpha: int | float) -> Tensor:
    occurs = total > 0
    return (covered[occurs].double() / total[occurs] - (1 - alpha)).abs().mean()
