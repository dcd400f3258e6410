"""Networks of HMC chains as one Gaussian, by how they were brought into one frame.

    lightning-bnn compact --seed 0 --out compact/0
    python benchmarks/aligned_chains.py compact/0

It reads the chains that `lightning-bnn compact` has sampled, or samples them, and prints the
accuracy of 100 draws (in the mean of twenty such sets), that of the mean network, and the sum of
variances: means over seeds, each of them over disjoint sets of its networks, with Student's 95 %
intervals. With `--starts 8` it aligns one set of a hundred in eight orders instead.
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
    "one chain, 5": (100, 20),
    "one chain, 20": (100, 5),
    "four chains, 20": (400, 20),
    "four chains, 100": (400, 4),
    "four chains, 400": (400, 1),
}
"""How many networks, chain after chain, and every which of them are in a set."""
MOST = 4
"""Disjoint sets of a seed; each begins with another of the first networks."""
DRAWN = 20
"""Sets of draws: the accuracy of one set varies by three to six points."""
WAYS = (None, "weights", "activations", "joint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders", type=Path, nargs="+", help="results, one folder per seed 0, 1, ..."
    )
    parser.add_argument("--starts", type=int, default=0, help="orders of a set that are tried")
    arguments = parser.parse_args()
    folders = arguments.folders
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: dict[tuple[str, str], list[torch.Tensor]] = {}
    if arguments.starts:
        from_several_starts(*sampled(0, folders[0]), arguments.starts)
        return
    for seed, folder in enumerate(folders):
        study, networks = sampled(seed, folder)
        for name, (count, every) in SETS.items():
            sets = [slice(first, count, every) for first in range(min(every, MOST))]
            for way in WAYS:
                numbers = [
                    judged(study, {n: t[chosen] for n, t in networks.items()}, way, seed)
                    for chosen in sets
                ]
                rows.setdefault((name, way or "as they are"), []).append(
                    torch.tensor(numbers).mean(0)
                )
    print(f"{'networks':<18}{'matched by':<14}{'draws %':>14}{'mean %':>14}{'variance':>14}")
    for (name, way), found in rows.items():
        values = torch.stack(found)
        cells = (f"{v:.1f} ± {half:.1f}" for v, half in map(interval, values.T))
        print(f"{name:<18}{way:<14}" + "".join(f"{c:>14}" for c in cells))


def sampled(seed: int, folder: Path):
    """The study of a seed, and the networks of its chains."""
    settings = SCALES["small"]
    change = {"model.init_args.network.init_args.hidden": [settings.hidden]}
    job = reseeded(Job("HMC", settings.presets["HMC"], change), seed)
    run = run_jobs([job], folder / "runs")["HMC"]
    study = CompactStudy(run.problem(), settings.batches, 100, seed)
    return study, posterior_of("HMC", run.module()).networks()


def from_several_starts(study: CompactStudy, networks, starts: int) -> None:
    """What the same hundred networks make in other orders, of which another one is the first."""
    count, every = SETS["four chains, 100"]
    print(f"{'order':<8}{'draws %':>10}{'mean %':>10}{'variance':>10}")
    for start in range(starts):
        order = torch.randperm(count // every, generator=keyed_generator(start, "order"))
        some = {n: t[:count:every][order] for n, t in networks.items()}
        print(f"{start:<8}" + "".join(f"{v:>10.1f}" for v in judged(study, some, "joint", 0)))


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
