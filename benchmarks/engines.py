"""Both engines of discovery side by side: groups found, CPU seconds, and what differs.

    python benchmarks/engines.py              the networks of tests/cases.py
    python benchmarks/engines.py --large      those of torchvision, too

A row says `same`, or names what the engine of dimensional analysis finds otherwise; the last column
is the relative error of the outputs under a random element of the group that it finds.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import cases  # noqa: E402

from lightning_bnn import params  # noqa: E402
from lightning_bnn.symmetry import discover  # noqa: E402
from lightning_bnn.symmetry.dimensions.elements import exchanged, flipped, rescaled  # noqa: E402
from lightning_bnn.symmetry.dimensions.engine import read  # noqa: E402


def numbers_of_discover(symmetries):
    kinds = {}
    for group in symmetries.linear:
        kinds[group.kind, group.size] = kinds.get((group.kind, group.size), 0) + group.spaces
    return {
        "log10": round(symmetries.log10_permutations, 3),
        "scales": symmetries.scaling_dof,
        "signs": symmetries.sign_dof,
        "matrices": kinds,
    }


def numbers_of_dimensions(found):
    return {
        "log10": round(found.log10_permutations, 3),
        "scales": found.scaling_dof,
        "signs": found.sign_dof,
        "matrices": {(m.kind, m.size): m.groups for m in found.linear},
    }


def error(model, x, found):
    """Relative error of the outputs under a random element of everything that was found."""
    generator = torch.Generator().manual_seed(0)
    count = found.reading.system.count
    weights = params.of(model)
    before = params.apply(model, weights, x)
    scales = 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)
    moved = flipped(rescaled(weights, found, scales), found, scales > 0)
    for group in found.exchanges.groups:
        moved = exchanged(moved, found, group, 0, len(group.units) - 1)
    return float((params.apply(model, moved, x) - before).abs().max() / before.abs().max())


def timed(function, *args):
    start = time.process_time()
    result = function(*args)
    return result, time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--large", action="store_true", help="networks of torchvision, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    large = cases.LARGE_CASES if options.large else []
    print(f"{'network':18} {'rules, s':>9} {'dimensions, s':>14} {'error':>8}  difference")
    for case in [*cases.CASES, *large]:
        model, x = case.make()
        symmetries, theirs = timed(discover, model, x)
        (found, ours), seconds = timed(
            lambda m, x: (f := read(m, x), numbers_of_dimensions(f)), model, x
        )
        old = numbers_of_discover(symmetries)
        differs = [f"{k} {ours[k]} for {old[k]}" for k in old if ours[k] != old[k]]
        print(
            f"{case.name:18} {theirs:9.2f} {seconds:14.2f} {error(model, x, found):8.0e}  "
            f"{', '.join(differs) or 'same'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
