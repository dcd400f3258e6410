"""The cost of callbacks in a step of a ResNet-18, with batches of 128 images of 32 x 32 pixels.

python benchmarks/callbacks.py steps [--precision bf16-mixed] [--channels-last] [--device cuda]
python benchmarks/callbacks.py ends
    what all four take before the second step and at the end, and in a step of a small perceptron
"""

import logging
import tempfile
import time
import warnings

import lightning as L
import torch
from record import Record, parsed, parser
from torch.nn.functional import cross_entropy
from turns import Times

from lightning_bnn import models
from lightning_bnn.callbacks import (
    CheckpointHarvester,
    MassGap,
    PermutationTau,
    PosteriorFigures,
)

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(L.LightningModule):
    def __init__(self, layout, net=None):
        super().__init__()
        self.net, self.layout = (net or models.resnet18(10)).to(memory_format=layout), layout

    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[0].to(memory_format=self.layout)), batch[1])

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
        trainer = L.Trainer(
            max_epochs=options.repeats,
            accelerator="gpu" if options.device == "cuda" else "cpu",
            devices=1,
            callbacks=[Clock(found["step"]), *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=50,
            precision=options.precision,
        )
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        trainer.fit(Classifier(layout), torch.utils.data.DataLoader(data, n))
    record.times({"step": found["step"].after(2)}, every=1)
    for name, (_, worked, every) in contestants.items():
        record.times(
            {name: found[name].after(2).longest(options.repeats // worked - 1)}, every=every
        )


class Phases(L.Callback):
    """CPU seconds before the second step, in all later ones and after the last."""

    def __init__(self):
        self.marks = [time.process_time()]

    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == 1:
            self.marks.append(time.process_time())

    def on_train_batch_end(self, *_):
        self.last = time.process_time()

    def after(self):
        begin, second, end = self.marks[0], self.marks[1], time.process_time()
        return second - begin, self.last - second, end - self.last


def fitted(net, shape, steps, watched, folder):
    """Phases of a run with or without callbacks."""
    n = 8 * steps
    data = torch.utils.data.TensorDataset(torch.randn(n, *shape), torch.arange(n) % 8)
    four = PermutationTau(), MassGap(), PosteriorFigures(), CheckpointHarvester(f"{folder}/bank")
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=50,
        logger=L.pytorch.loggers.TensorBoardLogger(folder),
    )  # fmt: skip
    phases = Phases()
    trainer.callbacks += [*(four if watched else ()), phases]
    trainer.fit(Classifier(torch.contiguous_format, net), torch.utils.data.DataLoader(data, 8))
    return phases.after()


def ends(options, record):
    cases = {
        "ResNet-18": (lambda: models.resnet18(10), (3, 32, 32), 3),
        "MLP 64-32-10": (lambda: models.mlp(64, [32], 10), (64,), 300),
    }
    for network, (make, shape, steps) in cases.items():
        found = {}
        for watched in (False, True, False, True):  # the first runs warm up
            with tempfile.TemporaryDirectory() as folder:
                found[watched] = fitted(make(), shape, steps, watched, folder)
        pairs = zip(found[False], found[True], strict=True)
        before, during, after = (with_them - without for without, with_them in pairs)
        record.value("before the second step", before, network=network)
        record.value("at the end", after, network=network)
        record.value("ms a step", 1e3 * during / (steps - 1), network=network)


def main():
    made = parser(__doc__, ("steps", "ends"), repeats=21)
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--precision", default="32-true")
    made.add_argument("--channels-last", action="store_true")
    options = parsed(made)
    record = Record(options)
    {"steps": steps, "ends": ends}[options.part](options, record)
    record.write()


if __name__ == "__main__":
    main()
