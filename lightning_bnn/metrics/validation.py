"""Checks of shapes and values of predictions, labels and scores."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Float64, Integer, Real, Shaped
from torch import Tensor

from weightsym.params import check_tensors, precise

Value = TypeVar("Value")
Probs = Float[Tensor, "batch classes"]
SampledProbs = Float[Tensor, "samples batch classes"]
Labels = Integer[Tensor, " batch"]
PerExample = Float[Tensor, " batch"]
Scores = Real[Tensor, " ..."]
IsOOD = Shaped[Tensor, " ..."]
Draws = Float[Tensor, "chains samples *numbers"]
Number = Float64[Tensor, ""]
SUM_TOLERANCE = 1e-2
"""Tolerance for sums of rows of bfloat16 probabilities, which logits hardly ever meet."""
_ENSEMBLE = (
    "The prediction of an ensemble is the mean of its probabilities, `probs.mean(0)` "
    "(of logits, `logits.softmax(-1).mean(0)`)."
)


def probabilities(values: Tensor, from_logits: bool = False, name: str = "probs") -> Tensor:
    """Return class probabilities in at least float32, from probabilities or logits."""
    if from_logits:
        return logits_of(values, name).softmax(-1)
    values = _at_least_single(values, name)
    least = check_distributions(values, name)
    return values.clamp_min(0) if least < 0 else values


def logits_of(values: Tensor, name: str = "logits") -> Tensor:
    """Return finite logits in at least float32."""
    values = _at_least_single(values, name)
    check_finite(values, name, "logits")
    return values


def _at_least_single(values: Any, name: str) -> Tensor:
    """Require one value per class, and return them in float32 or float64."""
    check_tensors(**{name: values})
    if not values.is_floating_point() or values.ndim < 2:
        raise ValueError(
            f"`{name}` must be a float tensor (..., batch, classes), got {values.dtype} "
            f"{tuple(values.shape)}."
        )
    if values.shape[-1] < 2:
        raise ValueError(
            f"`{name}` has {values.shape[-1]} class: for a binary network pass both, "
            "`torch.stack([1 - p, p], -1)`."
        )
    return values if values.dtype == torch.float64 else values.float()


def check_distributions(probs: Tensor, name: str = "probs") -> float:
    """Require finite non-negative numbers that sum to one, and return the least."""
    if probs.numel() == 0:
        return 0.0
    low, high = probs.sum(-1).aminmax()
    low, high, least = _numbers(low, high, probs.min())
    if not (low >= 1 - SUM_TOLERANCE and high <= 1 + SUM_TOLERANCE and least >= -SUM_TOLERANCE):
        off = max(1 - low, high - 1, -least) if math.isfinite(low + high) else math.nan
        raise ValueError(
            f"`{name}` must be finite probabilities that sum to one over the last axis, "
            f"but they are off by {off:.3g}. Pass `from_logits=True` if these are logits."
        )
    return least


def _numbers(*values: Tensor) -> list[Any]:
    """Return the numbers in tensors, and wait for a device only once."""
    on_cpu = values[0].device.type == "cpu"
    return [v.item() for v in values] if on_cpu else torch.stack(values).tolist()


def are_distributions(values: Tensor) -> bool:
    """Return whether rows are probabilities, up to rounding, which logits hardly ever are.

    >>> are_distributions(torch.eye(3)), are_distributions(torch.eye(3).log_softmax(-1))
    (True, False)
    """
    if values.ndim < 2 or values.shape[-1] < 2 or values.numel() == 0:
        return False
    off = (precise(values).sum(-1) - 1).abs().max()
    return bool((values.min() >= 0) & (off < SUM_TOLERANCE))


def check_finite(values: Tensor, name: str, kind: str = "values") -> None:
    """Require a tensor without NaN and infinite values."""
    check_tensors(**{name: values})
    if values.numel() and not bool(torch.isfinite(values.sum())) and not values.isfinite().all():
        raise ValueError(f"`{name}` must be finite, but it holds NaN or infinite {kind}.")


def check_labels(labels: Tensor, probs: Tensor) -> None:
    """Require one class index per example."""
    check_tensors(labels=labels)
    check_predictions(probs)
    if labels.shape != probs.shape[:1] or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"`labels` must be {probs.shape[0]} integers, got {labels.dtype} {tuple(labels.shape)}."
        )
    check_classes(labels, probs.shape[-1])


def check_classes(labels: Tensor, classes: int) -> None:
    """Require indices of classes that the network has."""
    if not labels.numel():
        return
    low, high = _numbers(*labels.long().aminmax())
    if low < 0 or high >= classes:
        got, from_one = low if low < 0 else high, high == classes and low > 0
        raise ValueError(
            f"`labels` must be in 0..{classes - 1}, got {got}: the network has {classes} outputs"
            f"{'; do yours begin at 1?' if from_one else '.'}"
        )


def check_predictions(probs: Tensor) -> None:
    """Require one prediction per example."""
    if probs.ndim != 2:
        raise ValueError(
            f"`probs` must have shape (batch, classes), got {tuple(probs.shape)}. {_ENSEMBLE}"
        )


def check_samples(probs: Tensor) -> None:
    """Require predictions of several networks."""
    check_tensors(probs=probs)
    if probs.ndim != 3 or probs.shape[0] == 0:
        raise ValueError(
            f"`probs` must have shape (samples, batch, classes), got {tuple(probs.shape)}."
        )


def check_same_shape(**pair: Tensor) -> None:
    """Require two tensors about the same examples."""
    check_tensors(**pair)
    (name, a), (second, b) = pair.items()
    if a.shape != b.shape:
        raise ValueError(
            f"`{name}` and `{second}` must have the same shape, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}."
        )


def check_binary(values: Tensor, message: str) -> None:
    """Require booleans, or 0 and 1."""
    if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
        raise ValueError(message)


def check_scores(scores: Tensor) -> None:
    """Require scores without NaN. Infinite scores rank correctly."""
    if math.isnan(scores.sum().item()) and bool(scores.isnan().any()):
        raise ValueError(f"`scores` must not be NaN, but {int(scores.isnan().sum())} of them are.")


def check_choice(name: str, value: Value, allowed: tuple[str, ...]) -> Value:
    """Return the value of an option, and require an allowed one."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {value!r}.")
    return value
