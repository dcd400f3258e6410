"""Training with every kind of module, before and after a change, in turns.

python benchmarks/revisions.py --before REVISION [--rounds 7] [--only mfvi swag]

Both versions run in a process of their own, on one thread, and take turns; every round trains the
same module anew for the same number of steps. Printed are milliseconds of CPU time of a step
(medians over rounds) and the median of the ratios of the rounds, with their quartiles.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = 60


def worker(tree: Path) -> None:
    """Time what is asked for on standard input, one line each."""
    sys.path[:0] = [str(tree), str(tree / "tests")]
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr = io.StringIO()
    warnings.simplefilter("ignore")
    import torch
    from module_cases import MODULES, Blobs, made, trainer

    torch.set_num_threads(1)
    print(json.dumps(list(MODULES)), file=answers, flush=True)
    for line in sys.stdin:
        name, data = line.strip(), Blobs(n=200, batch_size=10)
        module = made(name, width=32)
        run = trainer(max_epochs=STEPS // 20, limit_val_batches=0, num_sanity_val_steps=0)
        start = time.process_time()
        with contextlib.redirect_stderr(io.StringIO()):
            run.fit(module, data)
        print((time.process_time() - start) / STEPS, file=answers, flush=True)


class Version:
    """A process that trains with one version of the package."""

    def __init__(self, tree: Path) -> None:
        call = [sys.executable, __file__, "--worker", str(tree)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
        self.process = subprocess.Popen(
            call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=environment, cwd=tree,
        )  # fmt: skip
        self.names = json.loads(self.process.stdout.readline())

    def seconds(self, name: str) -> float:
        """CPU time of a training step."""
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="a revision of this repository")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="kinds of modules, see tests/module_cases.py")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        call = ["git", "-C", str(ROOT), "archive", options.before]
        archive = subprocess.run(call, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        before, after = Version(Path(folder)), Version(ROOT)
        print(f"{'one step, CPU time':20} {'before':>8} {'after':>8}   after / before")
        for name in options.only or [n for n in after.names if n in before.names]:
            for version in (before, after):
                version.seconds(name)
            pairs = [(before.seconds(name), after.seconds(name)) for _ in range(options.rounds)]
            ratios = [b / a for a, b in pairs]
            low, middle, high = statistics.quantiles(ratios, n=4)
            times = [1e3 * statistics.median(column) for column in zip(*pairs, strict=True)]
            spread = f"{middle:.2f} ({low:.2f}-{high:.2f})"
            print(f"{name:20} {times[0]:6.2f}ms {times[1]:6.2f}ms   {spread}", flush=True)


if __name__ == "__main__":
    main()
