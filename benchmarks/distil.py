"""One network that was distilled from an ensemble, next to the ensemble and to plain networks.

python benchmarks/distil.py [--seeds 3] [--members 10]

Perceptrons 784-100-10 on 5000 labelled images of FashionMNIST, with MNIST as foreign inputs. All
take the same steps of Adam. Students see the labelled images, or 50 000 more without their labels.
"""

import time
import warnings

import lightning as L
import torch
from record import Record, parsed, parser
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import metrics as M
from lightning_bnn import models
from lightning_bnn.calibration.calibrators import fit
from lightning_bnn.datamodules import MNIST
from lightning_bnn.likelihoods import Categorical, Dirichlet
from lightning_bnn.modules import DeepEnsemble, Distillation
from lightning_bnn.predictions import Predictions

warnings.filterwarnings("ignore")
LABELLED, BATCH, STEPS = 5_000, 100, 2_000
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def images(name, train):
    """Images as numbers, and their labels."""
    data = MNIST(augment=False)
    x, y = data._read(name, train)
    return data.normalise(x), y


def trained(module, *tensors):
    loader = DataLoader(TensorDataset(*tensors), BATCH, shuffle=True)
    trainer = L.Trainer(max_steps=STEPS, max_epochs=-1, enable_model_summary=False, **QUIET)
    trainer.fit(module, loader)
    return module


def network():
    return models.mlp(784, [100], 10)


def ensemble(members, x, y):
    return trained(DeepEnsemble(network(), members=members, optimizer=adam), x, y)


def student(teacher, x, likelihood):
    module = Distillation(network(), teacher=teacher, likelihood=likelihood, optimizer=adam)
    return trained(module, x)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-3)


def predicted(module, x, y=None):
    return Predictions.of(module.likelihood, module.outputs((x,)), y)


def judged(module, held_out, test, foreign):
    """Numbers on test images, AUROC of foreign ones, and milliseconds for a thousand images."""
    start = time.process_time()
    known = predicted(module, *test)
    cost = 1e6 * (time.process_time() - start) / len(test[0])
    tempered = known.calibrated(fit(predicted(module, *held_out), "temperature"))
    numbers = known.numbers("acc", "nll", "ece")
    numbers["nll_t"] = tempered.numbers("nll")["nll"]
    strange, is_foreign = predicted(module, foreign), torch.arange(2 * len(foreign)) >= len(foreign)
    for score in ("mutual_information", "entropy"):
        both = [p.scores()[score] for p in (known, strange)]
        numbers[score] = float(M.auroc(torch.cat(both), is_foreign))
    return {**numbers, "ms": cost}


def contestants(options, x, y, pool):
    """What predicts, by name."""
    teacher = ensemble(options.members, x, y)
    return {
        "one network": ensemble(1, x, y),
        "two networks": ensemble(2, x, y),
        "the teacher": teacher,
        "student, same images": student(teacher, x, Dirichlet()),
        "student, more images": student(teacher, pool, Dirichlet()),
        "student, more images, mean alone": student(teacher, pool, Categorical()),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--members", type=int, default=10, help="networks of the teacher")
    options = parsed(made)
    record = Record(options)
    (x, y), test = (images("FashionMNIST", train) for train in (True, False))
    foreign = images("MNIST", False)[0]
    for seed in range(options.seeds):
        L.seed_everything(seed, verbose=False)
        rows = torch.randperm(len(x))
        labelled, pool, held_out = rows.split([LABELLED, len(x) - 2 * LABELLED, LABELLED])
        found = contestants(options, x[labelled], y[labelled], x[torch.cat([labelled, pool])])
        for who, module in found.items():
            numbers = judged(module, (x[held_out], y[held_out]), test, foreign)
            for name, value in numbers.items():
                record.value(who, value, seed=seed, number=name)
    record.write()


if __name__ == "__main__":
    main()
