"""Refuse numbers that a constructor cannot mean, in one sentence that names the argument.

Not a number is neither above nor below anything, so that a comparison alone lets it through; true
and false count as one and zero; and what is text is found out much later.
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
    """Check whether a value is one finite number, of whatever library, and neither true nor false.

    >>> is_number(1e-3), is_number(2), is_number(True), is_number("3"), is_number(math.nan)
    (True, True, False, False, False)
    """
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype != torch.bool and bool(value.isfinite())
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """True for whole numbers of Python and numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_positive(name: str, value: Any, optional: bool = False) -> None:
    """Refuse anything but positive numbers, and None where the argument is optional.

    >>> check_positive("temperature", math.nan)
    Traceback (most recent call last):
    ValueError: `temperature` must be positive, got nan.
    """
    if not ((is_number(value) and value > 0) or (optional and value is None)):
        raise ValueError(f"`{name}` must be positive{_finite(value)}, got {value!r}.")


def check_not_negative(name: str, value: Any, optional: bool = False) -> None:
    """Refuse anything but zero and positive numbers."""
    if not ((is_number(value) and value >= 0) or (optional and value is None)):
        raise ValueError(f"`{name}` must not be negative{_finite(value)}, got {value!r}.")


def check_fraction(name: str, value: Any) -> None:
    """Refuse anything but a part of a whole: at least zero and below one."""
    if not (is_number(value) and 0 <= value < 1):
        raise ValueError(f"`{name}` must be at least 0 and below 1, got {value!r}.")


def check_between(name: str, value: Any) -> None:
    """Refuse anything but numbers above zero and below one."""
    if not (is_number(value) and 0 < value < 1):
        raise ValueError(f"`{name}` must be between 0 and 1, got {value!r}.")


def check_integer(name: str, value: Any, optional: bool = False) -> None:
    """Refuse anything but whole numbers.

    >>> check_integer("seed", 1.5)
    Traceback (most recent call last):
    ValueError: `seed` must be a whole number, got 1.5.
    """
    if not (is_whole(value) or (optional and value is None)):
        raise ValueError(f"`{name}` must be a whole number, got {value!r}.")


def check_count(name: str, value: Any, least: int = 1, optional: bool = False) -> None:
    """Refuse anything but whole numbers that are large enough.

    Args:
        name: of the argument.
        value: what was given.
        least: the smallest that is allowed.
        optional: whether None is allowed.
    """
    check_integer(name, value, optional)
    if value is not None and value < least:
        allowed = "not be negative" if least == 0 else f"be at least {least}"
        raise ValueError(f"`{name}` must {allowed}, got {value}.")


def check_floating_type(name: str, value: Any, optional: bool = False) -> None:
    """Refuse anything but floating types of torch, in which weights can be stored."""
    if not (_holds_fractions(value) or (optional and value is None)):
        raise ValueError(
            f"`{name}` must be a floating type such as torch.bfloat16, got {value!r}: weights in "
            "another one would lose their fractions."
        )


def _holds_fractions(dtype: Any) -> bool:
    """Check whether a type holds signs and fractions: there are floating ones without."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return False
    numbers = torch.tensor([-1.0, 1.5], device="cpu")
    try:
        return torch.equal(numbers.to(dtype).float(), numbers)
    except RuntimeError:  # of half a byte, as torch cannot convert
        return False


def check_tensors(**values: Any) -> None:
    """Refuse anything but tensors, such as lists and arrays of numpy.

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
    """Name the demand that a value fails besides the right sign, to be put behind it."""
    if isinstance(value, float) and not math.isnan(value) and value > 0:
        return " and finite"
    return "" if isinstance(value, float) or is_number(value) else ", a number"
