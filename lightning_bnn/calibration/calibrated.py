"""A posterior's predictions, calibrated: probabilities and sets, or distributions and intervals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightning_bnn import metrics as M
from lightning_bnn.calibration.calibrators import (
    Spread,
    Temperature,
    VectorScaling,
    fit,
    method_of,
)
from lightning_bnn.calibration.conformal import (
    Band,
    ConformalSets,
    Intervals,
    conformal_intervals,
    conformal_sets,
    mean_band,
    quantile_band,
)
from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.metrics.calibration import reliability
from lightning_bnn.metrics.regression import levels_reached
from lightning_bnn.metrics.validation import check_choice, check_finite
from lightning_bnn.plots.predictions import quantiles_figure, reliability_figures
from lightning_bnn.predictions import (
    ClassPredictions,
    DensityPredictions,
    GaussianPredictions,
    Predictions,
    Scores,
    Some,
)
from lightning_bnn.tables import text_table
from weightsym.files import draft_of, load
from weightsym.params import check_between, keyed_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def validation_loaders(datamodule: Any) -> list[Any]:
    """Find the loaders of validation data, and refuse a datamodule without any.

    Args:
        datamodule: anything with a ``val_dataloader``, after ``setup("fit")``.

    >>> from lightning_bnn.datamodules import Yacht
    >>> (loader,) = validation_loaders(Yacht(val_size=50))
    >>> len(loader.targets)
    50
    """
    make = getattr(datamodule, "val_dataloader", None)
    if not callable(make):
        raise ValueError(
            f"`datamodule` must have a `val_dataloader`, got a {type(datamodule).__name__}."
        )
    setup = getattr(datamodule, "setup", None)
    if callable(setup):
        getattr(datamodule, "prepare_data", lambda: None)()
        setup("fit")
    result = _made(make)
    if isinstance(result, dict):
        result = list(result.values())
    loaders = list(result) if isinstance(result, (list, tuple)) else [result]
    loaders = [loader for loader in loaders if loader is not None]
    if not loaders:
        hint = " (`val_size` is 0): give it some" if getattr(datamodule, "val_size", 1) == 0 else ""
        raise ValueError(f"{type(datamodule).__name__} has no validation data{hint}.")
    return loaders


def _made(make: Any) -> Any:
    """Make the loaders, or return None where Lightning raises that there are none."""
    try:
        return make()
    except NotImplementedError:
        return None
    except Exception as error:
        if type(error).__name__ != "MisconfigurationException":  # Lightning is not known here
            raise
        return None


def split_rows(n: int, share: int | float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split rows into those that fit a calibrator, and those for prediction sets and numbers.

    A calibrator has seen the labels of its examples. Prediction sets have their stated coverage
    only if they are made from other examples.

    Args:
        n: number of examples.
        share: of the examples that are kept apart.
        seed: of the split.
    """
    check_between("held_out", share)
    if n < 2:
        raise ValueError(
            f"Calibration takes at least 2 validation examples, got {n}: one to fit, one to test."
        )
    count = min(n - 1, max(1, round(n * share)))
    order = torch.randperm(n, generator=keyed_generator(seed, "calibration"))
    return order[count:].sort().values, order[:count].sort().values


CLASS_NUMBERS = ("nll", "ece", "brier", "acc", "aurc")
"""Numbers of predictions of classes before and after calibration."""


def gaussian_numbers(predictions: GaussianPredictions, alpha: int | float) -> dict[str, float]:
    """NLL, calibration error of quantiles, coverage and mean width of the central interval.

    Args:
        predictions: of examples with targets.
        alpha: what lies outside of the central interval.
    """
    mixture, targets = predictions.components(), predictions.truth
    low, high, _ = quantile_band(*mixture, alpha)
    intervals = Intervals(low, high)
    return {
        "nll": -float(predictions.log_densities().mean()),
        "qce": float(M.quantile_calibration(*mixture, targets)),
        "coverage": float(intervals.contain(targets).double().mean()),
        "width": float(intervals.width.mean()),
    }


