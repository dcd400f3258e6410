"""Deliberate faults, one at a time, in a copy of the package: how many do the tests notice?

python benchmarks/mutations.py [--seed 0] [--number 60] [--folders metrics posteriors] [--jobs 2]
python benchmarks/mutations.py --list     what would be tried
python benchmarks/mutations.py --again    what survived last time, once more

A fault changes one expression; it is caught if a test of the folder that mirrors its file fails, or
a doctest of the file. Kinds of faults are drawn before places, so that plain numbers, of which
there are most, do not crowd out comparisons. What was found stays in runs/, and a second call goes
on from there. Whatever survives is either equivalent, or asks for a test. A fault whose tests take
longer than `--timeout` is neither caught nor missed: it has a column of its own.
"""

import argparse
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import Fault, faults_of
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
FOLDERS = ("metrics", "posteriors", "samplers", "symmetry")
CORE = ROOT / "weightsym/weightsym"
APART = {"commands", "networks"}
"""Folders of the core whose tests are not those of the symmetries."""
COPIED = ("lightning_bnn", "weightsym", "fast", "tests", "pyproject.toml")
IMPORTED = "cvxpy hypothesis laplace lightning scipy.stats sklearn.metrics torch._dynamo"
SLOW = 0.3
"""Seconds from which a test waits until the others have passed."""


def sources(folder: str) -> list[Path]:
    """The files that a folder of tests mirrors."""
    if folder != "symmetry":
        return sorted((ROOT / "lightning_bnn" / folder).rglob("*.py"))
    return sorted(p for p in CORE.rglob("*.py") if p.relative_to(CORE).parts[0] not in APART)


def place(path: Path) -> str:
    """A path as the copy of the package knows it."""
    return str(path.relative_to(ROOT))


def draw(folders: list[str], number: int, seed: int) -> list[Fault]:
    """From every folder in turn: first the kind of fault, then the place."""
    dice, drawn = random.Random(seed), []
    pools: dict[str, dict[str, list[Fault]]] = {folder: {} for folder in folders}
    for folder, pool in pools.items():
        for path in sources(folder):
            for fault in faults_of(path.read_text(), place(path)):
                pool.setdefault(fault.kind, []).append(fault)
    while len(drawn) < number and any(pools.values()):
        pool = pools[folders[len(drawn) % len(folders)]]
        kind = dice.choice(sorted(pool))
        drawn.append(pool[kind].pop(dice.randrange(len(pool[kind]))))
        if not pool[kind]:
            del pool[kind]
    return drawn


def tests_of(file: str, folder: str, more: list[str]) -> list[str]:
    """The file's doctests, then the tests of its folder; those that speak of it most come first."""
    path = ROOT / file
    public = re.search(r"__all__ = \[(.*?)\]", path.read_text(), re.DOTALL)
    words = [path.stem, *re.findall(r'"(\w+)"', public[1] if public else "")]
    count = re.compile(rf"\b({'|'.join(words)})\b")

    def relevance(test: Path) -> tuple[bool, int]:
        return path.stem in test.stem, len(count.findall(test.read_text()))

    mirrored = sorted((ROOT / "tests" / folder).glob("test_*.py"), key=relevance)[::-1]
    return [file, *map(place, mirrored), *more]


# ------------------------------------------------------------ one run of pytest
class Notes:
    """What pytest tells: the first failure, and how long every test took."""

    def __init__(self, slow: set[str]) -> None:
        self.slow, self.failed, self.seconds = slow, None, {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.nodeid in self.slow)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"import of {report.nodeid}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def snapshot(tree: Path) -> Path:
    """What the tests need, as it is now; who goes on writing does not disturb them."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tree / name)
    return tree


def run_tests(
    taken: Path, tests: list[str], slow: set[str], limit: float, fault: Fault | None = None
) -> dict:
    """In a process that is forked where all is imported but our package, on a copy of it."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(shutil.copytree(taken, folder, dirs_exist_ok=True))
        if fault:
            (tree / fault.file).write_text(fault.applied((tree / fault.file).read_text()))
        child = os.fork()
        if not child:
            _test_and_exit(tree, tests, slow)
        usage, late = _wait(child, limit)
        notes = {"failed": "crash", "seconds": {}, "log": ""}
        with suppress(FileNotFoundError):
            notes = json.loads((tree / "notes.json").read_text())
        notes["failed"] = "timeout" if late else notes["failed"]
        return {**notes, "cpu": usage.ru_utime + usage.ru_stime}


