"""Microcanonical ensembles on airfoil: the package `sklearn-contrib-bde` beside ours.

    pip install sklearn-contrib-bde    # without it only ours run
    LIGHTNING_BNN_DATA=... python benchmarks/anchor_airfoil.py --results airfoil.json
    python benchmarks/anchor_airfoil.py --results airfoil.json --warmup 50000 --draws 1000 --seeds 1

The setting is that of the package's own benchmark: 5-16-16-16-16-2 with ReLU, a standard deviation
for every input, prior N(0, 1), ten members, a split of 80 and 20 % by `train_test_split`, columns
standardised by the training rows. Every tenth step of the integrator is a draw, and all chains take
the same number of steps. The package starts from an ensemble that stops early (its published
setting) or from one that was trained as long as ours. Errors and densities are those of
standardised targets: of the mixture of all networks, and of the one Gaussian with its moments,
which the package reports. CPU seconds are those of one thread; runs that are in the file are kept.
"""

import argparse
import json
import logging
import os
import time
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.datamodules import UCI
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.metrics.chains import rhat
from lightning_bnn.modules import MILE, DeepEnsemble
from lightning_bnn.samplers import MCLMC

MEMBERS, HIDDEN, THINNING = 10, [16] * 4, 10
EPOCHS, RATE = 2000, 5e-3
DESCENT = 100


# ------------------------------------------------------------ data and scores
def split(seed):
    """Standardised inputs and targets, of training and test."""
    from sklearn.model_selection import train_test_split

    table = np.loadtxt(UCI("airfoil").root / "airfoil.csv", delimiter=",", skiprows=1)
    train, test = train_test_split(table, test_size=0.2, random_state=seed)
    mean, std = train.mean(0), train.std(0)
    return [
        ((part - mean) / std)[:, columns].astype(np.float32)
        for part in (train, test)
        for columns in (slice(0, -1), slice(-1, None))
    ]


def scores(mean, std, targets):
    """Of predictions ``(chains, draws, examples)`` for targets ``(examples,)``."""
    mean, std, y = (torch.as_tensor(np.array(t)).double() for t in (mean, std, targets))
    logs = torch.distributions.Normal(mean, std).log_prob(y).flatten(0, 1)
    center = mean.mean((0, 1))
    variance = std.square().mean((0, 1)) + mean.flatten(0, 1).var(0, correction=0)
    below = torch.distributions.Normal(mean, std).cdf(y).mean((0, 1))
    found = {
        "RMSE": float((center - y).square().mean().sqrt()),
        "NLL mixture": float(-(logs.logsumexp(0) - np.log(len(logs))).mean()),
        "NLL moments": float(
            -torch.distributions.Normal(center, variance.sqrt()).log_prob(y).mean()
        ),
        "in 90 %": float(100 * ((below > 0.05) & (below < 0.95)).double().mean()),
    }
    if mean.shape[1] > 3:
        found["R-hat median"] = float(rhat(mean).median())
    return found


# ------------------------------------------------------------ ours
def ours(kind, data, seed, options):
    x, y, inputs, targets = (torch.from_numpy(part) for part in data)
    lightning.seed_everything(seed, verbose=False)
    network, likelihood = models.mlp(5, HIDDEN, 2), Gaussian("heteroscedastic", least=1e-6)
    shared = {"likelihood": likelihood, "members": MEMBERS, "prior_std": 1.0, "seed": seed}
    if kind == "ensemble":
        optimizer = partial(torch.optim.Adam, lr=RATE)
        schedule = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=EPOCHS)
        module = DeepEnsemble(network, optimizer=optimizer, lr_scheduler=schedule, **shared)
        epochs = EPOCHS
    else:
        adapting = options.warmup // THINNING
        sampler = partial(
            MCLMC, steps=THINNING, energy_variance=kind, adapt_steps=adapting,
            descent_steps=DESCENT, descent_lr=RATE,
        )  # fmt: skip
        module = MILE(network, optimizer=sampler, burn_in=DESCENT + adapting, **shared)
        epochs = DESCENT + adapting + options.draws
    loader = DataLoader(TensorDataset(x, y), len(x))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=10**9,
    )  # fmt: skip
    begin = time.process_time()
    trainer.fit(module, loader)
    seconds = time.process_time() - begin
    chains = [mode.networks for mode in module.posterior().modes()]
    with torch.no_grad():
        outputs = torch.stack([P.apply(network, chain, inputs) for chain in chains])
    mean, std = likelihood.moments(outputs)
    return scores(mean[..., 0], std[..., 0], targets[:, 0]) | {"CPU s": seconds}


