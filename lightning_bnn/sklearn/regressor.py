"""Numbers of the rows of a table, with intervals that hold them as often as asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_bnn import samplers
from lightning_bnn.calibration import quantile_band
from lightning_bnn.extras import needed
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.sklearn.estimator import TableEstimator, error_rate, optimizer_of
from weightsym.params import check_between

with needed("`lightning_bnn.sklearn`"):
    from sklearn.base import MultiOutputMixin, RegressorMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils.validation import check_is_fitted

__all__ = ["BnnRegressor"]


class BnnRegressor(RegressorMixin, MultiOutputMixin, TableEstimator):
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
            learns = optimizer_of(self._class()) in (torch.optim.Adam, samplers.IVON)
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
            parts += self._ends(rows, predictions, error_rate(intervals))
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _score(self, predictions: Any, whole: Any) -> Tensor:
        return (whole.truth - predictions.moments()[0]).abs() / whole.moments()[1]

    def _ends(self, rows: Tensor, predictions: Any, alpha: float) -> list[NDArray[Any]]:
        """Both ends of intervals, conformal ones if rows calibrate them."""
        if self._held is None:
            means, stds = predictions.components()
            low, high, _ = quantile_band(means, stds, alpha)
        else:
            mean = predictions.moments()[0]
            units = [each.moments()[1].log() for each in self._by_fold(rows, self._held.folds)]
            width = self._held.threshold(alpha) * torch.stack(units).mean(0).exp()
            low, high = mean - width, mean + width
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
        outputs = self._predictions(self._rows_of(X))
        logs = replace(outputs, targets=targets).log_densities()
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