def _test_and_exit(tree: Path, tests: list[str], slow: set[str]) -> None:
    os.setsid()
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)  # of processes that tests start
    log = os.open("log", os.O_CREAT | os.O_RDWR)
    os.dup2(log, 1)
    os.dup2(log, 2)
    notes = Notes(slow)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], [notes])
    sys.stdout.flush()
    failed = notes.failed or (f"exit code {int(code)}" if code else None)
    found = {"failed": failed, "seconds": notes.seconds, "log": Path("log").read_text()[-3000:]}
    Path("notes.part").write_text(json.dumps(found))
    os.replace("notes.part", "notes.json")
    os._exit(0)


def _wait(child: int, limit: float) -> tuple[Any, bool]:
    """Resources that it took, and whether it had to be stopped, with all that it started."""
    deadline = time.monotonic() + limit
    try:
        while time.monotonic() < deadline:
            pid, _, usage = os.wait4(child, os.WNOHANG)
            if pid:
                return usage, False
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return os.wait4(child, 0)[2], True


def try_all(faults: list[Fault], options: argparse.Namespace) -> Iterator[tuple[Fault, dict]]:
    """Every fault and what its tests found, after all tests have passed without one."""
    folders, context = {fault.folder for fault in faults}, torch.multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.jobs, context) as pool,
    ):
        run = partial(pool.submit, run_tests, snapshot(Path(folder)))
        of_faults = [tests_of(f.file, f.folder, options.more) for f in faults]  # as they are now
        tests = [[f"tests/{n}", *map(place, sources(n)), *options.more] for n in folders]
        whole = [run(each, set(), 10 * options.timeout) for each in tests]
        seconds = {}
        for job in tqdm(whole, "without faults"):
            seconds |= job.result()["seconds"]
            if failed := job.result()["failed"]:
                sys.exit(f"{failed} fails without a fault, too.\n{job.result()['log']}")
        slow = {test for test, took in seconds.items() if took > SLOW}
        jobs = {
            run(tests, slow, options.timeout, f): f
            for f, tests in zip(faults, of_faults, strict=True)
        }
        try:
            for job in tqdm(as_completed(jobs), "faults", len(jobs)):
                yield jobs[job], job.result()
        finally:
            pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------ what was found
def table(faults: list[Fault], found: dict[str, dict]) -> str:
    rows = ["| where | fault | caught by |", "|---|---|---|"]
    for fault in faults:
        by = found[fault.key]["failed"] if fault.key in found else "not tried"
        rows.append(f"| {fault.where} | {fault.difference()} | {by or '**survived**'} |")
    rows += ["", "| folder | faults | caught | survived | timed out | CPU minutes |"]
    rows += ["|---|---|---|---|---|---|"]
    folders = sorted({fault.folder for fault in faults})
    for name in [*folders, "all"]:
        some = [found[f.key] for f in faults if name in (f.folder, "all") and f.key in found]
        ends = [each["failed"] for each in some]
        missed, late = ends.count(None), ends.count("timeout")
        minutes = sum(each["cpu"] for each in some) / 60
        caught = len(some) - missed - late
        rows.append(f"| {name} | {len(some)} | {caught} | {missed} | {late} | {minutes:.1f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS))
    parser.add_argument("--more", nargs="+", default=[], help="tests that run after the folder's")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a fault")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--again", action="store_true", help="try what was not caught")
    options = parser.parse_args()
    faults = draw(options.folders, options.number, options.seed)
    if options.list:
        print("\n".join(f"{f.where}  {f.difference()}" for f in faults))
        return
    path = ROOT / "runs" / f"mutations-{options.seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {}
    left = [
        f
        for f in faults
        if f.key not in found or options.again and found[f.key]["failed"] in (None, "timeout")
    ]
    torch.set_num_threads(1)
    for name in IMPORTED.split():
        importlib.import_module(name)
    for fault, result in try_all(left, options):
        found[fault.key] = {key: result[key] for key in ("failed", "cpu")}
        path.write_text(json.dumps(found, indent=1))
    print(table(faults, found))


if __name__ == "__main__":
    main()
