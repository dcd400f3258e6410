"""All numbers of the papers' pages once more, each claim with the verdict that they give."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm

from lightning_bnn.datamodules import MissingData
from lightning_bnn.plots.page import Section, html_report
from lightning_bnn.studies.claims.claim import Judged, judged
from lightning_bnn.studies.claims.evidence import Evidence
from lightning_bnn.studies.claims.numbers import over_seeds
from lightning_bnn.studies.claims.records import evidence_in, key_of_step, read_record, timed
from lightning_bnn.studies.claims.steps import PAPERS, STEPS, Size, Step, chosen_steps
from lightning_bnn.studies.claims.table import CLAIMS
from lightning_bnn.studies.findings import Findings, results_folder, write_findings
from lightning_bnn.tables import Cell, Measured, Table, text_table

__all__ = ["over_all_seeds", "reproduce"]

_HEADER = ["claim", "paper", "here", "verdict"]


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

    Takes about an hour and a quarter on two cores, beside the posteriors of OptuNet on MNIST (the
    step `mnist/runs`), which train for about two hours more. Steps that need files of MNIST and do
    not find them (in the folder LIGHTNING_BNN_DATA) are left out, and claims about them are "not
    tested". If the command is killed, the next call continues where it stopped; steps that have
    finished with this version, these sources and settings are not done again. A step that fails
    stops no other. The verdicts follow from the numbers and their errors by criteria that are
    printed into `report.html`. "here" is mean and standard deviation over seeds for studies that
    consist of one run.

    Args:
        only: papers and steps to run, such as p2, toy or "[p3, demo]"; by default all. The claims
            of their papers are printed, with all existing results.
        seeds: number of repetitions of the steps that consist of one run.
        size: full, or smallest: the smallest studies that run through, to try it; their verdicts
            mean nothing.
        list: only list the steps, with their cost and their state.
        run: false only judges existing results.
        again: repeat the chosen steps, even if they have finished; trained networks are kept.
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
        _run_all(steps, root, seeds, size, again)
    papers = [p for p in PAPERS if any(step.paper == p for step in steps)]
    _publish(papers, root, seeds, size)


# ------------------------------------------------------------ running
def _run_all(steps: Sequence[Step], root: Path, seeds: int, size: Size, again: bool) -> None:
    tasks = [(step, seed) for step in steps for seed in step.seeds(seeds)]
    with tqdm(tasks, desc="steps", unit="step") as bar:
        for step, seed in bar:
            bar.set_postfix_str(f"{step.name} {seed}" if step.seeded else step.name)
            if size == "full" or step.smallest is not None:
                _run(step, root, seed, size, again)


def _run(step: Step, root: Path, seed: int, size: Size, again: bool) -> None:
    """Call a study unless it has finished, and record failures."""
    key, record = key_of_step(step, root, seed, size), read_record(root, step, seed)
    if not again and (record.key, record.state) == (key, "finished"):
        return
    with timed(root, step, seed, key) as outcome:
        before = next((s for s in STEPS if s.name == step.after), None)
        if before is not None and read_record(root, before, 0).state != "finished":
            outcome |= {"state": "skipped", "reason": f"`{step.after}` has not finished"}
            return
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                step.function()(**step.arguments(root, seed, size))
            outcome["state"] = "finished"
        except MissingData as error:
            outcome |= {"state": "skipped", "reason": _sentence(error)}
        except Exception as error:  # whatever it is, other steps go on
            outcome |= {"state": "failed", "reason": f"{type(error).__name__}: {_sentence(error)}"}
        if outcome["reason"]:
            tqdm.write(f"{step.name} {outcome['state']}: {outcome['reason']}")


def _sentence(error: Exception) -> str:
    return textwrap.shorten(" ".join(str(error).split()), 200)


# ------------------------------------------------------------ results
def _publish(papers: Sequence[str], root: Path, seeds: int, size: Size) -> None:
    evidence = evidence_in(root, seeds, size)
    verdicts = {p: [judged(claim, evidence) for claim in CLAIMS[p]] for p in papers}
    tables = {paper: _claims_table(paper, rows) for paper, rows in verdicts.items()}
    tables |= {f"{paper}_criteria": _criteria(rows) for paper, rows in verdicts.items()}
    tables["steps"] = _steps_table(STEPS, root, seeds, size)
    settings = {"papers": [*papers], "seeds": seeds, "size": size}
    title = "The papers, claim by claim"
    findings = Findings("reproduce", title, tables, {}, [], settings)
    write_findings(findings, root)
    _write_page(findings, papers, evidence, root)
    width = shutil.get_terminal_size((160, 40)).columns
    for paper in papers:
        print(_wrapped(tables[paper], max(100, width)), end="\n\n")
    print(tables["steps"].text())
    print(f"\nwrote {root} (the page: {root / 'report.html'})")


def _claims_table(paper: str, rows: Sequence[Judged]) -> Table:
    cells: list[list[Cell]] = [[r.claim.text, r.claim.paper, r.here, r.verdict] for r in rows]
    return Table(f"{paper.upper()}: {PAPERS[paper]}", _HEADER, cells)


def _criteria(rows: Sequence[Judged]) -> Table:
    """The criteria of every verdict, and the answers to them."""
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
        records = [read_record(root, step, seed) for seed in step.seeds(seeds)]
        keys = [key_of_step(step, root, seed, size) for seed in step.seeds(seeds)]
        known = [r if r.key == k else None for r, k in zip(records, keys, strict=True)]
        seconds = sum(r.seconds for r in known if r is not None)
        computed = sum(r.cpu_seconds for r in known if r is not None)
        states = dict.fromkeys("not run" if r is None else r.state for r in known)
        cost = "hours" if step.minutes is None else f"{step.minutes * len(known):.1f} min"
        rows.append([step.name, step.paper, len(known), cost, seconds, computed, ", ".join(states)])
    taken = sum(float(row[4]) for row in rows if isinstance(row[4], (int, float)))
    note = f"{taken / 60:.1f} minutes in all."
    header = ["step", "paper", "runs", "about", "seconds taken", "CPU seconds", "state"]
    return Table("Steps", header, rows, 0, note)


def _write_page(findings: Findings, papers: Sequence[str], evidence: Evidence, root: Path) -> None:
    """One HTML page: the claims, what decides them, what every step has cost, and its tables."""
    tables = findings.tables
    sections = [Section(PAPERS[p], tables=[tables[p], tables[f"{p}_criteria"]]) for p in papers]
    sections.append(Section("Steps", tables=[tables["steps"]]))
    numbers = {step: over_all_seeds(results) for step, results in evidence.results.items()}
    for step, found in numbers.items():
        several = len(evidence.results[step]) > 1
        text = [f"Mean and deviation of {len(evidence.results[step])} seeds."] if several else []
        sections.append(Section(f"{step}: the numbers", text, tables=found))
    pages = [f"# {step}\n\n" + "\n\n".join(t.markdown() for t in f) for step, f in numbers.items()]
    (root / "numbers.md").write_text("\n\n".join(pages) + "\n", encoding="utf-8")
    about = "Numbers of the studies beside those of the papers."
    page = html_report(findings.title, about, sections)
    (root / "report.html").write_text(page, encoding="utf-8")


def _wrapped(table: Table, width: int) -> str:
    """A table of sentences, each wrapped within its column."""
    shares = (0.3, 0.17, 0.33, 0.2)
    columns = [int(share * (width - 8)) for share in shares]
    lines: list[list[str]] = []
    for row in table.cells():
        wrapped = [textwrap.wrap(cell, w) or [""] for cell, w in zip(row, columns, strict=True)]
        lines += [
            [cell.ljust(w) for cell, w in zip(line, columns, strict=True)]
            for line in itertools.zip_longest(*wrapped, fillvalue="")
        ]
        lines.append([""] * len(columns))
    return f"{table.title}\n\n{text_table(table.header, lines)}"


# ------------------------------------------------------------ tables over seeds
def over_all_seeds(results: Sequence[Mapping[str, Any]]) -> list[Table]:
    """The tables of a study: numbers as mean and deviation, what is the same for all as it is.

    A table whose rows differ between seeds is that of the first.

    Args:
        results: what the study has written, one for each seed.
    """
    return [_merged([one["tables"][name] for one in results]) for name in results[0]["tables"]]


def _merged(tables: Sequence[Mapping[str, Any]]) -> Table:
    first = tables[0]
    grids = [[cell for row in table["rows"] for cell in row] for table in tables]
    alike = len({len(grid) for grid in grids}) == 1
    found = [_cell(of_seeds) for of_seeds in zip(*grids, strict=True)] if alike else [None]
    cells = [cell for cell in found if cell is not None]
    if len(cells) < len(found):
        cells = [cell for of_one in zip(grids[0]) if (cell := _cell(of_one)) is not None]
    width = len(first["header"])
    rows = [cells[k : k + width] for k in range(0, len(cells), width)]
    return Table(first["title"], first["header"], rows, note=first["note"])


def _cell(found: Sequence[Any]) -> Cell | None:
    """One cell of all seeds, or None if they cannot be brought together."""
    if any(isinstance(cell, str) for cell in found):
        return found[0] if len(set(map(str, found))) == 1 else None
    if len(found) == 1 and isinstance(found[0], Mapping):
        return Measured(_number(found[0]["value"]), _number(found[0]["error"]))
    values = [_number(cell["value"] if isinstance(cell, Mapping) else cell) for cell in found]
    if len(set(values)) == 1:
        whole = isinstance(found[0], int)
        return int(values[0]) if whole else values[0]
    mean = over_seeds(values)
    return Measured(mean.value, mean.sd)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
