"""`lightning-bnn fit | validate | test | predict`: LightningCLI over all modules and data."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_bnn import callbacks, datamodules, modules
from lightning_bnn.commands.mistakes import building, restoring
from lightning_bnn.commands.newest_checkpoint import checkpoint_folders, newest_checkpoint
from lightning_bnn.commands.parsers import StrictParser
from lightning_bnn.loading import describe_content
from lightning_bnn.modules import Bayesian, Prediction, results_table
from lightning_bnn.settings_files import config_files, read_settings

__all__ = ["TrainingCLI", "training"]

for _package in (
    callbacks,
    datamodules,
    modules,
):  # so that YAML names their classes without a path
    for _name in _package.__all__:
        getattr(_package, _name)


class _Parser(StrictParser, LightningArgumentParser):
    """The parser of LightningCLI, without abbreviations."""


class TrainingCLI(LightningCLI):
    """LightningCLI that prints the results of a test once, one row for each set."""

    def before_instantiate_classes(self) -> None:
        """Execute nothing in checkpoints, as Lightning does with those of a URL; no table of it."""
        settings = self.config[self.subcommand]
        if settings.get("weights_only", True) is None:
            settings.weights_only = True
        if self.subcommand == "test":  # it would repeat all numbers for every test set
            settings.verbose = False

    def before_validate(self) -> None:
        """Take the newest checkpoint: an untrained module would judge with random weights."""
        settings, model = self.config_init[self.subcommand], self.model
        trainer: Any = self.trainer
        untrained = isinstance(model, Bayesian) and model.method.trains and model.start_from is None
        if not untrained or settings.ckpt_path is not None or trainer.fast_dev_run:
            return
        folders = checkpoint_folders(trainer, map(str, settings.get("config") or ()))
        kind = type(model).__name__
        path = newest_checkpoint(folders, kind)
        if path is None:
            where = ", ".join(map(str, folders)) or trainer.default_root_dir
            raise ValueError(
                f"There is no checkpoint of {kind} in {where}, and untrained weights are not "
                "judged: run `lightning-bnn fit` first, or name one with `--ckpt_path`."
            )
        settings.ckpt_path = str(path)
        if trainer.is_global_zero:
            print(f"checkpoint: {path} (the newest; `--ckpt_path` names another)")

    before_test = before_predict = before_validate

    def instantiate_classes(self) -> None:
        """Say in one sentence what cannot be made as it is configured."""
        with building("What is configured"):
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Name the settings, which Lightning does not always do."""
        settings = self._get(self.config, "trainer")
        with building(f"`trainer` ({_changed(settings)})"):
            return super().instantiate_trainer(**_logging(settings), **kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        """Name the checkpoint where it is at fault."""
        with restoring(self._get(self.config, "ckpt_path")):
            super()._run_subcommand(subcommand)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would put the settings in a checkpoint above those asked for."""

    def after_test(self) -> None:
        """Print the numbers of every set."""
        if self.trainer.is_global_zero:
            print(results_table(self.trainer.callback_metrics))

    def after_predict(self) -> None:
        """Write the predictions of this process where the logs are."""
        trainer: Any = self.trainer
        predictions = trainer.predict_loop.predictions
        if not predictions or trainer.fast_dev_run:
            return
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.global_rank
        path = folder / ("predictions.pt" if rank == 0 else f"predictions_{rank}.pt")
        torch.save(_joined(predictions), path)
        print(f"wrote {path.resolve()}")


def _joined(predictions: Sequence[Any]) -> Any:
    """Batches of our modules as one dict of tensors; those of others as they are."""
    if not all(isinstance(p, Prediction) for p in predictions):
        return predictions
    means = [p.mean if isinstance(p.mean, Tensor) else p.mean._asdict() for p in predictions]
    samples = torch.cat([p.samples for p in predictions], 1)
    if isinstance(means[0], Tensor):
        return {"mean": torch.cat(means), "samples": samples}
    return {**{k: torch.cat([m[k] for m in means]) for k in means[0]}, "samples": samples}


def training(args: Sequence[str], callbacks: Sequence[L.Callback] = ()) -> Any:
    """Run one of the four commands, and return what has run.

    Args:
        args: the first says which; the others are those of the command line.
        callbacks: besides those of the configuration.
    """
    for file in config_files(args):
        read_settings(file)
    try:
        return _run(args, callbacks)
    except UnpicklingError as error:
        raise ValueError(
            f"The checkpoint {describe_content(error)}; `--weights_only false` runs what is in it."
        ) from error


def _logging(settings: Any) -> dict[str, Any]:
    """The logger that Lightning would make, without the metric of -1 that it adds."""
    if settings.logger not in (None, True):
        return {}
    folder = settings.default_root_dir or os.getcwd()
    version = SLURMEnvironment.job_id()
    return {"logger": TensorBoardLogger(folder, version=version, default_hp_metric=False)}


def _changed(settings: Any) -> str:
    """The settings of a trainer that are not its defaults, as far as they are short."""
    defaults = {n: p.default for n, p in inspect.signature(L.Trainer).parameters.items()}
    short = {n: v for n, v in vars(settings).items() if isinstance(v, (str, int, float))}
    return ", ".join(f"{n}={v}" for n, v in short.items() if v != defaults.get(n))


def _run(args: Sequence[str], callbacks: Sequence[L.Callback]) -> TrainingCLI:
    return _only(args[0])(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        trainer_defaults={"callbacks": list(callbacks)} if callbacks else None,
        args=None if list(args) == sys.argv[1:] else list(args),
        parser_class=_Parser,
        parser_kwargs={
            "prog": "lightning-bnn",
            args[0]: {
                "description": _DESCRIPTION,
                "usage": f"lightning-bnn {args[0]} -c CONFIG [options]",
            },
        },
    )


def _only(name: str) -> type[TrainingCLI]:
    """The command line of one of the four; to build the parsers of the others takes a while."""
    known = {name: TrainingCLI.subcommands()[name]}
    return type("TrainingCLI", (TrainingCLI,), {"subcommands": staticmethod(lambda: known)})


_DESCRIPTION = """Train, validate, test and predict with any posterior, network and data set.

A configuration in YAML says what: `lightning-bnn presets` lists those that come with the package,
`lightning-bnn presets NAME > my.yaml` copies one, `lightning-bnn fit -c my.yaml` runs it. Any value
can be overridden: `--model.init_args.members 5`, `--trainer.callbacks+ MassGap`. What a model or a
data set can be told: `lightning-bnn fit --model.help MFVI`, `... fit --data.help Digits`."""
