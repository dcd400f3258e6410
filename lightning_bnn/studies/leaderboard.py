"""All methods beside the sampled posteriors, each with the same number of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_bnn.callbacks import TrainingCost
from lightning_bnn.comparison.collect import Options
from lightning_bnn.comparison.columns import columns_of, to_reference
from lightning_bnn.comparison.distance_tables import percent
from lightning_bnn.comparison.tables import Cell, Measured, Table, spread
from lightning_bnn.plots import Line, dots_figure, lines_figure, scatter_figure
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import is_gold, read_reference, reference_folder, reference_names
from lightning_bnn.references.entries import Entry, read_entries
from lightning_bnn.settings_files import read_settings
from lightning_bnn.studies.fidelity import LAWS, cost_of, numbers_by_method, scored
from lightning_bnn.studies.findings import Findings, publish, results_folder
from lightning_bnn.studies.runs import Job, reseeded, run_jobs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["leaderboard"]

_SHOWN = ("acc", "rmse", "nll", "crps", "ece", "cover90")
_QUALITIES = {"acc": -1, "rmse": 1, "nll": 1, "crps": 1, "ece": 1, "brier": 1}
"""Numbers of the test, and whether low is good."""
_NOTE = (
    "Mean and standard deviation over seeds. Laws: MMD² x 100 between the networks of a method and "
    "draws of the posterior, by what they predict, without symmetries (NS), and as they are. The "
    "other distances compare mean predictions of all modes with those of the reference. Sorted by "
    "function law. Gradients: of one network for all the data, of all networks together, as "
    "measured; seconds of one processor."
)
_CORRELATIONS_NOTE = (
    "Spearman's rho over methods and seeds, signs turned: positive where closer is better in use."
)

Seeds = Mapping[str, Sequence[Mapping[str, float]]]
"""Numbers of every seed, by method."""


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
    chosen = {name: entries[name] for name in methods or entries}
    folder = results_folder(out, "leaderboard")
    plan = _Plan(chosen, seeds, samples, folder)
    names = references or [name for name in reference_names() if is_gold(name)]
    with one_thread():
        found = {
            (name, budget): _numbers(name, budget, plan) for name in names for budget in budgets
        }
    publish(_findings(found, plan), folder)


def _numbers(name: str, budget: int, plan: _Plan) -> Seeds:
    """Numbers of all methods beside one reference, for one budget."""
    settings = read_settings(reference_folder(name) / "config.yaml")
    data: Any = read_reference(name)[1].source
    examples = data.num_data
    found: dict[str, list[Mapping[str, float]]] = {}
    for seed in range(plan.seeds):
        jobs = [
            reseeded(_job(key, entry.configuration(name, settings, budget, examples)), seed)
            for key, entry in plan.entries.items()
        ]
        part = f"{name}-{budget}-{seed}"
        runs = run_jobs(jobs, plan.folder / "runs" / part)
        places = {plan.entries[key].title: str(run.folder) for key, run in runs.items()}
        options = Options("full", plan.samples, seed=seed)
        comparison = scored(name, places, plan.folder / "scores" / part, options)
        titles = {plan.entries[key].title: run for key, run in runs.items()}
        for title, numbers in numbers_by_method(comparison).items():
            values = {k: v.value for k, v in numbers.items()}
            found.setdefault(title, []).append({**values, **cost_of(titles[title].place)})
    return found


def _job(key: str, text: str) -> Job:
    return Job(key, key, {}, [TrainingCost()], text)


# ------------------------------------------------------------ tables and figures
def _findings(found: Mapping[tuple[str, int], Seeds], plan: _Plan) -> Findings:
    tables = {f"{name}-{budget}": _table(name, budget, of) for (name, budget), of in found.items()}
    tables["correlations"] = _correlations(found)
    figures = {"laws": _laws_figure(found), "quality": _quality_figure(found)}
    if len({budget for _, budget in found}) > 1:
        figures["budgets"] = _budgets_figure(found)
    title = "Which method is closest to the posterior, for the same number of gradients?"
    settings = {"seeds": plan.seeds, "samples": plan.samples}
    return Findings("leaderboard", title, tables, figures, (), settings)


def _table(name: str, budget: int, seeds: Seeds) -> Table:
    numbers = {title: _over_seeds(of) for title, of in seeds.items()}
    gold = is_gold(name)
    order = sorted(numbers, key=lambda title: _first(numbers[title], LAWS)) if gold else [*numbers]
    names = {key for of in numbers.values() for key in of}
    columns = {**to_reference(names)}
    columns |= {key: column for key, column in columns_of(names).items() if key in _SHOWN}
    rows: list[list[Cell]] = [
        [
            title,
            *(
                numbers[title].get(key, Measured(math.nan)).value
                for key in ("gradients", "seconds")
            ),
            *(percent(numbers[title], law) for law in LAWS),
            *(column.shown(numbers[title][key]) for key, column in columns.items()),
        ]
        for title in order
    ]
    digits = {"gradients": 0, "seconds": 0, **dict.fromkeys(LAWS.values(), 2)}
    digits |= {column.title: column.digits for column in columns.values()}
    header = ["method", "gradients", "seconds", *LAWS.values()]
    header += [column.title for column in columns.values()]
    title = f"{name}, {budget} gradients" + ("" if gold else ": a long run, which ranks nothing")
    return Table(title, header, rows, digits, _NOTE)


def _over_seeds(of_seeds: Sequence[Mapping[str, float]]) -> dict[str, Measured]:
    names = set.intersection(*(set(numbers) for numbers in of_seeds))
    return {
        name: spread(torch.tensor([numbers[name] for numbers in of_seeds], dtype=torch.float64))
        for name in names
    }


def _value(numbers: Mapping[str, Measured], name: str) -> float:
    return numbers[name].value if name in numbers else math.nan


def _first(numbers: Mapping[str, Measured], names: Mapping[str, str]) -> float:
    return next((numbers[name].value for name in names if name in numbers), math.inf)


def _correlations(found: Mapping[tuple[str, int], Seeds]) -> Table:
    """Whether what is closer to the posterior is better in use."""
    from scipy.stats import spearmanr

    rows: list[list[Cell]] = []
    for (name, budget), seeds in found.items():
        every = [numbers for of in seeds.values() for numbers in of]
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


def _laws_figure(found: Mapping[tuple[str, int], Seeds]) -> Figure:
    """All laws for the largest budget, one panel for each reference."""
    titles = list(dict.fromkeys(title for seeds in found.values() for title in seeds))
    largest = {name: max(b for other, b in found if other == name) for name, _ in found}
    panels: dict[str, dict[str, list[Measured]]] = {}
    for name, budget in largest.items():
        numbers = {title: _over_seeds(of) for title, of in found[name, budget].items()}
        panels[name] = {
            of_law: [percent(numbers.get(title, {}), law) for title in titles]
            for law, of_law in LAWS.items()
        }
    return dots_figure(panels, titles, label="MMD² x 100")


def _budgets_figure(found: Mapping[tuple[str, int], Seeds]) -> Figure:
    """Distance of functions by gradients, one panel for each reference."""
    panels: dict[str, dict[str, Line]] = {}
    for name in dict.fromkeys(name for name, _ in found):
        budgets = [budget for other, budget in found if other == name]
        for title in found[name, budgets[0]]:
            of = [_over_seeds(found[name, budget][title]) for budget in budgets]
            numbers = [numbers.get("f_law", Measured(math.nan)) for numbers in of]
            value, error = torch.tensor(numbers).unbind(1)
            x = torch.tensor([float(budget) for budget in budgets])
            band = (100 * (value - error), 100 * (value + error))
            panels.setdefault(name, {})[title] = Line(x, 100 * value, *band)
    return lines_figure(panels, ("gradients", "function law, MMD² x 100"), log="x")


def _quality_figure(found: Mapping[tuple[str, int], Seeds]) -> Figure:
    """Test NLL by distance of functions, one panel for each reference and budget."""
    several = len({budget for _, budget in found}) > 1
    panels: dict[str, dict[str, tuple[torch.Tensor, ...]]] = {}
    for (name, budget), seeds in found.items():
        panel = panels.setdefault(f"{name}, {budget} gradients" if several else name, {})
        for title, of in seeds.items():
            numbers = _over_seeds(of)
            if "f_law" in numbers and "nll" in numbers:
                panel[title] = _point(percent(numbers, "f_law"), numbers["nll"])
    return scatter_figure(panels, ("function law, MMD² x 100", "test NLL"))


def _point(x: Measured, y: Measured) -> tuple[torch.Tensor, ...]:
    """Both coordinates, and the errors of both."""
    return tuple(torch.tensor([v]) for v in (x.value, y.value, x.error, y.error))
