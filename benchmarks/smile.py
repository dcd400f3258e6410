"""SMILE beside SGHMC, MILE and HMC on MNIST, with equally many gradients of all the images.

python benchmarks/smile.py [--gradients 400] [--seeds 3]

A perceptron 784-20-10 with the prior N(0, 0.25), 50 000 images. All methods start four chains from
the same networks, which five epochs of Adam have trained. An epoch of minibatches counts as one
gradient of each chain, as does a gradient of HMC. The first two fifths of a run are left out.
Settings have the least NLL on the validation data of another seed.
"""

import argparse
import copy
import itertools
import logging
import statistics
import tempfile
import time
from functools import partial

import torch
from lightning import Trainer, seed_everything

from lightning_bnn import models, modules, samplers
from lightning_bnn.datamodules import MNIST

CHAINS, STARTING_EPOCHS = 4, 5
BATCHES, ALL = ({"batch": 128}, {"batch": 500}), ({"batch": 5000},)
GRIDS = {
    "SMILE": (BATCHES, [{"energy_variance": v} for v in (5e-4, 5e-3, 5e-2)]),
    "SGHMC": (BATCHES, [{"lr": lr, "momentum": 0.98} for lr in (0.02, 0.005, 0.001)]),
    "MILE": (ALL, [{"steps": 3}, {"steps": 10}]),
    "HMC": (ALL, [{"leapfrog_steps": n, "step_size": 2e-3} for n in (10, 30)]),
}
QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False,
}  # fmt: skip


def sampler_and_epochs(name, gradients, steps_per_epoch, options):
    """The sampler of a method, and its epochs: of minibatches, or one a transition."""
    if name == "SMILE":
        steps = gradients * steps_per_epoch // 5
        return partial(samplers.SMILE, descent_steps=0, adapt_steps=steps, **options), gradients
    if name == "SGHMC":
        return partial(samplers.SGHMC, **options), gradients
    if name == "MILE":
        epochs = gradients // (2 * options["steps"] + 1)
        return partial(samplers.MCLMC, descent_steps=0, adapt_steps=epochs // 3, **options), epochs
    epochs = gradients // (options["leapfrog_steps"] + 1)
    return partial(samplers.HMC, adapt_steps=epochs // 3, **options), epochs


def scores(name, start, gradients, seed, batch, is_test, **options):
    """NLL, ECE and accuracy of a run, and the CPU seconds of its training."""
    seed_everything(seed, verbose=False)
    data = MNIST(batch_size=batch, val_size=10_000, augment=False)
    sampler, epochs = sampler_and_epochs(name, gradients, -(-50_000 // batch), options)
    burn_in, full = 2 * epochs // 5, name in ("MILE", "HMC")
    kept = {"every_n_steps": 1} if full else {"every_n_epochs": max(1, epochs // 50)}
    module = getattr(modules, name)(
        models.mlp(784, [20], 10), CHAINS, optimizer=sampler, burn_in=burn_in, prior_std=0.5,
        start_from=start, seed=seed, eval_samples=100, **kept,
    )  # fmt: skip
    started = time.process_time()
    trainer = Trainer(
        max_epochs=epochs, limit_val_batches=0, limit_train_batches=1 if full else 1.0, **QUIET
    )
    trainer.fit(module, data)
    seconds = time.process_time() - started
    judge = Trainer(**QUIET)
    run = judge.test if is_test else judge.validate
    (row,) = run(module, data, verbose=False)
    found = {key.split("/")[1]: value for key, value in row.items()}
    return found["nll"], 100 * found["ece"], 100 * found["acc"], seconds


def start_of(seed, folder):
    """A checkpoint of an ensemble where the chains of a seed start."""
    seed_everything(seed, verbose=False)
    ensemble = modules.DeepEnsemble(models.mlp(784, [20], 10), CHAINS, prior_std=0.5)
    trainer = Trainer(max_epochs=STARTING_EPOCHS, limit_val_batches=0, **QUIET)
    trainer.fit(ensemble, MNIST(batch_size=128, val_size=10_000, augment=False))
    trainer.save_checkpoint(f"{folder}/{seed}.ckpt")
    return f"{folder}/{seed}.ckpt"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gradients", type=int, default=400, help="of all chains together")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    gradients = args.gradients // CHAINS - STARTING_EPOCHS
    with tempfile.TemporaryDirectory() as folder:
        starts = [start_of(seed, folder) for seed in range(args.seeds + 1)]
        for name, (batches, settings) in GRIDS.items():
            best = []
            for batch, options in itertools.product(batches, settings):
                choice = copy.deepcopy(batch | options)
                run = scores(name, starts[-1], gradients, args.seeds, is_test=False, **choice)
                print(name, choice, " ".join(f"{number:.4g}" for number in run), flush=True)
                best.append((run[0], str(choice), choice))
            choice = min(best)[2]
            runs = [
                scores(name, starts[seed], gradients, seed, is_test=True, **choice)
                for seed in range(args.seeds)
            ]
            columns = [
                f"{statistics.mean(column):.4g} ± {statistics.pstdev(column):.2g}"
                for column in zip(*runs, strict=True)
            ]
            print(f"| {name} | {choice} |", " | ".join(columns), "|", flush=True)


if __name__ == "__main__":
    main()
