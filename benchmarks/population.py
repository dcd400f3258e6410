"""Populations: members x steps per second, against one network after the other.

Contestants take turns in one run: our stack without a Trainer and in one, a stack by plain `vmap`,
a loop of bare torch loops, and a loop of separate Lightning runs (their start-up is not counted).
Each has one thread or all of them, whatever it is fastest with.
"""

import functools
import logging
import warnings

import lightning as L
import torch
from record import Record, parsed, parser
from torch import nn
from torch.func import functional_call
from turns import Times, fastest_threads, stepper

from lightning_bnn import models
from lightning_bnn.methods import Batch
from lightning_bnn.modules import DeepEnsemble
from weightsym import params as P

WARM = 3
"""Steps before those that count."""
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


def stepped(network, members, batches, times):
    """Our stack without a Trainer."""
    module = DeepEnsemble(network, members, optimizer=SGD).to(times.device)

    def loss(x, y):
        return module.run.losses(module.state.trained_stack(), Batch((x,), y)).sum()

    timed(stepper(loss, module.parameters(), SGD), batches, times)


def timed(step, batches, times):
    """The steps after the first ones."""
    for k, batch in enumerate(batches):
        if k == WARM:
            times.start()
        step(*batch)
    times.stop()


def quiet_trainer(device="cpu", **options):
    return L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip


class Clock(L.Callback):
    """The steps after the first ones."""

    def __init__(self, times):
        self.times = times

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == WARM:
            self.times.start()

    def on_train_end(self, trainer, module):
        self.times.stop()


def fitted(module, batches, times):
    quiet_trainer(times.device, max_epochs=1, callbacks=[Clock(times)]).fit(module, batches)


def bare(network, batches, times):
    def loss(x, y):
        return nn.functional.cross_entropy(network(x), y)

    timed(stepper(loss, network.parameters(), SGD), batches, times)


def vmapped(network, members, batches, times):
    """What one would write: grouped convolutions, everything at once, no Trainer."""
    stack = {n: nn.Parameter(t.to(times.device)) for n, t in P.populate(network, members).items()}

    def loss(member, x, y):
        return nn.functional.cross_entropy(functional_call(network, member, (x,)), y)

    losses = torch.vmap(loss, in_dims=(0, None, None))
    timed(stepper(lambda x, y: losses(stack, x, y).sum(), stack.values(), SGD), batches, times)


def contestants(network, shape, classes, members, device):
    """What fills `Times`, and of how many steps of a member."""
    few, many = Batches(shape, classes, 8, device), Batches(shape, classes, 33, device)
    side, small = len(few) - WARM, min(members, 64)
    ensemble = functools.partial(DeepEnsemble, network, members, optimizer=SGD)
    return {
        "in a Trainer": (lambda times: fitted(ensemble(), few, times), side * members),
        "without one": (lambda times: stepped(network, members, few, times), side * members),
        "vmap": (lambda times: vmapped(network, small, few, times), side * small),
        "bare loop": (lambda times: bare(network, many, times), len(many) - WARM),
        "Lightning": (lambda times: fitted(Plain(network), many, times), len(many) - WARM),
    }


def main():
    options = parsed(parser(__doc__, repeats=5))
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    record, device = Record(options), options.device
    for name, network, shape, classes, members in cases():
        entered = contestants(network.to(device), shape, classes, members, device)
        found = {}
        for who, (run, _) in entered.items():
            spare = Times(device=device)
            count = fastest_threads(
                lambda run=run, spare=spare: run(spare), options.threads, device
            )
            found[who] = Times(count, device)
        for _ in range(options.repeats):
            for who, (run, _) in entered.items():
                torch.set_num_threads(found[who].threads)
                run(found[who])
        for who, (_, steps) in entered.items():
            record.times({who: found[who]}, network=name, members=members, steps=steps)
    record.write()


if __name__ == "__main__":
    main()
