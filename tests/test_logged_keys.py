"""The page of logged keys names what is logged, and all of it."""

import re
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from pages import page
from runs import QUIET, Attention, Plain, Points, built
from torch.utils.data import DataLoader

from lightning_bnn import callbacks as C
from lightning_bnn import modules as M
from lightning_bnn import samplers
from lightning_bnn.datamodules import Digits, NoisySine, TwoGaussians
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.models import mlp

WORDS = {"<layer>": r"[\w.]+", "<set>": r"\w+", "<space>": "(function|weights|canonical)"}


def patterns(text):
    """Keys of the table in the first column, as expressions."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    keys = [key for cell in cells for key in re.findall("`([^`]+)`", cell)]
    expressions = {}
    for key in keys:
        expression = re.escape(key)
        for word, meaning in WORDS.items():
            expression = expression.replace(re.escape(word), meaning)
        expressions[key] = expression.replace("test/", "(test|val)/", 1)
    return expressions


class Keys(CSVLogger):
    """Remembers what it was given."""

    def __init__(self, folder):
        super().__init__(folder)
        self.keys = set()

    def log_metrics(self, metrics, step=None):
        self.keys |= metrics.keys()


HMC = partial(samplers.HMC, step_size=0.02, leapfrog_steps=3)
SMILE = partial(samplers.SMILE, descent_steps=1, adapt_steps=1)
MILE = partial(samplers.MCLMC, steps=2, descent_steps=1, adapt_steps=1)


def sine(cls, **options):
    return cls(mlp(1, [4], 1), likelihood=Gaussian(), **options), NoisySine()


def points(cls, **options):
    return cls(mlp(2, [4], 2), **options), TwoGaussians()


LLC = C.LearningCoefficient(steps=16)


def heads():
    module = built(Plain)
    module.net = Attention()
    return module, DataLoader(Points(), 6), [C.PermutationTau(), C.MassGap(1), C.OrbitDrift(1)]


RUNS = {
    "heads": heads,
    "callbacks": lambda: (
        *points(M.DeepEnsemble, members=2, prior_std=1.0, likelihood=Categorical("last", -100)),
        [C.PermutationTau(), C.MassGap(1), C.PosteriorDoctor(), C.TrainingCost(), LLC],
    ),
    "MFVI": lambda: (*sine(M.MFVI, prior_std=1.0), []),
    "SymmetrizedVI": lambda: (M.SymmetrizedVI(mlp(64, [4], 10), prior_std=1.0), Digits(), []),
    "SGHMC": lambda: (*sine(M.SGHMC, members=2), [C.ChainDiagnostics()]),
    "SMILE": lambda: (*sine(M.SMILE, members=2, optimizer=SMILE), []),
    "HMC": lambda: (*sine(M.HMC, members=2, optimizer=HMC), []),
    "MILE": lambda: (*sine(M.MILE, members=2, optimizer=MILE, burn_in=3), []),
}


def logged(folder, module, data, callbacks):
    logger = Keys(folder)
    diagnosed = any(isinstance(c, C.ChainDiagnostics) for c in callbacks)
    epochs = 9 if diagnosed else 2  # of chains, eight networks are needed
    options = QUIET | {"logger": logger, "max_epochs": epochs, "callbacks": callbacks}
    trainer = L.Trainer(**options, default_root_dir=folder)
    trainer.fit(module, data)
    if isinstance(data, L.LightningDataModule):
        trainer.test(module, data, verbose=False)
    return logger.keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """All keys of all runs."""
    torch.manual_seed(0)
    runs = {name: logged(tmp_path_factory.mktemp("run"), *make()) for name, make in RUNS.items()}
    return set().union(*runs.values())


def unmatched(keys, expressions):
    """Keys that the page does not name, and names of the page that nobody logs."""
    return (
        {key for key in keys if not any(re.fullmatch(e, key) for e in expressions.values())},
        {name for name, e in expressions.items() if not any(re.fullmatch(e, k) for k in keys)},
    )


@pytest.mark.e2e
def test_the_page_names_what_is_logged(keys):
    assert unmatched(keys, patterns(page("docs/logged.md"))) == (set(), set())


def test_the_check_sees_a_key_too_many_and_one_too_few():
    expressions = patterns("| `tau`, `tau/<layer>` | x |\n| `test/acc` | x |")
    keys = {"tau", "tau/net.0.weight", "val/acc"}
    assert unmatched(keys, expressions) == (set(), set())
    assert unmatched({*keys, "other"}, expressions) == ({"other"}, set())
    assert unmatched(keys - {"tau"}, expressions) == (set(), {"tau"})
