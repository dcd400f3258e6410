"""Everything that is timed, one script after the other, into the files that the pages show.

python benchmarks/bench.py                     `make bench`
python benchmarks/bench.py --only vi_steps ratios `make bench ONLY="vi_steps ratios"`
python benchmarks/bench.py --again             `make bench AGAIN=1`
python benchmarks/bench.py --list              what there is, and of when its file is

Files of this machine and these versions are kept, so that a second call goes on where the first was
stopped; what is named, and everything with `--again`, is measured anew. At the end the tables of
the pages are made from the files.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import circumstances
from tables import FILES, fill_pages, table

SCRIPTS = Path(__file__).parent
RUNS = {
    "symmetry_masses": "symmetry.py masses",
    "symmetry_matching": "symmetry.py matching",
    "callbacks_steps": "callbacks.py steps",
    "discovery": "discovery.py",
    "checkpoints": "checkpoints.py --shapes 62M 124M 355M 1.2B --commands match merge",
    "differences": "checkpoints.py --shapes 5.5M 62M 124M 355M --commands diff diff-independent",
    "population": "population.py",
    "samplers_steps": "samplers.py steps",
    "samplers_chains": "samplers.py chains --repeats 3",
    "vi_steps": "vi.py steps",
    "ratios": "ratios.py",
    "growth": "growth.py",
    "costs": "costs.py",
    "doctor": "doctor.py --seeds 1",
    "distil": "distil.py",
    "bayesian_adapters": "bayesian_adapters.py",
    "intervals": "intervals.py --splits 2 --tables diabetes sine slope",
    "intervals_splits": "intervals.py --splits 200 --only BnnRegressor() --keep splits.jsonl",
}
"""What writes each file; a row of `tables.py` shows it."""


def main() -> None:
    options = _options()
    names = options.only or [*RUNS]
    if options.list:
        print("\n".join(f"{name:<24}{_when(name)}" for name in names))
        return
    failed = []
    for k, name in enumerate(names, 1):
        kept = not (options.again or options.only) and is_of_here(_file(name))
        print(f"[{k}/{len(names)}] {name}: {f'kept ({_when(name)})' if kept else ''}", flush=True)
        if not kept and not run(name):
            failed.append(name)
    fill_pages()
    if failed:
        raise SystemExit(f"failed: {' '.join(failed)}; what they have measured before is kept")


def run(name: str) -> bool:
    """Whether a script ended well, and its table has all rows; only then its file is replaced."""
    script, *words = RUNS[name].split()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / f"{name}.json"
        command = [sys.executable, str(SCRIPTS / script), *words, "--record", str(new)]
        well = subprocess.run(command, check=False).returncode == 0
        print(f"  {name}: {time.perf_counter() - start:.0f} s\n", flush=True)
        well = well and _is_complete(name, new.parent)
        if well:
            FILES.mkdir(exist_ok=True)
            shutil.copy(new, _file(name))
    return well


def _is_complete(name: str, folder: Path) -> bool:
    """Whether all that its table shows was measured, by all that the file of before has."""
    try:
        table(name, folder)
    except KeyError as error:
        print(f"  {name}: not all that its table shows was measured ({error.args[0]})")
        return False
    left_out = _contestants(_file(name)) - _contestants(folder / f"{name}.json")
    if left_out:
        print(f"  {name}: {', '.join(sorted(left_out))} left out (`make bench` installs peers)")
    return not left_out


def _contestants(path: Path) -> set[str]:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return {row["who"] for row in rows if "who" in row}


def is_of_here(path: Path) -> bool:
    """Whether a file is of this machine and these versions."""
    if not path.is_file():
        return False
    content = json.loads(path.read_text(encoding="utf-8"))
    return all(content[key] == value for key, value in circumstances().items())


def _file(name: str) -> Path:
    return FILES / f"{name}.json"


def _when(name: str) -> str:
    path = _file(name)
    if not path.is_file():
        return "not measured yet"
    other = "" if is_of_here(path) else ", another machine or other versions"
    return json.loads(path.read_text(encoding="utf-8"))["date"] + other


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], choices=RUNS, metavar="NAME")
    parser.add_argument("--again", action="store_true", help="measure all of them anew")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    return parser.parse_args()


if __name__ == "__main__":
    main()
