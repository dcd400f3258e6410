"""The cost of callbacks in a step of a ResNet-18, with batches of 128 images of 32 x 32 pixels.

python benchmarks/callbacks.py steps [--device cuda]
"""

import logging
import tempfile
import warnings

import lightning as L
import torch
from population import quiet_trainer
from record import Record, parsed, parser
from torch.nn.functional import cross_entropy
from turns import Times

from lightning_bnn import models
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = models.resnet18(10)

    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, nesterov=True)


class Clock(L.Callback):
    """Times of every step: forward pass, backward pass and update."""

    def __init__(self, times):
        self.times = times

    def on_train_batch_start(self, *_):
        self.times.start()

    def on_train_batch_end(self, *_):
        self.times.stop()


def watched(callback, times):
    """The same callback, whose time at the end of batches is kept."""
    own = callback.on_train_batch_end
    callback.on_train_batch_end = lambda *args: times.add(lambda: own(*args))
    return callback


def steps(options, record):
    n = options.batch
    data = torch.utils.data.TensorDataset(torch.randn(n, 3, 32, 32), torch.randint(10, (n,)))
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            "PermutationTau": (PermutationTau(), 1, 1),
            "MassGap": (MassGap(5), 5, 50),
            "CheckpointHarvester": (CheckpointHarvester(folder, every_n_steps=5), 5, 10),
        }
        found = {name: Times(options.threads, options.device) for name in ("step", *contestants)}
        callbacks = [watched(callback, found[name]) for name, (callback, *_) in contestants.items()]
        callbacks = [Clock(found["step"]), *callbacks]
        trainer = quiet_trainer(
            options.device, max_epochs=options.repeats, callbacks=callbacks, log_every_n_steps=50
        )
        trainer.fit(Classifier(), torch.utils.data.DataLoader(data, n))
    record.times({"step": found["step"].after(2)}, every=1)
    for name, (_, worked, every) in contestants.items():
        record.times(
            {name: found[name].after(2).longest(options.repeats // worked - 1)}, every=every
        )


def main():
    made = parser(__doc__, ("steps",), repeats=21)
    made.add_argument("--batch", type=int, default=128)
    options = parsed(made)
    record = Record(options)
    steps(options, record)
    record.write()


if __name__ == "__main__":
    main()
