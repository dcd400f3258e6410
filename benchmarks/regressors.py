"""`BnnRegressor` beside the estimator of bde, with equally many gradients of all the data.

OMP_NUM_THREADS=1 python benchmarks/regressors.py airfoil|bike [--warmup 10000] [--seeds 3]

As with bde, a fifth of the rows is the test (``random_state=0``), the others standardise inputs and
targets; ten perceptrons of 4 x 16 ReLU units, noise that depends on the input, the prior N(0, 1).
Chains descend 2000 steps by Adam, adapt in ``--warmup`` steps of two gradients, and draw 100
networks each, ten steps apart. ``sklearn-contrib-bde`` brings both tables.
"""

import argparse
import os
import time
from functools import partial
from importlib.resources import files
from itertools import product

import numpy as np
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.samplers import MCLMC
from lightning_bnn.sklearn import BnnRegressor

HIDDEN, DESCENT, DRAWS, EACH = [16, 16, 16, 16], 2000, 100, 10


def table(name):
    """Training and test data, standardised; of bikes without the date and the parts of the sum."""
    bikes = "bike_sharing_dataset/hour.csv", [*range(2, 14), 16]
    path, used = ("airfoil.csv", range(6)) if name == "airfoil" else bikes
    rows = np.loadtxt(files("bde") / "data" / path, delimiter=",", skiprows=1, usecols=used)
    rows = train_test_split(rows, test_size=0.2, random_state=0)
    scaled = (StandardScaler().fit(rows[0]).transform(part) for part in rows)
    return [part for both in scaled for part in (both[:, :-1], both[:, -1])]


def ours(method, options, epochs, seed, x, y, test, target):
    """Mean, standard deviation and interval of test targets, and their log-densities."""
    options = {"members": 10, "prior_std": 1.0, "eval_samples": 10 * DRAWS} | options
    settings = {
        "learning_rate": None if method == "MILE" else 0.01,
        "batch_size": None if method == "MILE" else 32,
    }
    settings |= {"options": options, "random_state": seed, "conformal": None}
    model = BnnRegressor(method, HIDDEN, epochs, **settings).fit(x, y)
    return *model.predict(test, return_std=True, intervals=0.9), model.log_prob(test, target)


def bde(warmup, seed, x, y, test, target):
    """The same of bde, whose transitions have two gradients."""
    from bde import BdeRegressor

    steps = {"warmup_steps": warmup, "n_samples": DRAWS * EACH, "n_thinning": EACH, "lr": 5e-3}
    model = BdeRegressor(10, HIDDEN, seed, epochs=DESCENT, step_size_init=0.01, **steps).fit(x, y)
    raw = np.asarray(model.predict(test, raw=True), float).reshape(-1, len(test), 2)
    logs = norm.logpdf(target, raw[..., 0], np.logaddexp(raw[..., 1], 0) + 1e-6)
    ends = model.predict(test, credible_intervals=[0.05, 0.95])[1]
    return *model.predict(test, mean_and_std=True), *ends, logsumexp(logs, 0, 1 / len(raw))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["airfoil", "bike"])
    parser.add_argument("--warmup", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variance", type=float, default=0.1, help="of bde 0.5 to 0.1")
    options = parser.parse_args()
    os.environ |= {"NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    first, adapt = DESCENT // (2 * EACH), options.warmup // EACH  # transitions
    sizes = {"energy_variance": options.variance, "descent_steps": first, "adapt_steps": adapt}
    chains = {"optimizer": partial(MCLMC, **sizes), "burn_in": first + adapt}
    steps = (adapt + DRAWS) * (2 * EACH + 1) // 2 - DRAWS * EACH  # of two gradients
    rivals = {
        "ensemble": partial(ours, "DeepEnsemble", {"likelihood": Gaussian("heteroscedastic")}, 100),
        "MILE": partial(ours, "MILE", chains, first + adapt + DRAWS),
        "bde": partial(bde, steps),
    }
    data = table(options.table)
    for seed, (name, rival) in product(range(options.seeds), rivals.items()):
        start = time.process_time()
        mean, std, low, high, logs = rival(seed, *data)
        seconds, target = time.process_time() - start, data[-1]
        rmse, one = np.mean((target - mean) ** 2) ** 0.5, norm.logpdf(target, mean, std).mean()
        inside = np.mean((low < target) & (target < high))
        scores = f"NLL {-logs.mean():.3f} (one Gaussian {-one:.3f}), {inside:.1%} in 90 % intervals"
        print(f"{name} {seed}: RMSE {rmse:.4f}, {scores}, {seconds:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
