"""All private names of Lightning in this package, each with a test of its existence."""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod as only_of_classes  # noqa: F401

_SHARDING = {
    "FSDPStrategy": "FSDP",
    "ModelParallelStrategy": "FSDP2",
    "DeepSpeedStrategy": "DeepSpeed",
}


def should_log(trainer: Any) -> bool:
    """Return whether ``log`` will reach the logger at this step (``log_every_n_steps``)."""
    return bool(trainer._logger_connector.should_update_logs)


def log(module: Any, name: str, value: Any, **settings: Any) -> None:
    """Log a number like `module.log`, with Lightning's checks of its settings only once.

    Checks and copies take longer than a step of a small network.

    Args:
        module: a LightningModule in a hook of a fit.
        name: of the number, always logged with the same settings by this hook.
        value: a number, or a tensor of one.
        **settings: of `LightningModule.log`.
    """
    settings = {"batch_size": 1, **settings}  # one number, which no batch has to be asked for
    trainer, hook = module._trainer, module._current_fx_name
    results: Any = None if trainer is None else trainer._results
    earlier = None if results is None else results.get(f"{hook}.{name}")
    if earlier is None or getattr(module.log, "__func__", None) is not LightningModule.log:
        module.log(name, value, **settings)
        return
    if trainer._logger_connector.should_reset_tensors(hook):
        results.reset(metrics=False, fx=hook)
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, device=module.device, dtype=torch.get_default_dtype())
    earlier.forward(value.detach(), settings["batch_size"])
    earlier.has_reset = False
    trainer._logger_connector._current_fx = hook


def figure_step(trainer: Any) -> int:
    """Return the step under which ``log`` stores its scalars, which is not ``global_step``."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def cuts_epoch(checkpoint: Any) -> bool:
    """Return whether a checkpoint was written in the last batch of an epoch.

    Lightning continues from it without the end of that epoch, and repeats batches of the next one
    if the run is interrupted again.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    count = progress.get("total", {})
    done = count.get("processed", 0) - count.get("completed", 0)
    return bool(progress.get("is_last_batch")) and done == 1


def complete_last_batch(checkpoint: Any) -> None:
    """Count the last batch as done, before a call of `end_restored_epoch`."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for name in ("total", "current"):
        progress[name]["completed"] += 1


def end_restored_epoch(trainer: Any) -> None:
    """Validate if due, and call the hooks at the end of the restored epoch."""
    loop = trainer.fit_loop
    if loop.restarted_mid_epoch:
        loop.restarting = loop.epoch_loop.restarting = False  # the first alone fails with max_steps
        loop.epoch_loop.on_advance_end(loop._data_fetcher)
        loop.on_advance_end()
        loop.reset_restart_stage()


def made_by_cli() -> bool:
    """Return whether LightningCLI is building a module, and so knows all arguments as YAML."""
    from lightning.pytorch.core.mixins import hparams_mixin

    return hparams_mixin._given_hyperparameters.get() is not None


def tests_datamodule(trainer: Any) -> bool:
    """Return whether the loaders of a test are those of the trainer's datamodule."""
    source = trainer.test_loop._data_source.instance
    return source is not None and source is trainer.datamodule


def in_one_column(trainer: Any) -> None:
    """Print the numbers of all loaders once at the end of a test, not below every loader."""
    outputs = trainer._active_loop._logged_outputs
    outputs[:] = [logged for logged in outputs if logged] or outputs[:1]


def trainer_of(module: Any) -> Any:
    """Return the trainer of a LightningModule, if any."""
    return module._trainer


def sharding(trainer: Any) -> str | None:
    """Name the strategy that shards the weights, or None if they are whole.

    >>> from lightning import Trainer
    >>> off = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    >>> sharding(Trainer(**off)) is None
    True
    """
    kinds = (base.__name__ for base in type(trainer.strategy).__mro__)
    return next((_SHARDING[strategy] for strategy in kinds if strategy in _SHARDING), None)
