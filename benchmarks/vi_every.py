"""What it costs symmetrized VI to use a gradient of the information again: L^G after training.

python benchmarks/vi_every.py [--every 1 2 4 8 16] [--seeds 5] [--steps 800]

The digits of scikit-learn, a perceptron of one hidden layer whose deviations start at those of the
prior, where units meet. Printed are means and standard errors over seeds of differences to
``every=1``, in nats of the whole objective, and the CPU time of a step.
"""

import argparse
import logging
import statistics
import time

import torch
from sklearn.datasets import load_digits

from lightning_bnn import models
from lightning_bnn.modules import SymmetrizedVI

STD = 0.5
"""Standard deviation of the prior, and of the weights at the start."""


def data():
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)


def trained(x, y, every, seed, steps, width):
    """Objective on all data after training, interpolation, and milliseconds of a step."""
    torch.manual_seed(seed)
    module = SymmetrizedVI(
        models.mlp(64, [width], 10), num_data=len(x), prior_std=STD, init_std=STD, every=every
    )
    module.example_input_array = x[:2]
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    start = time.process_time()
    for k in range(steps):
        rows = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        module.losses((x[rows],), y[rows], False, k)["loss"].sum().backward()
        optimizer.step()
    seconds = (time.process_time() - start) / steps
    torch.manual_seed(0)
    with torch.no_grad():
        found = [float(module.losses((x,), y)["sym_elbo"].mean()) for _ in range(50)]
    return statistics.mean(found), float(module.bracket(32)["interpolation"]), 1e3 * seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    x, y = data()
    runs = {
        k: [trained(x, y, k, s, options.steps, options.width) for s in range(options.seeds)]
        for k in options.every
    }
    first = runs[options.every[0]]
    print(f"{'every':>5} {'L^G':>10} {'difference':>22} {'interpolation':>14} {'ms a step':>10}")
    for k, found in runs.items():
        gains = [a[0] - b[0] for a, b in zip(found, first, strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        values, meeting, times = (statistics.mean(column) for column in zip(*found, strict=True))
        print(
            f"{k:>5} {values:>10.1f} {statistics.mean(gains):>12.2f} +- {error:<6.2f}"
            f" {meeting:>14.3f} {times:>10.2f}"
        )


if __name__ == "__main__":
    main()
