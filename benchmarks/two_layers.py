"""Why a joint frame makes the mean of deeper networks better in loss, but hardly more often right.

Maxima of the posterior of perceptrons on the digits (prior 0.5), in sets of ten and all fifty of a
seed; every frame gives a mean network, which is then repaired: each hidden unit gets the mean and
the deviation over the training data that the networks themselves have on average. Numbers are means
over seeds with Student's 95 % intervals, paired where they are differences.

    python benchmarks/two_layers.py --seeds 5
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.comparison.tables import interval
from lightning_bnn.params import Params
from lightning_bnn.studies.alignment_networks import Architecture, digits
from lightning_bnn.studies.alignment_populations import Population, Scale
from lightning_bnn.symmetry import align, match

NETWORKS = 50
EXAMPLES = digits()
INPUTS, TEST = EXAMPLES.train[0].flatten(1), EXAMPLES.test[0].flatten(1)
FRAMES: dict[str, Callable[..., Params]] = {
    "first, best": lambda s, sym: match(s, {n: t[0] for n, t in s.items()}, sym).apply(s, sym),
    "joint": lambda s, sym: align(s, sym).apply(s, sym),
}


def preactivations(network: Params, x: Tensor) -> Iterator[Tensor]:
    """Of all hidden layers of a perceptron, in turn."""
    layers = [n.removesuffix(".weight") for n in network if n.endswith(".weight")]
    for layer in layers[:-1]:
        x = x @ network[f"{layer}.weight"].T + network[f"{layer}.bias"]
        yield x
        x = x.relu()


def repaired(mean: Params, stack: Params) -> Params:
    """The mean network whose hidden units vary as much as those of the networks do."""
    mean = {n: t.clone() for n, t in mean.items()}
    ends = [list(preactivations(w, INPUTS)) for w in P.unstack(stack)]
    layers = [n.removesuffix(".weight") for n in mean if n.endswith(".weight")]
    for k, layer in enumerate(layers[:-1]):
        goals = torch.stack([z[k] for z in ends])
        own = list(preactivations(mean, INPUTS))[k]
        factor = goals.std(1).mean(0) / own.std(0).clamp_min(1e-12)
        mean[f"{layer}.weight"] *= factor[:, None]
        mean[f"{layer}.bias"] -= own.mean(0)
        mean[f"{layer}.bias"] *= factor
        mean[f"{layer}.bias"] += goals.mean((0, 1))
    return mean


def judged(network: nn.Module, params: Params) -> tuple[float, float]:
    """Loss and accuracy, in per cent, on the test set."""
    logits, labels = P.apply(network, params, TEST), EXAMPLES.test[1]
    right = 100 * float((logits.argmax(-1) == labels).double().mean())
    return float(nn.functional.cross_entropy(logits, labels)), right


def measured(network: nn.Module, stack: Params, moved: Params) -> dict[str, float]:
    """What one frame makes of one set of networks."""
    mean = {n: t.mean(0) for n, t in moved.items()}
    loss, right = judged(network, mean)
    mended_loss, mended_right = judged(network, repaired(mean, moved))
    ends = [list(preactivations(w, INPUTS)) for w in P.unstack(moved)]
    shrunk = [
        float(own.std(0).mean() / torch.stack([z[k] for z in ends]).std(1).mean())
        for k, own in enumerate(preactivations(mean, INPUTS))
    ]
    squares = sum(float((t - t.mean(0)).square().sum()) for t in moved.values()) / len(ends)
    return {
        "squared distance": squares,
        "deviation of units, share": statistics.fmean(shrunk),
        "loss": loss,
        "accuracy": right,
        "loss, repaired": mended_loss,
        "accuracy, repaired": mended_right,
    }


def shown(values: Sequence[float]) -> str:
    """The mean, and half the width of Student's interval."""
    mean, half = interval(torch.tensor(values, dtype=torch.float64))
    return f"{mean:.4g} ± {half:.2g}"


@torch.no_grad()
def of_seed(
    hidden: Sequence[int], size: int, seed: int, folder: Path
) -> dict[str, dict[str, float]]:
    """Means over the sets of one seed, by frame."""
    name = f"MLP {'-'.join(map(str, hidden))}"
    kind = Architecture(lambda classes: models.mlp(64, hidden, classes), "digits", 60, 0.005, 0.5)
    with torch.enable_grad():
        population = Population(kind, name, Scale((name,), (2, NETWORKS), 1), seed, folder)
    rows: dict[str, list[dict[str, float]]] = {frame: [] for frame in FRAMES}
    for k in range(NETWORKS // size):
        stack = {n: t[k * size : (k + 1) * size] for n, t in population.stack.items()}
        for frame, move in FRAMES.items():
            moved = move(stack, population.plain.symmetries)
            rows[frame].append(measured(population.model, stack, moved))
    return {
        frame: {key: statistics.fmean(r[key] for r in of) for key in of[0]}
        for frame, of in rows.items()
    }


def main() -> None:
    """Train what is missing, and print a table for every depth and size of sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("two_layers"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(exist_ok=True)
    for hidden in ([32], [32, 32]):
        for size in (10, NETWORKS):
            every = [of_seed(hidden, size, s, options.folder) for s in range(options.seeds)]
            print(f"\n64-{'-'.join(map(str, hidden))}-10, sets of {size}, {options.seeds} seeds")
            print("| | first, best | joint | joint - first |\n|---|---|---|---|", flush=True)
            for key in every[0]["joint"]:
                one, two = ([of[frame][key] for of in every] for frame in FRAMES)
                columns = (one, two, [b - a for a, b in zip(one, two, strict=True)])
                print(f"| {key} | " + " | ".join(map(shown, columns)) + " |", flush=True)


if __name__ == "__main__":
    main()
