"""Intervals of 90 % for a table: `BnnRegressor` with its defaults beside other packages.

python benchmarks/intervals.py [--splits 5] [--tables diabetes yacht] [--only "BnnRegressor()"]
    [--keep FILE]

With `--keep`, every split is a line of FILE, and the next call continues there. 200 splits of all
six tables by `BnnRegressor()` alone take about half an hour of one processor.

Four tables, of which a fifth is the test, and two simulations of 400 rows with known noise, tested
on 2000 rows. "Conditional" is the least coverage of three groups of test rows: by true noise where
it is known, otherwise by the first principal component. Widths are in standard deviations of the
target. Yacht, energy and concrete are CSV files of the folder LIGHTNING_BNN_DATA. NGBoost, quantile
forests and MAPIE take part if installed, as by `pip install --no-deps --target FOLDER ngboost
autograd autograd-gamma lifelines formulaic quantile-forest mapie` and `PYTHONPATH=FOLDER`.
"""

import json
import os
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
from record import Record, parsed, parser
from scipy.stats import norm
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lightning_bnn.sklearn import BnnRegressor

LEVEL = 0.9
TABLES = ("diabetes", "yacht", "energy", "concrete", "sine", "slope")


# ------------------------------------------------------------ tables
def split(name, seed):
    """Training and test data, and the number of each test row's group."""
    if name in ("sine", "slope"):
        x, y, noise = simulated(name, 2400, np.random.default_rng(seed))
        return x[:400], y[:400], x[400:], y[400:], thirds(noise[400:])
    x, y = load_diabetes(return_X_y=True) if name == "diabetes" else read(name)
    x, test, y, target = train_test_split(x, y, test_size=0.2, random_state=seed)
    scaled = (test - x.mean(0)) / (x.std(0) + 1e-12)
    _, _, directions = np.linalg.svd((x - x.mean(0)) / (x.std(0) + 1e-12), full_matrices=False)
    return x, y, test, target, thirds(scaled @ directions[0])


def simulated(name, n, random):
    """Five features; the noise depends on the second."""
    x = random.normal(size=(n, 5))
    noise = 0.1 + 0.5 * np.abs(x[:, 1])
    mean = np.sin(2 * x[:, 0]) + x[:, 2] if name == "sine" else x @ np.arange(1, 6) / 5
    return x, mean + noise * random.normal(size=n), noise


def read(name):
    path = Path(os.environ.get("LIGHTNING_BNN_DATA", "data")) / "uci" / f"{name}.csv"
    rows = np.loadtxt(path, delimiter=",", skiprows=1)
    return rows[:, :-1], rows[:, -1]


def thirds(values):
    return np.searchsorted(np.quantile(values, [1 / 3, 2 / 3]), values)


# ------------------------------------------------------------ contestants
def bnn(x, y, test, seed, **options):
    model = BnnRegressor(random_state=seed, **options).fit(x, y)
    return model.predict(test, intervals=LEVEL)


def ridge(x, y, test, seed):
    """Ridge and split conformal prediction."""
    x, known, y, target = train_test_split(x, y, test_size=0.25, random_state=seed)
    model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13))).fit(x, y)
    errors, mean = np.sort(np.abs(target - model.predict(known))), model.predict(test)
    width = errors[int(np.ceil((len(errors) + 1) * LEVEL)) - 1]
    return mean, mean - width, mean + width


def gaussian_process(x, y, test, seed):
    shape = RBF(np.ones(x.shape[1]), (1e-2, 1e3))
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * shape + WhiteKernel(0.1, (1e-6, 1e1))
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    mean, std = make_pipeline(StandardScaler(), process).fit(x, y).predict(test, return_std=True)
    half = norm.ppf((1 + LEVEL) / 2) * std
    return mean, mean - half, mean + half


