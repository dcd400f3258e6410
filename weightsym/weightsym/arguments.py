"""Validation of numeric arguments, with error messages that name the argument.

Plain comparisons let NaN pass, true and false count as one and zero, and text fails much later.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "check_between",
    "check_count",
    "check_floating_type",
    "check_fraction",
    "check_integer",
    "check_not_negative",
    "check_positive",
    "check_tensors",
    "is_number",
    "is_whole",
]


def is_number(value: Any) -> bool:
    """Return whether a value is one finite number of any library, but not a bool.

    >>> is_number(1e-3), is_number(2), is_number(True), is_number("3"), is_number(math.nan)
    (True, True, False, False, False)
    """
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype != torch.bool and bool(value.isfinite())
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer of Python or numpy, but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_positive(name: str, value: Any, optional: bool = False) -> None:
    """Require a positive number, or None for an optional argument.

    >>> check_positive("temperature", math.nan)
    Traceback (most recent call last):
    ValueError: `temperature` must be positive, got nan.
    """
    if not ((is_number(value) and value > 0) or (optional and value is None)):
        raise ValueError(f"`{name}` must be positive{_finite(value)}, got {value!r}.")


def check_not_negative(name: str, value: Any, optional: bool = False) -> None:
    """Require zero or a positive number."""
    if not ((is_number(value) and value >= 0) or (optional and value is None)):
        raise ValueError(f"`{name}` must not be negative{_finite(value)}, got {value!r}.")


def check_fraction(name: str, value: Any) -> None:
    """Require a number in [0, 1)."""
    if not (is_number(value) and 0 <= value < 1):
        raise ValueError(f"`{name}` must be at least 0 and below 1, got {value!r}.")


def check_between(name: str, value: Any) -> None:
    """Require a number strictly between zero and one."""
    if not (is_number(value) and 0 < value < 1):
        raise ValueError(f"`{name}` must be between 0 and 1, got {value!r}.")


def check_integer(name: str, value: Any, optional: bool = False) -> None:
    """Require a whole number.

    >>> check_integer("seed", 1.5)
    Traceback (most recent call last):
    ValueError: `seed` must be a whole number, got 1.5.
    """
    if not (is_whole(value) or (optional and value is None)):
        raise ValueError(f"`{name}` must be a whole number, got {value!r}.")


def check_count(name: str, value: Any, least: int = 1, optional: bool = False) -> None:
    """Require a whole number of at least a given size.

    Args:
        name: of the argument.
        value: value of the argument.
        least: the smallest allowed number.
        optional: whether None is allowed.
    """
    check_integer(name, value, optional)
    if value is not None and value < least:
        allowed = "not be negative" if least == 0 else f"be at least {least}"
        raise ValueError(f"`{name}` must {allowed}, got {value}.")


def check_floating_type(name: str, value: Any, optional: bool = False) -> None:
    """Require a floating type of torch that can store weights."""
    if not (_holds_fractions(value) or (optional and value is None)):
        raise ValueError(
            f"`{name}` must be a floating type such as torch.bfloat16, got {value!r}: "
            "other types would lose the fractions of weights."
        )


def _holds_fractions(dtype: Any) -> bool:
    """Return whether a type stores signs and fractions, as some floating ones do not."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return False
    numbers = torch.tensor([-1.0, 1.5], device="cpu")
    try:
        return torch.equal(numbers.to(dtype).float(), numbers)
    except RuntimeError:  # of half a byte, as torch cannot convert
        return False


def check_tensors(**values: Any) -> None:
    """Require tensors, instead of lists or arrays of numpy.

    >>> check_tensors(labels=[0, 1])
    Traceback (most recent call last):
    ValueError: `labels` must be a tensor, got list: convert it with `torch.as_tensor`.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            several = isinstance(value, (list, tuple)) and isinstance((*value, 0)[0], Tensor)
            raise ValueError(
                f"`{name}` must be a tensor, got {type(value).__name__}: convert it with "
                f"`torch.{'stack' if several else 'as_tensor'}`."
            )


def _finite(value: Any) -> str:
    """Describe the requirement besides the sign that a value violates."""
    if isinstance(value, float) and not math.isnan(value) and value > 0:
        return " and finite"
    return "" if isinstance(value, float) or is_number(value) else ", a number"
