"""All methods compared with the sampled posteriors, with equal numbers of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bnn_research.entries import Entry, read_entries
from lightning_bnn.callbacks import TrainingCost
from lightning_bnn.commands.fidelity import (
    LAWS,
    cost_of,
    numbers_by_method,
    options_for,
    scored,
    scores_table,
)
from lightning_bnn.commands.runs import Job, reseeded, run_jobs
from lightning_bnn.evaluation.report import PREDICTIONS, percent
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots import dots_figure, scatter_figure
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import read_reference, reference_names
from lightning_bnn.references.shipped import is_gold, reference_folder
from lightning_bnn.tables import Cell, Measured, Table, spread
from weightsym import Outcome
from weightsym.files import read_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = ("acc", "rmse", "nll", "crps", "ece", "cover90")
_LEGEND = {
    "f_law": "by what networks predict", "ns_law": "by weights, without symmetries",
    "law": "by weights as they are",
}  # fmt: skip
"""Distances in the figure."""
_QUALITIES = ("acc", "rmse", "nll", "crps", "ece", "brier")
"""Numbers of the test."""
_HIGH_IS_GOOD = ("acc",)
_TUNING = 100
"""First of the seeds for the choice of settings."""
_NOTE = (
    "Mean and standard deviation over the seeds that did not fail. Laws: MMD² x 100 between the "
    "networks of a method and draws of the posterior, by what they predict, without symmetries "
    "(NS), and as they are. The other distances compare predictions of all modes with those of "
    "the reference. Gradients: of one network for all the data, of all networks together, as "
    "measured; seconds of one processor."
)
_CORRELATIONS_NOTE = (
    "Spearman's rho over methods and seeds, signs turned: positive where closer is better in use."
)


@dataclass(frozen=True)
class MethodScores:
    """Results and failures of a method.

    Attributes:
        numbers: by seed, for seeds without a failure.
        failures: reason by seed, for the others.
        choice: index of its settings among the candidates of its row.
    """

    numbers: list[Mapping[str, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    choice: int = 0

    def add(self, seed: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a seed, or a failure if no distance is finite.

        Args:
            seed: of the run.
            numbers: by name.
        """
        if any(math.isfinite(numbers.get(law, math.nan)) for law in LAWS):
            self.numbers.append(numbers)
        else:
            self.failures.append(f"seed {seed}: the outputs of its networks are too large.")

    def over_seeds(self) -> dict[str, Measured]:
        """Collect every number that all seeds have, or none without any seed."""
        names = set.intersection(*map(set, self.numbers)) if self.numbers else set()
        return {
            name: spread(torch.tensor([row[name] for row in self.numbers], dtype=torch.float64))
            for name in names
        }


Board = Mapping[str, MethodScores]
"""Outcomes by title of the method, for one reference and budget."""
Boards = Mapping[tuple[str, int], Board]
"""By reference and budget."""


@dataclass(frozen=True)
class _Plan:
    """The settings of the leaderboard, except for the reference and the budget."""

    entries: Mapping[str, Entry]
    seeds: int
    samples: int
    folder: Path
    tuning: int = 0


