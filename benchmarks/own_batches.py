"""Populations whose members have batches of their own: what that costs beside shared ones.

Processor time of one step of one OptuNet in a Trainer, batch 64, on random bytes of MNIST's shape:
all members see the same batches, or have an order each (`orders`), or an order and crops.
The three take turns.
"""

import argparse
import logging
import statistics
import time
import warnings

import lightning as L
import torch

from lightning_bnn.datamodules.base import Splits
from lightning_bnn.datamodules.images import ImageData
from lightning_bnn.models import optunet
from lightning_bnn.modules import DeepEnsemble


class Bytes(ImageData):
    """Sixty thousand images that nobody has seen."""

    mean, std, mirrored = (0.1307,), (0.3081,), False

    def load(self):
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(256, (60_000, 1, 28, 28), generator=generator, dtype=torch.uint8)
        examples = pixels, torch.randint(10, (60_000,), generator=generator)
        return Splits(examples, None, examples)


class Clock(L.Callback):
    """Processor seconds of the steps behind the first four."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 4:
            self.start = time.process_time()

    def on_train_batch_end(self, *_):
        self.end = time.process_time()


def microseconds(members, steps, **settings):
    """Of one step of one member."""
    clock = Clock()
    module = DeepEnsemble(optunet(), members, optimizer=lambda p: torch.optim.SGD(p, 0.04))
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps + 4, limit_val_batches=0, callbacks=[clock],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, Bytes(batch_size=64, val_size=0, **settings))
    return 1e6 * (clock.end - clock.start) / steps / members


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--members", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    settings = {
        "shared": {"augment": False},
        "shared, crops": {},
        "orders": {"orders": options.members, "augment": False},
        "orders and crops": {"orders": options.members},
    }
    found = {name: [] for name in settings}
    for _ in range(options.rounds):
        for name, of in settings.items():
            found[name].append(microseconds(options.members, options.steps, **of))
    shared = statistics.median(found["shared"])
    for name, times in found.items():
        middle, spread = statistics.median(times), f"{min(times):.0f} to {max(times):.0f}"
        print(f"{name:<18}{middle:8.0f} us {spread:>12}{middle / shared:8.1f} x")


if __name__ == "__main__":
    main()
