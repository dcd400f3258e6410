"""Averages the networks of a run in one frame: EMA and SWA that symmetries cannot spoil."""

from __future__ import annotations

import logging
import os
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_bnn.arguments import check_count, check_fraction
from lightning_bnn.callbacks.averaging_frame import (
    AveragingFrame,
    all_finite,
    averaged_tensors,
    sharing_of,
    wide,
)
from lightning_bnn.callbacks.figure_logging import log_folder
from lightning_bnn.callbacks.second_validation import SecondValidation
from lightning_bnn.harvest import Schedule
from lightning_bnn.params import Params

__all__ = ["AverageReport", "SymmetricAverage"]

_log = logging.getLogger(__name__)


class SymmetricAverage(Callback):
    r"""Averages the weights of a run, every network in the frame of the running mean.

    .. math:: m \leftarrow (1 - w)\, m + w\, g \theta, \qquad w = 1 - d \text{ (EMA)},\;
        w = \tfrac{1}{n + 1} \text{ (SWA)}

    The symmetry g exchanges (and flips) units so that the network is closest to the mean. While a
    run stays where it is, g is the identity and this is the plain average; distances of units say
    so without a search, see `lightning_bnn.symmetry.RunningFrame`. Training does not notice:
    weights, optimizers and random numbers are those of a run without the callback. Modules are left
    with their own weights; the average

    - is validated beside them, by a copy of the module whose logs get a prefix,
    - is written to ``average.ckpt`` when training ends, an ordinary checkpoint of the module,
    - goes with every checkpoint of the trainer, so that a resumed run continues it,
    - is what `averaged_state` returns, for ``module.load_state_dict``.

    Statistics of batch norms are estimated on the last training inputs whenever the average is
    used. Parameters outside of the network are averaged as they are, and so is everything where
    symmetries cannot be found (one warning says why). Under several processes with whole weights
    the first one averages; where weights are sharded the callback is switched off, with a warning.

    Args:
        kind: ``"ema"``, weights that decay exponentially, or ``"swa"``, equal ones.
        decay: of the EMA, per average.
        every_n_steps: period in optimizer steps; by default every step for EMA.
        every_n_epochs: period in epochs; by default every epoch for SWA.
        start: first step (or epoch) that counts.
        module: name of the network inside the LightningModule; by default it is found.
        batch_norm: ``"carrier"`` holds the weights before a batch norm and lets its gain carry
            scales; ``"eval"`` treats it as a fixed affine map.
        signs: flip units as well, where the network lets them be flipped.
        scales: ``"min-mass"`` gives every network the least mass over all rescalings first. Then
            it is not the plain average, even where nothing has moved.
        mixing: match heads, streams and adapters by matrices, for every network that is averaged:
            slow, and not the plain average either; for averages of a few networks.
        examples: batch norms are estimated on so many examples, the last ones.
        prefix: of everything that the validation of the average logs.
        validate: whether the average is validated.
        path: where the average is written; by default ``average.ckpt`` in the log folder.
        save: whether it is written.

    References:
        | Averaging Weights Leads to Wider Optima and Better Generalization (Izmailov et al., 2018)
        | Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth et al., 2023)

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> module = DeepEnsemble(mlp(2, [8], 2), members=1)
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> average = SymmetricAverage(decay=0.5, save=False)
    >>> trainer = Trainer(max_steps=6, enable_model_summary=False, callbacks=[average], **quiet)
    >>> trainer.fit(module, TwoGaussians())
    >>> average.report.networks, average.averaged_state(module).keys() == module.state_dict().keys()
    (6, True)
    """

    def __init__(
        self,
        kind: Literal["ema", "swa"] = "ema",
        decay: float = 0.999,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        start: int = 0,
        module: str | None = None,
        batch_norm: Literal["carrier", "eval"] = "carrier",
        signs: bool = True,
        scales: Literal["min-mass"] | None = None,
        mixing: bool = False,
        examples: int = 1024,
        prefix: str = "average/",
        validate: bool = True,
        path: str | os.PathLike[str] | None = None,
        save: bool = True,
    ) -> None:
        _check(kind, decay, batch_norm, scales, mixing, examples, prefix)
        if every_n_steps is None and every_n_epochs is None:
            every_n_steps, every_n_epochs = (1, None) if kind == "ema" else (None, 1)
        self.schedule = Schedule(every_n_steps, every_n_epochs, None, start)
        self.kind, self.decay, self.prefix, self.module = kind, decay, prefix, module
        self.validate, self.save, self.path = validate, save, None if path is None else Path(path)
        self._frame = AveragingFrame(
            module, batch_norm, examples, {"signs": signs, "scales": scales, "mixing": mixing}
        )
        self._mean: Params | None = None
        self._count, self._step, self._seconds = 0, 0, 0.0
        self._active = self._restored = self._warned = False
        self._seen: Any = None
        self._second: SecondValidation | None = None

    @property
    def report(self) -> AverageReport:
        """What the average consists of, and what it has cost."""
        frame = self._frame.running
        looks, matches, moved = (
            (0, 0, 0) if frame is None else (frame.looks, frame.matches, frame.moved_units)
        )
        return AverageReport(self._count, looks, matches, moved, self._seconds)

    def averaged_state(self, pl_module: Any) -> dict[str, Any]:
        """The state dict of a module with the average in place of its weights; copies.

        Args:
            pl_module: the module that was trained; it keeps its weights.
        """
        if self._mean is None:
            raise ValueError("There is no average yet: no step has been averaged.")
        state = {n: t.clone() if isinstance(t, Tensor) else t for n, t in _state(pl_module).items()}
        live = averaged_tensors(pl_module)
        mean = {n: t.to(live[n].device, live[n].dtype) for n, t in self._mean.items()}
        with isolate_rng():
            mean |= self._frame.statistics(pl_module, mean)
        return {**state, **{n: t for n, t in mean.items() if n in state}}

    # -------------------------------------------------------- state
    @property
    def state_key(self) -> str:
        return f"SymmetricAverage(kind={self.kind!r}, module={self.module!r})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "mean": self._mean, "count": self._count, "seconds": self._seconds,
            **self._frame.state(),
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mean = state_dict["mean"]
        self._mean = None if mean is None else {n: t.clone() for n, t in mean.items()}
        self._count, self._seconds = state_dict["count"], state_dict["seconds"]
        self._frame.restore(state_dict)
        self._restored = True

    def __getstate__(self) -> dict[str, Any]:
        """The state for a spawned process, which finds the network itself."""
        return {**self.__dict__, "_seen": None, "_second": None}

    # -------------------------------------------------------- training
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._restored and self._seen is not None and self._seen() is not pl_module:
            self._mean, self._count, self._seconds = None, 0, 0.0
            self._frame.forget()
        self._restored, self._warned, self._seen = False, False, weakref.ref(pl_module)
        self._step = trainer.global_step
        sharing = sharing_of(trainer, pl_module)
        if sharing:
            rank_zero_warn(f"SymmetricAverage is switched off: {sharing}.")
        self._active = trainer.is_global_zero and not sharing
        if not self._active:
            self._mean = None  # another process has it, or nobody
        elif self._mean is not None and not any(is_lazy(p) for p in pl_module.parameters()):
            live = averaged_tensors(pl_module)
            self._mean = {n: t.to(live[n].device) for n, t in self._mean.items() if n in live}
        if self._active:
            self._frame.begin(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._active:
            self._frame.before_batch(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not self._active:
            return
        began = time.perf_counter()
        self._frame.after_batch(pl_module)
        before, self._step = self._step, trainer.global_step
        # the end of an epoch, but before validation, where checkpoints are made
        ended = trainer.is_last_batch and self.schedule.after_epoch(trainer.current_epoch + 1)
        if ended or self.schedule.after_step(before, self._step):
            self._update(pl_module)
        self._seconds += time.perf_counter() - began

    @torch.no_grad()
    def _update(self, pl_module: Any) -> None:
        live = {n: wide(t) for n, t in averaged_tensors(pl_module).items()}
        if not all_finite(live):
            self._warn_once("does not average weights that are not finite")
            return
        if self._mean is None:
            self._mean = {n: t.clone() for n, t in self._frame.first(live).items()}
        else:
            weight = 1 - self.decay if self.kind == "ema" else 1 / (self._count + 1)
            for name, tensor in self._frame.bring(live, self._mean, weight).items():
                self._mean[name].lerp_(tensor, weight)
        self._count += 1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._frame.close()
        there = trainer.strategy.broadcast(self._mean is not None)
        if not there:
            if self._active:
                self._warn_once(f"has averaged nothing ({self.schedule})")
            return
        if self._active:
            _log.info("SymmetricAverage: %s.", self.report)
        folder = log_folder(trainer)  # all processes agree on it
        if self.save and not trainer.fast_dev_run:
            self._save(trainer, pl_module, self.path or folder / "average.ckpt")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._frame.close()
        self._second = None

    @torch.no_grad()
    def _save(self, trainer: Any, pl_module: Any, path: Path) -> None:
        """Let the trainer write a checkpoint while the module holds the average."""
        kept = {n: t.clone() for n, t in _state(pl_module).items() if isinstance(t, Tensor)}
        if self._mean is not None:
            _copy_into(pl_module, self.averaged_state(pl_module))
        try:
            trainer.save_checkpoint(path, weights_only=True)
        finally:
            _copy_into(pl_module, kept)

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            rank_zero_warn(f"SymmetricAverage {what}.")
        self._warned = True

    # -------------------------------------------------------- validation
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._second = None
        ours = self._seen is not None and self._seen() is pl_module
        if trainer.sanity_checking or not self.validate or not ours:
            return
        state = self.averaged_state(pl_module) if self._mean is not None else None
        state = trainer.strategy.broadcast(state)
        if state is None:
            return
        try:
            with isolate_rng():
                self._second = SecondValidation(trainer, pl_module, state, self.prefix)
        except Exception as error:  # whatever copying the user's module raises
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._warn_once(f"does not validate, since the module cannot be copied: {first}")

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._second is not None:
            self._second.begin_epoch()

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._second is not None:
            with isolate_rng():
                self._second.step(batch, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._second is not None:
            with isolate_rng():
                self._second.end_epoch()
            moved = float(self.report.moved_units)
            pl_module.log(f"{self.prefix}moved_units", moved, rank_zero_only=True)
            self._second = None


@dataclass(frozen=True)
class AverageReport:
    """What an average consists of, and what it has cost.

    Attributes:
        networks: how many were averaged.
        looks: for how many distances to the mean could not tell that nothing has moved.
        matches: how many were matched anew.
        moved_units: units of the last network in other places, or flipped, than in the average.
        seconds: wall time of all of it, without validation.

    >>> report = AverageReport(networks=20, looks=2, matches=1, moved_units=3, seconds=0.25)
    >>> str(report).partition(";")[0]
    '20 networks in 0.25 s'
    """

    networks: int
    looks: int
    matches: int
    moved_units: int
    seconds: float

    def __str__(self) -> str:
        """One line for the log."""
        return (
            f"{self.networks} networks in {self.seconds:.3g} s; assignments solved for "
            f"{self.looks}, matched anew {self.matches}; {self.moved_units} units of the last one "
            "are elsewhere than in the average"
        )


def _check(
    kind: str,
    decay: float,
    batch_norm: str,
    scales: str | None,
    mixing: bool,
    examples: int,
    prefix: str,
) -> None:
    if kind not in ("ema", "swa"):
        raise ValueError(f"`kind` must be 'ema' or 'swa', got {kind!r}.")
    check_fraction("decay", decay)
    if batch_norm not in ("carrier", "eval"):
        raise ValueError(f"`batch_norm` must be 'carrier' or 'eval', got {batch_norm!r}.")
    if scales not in (None, "min-mass"):
        raise ValueError(f"`scales` must be 'min-mass' or None, got {scales!r}.")
    if mixing and scales:
        raise ValueError("`mixing` does not go with `scales`: matrices hold both.")
    check_count("examples", examples)
    if not isinstance(prefix, str) or not prefix:
        raise ValueError(f"`prefix` must be a text that is not empty, got {prefix!r}.")


def _state(pl_module: Any) -> dict[str, Any]:
    return dict(pl_module.state_dict())


def _copy_into(pl_module: Any, state: dict[str, Any]) -> None:
    """Overwrite live tensors by others of the same names."""
    for name, tensor in _state(pl_module).items():
        if isinstance(tensor, Tensor) and name in state:
            tensor.copy_(state[name])
