"""Many networks of one kind: given, or trained by a preset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_bnn.comparison.problem import Surroundings, read_surroundings
from lightning_bnn.comparison.stored_posteriors import (
    Place,
    find_config,
    fingerprint,
    read_contender,
    stack_of,
)
from lightning_bnn.params import Params
from lightning_bnn.studies.runs import Job, run_jobs
from lightning_bnn.symmetry import Symmetries, discover

__all__ = ["ENSEMBLES", "Population", "Recipe", "population"]


@dataclass(frozen=True)
class Recipe:
    """How a population is trained.

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


ENSEMBLES = {
    "small": Recipe("demo_reference", "digits", 200),
    "paper": Recipe("mnist_p1_ensemble", "MNIST", 1000),
}
"""Of many networks, by scale."""


@dataclass(frozen=True)
class Population:
    """Networks, and what belongs to them.

    Attributes:
        networks: a stack.
        around: network and data.
        settings: where it is from.
        note: what stands in for what, for people to read.
    """

    networks: Params
    around: Surroundings
    settings: Mapping[str, Any]
    note: str

    def symmetries(self) -> Symmetries:
        """Of the network."""
        return discover(self.around.template, self.around.example())


def population(
    folder: Path, recipe: Recipe, given: str | None = None, like: str | None = None
) -> Population:
    """Networks from disk, or trained now; those that were trained before are read.

    Args:
        folder: for runs.
        recipe: how they are trained.
        given: a run, bank or folder of networks, in place of training.
        like: its configuration, if it has none with it.
    """
    if given is None:
        overrides: dict[str, Any] = {"model.init_args.members": recipe.members}
        if recipe.epochs is not None:
            overrides["trainer.max_epochs"] = recipe.epochs
            overrides["trainer.check_val_every_n_epoch"] = recipe.epochs
        job = Job("population", recipe.preset, overrides)
        place = run_jobs([job], folder / "runs")["population"].place
        settings: dict[str, Any] = {"command": job.command}
        note = f"{recipe.members} networks on {recipe.data}: {job.command}"
    else:
        place = Place.of(given)
        settings, note = {"networks": given}, f"Networks: {given}"
    config = find_config(place) if like is None else Path(like)
    if config is None:
        raise ValueError(f"{place.path} has no `config.yaml` with it: pass one as `--like`.")
    around = read_surroundings(config)
    networks = stack_of(read_contender("networks", place, around))
    settings["sha256"] = fingerprint(place.file())
    return Population(networks, around, settings, note)
