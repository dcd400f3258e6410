"""Small data and one LightningModule of every kind, for laws that hold for all of them."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import lightning as L
import torch
from runs import QUIET
from torch import nn

from lightning_bnn import samplers
from lightning_bnn.datamodules import DataModule, Splits
from lightning_bnn.modules import (
    HMC,
    IVON,
    MFVI,
    MILE,
    SGHMC,
    SMILE,
    SWAG,
    TFB,
    DeepEnsemble,
    Distillation,
    Laplace,
    MCDropout,
    ScalaBL,
    SymmetrizedVI,
)
from lightning_bnn.modules.prediction import count_of, unrefreshed


class Blobs(DataModule):
    """Three classes around three points of a six-dimensional space."""

    def __init__(self, n=60, batch_size=10, seed=0):
        super().__init__(batch_size, 16, seed)
        self.n = n

    def load(self):
        g = torch.Generator().manual_seed(3)
        centres = 1.5 * torch.randn(3, 6, generator=g)

        def examples(n, distance=1.0):
            y = torch.randint(3, (n,), generator=g)
            return distance * centres[y] + torch.randn(n, 6, generator=g), y

        return Splits(
            examples(self.n),
            examples(25),
            examples(37),
            {"near": examples(20, 0.0), "far": examples(23, -4.0)},
            {"closer": examples(21, 0.6)},
        )


def network(dropout=0.0, batch_norm=False, width=8):
    layers = [nn.Linear(6, width)]
    layers += [nn.BatchNorm1d(width)] if batch_norm else []
    return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 3))


def adam(parameters):
    return torch.optim.Adam(parameters, 3e-2)


def ivon(parameters):
    return samplers.IVON(parameters, 0.1, momentum=0.5, hessian_momentum=0.9)


def _without_dropout(net):
    for layer in net:
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return net


def dropping(net):
    """A network of these cases with some dropout at least."""
    for layer in net:
        if isinstance(layer, nn.Dropout):
            layer.p = layer.p or 0.2
    return net


def kind(cls, prepare=lambda net: net, **settings):
    """How a module is made around a network; what is asked for comes before these settings."""
    return Kind(cls, lambda net, **options: cls(prepare(net), **{**settings, **options}))


class Kind(NamedTuple):
    """How a module of a class is made around a network."""

    cls: type
    make: Callable[..., Any]

    def __call__(self, net, **options):
        return self.make(net, **options)


@cache
@torch.random.fork_rng(devices=[])
@torch.no_grad()
def teacher():
    """An ensemble that knows the blobs by least squares: importing this file runs no backward."""
    torch.manual_seed(0)
    x, y = Blobs().load().train
    module = DeepEnsemble(network(), members=3)
    stack = module.state.trained_stack()
    for m in range(3):
        hidden = (x @ stack["0.weight"][m].mT + stack["0.bias"][m]).relu()
        design = torch.cat([hidden, torch.ones(len(x), 1)], 1)
        wanted = 3.0 * torch.nn.functional.one_hot(y, 3).float()
        solution = torch.linalg.lstsq(design, wanted).solution
        stack["3.weight"][m], stack["3.bias"][m] = solution[:-1].mT, solution[-1]
    module.load_state_dict(module.state_dict())  # weights that were not drawn
    return module


def distilled(net, **options):
    """A network that learns from them."""
    return Distillation(net, **{"teacher": teacher(), **LEARNED, **options})


LEARNED = {"optimizer": adam}
MODULES = {
    "ensemble": kind(DeepEnsemble, members=3, **LEARNED),
    "population": kind(DeepEnsemble, members=4, max_loss=50.0, **LEARNED),
    "map": kind(DeepEnsemble, members=1, prior_std=1.0, **LEARNED),
    "chains": kind(
        DeepEnsemble, members=2, optimizer=partial(samplers.SGHMC, lr=0.05, prior_precision=1.0)
    ),
    "mfvi": kind(MFVI, **LEARNED),
    "multi-mfvi": kind(MFVI, members=2, elbo_samples=2, **LEARNED),
    "mfvi sampled": kind(MFVI, kl="sampled", initialisation="blitz", **LEARNED),
    "mfvi local": kind(MFVI, reparameterisation="local", **LEARNED),
    "mfvi flipout": kind(MFVI, reparameterisation="flipout", **LEARNED),
    "ivon": kind(IVON, optimizer=ivon),
    "multi-ivon": kind(IVON, members=2, prior_std=0.7, temperature=0.5, optimizer=ivon),
    "bethe": kind(SymmetrizedVI, **LEARNED),
    "multi-capacity": kind(SymmetrizedVI, estimator="capacity", members=2, every=2, **LEARNED),
    "uniform": kind(SymmetrizedVI, estimator="uniform", draws=3, **LEARNED),
    "sghmc": kind(
        SGHMC, members=2, every_n_steps=2, orbit_moves=3,
        optimizer=partial(samplers.SGHMC, lr=0.05),
    ),
    "sgld": kind(SGHMC, every_n_epochs=1, optimizer=partial(samplers.SGLD, lr=0.1)),
    "smile": kind(
        SMILE, members=2, every_n_steps=2,
        optimizer=partial(samplers.SMILE, descent_steps=2, adapt_steps=4),
    ),
    "swag": kind(SWAG, start=0, rank=4, **LEARNED),
    "multi-swag": kind(SWAG, members=2, start=1, swa_lr=2e-2, ramp=2, scale=0.5, **LEARNED),
    "dropout": kind(MCDropout, dropping, **LEARNED),
    "multi-dropout": kind(MCDropout, dropping, members=2, layers="last", **LEARNED),
    "laplace": kind(Laplace, structure="diag", prior_std=1.0, **LEARNED),
    "laplace full": kind(
        Laplace, structure="full", prior_std=1.0, prediction="network", temperature=0.1, **LEARNED
    ),
    "multi-laplace": kind(Laplace, members=2, layers="last", prior_std=1.0, **LEARNED),
    "distilled": Kind(Distillation, distilled),
    "scalabl": kind(ScalaBL, members=2, **LEARNED),
    "tfb": kind(TFB, prior_std=1.0, draws=4, **LEARNED),
    "hmc": kind(
        HMC, _without_dropout, members=2, every_n_steps=2, burn_in=4,
        optimizer=partial(samplers.HMC, step_size=0.03, leapfrog_steps=3, adapt_steps=3),
    ),
    "mile": kind(
        MILE, _without_dropout, members=2, every_n_steps=2, burn_in=4,
        optimizer=partial(
            samplers.MCLMC, step_size=0.01, steps=1, descent_steps=1, adapt_steps=2
        ),
    ),
}  # fmt: skip
"""How each kind of module is made around a network."""
_CHOSEN = (
    "ensemble", "population", "multi-mfvi", "multi-ivon", "bethe", "sghmc", "smile", "multi-swag",
    "multi-dropout", "laplace", "multi-laplace", "hmc", "mile",
)  # fmt: skip
_SEEN = {MODULES[name].cls for name in _CHOSEN}
_REST = {case.cls: name for name, case in MODULES.items() if case.cls not in _SEEN}
OF_EACH_CLASS = (*_CHOSEN, *_REST.values())
"""One module or two of each class."""
PER_INPUT = {"dropout", "multi-dropout"}
"""Those that draw anew for every input, so that numbers depend on the order of the inputs."""


def _weighs_data(module):
    """Whether an objective weighs the data against a prior, the module's or the optimizer's."""
    optimizer = module.make_optimizer([nn.Parameter(torch.zeros(2, 3))])
    return module.method.prior is not None or "num_data" in optimizer.param_groups[0]


def made(name, seed=0, dropout=0.0, batch_norm=False, width=8, **options):
    torch.manual_seed(seed)
    return MODULES[name](network(dropout, batch_norm, width), **options)


with torch.random.fork_rng(devices=[]):
    WITHOUT_N = {name for name in MODULES if not _weighs_data(made(name))}
"""Those that need not know how many examples there are."""


def trainer(*callbacks, **options):
    return L.Trainer(**{**QUIET, "max_epochs": 2, "callbacks": list(callbacks), **options})


def fitted(module, data=None, *callbacks, **options):
    """The trainer of a fit, to blobs if nothing else is given."""
    run = trainer(*callbacks, **options)
    run.fit(module, Blobs() if data is None else data)
    return run


def saved(run, path):
    """A checkpoint of a run."""
    run.save_checkpoint(path)
    return path


def said(words, call, *args, **options):
    """The warnings of a call that have these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args, **options)
    return [text for w in caught if words in (text := str(w.message))]


def state(module):
    return {k: v.clone() for k, v in module.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def predicting(module):
    """How many networks of a module predict."""
    return count_of(module, unrefreshed(module))