# ------------------------------------------------------------ the package
def package(long_training, sampling, data, seed, options):
    from bde import BdeRegressor

    x, y, inputs, targets = data
    training = (
        {"epochs": EPOCHS, "lr": 1e-3, "validation_split": None, "patience": None}
        if long_training
        else {"epochs": 1000, "lr": 1e-3, "validation_split": 0.15, "patience": 20}
    )
    regressor = BdeRegressor(
        n_members=MEMBERS, hidden_layers=HIDDEN, seed=seed, n_thinning=THINNING if sampling else 1,
        warmup_steps=options.warmup if sampling else 0,
        n_samples=options.draws * THINNING if sampling else 1, step_size_init=RATE, **training,
    )  # fmt: skip
    begin = time.process_time()
    regressor.fit(x, y[:, 0])
    seconds = time.process_time() - begin
    raw = np.asarray(regressor.predict(inputs, raw=True))
    return scores(raw[..., 0], np.logaddexp(raw[..., 1], 0) + 1e-6, targets[:, 0]) | {
        "CPU s": seconds
    }


# ------------------------------------------------------------ the table
def contestants(options):
    """By name: a run, given the data and a seed."""
    found = {"ensemble": partial(ours, "ensemble")}
    for variance in options.variances:
        found[f"MILE, v = {variance:g}"] = partial(ours, variance)
    if find_spec("bde"):
        for long, start in ((False, "early stopping"), (True, f"{EPOCHS} epochs")):
            found[f"bde's ensemble, {start}"] = partial(package, long, False)
            found[f"bde, after {start}"] = partial(package, long, True)
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("airfoil.json"))
    parser.add_argument("--warmup", type=int, default=2000, help="steps of the integrator")
    parser.add_argument("--draws", type=int, default=400, help="of each chain, ten steps apart")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--splits", type=int, default=1)
    parser.add_argument("--variances", type=float, nargs="+", default=[0.1, 5e-4])
    parser.add_argument("--only", default="", help="part of the names of contestants")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    kept = json.loads(options.results.read_text()) if options.results.is_file() else {}
    found = {n: run for n, run in contestants(options).items() if options.only in n}
    jobs = [
        (name, number, seed)
        for seed in range(options.seeds)
        for number in range(options.splits)
        for name in found
    ]
    for name, number, seed in tqdm(jobs, unit="run"):
        key = f"{name} | {options.warmup} + {THINNING * options.draws} | {number} | {seed}"
        if key not in kept:
            kept[key] = found[name](split(number), seed, options)
            options.results.write_text(json.dumps(kept, indent=1))
    show(kept)


def show(kept):
    """Mean and deviation over seeds and splits; ensembles have no steps of a sampler."""
    rows = {}
    for key, numbers in kept.items():
        name, steps, *_ = key.split(" | ")
        rows.setdefault((name, "" if "ensemble" in name else steps), []).append(numbers)
    columns = list(dict.fromkeys(c for found in rows.values() for n in found for c in n))
    print(f"| | steps | runs | {' | '.join(columns)} |\n|{'---|' * (3 + len(columns))}")
    for (name, steps), found in sorted(rows.items()):
        cells = [_cell([n[c] for n in found if c in n]) for c in columns]
        print(f"| {name} | {steps} | {len(found)} | {' | '.join(cells)} |")


def _cell(values):
    if not values:
        return ""
    spread = f" ± {np.std(values, ddof=1):.3g}" if len(values) > 1 else ""
    return f"{np.mean(values):.4g}{spread}"


if __name__ == "__main__":
    main()
