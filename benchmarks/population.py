"""Populations: members x steps per second, against one network after the other.

Contestants take turns in one run: our stack without a Trainer and in one, a stack by plain `vmap`,
a loop of bare torch loops, and a loop of separate Lightning runs (their start-up is not counted).
Times are those of processors, of all threads together, so that neighbours matter little; the loops
have one thread, with which they need the least.
"""

import argparse
import logging
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
from lightning_bnn.methods import Batch
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


def stepped(network, members, batches, device):
    """Our stack without a Trainer."""
    module = DeepEnsemble(network, members, optimizer=SGD).to(device)
    optimizer = SGD(module.parameters())

    def step(x, y):
        optimizer.zero_grad()
        module.run.losses(module.state.trained_stack(), Batch((x,), y)).sum().backward()
        optimizer.step()

    return timed(step, batches, device)


def timed(step, batches, device, warm=3):
    """Seconds of a step, after the first ones."""
    for k, batch in enumerate(batches):
        if k == warm:
            synchronise(device)
            start = seconds(device)
        step(*batch)
    synchronise(device)
    return (seconds(device) - start) / (len(batches) - warm)


def seconds(device):
    """Of processors; of the clock where a GPU works."""
    return time.perf_counter() if device == "cuda" else time.process_time()


class Clock(L.Callback):
    """Seconds of the steps, after the first ones."""

    def __init__(self, device, warm=3):
        self.device, self.warm = device, warm

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.warm:
            synchronise(self.device)
            self.start = seconds(self.device)

    def on_train_end(self, trainer, module):
        synchronise(self.device)
        self.seconds = seconds(self.device) - self.start


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

    def step(x, y):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()

    return timed(step, batches, device)


def vmapped(network, members, batches, device):
    """What one would write: grouped convolutions, everything at once, no Trainer."""
    stack = {n: nn.Parameter(t.to(device)) for n, t in P.populate(network, members).items()}
    optimizer = SGD(stack.values())

    def loss(member, x, y):
        return nn.functional.cross_entropy(functional_call(network, member, (x,)), y)

    def step(x, y):
        optimizer.zero_grad()
        torch.vmap(loss, in_dims=(0, None, None))(stack, x, y).sum().backward()
        optimizer.step()

    return timed(step, batches, device)


def on_one_thread(run):
    """Loops over small networks are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run()
    finally:
        torch.set_num_threads(threads)


def measured(network, shape, classes, members, rounds, device):
    """Seconds for one step of one member, of every contestant, in turns."""
    network = network.to(device)
    few, many = Batches(shape, classes, 8, device), Batches(shape, classes, 33, device)
    small = min(members, 64)
    contestants = {
        "Trainer": lambda: (
            fitted(DeepEnsemble(network, members, optimizer=SGD), few, device) / members
        ),
        "step": lambda: stepped(network, members, few, device) / members,
        "vmap": lambda: vmapped(network, small, few, device) / small,
        "bare loop": lambda: on_one_thread(lambda: bare(network, many, device)),
        "Lightning": lambda: on_one_thread(lambda: fitted(Plain(network), many, device)),
    }
    found = {name: [] for name in contestants}
    for k in range(rounds + 1):
        for name, run in contestants.items():
            value = run()
            if k:
                found[name].append(value)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"threads: {options.threads}, device: {options.device}; us of one member and step")
    names = ("Trainer", "step", "vmap", "bare loop", "Lightning")
    print(f"{'':<28}{'members':>8}" + "".join(f"{name:>11}" for name in names))
    for name, network, shape, classes, members in cases():
        found = measured(network, shape, classes, members, options.rounds, options.device)
        medians = [statistics.median(found[n]) for n in names]
        print(f"{name:<28}{members:>8}" + "".join(f"{1e6 * m:>11.1f}" for m in medians))
        ours = statistics.median(found["Trainer"])
        ratios = [statistics.median(found[n]) / ours for n in names]
        print(f"{'over ours in a Trainer':<36}" + "".join(f"{r:>10.1f}x" for r in ratios))


if __name__ == "__main__":
    main()
