"""`lightning-bnn fit | validate | test | predict`: LightningCLI for all modules and data."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_bnn.commands.presets import HINT
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.modules.checkpoints import kind_of
from lightning_bnn.modules.prediction import Prediction
from lightning_bnn.tables import results_table
from weightsym import Refusal, StrictParser, building, did_you_mean, refusal_of
from weightsym.files import config_files, describe_content, draft_of, load

_log = logging.getLogger(__name__)
_RUNS = "`--weights_only false` runs what is in it"


class TrainingCLI(LightningCLI):
    """LightningCLI that prints the results of a test once, one row for each set."""

    def before_instantiate_classes(self) -> None:
        """Load checkpoints without executing them, and omit Lightning's table of a test."""
        settings = self.config[self.subcommand]
        if settings.get("weights_only", True) is None:
            settings.weights_only = True
        if self.subcommand == "test":  # it would repeat all numbers for every test set
            settings.verbose = False

    def before_validate(self) -> None:
        """Use the newest checkpoint: an untrained module would predict with random weights."""
        settings, model = self.config_init[self.subcommand], self.model
        trainer: Any = self.trainer
        untrained = isinstance(model, Bayesian) and model.method.trains and model.start_from is None
        last = settings.ckpt_path == "last"  # without one, Lightning warns and goes on
        named = settings.ckpt_path is not None and not last
        if named or trainer.fast_dev_run or not (untrained or last):
            return
        folders = checkpoint_folders(trainer, map(str, settings.get("config") or ()))
        class_name = type(model).__name__
        path = newest_checkpoint(folders, class_name, "last*.ckpt" if last else "*.ckpt")
        if path is None:
            where = ", ".join(map(str, folders)) or trainer.default_root_dir
            raise ValueError(
                f"There is no {'last.ckpt' if last else 'checkpoint'} of {class_name} in "
                f"{where}, and untrained weights are not evaluated: run `lightning-bnn "
                "fit` first, or name a checkpoint with `--ckpt_path`."
            )
        settings.ckpt_path = str(path)
        if trainer.is_global_zero:
            print(f"checkpoint: {path} (the newest; `--ckpt_path` names another)")

    before_test = before_predict = before_validate

    def instantiate_classes(self) -> None:
        """Report in one sentence objects that cannot be built from the configuration."""
        with building("What is configured"):
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Name the settings in errors, which Lightning does not always do."""
        settings = self._get(self.config, "trainer")
        with building(f"`trainer` ({_changed(settings)})"):
            return super().instantiate_trainer(**_logging(settings), **kwargs)

    def _run_subcommand(self, subcommand: str) -> None:
        """Name the checkpoint in its errors."""
        settings = self.config_init[self.subcommand]
        try:
            path = settings.get("ckpt_path")
            if path and os.path.isfile(path) and settings.get("weights_only") is not False:
                _check_checkpoint(path)
            super()._run_subcommand(subcommand)
        except SystemExit:  # Lightning's answer to Ctrl-C
            self._say_how_to_go_on()
            raise
        except UnpicklingError as error:  # of a URL
            raise ValueError(f"`ckpt_path`: {path} {describe_content(error)} ({_RUNS}).") from error
        except (RuntimeError, ValueError) as error:
            causes = ("ckpt_path=", "loading state_dict", "The checkpoint ")
            if not any(cause in str(error) for cause in causes):
                raise
            path, reason = settings.get("ckpt_path"), " ".join(str(error).split())[:300]
            saved = Path(str(path)).parent.parent / "config.yaml"
            hint = f" (its run was configured by {saved})" if saved.is_file() else ""
            raise ValueError(
                f"`ckpt_path`: {path} does not match the module{hint}: {reason}"
            ) from error

    def _say_how_to_go_on(self) -> None:
        """Print the command that resumes an interrupted run."""
        trainer: Any = self.trainer
        saved = Path(trainer.log_dir or trainer.default_root_dir) / "config.yaml"
        callback = trainer.checkpoint_callback
        path = callback and (callback.last_model_path or callback.best_model_path)
        if self.subcommand == "fit" and trainer.is_global_zero and path and saved.is_file():
            print(f"to continue: lightning-bnn fit -c {saved} --ckpt_path {path}")

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let settings of a checkpoint override those of the user."""

    def after_test(self) -> None:
        """Print the metrics of every set."""
        if self.trainer.is_global_zero:
            print(results_table(self.trainer.callback_metrics))

    def after_predict(self) -> None:
        """Write the predictions of this process to the log folder."""
        trainer: Any = self.trainer
        predictions = trainer.predict_loop.predictions
        if not predictions or trainer.fast_dev_run:
            return
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.global_rank
        path = folder / ("predictions.pt" if rank == 0 else f"predictions_{rank}.pt")
        with draft_of(path) as draft:
            torch.save(_joined(predictions), draft)
        print(f"wrote {path.resolve()}")


