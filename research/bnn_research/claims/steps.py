"""The steps of a reproduction: studies with their calls, repetitions and records."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

import lightning_bnn
from bnn_research.claims.verdicts import Evidence
from weightsym.files import write_whole

Size = Literal["full", "smallest"]
PAPERS = {
    "p1": "A symmetry-aware exploration of Bayesian neural network posteriors",
    "p2": "Variational inference failures under model symmetries",
    "p3": "A compact representation for Bayesian neural networks",
}


@dataclass(frozen=True)
class Record:
    """The record of one repetition of a step.

    Attributes:
        key: digest of the settings of the call.
        state: finished, failed, skipped or not run.
        reason: of the failure or the skip.
        seconds: wall time of the last call.
    """

    key: str = ""
    state: str = "not run"
    reason: str = ""
    seconds: float | int = 0.0


@dataclass(frozen=True)
class Step:
    """A study, called in a folder of its own.

    The head of `steps.yaml` explains the fields.
    """

    name: str
    paper: str
    study: str
    minutes: float | int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    smallest: Mapping[str, Any] | None = field(default_factory=dict)
    seeded: bool = True
    after: str = ""
    results: str = ""

    @property
    def place(self) -> str:
        """Module and name of its function."""
        return self.study if "." in self.study else f"bnn_research.{self.study}.{self.study}"

    @property
    def source(self) -> Path:
        """File of its study."""
        package, *folders, module, _ = self.place.split(".")
        return Path(str(resources.files(package))).joinpath(*folders, f"{module}.py")

    def function(self) -> Any:
        """Import the function of the study."""
        module, _, name = self.place.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def seeds(self, count: int) -> Sequence[int]:
        """Return its seeds."""
        return range(count) if self.seeded else (0,)

    def folder(self, root: Path, seed: int) -> Path:
        """Return the folder of a repetition."""
        return root / self.name / f"seed_{seed}" if self.seeded else root / self.name

    def arguments(self, root: Path, seed: int, size: Size) -> dict[str, Any]:
        """Return all arguments of its function."""
        options = self.options if size == "full" else self.smallest
        arguments = json.loads(json.dumps(options).replace("{root}", str(root)))
        if self.seeded:
            arguments["seed"] = seed
        return {**arguments, "out": str(self.folder(root, seed))}

    def key(self, root: Path, seed: int, size: Size) -> str:
        """Return a digest of the version, the study's source, its arguments, and earlier steps."""
        arguments = json.dumps(self.arguments(Path("."), seed, size), sort_keys=True)
        parts = [lightning_bnn.__version__, self.source.read_text(encoding="utf-8"), arguments]
        parts += [step.record(root, 0, size).key for step in STEPS if step.name == self.after]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    def record(self, root: Path, seed: int, size: Size) -> Record:
        """Return the record of the last call, if it had the same settings."""
        try:
            record = Record(**json.loads(self._file(root, seed).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Record()
        return record if record.key == self.key(root, seed, size) else Record()

    def write(self, record: Record, root: Path, seed: int) -> None:
        """Replace the record completely: a kill must not leave half a file."""
        file = self._file(root, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(record)) + "\n", wait=False)

    def _file(self, root: Path, seed: int) -> Path:
        return root / "steps" / f"{self.name.replace('/', '.')}.{seed}.json"


def chosen_steps(only: Sequence[str]) -> list[Step]:
    """Select steps by papers or names, by default all.

    Args:
        only: names of papers and steps.
    """
    names = [*PAPERS, *(step.name for step in STEPS)]
    for name in only:
        if name not in names:
            raise ValueError(f"`only` must be of {', '.join(names)}, got {name!r}.")
    return [step for step in STEPS if not only or {step.name, step.paper} & set(only)]


def evidence_in(root: Path, seeds: int, size: Size) -> Evidence:
    """Return all results of finished steps, and reasons why others have none.

    Args:
        root: folder of the reproduction.
        seeds: number of repetitions that count.
        size: full or smallest.
    """
    results: dict[str, Sequence[Mapping[str, Any]]] = {}
    absent: dict[str, str] = {}
    for step in STEPS:
        if size == "smallest" and step.smallest is None:
            absent[step.name] = f"`{step.name}` has no smallest size"
            continue
        records = {seed: step.record(root, seed, size) for seed in step.seeds(seeds)}
        finished = [seed for seed, record in records.items() if record.state == "finished"]
        if finished and any(record.state == "not run" for record in records.values()):
            number = f"{len(finished)} of {len(records)}"
            absent[step.name] = f"`{step.name}` has finished {number} seeds"
        elif finished:
            results[step.name] = [_results(step.folder(root, s) / step.results) for s in finished]
        else:
            absent[step.name] = _reason(step, records[0])
    return Evidence({name: runs for name, runs in results.items() if runs[0]}, absent)


def _reason(step: Step, record: Record) -> str:
    state = "has not been run" if record.state == "not run" else record.state
    return f"`{step.name}` {state}{f': {record.reason}' if record.reason else ''}"


def _results(folder: Path) -> dict[str, Any]:
    """Read the results of a study, with the rows of its posteriors if it compares any."""
    file = folder / "results.json"
    if not file.is_file():
        return {}
    stored = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("rows/*.json"))]
    rows = [row for content in stored for row in content["rows"]]
    return {"rows": rows, **json.loads(file.read_text(encoding="utf-8"))}


def _steps() -> tuple[Step, ...]:
    text = resources.files(__package__).joinpath("steps.yaml").read_text(encoding="utf-8")
    return tuple(
        Step(name=name, **{"study": name, **about}) for name, about in yaml.safe_load(text).items()
    )


STEPS = _steps()
"""All steps, in the order in which they run."""
