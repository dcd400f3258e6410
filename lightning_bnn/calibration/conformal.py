"""Conformal sets of classes and intervals: they hold the truth as often as was asked for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_bnn.metrics.gaussian_mixture import mixture_moments, mixture_quantiles
from lightning_bnn.metrics.validation import (
    check_choice,
    check_finite,
    check_labels,
    check_predictions,
    probabilities,
)
from weightsym.params import check_between, keyed_generator


def conformal_rank(n: int, alpha: int | float) -> int:
    r"""The rank of the score that is the threshold, :math:`\lceil (n + 1)(1 - \alpha) \rceil`.

    Args:
        n: number of scores; a rank above it means that they are too few.
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
    with :math:`1 - \alpha + 1 / (n + 1)` or less if no scores are equal. It is
    infinite, with one warning, if there are too few scores. Decimal error rates are taken
    literally: rounding never changes the rank.

    References:
        | Algorithmic Learning in a Random World (Vovk, Gammerman and Shafer, 2005)
        | A Gentle Introduction to Conformal Prediction (Angelopoulos and Bates, 2021)
        | https://arxiv.org/abs/2107.07511

    Args:
        scores: one for each calibration example, ``(n, ...)``.
        alpha: the share of examples whose truth may be missed.
        groups: the number of each example's group, by default the same for all.
        count: number of groups, some of which may have no examples.

    Returns:
        One number for each group, ``(count, ...)``.

    >>> conformal_quantiles(torch.arange(1.0, 10.0), 0.1)  # the ninth of nine
    tensor([9.], dtype=torch.float64)
    """
    check_between("alpha", alpha)
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
        f"({int(sizes.min())}): sets then hold all classes, and intervals are infinite.",
        UserWarning,
        stacklevel=3,
    )


Score = Literal["thr", "aps", "raps"]


_PENALTY, _FREE = 0.1, 1
_TOPS, _DIGITS, _LEAST = 4, 2**10, 1e-45  # what two runs of one network agree on


def set_scores(probs: Tensor, score: Score, seed: int = 0, known: bool = False) -> Tensor:
    r"""Measure how strange every class would be as the truth, ``(batch, classes)``, in float64.

    With classes ordered by falling probability, :math:`o` the rank of class :math:`c` (from 1)
    and :math:`u` uniform in (0, 1), which makes coverage exact and lets sets be empty. It is
    computed from the prediction, so that an example has the same set alone and in a batch.
    Repetitions of a prediction in a batch get different numbers, by their order:

    - ``"thr"`` (also called LAC): :math:`1 - p_c`, the smallest sets on average;
    - ``"aps"``: :math:`\sum_{j < o} p_{(j)} + u\, p_c`, sets that are larger for harder examples;
    - ``"raps"``: the same and :math:`0.1 \max(0, o - 1)`, which keeps out unlikely classes.

    References:
        | Least Ambiguous Set-Valued Classifiers (Sadinle, Lei and Wasserman, 2019)
        | https://arxiv.org/abs/1609.00451
        | Classification with Valid and Adaptive Coverage (Romano, Sesia and Candes, 2020)
        | https://arxiv.org/abs/2006.02544
        | Uncertainty Sets for Image Classifiers (Angelopoulos et al., 2021)
        | https://arxiv.org/abs/2009.14193

    Args:
        probs: predictions ``(batch, classes)``.
        score: ``"thr"``, ``"aps"`` or ``"raps"``.
        seed: of the random numbers.
        known: whether these are calibration examples, whose numbers no new example shares.

    >>> probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    >>> set_scores(probs, "thr").tolist()
    [[0.5, 0.75, 0.875, 0.875]]
    """
    check_choice("score", score, get_args(Score))
    probs = probabilities(probs).double()
    check_predictions(probs)
    if score == "thr":
        return 1 - probs
    sorted_probs, order = probs.sort(stable=True, dim=-1, descending=True)
    u = uniform_numbers(probs, seed, known)[:, None]
    scores = sorted_probs.cumsum(-1) - (1 - u) * sorted_probs
    if score == "raps":
        rank = torch.arange(1, probs.shape[-1] + 1).to(scores)
        scores = scores + _PENALTY * (rank - _FREE).clamp_min(0)
    return torch.empty_like(scores).scatter(-1, order, scores)


def uniform_numbers(probs: Tensor, seed: int, known: bool = False) -> Tensor:
    """Mix the digits of each prediction into a number that is uniform in (0, 1), in float64.

    The digits of its largest log-probabilities distinguish confident predictions, and hardly ever
    depend on the rest of a batch. Equal predictions are distinguished by their order.

    Args:
        probs: predictions ``(batch, classes)``.
        seed: other numbers for another seed.
        known: other numbers for calibration examples.
    """
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    tops = probs.double().topk(min(_TOPS, probs.shape[-1])).values.clamp_min(_LEAST).log()
    generator = keyed_generator(seed, "sets")
    factors = torch.randint(low, high, (tops.shape[-1] + 1,), generator=generator) | 1
    factors = factors.to(tops.device)
    digits = (tops * _DIGITS).round().long()
    mixed = _mixed((digits * factors[:-1]).sum(-1))
    repeats = _repeats(mixed)
    mixed = _mixed(mixed + factors[-1] * (-1 - repeats if known else repeats))
    return (((mixed >> 11) & (2**53 - 1)).double() + 0.5) / 2**53


def _mixed(values: Tensor) -> Tensor:
    """Spread whole numbers over 64 bits, modulo 2^64, so that neighbours have nothing in common."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        values = (values ^ ((values >> shift) & (2 ** (64 - shift) - 1))) * factor
    return values