def leaderboard(
    references: list[str] | None = None,
    budgets: list[int] = [1000, 10_000],  # noqa: B006
    methods: list[str] | None = None,
    rows: str | None = None,
    seeds: int = 3,
    tuning: int = 2,
    samples: int = 50,
    out: str = "studies/leaderboard",
) -> Outcome:
    """Train every method with equal numbers of gradients, and score it against the references.

    A row is a YAML file with a method, its settings, and candidates for other settings. The rows of
    the package are in research/bnn_research/rows; a new file adds a row. For every reference and
    budget, a method uses the settings whose networks are closest to the reference as functions, in
    the mean over seeds that are not scored; settings that fail for one of these seeds are excluded.
    If the command is interrupted, the next call continues where it stopped.

    Args:
        references: names of references; by default all that are gold.
        budgets: numbers of gradients: those of one network for all the data, summed over members.
        methods: names of rows; by default all.
        rows: folder with your own rows; by default those of the package.
        seeds: number of scored runs of every method.
        tuning: number of other runs of every candidate, for the choice of settings; with 0 each
            method uses the settings of its row.
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
        available = ", ".join(reference_names()) or "none"
        raise ValueError(f"No reference is gold: name some as `--references`, of {available}.")
    chosen = {name: entries[name] for name in methods or entries}
    if alone := [n for n, entry in chosen.items() if entry.settings.get("members", 1) < 2]:
        raise ValueError(
            f"The row {alone[0]!r} has one member, and a law needs two: set its `members`."
        )
    folder = results_folder(out, "leaderboard")
    if tuning < 0:
        raise ValueError(f"`tuning` must not be negative, got {tuning}.")
    plan = _Plan(chosen, seeds, samples, folder, tuning)
    with one_thread():
        boards = {(name, b): _board(name, b, plan) for name in names for b in budgets}
    return publish(_findings(boards, plan), folder)


def _board(name: str, budget: int, plan: _Plan) -> Board:
    """Choose the settings of all methods beside one reference, train and score them."""
    rows = {key: entry.alternatives() for key, entry in plan.entries.items()}
    choices = dict.fromkeys(rows, 0)
    if plan.tuning:
        tried = {
            f"{key}-{k}": replace(entry, title=f"{key}-{k}")
            for key, entries in rows.items()
            for k, entry in enumerate(entries)
            if len(entries) > 1
        }
        seeds = range(_TUNING, _TUNING + plan.tuning)
        outcomes = _outcomes(name, budget, plan, tried, seeds) if tried else {}
        for key, entries in rows.items():
            of_row = [outcomes.get(f"{key}-{k}", MethodScores()) for k in range(len(entries))]
            choices[key] = closest(of_row)
    chosen = {key: entries[choices[key]] for key, entries in rows.items()}
    board = _outcomes(name, budget, plan, chosen, range(plan.seeds))
    return {
        chosen[key].title: replace(outcome, choice=choices[key]) for key, outcome in board.items()
    }


def closest(outcomes: Sequence[MethodScores]) -> int:
    """Return the index of the outcome with the least mean distance, among those without failures.

    Args:
        outcomes: of the candidates of one row; the first one counts if all have failed.

    >>> near, far = (MethodScores([{"f_law": distance}]) for distance in (0.1, 0.2))
    >>> closest([far, near, MethodScores([], ["diverged"])])
    1
    """
    distances = [
        math.inf if outcome.failures else _distance(outcome.over_seeds()) for outcome in outcomes
    ]
    return distances.index(min(distances))


def _outcomes(
    name: str, budget: int, plan: _Plan, entries: Mapping[str, Entry], seeds: Sequence[int]
) -> dict[str, MethodScores]:
    """Train and score rows with several seeds, one after the other."""
    settings = read_settings(reference_folder(name) / "config.yaml")
    data: Any = read_reference(name)[1].source
    outcomes = {key: MethodScores() for key in entries}
    keys = {entry.title: key for key, entry in entries.items()}
    for seed in seeds:
        jobs = []
        for key, entry in entries.items():
            text = entry.configuration(settings, budget, data.num_data)
            jobs.append(reseeded(Job(key, key, {}, [TrainingCost()], text), seed))
        folder = f"{name}-{budget}-{seed}"
        runs = run_jobs(jobs, plan.folder / "runs" / folder)
        places = {title: str(runs[key].folder) for title, key in keys.items()}
        scores, options = plan.folder / "scores" / folder, options_for(plan.samples, seed)
        comparison = scored(name, places, scores, options)
        for title, numbers in numbers_by_method(comparison).items():
            values = {name: number.value for name, number in numbers.items()}
            cost = cost_of(runs[keys[title]].place)
            outcomes[keys[title]].add(seed, {**values, **cost})
        for title, reason in comparison.failures().items():
            outcomes[keys[title]].failures.append(f"seed {seed}: {reason}")
    return outcomes


def _findings(boards: Boards, plan: _Plan) -> Findings:
    """Tables of all references, and comparisons of methods beside gold ones."""
    gold = {(name, budget): board for (name, budget), board in boards.items() if is_gold(name)}
    tables = {
        f"{name}-{budget}": board_table(name, budget, board, (name, budget) in gold)
        for (name, budget), board in boards.items()
    }
    figures = {}
    if plan.tuning:
        tables["settings"] = _settings_table(boards, plan)
    if gold:
        tables["correlations"] = _correlations(gold)
        figures = {"laws": _laws_figure(gold), "quality": _quality_figure(gold)}
    notes = [
        f"{name}, {budget} gradients: {title} failed, {reason}"
        for (name, budget), board in boards.items()
        for title, outcome in board.items()
        for reason in outcome.failures
    ]
    title = "Which method is closest to the posterior, for the same number of gradients?"
    settings = {"seeds": plan.seeds, "tuning": plan.tuning, "samples": plan.samples}
    return Findings("leaderboard", title, tables, figures, notes, settings)


# ------------------------------------------------------------ tables and figures
def board_table(name: str, budget: int, board: Board, gold: bool) -> Table:
    """Return all methods compared with one reference, the closest first if it is gold.

    Args:
        name: of the reference.
        budget: gradients of one network for all the data.
        board: outcomes by method.
        gold: whether the reference may rank them.
    """
    numbers = {title: outcome.over_seeds() for title, outcome in board.items()}

    order = list(numbers)
    if gold:
        order.sort(key=lambda title: _distance(numbers[title]))
    failed: dict[str, Cell] = {
        title: f"{len(scores.failures)} of {len(scores.failures) + len(scores.numbers)}"
        for title, scores in board.items()
    }
    title = f"{name}, {budget} gradients" + ("" if gold else ": a long run, which ranks nothing")
    note = f"{_NOTE} Sorted by function law." if gold else _NOTE
    rows = {title: numbers[title] for title in order}
    return scores_table(title, rows, _SHOWN, note, {"failed": failed})


def _distance(numbers: Mapping[str, Measured]) -> float:
    """Return the distance to the reference by functions, or by weights if there is no other."""
    laws = [numbers[law].value for law in LAWS if law in numbers]
    return laws[0] if laws and not math.isnan(laws[0]) else math.inf


def _settings_table(boards: Boards, plan: _Plan) -> Table:
    """Return the chosen settings of methods, as changes of their rows."""
    rows: list[list[Cell]] = []
    for (name, budget), board in boards.items():
        for entry in plan.entries.values():
            choice = board[entry.title].choice
            changes = entry.candidates[choice - 1] if choice else "as in its row"
            text = changes if isinstance(changes, str) else _in_one_line(changes)
            rows.append([f"{name}, {budget}", entry.title, len(entry.candidates) + 1, text])
    title = f"Settings chosen by {plan.tuning} other seeds"
    return Table(title, ["posterior, gradients", "method", "candidates", "chosen"], rows)


def _in_one_line(changes: Mapping[str, Any], prefix: str = "") -> str:
    """Write settings with their dotted names in one line."""
    return ", ".join(
        _in_one_line(value, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else f"{prefix}{name} {value}"
        for name, value in changes.items()
    )


def _correlations(boards: Boards) -> Table:
    """Return rank correlations between closeness to the posterior and quality of predictions."""
    rows: list[list[Cell]] = []
    for (name, budget), board in boards.items():
        every = [numbers for outcome in board.values() for numbers in outcome.numbers]
        for law, title in LAWS.items():
            cells = [rank_correlation(every, law, quality) for quality in _QUALITIES]
            rows.append([f"{name}, {budget}", title, *cells])
    header = ["posterior, gradients", "closeness", *(PREDICTIONS[q].title for q in _QUALITIES)]
    return Table("Does a closer posterior predict better?", header, rows, 2, _CORRELATIONS_NOTE)


def rank_correlation(rows: Sequence[Mapping[str, float]], distance: str, quality: str) -> float:
    """Return Spearman's rho, positive if closer is better, or NaN for fewer than three distances.

    Args:
        rows: numbers of every method.
        distance: name of the distance.
        quality: name of the quality.
    """
    from scipy.stats import spearmanr

    sign = -1.0 if quality in _HIGH_IS_GOOD else 1.0
    pairs = [
        (row[distance], sign * row[quality]) for row in rows if {distance, quality} <= set(row)
    ]
    varied = len({x for x, _ in pairs}) > 2 and len({y for _, y in pairs}) > 1
    return float(spearmanr(*zip(*pairs, strict=True)).statistic) if varied else math.nan


def _laws_figure(boards: Boards) -> Figure:
    """Plot all laws for the largest budget, one panel for each reference."""
    titles = list(dict.fromkeys(title for board in boards.values() for title in board))
    panels: dict[str, dict[str, list[Measured]]] = {}
    ascending = sorted(boards.items(), key=lambda item: item[0][1])
    for name, board in {name: board for (name, _), board in ascending}.items():
        numbers = {title: outcome.over_seeds() for title, outcome in board.items()}
        closest = min(numbers, key=lambda title: _distance(numbers[title]))
        panels[f"{name}: {closest} closest"] = {
            legend: [percent(numbers.get(title, {}), law) for title in titles]
            for law, legend in _LEGEND.items()
        }
    return dots_figure(panels, titles, label="MMD² x 100")


def _quality_figure(boards: Boards) -> Figure:
    """Plot test NLL against the distance of functions, one panel per reference and budget."""
    panels: dict[str, dict[str, tuple[torch.Tensor, ...]]] = {}
    for (name, budget), board in boards.items():
        every = [numbers for outcome in board.values() for numbers in outcome.numbers]
        rho = rank_correlation(every, "f_law", "nll")
        panel = panels.setdefault(f"{name}, {budget}: ρ = {rho:.2f}", {})
        for title, outcome in board.items():
            numbers = outcome.over_seeds()
            if "f_law" in numbers and "nll" in numbers:
                x, y = percent(numbers, "f_law"), numbers["nll"]
                panel[title] = tuple(
                    torch.tensor([v]) for v in (x.value, y.value, x.error, y.error)
                )
    return scatter_figure(panels, ("function law, MMD² x 100", "test NLL"))
