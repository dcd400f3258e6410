"""Predictions of networks on examples, their scores example by example, and the numbers of a test.

A *score* is one number of every example, such as a log-density. A *number* of a test reduces scores
of all examples, mostly to their mean. Every table, metric, calibration and check is made of these.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_bnn import metrics as M
from lightning_bnn.likelihoods import Bernoulli, Categorical, Dirichlet, Gaussian
from lightning_bnn.metrics.base import ExampleMean
from lightning_bnn.metrics.classification import kl_of_each
from lightning_bnn.metrics.gaussian_mixture import (
    log_density,
    log_mean_exp,
    mean_difference,
    thinned,
)
from lightning_bnn.metrics.regression import (
    PITCalibration,
    calibration_of_pit,
    crps_of_each,
    energy_distance_of_each,
    inside,
    width_of_each,
)
from lightning_bnn.metrics.validation import check_labels
from weightsym.params import check_tensors, precise, where_precise

__all__ = ["ClassPredictions", "DensityPredictions", "GaussianPredictions", "Predictions"]

Some = TypeVar("Some", bound="Predictions")
Scores = dict[str, Tensor]
"""Scores of every example, by name."""
INTERVAL = 0.9
"""Probability of the central intervals that are scored."""
_LEAST_STD, _LEAST_LOG = 1e-12, -1e9  # the latter of classes that a network excludes
_COMPARED = 200
"""Networks on each side whose predictions are compared pair by pair."""


@dataclass(frozen=True)
class Predictions(ABC):
    r"""What several networks predict for some examples: the mixture of their predictions.

    .. math:: p(y) = \tfrac1S \textstyle\sum_s p_s(y)

    Mixtures of several modes can be stacked, and mixed again: all of them, or all but one.

    Attributes:
        likelihood: says what outputs mean.
        targets: of the examples, if they are known.

    >>> outputs = torch.tensor([[[2.0, 0.0], [2.0, 0.0]], [[2.0, 0.0], [0.0, 4.0]]])
    >>> predictions = Predictions.of(Categorical(), outputs, torch.tensor([0, 1]))
    >>> type(predictions).__name__, predictions.log_densities().round(decimals=2).tolist()
    ('ClassPredictions', [-0.13, -0.6])
    >>> predictions.numbers("acc", "nll")["acc"], predictions.rows([0, 0]).examples
    (1.0, 2)
    """

    likelihood: Any
    targets: Tensor | None
    quality: ClassVar[Sequence[str]] = ("nll",)
    """Numbers of a test that compare predictions with targets."""
    spread: ClassVar[Sequence[str]] = ()
    """Numbers of the predictions alone."""

    @staticmethod
    def of(likelihood: Any, outputs: Tensor, targets: Tensor | None = None) -> Any:
        """The mixture of all networks.

        Args:
            likelihood: says what outputs mean.
            outputs: ``(networks, examples, ...)``.
            targets: of the examples; a likelihood of one's own needs them.
        """
        return kind_of(likelihood, targets).of_each(likelihood, outputs, targets).mean()

    @classmethod
    def of_each(
        cls: type[Some], likelihood: Any, outputs: Tensor, targets: Tensor | None = None
    ) -> Some:
        """Predictions of every single network, stacked as modes are.

        Args:
            likelihood: says what outputs mean.
            outputs: ``(networks, examples, ...)``.
            targets: of the examples.
        """
        check_tensors(outputs=outputs)
        if targets is not None:
            check_tensors(targets=targets)
            targets = targets.detach().to(outputs.device)
        tensors = cls._read(likelihood, outputs.detach(), targets)
        targets = None if targets is None else where_precise(targets)
        return cls(likelihood, targets, *(where_precise(t.detach()).double() for t in tensors))

    @staticmethod
    @abstractmethod
    def _read(likelihood: Any, outputs: Tensor, targets: Tensor | None) -> Sequence[Tensor]:
        """What is kept of the outputs of every network, ``(networks, examples, ...)``."""

    @abstractmethod
    def mean(self: Some) -> Some:
        """The mixture over the first dimension, of networks or modes with equal weights."""

    def matched(self: Some) -> Some:
        """The prediction of one network that has the moments of the mixture."""
        return self

    @abstractmethod
    def log_densities(self) -> Tensor:
        """Log-density of the targets of every example under the mixture."""

    @property
    def truth(self) -> Tensor:
        """The targets as predictions are compared with them, which there must be."""
        assert self.targets is not None
        return self.targets

    def components(self) -> tuple[Tensor, ...]:
        """The predictions as calibrators take them, ``(networks, examples, ...)``."""
        return tuple(t[None] for t in self.tensors().values())

    def calibrated(self: Some, calibrator: Any) -> Some:
        """The same predictions, calibrated.

        Args:
            calibrator: of `lightning_bnn.calibration`, that fits predictions of this kind.
        """
        raise ValueError(f"{type(self).__name__} are not calibrated.")

    def scores(self) -> Scores:
        """Scores of every example, of the predictions alone if there are no targets."""
        return {} if self.targets is None else {"nll": -self.log_densities()}

    def distances(self, reference: Any) -> Scores:
        """Distances of every example to what a reference predicts; log-densities have none."""
        return {}

    def numbers(self, *names: str) -> dict[str, float]:
        """Numbers of a test with these examples.

        Args:
            *names: of the numbers.
        """
        return numbers(self.scores(), names)

    # -------------------------------------------------------- parts and wholes
    def tensors(self) -> dict[str, Tensor]:
        """What is known of the predictions, by name; examples are the first dimension."""
        return {each.name: getattr(self, each.name) for each in fields(self)[2:]}

    @property
    def examples(self) -> int:
        """The number of examples that are predicted."""
        return len(next(iter(self.tensors().values())))

    def rows(self: Some, index: Any) -> Some:
        """Some of the examples.

        Args:
            index: which ones, perhaps several times.
        """
        return self._each(lambda t: t[index], None if self.targets is None else self.targets[index])

    def modes(self: Some, index: Any) -> Some:
        """Some of the modes of stacked predictions.

        Args:
            index: which ones.
        """
        return self._each(lambda t: t[index], self.targets)

    def cpu(self: Some) -> Some:
        """The same in the memory of the CPU."""
        return self._each(Tensor.cpu, None if self.targets is None else self.targets.cpu())

    def _each(self: Some, how: Callable[[Tensor], Tensor], targets: Tensor | None) -> Some:
        return replace(self, targets=targets, **{n: how(t) for n, t in self.tensors().items()})

    @classmethod
    def stacked(cls: type[Some], parts: Sequence[Some]) -> Some:
        """Several modes along a new first dimension."""
        tensors = [each.tensors() for each in parts]
        return replace(parts[0], **{n: torch.stack([t[n] for t in tensors]) for n in tensors[0]})

    @classmethod
    def joined(cls: type[Some], parts: Sequence[Some]) -> Some:
        """Several batches as one set of examples."""
        tensors = [each.tensors() for each in parts]
        known = [each.targets for each in parts if each.targets is not None]
        return replace(
            parts[0],
            targets=torch.cat(known) if known else None,
            **{n: torch.cat([t[n] for t in tensors]) for n in tensors[0]},
        )


@dataclass(frozen=True)
class ClassPredictions(Predictions):
    r"""Predictions of classes.

    .. math:: \bar p = \tfrac1S \textstyle\sum_s p_s, \quad
        \bar H = \tfrac1S \sum_s H(p_s), \quad I = H(\bar p) - \bar H

    Attributes:
        log_probs: logarithms of the mean probabilities, ``(..., examples, classes)``, in float64.
        entropy: mean entropy of the networks' predictions, ``(..., examples)``, in nats.

    >>> outputs = torch.tensor([[[50.0, 0.0]], [[0.0, 50.0]]])  # two networks that disagree
    >>> predictions = Predictions.of(Categorical(), outputs)
    >>> predictions.probs, predictions.scores()["mutual_information"].round(decimals=4)
    (tensor([[0.5000, 0.5000]], dtype=torch.float64), tensor([0.6931], dtype=torch.float64))
    """

    log_probs: Tensor
    entropy: Tensor
    quality = ("acc", "nll", "brier", "ece")
    spread = ("mi",)

    @staticmethod
    def _read(likelihood: Any, outputs: Tensor, targets: Tensor | None) -> Sequence[Tensor]:
        """Log-probabilities of every network, and their entropy; one logit is two classes."""
        logits = where_precise(outputs).double()
        if isinstance(likelihood, Bernoulli):
            logits = torch.cat([torch.zeros_like(logits), logits], -1)
        logs = logits.log_softmax(-1).clamp_min(_LEAST_LOG)
        spread = isinstance(likelihood, Dirichlet)
        return logs, likelihood.class_entropy(logits) if spread else _entropy(logs)

    def mean(self) -> ClassPredictions:
        """The mixture over the first dimension."""
        return replace(self, log_probs=log_mean_exp(self.log_probs), entropy=self.entropy.mean(0))

    @cached_property
    def probs(self) -> Tensor:
        """The mean probabilities, ``(..., examples, classes)``."""
        return self.log_probs.exp()

    @property
    def truth(self) -> Tensor:
        """The targets as class indices."""
        assert self.targets is not None
        whole = isinstance(self.likelihood, Bernoulli)  # whose targets may be floating
        labels = self.targets.long() if whole else self.targets
        check_labels(labels, self.log_probs)
        return labels.long()

    def log_densities(self) -> Tensor:
        """Log-probability of the class of every example."""
        return self.log_probs.gather(-1, self.truth[:, None])[:, 0]

    def components(self) -> tuple[Tensor, ...]:
        """The logarithms of the mean probabilities as those of one network."""
        return (self.log_probs[None],)

    def calibrated(self, calibrator: Any) -> ClassPredictions:
        """The same predictions, with the probabilities of a calibrator."""
        probs = calibrator(*self.components())
        logs = probs.log().clamp_min(_LEAST_LOG)
        return replace(self, log_probs=logs, entropy=_entropy(logs))

    def scores(self) -> Scores:
        """Scores of every example, and its probabilities."""
        entropy = _entropy(self.log_probs)
        scores = {
            "probs": self.probs,
            "max_probability": M.max_probability_score(self.probs),
            "entropy": entropy,
            "mutual_information": (entropy - self.entropy).clamp_min(0),
        }
        if self.targets is None:
            return scores
        labels, logs = self.truth, self.log_densities()
        return scores | {
            "labels": labels,
            "acc": (self.probs.argmax(-1) == labels).double(),
            "nll": -logs,
            "brier": self.probs.square().sum(-1) + 1 - 2 * logs.exp(),
        }

    def distances(self, reference: Any) -> Scores:
        """Agreement with a reference, total variation and divergence from it, of every example."""
        _check_kind(self, reference)
        probs, others = self.probs, reference.probs
        return {
            "agree": (probs.argmax(-1) == others.argmax(-1)).double(),
            "tv": (probs - others).abs().sum(-1) / 2,
            "kl": kl_of_each(probs, others),
        }


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


@dataclass(frozen=True)
class GaussianPredictions(Predictions):
    r"""Predictions of numbers: the Gaussians of all networks with equal weights.

    .. math:: p(y) = \tfrac1S \textstyle\sum_s N(y;\; \mu_s, \sigma_s^2)

    Attributes:
        means: ``(..., examples, targets, networks)``, in float64.
        stds: standard deviations of the same shape.

    >>> outputs = torch.zeros(4, 10, 1)  # of four networks
    >>> predictions = Predictions.of(Gaussian(), outputs)
    >>> predictions.examples, predictions.means.shape, predictions.components()[0].shape
    (10, torch.Size([10, 1, 4]), torch.Size([4, 10, 1]))
    """

    means: Tensor
    stds: Tensor
    quality = ("nll", "rmse", "mae", "nll_moments", "crps", "cover90", "width90", "calib")
    spread = ("epistemic_var", "sharpness")

    @staticmethod
    def _read(likelihood: Any, outputs: Tensor, targets: Tensor | None) -> Sequence[Tensor]:
        """Mean and standard deviation of every network."""
        return [t[..., None] for t in likelihood.moments(precise(outputs))]

    def mean(self) -> GaussianPredictions:
        """The mixture over the first dimension: all of its networks with equal weights."""
        return self._each(lambda t: t.movedim(0, -2).flatten(-2), self.targets)

    @classmethod
    def stacked(cls, parts: Sequence[GaussianPredictions]) -> GaussianPredictions:
        """Several modes along a new first dimension, with equally many networks: the first ones."""
        count = min(each.means.shape[-1] for each in parts)
        return super().stacked([p._each(lambda t: t[..., :count], p.targets) for p in parts])

    def components(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations as metrics take them, ``(networks, examples, targets)``."""
        return self.means.movedim(-1, 0), self.stds.movedim(-1, 0)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the mixture, ``(examples, targets)``."""
        mean = self.means.mean(-1)
        variance = (self.stds.square() + (self.means - mean[..., None]).square()).mean(-1)
        return mean, variance.sqrt()

    def matched(self) -> GaussianPredictions:
        """One Gaussian with the moments of the mixture, of independent targets."""
        mean, std = (t[..., None] for t in self.moments())
        return replace(self, likelihood=Gaussian(), means=mean, stds=std.clamp_min(_LEAST_STD))

    def log_densities(self) -> Tensor:
        """Log-density of all targets of every example together."""
        return log_mean_exp(log_density(*self.components(), self.truth).sum(-1))

    def calibrated(self, calibrator: Any) -> GaussianPredictions:
        """The same predictions, with the means and standard deviations of a calibrator."""
        means, stds = (t.movedim(0, -1) for t in calibrator(*self.components()))
        return replace(self, means=means, stds=stds)

    @property
    def truth(self) -> Tensor:
        """The targets, one for every mean, in float64."""
        wanted, targets = self.means.shape[:-1], self.targets
        assert targets is not None
        if targets.shape != wanted:
            raise ValueError(
                f"`targets` must have shape {tuple(wanted)}, got {tuple(targets.shape)}"
                + (": add a dimension, `targets[:, None]`." if targets.ndim == 1 else ".")
            )
        return targets.double()

    def scores(self) -> Scores:
        """Scores of every example, NaN where a prediction or a target is not finite."""
        valid = (self.means.isfinite() & self.stds.isfinite() & (self.stds > 0)).flatten(1).all(1)
        targets = None if self.targets is None else self.truth
        if targets is not None:
            valid = valid & targets.isfinite().all(-1)
            targets = torch.where(valid[:, None], targets, 0.0)
        means, stds = (
            torch.where(valid[:, None, None], t, other)
            for t, other in ((self.means, 0.0), (self.stds, 1.0))
        )
        scores = replace(self, targets=targets, means=means, stds=stds)._scores()
        return {
            name: values.masked_fill(~valid.reshape(-1, *(1,) * (values.ndim - 1)), math.nan)
            for name, values in scores.items()
        }

    def _scores(self) -> Scores:
        """Scores of predictions and targets that are finite."""
        (means, stds), (mean, std), targets = self.components(), self.moments(), self.targets
        scores = {
            "epistemic_var": (means - means.mean(0)).square().mean(0).sum(-1),
            "sharpness": std.mean(-1),
        }
        if targets is None:
            return scores
        error, u = mean - targets, M.pit(means, stds, targets)
        return scores | {
            "nll": -self.log_densities(),
            "nll_moments": -self.matched().log_densities(),
            "squares": error.square(),
            "mae": error.abs().mean(-1),
            "crps": crps_of_each(means, stds, targets).mean(-1),
            "pit": u,
            "cover90": inside(u, INTERVAL).mean(-1),
            "width90": width_of_each(means, stds, INTERVAL).mean(-1),
        }

    @cached_property
    def _compared(self) -> list[tuple[Tensor, Tensor]]:
        """Some of the networks as functions, without noise, and as densities."""
        means, stds = thinned(*self.components(), _COMPARED)
        return [(means, torch.zeros_like(stds)), (means, stds)]

    @cached_property
    def _differences(self) -> list[Tensor]:
        """Mean differences of function values and of densities: the same for all comparisons."""
        return [mean_difference(*parts) for parts in self._compared]

    def distances(self, reference: Any) -> Scores:
        """Energy distances to what networks of a reference compute, and to their densities."""
        _check_kind(self, reference)
        names = ("energy_f", "energy")
        if not bool(torch.cat(self._compared[1]).isfinite().all()):
            unknown = torch.full((self.examples,), torch.nan, dtype=torch.float64)
            return dict.fromkeys(names, unknown)
        pairs = zip(self._compared, reference._compared, reference._differences, strict=True)
        values = (
            energy_distance_of_each(m, s, n, t, within).mean(-1) for (m, s), (n, t), within in pairs
        )
        return dict(zip(names, values, strict=True))


@dataclass(frozen=True)
class DensityPredictions(Predictions):
    r"""Log-densities of targets, for likelihoods of which nothing else is known.

    Attributes:
        logs: ``(..., examples)``, in float64.

    >>> networks = DensityPredictions(None, None, torch.tensor([[0.2], [0.4]]).log())  # of two
    >>> networks.mean().log_densities().exp()  # the density of their mixture
    tensor([0.3000])
    """

    logs: Tensor

    @staticmethod
    def _read(likelihood: Any, outputs: Tensor, targets: Tensor | None) -> Sequence[Tensor]:
        """Log-density under every network."""
        return [likelihood.log_prob(outputs, targets)]

    def mean(self) -> DensityPredictions:
        """The mixture over the first dimension."""
        return replace(self, logs=log_mean_exp(self.logs))

    def log_densities(self) -> Tensor:
        """Log-density of the targets of every example under the mixture."""
        return self.logs


def kind_of(likelihood: Any, targets: Tensor | None = None) -> type[Predictions]:
    """Choose the class of predictions for a likelihood.

    Args:
        likelihood: says what outputs mean.
        targets: classes at several positions of an example are known by their density alone.

    >>> [kind_of(likelihood).__name__ for likelihood in (Categorical(), Gaussian(), None)]
    ['ClassPredictions', 'GaussianPredictions', 'DensityPredictions']
    """
    if isinstance(likelihood, Gaussian):
        return GaussianPredictions
    has_classes = isinstance(likelihood, (Categorical, Bernoulli))
    at_one_position = targets is None or targets.ndim == 1
    return ClassPredictions if has_classes and at_one_position else DensityPredictions


def _check_kind(predictions: Predictions, reference: Any) -> None:
    if type(predictions) is not type(reference):
        raise ValueError(
            "Predictions of another kind than the reference's cannot be compared with them: "
            f"{type(predictions).__name__} and {type(reference).__name__}."
        )


# ------------------------------------------------------------ numbers
class Mean(ExampleMean):
    """Mean over examples of a score."""

    def update(self, values: Tensor) -> None:
        """Add one value per example."""
        self.add(values.double())


class RootMean(ExampleMean):
    """Square root of the mean, over all targets of all examples."""

    def update(self, values: Tensor) -> None:
        """Add one value per example, or one per example and target."""
        self.add(values.double().flatten(1).mean(1))

    def compute(self) -> Tensor:
        """Return the root, NaN without examples."""
        return super().compute().sqrt()


class Number(NamedTuple):
    """A number of a test.

    Attributes:
        of: computes it from scores of all examples.
        scores: their names.
        metric: computes it batch by batch.
    """

    of: Callable[..., Tensor]
    scores: Sequence[str]
    metric: Callable[[], Metric] = Mean


def _root_mean(squares: Tensor) -> Tensor:
    return squares.mean().sqrt()


_PAIR = "probs", "labels"
NUMBERS = {
    "mi": Number(torch.mean, ["mutual_information"]),
    "ece": Number(M.ece, _PAIR, M.ECE),
    "ace": Number(M.ace, _PAIR, M.ACE),
    "aurc": Number(M.aurc, _PAIR),
    "ece_t": Number(M.ece, ("probs_t", "labels"), M.ECE),
    "rmse": Number(_root_mean, ["squares"], RootMean),
    "rmse_unit": Number(_root_mean, ["squares_unit"], RootMean),
    "set90": Number(torch.mean, ["size"]),
    "held90": Number(torch.mean, ["coverage"]),
    "interval90": Number(torch.mean, ["width"]),
    "calib": Number(calibration_of_pit, ["pit"], PITCalibration),
}
"""Numbers that are not the mean of the score of their name."""


def number(name: str) -> Number:
    """A number of a test by its name."""
    return NUMBERS.get(name) or Number(torch.mean, [name])


def numbers(scores: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, float]:
    """Compute numbers from scores.

    Args:
        scores: of all examples.
        names: of the numbers.
    """
    chosen = {name: number(name) for name in names}
    return {name: float(n.of(*(scores[k] for k in n.scores))) for name, n in chosen.items()}
