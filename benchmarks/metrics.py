"""Metrics side by side with peers, interleaved in one run; prints ratios.

    python benchmarks/metrics.py mmd        1000 against 100 networks, 20 000 weights
    python benchmarks/metrics.py batches    cost per test batch

Peers that are not installed are left out: torchdrift, torch-uncertainty.
"""

import functools
import importlib.util
import math
import warnings

import numpy as np
import torch
from record import Record, parsed, parser
from scipy.spatial.distance import cdist, pdist
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassCalibrationError,
)
from turns import taking_turns, timed

from lightning_bnn import metrics as M

warnings.filterwarnings("ignore")


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


def mmd(options, record):
    m, n, d = options.rows, options.others, options.features
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(m, d, generator=g), 1.05 * torch.randn(n, d, generator=g)
    device = options.device
    stacks = {"w": x.to(device)}, {"w": y.to(device)}
    first, table = timed(lambda: M.mmd_table(*stacks), device)
    reference = M.MMDReference(stacks[0])
    widths = list(reference.compare(stacks[1]))[0].bandwidths.tolist()
    doubles = x.double().numpy(), y.double().numpy()
    contestants = {
        "mmd_table": lambda: M.mmd_table(*stacks),
        "one more method": lambda: M.mmd_table(reference, stacks[1]),
        "scipy": lambda: scipy_and_numpy(*doubles),
    }
    if importlib.util.find_spec("torchdrift"):
        contestants["torchdrift"] = lambda: torchdrift_calls(*stacks_of(stacks), widths)
    record.times(taking_turns(contestants, options.repeats, device, warm=1))
    record.times({"first call": first})
    exact = torch.from_numpy(scipy_and_numpy(*doubles))
    error = (table.values[0] - exact).abs().max() / exact.abs().max()
    record.value("error", float(error))


def stacks_of(stacks):
    return [next(iter(s.values())) for s in stacks]


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


def batches(options, record):
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
        for name, contestants in rivals(data, scores, classes, theirs).items():
            functions = {
                who: functools.partial(run, metric.to(options.device), values)
                for who, (metric, values) in contestants.items()
            }
            found = taking_turns(functions, options.repeats, options.device)
            record.times(found, metric=name, batch=f"{size} x {classes}")


def rivals(data, scores, classes, theirs):
    """For every metric ours and those of others, each with what it is given."""
    integers = [(s, o.long()) for s, o in scores]
    rows = {
        "ECE": {
            "ours": (M.ECE(), data),
            "torchmetrics": (MulticlassCalibrationError(classes, n_bins=15), data),
        },
        "ACE": {"ours": (M.ACE(), data)},
        "Brier": {"ours": (M.BrierScore(), data)},
        "AUPR": {"ours": (M.AUPR(), scores), "torchmetrics": (BinaryAveragePrecision(), integers)},
        "AUROC": {"ours": (M.AUROC(), scores), "torchmetrics": (BinaryAUROC(), integers)},
        "FPR95": {"ours": (M.FPR95(), scores)},
    }
    if theirs:
        fpr, ace, brier, ece = theirs
        task = {"task": "multiclass", "num_classes": classes}
        rows["ECE"]["torch-uncertainty"] = ece(**task), data
        rows["ACE"]["torch-uncertainty"] = ace(**task), data
        rows["Brier"]["torch-uncertainty"] = brier(num_classes=classes), data
        rows["FPR95"]["torch-uncertainty"] = fpr(pos_label=1), integers
    return rows


def main():
    made = parser(__doc__, ("mmd", "batches"))
    made.add_argument("--rows", type=int, default=1000)
    made.add_argument("--others", type=int, default=100)
    made.add_argument("--features", type=int, default=20_000)
    options = parsed(made)
    record = Record(options)
    {"mmd": mmd, "batches": batches}[options.part](options, record)
    record.write()


if __name__ == "__main__":
    main()
