"""The cost of a run: gradients, and CPU seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Sized
from typing import Any

import torch

from lightning_bnn._compat import log
from lightning_bnn.callbacks.figure_logging import log_folder
from lightning_bnn.callbacks.onlooker import Onlooker
from weightsym.files import write_whole

__all__ = ["TrainingCost"]

COST_FILE = "cost.json"
"""In the folder of the logs."""


class TrainingCost(Onlooker):
    """Writes the cost of a run to ``cost.json``, and logs it.

    ``cost/gradients`` counts gradients of one network for all the data: an epoch of a network, or
    one leapfrog step of a chain. ``cost/seconds`` is the CPU time of the training, of all threads
    and processes, without validation. A resumed run continues to count. For modules of other
    packages only seconds are known.

    >>> import tempfile
    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> quiet |= {"enable_model_summary": False, "default_root_dir": tempfile.mkdtemp()}
    >>> trainer = Trainer(max_epochs=2, callbacks=[TrainingCost()], **quiet)
    >>> trainer.fit(DeepEnsemble(mlp(2, [8], 2), members=3), TwoGaussians(size=10))
    >>> trainer.logged_metrics["cost/gradients"]  # two epochs of three networks
    tensor(6.)
    """

    def __init__(self) -> None:
        self.seconds, self.evaluated = 0.0, 0
        self._began, self._known = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "evaluated": self.evaluated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self.evaluated = state_dict["seconds"], state_dict["evaluated"]

    # -------------------------------------------------------- hooks
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start counting, without evaluations from before the run."""
        self._known = _evaluated(pl_module)
        self._began = time.process_time()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Start counting, after a validation."""
        self._began = time.process_time()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Add the cost of one step."""
        self.seconds += time.process_time() - self._began
        now = _evaluated(pl_module)
        self.evaluated, self._known = self.evaluated + now - self._known, now

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the total over all processes."""
        last = trainer.current_epoch + 1 == trainer.max_epochs
        every = trainer.check_val_every_n_epoch or 1  # none: batches count, not epochs
        if last or (trainer.current_epoch + 1) % every == 0:
            for name, value in self._spent(trainer, pl_module).items():
                log(pl_module, f"cost/{name}", value, rank_zero_only=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the total over all processes."""
        spent, folder = self._spent(trainer, pl_module), log_folder(trainer)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / COST_FILE, json.dumps(spent) + "\n", wait=False)

    def _spent(self, trainer: Any, pl_module: Any) -> dict[str, float]:
        mine = torch.tensor([self.seconds, self.evaluated], dtype=torch.float64)
        total = trainer.strategy.reduce(mine.to(pl_module.device), reduce_op="sum").tolist()
        size = _examples(trainer, pl_module) if self.evaluated else None
        return {"seconds": total[0], **({"gradients": total[1] / size} if size else {})}


def _examples(trainer: Any, pl_module: Any) -> int | None:
    """Count the training examples, as far as possible."""
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    return pl_module.num_data or (len(dataset) if isinstance(dataset, Sized) else None)


def _evaluated(pl_module: Any) -> int:
    """Count the examples in gradients, summed over networks."""
    return getattr(getattr(pl_module, "run", None), "evaluated", 0)
