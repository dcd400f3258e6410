"""One computation with an earlier version of the package and with this one, in one process.

python benchmarks/before_after.py REVISION [--threads 2] [--repeats 7] [--only "min_mass eval" ...]

Both versions are imported beside each other and take turns. Printed are medians of both (CPU time
on one thread, the clock on several) and the median of the ratios of neighbouring runs, with their
quartiles.
"""

import importlib
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path

import torch
from record import Record, parsed, parser
from torch import nn
from turns import WARM, Times

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
def resnet():
    """A network, and an image."""
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18(), torch.randn(1, 3, 64, 64)


def minimiser(batch_norm):
    from lightning_bnn import params as P
    from lightning_bnn.symmetry import discover, min_mass

    network, x = resnet()
    sym, weights = discover(network, x, batch_norm=batch_norm), P.of(network)
    return lambda: min_mass(weights, sym)


def discoverer():
    from lightning_bnn.symmetry import discover

    network, x = resnet()
    return lambda: discover(network, x)


def ensemble(network, members, *shape):
    """A training step of an ensemble with SGD, on a batch of 64."""
    from lightning_bnn.modules import DeepEnsemble

    torch.manual_seed(0)
    x, y = torch.randn(64, *shape), torch.randint(10, (64,))
    module = DeepEnsemble(network, members)
    return stepper(
        module.parameters(), lambda: module.losses((x,), y)["loss"].sum(), torch.optim.SGD
    )


def normed():
    """A small convolutional network with batch norms, for 28 pixels."""
    layers = []
    for a, b in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(400, 10))


def made(kind, *args):
    """A network of ours."""
    from lightning_bnn import models

    return getattr(models, kind)(*args)


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


def stepper(parameters, loss, kind=torch.optim.Adam):
    optimizer = kind(parameters, 1e-3)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


CASES = {
    "64 OptuNets": lambda: ensemble(made("optunet"), 64, 1, 28, 28),
    "64 MLPs 64-32-10": lambda: ensemble(made("mlp", 64, [32], 10), 64, 64),
    "4 MLPs 784-509-509-10": lambda: ensemble(made("mlp", 784, [509, 509], 10), 4, 784),
    "5 CNNs with batch norms": lambda: ensemble(normed(), 5, 1, 28, 28),
    "discover": discoverer,
    "min_mass carrier": lambda: minimiser("carrier"),
    "min_mass eval": lambda: minimiser("eval"),
    "MFVI": lambda: variational("MFVI"),
    "SymmetrizedVI": lambda: variational("SymmetrizedVI"),
    "SymmetrizedVI, all units alike": lambda: variational("SymmetrizedVI", 0.0),
}


# ------------------------------------------------------------ the run
def in_turns(name, versions, rounds, threads):
    """Times of both versions, whose order changes from round to round."""
    functions = {}
    for who, version in versions.items():
        with version:
            functions[who] = CASES[name]()
    found = {who: Times(threads) for who in versions}
    for k in range(rounds + WARM):
        for who in (*versions,) if k % 2 else reversed(versions):
            with versions[who]:
                found[who].add(functions[who])
    return {who: times.after(WARM) for who, times in found.items()}


def main() -> None:
    """Print the table."""
    made_parser = parser(__doc__, repeats=7)
    made_parser.add_argument("revision", help="of this repository, to compare with")
    made_parser.add_argument("--only", nargs="*", choices=CASES)
    options = parsed(made_parser)
    warnings.simplefilter("ignore")
    record = Record(options)
    with tempfile.TemporaryDirectory() as folder:
        call = ["git", "-C", str(ROOT), "archive", options.revision, PACKAGE]
        archive = subprocess.run(call, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        versions = {"before": Version(Path(folder)), "after": Version(ROOT)}
        for name in options.only or CASES:
            found = in_turns(name, versions, options.repeats, options.threads)
            record.times(found, case=name)
            pairs = zip(found["before"].rounds, found["after"].rounds, strict=True)
            low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
            record.value("ratio", f"{middle:.2f} ({low:.2f} to {high:.2f})", case=name)
    record.write()


if __name__ == "__main__":
    main()