def _joined(predictions: Sequence[Any]) -> Any:
    """Join the predictions of this package's modules, and return others unchanged."""
    if not all(isinstance(p, Prediction) for p in predictions):
        return predictions
    means = [p.mean if isinstance(p.mean, Tensor) else p.mean._asdict() for p in predictions]
    samples = torch.cat([p.samples for p in predictions], 1)
    if isinstance(means[0], Tensor):
        return {"mean": torch.cat(means), "samples": samples}
    return {**{k: torch.cat([m[k] for m in means]) for k in means[0]}, "samples": samples}


def training(args: Sequence[str], callbacks: Sequence[L.Callback] = ()) -> Any:
    """Run a configuration in YAML, such as one of the presets.

    `lightning-bnn presets` lists the configurations that come with the package,
    `lightning-bnn presets NAME > my.yaml` copies one, `lightning-bnn fit -c my.yaml` runs it.
    The most useful options:

      -c, --config FILE        the configuration, in YAML; later files override earlier ones
      --model.KEY VALUE        change the model, such as --model.init_args.members 5
      --data.KEY VALUE         change the data, such as --data.init_args.batch_size 32
      --trainer.KEY VALUE      change the Trainer, such as --trainer.max_epochs 3
      --trainer.callbacks+ CLASS
                               add a callback, such as MassGap
      --seed_everything N      the seed of all random numbers (0)
      --ckpt_path FILE         the checkpoint to start from; `test` and others use the newest
      --weights_only false     execute the content of a checkpoint; only for your own
      --print_config           print the complete configuration as YAML, and stop
      --model.help CLASS       the arguments of a model, such as MFVI or SWAG
      --data.help CLASS        the arguments of a data set, such as Digits
      --help.all               every option, those of the Trainer included

    Args:
        args: the command and its options.
        callbacks: further callbacks, besides those of the configuration.

    Returns:
        The command line of Lightning, which holds trainer, model and data.
    """
    try:
        return _command_line(args, callbacks)
    except Refusal as refusal:
        if not config_files(args):
            refusal.meant = f"{refusal.meant or '.'} {HINT}"
        raise


def _command_line(args: Sequence[str], callbacks: Sequence[L.Callback]) -> TrainingCLI:
    _import_named(args)
    args = ["--help" if arg == "--help.all" else arg for arg in args]
    return _only(args[0])(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        trainer_defaults={"callbacks": list(callbacks)} if callbacks else None,
        args=None if args == sys.argv[1:] else args,
        parser_class=ClassParser,
        parser_kwargs={
            "prog": "lightning-bnn",
            args[0]: {"usage": f"lightning-bnn {args[0]} -c CONFIG [options]"},
        },
    )


def _import_named(args: Sequence[str]) -> None:
    """Import the classes of this package named on a command line or in its configurations."""
    words: set[str] = set()
    texts = [*args, *map(_text, config_files(args))]
    while texts:
        new = set(re.findall(r"[\w./-]+", texts.pop())) - words
        words |= new
        texts += [_text(w) for w in new if w.endswith((".yaml", ".yml")) and os.path.isfile(w)]
    import_exports({word.rpartition(".")[2] for word in words})


def _text(file: str) -> str:
    return Path(file).read_text(encoding="utf-8")


def _logging(settings: Any) -> dict[str, Any]:
    """Return Lightning's default logger, without the metric of -1 that it adds."""
    if settings.logger not in (None, True):
        return {}
    folder = settings.default_root_dir or os.getcwd()
    version = SLURMEnvironment.job_id()
    return {"logger": TensorBoardLogger(folder, version=version, default_hp_metric=False)}


def _changed(settings: Any) -> str:
    """Return the short settings of a trainer that differ from the defaults."""
    defaults = {n: p.default for n, p in inspect.signature(L.Trainer).parameters.items()}
    short = {n: v for n, v in vars(settings).items() if isinstance(v, (str, int, float))}
    return ", ".join(f"{n}={v}" for n, v in short.items() if v != defaults.get(n))


def _only(name: str) -> type[TrainingCLI]:
    """Create the command line of one of the four, since building all parsers takes a while."""
    command = {name: TrainingCLI.subcommands()[name]}
    return type("TrainingCLI", (TrainingCLI,), {"subcommands": staticmethod(lambda: command)})


# ------------------------------------------------------------ checkpoints
def _check_checkpoint(path: str) -> None:
    """Require a checkpoint of Lightning, without executing its content."""
    try:
        content = load(path, mmap=True)
    except ValueError as error:
        raise ValueError(f"`ckpt_path`: {error} ({_RUNS}).") from error
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise ValueError(f"`ckpt_path`: {path} is not a checkpoint written by Lightning.")


def checkpoint_folders(trainer: Any, configs: Iterable[str | Path]) -> list[Path]:
    """List the folders with the checkpoints of a run.

    This is the folder of the checkpoint callback; else the one beside the configuration, which is
    saved with the logs; else those of all runs below the logger's folder.

    Args:
        trainer: configured as for the run.
        configs: files of the configuration.
    """
    callbacks = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
    configured = [Path(c.dirpath) for c in callbacks if c.dirpath is not None]
    beside = [Path(config).parent / "checkpoints" for config in configs]
    folders = configured or [folder for folder in beside if folder.is_dir()]
    if folders:
        return folders
    root = Path(trainer.default_root_dir)
    if not trainer.loggers:
        return [root / "checkpoints"]
    logger = trainer.loggers[0]
    runs = Path(logger.save_dir or root) / str(logger.name)
    return sorted(runs.glob("*/checkpoints"))


