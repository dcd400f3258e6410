"""Everything that is tried and timed on a device: `make gpu`.

python benchmarks/gpu.py --out FOLDER [--device cuda] [--only tests populations ...] [--quick]

Each step is a process with a limit of its own and writes its files at once, so that what ends it
costs nothing else. Tests and the compilers of the populations run side by side; what is timed takes
turns after them, but not with `--quick`, which is for mistakes.
"""

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from record import write
from tables import FILES, fill_pages

SCRIPTS = Path(__file__).parent
PYTEST = "-m pytest -m e2e -q --tb=short -p no:cacheprovider tests/test_another_device.py"
PYTEST += " tests/fast/test_graphs.py"
STEPS = {
    "tests": (PYTEST, 120),
    **{f"populations{k}": (f"gpu_populations.py --case {k}", 150) for k in (1, 2, 0)},
    "callbacks": ("callbacks.py steps", 40),
    "vi": ("vi.py steps", 40),
    "samplers": ("samplers.py steps", 40),
    "mmd": ("metrics.py mmd --rows 200 --others 50 --repeats 3", 40),
}
"""What each step runs, and for how many seconds at most."""
FIRST = ("tests", "populations1", "populations2", "populations0")
"""Steps during which nothing is timed, or not until they are prepared."""
SHORT = "--sizes 1 100 10000 100000 --repeats 2"
"""Of populations, for a machine that is there for minutes."""
QUICK = {
    "mmd": "--features 500", "vi": "--repeats 3", "samplers": "--repeats 3",
    "callbacks": "--repeats 11 --batch 8",
}  # fmt: skip
HAVE_QUICK = ("gpu_populations.py",)


@dataclass
class Step:
    """A process, what it prints, and how it has ended."""

    name: str
    options: argparse.Namespace
    process: subprocess.Popen = field(init=False)
    started: float = field(init=False)

    @property
    def log(self):
        return self.options.out / "logs" / f"{self.name}.log"

    def command(self):
        words, options = STEPS[self.name][0].split(), self.options
        if self.name == "tests":
            return [*words, "-n", str(options.workers)] if options.workers else words
        words += ["--device", options.device]
        if options.quick:
            words += ["--quick"] * (words[0] in HAVE_QUICK) + QUICK.get(self.name, "").split()
        elif options.short and "populations" in self.name:
            words += SHORT.split()
        words += ["--record", str(options.out / f"gpu_{self.name}.json")]
        return [str(SCRIPTS / words[0]), *words[1:]]

    def start(self):
        environment = dict(os.environ)
        if self.options.device != "cpu":
            environment["LIGHTNING_BNN_DEVICE"] = self.options.device
        environment |= {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path[1:]])}
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TORCH_LOGS": "-all"}
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(self.options.cache / "jax")}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(self.options.cache / "torch")}
        turn = (self.options.out / "turn.lock").open("a")
        if self.name in FIRST:
            fcntl.flock(turn, fcntl.LOCK_SH)  # until it ends, or has its turn
        if self.name != "tests" and not self.options.quick:
            environment["BENCHMARK_TURN"] = str(turn.fileno())
            environment["BENCHMARK_LIMIT"] = str(STEPS[self.name][1])
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.command()], env=environment, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[turn.fileno()],
            )  # fmt: skip
        turn.close()
        self.started = time.monotonic()
        time.sleep(0.5)  # so that turns are taken in order, mostly
        return self

    def wait(self):
        """Whether it has ended well, within its time, which begins with its turn."""
        while (code := self.process.poll()) is None:
            if time.monotonic() > self.options.end:
                os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(2)
        print(f"\n== {self.name}: {time.monotonic() - self.started:.0f} s, ended with {code}")
        print("\n".join(self.lines(60 if self.name == "tests" else 400)), flush=True)
        return code == 0

    def lines(self, last):
        return self.log.read_text(errors="replace").splitlines()[-last:]


def main():
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    options.end = time.monotonic() + options.seconds
    names = options.only or [*STEPS]
    first = [n for n in names if options.quick or n in FIRST]
    failed = []
    for group in (first, [n for n in names if n not in first]):
        started = [Step(name, options).start() for name in group]
        failed += [step for step in started if not step.wait()]
    for step in failed:
        print(f"\n-- failed: {step.name}\n" + "\n".join(step.lines(12)))
    print(f"\n{len(names) - len(failed)} of {len(names)} steps ended well", flush=True)
    if options.pages:
        to_pages(options.out)
    raise SystemExit(bool(failed))


def to_pages(folder):
    """Put the files of a run where the pages take them from, those of the populations as one."""
    contents = {file.stem: json.loads(file.read_text()) for file in folder.glob("gpu_*.json")}
    parts = [contents.pop(name) for name in sorted(contents) if "populations" in name]
    if parts:
        rows = [row for part in parts for row in part["rows"]]
        command = re.sub(r" --case \d", "", parts[0]["command"])
        contents["gpu_populations"] = {**parts[0], "command": command, "rows": rows}
    for name, content in contents.items():
        write(FILES / f"{name}.json", content)
    fill_pages()


def _options():
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    made.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    made.add_argument("--only", nargs="+", default=[], choices=STEPS, metavar="STEP")
    made.add_argument("--quick", action="store_true", help="small problems, side by side")
    made.add_argument("--short", action="store_true", help="populations of fewer sizes")
    made.add_argument("--pages", action="store_true", help="put what is measured on the pages")
    made.add_argument("--seconds", type=int, default=540, help="of all steps, at most")
    made.add_argument("--workers", type=int, default=0, help="processes of the tests")
    made.add_argument("--cache", type=Path, default=Path("/tmp/gpu-cache"), help="of compilers")
    return made.parse_args()


if __name__ == "__main__":
    main()
