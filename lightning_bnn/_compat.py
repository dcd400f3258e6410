"""Every private Lightning name this package touches, each with a test that fails when it goes."""

from __future__ import annotations

from typing import Any

__all__ = [
    "figure_step",
    "made_by_cli",
    "should_log",
    "tests_datamodule",
    "trainer_of",
]


def should_log(trainer: Any) -> bool:
    """Tell whether ``log`` will reach the logger at this step (``log_every_n_steps``)."""
    return bool(trainer._logger_connector.should_update_logs)


def figure_step(trainer: Any) -> int:
    """Return the step under which ``log`` files its scalars, which is not ``global_step``."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def made_by_cli() -> bool:
    """Tell whether LightningCLI builds a module just now, and so knows all arguments as YAML."""
    from lightning.pytorch.core.mixins import hparams_mixin

    return hparams_mixin._given_hyperparameters.get() is not None


def tests_datamodule(trainer: Any) -> bool:
    """Tell whether the loaders of a test are those of the trainer's datamodule, not given apart."""
    source = trainer.test_loop._data_source.instance
    return source is not None and source is trainer.datamodule


def trainer_of(module: Any) -> Any:
    """Return the trainer that a LightningModule is with, if any."""
    return module._trainer
