"""The rows of a table that each network trains on, stops by, and is calibrated with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim.adam import adam

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
        folds: the fold of each of these, ``(divisions, rows)``. Member m leaves out fold m modulo
            `count` of division m // `count`, so that the members without a row differ in others.
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
        return cls(every, torch.zeros_like(every)[None], 1, every[:0])

    @classmethod
    def split(cls, n: int, seed: int) -> Rows:
        """A share of the rows is held out, the others train.

        >>> rows = Rows.split(100, seed=0)
        >>> len(rows.held), len(rows.train), set(rows.train.tolist()) & set(rows.held.tolist())
        (25, 75, set())
        """
        held = min(round(HELD_OUT * n), MOST_HELD_OUT, n - 1)
        order = torch.randperm(n, generator=keyed_generator(seed, "held out"))
        zeros = torch.zeros(1, held, dtype=torch.long)
        return cls(order[:held].sort().values, zeros, 1, order[held:].sort().values)

    @classmethod
    def by_folds(cls, n: int, members: int, seed: int) -> Rows:
        """Every member leaves out a fold; members of larger folds fill their rows up.

        >>> rows = Rows.by_folds(10, members=4, seed=0)
        >>> rows.train.shape, [int((rows.folds[0] == k).sum()) for k in range(rows.count)]
        (torch.Size([4, 7]), [3, 3, 2, 2])
        >>> any(rows.folds[0, k] == 1 for k in rows.train[1])
        False
        """
        count = min(FOLDS, members, n)
        divided = keyed_generator(seed, "folds")
        orders = [torch.randperm(n, generator=divided) for _ in range(-(-members // count))]
        folds = torch.stack(orders) % count
        size = n - -(-n // count)  # where folds are smaller, a row more is left out
        generator = keyed_generator(seed, "left out")
        train = [
            rows[torch.randperm(len(rows), generator=generator)[:size]]
            for rows in ((folds[m // count] != m % count).nonzero()[:, 0] for m in range(members))
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
        self.inputs, self.targets, self.patience = inputs, targets, patience
        self.best = torch.full((len(inputs),), math.inf)
        self.weights: list[Tensor] = []
        self.since = 0

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        state = pl_module.state.networks
        weights = list(state.parameters())
        inputs, targets = (t.to(pl_module.device) for t in (self.inputs, self.targets))
        batch = Batch((inputs.to(weights[0].dtype),), targets, per_member=True)
        state.eval()
        losses = pl_module.run.losses(pl_module.state.stack(), batch)
        state.train()
        trainer.should_stop = self.should_stop(losses, weights) or trainer.should_stop

    def should_stop(self, losses: Tensor, weights: Sequence[Tensor]) -> bool:
        """Keep the weights of members that have improved, and return whether none has for long.

        Args:
            losses: of every member after an epoch.
            weights: of all members after it.
        """
        self.weights = self.weights or [w.clone() for w in weights]
        better = losses < self.best.to(losses)
        self.best = torch.where(better, losses, self.best.to(losses))
        for best, weight in zip(self.weights, weights, strict=True):
            best[better] = weight[better]
        self.since = 0 if bool(better.any()) else self.since + 1
        return self.since >= self.patience

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        for best, weight in zip(self.weights, pl_module.state.networks.parameters(), strict=True):
            weight.copy_(best)


class Perceptrons:
    """Perceptrons side by side as one vector, with its gradient layer by layer.

    Args:
        weights: matrices ``(members, outputs, inputs)`` and biases ``(members, outputs)`` of the
            layers in turn, with rectifiers between them.

    >>> weights = [torch.ones(2, 3, 1), torch.zeros(2, 3), torch.ones(2, 1, 3), torch.zeros(2, 1)]
    >>> networks, x = Perceptrons(weights), torch.tensor([[[1.0], [-1.0]]]).expand(2, -1, -1)
    >>> *inputs, outputs = networks.activations(x)
    >>> outputs[0, :, 0], networks.gradient_of(inputs, torch.ones_like(outputs))[:3]
    (tensor([3., 0.]), tensor([1., 1., 1.]))
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.vector = torch.cat([w.detach().flatten() for w in weights])
        self._gradient = torch.empty_like(self.vector)
        sizes = [w.numel() for w in weights]
        self.weights, self._gradients = (
            [part.view_as(w) for part, w in zip(vector.split(sizes), weights, strict=True)]
            for vector in (self.vector, self._gradient)
        )

    def activations(self, x: Tensor) -> list[Tensor]:
        """Return the inputs of every layer, and the outputs of the last.

        Args:
            x: inputs of every member, ``(members, rows, features)``.
        """
        found, last = [x], len(self.weights) - 2
        for k in range(0, last + 2, 2):
            sums = torch.baddbmm(self.weights[k + 1][:, None], found[-1], self.weights[k].mT)
            found.append(sums if k == last else sums.relu_())
        return found

    def gradient_of(self, inputs: Sequence[Tensor], slopes: Tensor) -> Tensor:
        """Return the gradient of a loss, valid until the next call.

        Args:
            inputs: of every layer.
            slopes: derivatives of the loss by the outputs.
        """
        for layer, x in reversed([*enumerate(inputs)]):
            torch.bmm(slopes.mT, x, out=self._gradients[2 * layer])
            torch.sum(slopes, 1, out=self._gradients[2 * layer + 1])
            if layer:
                slopes = torch.bmm(slopes, self.weights[2 * layer]).mul_(x > 0)
        return self._gradient


@torch.no_grad()
def train_perceptrons(
    module: Any, loader: Any, batch: int, epochs: int, rate: float, stopping: EarlyStopping | None
) -> None:
    """Train an ensemble of perceptrons by Adam as a `Trainer` does, in a fraction of its time.

    Args:
        module: the ensemble, in the precision of training.
        loader: of several batches at a time.
        batch: number of examples in a step.
        epochs: largest number of epochs.
        rate: learning rate.
        stopping: ends training, and keeps the best weights.
    """
    networks = Perceptrons(list(module.state.networks.parameters()))
    vector, members, rows = networks.vector, module.members, len(loader.dataset)
    decay = 0.0 if module.prior is None else 1 / (module.prior.std**2 * rows)
    mean, square, steps = torch.zeros_like(vector), torch.zeros_like(vector), torch.zeros(())
    module.num_data, module.has_weights = rows, True
    module.use_training_data(loader)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for some, targets in _batches(loader, members, batch):
            *inputs, outputs = networks.activations(some.to(vector))
            scores = module.likelihood.score(outputs.flatten(0, 1), targets.flatten(0, 1))
            slopes = scores.view_as(outputs).div_(-some.shape[1])
            gradient = networks.gradient_of(inputs, slopes)
            adam(
                [vector], [gradient], [mean], [square], [], [steps], fused=True, amsgrad=False,
                beta1=0.9, beta2=0.999, lr=rate, weight_decay=decay, eps=1e-8, maximize=False,
            )  # fmt: skip
        if stopping is not None:
            outputs = networks.activations(stopping.inputs.to(vector))[-1]
            losses = module.run.nll_each(outputs, stopping.targets)
            if stopping.should_stop(losses, networks.weights):
                break
    best = networks.weights if stopping is None else stopping.weights
    for weight, trained in zip(module.state.networks.parameters(), best, strict=True):
        weight.copy_(trained)


def _batches(loader: Any, members: int, batch: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield inputs and targets of every member, a few examples at a time."""
    for data in loader:
        both = (t if data.per_member else t.expand(members, *t.shape) for t in data[:2])
        yield from zip(*(t.split(batch, 1) for t in both), strict=True)
