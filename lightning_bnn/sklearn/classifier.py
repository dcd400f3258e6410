"""Classes of the rows of a table, with sets that hold the true one as often as asked."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_bnn.calibration import Temperature, fit_temperature
from lightning_bnn.calibration.conformal import set_scores
from lightning_bnn.extras import needed
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.sklearn.estimator import TableEstimator, error_rate
from weightsym.params import check_between

with needed("`lightning_bnn.sklearn`"):
    from sklearn.base import ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted

__all__ = ["BnnClassifier"]


class BnnClassifier(ClassifierMixin, TableEstimator):
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

            - ``"folds"``: each member leaves out one of five folds, and all rows calibrate. The
              requested rate is met on average over tables, as far as measured, not guaranteed
              (`docs/intervals.md`). Columns are standardised by all rows.
            - ``"split"``: a quarter of the rows, at most 2000, is not for training. The requested
              rate is guaranteed, on average over tables.
            - ``"auto"``: ``"folds"`` for ensembles up to 2000 rows, otherwise ``"split"``.
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
        self.temperature_ = 1.0
        self._fit(x, index, len(self.classes_), likelihood)
        return self

    def calibrate(self, X: ArrayLike, y: ArrayLike) -> BnnClassifier:  # noqa: N803
        """Fit temperature and sets to rows that no network was trained on, in place of others."""
        check_is_fitted(self)
        labels = np.asarray(y)
        unknown = set(labels.tolist()) - set(self.classes_.tolist())
        if unknown:
            raise ValueError(f"`y` has classes that `fit` has not seen: {sorted(unknown)}.")
        self._calibrate(X, torch.from_numpy(np.searchsorted(self.classes_, labels)))
        return self

    def _hold(self, predictions: Any) -> None:
        if len(self.classes_) == 1:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # at a bound
            self.temperature_ = max(
                1.0, fit_temperature(predictions.log_probs, predictions.truth).value
            )

    def _score(self, predictions: Any, whole: Any) -> Tensor:
        scores = set_scores(whole.probs, "thr")  # sets need no extrapolation
        return scores.gather(-1, whole.truth[:, None])[:, 0]

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
        rows = self._rows_of(X)
        if self._held is None:
            raise ValueError(
                "There are no rows to calibrate sets with: omit `conformal=None`, or call "
                "`calibrate(X, y)` with new rows."
            )
        scores = set_scores(self._predictions(rows).probs, "thr")
        return (scores <= self._held.threshold(error_rate(coverage))).numpy()

    def sample(
        self, X: ArrayLike, n: int | None = None, random_state: Any = None  # noqa: N803
    ) -> NDArray[Any]:  # fmt: skip
        """Probabilities of n networks (by default 10 or all), ``(n, rows, classes)``."""
        return self._sampled(X, n, random_state).double().softmax(-1).numpy()
