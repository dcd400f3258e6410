"""A posterior's predictions, calibrated: probabilities and sets, or distributions and intervals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_bnn import metrics as M
from lightning_bnn.calibration.calibrators import (
    CLASS_METHODS,
    GAUSSIAN_METHODS,
    Predictions,
    Spread,
    Temperature,
    VectorScaling,
    joint_log_prob,
    method_of,
    read,
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
from lightning_bnn.tables import text_table
from weightsym.files import draft_of, load
from weightsym.params import check_between, keyed_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def validation_loaders(datamodule: Any) -> list[Any]:
    """Find the loaders of validation data, or say what would give some.

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
    """Make the loaders, or none where a datamodule of Lightning raises that it has none."""
    try:
        return make()
    except NotImplementedError:
        return None
    except Exception as error:
        if type(error).__name__ != "MisconfigurationException":  # Lightning is not known here
            raise
        return None


def split_rows(n: int, share: int | float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows to fit a calibrator to, and rows for all else: prediction sets, and numbers.

    What is fitted to an example knows its label, and prediction sets must not: they hold the truth
    as often as they say only if their examples were kept apart.

    Args:
        n: how many examples there are.
        share: of them that is kept apart.
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


def class_numbers(probs: Tensor, labels: Tensor) -> dict[str, float]:
    """NLL, ECE, Brier score, accuracy and AURC of predictions of classes.

    Args:
        probs: ``(batch, classes)``.
        labels: ``(batch,)``.
    """
    return {
        "nll": float(M.nll(probs, labels)),
        "ece": float(M.ece(probs, labels)),
        "brier": float(M.brier_score(probs, labels)),
        "acc": float((probs.argmax(-1) == labels).double().mean()),
        "aurc": float(M.aurc(probs, labels)),
    }


def gaussian_numbers(
    means: Tensor, stds: Tensor, targets: Tensor, alpha: int | float = 0.1
) -> dict[str, float]:
    """NLL, calibration error of quantiles, coverage and mean width of the central interval.

    Args:
        means: of all networks, ``(samples, batch, ...)``.
        stds: in the same shape.
        targets: ``(batch, ...)``.
        alpha: what lies outside of the central interval.
    """
    low, high, _ = quantile_band(means, stds, alpha)
    inside = (low <= targets) & (targets <= high)
    return {
        "nll": -float(joint_log_prob(means.double(), stds.double(), targets.double()).mean()),
        "qce": float(M.quantile_calibration(means, stds, targets)),
        "coverage": float(inside.double().mean()),
        "width": float((high - low).mean()),
    }


@dataclass(frozen=True, eq=False)
class Calibrated(ABC):
    """A calibrator that was fitted to one part of held-out data and evaluated on the other.

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
        """Convert outputs of all networks ``(samples, batch, ...)`` for the calibrator."""
        check_finite(outputs, "outputs")
        return read(self.likelihood, outputs)

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

    def sets(self, *inputs: Any, alpha: float | None = None) -> Tensor:
        """Classes that hold the truth as often as was asked for, boolean ``(batch, classes)``.

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
        band = self._band(self.means, self.stds, alpha)
        rule = conformal_intervals(band, self.targets, alpha)
        return rule(self._band(means, stds, alpha))

    def _band(self, means: Tensor, stds: Tensor, alpha: float) -> Band:
        return mean_band(means, stds) if self.kind == "split" else quantile_band(means, stds, alpha)

    def headline(self) -> str:
        """Describe in one line what was fitted, and to how much."""
        bound = " (at its bound)" if self.calibrator.at_bound else ""
        return (
            f"standard deviations times {self.calibrator.value:.4f}{bound} ({self.method}), fitted "
            f"to {self.fitted_to} examples; {len(self.targets)} others give the numbers, and "
            f"{self.kind} intervals of {1 - self.alpha:.4g}"
        )

    def figure(self) -> Figure:
        """Shares of targets below predicted quantiles, before and after."""
        return quantiles_figure(dict(zip(("before", "after"), self.reached, strict=True)))


_KINDS: tuple[Any, ...] = (
    CalibratedClasses, CalibratedGaussian, Temperature, VectorScaling, Spread,
    ConformalSets, Categorical, Bernoulli, Gaussian,
)  # fmt: skip
"""Classes whose objects files may hold."""


Part = tuple[list[Tensor], Tensor]
"""Predictions of some examples, and their targets."""
_INTERVALS = ("split", "cqr")


def calibrated(
    likelihood: nn.Module,
    predictions: Predictions,
    targets: Tensor,
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
        likelihood: ``Categorical``, ``Bernoulli`` or ``Gaussian``.
        predictions: of all networks, as `read` gives them.
        targets: of the examples.
        method: of classes ``"temperature"`` or ``"vector"``, of the mean prediction; of numbers
            ``"spread"`` or ``"moments"``.
        alpha: the error rate of sets or intervals.
        score: of sets ``"thr"``, ``"aps"`` or ``"raps"``; of intervals ``"split"`` or ``"cqr"``.
        by_class: whether sets have that error rate for every class.
        held_out: the part of the examples that is not for the calibrator.
        seed: of the split and of randomised sets.
        module: what predicts, kept for new inputs.

    >>> from lightning_bnn.likelihoods import Categorical
    >>> logits = torch.tensor([[[4.0, 0.0]]]).repeat(1, 400, 1)
    >>> labels = (torch.arange(400) % 4) // 3  # a quarter is of the other class
    >>> found = calibrated(Categorical(), (logits,), labels, held_out=0.25)
    >>> found.fitted_to, found.calibrator.value > 1  # the predictions were too sure
    (300, True)
    """
    method = method_of(likelihood, method)
    check_finite(targets, "targets")
    for values in predictions:
        check_finite(values, "predictions")
        if values.shape[1] != len(targets):
            raise ValueError(
                f"`targets` must be one for each of {values.shape[1]} predicted examples, got "
                f"{len(targets)}."
            )
    if method not in GAUSSIAN_METHODS and bool((targets != targets.long()).any()):
        raise ValueError("`targets` must be class indices, got numbers that are not whole.")
    rows, test_rows = split_rows(len(targets), held_out, seed)
    fit_part = [p[:, rows] for p in predictions], targets[rows]
    others = [p[:, test_rows] for p in predictions], targets[test_rows]
    common = {"method": method, "alpha": float(alpha), "fitted_to": len(rows),
              "likelihood": likelihood, "module": module}  # fmt: skip
    if method in GAUSSIAN_METHODS:
        return _gaussian(
            fit_part, others, common, check_choice("score", score or "split", _INTERVALS)
        )
    rule = {"score": score or "thr", "by_class": by_class, "seed": seed}
    return _classes(fit_part, others, common, rule)


def _classes(
    validation: Part, others: Part, common: dict[str, Any], rule: dict[str, Any]
) -> CalibratedClasses:
    ((logits,), labels), ((other_logits,), other_labels) = validation, others
    calibrator = CLASS_METHODS[common["method"]](logits, labels.long())
    logits, labels = other_logits, other_labels.long()
    each = Temperature(1.0)(logits), calibrator(logits)
    before, after = (class_numbers(probs, labels) for probs in each)
    diagrams = [torch.stack(list(diagram(probs, labels))) for probs in each]
    sets = conformal_sets(each[1], labels, common["alpha"], **rule)
    return CalibratedClasses(
        calibrator=calibrator, before=before, after=after, rule=sets,
        diagrams=torch.stack(diagrams), **common,
    )  # fmt: skip


def diagram(probs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Reliability of the likeliest classes, see `lightning_bnn.metrics.reliability`."""
    confidence, predicted = probs.max(-1)
    return tuple(t.double() for t in reliability(confidence, predicted == labels))


def _gaussian(
    validation: Part, others: Part, common: dict[str, Any], kind: str
) -> CalibratedGaussian:
    calibrator = GAUSSIAN_METHODS[common["method"]](*validation[0], validation[1])
    (means, stds), targets = others
    each = (means, stds), calibrator(means, stds)
    before, after = (gaussian_numbers(m, s, targets, common["alpha"]) for m, s in each)
    reached = torch.stack([levels_reached(M.pit(m, s, targets)).mean(1) for m, s in each])
    return CalibratedGaussian(
        calibrator=calibrator, before=before, after=after, kind=kind, means=each[1][0],
        stds=each[1][1], targets=targets.double(), reached=reached, **common,
    )  # fmt: skip
