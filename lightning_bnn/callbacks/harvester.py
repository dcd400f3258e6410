"""A callback that appends the weights of a run to a bank."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.nn.parameter import is_lazy

from lightning_bnn import _compat
from lightning_bnn.callbacks.figure_logging import log_folder
from lightning_bnn.callbacks.onlooker import Onlooker, RefusedArgument
from lightning_bnn.callbacks.watching import check_name, stack_of, whole_network
from lightning_bnn.harvest import Schedule, expected
from weightsym import params as P
from weightsym.params import Params, check_floating_type

__all__ = ["CheckpointHarvester"]


class CheckpointHarvester(Onlooker):
    """Appends the weights of any run to a `lightning_bnn.bank.CheckpointBank`.

    Weights are copied after optimizer steps (or epochs), written by a thread, and flushed before
    every checkpoint of the trainer. A resumed run continues the bank from its checkpoint, without
    missing or duplicate networks. A new run on a bank with networks appends its own, with a
    warning. While the disk is full, networks are left out, with one warning, and training
    continues. With several processes the first one writes. Each record has ``step``, ``epoch``,
    ``lr``, ``metrics`` (the logged ones) and, for modules that train several networks, ``member``.

    Override `should_harvest` to harvest at other steps.

    Args:
        bank: folder of the bank, or None for ``bank`` (``bank-<module>`` if that is named) in the
            trainer's log folder; a resumed run keeps the folder of the first.
        every_n_steps: period in optimizer steps (of all optimizers together).
        every_n_epochs: period in epochs. Without either of the two, every epoch.
        start: first step (or epoch) of the schedule.
        module: name of the network inside the LightningModule, such as ``"net"``; by default the
            only submodule with weights, else the whole LightningModule.
        dtype: type for floating tensors, such as ``torch.bfloat16``.

    >>> import tempfile
    >>> from lightning import Trainer
    >>> from lightning_bnn.bank import CheckpointBank
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> folder = tempfile.mkdtemp()
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> harvester = CheckpointHarvester(folder, every_n_steps=2)
    >>> trainer = Trainer(max_steps=6, enable_model_summary=False, callbacks=[harvester], **quiet)
    >>> trainer.fit(DeepEnsemble(mlp(2, [8], 2), members=1), TwoGaussians())
    >>> [record["step"] for record in CheckpointBank(folder).records]
    [2, 4, 6]
    """

    def __init__(
        self,
        bank: str | os.PathLike[str] | None = None,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        start: int = 0,
        module: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if every_n_steps is None and every_n_epochs is None:
            every_n_epochs = 1
        self.schedule = Schedule(every_n_steps, every_n_epochs, start)
        check_floating_type("dtype", dtype, optional=True)
        self.path = None if bank is None else Path(bank)
        self.module, self.dtype = module, dtype
        self._name = None if bank is None else os.fspath(bank)
        self._writer: Any = None
        self._step, self._rows, self._at_start, self._lost = 0, 0, 0, 0
        self._restored = self._started = False

    def should_harvest(self, before: int, step: int) -> bool:
        """Decide whether to harvest, given the counts of optimizer steps before and now."""
        return self.schedule.after_step(before, step)

    # -------------------------------------------------------- state
    @property
    def state_key(self) -> str:
        return f"CheckpointHarvester(bank={self._name!r}, module={self.module!r})"

    def state_dict(self) -> dict[str, Any]:
        self._flush()  # a checkpoint knows how many networks are on disk, and not more
        return {"path": str(self.path) if self.path else "", "rows": self._rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        path, rows = state_dict.get("path"), state_dict.get("rows")
        if not isinstance(path, str) or not isinstance(rows, int) or rows < 0:
            raise RefusedArgument(
                f"The checkpoint is damaged: {state_dict} is not a state of a bank."
            )
        self._rows, self._restored = rows, True
        if self._name is None and path:
            self.path = Path(path)

    # -------------------------------------------------------- hooks
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if _compat.cuts_epoch(checkpoint):  # our own modules have mended it
            rank_zero_warn(
                "The checkpoint was written in the last batch of an epoch: Lightning "
                "skips the end of that epoch, and miscounts the next one if the run is "
                "interrupted again. Save within epochs, or at their ends."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step, self._lost = trainer.global_step, 0
        if self._name is None and not self._restored:
            self.path = None  # another run, another folder
        if not any(is_lazy(p) for p in pl_module.parameters()):
            self._start(trainer, pl_module)

    def _start(self, trainer: Any, pl_module: Any) -> None:
        """Open the bank once there are weights, which lazy modules have after a batch."""
        from lightning_bnn.bank import CheckpointBank
        from lightning_bnn.bank.writer import BankWriter

        self._started = True
        check_name(pl_module, self.module)
        # all processes take part in these two
        weights = _harvested_weights(trainer, pl_module, self.module)
        folder = log_folder(trainer)
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        _refuse_parts(weights)
        self.path = self.path or folder / (f"bank-{self.module}" if self.module else "bank")
        names = _names_of_weights(pl_module, weights)
        try:
            bank = CheckpointBank(self.path, dtype=self.dtype, weights=names)
        except (ValueError, OSError) as error:
            raise RefusedArgument(str(error)) from error
        _refuse_another_kind(bank, _as_stack(pl_module, weights))
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
        self._flush()
        if self._writer is not None and self._rows == self._at_start and not self._lost:
            rank_zero_warn(f"{self.path}: this run has harvested nothing ({self.schedule}).")
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    # -------------------------------------------------------- harvest
    def _harvest(self, trainer: Any, pl_module: Any) -> None:
        # all processes take part, however full the bank is
        weights = _harvested_weights(trainer, pl_module, self.module)
        if self._writer is None:
            return
        self._count_lost()
        networks = _as_stack(pl_module, weights)
        count = len(next(iter(networks.values())))
        records = self._records(trainer, count, stack_of(pl_module) is not None)
        self._writer.put(networks, records)
        self._rows += len(records)

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
        return [{**record, "member": m} for m in range(count)]

    # -------------------------------------------------------- bank
    def _continue(self, bank: Any) -> None:
        """Continue from the checkpoint, and drop networks from after it."""
        if not self._restored:
            if len(bank):
                rank_zero_warn(
                    f"{bank.path} has {len(bank)} networks of another "
                    f"run{_steps_of(bank)}; those of this run, which begins at step "
                    f"{self._step}, are appended to them: resume from a checkpoint to "
                    "continue that run, or choose another `bank`."
                )
        elif len(bank) < self._rows:
            rank_zero_warn(
                f"{bank.path} has {len(bank)} networks, but the checkpoint expects "
                f"{self._rows}: the others are lost."
            )
        elif len(bank) > self._rows:
            rank_zero_warn(
                f"{bank.path}: {len(bank) - self._rows} networks from after the checkpoint "
                "are dropped; the resumed run writes them again."
            )
            bank.truncate(self._rows)
        self._rows = self._at_start = len(bank)
        self._restored = False

    def _check_space(self, trainer: Any, bank: Any, weights: Params) -> None:
        """Refuse to train if the disk cannot hold all harvests."""
        count = expected(self.schedule, trainer)
        size = _size_in_bytes(weights, self.dtype)
        free = shutil.disk_usage(bank.path).free
        if size > free or (math.isfinite(count) and count * size > free):
            bank.close()
            raise RefusedArgument(
                f"{count:.0f} harvests of {size / 1e6:.3g} MB do not fit into the "
                f"{free / 1e6:.3g} MB free at {bank.path}: set a longer period, or "
                "`dtype`."
            )

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()
            self._count_lost()

    def _count_lost(self) -> None:
        """Count the networks that the writer has left out since the last time."""
        assert self._writer is not None
        new = self._writer.lost - self._lost
        if new:
            self._rows, self._lost = self._rows - new, self._lost + new
            self.on_full_disk(first=self._lost == new)

    def on_full_disk(self, first: bool) -> None:
        """Handle networks that were left out, by default with one warning.

        Args:
            first: whether it is the first time in this run.
        """
        if first:
            rank_zero_warn(
                f"The disk of {self.path} is full: networks are left out until there is room."
            )

    def _switch_off(self, reason: str) -> None:
        """Stop harvesting, but continue to take part in collective operations."""
        super()._switch_off(reason)
        self._started = self._active = torch.distributed.is_initialized()

    def _close(self) -> None:
        self._started = False
        if self._writer is not None:
            writer = self._writer
            try:
                writer.close()
                self._count_lost()
            finally:
                self._writer = None
                writer.bank.close()


def _steps_of(bank: Any) -> str:
    steps = [r["step"] for r in bank.records if isinstance(r.get("step"), int)]
    return f" (steps {min(steps)} to {max(steps)})" if steps else ""


# ------------------------------------------------------------ the weights
def _harvested_weights(trainer: Any, pl_module: Any, module: str | None) -> Params:
    """Collect the tensors to store, which other processes than the first may not receive.

    Args:
        trainer: all of its processes must take part.
        pl_module: the trained module.
        module: name of the network inside.
    """
    stack = stack_of(pl_module)
    if stack is not None:
        return stack.weights
    name, network = whole_network(pl_module, module)
    prefix = f"{name}." if name else ""
    state = trainer.strategy.lightning_module_state_dict()
    state = {key.replace("_orig_mod.", ""): tensor for key, tensor in state.items()}
    wanted = (key.replace("_orig_mod.", "") for key in P.of(network))
    return {key: state[prefix + key] for key in wanted if prefix + key in state}


def _refuse_parts(weights: Params) -> None:
    """Refuse networks without tensors, and sharded tensors."""
    sharded = any(hasattr(t, "to_local") or hasattr(t, "local_shards") for t in weights.values())
    if not weights:
        raise RefusedArgument("CheckpointHarvester: the network has no tensors.")
    if sharded:
        raise RefusedArgument(
            "CheckpointHarvester needs whole tensors, and this strategy keeps shards: choose "
            "one that saves full state dicts (`save_distributed_checkpoint=False`, "
            "`state_dict_type='full'`)."
        )


def _as_stack(pl_module: Any, weights: Params) -> Params:
    """Add a leading dimension to weights of a single network."""
    several = stack_of(pl_module) is not None
    return weights if several else {name: t[None] for name, t in weights.items()}


def _refuse_another_kind(bank: Any, networks: Params) -> None:
    """Refuse a bank with other networks, before the first step."""
    try:
        if bank.names:
            bank.extend({name: t[:0] for name, t in networks.items()})
    except ValueError as error:
        bank.close()
        raise RefusedArgument(f"`bank` must be another folder than {bank.path}: {error}") from error


def _names_of_weights(pl_module: Any, weights: Params) -> list[str]:
    """Return the names of the weights among the stored tensors."""
    stack = stack_of(pl_module)
    root = pl_module if stack is None else stack.template
    names = [name.replace("_orig_mod.", "") for name in P.weight_names(root)]
    return [n for n in weights if any(k == n or k.endswith(f".{n}") for k in names)]


def _size_in_bytes(tensors: Params, dtype: torch.dtype | None) -> int:
    """Return the size of tensors with floating ones stored in a given type."""
    return sum(
        t.numel() * (dtype if dtype and t.is_floating_point() else t.dtype).itemsize
        for t in tensors.values()
    )
