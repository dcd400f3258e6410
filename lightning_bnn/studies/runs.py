"""Trained presets and populations of networks that studies need, each trained once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from tqdm.auto import tqdm

import lightning_bnn
from lightning_bnn.commands.presets import preset_text
from lightning_bnn.commands.training import training
from lightning_bnn.evaluation.problem import Problem, read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, read_module, read_posterior
from lightning_bnn.harvest import ends
from lightning_bnn.quiet_runs import one_thread, quiet
from lightning_bnn.studies.findings import results_folder, settings_of
from weightsym.params import Params

__all__ = [
    "ENSEMBLES", "Job", "Population", "Recipe", "Run", "fit_quietly", "optunets",
    "population", "reseeded", "run_jobs",
]  # fmt: skip

_APART = 1000
"""Between the seeds of two repetitions: presets that are compared differ by less."""
_BETWEEN_CHECKPOINTS = 5.0
"""Seconds of training that an interruption may cost."""


@dataclass(frozen=True)
class Job:
    """One preset to be trained.

    Attributes:
        name: of its folder.
        preset: name of a configuration of this package, or of the given one.
        overrides: what to change in it, by the names of the command line without dashes.
        callbacks: to watch the training by.
        text: a configuration of one's own, as YAML.
    """

    name: str
    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[L.Callback] = ()
    text: str = ""

    @property
    def configuration(self) -> str:
        """The YAML that it begins with."""
        return self.text or preset_text(self.preset)

    @property
    def command(self) -> str:
        """The commands by which a user trains the same."""
        changes = "".join(f" --{name} {value}" for name, value in self.overrides.items())
        preset = f"lightning-bnn presets {self.preset} > {self.preset}.yaml"
        return f"{preset}; lightning-bnn fit -c {self.preset}.yaml{changes}"

    @property
    def epochs(self) -> int:
        """For how many epochs it trains."""
        stated = yaml.safe_load(self.configuration)["trainer"]["max_epochs"]
        return int(self.overrides.get("trainer.max_epochs", stated))

    @property
    def key(self) -> str:
        """A digest of everything that decides the result."""
        changes = json.dumps(dict(self.overrides), default=str)
        text = self.configuration + changes + lightning_bnn.__version__
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def reseeded(job: Job, seed: int) -> Job:
    """The same job from other starts, on the same data. With seed 0 it is the job as it stands.

    Args:
        job: whose preset may have a seed of its own.
        seed: which repetition.
    """
    if seed == 0:
        return job
    stated = yaml.safe_load(job.configuration)["model"]["init_args"].get("seed") or 0
    overrides = {**job.overrides, "model.init_args.seed": stated + _APART * seed}
    return dataclasses.replace(job, overrides=overrides)


@dataclass(frozen=True)
class Run:
    """A finished job and its folder.

    Attributes:
        job: the job.
        folder: where it is.
    """

    job: Job
    folder: Path

    @property
    def place(self) -> Location:
        """The location of its posterior."""
        return Location(self.folder)

    @property
    def seconds(self) -> float:
        """CPU time of its training, without what was interrupted."""
        file = self.folder / "cpu_seconds"
        return float(file.read_text()) if file.is_file() else 0.0

    @property
    def is_finished(self) -> bool:
        """Check whether it has finished, with the settings of the job."""
        file = self.folder / "finished"
        return file.is_file() and file.read_text() == self.job.key

    def problem(self) -> Problem:
        """The network and the data of its configuration."""
        return read_problem(_newest(self.folder.rglob("config.yaml")))

    def module(self) -> Any:
        """The trained module, with its data at hand."""
        module = read_module(self.place.file(), self.problem())
        assert module is not None
        return module


@contextmanager
def beside(work: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Do some work in a process of its own, which is over at the end of the block.

    What it leaves undone, for whatever reason, the caller does afterwards, or says why it cannot.

    Args:
        work: a function of a module.
        *args: of the function.
    """
    target = multiprocessing.get_context("spawn").Process
    process = target(target=_work_beside, args=(work, *args), daemon=True)
    process.start()
    try:
        yield
        process.join()
    finally:
        process.terminate()


def _work_beside(work: Callable[..., Any], *args: Any) -> None:
    with suppress(KeyboardInterrupt), one_thread():
        work(*args)


def run_jobs(jobs: Sequence[Job], folder: Path, line: int = 0) -> dict[str, Run]:
    """Train all jobs, one after the other, with one progress bar.

    A job that is finished is not done again; one that was interrupted continues from its last
    checkpoint; one whose settings have changed begins anew.

    Args:
        jobs: what to train.
        folder: of all runs; each has a folder of its name in it.
        line: of the bar, below those of others.
    """
    runs = {job.name: Run(job, folder / job.name) for job in jobs}
    waiting = [run for run in runs.values() if not _prepared(run)]
    total = sum(run.job.epochs for run in waiting)
    with tqdm(
        total=total, desc="training", unit="epoch", disable=not waiting, position=line
    ) as bar:
        for run in waiting:
            bar.set_postfix_str(run.job.name)
            seconds, begun = run.seconds, time.process_time()
            _train(run, _Epochs(bar))
            seconds += time.process_time() - begun
            (run.folder / "cpu_seconds").write_text(f"{seconds:.1f}")
            (run.folder / "finished").write_text(run.job.key)
    return runs


