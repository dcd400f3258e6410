"""A posterior's predictions, calibrated: probabilities and sets, or distributions and intervals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_bnn.calibration import files
from lightning_bnn.calibration.isotonic import Isotonic
from lightning_bnn.calibration.methods import Predictions, read
from lightning_bnn.calibration.numbers import LEVELS, numbers_text
from lightning_bnn.calibration.prediction_intervals import (
    Band,
    Intervals,
    conformal_intervals,
    mean_band,
    quantile_band,
)
from lightning_bnn.calibration.prediction_sets import ConformalSets, SetScore
from lightning_bnn.calibration.spread import Spread
from lightning_bnn.calibration.temperature import Temperature
from lightning_bnn.calibration.vector import VectorScaling
from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.metrics.validation import check_finite
from lightning_bnn.plots import Line, lines_figure, reliability_figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Calibrated", "CalibratedClasses", "CalibratedGaussian"]


@dataclass(frozen=True, eq=False)
class Calibrated(ABC):
    """A calibrator that was fitted to one part of held-out data, judged and completed by the other.

    Attributes:
        method: name of the calibrator.
        calibrator: what was fitted.
        alpha: the error rate of sets or intervals, if nothing else is asked for.
        fitted_to: how many examples the calibrator was fitted to.
        before: numbers of the others without it.
        after: the same with it.
        module: what predicts, anything with ``outputs(inputs)``; it is not saved.

    >>> import tempfile
    >>> from lightning_bnn.calibration import calibrated
    >>> logits = torch.tensor([[[4.0, 0.0]]]).repeat(1, 400, 1)
    >>> labels = (torch.arange(400) % 4) // 3  # a quarter is of the other class
    >>> found = calibrated(Categorical(), (logits,), labels)
    >>> found.after["nll"] < found.before["nll"]
    True
    >>> path = f"{tempfile.mkdtemp()}/calibration.pt"
    >>> found.save(path)
    >>> Calibrated.load(path).calibrator == found.calibrator
    True
    """

    method: str
    calibrator: Any
    alpha: float
    fitted_to: int
    before: Mapping[str, float]
    after: Mapping[str, float]
    likelihood: Any
    module: Any = field(repr=False)

    def outputs(self, *inputs: Any) -> Tensor:
        """Outputs of all networks of the module that was calibrated.

        Args:
            *inputs: as the network takes them.
        """
        if self.module is None:
            raise ValueError(
                "A calibration that was loaded has no networks: `load(path, module)` gives it "
                "some, and functions whose names end in `_of` take outputs of networks."
            )
        with torch.no_grad():
            return self.module.outputs(inputs)

    def read(self, outputs: Tensor) -> Predictions:
        """What the calibrator takes, from outputs of all networks ``(samples, batch, ...)``."""
        check_finite(outputs, "outputs")
        return read(self.likelihood, self.method, outputs)

    def save(self, path: str | Path) -> None:
        """Write everything but the networks: tensors and plain data.

        Args:
            path: of the file.
        """
        files.save(replace(self, module=None), Path(path))

    @staticmethod
    def load(path: str | Path, module: Any = None) -> Any:
        """Read what `save` has written; nothing in the file is executed.

        Args:
            path: of the file.
            module: what predicts, the one that was calibrated.
        """
        return replace(files.load(Path(path), KINDS), module=module)

    def __str__(self) -> str:
        rows = {"before": self.before, "after": self.after}
        return f"{self.headline()}\n\n{numbers_text(rows)}"

    @abstractmethod
    def headline(self) -> str:
        """What was fitted, to how much, in one line."""

    @abstractmethod
    def figure(self) -> Figure:
        """How well calibrated the held-out predictions are, before and after."""


@dataclass(frozen=True, eq=False)
class CalibratedClasses(Calibrated):
    """Calibrated probabilities of classes, and conformal prediction sets.

    Attributes:
        rule: prediction sets of calibrated probabilities.
        diagrams: reliability before and after, ``(2, 3, bins)``.

    >>> from lightning_bnn.calibration import calibrated
    >>> logits = torch.tensor([[[4.0, 0.0]]]).repeat(1, 400, 1)
    >>> labels = (torch.arange(400) % 4) // 3  # a quarter is of the other class
    >>> found = calibrated(Categorical(), (logits,), labels, alpha=0.5)
    >>> type(found).__name__, bool(found.probs_of(logits[:, :1])[0, 0] < 0.9)  # it was 0.98
    ('CalibratedClasses', True)
    >>> found.sets_of(logits[:, :1]), found.sets_of(logits[:, :1], alpha=0.1)
    (tensor([[ True, False]]), tensor([[True, True]]))
    """

    rule: ConformalSets
    diagrams: Tensor

    def probs(self, *inputs: Any) -> Tensor:
        """Calibrated probabilities ``(batch, classes)``, in float64.

        Args:
            *inputs: as the network takes them.
        """
        return self.probs_of(self.outputs(*inputs))

    def probs_of(self, outputs: Tensor) -> Tensor:
        """Calibrated probabilities, given the outputs of all networks.

        Args:
            outputs: ``(samples, batch, ...)``.
        """
        return self.calibrator(*self.read(outputs))

    def sets(self, *inputs: Any, alpha: float | None = None, batch: int = 0) -> Tensor:
        """Classes that hold the truth as often as was asked for, boolean ``(batch, classes)``.

        Args:
            *inputs: as the network takes them.
            alpha: the share of examples whose class may be missing from its set.
            batch: which batch this is, for scores with random numbers.
        """
        return self.sets_of(self.outputs(*inputs), alpha, batch)

    def sets_of(self, outputs: Tensor, alpha: float | None = None, batch: int = 0) -> Tensor:
        """Prediction sets, given the outputs of all networks.

        Args:
            outputs: ``(samples, batch, ...)``.
            alpha: the share of examples whose class may be missing from its set.
            batch: which batch this is, for scores with random numbers.
        """
        rule = self.rule.at(self.alpha if alpha is None else alpha)
        return rule(self.probs_of(outputs), batch)

    def headline(self) -> str:
        """What was fitted, to how much, in one line."""
        what = self.method.replace("_", " ")
        if isinstance(self.calibrator, Temperature):
            bound = " (at its bound)" if self.calibrator.at_bound else ""
            what += f" {self.calibrator.value:.4f}{bound}"
        by_class = " for every class" if self.rule.by_class else ""
        return (
            f"{what}, fitted to {self.fitted_to} examples; {len(self.rule.labels)} others give the "
            f"numbers, and {self.rule.rule.score.upper()} sets of {1 - self.alpha:.4g}{by_class}"
        )

    def figure(self) -> Figure:
        """Reliability diagrams before and after."""
        before, after = self.diagrams
        return reliability_figures({"before": tuple(before), "after": tuple(after)})


@dataclass(frozen=True, eq=False)
class CalibratedGaussian(Calibrated):
    """A calibrated mixture of Gaussians, and conformal intervals.

    Attributes:
        kind: ``"split"`` or ``"cqr"``.
        means: of all networks on the examples that were kept apart, calibrated.
        stds: their standard deviations.
        targets: of these examples.
        reached: shares of the targets below predicted quantiles before and after.

    >>> from lightning_bnn.calibration import calibrated
    >>> targets = torch.tensor([[1.0], [-1.0]]).repeat(100, 1)
    >>> predictions = torch.zeros(1, 200, 1), torch.full((1, 200, 1), 0.1)  # ten times too narrow
    >>> found = calibrated(Gaussian(), predictions, targets, method="moments")
    >>> means, stds = found.calibrator(*predictions)
    >>> intervals = found.intervals_of_mixture(means, stds)
    >>> round(stds[0, 0].item(), 4), round(intervals.high[0].item(), 4)
    (1.0, 1.0)
    """

    kind: str
    means: Tensor
    stds: Tensor
    targets: Tensor
    reached: Tensor

    def mixture(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Calibrated means and standard deviations of all networks, ``(samples, batch, targets)``.

        Args:
            *inputs: as the network takes them.
        """
        return self.mixture_of(self.outputs(*inputs))

    def mixture_of(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The calibrated mixture, given the outputs of all networks.

        Args:
            outputs: ``(samples, batch, ...)``.
        """
        return self.calibrator(*self.read(outputs))

    def intervals(self, *inputs: Any, alpha: float | None = None) -> Intervals:
        """Intervals that hold the truth as often as was asked for.

        Args:
            *inputs: as the network takes them.
            alpha: the share of targets that may lie outside.
        """
        return self.intervals_of(self.outputs(*inputs), alpha)

    def intervals_of(self, outputs: Tensor, alpha: float | None = None) -> Intervals:
        """Intervals, given the outputs of all networks.

        Args:
            outputs: ``(samples, batch, ...)``.
            alpha: the share of targets that may lie outside.
        """
        return self.intervals_of_mixture(*self.mixture_of(outputs), alpha)

    def intervals_of_mixture(
        self, means: Tensor, stds: Tensor, alpha: float | None = None
    ) -> Intervals:
        """Intervals, given a calibrated mixture.

        Args:
            means: of all networks, ``(samples, batch, targets)``.
            stds: in the same shape.
            alpha: the share of targets that may lie outside.
        """
        alpha = self.alpha if alpha is None else alpha
        known = self._band(self.means, self.stds, alpha)
        rule = conformal_intervals(known, self.targets, alpha)
        return rule(self._band(means, stds, alpha))

    def _band(self, means: Tensor, stds: Tensor, alpha: float) -> Band:
        return mean_band(means, stds) if self.kind == "split" else quantile_band(means, stds, alpha)

    def headline(self) -> str:
        """What was fitted, to how much, in one line."""
        bound = " (at its bound)" if self.calibrator.at_bound else ""
        return (
            f"standard deviations times {self.calibrator.value:.4f}{bound} ({self.method}), fitted "
            f"to {self.fitted_to} examples; {len(self.targets)} others give the numbers, and "
            f"{self.kind} intervals of {1 - self.alpha:.4g}"
        )

    def figure(self) -> Figure:
        """Shares of targets below predicted quantiles, before and after."""
        levels = torch.tensor(LEVELS, dtype=torch.float64)
        lines = {"perfect": Line(levels, levels)}
        lines |= {name: Line(levels, line) for name, line in
                  zip(("before", "after"), self.reached.double(), strict=True)}  # fmt: skip
        return lines_figure({"held out": lines}, ("level", "share of targets below its quantile"))


KINDS: tuple[Any, ...] = (
    CalibratedClasses, CalibratedGaussian, Temperature, VectorScaling, Isotonic, Spread,
    ConformalSets, SetScore, Categorical, Bernoulli, Gaussian,
)  # fmt: skip
"""What files may hold."""