@dataclass(frozen=True, eq=False)
class Calibrated(ABC):
    """A calibrator that was fitted to one part of held-out data and evaluated on the other.

    Attributes:
        method: name of the calibrator.
        calibrator: the fitted one.
        alpha: default error rate of sets or intervals.
        fitted_to: number of examples that the calibrator was fitted to.
        before: numbers of the other examples without it.
        after: the same with it.
        module: what predicts, anything with ``outputs(inputs)``; it is not saved.

    >>> import tempfile
    >>> from lightning_bnn.calibration import calibrated
    >>> outputs = torch.tensor([[[4.0, 0.0]]]).repeat(1, 400, 1)
    >>> labels = (torch.arange(400) % 4) // 3  # a quarter is of the other class
    >>> found = calibrated(Predictions.of(Categorical(), outputs, labels))
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

    def predictions_of(self, outputs: Tensor) -> Any:
        """Calibrated predictions, given the outputs of all networks.

        Args:
            outputs: ``(samples, batch, ...)``.
        """
        check_finite(outputs, "outputs")
        return finite(Predictions.of(self.likelihood, outputs)).calibrated(self.calibrator)

    @abstractmethod
    def scores(self, predictions: Any) -> Scores:
        """Scores of every example with calibrated predictions, and with sets or intervals.

        Args:
            predictions: of examples with targets, not yet calibrated.
        """

    def save(self, path: str | Path) -> None:
        """Write everything but the networks: tensors and plain data.

        Args:
            path: of the file.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with draft_of(Path(path)) as draft:
            torch.save(replace(self, module=None), draft)

    @staticmethod
    def load(path: str | Path, module: Any = None) -> Any:
        """Read what `save` has written, without executing anything in the file.

        Args:
            path: of the file.
            module: what predicts, the one that was calibrated.
        """
        with torch.serialization.safe_globals(list(_KINDS)):
            content = load(path)
        if not isinstance(content, Calibrated):
            raise ValueError(f"{path} holds no calibration of this package.")
        return replace(content, module=module)

    def __str__(self) -> str:
        rows = {"before": self.before, "after": self.after}
        cells = [[name, *(f"{v:.4f}" for v in row.values())] for name, row in rows.items()]
        return f"{self.headline()}\n\n{text_table(['', *self.before], cells)}"

    @abstractmethod
    def headline(self) -> str:
        """Describe in one line what was fitted, and to how much."""

    @abstractmethod
    def figure(self) -> Figure:
        """Draw how well calibrated the held-out predictions are, before and after."""