def _repeats(values: Tensor) -> Tensor:
    """Count the equal numbers that come before each.

    >>> _repeats(torch.tensor([7, 5, 7, 7, 5]))
    tensor([0, 0, 1, 2, 1])
    """
    order = values.argsort(stable=True)
    _, counts = values[order].unique_consecutive(return_counts=True)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    places = torch.arange(len(values), device=values.device) - starts
    return torch.empty_like(values).scatter(0, order, places)


@dataclass(frozen=True)
class ConformalSets:
    r"""A rule that makes prediction sets of new predictions, fitted to calibration examples.

    .. math:: \{c : s_c(x) \leq q\}, \quad q = \text{quantile of } s_{y_i}(x_i)

    Attributes:
        scores: of the true classes of the calibration examples.
        labels: these classes.
        classes: number of classes.
        alpha: the share of examples whose class may be missing from its set.
        by_class: whether that holds within every class (Mondrian), not only for all together.
        score: ``"thr"``, ``"aps"`` or ``"raps"``.
        seed: of random scores.

    >>> from lightning_bnn.calibration import conformal_sets
    >>> probs = torch.tensor([[0.75, 0.25]]).repeat(20, 1)
    >>> rule = conformal_sets(probs, (torch.arange(20) % 4) // 3, alpha=0.5)
    >>> rule.thresholds().item(), rule.at(0.1).thresholds().item()  # 1 - 0.75, 1 - 0.25
    (0.25, 0.75)
    """

    scores: Tensor
    labels: Tensor
    classes: int
    alpha: float = 0.1
    by_class: bool = False
    score: Score = "thr"
    seed: int = 0

    def thresholds(self) -> Tensor:
        """The largest scores that belong to a set: of every class, or one for all."""
        if self.by_class:
            return conformal_quantiles(self.scores, self.alpha, self.labels, self.classes)
        return conformal_quantiles(self.scores, self.alpha)

    def at(self, alpha: int | float) -> ConformalSets:
        """The same with another error rate.

        Args:
            alpha: the share of examples whose class may be missing from its set.
        """
        check_between("alpha", alpha)
        return replace(self, alpha=float(alpha))

    def __call__(self, probs: Tensor) -> Tensor:
        """Return the classes in the set of each example, boolean ``(batch, classes)``.

        Args:
            probs: predictions ``(batch, classes)``.
        """
        scores = set_scores(probs, self.score, self.seed)
        if scores.shape[-1] != self.classes:
            raise ValueError(f"`probs` must be of {self.classes} classes, got {scores.shape[-1]}.")
        return scores <= self.thresholds().to(scores)


