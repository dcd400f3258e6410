"""One computation with an earlier version of the package and with this one, in one process.

python benchmarks/before_after.py REVISION [--rounds 7] [--only "min_mass eval" ...]

Both versions are imported beside each other, take turns, and run on one thread. Printed are
milliseconds of CPU time (medians over rounds) and the median of the ratios of neighbouring runs,
with their quartiles.
"""

import argparse
import importlib
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PACKAGE = "lightning_bnn"


class Version:
    """The package as it lies in a folder; other versions can be imported beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.modules = str(folder), {}

    def __enter__(self) -> None:
        forget()
        sys.path.insert(0, self.folder)
        sys.modules.update(self.modules)
        importlib.import_module(PACKAGE)

    def __exit__(self, *_: object) -> None:
        self.modules = forget()
        sys.path.remove(self.folder)


def forget() -> dict:
    """Take the modules of the package out of those that are known."""
    names = [n for n in sys.modules if n.split(".")[0] == PACKAGE]
    return {n: sys.modules.pop(n) for n in names}


# ------------------------------------------------------------ what is timed
def minimiser(batch_norm):
    import torchvision

    from lightning_bnn import params as P
    from lightning_bnn.symmetry import discover, min_mass

    torch.manual_seed(0)
    network = torchvision.models.resnet18()
    sym = discover(network, torch.randn(1, 3, 64, 64), batch_norm=batch_norm)
    weights = P.of(network)
    return lambda: min_mass(weights, sym)


def variational(kind, log_std=-5.0, **options):
    """A training step of a perceptron 784-512-512-10 with Adam."""
    from lightning_bnn import models, modules

    torch.manual_seed(0)
    network = models.mlp(784, [512, 512], 10)
    x, y = torch.randn(128, 784), torch.randint(10, (128,))
    module = getattr(modules, kind)(network, num_data=60_000, **options)
    module.example_input_array = x[:2]
    with torch.no_grad():
        module.log_std.fill_(log_std)
    return stepper(module.parameters(), lambda: module.losses((x,), y)["loss"].sum())


def stepper(parameters, loss):
    optimizer = torch.optim.Adam(parameters, 1e-3)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


CASES = {
    "min_mass carrier": lambda: minimiser("carrier"),
    "min_mass eval": lambda: minimiser("eval"),
    "MFVI": lambda: variational("MFVI"),
    "SymmetrizedVI": lambda: variational("SymmetrizedVI"),
    "SymmetrizedVI, all units alike": lambda: variational("SymmetrizedVI", 0.0),
}


# ------------------------------------------------------------ the run
def timed(version, function):
    with version:
        start = time.process_time()
        function()
        return time.process_time() - start


def in_one_order(versions, functions, backwards):
    """Times of all versions; the order changes from round to round."""
    found = [0.0] * len(versions)
    for k in reversed(range(len(versions))) if backwards else range(len(versions)):
        found[k] = timed(versions[k], functions[k])
    return found


def compare(name, versions, rounds):
    """Print one line."""
    functions = []
    for version in versions:
        with version:
            functions.append(CASES[name]())
    pairs = [in_one_order(versions, functions, k % 2 == 1) for k in range(rounds + 2)][2:]
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    before, after = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    spread = f"{middle:.2f} ({low:.2f}-{high:.2f})"
    print(f"{name:34} {before:8.1f} {after:8.1f}   {spread}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="of this repository, to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=CASES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        call = ["git", "-C", str(ROOT), "archive", options.revision, PACKAGE]
        archive = subprocess.run(call, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        versions = [Version(Path(folder)), Version(ROOT)]
        print(f"{'milliseconds of CPU time':34} {'before':>8} {'after':>8}   after / before")
        for name in options.only or CASES:
            compare(name, versions, options.rounds)


if __name__ == "__main__":
    main()
