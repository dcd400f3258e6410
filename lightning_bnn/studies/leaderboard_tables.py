"""Tables and figures of the leaderboard: methods beside posteriors, over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lightning_bnn.evaluation.report import columns_of, percent, to_reference
from lightning_bnn.plots import Line, dots_figure, lines_figure, scatter_figure
from lightning_bnn.studies.fidelity_tables import LAWS
from lightning_bnn.tables import Cell, Measured, Table, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Board", "Outcome", "board_table", "budgets_figure", "correlations", "laws_figure",
    "quality_figure",
]  # fmt: skip

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
    """What became of a method.

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


def board_table(name: str, budget: int, board: Board, gold: bool) -> Table:
    """All methods beside one reference, the closest first if it is gold.

    Args:
        name: of the reference.
        budget: gradients of one network for all the data.
        board: what became of the methods.
        gold: whether the reference may rank them.
    """
    numbers = {title: _over_seeds(outcome.numbers) for title, outcome in board.items()}
    order = sorted(numbers, key=lambda title: _first(numbers[title], LAWS)) if gold else [*numbers]
    names = {key for of in numbers.values() for key in of}
    columns = {**to_reference(names)}
    columns |= {key: column for key, column in columns_of(names).items() if key in _SHOWN}
    unknown = Measured(math.nan)
    rows: list[list[Cell]] = [
        [
            title,
            _failed(board[title]),
            *(numbers[title].get(key, unknown).value for key in ("gradients", "seconds")),
            *(percent(numbers[title], law) for law in LAWS),
            *(column.shown(numbers[title].get(key, unknown)) for key, column in columns.items()),
        ]
        for title in order
    ]
    digits = {"gradients": 0, "seconds": 0, **dict.fromkeys(LAWS.values(), 2)}
    digits |= {column.title: column.digits for column in columns.values()}
    header = ["method", "failed", "gradients", "seconds", *LAWS.values()]
    header += [column.title for column in columns.values()]
    title = f"{name}, {budget} gradients" + ("" if gold else ": a long run, which ranks nothing")
    return Table(title, header, rows, digits, f"{_NOTE} {_SORTED}" if gold else _NOTE)


def _failed(outcome: Outcome) -> str:
    return f"{len(outcome.failures)} of {len(outcome.failures) + len(outcome.numbers)}"


def _over_seeds(of_seeds: Sequence[Mapping[str, float]]) -> dict[str, Measured]:
    """Every number that all seeds have; none without any seed."""
    names = set.intersection(*(set(numbers) for numbers in of_seeds)) if of_seeds else ()
    return {
        name: spread(torch.tensor([numbers[name] for numbers in of_seeds], dtype=torch.float64))
        for name in names
    }


def _first(numbers: Mapping[str, Measured], names: Mapping[str, str]) -> float:
    return next((numbers[name].value for name in names if name in numbers), math.inf)


def correlations(found: Boards) -> Table:
    """Whether what is closer to the posterior is better in use."""
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


def laws_figure(found: Boards) -> Figure:
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


def budgets_figure(found: Boards) -> Figure:
    """Distance of functions by gradients, one panel for each reference."""
    panels: dict[str, dict[str, Line]] = {}
    for name in dict.fromkeys(name for name, _ in found):
        budgets = [budget for other, budget in found if other == name]
        for title in found[name, budgets[0]]:
            of = [_over_seeds(found[name, budget][title].numbers) for budget in budgets]
            numbers = [numbers.get("f_law", Measured(math.nan)) for numbers in of]
            value, error = torch.tensor(numbers).unbind(1)
            x = torch.tensor([float(budget) for budget in budgets])
            band = (100 * (value - error), 100 * (value + error))
            panels.setdefault(name, {})[title] = Line(x, 100 * value, *band)
    return lines_figure(panels, ("gradients", "function law, MMD² x 100"), log="x")


def quality_figure(found: Boards) -> Figure:
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