def conformal_sets(
    probs: Tensor,
    labels: Tensor,
    alpha: int | float = 0.1,
    score: Score = "thr",
    by_class: bool = False,
    seed: int = 0,
) -> ConformalSets:
    r"""Prediction sets that miss the true class of at most :math:`\alpha` of new examples.

    .. math:: \{c : s_c(x) \leq q\}, \quad q = \text{the } \lceil (n + 1)(1 - \alpha) \rceil
        \text{-th smallest of } s_{y_i}(x_i)

    That holds for any predictions, right or wrong, on average over calibration and new examples
    that are exchangeable and that the network was not trained on. Too few calibration examples
    give sets of all classes, and one warning.

    Args:
        probs: predictions for the calibration examples, ``(batch, classes)``.
        labels: their classes ``(batch,)``.
        alpha: the share of new examples whose class may be missing from its set.
        score: ``"thr"`` (LAC), ``"aps"`` or ``"raps"``, see `set_scores`.
        by_class: whether the share holds for the examples of every class (Mondrian).
        seed: of the random numbers of ``"aps"`` and ``"raps"``.

    Returns:
        A function from predictions to boolean masks ``(batch, classes)``.

    >>> probs = torch.tensor([[0.75, 0.25]]).repeat(9, 1)
    >>> sets = conformal_sets(probs, torch.zeros(9, dtype=torch.long))
    >>> sets(torch.tensor([[0.875, 0.125], [0.5, 0.5]]))
    tensor([[ True, False],
            [False, False]])
    """
    check_between("alpha", alpha)
    scores = set_scores(probs, score, seed, known=True)
    check_labels(labels, scores)
    labels = labels.long()
    true = scores.gather(-1, labels[:, None])[:, 0]
    return ConformalSets(true, labels, scores.shape[-1], float(alpha), by_class, score, seed)


class Intervals(NamedTuple):
    """Lower and upper ends, in the shape of the targets.

    >>> intervals = Intervals(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 2.0]))
    >>> intervals.contain(torch.tensor([2.0, 2.0])), intervals.width
    (tensor([False,  True]), tensor([1., 2.]))
    """

    low: Tensor
    high: Tensor

    def contain(self, targets: Tensor) -> Tensor:
        """Tell which targets lie inside, ends included."""
        return (self.low <= targets) & (targets <= self.high)

    @property
    def width(self) -> Tensor:
        """The distance between the ends."""
        return self.high - self.low


class Band(NamedTuple):
    """A prediction before calibration: intervals, and the unit in which they are widened.

    Every tensor has the shape of the targets, ``(batch, ...)``.

    >>> from lightning_bnn.calibration import quantile_band
    >>> band = quantile_band(torch.zeros(1, 3), torch.ones(1, 3), alpha=0.1)
    >>> [round(part[0].item(), 3) for part in band]  # of a standard normal, in units of one
    [-1.645, 1.645, 1.0]
    """

    low: Tensor
    high: Tensor
    scale: Tensor


def mean_band(means: Tensor, stds: Tensor) -> Band:
    r"""The mean of a mixture of Gaussians, to be widened by multiples of its standard deviation.

    .. math:: l = h = \tfrac1S \textstyle\sum_s \mu_s, \quad
        s^2 = \tfrac1S \sum_s (\sigma_s^2 + \mu_s^2) - l^2

    These are split conformal intervals with normalised residuals.

    Args:
        means: of every network, ``(samples, batch, ...)``.
        stds: in the same shape.

    >>> band = mean_band(torch.tensor([[0.0], [2.0]]), torch.zeros(2, 1) + 1e-6)  # two networks
    >>> [round(part.item(), 4) for part in band]
    [1.0, 1.0, 1.0]
    """
    centre, std = mixture_moments(means, stds)
    return Band(centre, centre, std)