def quantile_boosting(x, y, test, seed):
    losses = [{"loss": "squared_error"}]
    losses += [{"loss": "quantile", "quantile": q} for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)]
    settings = {"random_state": seed, "early_stopping": True}
    return [HistGradientBoostingRegressor(**settings, **a).fit(x, y).predict(test) for a in losses]


def ngboost(x, y, test, seed):
    from ngboost import NGBRegressor

    found = NGBRegressor(random_state=seed, verbose=False).fit(x, y).pred_dist(test)
    return found.loc, *found.interval(LEVEL)


def quantile_forest(x, y, test, seed):
    from quantile_forest import RandomForestQuantileRegressor

    model = RandomForestQuantileRegressor(random_state=seed).fit(x, y)
    ends = model.predict(test, quantiles=[(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return model.predict(test, quantiles="mean"), ends[:, 0], ends[:, 1]


def mapie(x, y, test, seed):
    """CV+ around a forest."""
    from mapie.regression import CrossConformalRegressor

    forest = RandomForestRegressor(random_state=seed)
    model = CrossConformalRegressor(forest, confidence_level=LEVEL, cv=10, random_state=seed)
    mean, ends = model.fit_conformalize(x, y).predict_interval(test)
    return mean, ends[:, 0, 0], ends[:, 1, 0]


RIVALS = {
    "BnnRegressor()": bnn,
    'conformal="split"': lambda *data: bnn(*data, conformal="split"),
    "ridge, split conformal": ridge,
    "Gaussian process": gaussian_process,
    "quantile boosting": quantile_boosting,
    "NGBoost": ngboost,
    "quantile forest": quantile_forest,
    "MAPIE, forest, CV+": mapie,
}


# ------------------------------------------------------------ scores
def scores(mean, low, high, target, groups):
    inside = (low <= target) & (target <= high)
    return {
        "coverage": inside.mean(),
        **{f"group {k}": inside[groups == k].mean() for k in range(3)},
        "width": (high - low).mean() / target.std(),
        "R2": 1 - np.square(target - mean).mean() / target.var(),
    }


def one_split(rival, name, seed):
    """Scores and CPU seconds."""
    x, y, test, target, groups = split(name, seed)
    start = time.process_time()
    predicted = rival(x, y, test, seed)
    return {**scores(*predicted, target, groups), "seconds": time.process_time() - start}


def run(who, name, splits, keep):
    """Means over splits, with the standard error of the coverage."""
    lines = keep.read_text().splitlines() if keep and keep.exists() else []
    known = {tuple(row.pop("of")): row for row in map(json.loads, lines)}
    found = []
    for seed in range(splits):
        numbers = known.get((who, name, seed))
        if numbers is None:
            numbers = one_split(RIVALS[who], name, seed)
            if keep:
                with keep.open("a") as stream:
                    print(json.dumps({"of": (who, name, seed), **numbers}), file=stream)
            print(f"{name}, {who}, split {seed}: {numbers['coverage']:.3f}", file=sys.stderr)
        found.append(numbers)
    means = {key: np.mean([each[key] for each in found]) for key in found[0]}
    means["conditional"] = min(means.pop(f"group {k}") for k in range(3))
    spread = np.std([each["coverage"] for each in found], ddof=1) if splits > 1 else 0.0
    return {**means, "error": spread / splits**0.5}


def main():
    made = parser(__doc__)
    made.add_argument("--splits", type=int, default=5)
    made.add_argument("--tables", nargs="+", default=TABLES, choices=TABLES)
    made.add_argument("--only", nargs="+", default=[*RIVALS], choices=RIVALS, metavar="NAME")
    made.add_argument("--keep", type=Path)
    options = parsed(made)
    warnings.simplefilter("ignore")
    record = Record(options)
    for name in options.tables:
        for who in options.only:
            with suppress(ModuleNotFoundError):
                for quantity, number in run(who, name, options.splits, options.keep).items():
                    record.value(who, float(number), table=name, what=quantity)
    record.write()


if __name__ == "__main__":
    main()
