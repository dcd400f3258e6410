"""Metrics side by side with peers, interleaved in one run; prints ratios.

    python benchmarks/metrics.py mmd        1000 against 100 networks, 20 000 weights
    python benchmarks/metrics.py layout     the three largest layers of 1100 ResNet-18
    python benchmarks/metrics.py layout --device cuda --whole
    python benchmarks/metrics.py batches    cost per test batch

Peers that are not installed are left out: torchdrift, torch-uncertainty.
"""

import argparse
import functools
import importlib.util
import math
import resource
import statistics
import time
import warnings

import numpy as np
import torch
from scipy.spatial.distance import cdist, pdist
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassCalibrationError,
)

from lightning_bnn import metrics as M
from lightning_bnn import models

warnings.filterwarnings("ignore")


def seconds(function, device="cpu"):
    synchronise(device)
    start = time.perf_counter()
    result = function()
    synchronise(device)
    return time.perf_counter() - start, result


def synchronise(device):
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(contestants, repeats, device="cpu"):
    """Median seconds of every contestant; all run in every round."""
    times = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, function in contestants.items():
            times[name].append(seconds(function, device)[0])
    return {name: statistics.median(t) for name, t in times.items()}


def report(times, ours):
    for name, t in times.items():
        print(f"  {name:<52}{t * 1e3:>12.3f} ms{t / times[ours]:>9.2f} x")


# ------------------------------------------------------------ MMD
def scipy_and_numpy(x, y):
    """Distances once, then twenty kernels; the fastest that scipy alone can do."""
    values = []
    for norm, power in (("cityblock", 1), ("euclidean", 2)):
        xx, xy, yy = pdist(x, norm), cdist(x, y, norm), pdist(y, norm)
        part = torch.from_numpy(xy)
        for width in M.KernelGrid().bandwidths(part).numpy():
            k = [np.exp(-((d / width) ** power)).mean() for d in (xx, xy, yy)]
            values.append(k[0] + k[2] - 2 * k[1])
    return np.array(values)


def torchdrift_calls(x, y, widths):
    from torchdrift.detectors.mmd import ExpKernel, GaussianKernel, kernel_mmd

    kernels = [ExpKernel(w) for w in widths[:10]]  # of the L2 norm, it has no other
    kernels += [GaussianKernel(w / math.sqrt(2)) for w in widths[10:]]
    return [kernel_mmd(x, y, None, k) for k in kernels]


def mmd(options):
    m, n, d = options.rows, options.others, options.features
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(m, d, generator=g), 1.05 * torch.randn(n, d, generator=g)
    print(f"MMD of {m} x {n} x {d}, 20 kernels, {torch.get_num_threads()} threads")
    device = options.device
    stacks = {"w": x.to(device)}, {"w": y.to(device)}
    first, table = seconds(lambda: M.mmd_table(*stacks), device)
    reference = M.MMDReference(stacks[0])
    rows = list(reference.compare(stacks[1]))
    widths = rows[0].bandwidths.tolist()
    contestants = {
        "lightning_bnn": lambda: M.mmd_table(*stacks),
        "lightning_bnn, one more method (reference cached)": lambda: M.mmd_table(
            reference, stacks[1]
        ),
        "scipy distances once, numpy kernels (float64)": lambda: scipy_and_numpy(
            x.double().numpy(), y.double().numpy()
        ),
    }
    if importlib.util.find_spec("torchdrift"):
        contestants["torchdrift, 20 calls"] = lambda: torchdrift_calls(*stacks_of(stacks), widths)
    times = interleaved(contestants, options.repeats, device)
    report(times, "lightning_bnn")
    exact = torch.from_numpy(scipy_and_numpy(x.double().numpy(), y.double().numpy()))
    error = (table.values[0] - exact).abs().max()
    print(f"  first call, with compilation: {first:.2f} s")
    print(f"  largest error against float64: {error / exact.abs().max():.1e} of the largest value")


def stacks_of(stacks):
    return [next(iter(s.values())) for s in stacks]


# ------------------------------------------------------------ a layout of millions
class Generated:
    """Networks that are drawn when they are read; what that takes is measured apart."""

    def __init__(self, rows, shapes, device, seed):
        self.rows, self.shapes, self.device, self.seed = rows, shapes, device, seed
        self.seconds = 0.0

    def read(self, name, rows, columns):
        """The same columns are always the same numbers."""
        synchronise(self.device)
        start = time.perf_counter()
        g = torch.Generator(self.device).manual_seed(self.seed + columns.start)
        values = torch.randn(
            self.rows, columns.stop - columns.start, generator=g, device=self.device
        )
        synchronise(self.device)
        self.seconds += time.perf_counter() - start
        return values[rows]


