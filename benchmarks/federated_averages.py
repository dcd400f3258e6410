"""Federated averaging of ten clients with different mixes of classes, in one frame or plainly.

LIGHTNING_BNN_DATA=data python benchmarks/federated_averages.py

Every client has 600 examples, whose classes follow a mix drawn from a Dirichlet distribution; in a
round it trains two epochs from the server's network (from one of its own in the first round, where
starts differ). FedAvg averages plainly; ours brings every client to the server's network first (to
each other in the first round). Accuracies on all test images, in per cent.
"""

import argparse
import statistics
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from averaged_networks import accuracy, images, keep, perceptron, table, trained
from torchvision import datasets

from lightning_bnn import params as P
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry import average, discover

warnings.filterwarnings("ignore")
KINDS = {"MNIST": datasets.MNIST, "FashionMNIST": datasets.FashionMNIST}


# ------------------------------------------------------------ ten clients
def shards(y, clients, alpha, generator, size):
    """Indices of every client: classes by Dirichlet, as many examples for each."""
    left = [torch.nonzero(y == c).flatten() for c in range(10)]
    left = [r[torch.randperm(len(r), generator=generator)] for r in left]
    gammas = torch._standard_gamma(torch.full((clients, 10), alpha), generator=generator)
    result = []
    for mix in gammas / gammas.sum(1, keepdim=True):
        drawn = torch.multinomial(mix, size, replacement=True, generator=generator)
        rows = []
        for c, n in enumerate(torch.bincount(drawn, minlength=10).tolist()):
            at = torch.randint(len(left[c]), (n,), generator=generator)
            rows.append(left[c][at])
        result.append(torch.cat(rows))
    return result


def federated(options):
    rows = []
    for kind in options.sets:
        data, test = images(True, kind=KINDS[kind]), images(False, kind=KINDS[kind])
        few = tuple(t[:1000] for t in test)
        model = perceptron()
        sym = discover(model.eval(), data[0][:2])
        for alpha, start, seed in (
            (a, s, k) for a in options.mixes for s in ("common", "different")
            for k in options.seeds
        ):  # fmt: skip
            generator = keyed_generator(seed, "clients", round(10 * alpha))
            parts = shards(data[1], 10, alpha, generator, options.examples)
            sets = [(data[0][r], data[1][r]) for r in parts]
            weights = [len(r) for r in parts]
            L.seed_everything(seed, verbose=False)
            first = P.populate(model, 10)
            if start == "common":
                first = {n: t[:1].expand_as(t) for n, t in first.items()}
            begun = {"plain": first, "ours": first}
            server = {}
            for number in range(options.rounds):
                for how, stack in begun.items():
                    clients = trained(model, stack, sets, options.epochs, seed * 100 + number, 32)
                    plain = new = P.weighted_mean(clients, weights)
                    if how == "ours":
                        new = average(clients, sym, weights, reference=server.get(how))
                    server[how] = new
                    begun[how] = {n: t.expand(10, *t.shape) for n, t in new.items()}
                    row = {
                        "set": kind, "alpha": alpha, "start": start, "seed": seed, "how": how,
                        "round": number + 1, "accuracy": accuracy(model, new, test),
                        "client": statistics.mean(accuracy(model, clients, few)),
                        "apart": max(float((new[n] - t).abs().max()) for n, t in plain.items()),
                    }  # fmt: skip
                    rows.append(row)
                    print(row, flush=True)
    return rows


# ------------------------------------------------------------ command
def main():
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--examples", type=int, default=600, help="of each client")
    made.add_argument("--epochs", type=int, default=2, help="of every round")
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--mixes", type=float, nargs="+", default=[0.1, 1.0])
    made.add_argument("--sets", nargs="+", default=list(KINDS), choices=list(KINDS))
    made.add_argument("--results", type=Path)
    options = made.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    rows = keep(federated(options), options.results, "federated")
    some = [r for r in rows if r["round"] in (1, 2, options.rounds)]
    keys = ("set", "alpha", "start", "how", "round")
    table(some, keys, ("accuracy", "client", "apart"))
    print(f"{time.process_time() - begun:.0f} CPU s")


if __name__ == "__main__":
    main()
