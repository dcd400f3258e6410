"""All numbers of the papers' pages again, with a verdict on each claim."""

from __future__ import annotations

import contextlib
import io
import itertools
import shutil
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tqdm.auto import tqdm

from bnn_research.claims.steps import PAPERS, STEPS, Record, Size, Step, chosen_steps, evidence_in
from bnn_research.claims.verdicts import CLAIMS, Judged, judged
from lightning_bnn.datamodules import MissingData
from lightning_bnn.findings import Findings, results_folder, write_findings
from lightning_bnn.tables import Cell, Table

_WIDTHS = {"claim": 0.3, "paper": 0.17, "here": 0.33, "verdict": 0.2}
"""Columns of the tables of claims, and their shares of the width of a terminal."""


def reproduce(
    only: list[str] | str | None = None,
    seeds: int = 3,
    size: Literal["full", "smallest"] = "full",
    list: bool = False,
    run: bool = True,
    again: bool = False,
    out: str = "reproduce",
) -> None:
    """Run the studies of all three papers, and judge every claim.

    Takes about an hour and a quarter on two cores, apart from the posteriors of OptuNet on MNIST
    (the step `mnist/runs`), which train for about two more hours. Steps that need missing files of
    MNIST (in the folder LIGHTNING_BNN_DATA) are omitted, and claims about them are "not tested". If
    the command is killed, the next call continues where it stopped; steps that have finished with
    this version, these sources and settings are not repeated. A failed step does not stop the
    others. The verdicts follow from the numbers and their errors by criteria printed in
    `README.md`. "here" is mean and standard deviation over seeds for studies that consist of one
    run.

    Args:
        only: papers and steps to run, such as p2, toy or "[p3, demo]"; by default all. The claims
            of their papers are printed, with all existing results.
        seeds: number of repetitions of the steps that consist of one run.
        size: full, or smallest: the smallest studies, to test the command; their verdicts are
            meaningless.
        list: only list the steps, with their cost and their state.
        run: false only judges existing results.
        again: repeat the chosen steps, even if they have finished; trained networks are reused.
        out: folder for all results.
    """
    if seeds < 1:
        raise ValueError(f"`seeds` must be at least 1, got {seeds}.")
    names = only.split(",") if isinstance(only, str) else only or []
    steps = chosen_steps(names)
    if list:
        root = Path(out).expanduser().resolve()
        print(_steps_table(steps, root, seeds, size).text())
        return
    root = results_folder(out, "reproduce").resolve()
    if run:
        tasks = [(step, seed) for step in steps for seed in step.seeds(seeds)]
        with tqdm(tasks, desc="steps", unit="step") as bar:
            for step, seed in bar:
                bar.set_postfix_str(f"{step.name} {seed}" if step.seeded else step.name)
                _run(step, root, seed, size, again)
    papers = [p for p in PAPERS if any(step.paper == p for step in steps)]
    _publish(papers, root, seeds, size)


def _run(step: Step, root: Path, seed: int, size: Size, again: bool) -> None:
    """Call a study unless it has finished, and record the result."""
    if size == "smallest" and step.smallest is None:
        return
    if not again and step.record(root, seed, size).state == "finished":
        return
    key, begun, state, reason = step.key(root, seed, size), time.monotonic(), "finished", ""
    try:
        before = [s.record(root, 0, size).state for s in STEPS if s.name == step.after]
        if before not in ([], ["finished"]):
            raise MissingData(f"`{step.after}` has not finished")
        with contextlib.redirect_stdout(io.StringIO()):
            step.function()(**step.arguments(root, seed, size))
    except Exception as error:  # whatever it is, other steps go on
        reason = textwrap.shorten(" ".join(str(error).split()), 200)
        state = "skipped" if isinstance(error, MissingData) else "failed"
        reason = reason if state == "skipped" else f"{type(error).__name__}: {reason}"
        tqdm.write(f"{step.name} {state}: {reason}")
    seconds = round(time.monotonic() - begun, 1)
    step.write(Record(key, state, reason, seconds), root, seed)


# ------------------------------------------------------------ results
def _publish(papers: Sequence[str], root: Path, seeds: int, size: Size) -> None:
    evidence = evidence_in(root, seeds, size)
    tables: dict[str, Table] = {}
    for paper in papers:
        rows = [judged(claim, evidence) for claim in CLAIMS[paper]]
        cells = [[r.claim.text, r.claim.row["paper"], r.ours, r.verdict] for r in rows]
        tables[paper] = Table(f"{paper.upper()}: {PAPERS[paper]}", list(_WIDTHS), cells)
        tables[f"{paper}_criteria"] = _criteria(rows)
    tables["steps"] = _steps_table(STEPS, root, seeds, size)
    settings = {"papers": [*papers], "seeds": seeds, "size": size}
    title = "The papers, claim by claim"
    write_findings(Findings("reproduce", title, tables, {}, [], settings), root)
    for paper in papers:
        print(_wrapped(tables[paper]), end="\n\n")
    print(tables["steps"].text())
    print(f"\nwrote {root} (claims and criteria: {root / 'README.md'})")


def _criteria(rows: Sequence[Judged]) -> Table:
    """Return the criteria of every verdict, and their results."""
    words = {True: "yes", False: "no", None: "within the errors"}
    cells: list[list[Cell]] = [
        [row.claim.section, row.claim.text, check, words[met]]
        for row in rows
        for check, met in row.checks.items()
    ]
    return Table("What decides", ["section", "claim", "criterion", "met"], cells)


def _steps_table(steps: Sequence[Step], root: Path, seeds: int, size: Size) -> Table:
    rows: list[list[Cell]] = []
    for step in steps:
        if size == "smallest" and step.smallest is None:
            continue
        records = [step.record(root, seed, size) for seed in step.seeds(seeds)]
        cost = "hours" if step.minutes is None else f"{step.minutes * len(records):.1f} min"
        taken = sum(record.seconds for record in records)
        states = ", ".join(dict.fromkeys(record.state for record in records))
        rows.append([step.name, step.paper, len(records), cost, taken, states])
    header = ["step", "paper", "runs", "about", "seconds taken", "state"]
    return Table("Steps", header, rows, 0)


def _wrapped(table: Table) -> str:
    """A table of sentences, each wrapped within its column."""
    width = max(100, shutil.get_terminal_size((160, 40)).columns) - 8
    widths = [int(share * width) for share in _WIDTHS.values()]
    rows: list[list[Cell]] = []
    for row in table.cells():
        wrapped = [textwrap.wrap(cell, w) or [""] for cell, w in zip(row, widths, strict=True)]
        for line in (*itertools.zip_longest(*wrapped, fillvalue=""), [""] * len(row)):
            rows.append([cell.ljust(w) for cell, w in zip(line, widths, strict=True)])
    return Table(table.title, table.header, rows).text()
