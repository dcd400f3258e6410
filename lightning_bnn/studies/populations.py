"""Many networks of one kind: given, or trained by a preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_bnn.evaluation.problem import Problem, read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, read_posterior
from lightning_bnn.studies.findings import results_folder, settings_of
from lightning_bnn.studies.runs import Job, reseeded, run_jobs
from weightsym.params import Params

__all__ = ["ENSEMBLES", "Population", "Recipe", "population"]


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
    like: str | None,
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
        like: its configuration, if it has none with it.
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
    config = location.config() if like is None else Path(like)
    if config is None:
        raise ValueError(f"{location.path} has no `config.yaml` with it: pass one as `--like`.")
    problem = read_problem(config)
    stack = read_posterior("networks", location, problem).networks()
    return Population(stack, problem, {**settings, "sha256": location.digest()}, (note,), folder)
