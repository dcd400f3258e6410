"""The rows of a table that each network trains on, stops by, and is calibrated with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_bnn.methods import Batch
from weightsym.params import keyed_generator

FEW_ROWS = 2000
"""Up to so many rows, members leave out folds; of more, a share is held out from all."""
FOLDS, HELD_OUT, MOST_HELD_OUT = 5, 0.25, 2000
_STOPPING, _MOST_STOPPING, _LEAST_STOPPING = 0.1, 2000, 20


@dataclass(frozen=True)
class Rows:
    """Indices of rows by their role.

    Attributes:
        held: rows whose predictions make intervals and sets: all in cross-conformal prediction.
        folds: the fold of each of these; networks of member m leave out fold m modulo `count`.
        count: number of folds, 1 where all members leave out the same rows.
        train: rows of each member, ``(members, rows)``, or of all members, ``(rows,)``.
        stop: rows that decide when each member stops training, in none of the others; or None.
    """

    held: Tensor
    folds: Tensor
    count: int
    train: Tensor
    stop: Tensor | None = None

    @classmethod
    def all(cls, n: int) -> Rows:
        """All rows for training."""
        none = torch.zeros(0, dtype=torch.long)
        return cls(none, none, 1, torch.arange(n))

    @classmethod
    def unseen(cls, n: int) -> Rows:
        """Rows that no network was trained on."""
        every = torch.arange(n)
        return cls(every, torch.zeros_like(every), 1, every[:0])

    @classmethod
    def split(cls, n: int, seed: int) -> Rows:
        """A share of the rows is held out, the others train.

        >>> rows = Rows.split(100, seed=0)
        >>> len(rows.held), len(rows.train), set(rows.train.tolist()) & set(rows.held.tolist())
        (25, 75, set())
        """
        held = min(round(HELD_OUT * n), MOST_HELD_OUT, n - 1)
        order = torch.randperm(n, generator=keyed_generator(seed, "held out"))
        zeros = torch.zeros(held, dtype=torch.long)
        return cls(order[:held].sort().values, zeros, 1, order[held:].sort().values)

    @classmethod
    def by_folds(cls, n: int, members: int, seed: int) -> Rows:
        """Every member leaves out a fold; members of larger folds fill their rows up.

        >>> rows = Rows.by_folds(10, members=4, seed=0)
        >>> rows.train.shape, [int((rows.folds == k).sum()) for k in range(rows.count)]
        (torch.Size([4, 7]), [3, 3, 2, 2])
        >>> any(rows.folds[k] == 1 for k in rows.train[1])
        False
        """
        count = min(FOLDS, members, n)
        order = torch.randperm(n, generator=keyed_generator(seed, "folds"))
        folds = torch.empty(n, dtype=torch.long)
        folds[order] = torch.arange(n) % count
        size = n - -(-n // count)  # where folds are smaller, a row more is left out
        generator = keyed_generator(seed, "left out")
        train = [
            rows[torch.randperm(len(rows), generator=generator)[:size]]
            for rows in ((folds != m % count).nonzero()[:, 0] for m in range(members))
        ]
        return cls(torch.arange(n), folds, count, torch.stack(train))

    def stopping(self, members: int, seed: int) -> Rows:
        """The same, with a tenth of each member's rows to stop by, if these are at least 20.

        Args:
            members: how many there are.
            seed: decides which rows.
        """
        train = self.train.expand(members, -1) if self.train.ndim == 1 else self.train
        n = train.shape[1]
        if n < 2 * _LEAST_STOPPING:
            return self
        count = min(max(_LEAST_STOPPING, math.ceil(_STOPPING * n)), _MOST_STOPPING)
        generator = keyed_generator(seed, "stopping")
        mixed = torch.stack([rows[torch.randperm(n, generator=generator)] for rows in train])
        return replace(self, train=mixed[:, count:], stop=mixed[:, :count])


class EarlyStopping(L.Callback):
    """Keeps the weights of every member from the epoch of its least loss on rows of its own.

    Training ends when no member has improved for some epochs.

    Args:
        inputs: ``(members, rows, features)``.
        targets: ``(members, rows, ...)``.
        patience: number of epochs.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, patience: int) -> None:
        self.batch, self.patience = (inputs, targets), patience
        self.best: Tensor | None = None
        self.weights: list[Tensor] = []
        self.since = 0

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        state = pl_module.state.networks
        weights = list(state.parameters())
        inputs, targets = (t.to(pl_module.device) for t in self.batch)
        batch = Batch((inputs.to(weights[0].dtype),), targets, per_member=True)
        state.eval()
        losses = pl_module.run.losses(pl_module.state.stack(), batch).nan_to_num(math.inf, math.inf)
        state.train()
        if self.best is None:
            self.best, self.weights = losses, [w.clone() for w in weights]
            return
        better = losses < self.best
        self.best = torch.where(better, losses, self.best)
        for best, weight in zip(self.weights, weights, strict=True):
            best[better] = weight[better]
        self.since = 0 if bool(better.any()) else self.since + 1
        trainer.should_stop = trainer.should_stop or self.since >= self.patience

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        for best, weight in zip(self.weights, pl_module.state.networks.parameters(), strict=True):
            weight.copy_(best)
