"""Keeps the weights of a run in a bank while it trains."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_bnn import params as P
from lightning_bnn.arguments import count, floating_type
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks.figure_logging import log_folder
from lightning_bnn.callbacks.network import stack_of, whole_network
from lightning_bnn.callbacks.writer import BankWriter, host_copy
from lightning_bnn.harvest import Schedule, expected
from lightning_bnn.params import Params

__all__ = ["CheckpointHarvester"]

_log = logging.getLogger(__name__)


class CheckpointHarvester(Callback):
    """Appends the weights of any run to a `lightning_bnn.bank.CheckpointBank`.

    Weights are taken after optimizer steps (or after epochs), written by a thread, and flushed
    before every checkpoint of the trainer: a resumed run continues the bank where its checkpoint
    was made, without missing or doubled networks. Under several processes the first one writes.
    Each record has ``step``, ``epoch``, ``lr``, ``metrics`` (what has been logged) and, for modules
    that train several networks, ``member``.

    Override `should_harvest` to decide otherwise.

    Args:
        bank: folder of the bank, or None for ``bank`` (``bank-<module>`` if that is named) in the
            trainer's log folder; a resumed run keeps the folder of the first.
        every_n_steps: period in optimizer steps (of all optimizers together).
        every_n_epochs: period in epochs. Without any of the three, every epoch.
        at: single steps.
        start: first step (or epoch) that counts.
        module: name of the network inside the LightningModule, such as ``"net"``; by default the
            only submodule with weights, else the whole LightningModule.
        members: which networks to keep of a module that trains several; by default all.
        limit: the bank holds so many networks at most.
        dtype: store floating tensors in this type, such as ``torch.bfloat16``.
    """

    def __init__(
        self,
        bank: str | os.PathLike[str] | None = None,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at: Sequence[int] | None = None,
        start: int = 0,
        module: str | None = None,
        members: Sequence[int] | None = None,
        limit: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if every_n_steps is None and every_n_epochs is None and at is None:
            every_n_epochs = 1
        self.schedule = Schedule(every_n_steps, every_n_epochs, at, start)
        if limit is not None:
            count("limit", limit)
        if dtype is not None:
            floating_type("dtype", dtype)
        self.path = None if bank is None else Path(bank)
        self.module, self.limit, self.dtype = module, limit, dtype
        self.members = None if members is None else list(members)
        self._name = None if bank is None else os.fspath(bank)
        self._writer: BankWriter | None = None
        self._step, self._rows, self._at_start = 0, 0, 0
        self._restored = self._started = self._full = False

    def should_harvest(self, before: int, step: int) -> bool:
        """Whether to harvest after the count of optimizer steps went from one number to another."""
        return self.schedule.after_step(before, step)

    # -------------------------------------------------------- state
    @property
    def state_key(self) -> str:
        return f"CheckpointHarvester(bank={self._name!r}, module={self.module!r})"

    def state_dict(self) -> dict[str, Any]:
        return {"path": str(self.path) if self.path else "", "rows": self._rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows, self._restored = int(state_dict["rows"]), True
        if self._name is None and state_dict["path"]:
            self.path = Path(state_dict["path"])

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.flush()

    # -------------------------------------------------------- hooks
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step, self._full = trainer.global_step, False
        if self._name is None and not self._restored:
            self.path = None  # another run, another folder
        if not any(is_lazy(p) for p in pl_module.parameters()):
            self._start(trainer, pl_module)

    def _start(self, trainer: Any, pl_module: Any) -> None:
        """Open the bank; once there are weights, so not before the first batch of lazy modules."""
        self._started = True
        weights = self._weights(trainer, pl_module)  # all processes take part in these two
        folder = log_folder(trainer)
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        self._check_weights(weights)
        self.path = self.path or folder / (f"bank-{self.module}" if self.module else "bank")
        names = _float_parameters(pl_module, weights)
        bank = CheckpointBank(self.path, dtype=self.dtype, weights=names)
        self._continue(bank)
        self._check_space(trainer, bank, weights)
        self._writer = BankWriter(bank)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not self._started:
            self._start(trainer, pl_module)
        before, self._step = self._step, trainer.global_step
        # the end of an epoch, but before validation, where checkpoints are made
        ended = trainer.is_last_batch and self.schedule.after_epoch(trainer.current_epoch + 1)
        if ended or self.should_harvest(before, self._step):
            self._harvest(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._writer is not None and self._rows == self._at_start:
            rank_zero_warn(f"{self.path}: this run has harvested nothing ({self.schedule}).")
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    # -------------------------------------------------------- harvest
    def _harvest(self, trainer: Any, pl_module: Any) -> None:
        weights = self._weights(trainer, pl_module)  # all processes, however full the bank is
        if self._writer is None or self._full:
            return
        if self.limit is not None and self._rows >= self.limit:
            return
        stacked = stack_of(pl_module) is not None
        networks = weights if stacked else {name: t[None] for name, t in weights.items()}
        records = self._records(trainer, len(next(iter(networks.values()))), stacked)
        if self.limit is not None and self._rows + len(records) > self.limit:
            kept = self.limit - self._rows
            records, networks = records[:kept], {n: t[:kept] for n, t in networks.items()}
        if not self._room(networks):
            return
        self._writer.put(*host_copy(networks), records)
        self._rows += len(records)

    def _weights(self, trainer: Any, pl_module: Any) -> Params:
        """The tensors to keep; on processes other than the first it may be nothing."""
        stack = stack_of(pl_module)
        if stack is not None:
            weights = _of_all(trainer, stack.weights)
            return weights if self.members is None else _rows(weights, self.members)
        if self.members is not None:
            raise ValueError(
                f"`members` is for modules that train several networks; {type(pl_module).__name__} "
                "trains one."
            )
        name, network = whole_network(pl_module, self.module)
        prefix = f"{name}." if name else ""
        state = trainer.strategy.lightning_module_state_dict()
        state = {key.replace("_orig_mod.", ""): tensor for key, tensor in state.items()}
        wanted = (key.replace("_orig_mod.", "") for key in P.of(network))
        return {key: state[prefix + key] for key in wanted if prefix + key in state}

    def _records(self, trainer: Any, count: int, stacked: bool) -> list[dict[str, Any]]:
        record: dict[str, Any] = {"step": trainer.global_step, "epoch": trainer.current_epoch}
        groups = [g for o in trainer.optimizers for g in getattr(o, "param_groups", [])]
        if groups and "lr" in groups[0]:
            record["lr"] = float(groups[0]["lr"])
        metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if v.numel() == 1}
        if metrics:
            record["metrics"] = metrics
        if not stacked:
            return [record]
        return [{**record, "member": m} for m in self.members or range(count)]

    # -------------------------------------------------------- bank
    def _continue(self, bank: CheckpointBank) -> None:
        """Start where the checkpoint was made: what came after it will come again."""
        if not self._restored:
            if len(bank):
                _log.info("%s has %d networks; more are appended.", bank.path, len(bank))
        elif len(bank) < self._rows:
            rank_zero_warn(
                f"{bank.path} has {len(bank)} networks, the checkpoint knew of {self._rows}: "
                "the others are lost."
            )
        elif len(bank) > self._rows:
            rank_zero_warn(
                f"{bank.path}: {len(bank) - self._rows} networks from after the checkpoint are "
                "dropped; the resumed run writes them again."
            )
            bank.truncate(self._rows)
        self._rows = self._at_start = len(bank)
        self._restored = False

    def _check_weights(self, weights: Params) -> None:
        sharded = [n for n, t in weights.items() if type(t) not in (Tensor, torch.nn.Parameter)]
        if not weights:
            raise ValueError("CheckpointHarvester: the network has no tensors to keep.")
        if sharded:
            raise ValueError(
                "CheckpointHarvester needs whole tensors, and this strategy keeps shards: choose "
                "one that saves full state dicts (`save_distributed_checkpoint=False`, "
                "`state_dict_type='full'`)."
            )

    def _check_space(self, trainer: Any, bank: CheckpointBank, weights: Params) -> None:
        """Refuse before training what the disk cannot hold."""
        count = expected(self.schedule, trainer)
        if self.limit is not None:
            count = min(count, self.limit - len(bank))
        size = _bytes(weights, self.dtype)
        free = shutil.disk_usage(bank.path).free
        if size > free or (math.isfinite(count) and count * size > free):
            bank.close()
            raise ValueError(
                f"{count:.0f} harvests of {size / 1e6:.3g} MB do not fit into the {free / 1e6:.3g} "
                f"MB that are free at {bank.path}: set `limit`, a longer period, or `dtype`."
            )

    def _room(self, networks: Params) -> bool:
        assert self.path is not None
        if shutil.disk_usage(self.path).free > 2 * _bytes(networks, self.dtype):
            return True
        self._full = True
        rank_zero_warn(f"The disk of {self.path} is nearly full: harvesting stops.")
        return False

    def _close(self) -> None:
        self._started = False
        if self._writer is not None:
            writer, self._writer = self._writer, None
            try:
                writer.close()
            finally:
                writer.bank.close()


def _of_all(trainer: Any, weights: Params) -> Params:
    """Also the members of other processes, where they are shared out."""
    gather = getattr(trainer.strategy, "gather_members", None)
    return weights if gather is None else {name: gather(t) for name, t in weights.items()}


def _float_parameters(pl_module: Any, weights: Params) -> list[str]:
    """Names of the weights among the tensors that are kept."""
    stack = stack_of(pl_module)
    root = pl_module if stack is None else stack.template
    known = [name.replace("_orig_mod.", "") for name in P.weight_names(root)]
    return [n for n in weights if any(k == n or k.endswith(f".{n}") for k in known)]


def _rows(stack: Params, members: list[int]) -> Params:
    count = len(next(iter(stack.values())))
    if not all(0 <= m < count for m in members):
        raise ValueError(f"`members` must be in 0..{count - 1}, got {members}.")
    return {name: tensor[members] for name, tensor in stack.items()}


def _bytes(tensors: Params, dtype: torch.dtype | None) -> int:
    sizes = (
        t.numel() * (dtype if dtype and t.is_floating_point() else t.dtype).itemsize
        for t in tensors.values()
    )
    return sum(sizes)