def quantile_band(means: Tensor, stds: Tensor, alpha: int | float = 0.1) -> Band:
    r"""The central interval of a mixture of Gaussians, to be widened by the same for all examples.

    These are intervals of conformalised quantile regression (CQR), with the quantiles
    :math:`\alpha / 2` and :math:`1 - \alpha / 2` of the predictive distribution.

    Args:
        means: of every network, ``(samples, batch, ...)``.
        stds: in the same shape.
        alpha: what lies outside of the interval.

    >>> band = quantile_band(torch.zeros(2, 1), torch.ones(2, 1), alpha=0.05)
    >>> round(band.low.item(), 2), round(band.high.item(), 2)
    (-1.96, 1.96)
    """
    check_between("alpha", alpha)
    levels = torch.tensor([alpha / 2, 1 - alpha / 2], dtype=torch.float64)
    low, high = mixture_quantiles(means, stds, levels)
    return Band(low, high, torch.ones_like(low))


def conformal_intervals(
    band: Band, targets: Tensor, alpha: int | float = 0.1
) -> Callable[[Band], Intervals]:
    r"""Intervals that miss at most a share :math:`\alpha` of new targets.

    The score of an example is :math:`\max(l - y, y - h) / s` for its band :math:`[l, h]` and scale
    :math:`s`; intervals are :math:`[l - q s, h + q s]` with the conformal quantile :math:`q` of the
    scores. Of several targets each has intervals of its own. Too few calibration examples give
    infinite intervals, and one warning.

    References:
        | Distribution-Free Predictive Inference for Regression (Lei et al., 2018)
        | https://arxiv.org/abs/1604.04173
        | Conformalized Quantile Regression (Romano, Patterson and Candes, 2019)
        | https://arxiv.org/abs/1905.03222

    Args:
        band: of the calibration examples, `mean_band` or `quantile_band`, or one of your own.
        targets: theirs, ``(batch, ...)``.
        alpha: the share of new targets that may lie outside.

    Returns:
        A function from bands to `Intervals`.

    >>> zeros = torch.zeros(9)
    >>> rule = conformal_intervals(Band(zeros, zeros, zeros + 1), torch.arange(9.0))
    >>> rule(Band(zeros[:1], zeros[:1], zeros[:1] + 1)).high
    tensor([8.], dtype=torch.float64)
    """
    check_between("alpha", alpha)
    check_finite(targets, "targets")
    band, targets = checked_band(band), targets.double()
    if targets.shape != band.low.shape:
        raise ValueError(
            f"`targets` must have shape {tuple(band.low.shape)}, got {tuple(targets.shape)}."
        )
    scores = torch.maximum(band.low - targets, targets - band.high) / band.scale
    quantile = conformal_quantiles(scores, alpha)

    def intervals(new: Band) -> Intervals:
        new = checked_band(new)
        width = quantile.to(new.low) * new.scale
        low, high = new.low - width, new.high + width
        middle = (low + high) / 2
        crossed = low > high  # a band that was too wide by more than its width
        return Intervals(torch.where(crossed, middle, low), torch.where(crossed, middle, high))

    return intervals


def checked_band(band: Band) -> Band:
    """Require finite numbers and a positive scale, and return them in float64.

    Args:
        band: of any examples.
    """
    for name, values in band._asdict().items():
        check_finite(values, f"band.{name}")
    if not band.low.shape == band.high.shape == band.scale.shape or not band.low.ndim:
        shapes = ", ".join(str(tuple(t.shape)) for t in band)
        raise ValueError(f"`band` must be three tensors of one shape (batch, ...), got {shapes}.")
    band = Band(*(t.double() for t in band))
    if not bool((band.scale > 0).all()) or bool((band.low > band.high).any()):
        raise ValueError("`band` must have a positive `scale`, and `low` not above `high`.")
    return band
