"""All methods beside the sampled posteriors, each with the same number of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_bnn.callbacks import TrainingCost
from lightning_bnn.evaluation.comparison import Comparison
from lightning_bnn.evaluation.report import columns_of, percent
from lightning_bnn.plots import Line, dots_figure, lines_figure, scatter_figure
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import is_gold, read_reference, reference_folder, reference_names
from lightning_bnn.references.entries import Entry, read_entries
from lightning_bnn.settings_files import read_settings
from lightning_bnn.studies.fidelity import (
    LAWS,
    cost_of,
    numbers_by_method,
    options_for,
    scored,
    scores_table,
)
from lightning_bnn.studies.findings import Findings, measured_line, publish, results_folder
from lightning_bnn.studies.runs import Job, Run, reseeded, run_jobs
from lightning_bnn.tables import Cell, Measured, Table, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Outcome", "board_table", "leaderboard"]

_SHOWN = ("acc", "rmse", "nll", "crps", "ece", "cover90")
_QUALITIES = {"acc": -1, "rmse": 1, "nll": 1, "crps": 1, "ece": 1, "brier": 1}
"""Numbers of the test, and whether low is good."""
_NOTE = (
    "Mean and standard deviation over the seeds that did not fail. Laws: MMD² x 100 between the "
    "networks of a method and draws of the posterior, by what they predict, without symmetries "
    "(NS), and as they are. The other distances compare predictions of all modes with those of "
    "the reference. Gradients: of one network for all the data, of all networks together, as "
    "measured; seconds of one processor."
)
_SORTED = "Sorted by function law."
_CORRELATIONS_NOTE = (
    "Spearman's rho over methods and seeds, signs turned: positive where closer is better in use."
)


@dataclass(frozen=True)
class Outcome:
    """The results and failures of a method.

    Attributes:
        numbers: with every seed that did not fail.
        failures: the others, and why.
    """

    numbers: list[Mapping[str, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


Board = Mapping[str, Outcome]
"""Methods by their titles, beside one reference and for one budget."""
Boards = Mapping[tuple[str, int], Board]
"""By reference and budget."""


@dataclass(frozen=True)
class _Plan:
    """The settings of the leaderboard, but for the reference and the budget."""

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
    """Train and score all methods beside one reference, for one budget."""
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
    """Tables of all references, and comparisons of methods beside gold ones."""
    gold = {(name, budget): board for (name, budget), board in found.items() if is_gold(name)}
    tables = {
        f"{name}-{budget}": board_table(name, budget, board, (name, budget) in gold)
        for (name, budget), board in found.items()
    }
    figures = {}
    if gold:
        tables["correlations"] = _correlations(gold)
        figures = {"laws": _laws_figure(gold), "quality": _quality_figure(gold)}
    if len({budget for _, budget in gold}) > 1:
        figures["budgets"] = _budgets_figure(gold)
    notes = [
        f"{name}, {budget} gradients: {title} failed, {reason}"
        for (name, budget), board in found.items()
        for title, outcome in board.items()
        for reason in outcome.failures
    ]
    title = "Which method is closest to the posterior, for the same number of gradients?"
    settings = {"seeds": plan.seeds, "samples": plan.samples}
    return Findings("leaderboard", title, tables, figures, notes, settings)


# ------------------------------------------------------------ tables and figures
def board_table(name: str, budget: int, board: Board, gold: bool) -> Table:
    """All methods beside one reference, the closest first if it is gold.

    Args:
        name: of the reference.
        budget: gradients of one network for all the data.
        board: outcomes by method.
        gold: whether the reference may rank them.
    """
    numbers = {title: _over_seeds(outcome.numbers) for title, outcome in board.items()}
    order = sorted(numbers, key=lambda title: _first(numbers[title], LAWS)) if gold else [*numbers]
    failed: dict[str, Cell] = {
        title: f"{len(of.failures)} of {len(of.failures) + len(of.numbers)}"
        for title, of in board.items()
    }
    title = f"{name}, {budget} gradients" + ("" if gold else ": a long run, which ranks nothing")
    note = f"{_NOTE} {_SORTED}" if gold else _NOTE
    rows = {title: numbers[title] for title in order}
    return scores_table(title, rows, _SHOWN, note, {"failed": failed})


def _over_seeds(of_seeds: Sequence[Mapping[str, float]]) -> dict[str, Measured]:
    """Every number that all seeds have, or none without any seed."""
    names = set.intersection(*(set(numbers) for numbers in of_seeds)) if of_seeds else ()
    return {
        name: spread(torch.tensor([numbers[name] for numbers in of_seeds], dtype=torch.float64))
        for name in names
    }


def _first(numbers: Mapping[str, Measured], names: Mapping[str, str]) -> float:
    return next((numbers[name].value for name in names if name in numbers), math.inf)


def _correlations(found: Boards) -> Table:
    """Rank correlations of closeness to the posterior and quality of predictions."""
    from scipy.stats import spearmanr

    rows: list[list[Cell]] = []
    for (name, budget), board in found.items():
        every = [numbers for outcome in board.values() for numbers in outcome.numbers]
        for law, title in LAWS.items():
            cells: list[Cell] = []
            for quality, sign in _QUALITIES.items():
                pairs = [(n[law], sign * n[quality]) for n in every if law in n and quality in n]
                varied = len({x for x, _ in pairs}) > 2 and len({y for _, y in pairs}) > 1
                rho = float(spearmanr(*zip(*pairs, strict=True)).statistic) if varied else math.nan
                cells.append(rho)
            rows.append([f"{name}, {budget}", title, *cells])
    titles = [
        columns_of([q, "crps"] if q in ("rmse", "crps") else [q])[q].title for q in _QUALITIES
    ]
    title = "Does a closer posterior predict better?"
    return Table(title, ["posterior, gradients", "closeness", *titles], rows, 2, _CORRELATIONS_NOTE)


def _laws_figure(found: Boards) -> Figure:
    """All laws for the largest budget, one panel for each reference."""
    titles = list(dict.fromkeys(title for board in found.values() for title in board))
    largest = {name: max(b for other, b in found if other == name) for name, _ in found}
    panels: dict[str, dict[str, list[Measured]]] = {}
    for name, budget in largest.items():
        numbers = {title: _over_seeds(of.numbers) for title, of in found[name, budget].items()}
        panels[name] = {
            of_law: [percent(numbers.get(title, {}), law) for title in titles]
            for law, of_law in LAWS.items()
        }
    return dots_figure(panels, titles, label="MMD² x 100")


def _budgets_figure(found: Boards) -> Figure:
    """Distance of functions by gradients, one panel for each reference."""
    panels: dict[str, dict[str, Line]] = {}
    for name in dict.fromkeys(name for name, _ in found):
        budgets = [budget for other, budget in found if other == name]
        for title in found[name, budgets[0]]:
            numbers = [_over_seeds(found[name, budget][title].numbers) for budget in budgets]
            laws = [percent(of, "f_law") for of in numbers]
            panels.setdefault(name, {})[title] = measured_line(budgets, laws)
    return lines_figure(panels, ("gradients", "function law, MMD² x 100"), log="x")


def _quality_figure(found: Boards) -> Figure:
    """Test NLL by distance of functions, one panel for each reference and budget."""
    several = len({budget for _, budget in found}) > 1
    panels: dict[str, dict[str, tuple[torch.Tensor, ...]]] = {}
    for (name, budget), board in found.items():
        panel = panels.setdefault(f"{name}, {budget} gradients" if several else name, {})
        for title, outcome in board.items():
            numbers = _over_seeds(outcome.numbers)
            if "f_law" in numbers and "nll" in numbers:
                panel[title] = _point(percent(numbers, "f_law"), numbers["nll"])
    return scatter_figure(panels, ("function law, MMD² x 100", "test NLL"))


def _point(x: Measured, y: Measured) -> tuple[torch.Tensor, ...]:
    """Both coordinates, and the errors of both."""
    return tuple(torch.tensor([v]) for v in (x.value, y.value, x.error, y.error))
