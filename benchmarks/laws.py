"""Is the estimate of a law unbiased? Modes of known laws, many times: `python benchmarks/laws.py`.

The reference P is 100 draws of N(0, I) in 20 dimensions. A method's modes are N(c, width^2 I), the
centres c drawn so that a network of any mode is N(shift, I): where the shift is zero, the method's
law is P. Every number is MMD^2 x 100, its standard error over repeats, and by how many
standard errors it differs from the truth, which is the mean of many large samples. Bandwidths are
fixed, since those that follow from the distances depend on how many networks there are, and kernels
are averaged: the median over noisy kernels is not the noisy median.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_bnn.comparison.tables import text_table
from lightning_bnn.metrics import KernelGrid, MMDReference, mmd
from lightning_bnn.metrics.laws import modes_table_of

DIM, ROWS, WIDTH = 20, 100, 0.05


class Fixed(KernelGrid):
    """The same bandwidths for all data."""

    def bandwidths(self, cross: Tensor) -> Tensor:
        return torch.logspace(0, 1.5, self.n_bandwidths, dtype=cross.dtype)


GRID = Fixed()


def of_law(modes: int, each: int, shift: float, generator: torch.Generator) -> Tensor:
    """Networks of so many modes, a standard Gaussian around the shift."""
    width = WIDTH if each > 1 else 0.0
    centres = torch.randn(modes, 1, DIM, generator=generator) * (1 - width**2) ** 0.5
    noise = width * torch.randn(modes, each, DIM, generator=generator)
    return (centres + noise + shift).flatten(0, 1)


def once(modes: int, each: int, shift: float, generator: torch.Generator) -> list[float]:
    """Pooled, law, its jackknife error, mixture and its floor, of one method."""
    x = {"w": torch.randn(ROWS, DIM, generator=generator)}
    y = {"w": of_law(modes, each, shift, generator)}
    labels = torch.arange(modes).repeat_interleave(each)
    table = modes_table_of(MMDReference(x, GRID), y, labels)
    law, mixture, floor = (table.estimate(which, "mean") for which in ("law", "mixture", "floor"))
    pooled = mmd(x, y, "mean", grid=GRID)
    return [100 * float(t) for t in (pooled, law.value, law.error, mixture.value, floor.value)]


def truth(shift: float, generator: torch.Generator, repeats: int = 200) -> tuple[float, float]:
    """MMD^2 x 100 between the laws, from large samples."""
    values = []
    for _ in range(repeats):
        x, y = ({"w": of_law(400, 1, s, generator)} for s in (0.0, shift))
        values.append(100 * float(mmd(x, y, "mean", grid=GRID)))
    numbers = torch.tensor(values)
    return float(numbers.mean()), float(numbers.std()) / repeats**0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--shift", type=float, default=0.4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for shift in (0.0, options.shift):
        true, unsure = truth(shift, generator) if shift else (0.0, 0.0)
        for modes, each in tqdm(list(itertools.product((2, 5, 10), (1, 5, 20))), disable=None):
            found = [once(modes, each, shift, generator) for _ in range(options.repeats)]
            numbers = torch.tensor(found, dtype=torch.float64)
            pooled, law, error, mixture, floor = numbers.mean(0).tolist()
            deviations = (numbers.var(0) / options.repeats + unsure**2).sqrt()
            rows.append([
                f"{true:.2f} ± {unsure:.2f}", str(modes), str(each),
                f"{pooled:.2f}", f"{(pooled - true) / deviations[0]:+.1f}",
                f"{law:.2f} ± {deviations[1]:.2f}", f"{(law - true) / deviations[1]:+.1f}",
                f"{numbers[:, 1].std():.2f}", "/" if error != error else f"{error:.2f}",
                f"{mixture:.2f}", f"{floor:.2f}",
            ])  # fmt: skip
    header = ["truth", "modes", "draws", "pooled", "off by", "law", "off by",
              "deviation of law", "jackknife", "mixture", "floor"]  # fmt: skip
    print(text_table(header, rows))
    print("off by: standard errors from the truth")


if __name__ == "__main__":
    main()
