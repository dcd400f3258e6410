"""How the estimators read rows, train a module on them, and keep scores to calibrate with."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from lightning_bnn import modules
from lightning_bnn.calibration.cross_conformal import FoldScores
from lightning_bnn.datamodules.base import InMemory
from lightning_bnn.extras import needed
from lightning_bnn.methods import Method
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.models import mlp
from lightning_bnn.modules.prediction import modes_of
from lightning_bnn.posteriors import Empirical
from lightning_bnn.predictions import Predictions
from lightning_bnn.quiet_runs import one_thread, quiet
from lightning_bnn.tabular import FEW_ROWS, FOLDS, EarlyStopping, Rows, train_perceptrons
from weightsym.params import check_count, keyed_generator

with needed("`lightning_bnn.sklearn`"):
    from sklearn.base import BaseEstimator
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data

Conformal = Literal["auto", "folds", "split"] | None

_ROWS = 10_000
"""Rows that are predicted at a time."""
_TRANSITIONS = 600
"""Of chains that use all data in each; `MILE` adapts in the first half."""
_STEPS, _MOST_EPOCHS, _LEAST_EPOCHS = 1500, 500, 20
_PATIENCE, _LEAST_PATIENCE = 200, 5
"""Steps without improvement before training stops, but at least so many epochs."""
_RATE = 0.02
"""Learning rate of ensembles."""
_SMALL = 100_000
"""Weights of a network that trains fastest on one thread."""


class TableEstimator(BaseEstimator):
    """A module that is trained on the rows of a table.

    Attributes:
        module_: the trained LightningModule, for everything else that this package offers.
    """

    module_: Any
    _held: FoldScores | None

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
                f"Columns {', '.join(words)} are not numbers: encode them and fill missing values "
                "with `make_pipeline(make_column_transformer((OneHotEncoder(handle_unknown="
                f"'ignore'), {words}), remainder=SimpleImputer()), {type(self).__name__}())`."
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
            check_choice("conformal", conformal, ("auto", "folds", "split"))
        ensemble = self._is_ensemble
        few = ensemble and n <= FEW_ROWS
        default = inspect.signature(cls).parameters["members"].default
        folds = conformal == "folds" or (conformal == "auto" and few)
        by_default = (4 * FOLDS if ensemble else FOLDS) if folds else default
        members = (self.options or {}).get("members", by_default)
        folds = folds and n > 1 and (conformal == "folds" or members >= FOLDS)
        if folds and members < 2:
            raise ValueError(f'`conformal="folds"` needs at least 2 members, got {members}.')
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
        stopping = None
        if rows.stop is not None:
            stopping = EarlyStopping(inputs[rows.stop], targets[rows.stop], patience)
        with torch.random.fork_rng(devices=[]), quiet(warn=True):
            torch.manual_seed(seed)
            network = mlp(x.shape[1], self.hidden, outputs)
            options |= {"seed": seed, "eval_samples": 100} | (self.options or {})
            module = self._module(network, options | {"likelihood": copy.deepcopy(likelihood)})
            self._check_folds(module, rows)
            small = sum(p.numel() for p in network.parameters()) <= _SMALL
            with one_thread() if small else nullcontext():
                if self._is_plain:
                    several = batch * max(1, _ROWS // batch)
                    data = _data(inputs, targets, rows, several, seed)
                    rate = self.learning_rate or _RATE
                    loader = data.train_dataloader()
                    train_perceptrons(module.double(), loader, batch, epochs, rate, stopping)
                else:
                    data = _data(inputs, targets, rows, batch, seed)
                    self._trainer(epochs, stopping).fit(module, data)
        self.module_ = module.cpu().eval()
        held = rows.held
        self._held = self._scored(inputs[held], targets[held], rows) if len(held) else None

    @property
    def _is_plain(self) -> bool:
        """True if training is that of an ensemble without anything of the user's own."""
        plain = self._class() is modules.DeepEnsemble and not self.verbose and not self.trainer
        return plain and set(self.options or {}) <= {"members", "prior_std", "eval_samples", "seed"}

    def _trainer(self, epochs: int, stopping: EarlyStopping | None) -> L.Trainer:
        settings = self.trainer or {}
        callbacks = [*settings.get("callbacks", ()), *([] if stopping is None else [stopping])]
        defaults: dict[str, Any] = {
            "max_epochs": epochs, "accelerator": "cpu", "devices": 1, "precision": "64-true",
            "limit_val_batches": 0, "logger": False, "enable_checkpointing": False,
            "enable_model_summary": False, "enable_progress_bar": self.verbose,
        }  # fmt: skip
        return L.Trainer(**defaults | settings | {"callbacks": callbacks})

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
        default = optimizer_of(cls)
        if rate is None and default is torch.optim.Adam:
            rate = _RATE if self._is_ensemble else 0.01
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
    def _predictions(self, rows: Tensor) -> Any:
        """What all networks that predict say together."""
        outputs = self._together(rows, [lambda x: self.module_.outputs((x,))])
        return Predictions.of(self.module_.likelihood, outputs)

    # ------------------------------------------------------------ calibration
    def _calibrate(self, x: ArrayLike, targets: Tensor) -> None:
        """Score rows that no network was trained on."""
        inputs = self._rows_of(x)
        if len(inputs) != len(targets):
            raise ValueError(f"`X` has {len(inputs)} rows, but `y` has {len(targets)}.")
        self._held = self._scored(inputs, targets, Rows.unseen(len(inputs)))

    @torch.no_grad()
    def _scored(self, inputs: Tensor, targets: Tensor, rows: Rows) -> FoldScores:
        """Score rows by the networks that were trained without them, and by halves of these."""
        divisions = []
        for folds, predictors in zip(rows.folds, self._predictors(rows.count), strict=False):
            by_fold = [
                self._together(inputs[folds == k], [each]) for k, each in enumerate(predictors)
            ]
            places = folds.argsort(stable=True).argsort()  # of the rows among those by folds
            divisions.append(torch.cat(by_fold, 1)[:, places])
        outputs = torch.cat(divisions)
        half = (len(outputs) + 1) // 2
        read = partial(Predictions.of, self.module_.likelihood, targets=targets)
        whole = read(outputs)
        self._hold(whole)
        parts = whole, read(outputs[:half]), read(outputs[-half:])
        of_all, *of_halves = (self._score(part, whole) for part in parts)
        return FoldScores(of_all, torch.stack(of_halves), rows.count)

    def _by_fold(self, rows: Tensor, count: int) -> list[Any]:
        """What ensembles as small as those that scored, one for each fold, say of new rows."""
        together = (
            self._together(rows, some) for some in zip(*self._predictors(count), strict=True)
        )
        return [Predictions.of(self.module_.likelihood, outputs) for outputs in together]

    @torch.no_grad()
    def _together(self, rows: Tensor, predictors: Sequence[Any]) -> Tensor:
        """Outputs of some networks, one after the other."""
        batches = [[predict(part) for part in self._batches(rows)] for predict in predictors]
        return torch.cat([torch.cat(of_one, 1) for of_one in batches])

    def _predictors(self, count: int) -> list[list[Any]]:
        """Functions to outputs: for each division of the rows, one network of every fold."""
        module = self.module_
        if count == 1:
            return [[lambda x: module.outputs((x,))]]
        share = max(1, module.eval_samples // module.members)
        modes = modes_of(module, share)
        if len(modes) != module.members:
            raise ValueError(
                f"{module.members - len(modes)} of {module.members} members have diverged: "
                "set a smaller `learning_rate`."
            )
        predictors = []
        for k, mode in enumerate(modes):
            size = mode.size if isinstance(mode, Empirical) else share
            predictor = mode.predictor(size, keyed_generator(module.seed, "fold", k))
            predictors.append(partial(predictor, module.template))
        return [predictors[k : k + count] for k in range(0, len(modes) - count + 1, count)]

    def _hold(self, predictions: Any) -> None:
        """Use predictions of rows by networks that have not seen them."""

    @abstractmethod
    def _score(self, predictions: Any, whole: Any) -> Tensor:
        """How far rows are from predictions, in a unit by all that have not seen them."""

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


def optimizer_of(cls: Any) -> Any:
    """What a class of modules trains with by default."""
    constructors = (inspect.signature(base).parameters for base in cls.__mro__)
    return next(p["optimizer"].default for p in constructors if "optimizer" in p)


def error_rate(coverage: float) -> float:
    """The error rate as the decimal that it is.

    >>> error_rate(0.9), 1 - 0.9
    (0.1, 0.09999999999999998)
    """
    return round(1 - coverage, 12)