def _prepared(run: Run) -> bool:
    """Tell whether a run has finished, and remove one that cannot be continued.

    That is what other settings have made, and what was killed before its first checkpoint: draws in
    a bank are of no use without.
    """
    begun = run.folder / "settings"
    if run.is_finished:
        return True
    if begun.is_file() and (begun.read_text() != run.job.key or not _checkpoints(run)):
        shutil.rmtree(run.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    begun.write_text(run.job.key)
    return False


def _checkpoints(run: Run) -> list[Path]:
    return list(run.folder.rglob("*.ckpt"))


def _train(run: Run, epochs: L.Callback) -> None:
    config = run.folder / f"{run.job.preset}.yaml"
    config.write_text(run.job.configuration, encoding="utf-8")
    options: dict[str, Any] = {
        **run.job.overrides,
        "trainer.default_root_dir": str(run.folder),
        "trainer.enable_progress_bar": False,
        "trainer.enable_model_summary": False,
    }
    checkpoints = _checkpoints(run)
    if checkpoints:
        options["ckpt_path"] = str(_newest(checkpoints))
    arguments = ["fit", "-c", str(config)]
    for name, value in options.items():
        arguments += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    callbacks = [epochs, *run.job.callbacks, _NowAndThen(save_on_train_epoch_end=True)]
    with quiet():
        training(arguments, callbacks)
    for superseded in checkpoints:
        superseded.unlink()


def optunets(out: str) -> None:
    """Train the posteriors of OptuNet by P1's recipes, in about an hour of one core.

    The reference and the ensemble are networks of the bank `mnist_optunets`.

    Args:
        out: folder of the runs.
    """
    methods, modes = (
        ("laplace", "swag", "sghmc", "dropout", "mfvi"),
        {"model.init_args.members": 10},
    )
    with one_thread():
        run_jobs([Job(name, f"mnist_p1_{name}", modes) for name in methods], Path(out))


# ------------------------------------------------------------ populations
@dataclass(frozen=True)
class Recipe:
    """The preset and the size of a population that is trained.

    Attributes:
        preset: name of a configuration with ``members``.
        data: what it is trained on, for people to read.
        members: how many networks.
        epochs: of training, if not those of the preset.
    """

    preset: str
    data: str
    members: int
    epochs: int | None = None

    def overrides(self) -> dict[str, Any]:
        """The settings of the preset that are changed."""
        changes: dict[str, Any] = {"model.init_args.members": self.members}
        if self.epochs is not None:
            changes["trainer.max_epochs"] = self.epochs
        return changes


ENSEMBLES = {
    "small": Recipe("demo_reference", "digits", 200),
    "paper": Recipe("mnist_p1_ensemble", "MNIST", 1000),
}
"""Ensembles of many networks, by scale."""


@dataclass(frozen=True)
class Population:
    """Networks, and what belongs to them.

    Attributes:
        networks: a stack.
        problem: network and data.
        settings: where it is from.
        notes: what stands in for what, for people to read.
        folder: where results about it go.
    """

    networks: Params
    problem: Problem
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    folder: Path = Path()


def population(
    study: str,
    out: str,
    recipes: Mapping[str, Recipe],
    scale: str,
    networks: str | None,
    data: str | None,
    seed: int = 0,
    **changes: int | None,
) -> Population:
    """Read networks from disk, or train them unless this was done before.

    Args:
        study: name of the study that asks for them.
        out: folder of its results, which holds the runs, too.
        recipes: how they are trained, by scale.
        scale: which of the recipes.
        networks: a run, bank or folder of networks, in place of training.
        data: a configuration with network and data, if none lies beside it.
        seed: of the training, if there is any.
        **changes: fields of the recipe to replace.
    """
    folder, recipe = results_folder(out, study), settings_of(recipes, scale, **changes)
    if networks is None:
        overrides = recipe.overrides()
        if recipe.epochs is not None:
            overrides["trainer.check_val_every_n_epoch"] = recipe.epochs
        job = reseeded(Job("population", recipe.preset, overrides), seed)
        location = run_jobs([job], folder / "runs")["population"].place
        settings = {"command": job.command}
        note = f"{recipe.members} networks on {recipe.data}: {job.command}"
    else:
        location = Location.of(networks)
        settings, note = {"networks": networks}, f"Networks: {networks}"
    problem = read_problem(location.config_or(data))
    stack = read_posterior("networks", location, problem).networks()
    return Population(stack, problem, {**settings, "sha256": location.digest()}, (note,), folder)


# ------------------------------------------------------------ runs without a preset
def fit_quietly(
    module: L.LightningModule, data: Any, epochs: int, callbacks: Sequence[L.Callback] = ()
) -> None:
    """Train a module that Python has made, for a study that keeps no run."""
    with quiet():
        L.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, callbacks=list(callbacks),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, data)  # fmt: skip


def _newest(paths: Iterable[Path]) -> Path:
    return max(paths, key=lambda path: path.stat().st_mtime)


class _NowAndThen(ModelCheckpoint):
    """A checkpoint every few seconds and at the end: an epoch may be shorter than writing one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.saved = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, unless this was done a moment ago and training goes on."""
        now = time.monotonic()
        if ends(trainer) or now - self.saved >= _BETWEEN_CHECKPOINTS:
            super().on_train_epoch_end(trainer, pl_module)
            self.saved = now


class _Epochs(L.Callback):
    """Moves the bar of all runs. Epochs from before an interruption count at once."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move to the epoch at which the run continues."""
        self.bar.update(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Move the bar by one epoch."""
        self.bar.update(1)
