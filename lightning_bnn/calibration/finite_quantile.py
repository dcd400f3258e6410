"""The quantile of split conformal prediction, exact for any number of calibration examples."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import torch
from torch import Tensor

from lightning_bnn.arguments import is_number

__all__ = ["check_alpha", "conformal_quantiles", "conformal_rank"]


def check_alpha(alpha: int | float) -> None:
    """Refuse error rates that are not between 0 and 1.

    Args:
        alpha: the share of examples whose truth may be missed.
    """
    if not (is_number(alpha) and 0 < alpha < 1):
        raise ValueError(f"`alpha` must be between 0 and 1, such as 0.1, got {alpha!r}.")


def conformal_rank(n: int, alpha: int | float) -> int:
    r"""The rank of the score that is the threshold, :math:`\lceil (n + 1)(1 - \alpha) \rceil`.

    Args:
        n: how many scores there are; a larger rank says that these are too few.
        alpha: the share of examples whose truth may be missed, taken as the decimal that it is.

    >>> conformal_rank(9, 0.7), math.ceil(10 * (1 - 0.7))  # floating-point numbers are off by one
    (3, 4)
    """
    share = 1 - Fraction(str(float(alpha)))
    return -(-(n + 1) * share.numerator // share.denominator)


def conformal_quantiles(
    scores: Tensor, alpha: int | float, groups: Tensor | None = None, count: int = 1
) -> Tensor:
    r"""For every group of scores, the :math:`\lceil (n + 1)(1 - \alpha) \rceil`-th smallest.

    A further score of the same law is at most that with probability :math:`1 - \alpha` or more, and
    with :math:`1 - \alpha + 1 / (n + 1)` or less if no scores are equal. Of too few scores it is
    infinite, which is said once. Decimal error rates are taken literally: rounding never moves the
    rank.

    References:
        | Algorithmic Learning in a Random World (Vovk, Gammerman and Shafer, 2005)
        | A Gentle Introduction to Conformal Prediction (Angelopoulos and Bates, 2021)
        | https://arxiv.org/abs/2107.07511

    Args:
        scores: one for each calibration example, ``(n, ...)``.
        alpha: the share of examples whose truth may be missed.
        groups: the number of each example's group, by default the same for all.
        count: how many groups there are; some may have no examples.

    Returns:
        One number for each group, ``(count, ...)``.

    >>> conformal_quantiles(torch.arange(1.0, 10.0), 0.1)  # the ninth of nine
    tensor([9.], dtype=torch.float64)
    """
    check_alpha(alpha)
    scores = scores.double()
    if scores.ndim < 1 or bool(scores.isnan().any()):
        raise ValueError("`scores` must be one number for each calibration example, without NaN.")
    n = len(scores)
    groups = torch.zeros(n, dtype=torch.long) if groups is None else groups
    _check_groups(groups, n, count)
    groups = groups.to(scores.device).long()
    sizes = torch.bincount(groups, minlength=count)
    ranks = torch.tensor([conformal_rank(size, alpha) for size in sizes.tolist()]).to(sizes)
    if bool((ranks > sizes).any()):
        _warn(ranks, sizes, alpha)
    by_group = _sorted_by_group(scores.reshape(n, math.prod(scores.shape[1:])), groups)
    starts = sizes.cumsum(0) - sizes
    padded = torch.cat([by_group, by_group.new_full((1, by_group.shape[1]), torch.inf)])
    index = torch.where(ranks <= sizes, starts + ranks - 1, n)
    return padded[index].reshape(count, *scores.shape[1:])


def _sorted_by_group(scores: Tensor, groups: Tensor) -> Tensor:
    """Every column sorted within groups, one group after the other."""
    order = scores.argsort(0)
    order = order.gather(0, groups[order].argsort(dim=0, stable=True))
    return scores.gather(0, order)


def _check_groups(groups: Tensor, n: int, count: int) -> None:
    whole = not (groups.is_floating_point() or groups.is_complex())
    inside = whole and (not n or (int(groups.min()) >= 0 and int(groups.max()) < count))
    if groups.shape != (n,) or not inside:
        raise ValueError(
            f"`groups` must be {n} whole numbers in 0..{count - 1}, got {groups.dtype} "
            f"{tuple(groups.shape)}."
        )


def _warn(ranks: Tensor, sizes: Tensor, alpha: int | float) -> None:
    need = -(-1 // Fraction(str(float(alpha)))) - 1
    short = int((ranks > sizes).sum())
    which = "" if len(sizes) == 1 else f" in {short} of {len(sizes)} groups"
    warnings.warn(
        f"An error rate of {alpha:g} needs {need} calibration examples, there are fewer{which} "
        f"({int(sizes.min())}): prediction sets then hold everything.",
        UserWarning,
        stacklevel=3,
    )
