"""Computations that are the same on every device, and how far another one is from the CPU.

The device is a pretended one unless `LIGHTNING_BNN_DEVICE` names another, such as `cuda`.
"""

import contextlib
import copy
import logging
import os
import traceback
import warnings

import lightning as L
import pretended
import torch
from cpu_draws import cpu_draws
from metric_cases import METRICS
from module_cases import MODULES, Blobs, made, network
from runs import QUIET, Plain, fit
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_bnn import metrics as M
from lightning_bnn import symmetry as S
from lightning_bnn.callbacks import MassGap, PermutationTau
from lightning_bnn.models import mlp
from lightning_bnn.modules import SWAG, DeepEnsemble
from weightsym import params as P

DEVICE = os.environ.get("LIGHTNING_BNN_DEVICE", pretended.NAME)
REAL = DEVICE != pretended.NAME
PRECISION = "64-true" if REAL else "32-true"
"""Of what is trained: rounding decides where Adam moves a weight that the loss does not see."""
TOLERANCE = 1e-4 if REAL else 0.0
"""Of differences, relative to 1 + size: sums of single precision have another order."""


class Lost(nn.Module):
    """A mistake to be found: a constant that is no buffer, and so stays on the CPU."""

    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(6, 3), torch.ones(3)

    def forward(self, x):
        return self.layer(x) + self.shift


def options(device):
    place = {"accelerator": "gpu", "devices": 1}
    if device == "cpu":
        place = {}
    elif device == pretended.NAME:
        place = pretended.trainer_options()
    return {**QUIET, "max_epochs": 2, "precision": PRECISION, **place}


def trained(module, device, precision=PRECISION):
    """The state after training, and the numbers of a test; SWAG collects from a second epoch on."""
    more = {"max_epochs": 2 if isinstance(module, SWAG) else 1, "precision": precision}
    trainer, data = L.Trainer(**{**options(device), **more}), Blobs()
    trainer.fit(module, data)
    numbers = trainer.test(module, data, verbose=False)
    return module.state_dict(), {k: torch.tensor(v) for k, v in numbers[0].items()}


def metric(case, device):
    measured = case.build().to(device)
    for batch in case.batches:
        measured.update(*moved(batch, device))
    return measured.compute()


def watched(device):
    """What the callbacks log of a plain run."""
    torch.manual_seed(0)
    callbacks = PermutationTau(every_n_steps=2), MassGap(every_n_steps=2)
    return fit(Plain(0.0), *callbacks, **options(device)).callback_metrics


def images(device):
    """Convolutions: kernels of our own on the CPU, those of torch elsewhere."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    x, y = torch.randn(40, 1, 8, 8), torch.arange(40) % 3
    module = DeepEnsemble(net, members=3, max_loss=50.0, member_rates=[1.0, 0.5, 2.0])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 20)
    L.Trainer(**options(device)).fit(module, loader)
    return module.state_dict()


def symmetries(device):
    """Every way to act on a stack, in one tree."""
    torch.manual_seed(0)
    net = mlp(6, [8, 5], 3)
    stack = moved(P.populate(net, 4, torch.Generator().manual_seed(0)), device)
    sym = S.discover(net, torch.randn(2, 6))
    one, two = ({k: v[i] for k, v in stack.items()} for i in (0, 1))
    draw = torch.Generator().manual_seed(1)
    return {
        "canonical": S.canonicalise(stack, sym),
        "mass": S.mass(stack, sym),
        "least": S.min_mass(stack, sym).minimum,
        "match": S.match(one, two, sym),
        "matched": S.match(stack, two, sym),
        "aligned": list(S.align(stack, sym)),
        "permuted": S.permute(stack, sym, S.random_permutations(sym, draw)),
        "rescaled": S.rescale(stack, sym, S.random_scales(sym, draw)),
        "mmd": M.mmd(stack, {k: v + 0.1 for k, v in stack.items()}),
        "populated": P.populate(copy.deepcopy(net).to(device), 5, torch.Generator().manual_seed(0)),
    }


def matching(device):
    """Permutations by data, and a network on a line that is repaired."""
    torch.manual_seed(0)
    net = mlp(6, [8, 5], 3)
    stack = moved(P.populate(net, 2, torch.Generator().manual_seed(0)), device)
    sym = S.discover(net, torch.randn(2, 6))
    a, b = ({k: v[i] for k, v in stack.items()} for i in (0, 1))
    batches = moved([(torch.randn(9, 6), torch.randint(3, (9,))) for _ in range(3)], device)
    net = copy.deepcopy(net).to(device)
    data = {"model": net, "batches": batches, "loss": torch.nn.functional.cross_entropy}
    ways = ("activations", "learned")
    found = {w: S.match(a, b, sym, method=w, learning=S.Learning(steps=3), **data) for w in ways}
    return {
        "permutations": {way: list(f) for way, f in found.items()},
        "repaired": S.repair(net, S.interpolate(a, b, 0.5), a, b, 0.5, batches).params,
    }


def single_precision(device):
    """The numbers of a test, which rounding moves less than weights."""
    torch.manual_seed(0)
    return trained(DeepEnsemble(network(), members=3), device, "32-true")[1]


def lost(device):
    return trained(DeepEnsemble(Lost(), members=2), device)


OTHERS = {
    "callbacks": watched,
    "images": images,
    "symmetries": symmetries,
    "matching": matching,
    "single precision": single_precision,
    "lost": lost,
}
ALIKE = {"map", "mfvi", "chains", "swag"}
"""Modules that compute nothing there which others do not."""
BEYOND = {"laplace", "multi-laplace", "MMD"}
"""What torch itself does below Python: forward-mode derivatives, indices that are lists."""


def computations():
    """Name -> what is computed on a device; a real one computes everything."""
    modules = {
        name: lambda device, name=name: trained(made(name, batch_norm=True), device)
        for name in MODULES
    }
    metrics = {c.name: lambda device, case=c: metric(case, device) for c in METRICS}
    every = {**modules, **metrics, **OTHERS}
    return {name: every[name] for name in every if REAL or name not in ALIKE | BEYOND}


def moved(tree, device):
    return tree_map_only(torch.Tensor, lambda t: t.detach().to(device), tree)


def difference(one, two):
    """The largest, between trees of tensors, relative to 1 + the size of a number."""
    pairs = zip(tree_leaves(one), tree_leaves(two), strict=True)
    tensors = [(a.cpu().double(), b.double()) for a, b in pairs if isinstance(b, torch.Tensor)]
    assert tensors
    return max(((a - b).abs() / (1 + b.abs())).max().item() for a, b in tensors if a.numel())


@contextlib.contextmanager
def ready():
    """The device, as comparable with the CPU as it gets."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    if not REAL:
        pretended.register()
    torch.backends.cudnn.allow_tf32 = False
    with cpu_draws(DEVICE) if REAL else contextlib.nullcontext():
        yield


def compared(name):
    """The largest difference between the device and the CPU, or what went wrong."""
    computation = computations()[name]
    try:
        return difference(computation(DEVICE), computation("cpu"))
    except Exception:
        return traceback.format_exc()
