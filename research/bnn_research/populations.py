"""Populations of networks for studies, each read from disk or trained once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from bnn_research.presets import OWN
from bnn_research.scales import settings_of
from lightning_bnn.commands.presets import preset_names
from lightning_bnn.commands.runs import Job, reseeded, run_jobs
from lightning_bnn.evaluation.populations import Population
from lightning_bnn.evaluation.problem import read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, read_posterior
from lightning_bnn.findings import results_folder
from lightning_bnn.quiet_runs import one_thread, quiet


def study_job(
    name: str,
    preset: str,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[L.Callback] = (),
) -> Job:
    """Return the job of a preset, of the papers or of `lightning_bnn`.

    Args:
        name: of its folder.
        preset: its name.
        overrides: changes of the preset.
        callbacks: for the training.
    """
    package = OWN if preset in preset_names(OWN) else "lightning_bnn"
    return Job(name, preset, overrides or {}, callbacks, package=package)


@dataclass(frozen=True)
class Recipe:
    """The preset and the size of a trained population.

    Attributes:
        preset: name of a configuration with ``members``.
        data: description of the training data.
        members: number of networks.
        epochs: number of epochs, if not that of the preset.
    """

    preset: str
    data: str
    members: int
    epochs: int | None = None

    def overrides(self) -> dict[str, Any]:
        """Changes of the preset."""
        changes: dict[str, Any] = {"model.init_args.members": self.members}
        if self.epochs is not None:
            changes["trainer.max_epochs"] = self.epochs
        return changes


ENSEMBLES = {
    "small": Recipe("demo_reference", "digits", 200),
    "paper": Recipe("mnist_p1_ensemble", "MNIST", 1000),
}
"""Ensembles of many networks, by scale."""


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
        study: name of the study.
        out: folder for its results, and for the runs.
        recipes: recipes of the training, by scale.
        scale: name of the recipe.
        networks: a run, bank or folder of networks, instead of training.
        data: a configuration with network and data, if there is none beside the networks.
        seed: random seed of the training.
        **changes: fields of the recipe to replace.
    """
    folder, recipe = results_folder(out, study), settings_of(recipes, scale, **changes)
    if networks is None:
        overrides = recipe.overrides()
        if recipe.epochs is not None:
            overrides["trainer.check_val_every_n_epoch"] = recipe.epochs
        job = reseeded(study_job("population", recipe.preset, overrides), seed)
        location = run_jobs([job], folder / "runs")["population"].place
        settings = {"command": job.command}
        note = f"{recipe.members} networks on {recipe.data}: {job.command}"
    else:
        location = Location.of(networks)
        settings, note = {"networks": networks}, f"Networks: {networks}"
    problem = read_problem(location.config_or(data))
    stack = read_posterior("networks", location, problem).networks()
    return Population(stack, problem, {**settings, "sha256": location.digest()}, (note,), folder)


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
        run_jobs([study_job(name, f"mnist_p1_{name}", modes) for name in methods], Path(out))


def fit_quietly(
    module: L.LightningModule, data: Any, epochs: int, callbacks: Sequence[L.Callback] = ()
) -> None:
    """Train a module made in Python, for a study without stored runs."""
    with quiet():
        L.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, callbacks=list(callbacks),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, data)  # fmt: skip
