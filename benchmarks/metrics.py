"""The MMD of 1000 against 100 networks of 20 000 weights beside scipy and torchdrift.

python benchmarks/metrics.py mmd
"""

import importlib.util
import math
import warnings

import numpy as np
import torch
from record import Record, parsed, parser
from scipy.spatial.distance import cdist, pdist
from turns import taking_turns

from lightning_bnn import metrics as M
from lightning_bnn.metrics.kernels import kernel_bandwidths

warnings.filterwarnings("ignore")


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


def torch_and_cdist(x, y):
    """What one would write in torch: distances by `cdist`, and every kernel from them."""
    values = []
    for power in (1, 2):
        xx, xy, yy = (torch.cdist(a, b, p=power) for a, b in ((x, x), (x, y), (y, y)))
        for width in M.KernelGrid().bandwidths(xy):
            k = [(-((d / width) ** power)).exp() for d in (xx, xy, yy)]
            own = [(s.sum() - s.trace()) / (len(s) * (len(s) - 1)) for s in (k[0], k[2])]
            values.append(own[0] + own[1] - 2 * k[1].mean())
    return torch.stack(values)


def mmd(options, record):
    m, n, d = options.rows, options.others, options.features
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(m, d, generator=g), 1.05 * torch.randn(n, d, generator=g)
    device = options.device
    stacks = {"w": x.to(device)}, {"w": y.to(device)}
    table = M.mmd_table(*stacks)
    reference = M.MMDReference(stacks[0])
    across = reference.blocks("w", reference.other(stacks[1])).xy
    widths = kernel_bandwidths(across, reference.grid).tolist()
    doubles = x.double().numpy(), y.double().numpy()
    contestants = {
        "mmd_table": lambda: M.mmd_table(*stacks),
        "one more method": lambda: M.mmd_table(reference, stacks[1]),
        "torch.cdist": lambda: torch_and_cdist(x.to(device), y.to(device)),
        "scipy": lambda: scipy_and_numpy(*doubles),
    }
    if importlib.util.find_spec("torchdrift"):
        contestants["torchdrift"] = lambda: torchdrift_calls(x.to(device), y.to(device), widths)
    record.times(taking_turns(contestants, options.repeats, device, warm=1))
    exact = torch.from_numpy(scipy_and_numpy(*doubles))
    error = (table.values[0] - exact).abs().max() / exact.abs().max()
    record.value("error", float(error))


def main():
    made = parser(__doc__, ("mmd",))
    made.add_argument("--rows", type=int, default=1000)
    made.add_argument("--others", type=int, default=100)
    made.add_argument("--features", type=int, default=20_000)
    options = parsed(made)
    record = Record(options)
    mmd(options, record)
    record.write()


if __name__ == "__main__":
    main()
