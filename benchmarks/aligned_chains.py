"""Networks of HMC chains as one Gaussian, by how they were brought into one frame.

    lightning-bnn compact --seed 0 --out compact/0
    python benchmarks/aligned_chains.py compact/0

It reads the chains that `lightning-bnn compact` has sampled, and prints the accuracy of 100 draws
(in the mean of twenty such sets), that of the mean network, and the sum of variances: means over
seeds with Student's 95 % intervals.
"""

import argparse
import warnings
from pathlib import Path

import torch

from lightning_bnn.comparison.tables import interval
from lightning_bnn.posteriors import DiagonalGaussian
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.studies.compact import SCALES, CompactStudy, posterior_of
from lightning_bnn.studies.runs import Job, reseeded, run_jobs

SETS = {
    "one chain, 5": slice(0, 100, 20),
    "one chain, 20": slice(0, 100, 5),
    "four chains, 20": slice(0, 400, 20),
    "four chains, 100": slice(0, 400, 4),
    "four chains, 400": slice(0, 400),
}
DRAWN = 20
"""Sets of draws: the accuracy of one set varies by three to six points."""
WAYS = (None, "weights", "activations", "joint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders", type=Path, nargs="+", help="results, one folder per seed 0, 1, ..."
    )
    folders = parser.parse_args().folders
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: dict[tuple[str, str], list[torch.Tensor]] = {}
    for seed, folder in enumerate(folders):
        settings = SCALES["small"]
        change = {"model.init_args.network.init_args.hidden": [settings.hidden]}
        job = reseeded(Job("HMC", settings.presets["HMC"], change), seed)
        run = run_jobs([job], folder / "runs")["HMC"]
        study = CompactStudy(run.problem(), settings.batches, 100, seed)
        networks = posterior_of("HMC", run.module()).networks()
        for name, chosen in SETS.items():
            some = {n: t[chosen] for n, t in networks.items()}
            for way in WAYS:
                numbers = judged(study, some, way, seed)
                rows.setdefault((name, way or "as they are"), []).append(torch.tensor(numbers))
    print(f"{'networks':<18}{'matched by':<14}{'draws %':>14}{'mean %':>14}{'variance':>14}")
    for (name, way), found in rows.items():
        values = torch.stack(found)
        cells = (f"{v:.1f} ± {half:.1f}" for v, half in map(interval, values.T))
        print(f"{name:<18}{way:<14}" + "".join(f"{c:>14}" for c in cells))


def judged(study: CompactStudy, networks, way, seed: int) -> list[float]:
    """Accuracy of draws and of the mean, and the sum of variances."""
    matching = dict(study.matching) if way == "activations" else {}
    matching |= {"symmetries": study.matching["symmetries"]} if way else {}
    gaussian = DiagonalGaussian.fit(networks, align=way, **matching)
    accuracies = []
    for k in range(DRAWN):
        with torch.no_grad():
            drawn = gaussian.sample(study.draws, keyed_generator(seed, "draws", k))
        accuracies.append(study.accuracy(drawn))
    variance = float((2 * gaussian.log_std.detach()).exp().sum())
    return [sum(accuracies) / DRAWN, study.accuracy(gaussian.centre), variance]


if __name__ == "__main__":
    main()
