"""Populations: members x steps per second, against one network after the other.

Contestants take turns in one run: our module in a Trainer, a stack by plain `vmap`, a loop of bare
torch loops, and a loop of separate Lightning runs (their start-up is not counted).
"""

import argparse
import logging
import math
import statistics
import time
import warnings

import lightning as L
import torch
from torch import nn
from torch.func import functional_call
from turns import synchronise

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.modules import DeepEnsemble

SGD = lambda p: torch.optim.SGD(p, 0.04, weight_decay=2e-4)  # noqa: E731


def cases():
    perceptron = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    yield "OptuNet, batch 64", models.optunet(), (64, 1, 28, 28), 10, 256
    yield "perceptron 2-2-2, batch 10", perceptron, (10, 2), 2, 10_000
    yield "MLP 64-32-10, batch 64", models.mlp(64, [32], 10), (64, 64), 10, 1000


class Batches:
    """The same batches in memory for everybody."""

    def __init__(self, shape, classes, count, device):
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (
                torch.randn(shape, generator=generator).to(device),
                torch.randint(classes, shape[:1], generator=generator).to(device),
            )
            for _ in range(count)
        ]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


class Plain(L.LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return SGD(self.parameters())


class Clock(L.Callback):
    """Seconds of the steps, after the first ones."""

    def __init__(self, device, warm=3):
        self.device, self.warm = device, warm

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.warm:
            synchronise(self.device)
            self.start = time.perf_counter()

    def on_train_end(self, trainer, module):
        synchronise(self.device)
        self.seconds = time.perf_counter() - self.start


def fitted(module, batches, device):
    clock = Clock(device)
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=1,
        callbacks=[clock], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, batches)
    return clock.seconds / (len(batches) - clock.warm)


def bare(network, batches, device):
    optimizer = SGD(network.parameters())
    for k, (x, y) in enumerate(batches):
        if k == 3:
            synchronise(device)
            start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    synchronise(device)
    return (time.perf_counter() - start) / (len(batches) - 3)


def vmapped(network, members, batches, device):
    """What one would write: grouped convolutions, everything at once, no Trainer."""
    stack = {n: nn.Parameter(t.to(device)) for n, t in P.populate(network, members).items()}
    optimizer = SGD(stack.values())

    def loss(member, x, y):
        return nn.functional.cross_entropy(functional_call(network, member, (x,)), y)

    for k, (x, y) in enumerate(batches):
        if k == 3:
            synchronise(device)
            start = time.perf_counter()
        optimizer.zero_grad()
        torch.vmap(loss, in_dims=(0, None, None))(stack, x, y).sum().backward()
        optimizer.step()
    synchronise(device)
    return (time.perf_counter() - start) / (len(batches) - 3)


def measured(network, shape, classes, members, rounds, device):
    """Seconds for one step of one member, of every contestant, in turns."""
    network = network.to(device)
    few, many = Batches(shape, classes, 8, device), Batches(shape, classes, 33, device)
    small = min(members, 64)
    contestants = {
        "ours": lambda: (
            fitted(DeepEnsemble(network, members, optimizer=SGD), few, device) / members
        ),
        "vmap": lambda: vmapped(network, small, few, device) / small,
        "bare loop": lambda: bare(network, many, device),
        "Lightning": lambda: fitted(Plain(network), many, device),
    }
    seconds = {name: [] for name in contestants}
    for k in range(rounds + 1):
        for name, run in contestants.items():
            value = run()
            if k:
                seconds[name].append(value)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"threads: {options.threads}, device: {options.device}; times of one member and step")
    print(f"{'':<28}{'members':>8}{'ours':>12}{'members x steps/s':>19}", end="")
    print(f"{'vmap':>9}{'bare loop':>11}{'Lightning':>11}   (over ours)")
    for name, network, shape, classes, members in cases():
        seconds = measured(network, shape, classes, members, options.rounds, options.device)
        ours = statistics.median(seconds["ours"])
        ratios = [
            statistics.median(b / a for a, b in zip(seconds["ours"], other, strict=True))
            for other in list(seconds.values())[1:]
        ]
        cells = "".join(
            f"{r:>{w}.{_digits(r)}f} x"[: w + 2] for r, w in zip(ratios, (7, 9, 9), strict=True)
        )
        print(f"{name:<28}{members:>8}{1e6 * ours:>9.1f} us{1 / ours:>19,.0f}{cells}")


def _digits(ratio):
    return 1 if math.isfinite(ratio) and ratio < 100 else 0


if __name__ == "__main__":
    main()
