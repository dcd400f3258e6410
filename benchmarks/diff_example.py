"""Two files for `lightning-bnn diff`: a residual network, and the same one trained on and moved.

python benchmarks/diff_example.py FOLDER
"""

import argparse
from pathlib import Path

import torch
from diffs import Population
from safetensors.torch import save_file

from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry.verify import random_element


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    population = Population("residual CNN")
    original = population.new([0], [0])
    [tuned] = population.tuned(original, [1], 5)
    moved = random_element(tuned, population.sym, keyed_generator(0, "element"), mixing=True)
    for name, network in (("a", original[0]), ("b", moved)):
        tensors = {n: t.contiguous() for n, t in network.items()}
        save_file(tensors, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main()
