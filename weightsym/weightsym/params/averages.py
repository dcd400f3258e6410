"""Weighted means of stacks: one network out of many, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weightsym.arguments import is_number
from weightsym.params.networks import Params, stack_size

__all__ = ["shares", "weighted_mean"]


def shares(
    weights: Sequence[int | float] | Tensor | None, count: int, name: str = "`weights`"
) -> list[float]:
    r"""The weights of all networks in a mean, which sum to one.

    .. math:: w_k / \textstyle\sum_l w_l

    Args:
        weights: one number for each network, not negative; by default all count the same.
        count: how many networks there are.
        name: of the argument, for the one who gave it.

    >>> shares([3, 1], 2), shares(None, 4)
    ([0.75, 0.25], [0.25, 0.25, 0.25, 0.25])
    """
    if weights is None:
        return [1 / count] * count
    numbers = weights.tolist() if isinstance(weights, Tensor) else weights
    numbers = list(numbers) if isinstance(numbers, Sequence) else [numbers]
    good = all(is_number(w) and w >= 0 for w in numbers)
    if not good or len(numbers) != count or not 0 < sum(map(float, numbers)) < math.inf:
        raise ValueError(
            f"{name} must be {count} numbers that are not negative, one for each network, got "
            f"{' '.join(map(str, numbers))}."
        )
    total = sum(map(float, numbers))
    return [float(w) / total for w in numbers]


def weighted_mean(stack: Params, weights: Sequence[int | float] | Tensor | None = None) -> Params:
    r"""The weighted mean of the networks of a stack.

    .. math:: \bar\theta = \frac{\sum_k w_k \theta_k}{\sum_k w_k}

    Tensors of whole numbers are those of the first network, and so are buffers that hold infinite
    values and are the same in all, such as masks. Networks of weight zero do not count, whatever
    they hold. Half precision is averaged in float32.

    Args:
        stack: networks of one kind.
        weights: one number for each network, not negative; by default all count the same.

    >>> weighted_mean({"w": torch.tensor([[1.0], [5.0]])}, weights=[3, 1])["w"]
    tensor([2.])
    """
    parts = torch.tensor(shares(weights, stack_size(stack)), dtype=torch.float64)
    counted = (parts > 0).nonzero().flatten()
    if len(counted) < len(parts):
        parts = parts[counted]
        stack = {n: t.index_select(0, counted.to(t.device)) for n, t in stack.items()}
    return {name: _mean(t, parts) for name, t in stack.items()}


def _mean(rows: Tensor, parts: Tensor) -> Tensor:
    if len(rows) == 1 or not rows.is_floating_point():
        return rows[0].clone()
    wide = rows if rows.dtype == torch.float64 else rows.float()
    mean = torch.tensordot(parts.to(wide), wide, 1)
    if rows.ndim > 1 and bool(rows[0].isinf().any()):
        same = (rows == rows[:1]).all(0)
        mean = torch.where(same, rows[0].to(mean), mean)
    return mean.to(rows.dtype)
