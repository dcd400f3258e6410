"""Classifiers and regressors for scikit-learn, with the posterior of any module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from lightning_bnn import modules, samplers
from lightning_bnn.calibration import quantile_band
from lightning_bnn.datamodules.base import InMemory
from lightning_bnn.extras import needed
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.models import mlp
from lightning_bnn.predictions import Predictions
from lightning_bnn.quiet_runs import quiet
from weightsym.params import check_between, check_count

with needed("`lightning_bnn.sklearn`"):
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

__all__ = ["BnnClassifier", "BnnRegressor"]

_ROWS = 10_000
"""Rows that are predicted at a time."""
_TRANSITIONS = 600
"""Of chains that use all data in each; `MILE` adapts in the first half."""


class _Estimator(BaseEstimator):
    """What classifiers and regressors have in common.

    Attributes:
        module_: the trained LightningModule, for everything else that this package offers.
    """

    module_: Any

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
    ) -> None:
        self.method, self.hidden, self.epochs, self.batch_size = method, hidden, epochs, batch_size
        self.learning_rate, self.options, self.trainer = learning_rate, options, trainer
        self.random_state, self.verbose = random_state, verbose

    def _fit(self, x: NDArray[Any], y: Tensor, outputs: int, likelihood: nn.Module) -> None:
        """Train on standardised rows."""
        self._scaler = StandardScaler().fit(x)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        by_transitions = issubclass(self._class(), (modules.HMC, modules.MILE))
        epochs, batch = (_TRANSITIONS, len(x)) if by_transitions else (100, 32)
        epochs = epochs if self.epochs is None else self.epochs
        check_count("epochs", epochs)
        batch = batch if self.batch_size is None else self.batch_size
        settings: dict[str, Any] = {
            "max_epochs": epochs, "accelerator": "cpu", "devices": 1, "precision": "64-true",
            "limit_val_batches": 0, "logger": False, "enable_checkpointing": False,
            "enable_model_summary": False, "enable_progress_bar": self.verbose,
        }  # fmt: skip
        with torch.random.fork_rng(devices=[]), quiet(warn=True):
            torch.manual_seed(seed)
            network = mlp(x.shape[1], self.hidden, outputs)
            options = {"seed": seed, "eval_samples": 100} | (self.options or {})
            module = self._module(network, options | {"likelihood": copy.deepcopy(likelihood)})
            trainer = L.Trainer(**(settings | (self.trainer or {})))
            trainer.fit(module, InMemory((self._standardised(x), y), batch, seed))
        self.module_ = module.cpu().eval()

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

    def _module(self, network: nn.Module, options: dict[str, Any]) -> Any:
        cls, rate = self._class(), self.learning_rate
        default = _optimizer_of(cls)
        if rate is None and default is torch.optim.Adam:
            rate = 0.01
        if rate is not None:
            if "lr" not in inspect.signature(default).parameters:
                raise ValueError(f"{cls.__name__} tunes its steps: omit `learning_rate`.")
            options = {"optimizer": partial(default, lr=rate)} | options
        if issubclass(cls, modules.MCDropout):
            options = {"p": 0.1} | options
        return cls(network, **options)

    def _standardised(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(self._scaler.transform(x)).float()

    def _batches(self, x: ArrayLike) -> Iterator[Tensor]:
        """Rows as the networks take them, some at a time."""
        check_is_fitted(self)
        rows = self._standardised(validate_data(self, x, reset=False, dtype=np.float64))
        weights = next(self.module_.template.parameters())
        return iter(rows.to(weights.dtype).split(_ROWS))

    @torch.no_grad()
    def _predictions(self, x: ArrayLike, targets: Tensor | None = None) -> Any:
        """What all networks that predict say together."""
        outputs = torch.cat([self.module_.outputs((rows,)) for rows in self._batches(x)], 1)
        return Predictions.of(self.module_.likelihood, outputs, targets)

    @torch.no_grad()
    def _sampled(self, x: ArrayLike, n: int | None, random_state: Any) -> Tensor:
        """Outputs of networks that are drawn for this."""
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        batches = self._batches(x)
        posterior = self.module_.posterior()
        n = min(10, getattr(posterior, "size", 10)) if n is None else n
        predictor = posterior.predictor(n, torch.Generator().manual_seed(seed))
        return torch.cat([predictor(self.module_.template, rows) for rows in batches], 1)


def _optimizer_of(cls: Any) -> Any:
    """What a class of modules trains with by default."""
    constructors = (inspect.signature(base).parameters for base in cls.__mro__)
    return next(p["optimizer"].default for p in constructors if "optimizer" in p)


class BnnClassifier(ClassifierMixin, _Estimator):
    """The posterior of a neural network as a classifier of scikit-learn.

    Features are standardised, and a perceptron learns from them.

    Args:
        method: the name of a class of `lightning_bnn.modules`, or the class.
        hidden: width of each hidden layer.
        epochs: how often training goes through the data, by default 100; of `HMC` and `MILE`
            transitions, by default 600.
        batch_size: rows in a training batch, by default 32; of `HMC` and `MILE` all.
        learning_rate: of the method's optimizer; by default 0.01 for Adam, otherwise its own.
        options: further arguments of the module, such as ``{"members": 10, "prior_std": 1.0}``;
            its ``eval_samples``, how many networks predict, is 100 by default.
        trainer: further arguments of the `lightning.Trainer`.
        random_state: seed of the start, the order of the data and all draws.
        verbose: show a progress bar.

    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> classifier = BnnClassifier("MFVI", epochs=30, random_state=0).fit(x, y)
    >>> classifier.predict_proba(x[:2]).shape, classifier.score(x, y) > 0.9
    ((2, 3), True)
    >>> classifier.sample(x[:2], n=7).shape  # probabilities of single networks
    (7, 2, 3)
    """

    classes_: NDArray[Any]

    def fit(self, X: ArrayLike, y: ArrayLike) -> BnnClassifier:  # noqa: N803
        """Train on rows and their classes, of any type."""
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, index = np.unique(np.asarray(y), return_inverse=True)
        likelihood = (self.options or {}).get("likelihood", Categorical())
        self._fit(x, torch.from_numpy(index), len(self.classes_), likelihood)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Probabilities of the classes, the mean of the networks that predict."""
        return self._predictions(X).probs.numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """The most probable classes."""
        classes = self.predict_proba(X).argmax(-1)
        return self.classes_[classes]

    def sample(
        self, X: ArrayLike, n: int | None = None, random_state: Any = None  # noqa: N803
    ) -> NDArray[Any]:  # fmt: skip
        """Probabilities of n networks (by default 10 or all), ``(n, rows, classes)``."""
        return self._sampled(X, n, random_state).double().softmax(-1).numpy()


