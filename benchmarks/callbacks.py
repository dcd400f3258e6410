"""The cost of callbacks in a step, and the bank beside torch.save.

python benchmarks/callbacks.py steps      ResNet-18, batch 128 of 32 x 32, bare and watched
python benchmarks/callbacks.py bank       11 million weights: write, read, one layer of all
"""

import os
import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
from record import Record, parsed, parser
from torch.nn.functional import cross_entropy
from turns import Times

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau

warnings.filterwarnings("ignore")


# ------------------------------------------------------------ steps
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
    data = torch.utils.data.TensorDataset(torch.randn(128, 3, 32, 32), torch.randint(10, (128,)))
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
        )
        trainer.fit(Classifier(), torch.utils.data.DataLoader(data, 128))
    record.times({"step": found["step"].after(2)}, every=1)
    for name, (_, worked, every) in contestants.items():
        record.times(
            {name: found[name].after(2).longest(options.repeats // worked - 1)}, every=every
        )


# ------------------------------------------------------------ bank
def bank(options, record):
    """Everything is on a disk, so that times are those on the wall."""
    network, rows = P.of(models.resnet18(10)), options.rows
    record.value("networks", rows)
    record.value("MB", sum(t.nbytes for t in network.values()) / 1e6)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store, files = (
            CheckpointBank(f"{folder}/bank"),
            [Path(folder) / f"{k}.pt" for k in range(rows)],
        )
        record.times(
            by_turns(
                rows,
                bank=lambda k: store.append(network, step=k),
                files=lambda k: written(network, files[k]),
            ),
            what="write",
        )
        record.times(
            by_turns(
                rows,
                bank=lambda k: store[k],
                files=lambda k: torch.load(files[k], weights_only=True),
            ),
            what="read one",
        )
        name = max(store.shapes, key=lambda k: store.shapes[k].numel())
        columns = slice(0, 100_000)

        def loaded(_):
            parts = [torch.load(f, weights_only=True, mmap=True)[name] for f in files]
            return torch.stack([p.flatten()[columns] for p in parts]).sum()

        record.times(
            by_turns(
                options.repeats,
                bank=lambda _: store.read(name, slice(0, rows), columns).sum(),
                files=loaded,
            ),
            what="columns of all",
        )
        store.close()
    small = P.of(models.optunet())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = CheckpointBank(folder)
        append = lambda: [store.append(small, step=k) for k in range(1000)]  # noqa: E731
        for what, call in (
            ("append", append),
            ("one layer", lambda: store.layer("0.weight").sum()),
        ):
            record.times({"bank": on_the_wall(call)}, what=f"1000 OptuNets, {what}")


def written(network, path):
    with path.open("wb") as file:
        torch.save(network, file)
        file.flush()
        os.fsync(file.fileno())


def by_turns(rounds, **calls):
    """Times of calls that are told which round it is."""
    found = {name: Times(device="disk") for name in calls}
    for k in range(rounds):
        for name, call in calls.items():
            found[name].add(lambda call=call, k=k: call(k))
    return found


def on_the_wall(call):
    return by_turns(1, bank=lambda _: call())["bank"]


def main():
    made = parser(__doc__, ("steps", "bank"), repeats=21)
    made.add_argument("--rows", type=int, default=50, help="networks in the bank")
    made.add_argument("--folder", default=None, help="where the bank is written")
    options = parsed(made)
    record = Record(options)
    {"steps": steps, "bank": bank}[options.part](options, record)
    record.write()


if __name__ == "__main__":
    main()