def layout(options):
    network = models.resnet18(100)
    shapes = {k: p.shape for k, p in network.named_parameters()}
    total = sum(s.numel() for s in shapes.values())
    chosen = sorted(shapes, key=lambda k: -shapes[k].numel())
    chosen = chosen if options.whole else chosen[:3]
    shapes = {k: shapes[k] for k in chosen}
    weights = sum(s.numel() for s in shapes.values())
    x = Generated(1000, shapes, options.device, 0)
    y = Generated(100, shapes, options.device, 10**9)
    warm = {"w": torch.randn(200, 2**20 if options.device == "cuda" else 2**18).to(options.device)}
    M.mmd_table(warm, warm)  # compiles
    reference = M.MMDReference(x, progress=True)
    took, _ = seconds(lambda: list(reference.compare(y)), options.device)
    took -= x.seconds + y.seconds
    print(
        f"ResNet-18, 1000 against 100 networks: {len(shapes)} layers, {weights} of {total} weights"
    )
    print(f"  compute {took:.1f} s ({x.seconds + y.seconds:.1f} s of drawing weights apart)")
    print(f"  all layers: {took * total / weights:.1f} s" + ("" if options.whole else " (scaled)"))
    x.seconds = y.seconds = 0.0
    took, _ = seconds(lambda: list(reference.compare(y)), options.device)
    took -= x.seconds + y.seconds
    print(f"  one more method: {took * total / weights:.1f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  peak memory of the process: {peak:.2f} GiB")
    if options.device == "cuda":
        print(f"  peak memory of the GPU: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


# ------------------------------------------------------------ per batch
def run(metric, batches):
    for batch in batches:
        metric.update(*batch)
    value = metric.compute()
    metric.reset()
    return value


def peers():
    if importlib.util.find_spec("torch_uncertainty"):
        from torch_uncertainty.metrics import (
            FPR95,
            AdaptiveCalibrationError,
            BrierScore,
            CalibrationError,
        )

        return FPR95, AdaptiveCalibrationError, BrierScore, CalibrationError
    return None


def batches(options):
    g = torch.Generator().manual_seed(0)
    theirs = peers()
    for size, classes in ((128, 10), (512, 100), (512, 1000)):
        data = [
            (
                (3 * torch.randn(size, classes, generator=g)).softmax(-1).to(options.device),
                torch.randint(classes, (size,), generator=g).to(options.device),
            )
            for _ in range(40)
        ]
        scores = [(p.amax(-1), torch.rand(size).to(options.device) < 0.3) for p, _ in data]
        print(f"40 batches of {size} x {classes}, update and compute")
        compare_on(data, scores, classes, theirs, options)


def compare_on(data, scores, classes, theirs, options):
    integers = [(s, o.long()) for s, o in scores]
    rows = {
        "ECE": [
            ("lightning_bnn", M.ECE(), data),
            ("torchmetrics", MulticlassCalibrationError(classes, n_bins=15), data),
        ],
        "ACE": [("lightning_bnn", M.ACE(), data)],
        "Brier": [("lightning_bnn", M.BrierScore(), data)],
        "AUPR": [
            ("lightning_bnn", M.AUPR(), scores),
            ("torchmetrics", BinaryAveragePrecision(), integers),
        ],
        "AUROC": [
            ("lightning_bnn", M.AUROC(), scores),
            ("torchmetrics", BinaryAUROC(), integers),
        ],
        "FPR95": [("lightning_bnn", M.FPR95(), scores)],
    }
    if theirs:
        fpr, ace, brier, ece = theirs
        task = {"task": "multiclass", "num_classes": classes}
        rows["ECE"].append(("torch-uncertainty", ece(**task), data))
        rows["ACE"].append(("torch-uncertainty", ace(**task), data))
        rows["Brier"].append(("torch-uncertainty", brier(num_classes=classes), data))
        rows["FPR95"].append(("torch-uncertainty", fpr(pos_label=1), integers))
    for name, contestants in rows.items():
        functions = {
            f"{name} {who}": functools.partial(run, metric.to(options.device), values)
            for who, metric, values in contestants
        }
        report(interleaved(functions, options.repeats + 2, options.device), f"{name} lightning_bnn")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["mmd", "layout", "batches"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--others", type=int, default=100)
    parser.add_argument("--features", type=int, default=20_000)
    parser.add_argument("--whole", action="store_true", help="all layers, not the three largest")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"mmd": mmd, "layout": layout, "batches": batches}[options.part](options)


if __name__ == "__main__":
    main()
