"""What it costs symmetrized VI to use a gradient of the information again: L^G after training.

python benchmarks/vi_every.py [--every 1 2 4 8 16] [--repeats 5] [--steps 800]

The digits of scikit-learn, a perceptron of one hidden layer whose deviations start at those of the
prior, where units meet. Printed are means and standard errors, over as many seeds as repeats, of
differences to the first ``every``, in nats of the whole objective, and the time of a step.
"""

import logging
import statistics

import torch
from record import Record, parsed, parser
from sklearn.datasets import load_digits
from turns import Times

from lightning_bnn import models
from lightning_bnn.modules import SymmetrizedVI

STD = 0.5
"""Standard deviation of the prior, and of the weights at the start."""


def data():
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)


def trained(x, y, every, seed, steps, width, times):
    """Objective on all data after training, and interpolation."""
    torch.manual_seed(seed)
    module = SymmetrizedVI(
        models.mlp(64, [width], 10), num_data=len(x), prior_std=STD, init_std=STD, every=every
    )
    module.example_input_array = x[:2]
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    times.start()
    for k in range(steps):
        rows = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        module.losses((x[rows],), y[rows], False, k)["loss"].sum().backward()
        optimizer.step()
    times.stop()
    torch.manual_seed(0)
    with torch.no_grad():
        found = [float(module.losses((x,), y)["sym_elbo"].mean()) for _ in range(50)]
    return statistics.mean(found), float(module.bracket(32)["interpolation"])


def main():
    made = parser(__doc__, repeats=5)
    made.add_argument("--every", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    made.add_argument("--steps", type=int, default=800)
    made.add_argument("--width", type=int, default=64)
    options = parsed(made)
    logging.disable(logging.INFO)
    record, (x, y), first = Record(options), data(), None
    for every in options.every:
        times, found = Times(options.threads), []
        for seed in range(options.repeats):
            found.append(trained(x, y, every, seed, options.steps, options.width, times))
        first = first or found
        gains = [a[0] - b[0] for a, b in zip(found, first, strict=True)]
        objective, meeting = (statistics.mean(column) for column in zip(*found, strict=True))
        record.value("objective", objective, every=every)
        record.value("difference", statistics.mean(gains), every=every)
        record.value("error", statistics.stdev(gains) / len(gains) ** 0.5, every=every)
        record.value("interpolation", meeting, every=every)
        record.times({"training": times}, every=every, steps=options.steps)
    record.write()


if __name__ == "__main__":
    main()
