"""Everything that is tried and timed on a device, one step after the other: `make gpu`.

python benchmarks/gpu.py --out FOLDER [--device cuda] [--only tests populations ...] [--quick]

Each step is a process with a limit of its own and writes its file at once, so that what ends it
costs nothing else.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tables import FILES, fill_pages

SCRIPTS = Path(__file__).parent
PYTEST = "-m pytest -m e2e -q --tb=short -p no:cacheprovider tests/test_another_device.py"
PYTEST += " tests/methods/test_graphs.py"
STEPS = {
    "tests": (PYTEST, 300),
    "populations": ("gpu_populations.py --sizes 1 100 10000 100000 --repeats 2", 900),
    "chains": ("gpu_chains.py", 120),
    "callbacks": ("callbacks.py steps", 120),
    "vi": ("vi.py steps", 120),
    "samplers": ("samplers.py steps", 120),
    "mmd": ("metrics.py mmd --rows 200 --others 50 --repeats 3", 120),
}
"""What each step runs, and for how many seconds at most."""
QUICK = {
    "populations": "--quick", "chains": "--quick", "mmd": "--features 500", "vi": "--repeats 3",
    "samplers": "--repeats 3", "callbacks": "--repeats 11 --batch 8",
}  # fmt: skip


def command(name, options):
    """What a step runs, after Python."""
    words = STEPS[name][0].split()
    if name == "tests":
        return words
    words += ["--device", options.device, *(QUICK[name].split() if options.quick else ())]
    return [str(SCRIPTS / words[0]), *words[1:], "--record", str(_file(options.out, name))]


def run(name, options):
    """Whether a step has ended well, within its time."""
    environment = dict(os.environ)
    if options.device != "cpu":
        environment["LIGHTNING_BNN_DEVICE"] = options.device
    environment |= {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path[1:]])}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TORCH_LOGS": "-all"}
    started = time.monotonic()
    print(f"\n== {name}", flush=True)
    try:
        ended = subprocess.run(
            [sys.executable, *command(name, options)], env=environment, timeout=STEPS[name][1]
        )
    except subprocess.TimeoutExpired:
        print(f"{name} is stopped after {STEPS[name][1]} s")
        return False
    print(f"== {name}: {time.monotonic() - started:.0f} s, ended with {ended.returncode}")
    return ended.returncode == 0


def _file(folder, name):
    return folder / f"gpu_{name}.json"


def main():
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    made.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    made.add_argument("--only", nargs="+", default=[], choices=STEPS, metavar="STEP")
    made.add_argument("--quick", action="store_true", help="small problems")
    made.add_argument("--pages", action="store_true", help="put what is measured on the pages")
    options = made.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in options.only or STEPS if not run(name, options)]
    if options.pages:
        for name in STEPS:
            if name not in failed and _file(options.out, name).is_file():
                shutil.copy(_file(options.out, name), FILES)
        fill_pages()
    if failed:
        raise SystemExit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