def newest_checkpoint(
    folders: Sequence[Path], class_name: str, pattern: str = "*.ckpt"
) -> Path | None:
    """Find the latest checkpoint of a module of one class, if any.

    Args:
        folders: folders to search.
        class_name: of the module.
        pattern: of the file names.
    """
    every = [path for folder in folders for path in folder.glob(pattern)]
    newest = sorted(every, key=lambda path: (path.stat().st_mtime, path.name), reverse=True)
    return next((path for path in newest if _kind_in(path) in (class_name, None)), None)


def _kind_in(path: Path) -> str | None:
    """Read the class that a checkpoint names, or return None."""
    try:
        content = load(path, mmap=True)
    except ValueError:  # whoever loads it says what is wrong
        return None
    return kind_of(content)


# ------------------------------------------------------------ classes in the current folder
_CLASS = " (a class, or a group of `class_path` and `init_args`)"
_FULL_PATH = (
    ": give its full path (package.module.Class); modules, data sets and callbacks of this "
    "package are known by their bare names"
)


class ClassParser(StrictParser, LightningArgumentParser):
    """The parser of LightningCLI, without abbreviations, which explains refused classes."""

    option_for_word = "; a run is `-c FOLDER/config.yaml`, a checkpoint `--ckpt_path FILE`."

    def refusal_of(self, hint: Any, value: Any) -> Refusal:
        """Explain why a value was refused.

        Args:
            hint: requested type.
            value: as typed, or as read from a file.
        """
        classes = tuple(_classes(hint))
        others = [kind for kind in (bool, int, float, str) if kind in get_args(hint)]
        for path in _class_paths(value) if classes else ():
            looks_like_one = "." in path or path[:1].isupper()
            if (looks_like_one or not others) and (problem := _problem(path, classes)):
                return problem
        return refusal_of(hint, value, "" if others or not classes else _CLASS)


def _classes(hint: Any) -> Iterator[type]:
    """List the classes whose instances, or functions that make them, a type accepts."""
    for inner in get_args(hint):
        yield from _classes(inner)
    if inspect.isclass(hint) and hint.__module__.split(".")[0] not in sys.stdlib_module_names:
        yield hint


def _class_paths(value: Any) -> list[str]:
    """Find the words that may be class names."""
    if isinstance(value, list):
        return [path for item in value for path in _class_paths(item)]
    path = value.get("class_path") if isinstance(value, (dict, Namespace)) else value
    path = path.strip("[]") if isinstance(path, str) else ""
    return [path] if re.fullmatch(r"[A-Za-z_][\w.]*", path) else []


def _problem(path: str, wanted: tuple[type, ...]) -> Refusal | None:
    """Explain why there is no class of that name, or why it has the wrong type."""
    module, _, name = path.rpartition(".")
    if not module:
        import_exports()
        names = {subclass.__name__ for subclass in _subclasses(wanted)}
        meant = did_you_mean(path, names)
        missing = Refusal(f"there is no class {path!r}{'' if meant else _FULL_PATH}", path, meant)
        return None if path in names else missing
    try:
        subclass = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        return Refusal(f"there is no module {error.name!r}", str(error.name))
    except AttributeError as error:
        meant = did_you_mean(name, (n for n in dir(error.obj) if not n.startswith("_")))
        return Refusal(f"there is no {name!r} in {module}", name, meant)
    if inspect.isclass(subclass) and issubclass(subclass, wanted):
        return None
    if inspect.isfunction(subclass) and "return" not in subclass.__annotations__:
        base = wanted[0].__qualname__
        return Refusal(f"{path} does not say what it returns: write `-> {base}` at its head", name)
    return Refusal(f"{path} is not a {' or '.join(subclass.__name__ for subclass in wanted)}", name)


def _subclasses(classes: tuple[type, ...]) -> Iterator[type]:
    """List all imported subclasses, to which bare names may refer."""
    for base in classes:
        yield base
        yield from _subclasses(tuple(base.__subclasses__()))


def import_exports(names: Container[str] | None = None) -> None:
    """Import classes of this package, which makes their bare names known to configurations.

    Args:
        names: names of the classes; by default all.
    """
    for package in ("callbacks", "datamodules", "modules"):
        exports = importlib.import_module(f"lightning_bnn.{package}")
        for name in exports.__all__:
            if names is None or name in names:
                getattr(exports, name)


def whole_checkpoint(paths: Iterable[Path]) -> Path | None:
    """Find the newest readable checkpoint, and warn of others.

    Args:
        paths: of checkpoints.
    """
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            load(path, mmap=True)
        except ValueError:
            _log.warning(
                "%s is damaged, or contains more than tensors and plain data: skipped.", path
            )
        else:
            return path
    return None
