"""Small costs: posteriors of adapters by step, callbacks in memory, imports.

python benchmarks/costs.py [--only adapters memory imports]
"""

import logging
import resource
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import torch
import transformers
from bayesian_adapters import CHAINS, LETTERS, adamw, adapted
from population import Plain, quiet_trainer
from record import Record, parsed, parser
from turns import stepper, taking_turns

from lightning_bnn import callbacks, models
from lightning_bnn.modules import MFVI, DeepEnsemble, ScalaBL

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
STEPS, EACH = 5000, 1000
IMPORTED = {
    "torch": "torch",
    "lightning": "lightning",
    "weightsym": "weightsym",
    "lightning_bnn": "lightning_bnn",
    "PermutationTau": "from lightning_bnn.callbacks import PermutationTau",
    "a method": "from lightning_bnn.modules import MFVI",
    "a sampler": "from lightning_bnn.samplers import SGHMC",
    "a metric": "from lightning_bnn.metrics import ECE",
    "a posterior": "from lightning_bnn.posteriors import LaplaceGaussian",
    "an estimator": "from lightning_bnn.sklearn import BnnRegressor",
    "compare": "from lightning_bnn import compare",
}


# ------------------------------------------------------------ posteriors of adapters
def adapters(options, record):
    """A step on 16 texts of 64 letters, of a BERT with four layers of width 128."""
    config = transformers.BertConfig(
        vocab_size=LETTERS, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=64, num_labels=CHAINS,
    )  # fmt: skip
    net = adapted(transformers.BertForSequenceClassification(config))
    x, y = torch.randint(LETTERS, (16, 64)), torch.randint(CHAINS, (16,))
    kinds = {
        "plain adapters": partial(DeepEnsemble, members=1),
        "ScalaBL": ScalaBL,
        "MFVI": MFVI,
        "two networks": partial(DeepEnsemble, members=2),
    }
    steps = {}
    for name, kind in kinds.items():
        module = kind(net, num_data=200)
        loss = lambda x, y, module=module: module.losses((x,), y)["loss"].sum()  # noqa: E731
        steps[name] = partial(stepper(loss, module.parameters(), adamw), x, y)
    record.times(taking_turns(steps, options.repeats), what="step")


# ------------------------------------------------------------ memory
class Resident(L.Callback):
    """The memory of the process, now and then."""

    def __init__(self) -> None:
        self.bytes = []

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step % EACH == 0:
            pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
            self.bytes.append(pages * resource.getpagesize())


def memory(options, record):
    """All callbacks beside a small perceptron, over the first thousand steps and after them."""
    data = torch.utils.data.TensorDataset(torch.randn(6400, 16), torch.randint(4, (6400,)))
    for name, watched in (("without callbacks", False), ("with all callbacks", True)):
        with tempfile.TemporaryDirectory() as folder:
            resident = Resident()
            every = every_callback(folder) if watched else []
            trainer = quiet_trainer(
                max_steps=STEPS,
                max_epochs=-1,
                callbacks=[resident, *every],
                default_root_dir=folder,
            )
            loader = torch.utils.data.DataLoader(data, 64)
            trainer.fit(Plain(models.mlp(16, [32], 4)), loader)
        first, *_, last = resident.bytes
        record.value(name, (last - first) / (STEPS - EACH), what="bytes a step")


def every_callback(folder):
    return [
        callbacks.PermutationTau(),
        callbacks.MassGap(every_n_steps=10),
        callbacks.OrbitDrift(every_n_steps=10),
        callbacks.CheckpointHarvester(Path(folder) / "bank", every_n_steps=50),
        callbacks.LearningCoefficient(steps=16),
        callbacks.PosteriorFigures(),
        callbacks.PosteriorDoctor(),
        callbacks.SymmetricAverage(),
        callbacks.TrainingCost(),
    ]


# ------------------------------------------------------------ imports
def imports(options, record):
    """CPU seconds of processes that import one thing, the least of two."""
    for name, what in IMPORTED.items():
        line = what if what.startswith("from") else f"import {what}"
        record.value(name, min(_seconds(line) for _ in range(2)), what="import", line=line)


def _seconds(line):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", line], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


PARTS = {"adapters": adapters, "memory": memory, "imports": imports}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", default=[*PARTS], choices=PARTS)
    options = parsed(made)
    record = Record(options)
    for name in options.only:
        PARTS[name](options, record)
    record.write()


if __name__ == "__main__":
    main()
