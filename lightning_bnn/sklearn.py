"""Classifiers and regressors for tables, with the posterior of any module and calibrated sets."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from lightning_bnn import modules, samplers
from lightning_bnn.calibration import (
    Temperature,
    cross_conformal_intervals,
    cross_conformal_sets,
    fit_temperature,
    mean_band,
    quantile_band,
)
from lightning_bnn.calibration.conformal import Band, set_scores
from lightning_bnn.datamodules.base import InMemory
from lightning_bnn.extras import needed
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.methods import Method
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.models import mlp
from lightning_bnn.modules.prediction import modes_of
from lightning_bnn.posteriors import Empirical
from lightning_bnn.predictions import Predictions
from lightning_bnn.quiet_runs import one_thread, quiet
from lightning_bnn.tabular import FEW_ROWS, FOLDS, EarlyStopping, Rows
from weightsym.params import check_between, check_count, keyed_generator

with needed("`lightning_bnn.sklearn`"):
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

__all__ = ["BnnClassifier", "BnnRegressor"]

Conformal = Literal["auto", "cv+", "split", False] | None

_ROWS = 10_000
"""Rows that are predicted at a time."""
_TRANSITIONS = 600
"""Of chains that use all data in each; `MILE` adapts in the first half."""
_STEPS, _MOST_EPOCHS, _LEAST_EPOCHS = 1500, 500, 20
_PATIENCE, _LEAST_PATIENCE = 200, 5
"""Steps without improvement before training stops, but at least so many epochs."""
_SMALL = 100_000
"""Weights of a network that trains fastest on one thread."""


@dataclass(frozen=True)
class _Held:
    """Rows for calibration, with predictions of networks that were not trained on them.

    Attributes:
        folds: of the rows; all 0 where no network was trained on any.
        count: number of folds.
        predictions: one for each fold, of all these rows, with their targets.
    """

    folds: Tensor
    count: int
    predictions: Sequence[Any]

    def of_row(self, values: Tensor) -> Tensor:
        """Values ``(folds, rows, ...)`` of each row by the networks without its fold."""
        return values[self.folds, torch.arange(len(self.folds))]

    @property
    def targets(self) -> Tensor:
        """Targets of the rows."""
        targets: Tensor = self.predictions[0].truth
        return targets


class _Estimator(BaseEstimator):
    """What classifiers and regressors have in common.

    Attributes:
        module_: the trained LightningModule, for everything else that this package offers.
    """

    module_: Any
    _held: _Held | None

    def __init__(
        self,
        method: str | type = "DeepEnsemble",
        hidden: Sequence[int] = (50,),
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        options: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        random_state: Any = None,
        verbose: bool = False,
        conformal: Conformal = "auto",
    ) -> None:
        self.method, self.hidden, self.epochs, self.batch_size = method, hidden, epochs, batch_size
        self.learning_rate, self.options, self.trainer = learning_rate, options, trainer
        self.random_state, self.verbose, self.conformal = random_state, verbose, conformal

    # ------------------------------------------------------------ rows
    def _validated(self, x: Any, *y: Any, **options: Any) -> Any:
        """Rows, and targets if they are given, as scikit-learn checks them."""
        kinds = zip(getattr(x, "columns", ()), getattr(x, "dtypes", ()), strict=False)
        words = [str(name) for name, kind in kinds if getattr(kind, "kind", "O") not in "biuf"]
        if words:
            raise ValueError(
                f"Columns {', '.join(words)} are not numbers: encode them first, with "
                f"`make_pipeline(make_column_transformer((OneHotEncoder(), {words}), "
                f"remainder='passthrough'), {type(self).__name__}())`."
            )
        try:
            return validate_data(self, x, *y, dtype=np.float64, **options)
        except ValueError as error:
            if not str(error).startswith("Input X contains NaN"):
                raise
        raise ValueError(
            "X contains NaN: fill missing values first, with "
            f"`make_pipeline(SimpleImputer(), {type(self).__name__}())`."
        )

    def _plan(self, n: int, seed: int) -> tuple[Rows, dict[str, Any]]:
        """Divide the rows, and choose how many members the module has."""
        conformal, cls = self.conformal or None, self._class()
        if conformal is not None:
            check_choice("conformal", conformal, ("auto", "cv+", "split"))
        ensemble = self._is_ensemble
        few = ensemble and n <= FEW_ROWS
        default = inspect.signature(cls).parameters["members"].default
        folds = conformal == "cv+" or (conformal == "auto" and few)
        by_default = (2 * FOLDS if ensemble else FOLDS) if folds else default
        members = (self.options or {}).get("members", by_default)
        folds = folds and n > 1 and (conformal == "cv+" or members >= FOLDS // 2)
        if folds and members < 2:
            raise ValueError(f'`conformal="cv+"` needs at least 2 members, got {members}.')
        if folds:
            rows = Rows.by_folds(n, members, seed)
        else:
            rows = Rows.all(n) if conformal is None or n < 2 else Rows.split(n, seed)
        if ensemble and self.epochs is None:
            rows = rows.stopping(members, seed)
        return rows, {"members": members}

    # ------------------------------------------------------------ training
    def _fit(self, x: NDArray[Any], y: NDArray[Any], outputs: int, likelihood: nn.Module) -> None:
        """Train on standardised rows, and predict those that calibrate."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        rows, options = self._plan(len(x), seed)
        trained = rows.train.flatten().unique()
        if rows.count > 1:
            trained = torch.arange(len(x))
        elif rows.stop is not None:
            trained = torch.cat([rows.train, rows.stop], 1).flatten().unique()
        self._scaler = StandardScaler().fit(x[trained.numpy()])
        inputs, targets = self._standardised(x), self._scaled(y, trained)
        batch, epochs, patience = self._schedule(rows)
        callbacks = list((self.trainer or {}).get("callbacks", ()))
        if rows.stop is not None:
            callbacks.append(EarlyStopping(inputs[rows.stop], targets[rows.stop], patience))
        settings: dict[str, Any] = {
            "max_epochs": epochs, "accelerator": "cpu", "devices": 1, "precision": "64-true",
            "limit_val_batches": 0, "logger": False, "enable_checkpointing": False,
            "enable_model_summary": False, "enable_progress_bar": self.verbose,
            **(self.trainer or {}), "callbacks": callbacks,
        }  # fmt: skip
        with torch.random.fork_rng(devices=[]), quiet(warn=True):
            torch.manual_seed(seed)
            network = mlp(x.shape[1], self.hidden, outputs)
            options |= {"seed": seed, "eval_samples": 100} | (self.options or {})
            module = self._module(network, options | {"likelihood": copy.deepcopy(likelihood)})
            self._check_folds(module, rows)
            small = sum(p.numel() for p in network.parameters()) <= _SMALL
            with one_thread() if small else nullcontext():
                L.Trainer(**settings).fit(module, _data(inputs, targets, rows, batch, seed))
        self.module_ = module.cpu().eval()
        held = rows.held
        self._held = self._predicted(inputs[held], targets[held], rows) if len(held) else None

    def _schedule(self, rows: Rows) -> tuple[int, int, int]:
        """Size of batches, number of epochs, and epochs without improvement."""
        n = rows.train.shape[-1]
        all_data = issubclass(self._class(), (modules.HMC, modules.MILE))
        batch = n if all_data else 128 if n > FEW_ROWS else 64 if self._is_ensemble else 32
        batch = batch if self.batch_size is None else self.batch_size
        check_count("batch_size", batch)
        steps = -(-n // batch)
        epochs = _TRANSITIONS if all_data else 100
        if rows.stop is not None:
            epochs = min(max(_STEPS // steps, _LEAST_EPOCHS), _MOST_EPOCHS)
        epochs = epochs if self.epochs is None else self.epochs
        check_count("epochs", epochs)
        return batch, epochs, max(_LEAST_PATIENCE, -(-_PATIENCE // steps))

    def _check_folds(self, module: Any, rows: Rows) -> None:
        """Require a method whose members can be trained on different rows."""
        if rows.count > 1 and type(module.method).at_end is not Method.at_end:
            raise ValueError(
                f"{type(module).__name__} completes all members with the same rows: set "
                '`conformal="split"`.'
            )

    def _scaled(self, y: NDArray[Any], rows: Tensor) -> Tensor:
        """Targets as the likelihood takes them."""
        return torch.from_numpy(y)

    def _class(self) -> Any:
        """The class of the module."""
        untrained = modules.Bayesian, modules.FromCheckpoints, modules.Distillation
        classes = {
            name: cls
            for name, cls in inspect.getmembers(modules, inspect.isclass)
            if issubclass(cls, modules.Bayesian) and cls not in untrained
        }
        cls: Any = self.method
        if isinstance(cls, str):
            check_choice("method", cls, tuple(classes))
            cls = classes[cls]
        if not inspect.isclass(cls) or not issubclass(cls, tuple(classes.values())):
            raise ValueError(f"`method` must be one of {', '.join(classes)}, got {cls!r}.")
        return cls

    @property
    def _is_ensemble(self) -> bool:
        """True if members are plain networks, which may stop early and leave out folds."""
        return issubclass(self._class(), modules.DeepEnsemble)

    def _module(self, network: nn.Module, options: dict[str, Any]) -> Any:
        cls, rate = self._class(), self.learning_rate
        default = _optimizer_of(cls)
        if rate is None and default is torch.optim.Adam:
            rate = 0.02 if self._is_ensemble else 0.01
        if rate is not None:
            if "lr" not in inspect.signature(default).parameters:
                raise ValueError(f"{cls.__name__} tunes its steps: omit `learning_rate`.")
            options = {"optimizer": partial(default, lr=rate)} | options
        if issubclass(cls, modules.MCDropout):
            options = {"p": 0.1} | options
        if self._is_ensemble:
            options = {"prior_std": 1.0} | options
        return cls(network, **options)

    def _standardised(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(self._scaler.transform(x)).float()

    # ------------------------------------------------------------ predictions
    def _rows_of(self, x: ArrayLike) -> Tensor:
        """Rows as the networks take them."""
        check_is_fitted(self)
        return self._standardised(self._validated(x, reset=False))

    def _batches(self, rows: Tensor) -> Iterator[Tensor]:
        """Some rows at a time, in the precision of the networks."""
        return iter(rows.to(next(self.module_.template.parameters()).dtype).split(_ROWS))

    @torch.no_grad()
    def _predictions(self, rows: Tensor, targets: Tensor | None = None) -> Any:
        """What all networks that predict say together."""
        outputs = torch.cat([self.module_.outputs((part,)) for part in self._batches(rows)], 1)
        return Predictions.of(self.module_.likelihood, outputs, targets)

    @torch.no_grad()
    def _by_fold(self, rows: Tensor, count: int, targets: Tensor | None = None) -> list[Any]:
        """What the networks without each fold say together."""
        if count == 1:
            return [self._predictions(rows, targets)]
        module = self.module_
        share = max(1, module.eval_samples // module.members)
        modes = modes_of(module, share)
        if len(modes) != module.members:
            raise ValueError(
                f"{module.members - len(modes)} of {module.members} members have diverged: "
                "set a smaller `learning_rate`."
            )
        outputs = []
        for k, mode in enumerate(modes):
            size = mode.size if isinstance(mode, Empirical) else share
            predict = mode.predictor(size, keyed_generator(module.seed, "fold", k))
            parts = [predict(module.template, part) for part in self._batches(rows)]
            outputs.append(torch.cat(parts, 1))
        likelihood = module.likelihood
        return [Predictions.of(likelihood, torch.cat(outputs[k::count]), targets)
                for k in range(count)]  # fmt: skip

    def _predicted(self, inputs: Tensor, targets: Tensor, rows: Rows) -> _Held:
        return _Held(rows.folds, rows.count, self._by_fold(inputs, rows.count, targets))

    def _calibrate(self, x: ArrayLike, targets: Tensor) -> None:
        rows = self._rows_of(x)
        if len(rows) != len(targets):
            raise ValueError(f"`X` has {len(rows)} rows, but `y` has {len(targets)}.")
        zeros = torch.zeros(len(rows), dtype=torch.long)
        self._held = _Held(zeros, 1, self._by_fold(rows, 1, targets))

    @torch.no_grad()
    def _sampled(self, x: ArrayLike, n: int | None, random_state: Any) -> Tensor:
        """Outputs of networks that are drawn for this."""
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        batches = self._batches(self._rows_of(x))
        posterior = self.module_.posterior()
        n = min(10, getattr(posterior, "size", 10)) if n is None else n
        predictor = posterior.predictor(n, torch.Generator().manual_seed(seed))
        return torch.cat([predictor(self.module_.template, rows) for rows in batches], 1)


def _data(x: Tensor, y: Tensor, rows: Rows, batch: int, seed: int) -> InMemory:
    """Rows for training: the same of all members, or some of each."""
    if rows.train.ndim == 1:
        return InMemory((x[rows.train], y[rows.train]), batch, seed)
    return InMemory((x, y), batch, seed, rows.train)


def _optimizer_of(cls: Any) -> Any:
    """What a class of modules trains with by default."""
    constructors = (inspect.signature(base).parameters for base in cls.__mro__)
    return next(p["optimizer"].default for p in constructors if "optimizer" in p)


class BnnClassifier(ClassifierMixin, _Estimator):
    """The posterior of a neural network as a classifier of scikit-learn, with prediction sets.

    Features are standardised, and a perceptron learns from them. An ensemble has the prior N(0, 1)
    and stops at the least loss on a tenth of each member's rows.

    Args:
        method: the name of a class of `lightning_bnn.modules`, or the class.
        hidden: width of each hidden layer.
        epochs: how often training goes through the data, without early stopping; by default an
            ensemble stops early, `HMC` and `MILE` make 600 transitions, others take 100 epochs.
        batch_size: rows in a training batch, by default 64 of ensembles and 32 of others, 128 of
            more than 2000 rows; of `HMC` and `MILE` all.
        learning_rate: of the method's optimizer; by default 0.02 for the Adam of ensembles, 0.01
            for that of others, otherwise its own.
        options: further arguments of the module, such as ``{"members": 10, "prior_std": 1.0}``;
            its ``eval_samples``, how many networks predict, is 100 by default.
        trainer: further arguments of the `lightning.Trainer`.
        random_state: seed of the start, the order of the data and all draws.
        verbose: show a progress bar.
        conformal: how sets and intervals are calibrated.

            - ``"cv+"``: each member leaves out one of ten folds, and all rows calibrate. An error
              rate of twice the requested one is guaranteed, up to about 1/11
              (`lightning_bnn.calibration.cross_conformal_intervals`); mostly it is at most the
              requested one. Columns are standardised by all rows.
            - ``"split"``: a quarter of the rows, at most 2000, is not for training. The requested
              rate is guaranteed, on average over tables.
            - ``"auto"``: ``"cv+"`` for ensembles up to 2000 rows, otherwise ``"split"``.
            - None: all rows train, and predictions stay as they are until `calibrate`.

    Attributes:
        temperature_: divides logits of the mean prediction; fitted to the rows that calibrate, and
            at least 1: a few rows that are all predicted right do not make predictions surer.

    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> classifier = BnnClassifier(random_state=0).fit(x[::2], y[::2])
    >>> classifier.predict_proba(x[:2]).shape, classifier.score(x[1::2], y[1::2]) > 0.9
    ((2, 3), True)
    >>> sets = classifier.predict_sets(x[1::2], coverage=0.9)  # of classes, (75, 3)
    >>> bool(sets[range(75), y[1::2]].mean() > 0.85)
    True
    >>> classifier.sample(x[:2], n=7).shape  # probabilities of single networks
    (7, 2, 3)
    """

    classes_: NDArray[Any]
    temperature_: float

    def fit(self, X: ArrayLike, y: ArrayLike) -> BnnClassifier:  # noqa: N803
        """Train on rows and their classes, of any type."""
        x, y = self._validated(X, y)
        check_classification_targets(y)
        self.classes_, index = np.unique(np.asarray(y), return_inverse=True)
        likelihood = (self.options or {}).get("likelihood", Categorical())
        self._fit(x, index, len(self.classes_), likelihood)
        self._fit_temperature()
        return self

    def calibrate(self, X: ArrayLike, y: ArrayLike) -> BnnClassifier:  # noqa: N803
        """Fit temperature and sets to rows that no network was trained on, in place of others."""
        check_is_fitted(self)
        labels = np.asarray(y)
        unknown = set(labels.tolist()) - set(self.classes_.tolist())
        if unknown:
            raise ValueError(f"`y` has classes that `fit` has not seen: {sorted(unknown)}.")
        self._calibrate(X, torch.from_numpy(np.searchsorted(self.classes_, labels)))
        self._fit_temperature()
        return self

    def _fit_temperature(self) -> None:
        self.temperature_ = 1.0
        if self._held is not None and len(self.classes_) > 1:
            logs = torch.stack([each.log_probs for each in self._held.predictions])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # at a bound
                fitted = fit_temperature(self._held.of_row(logs), self._held.targets)
            self.temperature_ = max(1.0, fitted.value)

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Probabilities of the classes, the mean of the networks that predict."""
        predictions = self._predictions(self._rows_of(X))
        if self.temperature_ > 1:
            predictions = predictions.calibrated(Temperature(self.temperature_))
        return predictions.probs.numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """The most probable classes."""
        classes = self.predict_proba(X).argmax(-1)
        return self.classes_[classes]

    def predict_sets(self, X: ArrayLike, coverage: float = 0.9) -> NDArray[Any]:  # noqa: N803
        """Sets that hold the class of a new row, boolean ``(rows, classes)``.

        Args:
            X: rows of features.
            coverage: share of new rows whose class is in its set, see `conformal`.
        """
        check_between("coverage", coverage)
        rows, held = self._rows_of(X), self._held
        if held is None:
            raise ValueError(
                "There are no rows to calibrate sets with: omit `conformal=None`, or call "
                "`calibrate(X, y)` with new rows."
            )
        known, new = (
            torch.stack([set_scores(each.probs, "thr") for each in predictions])
            for predictions in (held.predictions, self._by_fold(rows, held.count))
        )
        scores = held.of_row(known).gather(-1, held.targets[:, None])[:, 0]
        return cross_conformal_sets(scores, held.folds, new, _rest(coverage)).numpy()

    def sample(
        self, X: ArrayLike, n: int | None = None, random_state: Any = None  # noqa: N803
    ) -> NDArray[Any]:  # fmt: skip
        """Probabilities of n networks (by default 10 or all), ``(n, rows, classes)``."""
        return self._sampled(X, n, random_state).double().softmax(-1).numpy()


class BnnRegressor(RegressorMixin, MultiOutputMixin, _Estimator):
    """The posterior of a neural network as a regressor of scikit-learn, with honest intervals.

    Features and targets are standardised. The noise of the targets is learned: by ensembles and
    chains as an output of the network, otherwise as one number. Intervals are conformal (argument
    `conformal`): multiples of the predictive standard deviation, so that they are wide where noise
    or ignorance is large. The arguments are those of `BnnClassifier`.

    >>> x = np.linspace(-1, 1, 60)[:, None]
    >>> regressor = BnnRegressor(epochs=50, random_state=0).fit(x, np.sin(3 * x[:, 0]))
    >>> mean, low, high = regressor.predict(x, intervals=0.9)
    >>> bool((low < mean).all() and (mean < high).all())
    True
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> BnnRegressor:  # noqa: N803
        """Train on rows and their numbers, ``(rows,)`` or ``(rows, targets)``."""
        x, y = self._validated(X, y, multi_output=True, y_numeric=True)
        targets = np.asarray(y, np.float64)
        self._shape = targets.shape[1:]
        targets = targets.reshape(len(targets), -1)
        k = targets.shape[1]
        likelihood = (self.options or {}).get("likelihood")
        if likelihood is None:  # chains learn nothing beside the weights
            learns = _optimizer_of(self._class()) in (torch.optim.Adam, samplers.IVON)
            learns = learns and not self._is_ensemble
            likelihood = Gaussian("learned" if learns else "heteroscedastic", targets=k)
        outputs = 2 * k if getattr(likelihood, "noise", "") == "heteroscedastic" else k
        self._fit(x, targets, outputs, likelihood)
        return self

    def _scaled(self, y: NDArray[Any], rows: Tensor) -> Tensor:
        self._targets_scaler = StandardScaler().fit(y[rows.numpy()])
        return torch.from_numpy(self._targets_scaler.transform(y)).float()

    def calibrate(self, X: ArrayLike, y: ArrayLike) -> BnnRegressor:  # noqa: N803
        """Calibrate intervals with rows that no network was trained on, in place of others."""
        self._calibrate(X, self._checked_targets(X, y))
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False, intervals: float | None = None  # noqa: N803
    ) -> Any:  # fmt: skip
        """The mean of the networks that predict.

        Args:
            X: rows of features.
            return_std: also return standard deviations of new targets, with their noise.
            intervals: also return both ends of intervals that hold a new target with this
                probability, each of several targets; infinite ones, with a warning, where too few
                rows calibrate (9 for 0.9).
        """
        if intervals is not None:
            check_between("intervals", intervals)
        rows = self._rows_of(X)
        predictions = self._predictions(rows)
        mean, std = predictions.moments()
        parts = [self._targets(mean)]
        if return_std:
            parts.append(self._reshaped(std.numpy() * self._targets_scaler.scale_))
        if intervals is not None:
            parts += self._ends(rows, predictions, _rest(intervals))
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _ends(self, rows: Tensor, predictions: Any, alpha: float) -> list[NDArray[Any]]:
        """Both ends of intervals, conformal ones if rows calibrate them."""
        held = self._held
        if held is None:
            means, stds = predictions.components()
            low, high, _ = quantile_band(means, stds, alpha)
        else:
            by_fold = [predictions] if held.count == 1 else self._by_fold(rows, held.count)
            known = Band(*map(held.of_row, _bands(held.predictions)))
            rule = cross_conformal_intervals(known, held.targets, held.folds, alpha)
            low, high = rule(_bands(by_fold))
        return [self._targets(low), self._targets(high)]

    def sample(
        self, X: ArrayLike, n: int | None = None, random_state: Any = None  # noqa: N803
    ) -> NDArray[Any]:  # fmt: skip
        """Means of n networks (by default 10 or all), ``(n, rows)`` or ``(n, rows, targets)``."""
        outputs = self._sampled(X, n, random_state).double()
        return self._targets(self.module_.likelihood.moments(outputs)[0])

    def log_prob(self, X: ArrayLike, y: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Log-densities of targets under the mixture of the networks that predict, ``(rows,)``."""
        targets = self._checked_targets(X, y)
        logs = self._predictions(self._rows_of(X), targets).log_densities()
        return logs.numpy() - np.log(self._targets_scaler.scale_).sum()

    def _checked_targets(self, x: ArrayLike, y: ArrayLike) -> Tensor:
        """Standardised targets, as many as there are rows."""
        check_is_fitted(self)
        targets = np.asarray(y, np.float64)
        wanted = (len(np.asarray(x)), *self._shape)
        if targets.shape != wanted:
            raise ValueError(f"`y` must have shape {wanted}, got {targets.shape}.")
        return torch.from_numpy(self._targets_scaler.transform(targets.reshape(len(targets), -1)))

    def _targets(self, values: Tensor) -> NDArray[Any]:
        scaler = self._targets_scaler
        return self._reshaped(values.detach().numpy() * scaler.scale_ + scaler.mean_)

    def _reshaped(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.reshape(*values.shape[:-1], *self._shape)


def _bands(predictions: Sequence[Any]) -> Band:
    """Means, to be widened by standard deviations, ``(folds, rows, targets)``."""
    bands = [mean_band(*each.components()) for each in predictions]
    return Band(*map(torch.stack, zip(*bands, strict=True)))


def _rest(coverage: float) -> float:
    """The error rate as the decimal that it is.

    >>> _rest(0.9), 1 - 0.9
    (0.1, 0.09999999999999998)
    """
    return round(1 - coverage, 12)
