"""UCI regression on the published splits, compared with published results."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from tqdm.auto import tqdm

import lightning_bnn
from bnn_research import uci_stacks as stacks
from bnn_research.scales import settings_of
from bnn_research.uci_methods import CONTESTANTS
from bnn_research.uci_stacks import Candidate, Contestant, Fitted, fitted, read_splits
from lightning_bnn.datamodules.base import data_root
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots import dots_figure
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.tables import Cell, Measured, Table, spread
from weightsym import Outcome
from weightsym.files import write_whole
from weightsym.params import Params, check_count

TABLES = (
    "yacht", "energy", "concrete", "wine-quality-red", "kin8nm", "power-plant",
    "naval-propulsion-plant", "protein-tertiary-structure")  # fmt: skip
_WIDER = {"protein-tertiary-structure": 100}
"""Number of hidden units by table, if not 50."""
_WIDTHS = 1.0, 2.0, 4.0
"""Candidates for the standard deviation of the prior."""
FACTORS = [2 ** (k / 4) for k in range(-20, 17)]
"""Candidates for the factor of the noise, from 1/32 so that none is at an end."""
_LARGE = 2000
"""Number of training rows above which runs take twice as many steps, without full-data methods."""
SCALES = {
    "full": stacks.Budget(steps=2000, batch_size=64, transitions=100, draws=100),
    "quick": stacks.Budget(steps=40, batch_size=64, transitions=8, draws=10),
}
_QUANTITIES = {"rmse": "test RMSE", "ll": "test log-likelihood"}
_DIGITS = {"kin8nm": 4, "naval-propulsion-plant": 5}
_TITLE = "UCI regression on the published splits"
_NOTE = "Mean and standard error over the splits, in the units of the targets."

Scores = Sequence[Mapping[str, Any]]
"""Numbers of all splits: settings, ``rmse`` and ``ll``."""
Results = Mapping[tuple[str, str], Scores]
"""Numbers by table and method."""


def uci(
    tables: list[str] | None = None,
    methods: list[str] | None = None,
    splits: int | None = None,
    scale: Literal["full", "quick"] = "full",
    data: str | None = None,
    out: str = "studies/uci",
) -> Outcome:
    """Train every method on the published splits of the UCI tables, beside published results.

    A perceptron with one hidden layer of 50 units (100 for protein) and a noise that each network
    learns. The width of the prior, settings of the method, and a factor of the noise are those of
    largest log-likelihood on a fifth of the training rows of a split; then the method is trained
    again on all of these rows. Members of all splits are trained as one stack. Results of each
    table and method are written at once: an interrupted command continues where it stopped.
    Several commands may fill one folder with different tables, and one more shows all.

    Args:
        tables: names of folders in the layout of the published splits; by default all eight.
        methods: names of methods; by default all.
        splits: how many of the splits, the first ones; by default all.
        scale: full, or quick, which tries the command out and measures nothing.
        data: folder of the tables; by default the environment variable LIGHTNING_BNN_DATA.
        out: folder for the results.
    """
    unknown = set(methods or ()) - set(CONTESTANTS)
    if unknown:
        raise ValueError(f"`methods` must be among {', '.join(CONTESTANTS)}, got {min(unknown)}.")
    if splits is not None:
        check_count("splits", splits)
    folder, budget = results_folder(out, "uci"), settings_of(SCALES, scale)
    root, names = str(data_root(data)), tables or TABLES
    every = {name: SplitTable(name, read_splits(name, root, splits), budget) for name in names}
    runs = [
        (table, method)
        for table in every.values()
        for method in methods or CONTESTANTS
        if not (CONTESTANTS[method].full_batch and table.rows > _LARGE)
    ]
    if not runs:
        limited = ", ".join(methods or ())
        raise ValueError(f"`methods`: {limited} is only run up to {_LARGE} training rows.")
    results: dict[tuple[str, str], Scores] = {}
    with one_thread(), tqdm(runs, unit="run") as bar:
        for table, method in bar:
            bar.set_postfix_str(f"{table.name}, {method}")
            results[table.name, method] = _stored(folder, table, method)
    return publish(_findings(results, {**vars(budget), "prior_std": _WIDTHS}), folder)


def _stored(folder: Path, table: SplitTable, method: str) -> Scores:
    """Return the scores of a method on a table, from disk or newly computed."""
    contestant = CONTESTANTS[method]
    file, key = folder / "runs" / f"{table.name}-{method}.json", table.key(contestant)
    record = {}
    if file.is_file():
        with suppress(ValueError):  # what was cut off is made again
            record = json.loads(file.read_text())
    if record.get("key") != key:
        record = {"key": key, "splits": choose_and_score(contestant, table)}
        file.parent.mkdir(exist_ok=True)
        write_whole(file, json.dumps(record, indent=1))
    return list(record["splits"])


# ------------------------------------------------------------ one method on one table
class SplitTable:
    """The splits of a table, and initial networks for them.

    Args:
        name: of the table.
        splits: of it.
        budget: of all runs.
    """

    def __init__(self, name: str, splits: Sequence[stacks.Split], budget: stacks.Budget) -> None:
        self.name, self.splits, self.width = name, splits, _WIDER.get(name, 50)
        self.rows = len(splits[0].train[0]) + len(splits[0].val[0])
        self.budget = replace(budget, steps=(1 + (self.rows > _LARGE)) * budget.steps)
        self._maxima: dict[bool, Fitted] = {}
        self._digest = hashlib.sha256()
        for split in splits:
            for t in (*split.train, *split.val, *split.test):
                self._digest.update(t.numpy().tobytes())
            self._digest.update(repr(split.target_std).encode())

    def key(self, contestant: Contestant) -> str:
        """Digest of everything that determines a result."""
        parts = [lightning_bnn.__version__, self.name, len(self.splits), self.budget, _WIDTHS]
        parts += [contestant.settings, contestant.members, contestant.longer]
        parts += [self._digest.hexdigest()]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def candidates(self, all_rows: bool) -> list[Candidate]:
        """Return all splits and widths, with all training rows or without held-out ones."""
        splits = [split.retrained() if all_rows else split for split in self.splits]
        return [Candidate(split, width) for split in splits for width in _WIDTHS]

    def fit(self, contestant: Contestant, setting: Any, candidates: list[Candidate]) -> Fitted:
        """Train candidates, from posterior modes if the method starts there."""
        start = self._start(candidates) if contestant.warm_start else None
        return fitted(contestant, setting, candidates, self.width, self.budget, start)

    def _start(self, candidates: list[Candidate]) -> Params:
        """Return posterior modes, found once for all methods and widths."""
        whole = len(candidates[0].split.train[0]) == self.rows
        every = self.candidates(whole)
        if whole not in self._maxima:
            self._maxima[whole] = fitted(CONTESTANTS["map"], None, every, self.width, self.budget)
        places = [(split.number, width) for split, width in every]
        chosen = torch.tensor([places.index((c.split.number, c.width)) for c in candidates])
        return {name: t[chosen] for name, t in self._maxima[whole].stack.items()}


def choose_and_score(contestant: Contestant, table: SplitTable) -> Scores:
    """Choose the settings of every split on its validation rows, retrain, and score on its test.

    Args:
        contestant: the method.
        table: its splits.
    """
    choices, draws = _chosen(contestant, table), table.budget.draws
    for setting in contestant.settings:
        candidates = [
            candidate
            for candidate in table.candidates(all_rows=True)
            if (setting, candidate.width) == choices[candidate.split.number]["settings"]
        ]
        if not candidates:
            continue
        trained = table.fit(contestant, setting, candidates)
        for k, (split, _) in enumerate(candidates):
            best, predictions = choices[split.number], trained.predict(k, split.test, draws)
            best["rmse"], best["ll"] = stacks.scores(predictions, best["factor"], split.target_std)
    return list(choices.values())


def _chosen(contestant: Contestant, table: SplitTable) -> dict[int, dict[str, Any]]:
    """Return settings with the largest validation log-likelihood, by split."""
    best: dict[int, dict[str, Any]] = {}
    candidates = table.candidates(all_rows=False)
    for setting in contestant.settings:
        trained = table.fit(contestant, setting, candidates)
        for k, (split, width) in enumerate(candidates):
            factor, value = best_factor(trained.predict(k, split.val, table.budget.draws))
            value -= math.log(split.target_std)
            if split.number not in best or value > best[split.number]["validation"]:
                best[split.number] = {
                    "split": split.number, "settings": (setting, width), "factor": factor,
                    "validation": value,
                }  # fmt: skip
    return best


def best_factor(predictions: stacks.Predictions) -> tuple[float, float]:
    """Return the factor of the noise with the largest mean log-density, and that density.

    Args:
        predictions: on validation rows.
    """
    densities = {f: float(stacks.log_densities(predictions, f).mean()) for f in FACTORS}
    factor, density = max(densities.items(), key=lambda item: item[1])
    return (factor, density) if math.isfinite(density) else (1.0, -math.inf)


# ------------------------------------------------------------ tables and figures
def _findings(results: Results, settings: Mapping[str, Any]) -> Findings:
    """Return a table for each quantity with published rows below, and one figure."""
    file = files("bnn_research") / "uci_published.yaml"
    published = yaml.safe_load(file.read_text(encoding="utf-8"))
    names = list(dict.fromkeys(table for table, _ in results))
    tables = {quantity: _table(quantity, results, names, published) for quantity in _QUANTITIES}
    rows, label = tables["ll"].rows, _QUANTITIES["ll"]
    panels: dict[str, Any] = {
        name: {label: [row[k + 1] for row in rows]} for k, name in enumerate(names)
    }
    figure = dots_figure(panels, [str(row[0]) for row in rows], columns=4)
    notes = [source["note"] for source in published.values()]
    settings = {**settings, "per_split": {"/".join(run): rows for run, rows in results.items()}}
    return Findings("uci", _TITLE, tables, {"densities": figure}, notes, settings)


def _table(quantity: str, results: Results, names: list[str], published: Any) -> Table:
    """Return one quantity, methods by tables."""
    rows: list[list[Cell]] = [
        [CONTESTANTS[m].title, *(over_splits(results.get((n, m), ()), quantity) for n in names)]
        for m in dict.fromkeys(method for _, method in results)
    ]
    for title, source in published.items():
        rows.append([title, *(Measured(*source[quantity].get(n, [math.nan])) for n in names)])
    return Table(_QUANTITIES[quantity], ["method", *names], rows, _DIGITS, _NOTE)


def over_splits(rows: Scores, key: str) -> Measured:
    """Return mean and standard error over splits, or NaN if there are none or one has failed."""
    mean, deviation = spread(torch.tensor([row[key] for row in rows], dtype=torch.float64))
    return Measured(mean, deviation / math.sqrt(max(1, len(rows))))
