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


def check_sets(sets: Any) -> None:
    """Refuse all but one truth value for every example and class."""
    if not isinstance(sets, Tensor) or sets.dtype != torch.bool or sets.ndim != 2:
        description = (
            f"{sets.dtype} {tuple(sets.shape)}" if isinstance(sets, Tensor) else repr(sets)
        )
        raise ValueError(f"`sets` must be boolean of shape (batch, classes), got {description}.")


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