@dataclass(frozen=True, eq=False)
class CalibratedClasses(Calibrated):
    """Calibrated probabilities of classes, and conformal prediction sets.

    Attributes:
        rule: prediction sets of calibrated probabilities.
        diagrams: reliability before and after, ``(2, 3, bins)``.

    >>> from lightning_bnn.calibration import calibrated
    >>> outputs = torch.tensor([[[4.0, 0.0]]]).repeat(1, 400, 1)
    >>> labels = (torch.arange(400) % 4) // 3  # a quarter is of the other class
    >>> found = calibrated(Predictions.of(Categorical(), outputs, labels), alpha=0.5)
    >>> type(found).__name__, bool(found.probs_of(outputs[:, :1])[0, 0] < 0.9)  # it was 0.98
    ('CalibratedClasses', True)
    >>> found.sets_of(outputs[:, :1]), found.sets_of(outputs[:, :1], alpha=0.1)
    (tensor([[ True, False]]), tensor([[True, True]]))
    """

    rule: ConformalSets
    diagrams: Tensor
    measured: ClassVar[Sequence[str]] = ("nll_t", "ece_t", "aurc", "set90", "held90")
    """Numbers of tables that calibration adds."""

    def scores(self, predictions: ClassPredictions) -> Scores:
        """Calibrated probabilities, their NLL, and sizes and coverage of sets."""
        after = finite(predictions).calibrated(self.calibrator)
        sets = self.rule(after.probs)
        return {
            "probs_t": after.probs,
            "nll_t": -after.log_densities(),
            "size": sets.sum(-1).double(),
            "coverage": sets.gather(-1, after.truth[:, None])[:, 0].double(),
        }

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
        return self.predictions_of(outputs).probs

    def sets(self, *inputs: Any, alpha: float | None = None) -> Tensor:
        """Prediction sets with the coverage that was asked for, boolean ``(batch, classes)``.

        Args:
            *inputs: as the network takes them.
            alpha: the share of examples whose class may be missing from its set.
        """
        return self.sets_of(self.outputs(*inputs), alpha)

    def sets_of(self, outputs: Tensor, alpha: float | None = None) -> Tensor:
        """Prediction sets, given the outputs of all networks.

        Args:
            outputs: ``(samples, batch, ...)``.
            alpha: the share of examples whose class may be missing from its set.
        """
        rule = self.rule.at(self.alpha if alpha is None else alpha)
        return rule(self.probs_of(outputs))

    def headline(self) -> str:
        """Describe in one line what was fitted, and to how much."""
        text = self.method.replace("_", " ")
        if isinstance(self.calibrator, Temperature):
            bound = " (at its bound)" if self.calibrator.at_bound else ""
            text += f" {self.calibrator.value:.4f}{bound}"
        by_class = " for every class" if self.rule.by_class else ""
        return (
            f"{text}, fitted to {self.fitted_to} examples; {len(self.rule.labels)} others give the "
            f"numbers, and {self.rule.score.upper()} sets of {1 - self.alpha:.4g}{by_class}"
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
        apart: calibrated predictions of the examples that were kept apart.
        reached: shares of the targets below predicted quantiles before and after.

    >>> from lightning_bnn.calibration import calibrated
    >>> outputs, targets = torch.zeros(1, 200, 1), torch.tensor([[1.0], [-1.0]]).repeat(100, 1)
    >>> narrow = Gaussian(std=0.1)  # ten times too narrow
    >>> found = calibrated(Predictions.of(narrow, outputs, targets), method="moments")
    >>> means, stds = found.mixture_of(outputs)
    >>> round(stds[0, 0].item(), 4), round(found.intervals_of(outputs).high[0].item(), 4)
    (1.0, 1.0)
    """

    kind: str
    apart: GaussianPredictions
    reached: Tensor
    measured: ClassVar[Sequence[str]] = ("interval90", "held90")
    """Numbers of tables that calibration adds."""

    def scores(self, predictions: GaussianPredictions) -> Scores:
        """Width and coverage of intervals, means over targets."""
        intervals = self._intervals(predictions.calibrated(self.calibrator), self.alpha)
        held = intervals.contain(predictions.truth).double()
        return {"width": intervals.width.mean(-1), "coverage": held.mean(-1)}

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
        return self.predictions_of(outputs).components()

    def intervals(self, *inputs: Any, alpha: float | None = None) -> Intervals:
        """Intervals with the coverage that was asked for.

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
        alpha = self.alpha if alpha is None else alpha
        return self._intervals(self.predictions_of(outputs), alpha)

    def _intervals(self, predictions: GaussianPredictions, alpha: float) -> Intervals:
        """Intervals around calibrated predictions."""
        known, new = (self._band(p, alpha) for p in (self.apart, predictions))
        return conformal_intervals(known, self.apart.truth, alpha)(new)

    def _band(self, predictions: GaussianPredictions, alpha: float) -> Band:
        mixture = predictions.components()
        return mean_band(*mixture) if self.kind == "split" else quantile_band(*mixture, alpha)

    def headline(self) -> str:
        """Describe in one line what was fitted, and to how much."""
        bound = " (at its bound)" if self.calibrator.at_bound else ""
        return (
            f"standard deviations times {self.calibrator.value:.4f}{bound} ({self.method}), fitted "
            f"to {self.fitted_to} examples; {self.apart.examples} others give the numbers, and "
            f"{self.kind} intervals of {1 - self.alpha:.4g}"
        )

    def figure(self) -> Figure:
        """Shares of targets below predicted quantiles, before and after."""
        return quantiles_figure(dict(zip(("before", "after"), self.reached, strict=True)))


_KINDS: tuple[Any, ...] = (
    CalibratedClasses, CalibratedGaussian, GaussianPredictions, Temperature, VectorScaling, Spread,
    ConformalSets, Categorical, Bernoulli, Gaussian,
)  # fmt: skip
"""Classes of the objects that a file may contain."""


_INTERVALS = ("split", "cqr")


def calibrated(
    predictions: Predictions,
    method: str | None = None,
    alpha: int | float = 0.1,
    score: str | None = None,
    by_class: bool = False,
    held_out: int | float = 0.5,
    seed: int = 0,
    module: Any = None,
) -> Any:
    """Fit a calibrator to one part of held-out predictions, and test it and make sets by the other.

    Args:
        predictions: of examples that no network was trained on, with their targets.
        method: of classes ``"temperature"`` or ``"vector"``, of the mean prediction; of numbers
            ``"spread"`` or ``"moments"``.
        alpha: the error rate of sets or intervals.
        score: of sets ``"thr"``, ``"aps"`` or ``"raps"``; of intervals ``"split"`` or ``"cqr"``.
        by_class: whether sets have that error rate for every class.
        held_out: the part of the examples that is not for the calibrator.
        seed: of the split and of randomised sets.
        module: what predicts, kept for new inputs.

    >>> from lightning_bnn.likelihoods import Categorical
    >>> outputs = torch.tensor([[[4.0, 0.0]]]).repeat(1, 400, 1)
    >>> labels = (torch.arange(400) % 4) // 3  # a quarter is of the other class
    >>> found = calibrated(Predictions.of(Categorical(), outputs, labels), held_out=0.25)
    >>> found.fitted_to, found.calibrator.value > 1  # the predictions were too sure
    (300, True)
    """
    method = method_of(predictions.likelihood, method)
    if isinstance(predictions, DensityPredictions):
        raise ValueError("Classes at several positions are not calibrated.")
    predictions = finite(predictions)
    rows, test_rows = split_rows(predictions.examples, held_out, seed)
    calibrator = fit(predictions.rows(rows), method)
    before: Any = predictions.rows(test_rows)
    after = before.calibrated(calibrator)
    common = {"method": method, "calibrator": calibrator, "alpha": float(alpha),
              "fitted_to": len(rows), "likelihood": predictions.likelihood,
              "module": module}  # fmt: skip
    if isinstance(after, ClassPredictions):
        rule: dict[str, Any] = {"score": score or "thr", "by_class": by_class, "seed": seed}
        return CalibratedClasses(
            **common,
            before=before.numbers(*CLASS_NUMBERS),
            after=after.numbers(*CLASS_NUMBERS),
            rule=conformal_sets(after.probs, after.truth, alpha, **rule),
            diagrams=torch.stack([torch.stack(diagram(p)) for p in (before, after)]),
        )
    return CalibratedGaussian(
        **common,
        before=gaussian_numbers(before, alpha),
        after=gaussian_numbers(after, alpha),
        kind=check_choice("score", score or "split", _INTERVALS),
        apart=after,
        reached=torch.stack([shares_below(p) for p in (before, after)]),
    )


def finite(predictions: Some) -> Some:
    """Predictions as calibrators take them: finite, with class indices for targets of classes.

    Args:
        predictions: whose targets may be unknown.
    """
    of_classes, targets = isinstance(predictions, ClassPredictions), predictions.targets
    if targets is not None:
        check_finite(targets, "targets")
        if len(targets) != predictions.examples:
            raise ValueError(
                f"`targets` must be one for each of {predictions.examples} predicted examples, "
                f"got {len(targets)}."
            )
        if of_classes and bool((targets != targets.long()).any()):
            raise ValueError("`targets` must be class indices, got numbers that are not whole.")
        predictions = replace(predictions, targets=targets.long() if of_classes else targets)
    for values in predictions.tensors().values():
        check_finite(values, "predictions")
    return predictions


def diagram(predictions: ClassPredictions) -> list[Tensor]:
    """Reliability of the likeliest classes, see `lightning_bnn.metrics.reliability`."""
    confidence, predicted = predictions.probs.max(-1)
    return [t.double() for t in reliability(confidence, predicted == predictions.truth)]


def shares_below(predictions: GaussianPredictions) -> Tensor:
    """Shares of the targets below predicted quantiles."""
    u = M.pit(*predictions.components(), predictions.truth)
    return levels_reached(u).mean(1)
