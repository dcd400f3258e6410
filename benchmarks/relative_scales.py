"""Whether scales of their own bring networks closer to their mean than those of least mass.

    lightning-bnn compact --seed 0 --out compact/0
    python benchmarks/relative_scales.py compact/0

Every unit of every network gets a positive scale; those of one unit have the product one over all
networks, as the distance would fall by scales that all networks share. L-BFGS minimises the squared
distance to the mean for the permutations that `align` has found. Printed are that distance before
and after, and the accuracy of 100 draws of the Gaussian with these means and deviations.
"""

import argparse
import warnings
from pathlib import Path

import torch
from torch import Tensor

from lightning_bnn.params import Params, stack_size
from lightning_bnn.posteriors import DiagonalGaussian
from lightning_bnn.studies.compact import SCALES, CompactStudy, posterior_of
from lightning_bnn.studies.runs import Job, reseeded, run_jobs
from lightning_bnn.symmetry import Symmetries, align
from lightning_bnn.symmetry.actions import multiply
from lightning_bnn.symmetry.matching.plan import Plan

SETS = {
    ("Ensemble", "10 networks"): slice(None),
    ("HMC", "20 networks"): slice(0, 400, 20),
    ("HMC", "100 networks"): slice(0, 400, 4),
}


def closest(stack: Params, sym: Symmetries) -> tuple[Params, float, float]:
    """A stack in one frame after the best relative scales; distances to the mean."""
    exact, members = {n: t.double() for n, t in stack.items()}, stack_size(stack)
    free = [torch.zeros(members, g.units, dtype=torch.float64) for g in sym.scalings]
    for logs in free:
        logs.requires_grad_()

    def scaled() -> Params:
        return multiply(exact, sym, {"scalings": [(t - t.mean(0)).exp() for t in free]})

    def distance() -> Tensor:
        moved = scaled()
        rows = (moved[n] for n in Plan(sym).compared)
        return sum((t - t.mean(0)).square().sum() for t in rows)

    def slope() -> Tensor:
        optimizer.zero_grad()
        value = distance()
        value.backward()
        return value

    options = {"max_iter": 200, "history_size": 20, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(free, tolerance_grad=1e-8, tolerance_change=1e-12, **options)
    before = float(distance().detach())
    optimizer.step(slope)
    with torch.no_grad():
        best = {n: t.to(stack[n]) for n, t in scaled().items()}
        return best, before, float(distance())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="one per seed 0, 1, ...")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    settings = SCALES["small"]
    print("seed networks              first     distance to the mean    draws before, after %")
    for seed, folder in enumerate(parser.parse_args().folders):
        for (name, size), chosen in SETS.items():
            change = {"model.init_args.network.init_args.hidden": [settings.hidden]}
            job = reseeded(Job(name, settings.presets[name], change), seed)
            run = run_jobs([job], folder / "runs")[name]
            study = CompactStudy(run.problem(), settings.batches, 100, seed)
            sym = study.matching["symmetries"]
            whole = posterior_of(name, run.module()).networks()
            stack = {n: t[chosen] for n, t in whole.items()}
            for scales in (None, "min-mass"):
                moved = align(stack, sym, scales=scales).apply(stack, sym)
                best, before, after = closest(moved, sym)
                draws = [_of_draws(study, networks, seed) for networks in (moved, best)]
                text = f"{before:.1f} -> {after:.1f} ({100 * (after / before - 1):.2f} %)"
                print(
                    f"{seed:<5}{name + ', ' + size:<22}{scales or 'none':<10}{text:<32}"
                    f"{draws[0]:.1f} {draws[1]:.1f}",
                    flush=True,
                )


def _of_draws(study: CompactStudy, networks: Params, seed: int) -> float:
    gaussian = DiagonalGaussian.fit(networks)
    with torch.no_grad():
        return study.accuracy(gaussian.sample(100, torch.Generator().manual_seed(seed)))


if __name__ == "__main__":
    main()
