"""What a script has measured, and on what machine: printed, and kept as a file for the pages.

    options = parsed(__doc__, parts=("update", "steps"), repeats=30)
    record = Record(options)
    record.times(taking_turns(contestants, options.repeats), what="ResNet-18")
    record.value("error", 1e-14)
    record.write()

`python benchmarks/bench.py` calls every script with `--record FILE`; without it nothing is written.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from turns import Times

Row = dict[str, Any]
NAMED = ("torch", "lightning", "lightning_bnn", "weightsym", "weightsym-fast")
"""Packages whose versions belong to every file."""


# ------------------------------------------------------------ what scripts are told
def parser(doc: str, parts: Sequence[str] = (), repeats: int = 15) -> argparse.ArgumentParser:
    """The options that every script of benchmarks has."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if parts:
        made.add_argument("part", choices=parts)
    made.add_argument("--threads", type=int, default=1, help="at most, for every contestant")
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    made.add_argument("--repeats", type=int, default=repeats, help="rounds that count")
    made.add_argument("--record", type=Path, help="file that the result is written to")
    return made


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    options = made.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    return options


# ------------------------------------------------------------ what they write
class Record:
    """The rows of one run; each is printed as it is found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows = options, list[Row]()
        device = _device(options.device)
        print(f"{options.threads} threads at most, {device}, torch {torch.__version__}", flush=True)

    def times(self, found: Mapping[str, Times], **labels: Any) -> None:
        """One row for each contestant; the first is what the ratios that are printed are over."""
        first = next(iter(found.values()))
        for name, times in found.items():
            self.rows.append({**labels, "who": name, **_described(times)})
            text = " ".join(str(value) for value in (*labels.values(), name))
            ratio = times.seconds / first.seconds
            print(f"{text:<70}{1e3 * times.seconds:>12.3f} ms{ratio:>10.2f} x", flush=True)

    def value(self, who: str, value: float | str, **labels: Any) -> None:
        """A row with a number that is no time."""
        value = float(f"{value:.4g}") if isinstance(value, float) else value
        self.rows.append({**labels, "who": who, "value": value})
        text = " ".join(str(value) for value in (*labels.values(), who))
        print(f"{text:<70}{value:>12}", flush=True)

    def write(self) -> None:
        """Write the file, if one was asked for."""
        if self.options.record is None:
            return
        content = {"command": _command(), "date": date.today().isoformat(), **circumstances()}
        content |= {"threads": self.options.threads, "device": _device(self.options.device)}
        write(self.options.record, {**content, "rows": self.rows})


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file with a row on each line."""
    lines = ",\n  ".join(json.dumps(row) for row in content["rows"])
    head = json.dumps({k: v for k, v in content.items() if k != "rows"}, indent=1)[:-2]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def _device(name: str) -> str:
    """The CPU, or the names of the cards."""
    cards = range(torch.cuda.device_count()) if name == "cuda" else ()
    return ", ".join(torch.cuda.get_device_name(k) for k in cards) or name


def _described(times: Times) -> Row:
    shown: Row = {"threads": times.threads, "clock": times.clock}
    shown |= {"wall": spread(times.wall), "cpu": spread(times.cpu)}
    return shown | {"repeats": len(times.wall)}


def spread(seconds: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(seconds) == 1:
        seconds = [*seconds, *seconds]
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
    return [float(f"{s:.4g}") for s in quartiles]


# ------------------------------------------------------------ where and with what
def circumstances() -> dict[str, Any]:
    """The machine and the versions."""
    machine = {"cpu": _cpu(), "cores": _cores(), "memory_gib": _memory()}
    versions = {"python": platform.python_version(), **dict(_versions())}
    return {"machine": machine, "versions": versions}


def _cpu() -> str:
    """Its name, and what tells apart processors that call themselves the same."""
    known = {}
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        known.setdefault(name.strip(), value.strip())
    named = known.get("model name") or platform.processor() or platform.machine()
    kind = [f"{n.split()[-1]} {known[n]}" for n in ("cpu family", "model") if n in known]
    return f"{named} ({', '.join(kind)})" if kind else named


def _cores() -> int:
    """Those that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def _memory() -> int:
    """Of the machine, in GiB; 0 where nobody says."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal"):
            return round(int(line.split()[1]) / 2**20)
    return 0


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _versions() -> Iterator[tuple[str, str]]:
    for name in NAMED:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "unknown"


def _command() -> str:
    """What was typed, without the place of the file."""
    words = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    place = words.index("--record") if "--record" in words else len(words)
    return shlex.join(words[:place] + words[place + 2 :])
