"""All methods beside the sampled posteriors, each with the same number of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_bnn.callbacks import TrainingCost
from lightning_bnn.evaluation.comparison import Comparison
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import is_gold, read_reference, reference_folder, reference_names
from lightning_bnn.references.entries import Entry, read_entries
from lightning_bnn.settings_files import read_settings
from lightning_bnn.studies.fidelity import cost_of, numbers_by_method, options_for, scored
from lightning_bnn.studies.findings import Findings, publish, results_folder
from lightning_bnn.studies.leaderboard_tables import (
    Board,
    Outcome,
    board_table,
    budgets_figure,
    correlations,
    laws_figure,
    quality_figure,
)
from lightning_bnn.studies.runs import Job, Run, reseeded, run_jobs

__all__ = ["leaderboard"]


@dataclass(frozen=True)
class _Plan:
    """What is run: everything but the reference and the budget."""

    entries: Mapping[str, Entry]
    seeds: int
    samples: int
    folder: Path


def leaderboard(
    references: list[str] | None = None,
    budgets: list[int] = [1000, 10_000],  # noqa: B006
    methods: list[str] | None = None,
    rows: str | None = None,
    seeds: int = 3,
    samples: int = 50,
    out: str = "studies/leaderboard",
) -> None:
    """Train every method with equal numbers of gradients, and score it against the references.

    A row is a YAML file with a method and its settings. The rows of the package lie in
    lightning_bnn/references/rows; to add one, nothing else is needed. If the command is
    interrupted, the next call continues where it stopped.

    Args:
        references: names of references; by default all that are gold.
        budgets: numbers of gradients: those of one network for all the data, summed over members.
        methods: names of rows; by default all.
        rows: folder with your own rows; by default those of the package.
        seeds: number of runs of every method.
        samples: number of networks drawn from every mode.
        out: folder for the results.
    """
    for name, values in (("budgets", budgets), ("seeds", [seeds]), ("samples", [samples - 1])):
        if not values or min(values) < 1:
            raise ValueError(f"`{name}` must be positive, got {values}.")
    entries = read_entries(None if rows is None else Path(rows))
    unknown = set(methods or ()) - set(entries)
    if unknown:
        raise ValueError(f"`methods` must be among {', '.join(entries)}, got {min(unknown)}.")
    names = references or [name for name in reference_names() if is_gold(name)]
    if not names:
        known = ", ".join(reference_names()) or "none"
        raise ValueError(f"No reference is gold: name some as `--references`, of {known}.")
    chosen = {name: entries[name] for name in methods or entries}
    folder = results_folder(out, "leaderboard")
    plan = _Plan(chosen, seeds, samples, folder)
    with one_thread():
        found = {(name, budget): _board(name, budget, plan) for name in names for budget in budgets}
    publish(_findings(found, plan), folder)


def _board(name: str, budget: int, plan: _Plan) -> Board:
    """What becomes of all methods beside one reference, for one budget."""
    settings = read_settings(reference_folder(name) / "config.yaml")
    data: Any = read_reference(name)[1].source
    texts = {
        key: entry.configuration(name, settings, budget, data.num_data)
        for key, entry in plan.entries.items()
    }
    board = {entry.title: Outcome() for entry in plan.entries.values()}
    for seed in range(plan.seeds):
        part = f"{name}-{budget}-{seed}"
        jobs = [reseeded(_job(key, text), seed) for key, text in texts.items()]
        runs = {
            plan.entries[key].title: run
            for key, run in run_jobs(jobs, plan.folder / "runs" / part).items()
        }
        places = {title: str(run.folder) for title, run in runs.items()}
        scores = plan.folder / "scores" / part
        _add(board, seed, scored(name, places, scores, options_for(plan.samples, seed)), runs)
    return board


def _job(key: str, text: str) -> Job:
    return Job(key, key, {}, [TrainingCost()], text)


def _add(board: Board, seed: int, comparison: Comparison, runs: Mapping[str, Run]) -> None:
    """Numbers and costs of the runs from one seed, or why there are none."""
    for title, numbers in numbers_by_method(comparison).items():
        values = {name: number.value for name, number in numbers.items()}
        board[title].numbers.append({**values, **cost_of(runs[title].place)})
    for title, reason in comparison.failures().items():
        board[title].failures.append(f"seed {seed}: {reason}")


def _findings(found: Mapping[tuple[str, int], Board], plan: _Plan) -> Findings:
    """Tables of all; what compares methods is beside gold only."""
    gold = {(name, budget): board for (name, budget), board in found.items() if is_gold(name)}
    tables = {
        f"{name}-{budget}": board_table(name, budget, board, (name, budget) in gold)
        for (name, budget), board in found.items()
    }
    figures = {}
    if gold:
        tables["correlations"] = correlations(gold)
        figures = {"laws": laws_figure(gold), "quality": quality_figure(gold)}
    if len({budget for _, budget in gold}) > 1:
        figures["budgets"] = budgets_figure(gold)
    notes = [
        f"{name}, {budget} gradients: {title} failed, {reason}"
        for (name, budget), board in found.items()
        for title, outcome in board.items()
        for reason in outcome.failures
    ]
    title = "Which method is closest to the posterior, for the same number of gradients?"
    settings = {"seeds": plan.seeds, "samples": plan.samples}
    return Findings("leaderboard", title, tables, figures, notes, settings)
