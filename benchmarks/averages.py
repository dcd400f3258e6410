"""Averages of networks in one frame against plain ones: within a run, and across runs.

LIGHTNING_BNN_DATA=data python benchmarks/averages.py within     EMA and SWA of one run
LIGHTNING_BNN_DATA=data python benchmarks/averages.py across     networks of 2, 5 and 10 runs

MNIST at 14 x 14; accuracies on its 10 000 test images in per cent, means and standard deviations
over `--seeds`. With --results rows are added to a JSON file, and the table is that of all of them.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from averaged_networks import NETWORKS, accuracy, images, keep, renewed, table, trained
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import params as P
from lightning_bnn.callbacks import SymmetricAverage
from lightning_bnn.symmetry import average, discover

warnings.filterwarnings("ignore")


def chosen(options):
    return [(n, b) for n, b in NETWORKS.items() if options.network in n]


# ------------------------------------------------------------ one run
class Classifier(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Clock(L.Callback):
    """CPU time of whole steps, and of one callback in them."""

    def __init__(self, callback=None):
        self.all = self.own = 0.0
        if callback is not None:
            end = callback.on_train_batch_end

            def timed(*args):
                begun = time.process_time()
                end(*args)
                self.own += time.process_time() - begun

            callback.on_train_batch_end = timed

    def on_train_start(self, *_):
        self.all = -time.process_time()

    def on_train_end(self, *_):
        self.all += time.process_time()


def fitted(build, seed, callback, data, epochs):
    L.seed_everything(seed, verbose=False)
    module, clock = Classifier(build()), Clock(callback)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=epochs, callbacks=[clock, callback], accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(*data), 64, shuffle=True))
    return module, clock


def within(options):
    data, test, epochs = images(True, options.examples), images(False), options.epochs
    rows = []
    for name, build in chosen(options):
        for seed in options.seeds:
            for kind, ours, theirs in (
                ("EMA", SymmetricAverage(decay=0.99), EMAWeightAveraging(decay=0.99)),
                ("SWA", SymmetricAverage("swa", start=2), None),
            ):
                module, clock = fitted(build, seed, ours, data, epochs)
                state = {n.removeprefix("net."): t for n, t in ours.averaged_state(module).items()}
                row = {
                    "network": name, "kind": kind, "seed": seed,
                    "last network": accuracy(module.net, P.of(module.net), test),
                    "ours": accuracy(module.net, state, test),
                    "share of time": clock.own / clock.all, "moved": ours.report.moved_units,
                    "networks": ours.report.networks, "looks": ours.report.looks,
                    "matched": ours.report.matches,
                }  # fmt: skip
                if theirs is not None:
                    other, _ = fitted(build, seed, theirs, data, epochs)
                    row["Lightning"] = accuracy(other.net, P.of(other.net), test)
                    row["difference of weights"] = max(
                        float((state[n] - t).abs().max()) for n, t in other.net.named_parameters()
                    )
                rows.append(row)
                print(row, flush=True)
    return rows


# ------------------------------------------------------------ several runs
def across(options):
    data, test = images(True, options.examples), images(False)
    rows = []
    for name, build in chosen(options):
        L.seed_everything(0, verbose=False)
        model = build()
        sym = discover(model.eval(), data[0][:2])
        for seed in options.seeds:
            L.seed_everything(seed, verbose=False)
            start = P.populate(model, 10)
            stack = trained(model, start, [data] * 10, options.epochs, seed)
            single = accuracy(model, stack, test)
            for count in (2, 5, 10):
                some = {n: t[:count] for n, t in stack.items()}
                begun = time.process_time()
                aligned = average(some, sym)
                seconds = time.process_time() - begun
                plain = P.weighted_mean(some)
                row = {
                    "network": name, "count": count, "seed": seed, "seconds": seconds,
                    "single": statistics.mean(single[:count]),
                    "plain": accuracy(model, renewed(model, plain, data), test),
                    "ours": accuracy(model, renewed(model, aligned, data), test),
                }  # fmt: skip
                rows.append(row)
                print(row, flush=True)
    return rows


# ------------------------------------------------------------ command
TABLES = {
    "within": (("network", "kind"), ("last network", "Lightning", "ours", "moved", "looks",
                                     "networks", "share of time", "difference of weights")),
    "across": (("network", "count"), ("single", "plain", "ours", "seconds")),
}  # fmt: skip


def main():
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("part", choices=TABLES)
    made.add_argument("--examples", type=int, default=6000, help="training images")
    made.add_argument("--epochs", type=int, default=4)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--network", default="", help="a part of its name")
    made.add_argument("--results", type=Path)
    options = made.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    rows = {"within": within, "across": across}[options.part](options)
    table(keep(rows, options.results, options.part), *TABLES[options.part])
    print(f"{time.process_time() - begun:.0f} CPU s")


if __name__ == "__main__":
    main()