class BnnRegressor(RegressorMixin, MultiOutputMixin, _Estimator):
    """The posterior of a neural network as a regressor of scikit-learn.

    Features and targets are standardised. The noise of the targets is learned, by chains as an
    output of the network. The arguments are those of `BnnClassifier`.

    >>> x = np.linspace(-1, 1, 60)[:, None]
    >>> regressor = BnnRegressor(random_state=0).fit(x, np.sin(3 * x[:, 0]))
    >>> mean, low, high = regressor.predict(x, intervals=0.9)
    >>> bool((low < mean).all() and (mean < high).all())
    True
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> BnnRegressor:  # noqa: N803
        """Train on rows and their numbers, ``(rows,)`` or ``(rows, targets)``."""
        x, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        targets = np.asarray(y, np.float64)
        self._shape = targets.shape[1:]
        targets = targets.reshape(len(targets), -1)
        self._targets_scaler = StandardScaler().fit(targets)
        k = targets.shape[1]
        likelihood = (self.options or {}).get("likelihood")
        if likelihood is None:  # chains learn nothing beside the weights
            learns = _optimizer_of(self._class()) in (torch.optim.Adam, samplers.IVON)
            likelihood = Gaussian("learned" if learns else "heteroscedastic", targets=k)
        outputs = 2 * k if getattr(likelihood, "noise", "") == "heteroscedastic" else k
        standardised = torch.from_numpy(self._targets_scaler.transform(targets)).float()
        self._fit(x, standardised, outputs, likelihood)
        return self

    def predict(
        self, X: ArrayLike, return_std: bool = False, intervals: float | None = None  # noqa: N803
    ) -> Any:  # fmt: skip
        """The mean of the networks that predict.

        Args:
            X: rows of features.
            return_std: also return standard deviations of new targets, with their noise.
            intervals: also return both ends of intervals that hold a new target with this
                probability.
        """
        if intervals is not None:
            check_between("intervals", intervals)
        predictions = self._predictions(X)
        mean, std = predictions.moments()
        parts = [self._targets(mean)]
        if return_std:
            parts.append(self._reshaped(std.numpy() * self._targets_scaler.scale_))
        if intervals is not None:
            means, stds = predictions.components()
            band = quantile_band(means, stds, 1 - intervals)
            parts += [self._targets(band.low), self._targets(band.high)]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def sample(
        self, X: ArrayLike, n: int | None = None, random_state: Any = None  # noqa: N803
    ) -> NDArray[Any]:  # fmt: skip
        """Means of n networks (by default 10 or all), ``(n, rows)`` or ``(n, rows, targets)``."""
        outputs = self._sampled(X, n, random_state).double()
        return self._targets(self.module_.likelihood.moments(outputs)[0])

    def log_prob(self, X: ArrayLike, y: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Log-densities of targets under the mixture of the networks that predict, ``(rows,)``."""
        check_is_fitted(self)
        targets, scaler = np.asarray(y, np.float64), self._targets_scaler
        wanted = (len(np.asarray(X)), *self._shape)
        if targets.shape != wanted:
            raise ValueError(f"`y` must have shape {wanted}, got {targets.shape}.")
        scaled = torch.from_numpy(scaler.transform(targets.reshape(len(targets), -1)))
        logs = self._predictions(X, scaled).log_densities()
        return logs.numpy() - np.log(scaler.scale_).sum()

    def _targets(self, values: Tensor) -> NDArray[Any]:
        scaler = self._targets_scaler
        return self._reshaped(values.detach().numpy() * scaler.scale_ + scaler.mean_)

    def _reshaped(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.reshape(*values.shape[:-1], *self._shape)
