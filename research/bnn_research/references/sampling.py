"""Sampling of a reference: long chains, repetitions from other seeds, and the card."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml

import lightning_bnn
from bnn_research.populations import study_job
from bnn_research.presets import OWN
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.shipped import digest_of_networks
from lightning_bnn.callbacks.training_cost import COST_FILE, TrainingCost
from lightning_bnn.commands.presets import preset_names, preset_text
from lightning_bnn.commands.references import agreement_table, distances_table
from lightning_bnn.commands.runs import Job, reseeded, run_jobs
from lightning_bnn.evaluation.problem import Problem, read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, StoredPosterior, read_posterior
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.metrics.convergence import LEAST
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import Card, diagnose
from lightning_bnn.references.diagnosis import between
from weightsym import Outcome, did_you_mean

_PREFIX = "reference_"
_LARGE = 3 * 2**20
"""Size in bytes above which draws are stored in half precision."""


def reference(
    name: str,
    out: str | None = None,
    repeats: int = 3,
    transitions: int | None = None,
    restart: bool = False,
) -> Outcome:
    """Sample a reference again, as those of lightning-bnn-data were sampled.

    Runs long chains, then others from other seeds, and writes a folder with the configuration, the
    draws and a card with diagnostics. If it is interrupted, the same command continues. On the same
    machine the draws are equal to the last bit.

    Args:
        name: name of the reference, which is that of the preset without its prefix, such as digits.
        out: folder for the results, by default references/NAME.
        repeats: number of repetitions from other seeds; gold needs three.
        transitions: number of transitions of every chain, by default that of the preset.
        restart: remove earlier runs in this folder first.
    """
    names = [n.removeprefix(_PREFIX) for n in preset_names(OWN) if n.startswith(_PREFIX)]
    if name not in names:
        meant = did_you_mean(name, names) or f"; choose from: {', '.join(names)}."
        raise ValueError(f"there is no reference {name!r}{meant}")
    if repeats < 0:
        raise ValueError(f"`repeats` must not be negative, got {repeats}.")
    if transitions is not None:
        _check_transitions(name, transitions)
    folder = results_folder(out or f"references/{name}", "reference")
    if restart:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    with one_thread():
        findings = _findings(name, folder, repeats, transitions)
    return publish(findings, folder)


def _check_transitions(name: str, transitions: int) -> None:
    """Refuse chains that would be too short for diagnostics, before they are sampled."""
    model = yaml.safe_load(preset_text(f"{_PREFIX}{name}", OWN))["model"]["init_args"]
    burn_in, every = model["burn_in"], model.get("every_n_steps", 1)
    least = every * (burn_in // every + LEAST)
    if transitions < least:
        raise ValueError(
            f"`transitions` of {name} must be at least {least}, got {transitions}: the first "
            f"{burn_in} are left out, and {LEAST} networks of each chain are needed, one in "
            f"{every}."
        )


def _findings(name: str, folder: Path, repeats: int, transitions: int | None) -> Findings:
    """Run everything, write the reference, and return its findings."""
    jobs = [_job(name, folder, seed, transitions) for seed in range(repeats + 1)]
    run_jobs(jobs, folder / "runs")
    problem = read_problem(folder / "runs" / jobs[0].name / f"{_PREFIX}{name}.yaml")
    sampled = [_stored(folder, job, problem) for job in jobs]
    others = {seed: diagnose(each, problem) for seed, each in enumerate(sampled[1:], 1)}
    again = [
        {"seed": seed, "failures": each.failures(), "spaces": each.spaces, "halves": each.halves,
         "distances": between(sampled[0], sampled[seed], problem)}
        for seed, each in others.items()
    ]  # fmt: skip
    card = _write(name, folder, jobs[0], problem, again)
    rows = {"shipped": card.diagnosis} | {
        f"seed {seed}": diagnosis for seed, diagnosis in others.items()
    }
    tables = {
        "agreement": agreement_table(rows),
        "distances": distances_table(card.diagnosis, again),
    }
    verdict = f"{name}: {card.verdict}. " + "; ".join(card.failures)
    return Findings("reference", card.about, tables, {}, [verdict], card.made)


def _job(name: str, folder: Path, seed: int, transitions: int | None) -> Job:
    bank = folder / "runs" / f"seed_{seed}" / "bank"
    overrides: dict[str, Any] = {"model.init_args.bank": str(bank)}
    if transitions is not None:
        overrides["trainer.max_epochs"] = transitions
    return reseeded(
        study_job(f"seed_{seed}", f"{_PREFIX}{name}", overrides, [TrainingCost(), _Acceptance()]),
        seed,
    )


def _stored(folder: Path, job: Job, problem: Problem) -> StoredPosterior:
    return read_posterior(job.name, Location(folder / "runs" / job.name / "bank"), problem)


# ------------------------------------------------------------ licences
_DRAWS = "draws: Apache 2.0"
_OF_UCI = {
    "Airfoil": "C5VW2C", "Concrete": "C5PK67", "Energy": "C51307", "Yacht": "C5XG7R",
}  # fmt: skip
"""Tables under CC BY 4.0, and their sources."""
_OTHERS = {
    "Digits": f"data: those of scikit-learn, https://doi.org/10.24432/C50P49; {_DRAWS}",
    "NoisySine": "Apache 2.0, data and draws",
    "TwoGaussians": "Apache 2.0, data and draws",
}


def licence_of(data: str, table: str = "") -> str:
    """State the licences of the data and of the draws in one line, if they are known.

    >>> licence_of("UCI", "yacht")
    'data: CC BY 4.0, https://doi.org/10.24432/C5XG7R; draws: Apache 2.0'
    >>> licence_of("my.own.Data")
    'data: not known; draws: Apache 2.0'

    Args:
        data: class of the datamodule, as in configurations.
        table: name of its table, if it has several.
    """
    name = data.rpartition(".")[2]
    source = _OF_UCI.get(table.capitalize() if name == "UCI" else name)
    if source is not None:
        return f"data: CC BY 4.0, https://doi.org/10.24432/{source}; {_DRAWS}"
    return _OTHERS.get(name, f"data: not known; {_DRAWS}")


# ------------------------------------------------------------ what is written
def _write(
    name: str, folder: Path, job: Job, problem: Problem, again: Sequence[Mapping[str, Any]]
) -> Card:
    """Write configuration, draws and card to a folder."""
    target, run = folder / name, folder / "runs" / job.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / "config.yaml").write_text(job.configuration, encoding="utf-8")
    _store(run / "bank", target / "bank")
    settings = yaml.safe_load(job.configuration)
    data = settings["data"]
    card = Card(
        name=name,
        about=job.configuration.splitlines()[0].removeprefix("# Reference: "),
        made={**_settings_of(settings, job), **_cost(run)},
        sha256=digest_of_networks(target / "bank"),
        diagnosis=diagnose(read_posterior(name, Location(target / "bank"), problem), problem),
        again=again,
        licence=licence_of(data["class_path"], data.get("init_args", {}).get("table", "")),
    )
    card.write(target / "card.json")
    return card


def _store(source: Path, target: Path) -> None:
    """Store the networks of a bank in one file, in sixteen bits if it is large."""
    with CheckpointBank(source, "r") as bank:
        networks, records = bank[:], bank.records
    large = sum(t.nbytes for t in networks.values()) > _LARGE
    positions = [{k: record[k] for k in ("member", "step")} for record in records]
    with CheckpointBank(target, dtype=torch.float16 if large else None) as bank:
        bank.extend(networks, positions)
    (target / ".lock").unlink()
    for path in target.iterdir():
        path.chmod(0o644)


def _settings_of(settings: Mapping[str, Any], job: Job) -> dict[str, Any]:
    model = settings["model"]["init_args"]
    return {
        "sampler": settings["model"]["class_path"],
        "settings": model["optimizer"]["init_args"],
        "transitions": job.epochs,
        "burn_in": model["burn_in"],
        "every": model.get("every_n_steps", 1),
    }


def _cost(run: Path) -> dict[str, Any]:
    spent = json.loads(next(run.rglob(COST_FILE)).read_text())
    measured = {name: round(value) for name, value in spent.items()}
    measured["acceptance"] = json.loads((run / _Acceptance.file).read_text())
    versions = f"lightning_bnn {lightning_bnn.__version__}, torch {torch.__version__}"
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"
    return {**measured, "versions": versions, "machine": f"one thread of {machine}"}


class _Acceptance(L.Callback):
    """Writes the acceptance rate of chains to a file."""

    file = "acceptance.json"

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the mean over chains."""
        notes = pl_module.state.notes
        rate = float(notes["acceptance"].mean()) / max(1, notes["transitions"])
        (Path(trainer.default_root_dir) / self.file).write_text(json.dumps(round(rate, 3)))
