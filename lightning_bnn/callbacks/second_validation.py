"""Validates other weights beside those of a run: a copy of the module that logs under a prefix."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torchmetrics import Metric

from lightning_bnn._compat import runners_of

__all__ = ["SecondValidation"]


class SecondValidation:
    """A copy of a module with other weights, whose `validation_step` runs on the same batches.

    The copy has metrics of its own, so that those of the module do not see its predictions; what it
    logs is logged by the module, under another name.

    Args:
        trainer: that validates.
        pl_module: what is copied; it is left as it is.
        state: the weights of the copy.
        prefix: put before every name that is logged.
    """

    def __init__(self, trainer: Any, pl_module: Any, state: Mapping[str, Any], prefix: str) -> None:
        shared = {id(x): x for m in pl_module.modules() for x in runners_of(m)}
        self.copy: Any = copy.deepcopy(pl_module, shared)
        self.copy.load_state_dict(state)
        self.copy.trainer = trainer
        self.copy.eval()
        self.copy.__dict__["log"] = _prefixed(pl_module, prefix)
        self.trainer, self._loaders = trainer, len(trainer.num_val_batches)
        self.copy.on_validation_start()

    def begin_epoch(self) -> None:
        """Let the copy know that validation begins."""
        self.copy.on_validation_epoch_start()

    def step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """One batch, on the device already."""
        every = (batch, batch_idx, dataloader_idx)[: 3 if self._loaders > 1 else 2]
        with self.trainer.precision_plugin.val_step_context():
            self.copy.validation_step(*every[: _most_arguments(self.copy.validation_step)])

    def end_epoch(self) -> None:
        """Let the copy know that validation ends."""
        self.copy.on_validation_epoch_end()


def _prefixed(pl_module: Any, prefix: str) -> Callable[..., None]:
    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        if isinstance(value, Metric):  # it belongs to the copy
            options.setdefault("metric_attribute", name)
        pl_module.log(prefix + name, value, *args, **options)

    return log


def _most_arguments(method: Callable[..., Any]) -> int:
    """How many arguments by place a method takes."""
    kinds = [p.kind for p in inspect.signature(method).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 3
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in places for kind in kinds)
