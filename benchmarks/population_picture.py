"""Masses and accuracies of a population of networks on MNIST, as a table and as a picture.

LIGHTNING_BNN_DATA=data python benchmarks/population_picture.py --out population.png
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from lightning_bnn import params as P
from lightning_bnn.bank import CheckpointBank, shipped_path
from lightning_bnn.comparison.problem import read_problem
from lightning_bnn.plots import histograms_figure
from lightning_bnn.symmetry import discover, min_mass


def rows(values: dict[str, Tensor]) -> str:
    """A table with a line for each kind of number."""
    shares = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    lines = ["| | mean ± sd | least | 5 % | median | 95 % | largest |", "|---" * 7 + "|"]
    for name, numbers in values.items():
        low, middle, high = numbers.double().quantile(shares).tolist()
        cells = (numbers.min(), low, middle, high, numbers.max())
        spread = f"{numbers.mean():.1f} ± {numbers.std():.1f}"
        lines.append(f"| {name} | {spread} | " + " | ".join(f"{x:.1f}" for x in cells) + " |")
    return "\n".join(lines)


@torch.no_grad()
def accuracies(network: torch.nn.Module, stack: P.Params, batches) -> tuple[Tensor, str]:
    """Of every network in per cent; and of all together, with their mutual information."""
    hits, together, information, seen = 0, 0, 0.0, 0
    for x, y in batches:
        probs = P.apply(network, stack, x, chunk_size=50).softmax(-1)
        mean = probs.mean(0)
        hits = hits + (probs.argmax(-1) == y).sum(1)
        together += int((mean.argmax(-1) == y).sum())
        entropies = torch.special.entr(probs).sum(-1).mean(0)
        information += float((torch.special.entr(mean).sum(-1) - entropies).sum())
        seen += len(y)
    text = f"together {100 * together / seen:.2f} %, information {information / seen:.3f} nats"
    return 100 * hits / seen, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bank", default="mnist_optunets", help="a folder, or a name")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    bank = CheckpointBank(shipped_path(options.bank), "r")
    problem, stack = read_problem(bank.path / "config.yaml"), bank[:]
    sym = discover(problem.network, problem.example())
    optimum = min_mass(stack, sym)
    accuracy, text = accuracies(problem.network.eval(), stack, problem.test_set())
    numbers = {
        "test accuracy, %": accuracy, "mass": optimum.mass, "minimum mass": optimum.minimum,
        "excess, %": optimum.excess,
    }  # fmt: skip
    print(f"{len(accuracy)} networks\n{rows(numbers)}\n{text}")
    panels = {
        "mass": {"as trained": optimum.mass, "minimum": optimum.minimum},
        "excess mass, %": {"": optimum.excess}, "test accuracy, %": {"": accuracy},
    }  # fmt: skip
    histograms_figure(panels, "", 40).savefig(options.out, dpi=150)


if __name__ == "__main__":
    main()
