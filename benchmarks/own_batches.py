"""Populations whose members have batches of their own: what that costs beside shared ones.

Processor time of one step of one OptuNet in a Trainer, batch 64, on random bytes of MNIST's shape:
all members see the same batches, with crops or without, or have an order each (`orders`).
They take turns.
"""

import logging
import warnings

import torch
from population import WARM, Clock, quiet_trainer
from record import Record, parsed, parser
from turns import Times

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


MEMBERS, STEPS = 256, 16


def train(times, settings):
    """Some steps of a population."""
    module = DeepEnsemble(optunet(), MEMBERS, optimizer=lambda p: torch.optim.SGD(p, 0.04))
    trainer = quiet_trainer(max_steps=STEPS + WARM, limit_val_batches=0, callbacks=[Clock(times)])
    trainer.fit(module, Bytes(batch_size=64, val_size=0, **settings))


def main():
    options = parsed(parser(__doc__, repeats=5))
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    settings = {
        "shared": {"augment": False},
        "shared, with crops": {},
        "orders": {"orders": MEMBERS, "augment": False},
        "orders and crops": {"orders": MEMBERS},
    }
    found = {who: Times(options.threads) for who in settings}
    for _ in range(options.repeats):
        for who, of in settings.items():
            train(found[who], of)
    record = Record(options)
    record.times(found, steps=STEPS * MEMBERS)
    record.write()


if __name__ == "__main__":
    main()
