"""Tables that need no download, since scikit-learn or this package brings them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.datamodules.base import DataModule, Splits, hold_out
from lightning_bnn.datamodules.uci import out_of_distribution, standardised
from lightning_bnn.extras import needed
from lightning_bnn.randomness import keyed_generator

__all__ = ["Airfoil", "Concrete", "Diabetes", "EmbeddedTable", "Energy", "Yacht"]


class EmbeddedTable(DataModule):
    """Regression on a table that needs no download, standardised by the training rows.

    Out of distribution are test inputs whose columns are shuffled independently of each other
    (``shuffled``), and test inputs five times as far from the mean (``far``).

    Args:
        batch_size: examples in a training batch of one process.
        eval_batch_size: examples in a batch of validation and test.
        seed: decides order, validation set and shuffles.
        split: decides which rows are for the test.
        val_size: training examples that are held out for validation.
        test_share: part of the data for the test.
        orders: how many members get training batches of their own, see `DataModule`.

    Attributes:
        target_std: the factor that gives a standardised error the unit of the target.

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
        if not 0 < test_share < 1:
            raise ValueError(f"`test_share` must be between 0 and 1, got {test_share}.")
        self.split, self.val_size, self.test_share = split, val_size, test_share
        self.target_std: Tensor | None = None

    def read(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets in their own units, in double precision, the target last."""
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
        inputs, _ = standardised(inputs, rows)
        targets, self.target_std = standardised(targets, rows)
        train, val = hold_out((inputs[rows], targets[rows]), self.val_size, self.seed)
        kept = inputs[test], targets[test]
        return Splits(train, val, kept, out_of_distribution(kept, self.seed))


class Diabetes(EmbeddedTable):
    """442 patients, ten inputs, progression after a year (see `EmbeddedTable`).

    >>> inputs, targets = Diabetes().load().train
    >>> inputs.shape, targets.shape
    (torch.Size([332, 10]), torch.Size([332, 1]))
    """

    table = "diabetes"

    def read(self) -> tuple[Tensor, Tensor]:
        """The table of scikit-learn, as it is."""
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

    25 rows are there twice, so that a few rows of a test were trained on.

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
