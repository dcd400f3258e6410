"""Records of the steps: settings, state, reason of a failure, and time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning_bnn
from lightning_bnn.studies.claims.evidence import Evidence
from lightning_bnn.studies.claims.steps import STEPS, Size, Step

__all__ = ["Record", "evidence_in", "key_of_step", "read_record", "timed"]

_SECONDS_BETWEEN = 5.0


@dataclass(frozen=True)
class Record:
    """The record of one repetition of a step.

    Attributes:
        key: digest of the settings that it was called with.
        state: begun, finished, failed or skipped.
        reason: why it failed or was skipped.
        seconds: that it took by the clock, over all calls.
        cpu_seconds: that the process has computed, which other jobs on the machine do not change.
    """

    key: str = ""
    state: str = "begun"
    reason: str = ""
    seconds: int | float = 0.0
    cpu_seconds: int | float = 0.0


def key_of_step(step: Step, root: Path, seed: int, size: Size) -> str:
    """A digest of the version, of the study's source and of its arguments.

    Args:
        step: that is called.
        root: folder of everything.
        seed: which repetition.
        size: full or smallest.
    """
    arguments = json.dumps(step.arguments(Path("."), seed, size), sort_keys=True)
    parts = [lightning_bnn.__version__, step.source.read_text(encoding="utf-8"), arguments]
    before = next((s for s in STEPS if s.name == step.after), None)
    if before is not None:
        parts.append(read_record(root, before, 0).key)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def read_record(root: Path, step: Step, seed: int) -> Record:
    """Read the record of earlier calls, or an empty one if none can be read."""
    try:
        return Record(**json.loads(_file(root, step, seed).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Record()


@contextlib.contextmanager
def timed(root: Path, step: Step, seed: int, key: str) -> Iterator[dict[str, str]]:
    """Keep a record of a step while it runs, so that a kill loses some seconds only.

    Args:
        root: folder of everything.
        step: that runs.
        seed: which repetition.
        key: of its settings; time that other settings have taken does not count.

    Yields:
        Where the state and its reason are left for the record.
    """
    before = read_record(root, step, seed)
    earlier = (before.seconds, before.cpu_seconds) if before.key == key else (0.0, 0.0)
    outcome = {"state": "begun", "reason": ""}
    started, ended = (time.monotonic(), time.process_time()), threading.Event()

    def write() -> None:
        now = time.monotonic(), time.process_time()
        taken = (round(e + n - s, 1) for e, n, s in zip(earlier, now, started, strict=True))
        _write(_file(root, step, seed), Record(key, outcome["state"], outcome["reason"], *taken))

    def beat() -> None:
        while not ended.wait(_SECONDS_BETWEEN):
            write()

    write()
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield outcome
    finally:
        ended.set()
        thread.join()
        write()


def evidence_in(root: Path, seeds: int, size: Size) -> Evidence:
    """All results of finished steps, and why others have none.

    Args:
        root: folder of everything.
        seeds: repetitions that count.
        size: full or smallest.
    """
    results: dict[str, Sequence[Mapping[str, Any]]] = {}
    absent: dict[str, str] = {}
    for step in STEPS:
        if size == "smallest" and step.smallest is None:
            absent[step.name] = f"`{step.name}` has no smallest size"
            continue
        every = {seed: _current(root, step, seed, size) for seed in step.seeds(seeds)}
        finished = [seed for seed, record in every.items() if record.state == "finished"]
        open_ = [record for record in every.values() if record.state in ("begun", "not run")]
        if finished and not open_:
            found = [_results(step.folder(root, seed) / step.results) for seed in finished]
            if found[0]:
                results[step.name] = found
        elif finished:
            absent[step.name] = f"`{step.name}` has finished {len(finished)} of {len(every)} seeds"
        else:
            absent[step.name] = _why(step, next(iter(every.values())))
    return Evidence(results, absent)


def _current(root: Path, step: Step, seed: int, size: Size) -> Record:
    """The record of a step, unless other settings have left it."""
    record = read_record(root, step, seed)
    same = record.key == key_of_step(step, root, seed, size)
    return record if same else Record(state="not run")


def _why(step: Step, record: Record) -> str:
    reason = f": {record.reason}" if record.reason else ""
    return (
        f"`{step.name}` {'has not been run' if record.state == 'not run' else record.state}{reason}"
    )


def _results(folder: Path) -> dict[str, Any]:
    """Read the results of a study, with the rows of its posteriors if it compares any."""
    file = folder / "results.json"
    if not file.is_file():
        return {}
    results = dict(json.loads(file.read_text(encoding="utf-8")))
    stored = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("rows/*.json"))]
    if stored:
        results["rows"] = [row for one in stored for row in one["rows"]]
    return results


def _file(root: Path, step: Step, seed: int) -> Path:
    return root / "steps" / f"{step.name.replace('/', '.')}.{seed}.json"


def _write(path: Path, record: Record) -> None:
    """Whole, or not at all: a kill must not leave half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
