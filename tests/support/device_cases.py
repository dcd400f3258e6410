"""Computations that are the same on every device, and how far another one is from the CPU.

The device is a pretended one unless `LIGHTNING_BNN_DEVICE` names another, such as `cuda`.
"""

import contextlib
import copy
import logging
import os
import tempfile
import traceback
import warnings
from functools import partial

import lightning as L
import torch
from cases import Forward
from checked_symmetries import moved_at_random
from cpu_draws import cpu_draws
from known_networks import NETWORKS
from known_networks.mixing import Decoder
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from metric_cases import METRICS
from module_cases import MODULES, Blobs, made, network
from runs import QUIET, Plain, built, fit
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from lightning_bnn import metrics as M
from lightning_bnn import posteriors, samplers, testing
from lightning_bnn import symmetry as S
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import (
    ChainDiagnostics,
    CheckpointHarvester,
    MassGap,
    PermutationTau,
    PosteriorDoctor,
    PosteriorFigures,
    TrainingCost,
)
from lightning_bnn.evaluation import predictions_of_mode
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.models import mlp
from lightning_bnn.modules import SWAG, DeepEnsemble, Laplace
from weightsym import params as P
from weightsym.networks.forward import same_noise
from weightsym.networks.randomness import keyed_randomness

DEVICE = os.environ.get("LIGHTNING_BNN_DEVICE", "pretended")
REAL = DEVICE != "pretended"
PRECISION = "64-true" if REAL else "32-true"
"""Of what is trained: rounding decides where Adam moves a weight that the loss does not see."""
TOLERANCE = 1e-4 if REAL else 0.0
"""Of differences, relative to 1 + size: sums of single precision have another order."""


def lost_network():
    """A mistake to be found: a constant that is no buffer, and so stays on the CPU."""
    return Forward(lambda s, x: s.layer(x) + s.shift, layer=nn.Linear(6, 3), shift=torch.ones(3))


def options(device):
    place = {"accelerator": "gpu", "devices": 1}
    if device == "cpu":
        place = {}
    elif device == "pretended":
        place = testing.trainer_options()
    return {**QUIET, "max_epochs": 2, "precision": PRECISION, **place}


def trained(module, device, **more):
    """The state after training, and the numbers of a test; SWAG collects from a second epoch on."""
    epochs = {"max_epochs": 2 if isinstance(module, SWAG) else 1}
    trainer, data = L.Trainer(**{**options(device), **epochs, **more}), Blobs()
    trainer.fit(module, data)
    if REAL and isinstance(module, Laplace):  # the signs of eigenvectors decide what is drawn
        return densities(module)
    numbers = trainer.test(module, data, verbose=False)
    return module.state_dict(), {k: torch.tensor(v) for k, v in numbers[0].items()}


def densities(module):
    """Those of five networks around the first, by every mode of a posterior."""
    around = {
        n: t[:1] + 0.1 * torch.randn(5, *t.shape[1:], generator=_generator(0)).to(t)
        for n, t in module.state.stack().items()
    }
    return [mode.log_prob(around) for mode in module.posterior().modes()]


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
    module = DeepEnsemble(net, members=3, max_loss=50.0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 20)
    L.Trainer(**options(device)).fit(module, loader)
    return module.state_dict()


def populated(members, device):
    """A network, its symmetries, a stack of such networks there, and the first two of them."""
    torch.manual_seed(0)
    net = mlp(6, [8, 5], 3)
    stack = moved(P.populate(net, members, torch.Generator().manual_seed(0)), device)
    pair = ({k: v[i] for k, v in stack.items()} for i in (0, 1))
    return net, S.discover(net, torch.randn(2, 6)), stack, *pair


def symmetries(device):
    """Every way to act on a stack, in one tree."""
    net, sym, stack, one, two = populated(4, device)
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
    net, sym, _, a, b = populated(2, device)
    batches = moved([(torch.randn(9, 6), torch.randint(3, (9,))) for _ in range(3)], device)
    net = copy.deepcopy(net).to(device)
    data = {"model": net, "batches": batches, "loss": torch.nn.functional.cross_entropy}
    ways = ("activations", "learned")
    found = {w: S.match(a, b, sym, method=w, learning=S.Learning(steps=3), **data) for w in ways}
    return {
        "permutations": {way: list(f) for way, f in found.items()},
        "repaired": S.repair(net, S.interpolate(a, b, 0.5), a, b, 0.5, batches).params,
    }


def acted(device):
    """Symmetries that are read off a network there, of units, heads and channels."""
    return {name: acted_on(*moved(NETWORKS[name].made(), device)) for name in ACTED}


def acted_on(net, inputs):
    sym, params = S.discover(net, *inputs), P.of(net)
    one, two = (moved_at_random(params, sym, _generator(k)) for k in (0, 1))
    canonical = S.canonicalise(one, sym)
    kinds = sym.permutations, sym.scalings, sym.signs, sym.linear, sym.shifts
    rest = 0.0 if isinstance(net, Decoder) else S.relation(one, params, sym).difference.rest
    return {
        "groups": torch.tensor([len(groups) for groups in kinds]),
        "moved": one,
        "canonical": S.mass(canonical, sym) if sym.linear else canonical,  # up to rotations
        "norms": torch.tensor(list(S.fingerprint(one, sym).norms.values())),
        "average": S.average(P.stack([one, two]), sym),
        "function": net(*inputs) - torch.func.functional_call(net, one, inputs),
        "rest": torch.tensor(rest),  # of a decoder it takes seconds there
    }


def sampled(device):
    """Samplers and schedules without a module."""
    chains = {}
    for name, build in SAMPLERS.items():
        theta = nn.Parameter(torch.ones(4, 3, dtype=torch.float64).to(device))
        sampler = build([theta])
        schedule = samplers.CyclicalSchedule(sampler, 4) if "sg" in name else None

        def energy(theta=theta):
            theta.grad = theta.detach().clone()
            return theta.detach().square().sum(1) / 2

        for _ in range(5):
            sampler.step(energy)
            if schedule:
                schedule.step()
        chains[name] = theta
    return chains


def predicted(device):
    """Predictions from a bank, and from posteriors that draw there."""
    torch.manual_seed(0)
    net, x = mlp(6, [8], 3).double().eval(), torch.randn(9, 6, dtype=torch.float64)
    there, inputs = copy.deepcopy(net).to(device), x.to(device)
    stack = moved(P.populate(net, 5, _generator(0)), device)
    with tempfile.TemporaryDirectory() as folder:
        with CheckpointBank(folder) as bank:
            bank.extend(stack, [{} for _ in range(5)])
        stored = CheckpointBank(folder, "r")[:]
    gaussian = posteriors.DiagonalGaussian.fit(stack)
    every = [
        posteriors.Empirical(stack), gaussian, posteriors.LowRankGaussian.fit(stack, rank=2),
        posteriors.Mixture([gaussian, posteriors.Empirical(stack)]),
    ]  # fmt: skip
    of = Categorical(), [[(x, torch.arange(9) % 3)]], (2, 4), 0
    return {
        "bank": P.apply(there, moved(stored, device), inputs),
        "drawn": [p.predict(there, inputs, 4, generator=_generator(1, device)) for p in every],
        "modes": [
            predictions_of_mode(m, net, *of, 0, device=device)[0][1].probs for m in every[:3]
        ],
    }


def observed(device):
    """What every other callback sees, and what is harvested; figures go to TensorBoard."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        logger = TensorBoardLogger(folder)
        for name in ("sghmc", "mfvi", "population"):
            harvester = CheckpointHarvester(f"{folder}/{name}", every_n_steps=3)
            looks = [harvester, PosteriorDoctor(), TrainingCost()]
            looks += [ChainDiagnostics(), PosteriorFigures(9)] if name == "sghmc" else []
            watching = {"callbacks": looks, "logger": logger}
            module, trainer = made(name, batch_norm=True), L.Trainer(**options(device) | watching)
            trainer.fit(module, Blobs())
            numbers = {k: v for k, v in trainer.callback_metrics.items() if "cost" not in k}
            found[name] = numbers, CheckpointBank(f"{folder}/{name}", "r")[:]
    return found


def continued(make, *devices):
    """The state after an epoch on every one of some devices, in a run that is resumed on each."""
    with tempfile.TemporaryDirectory() as folder:
        path = None
        for epochs, device in enumerate(devices, 1):
            if device is None:  # this epoch is not interrupted
                continue
            module = make()
            trainer = L.Trainer(
                **{**options(device), "max_epochs": epochs, "limit_train_batches": 3}
            )
            trainer.fit(module, Blobs(), ckpt_path=path, weights_only=path and False)
            trainer.save_checkpoint(path := f"{folder}/{epochs}.ckpt")
    return module.state_dict()


def carried(device):
    """A run that goes on elsewhere, and one that comes back."""
    parts = {"mfvi": (device, "cpu"), "population": ("cpu", device)}
    return {n: continued(partial(made, n, batch_norm=True), *places) for n, places in parts.items()}


def single_precision(device):
    """The numbers of a test, which rounding moves less than weights."""
    torch.manual_seed(0)
    return trained(DeepEnsemble(network(), members=3), device, precision="32-true")[1]


def autocast(device):
    torch.manual_seed(0)
    lower = MixedPrecision("bf16-mixed", torch.device(device).type)
    return trained(DeepEnsemble(network(), members=3), device, precision=None, plugins=lower)[1]


def lost(device):
    return trained(DeepEnsemble(lost_network(), members=2), device)


def _generator(seed, device="cpu"):
    return torch.Generator(device).manual_seed(seed)


ACTED = ("mlp", "tanh mlp", "norms of padding", "torch's attention", "heads")
SAMPLERS = {
    "sgld": lambda p: samplers.SGLD(p, lr=0.05, num_data=10),
    "sghmc": lambda p: samplers.SGHMC(p, lr=0.05, num_data=10),
    "smile": lambda p: samplers.SMILE(p, 0.1, 10, descent_steps=1, adapt_steps=4),
    "hmc": lambda p: samplers.HMC(p, 0.1, 3, adapt_steps=3),
    "mclmc": lambda p: samplers.MCLMC(p, 0.1, 1, descent_steps=1, adapt_steps=3),
}
OTHERS = {
    "callbacks": watched,
    "images": images,
    "symmetries": symmetries,
    "matching": matching,
    "actions": acted,
    "samplers": sampled,
    "predictions": predicted,
    "all callbacks": observed,
    "another device": carried,
    "autocast": autocast,
    "single precision": single_precision,
    "lost": lost,
}


def computations():
    """Name -> what is computed on a device."""
    modules = {
        name: lambda device, name=name: trained(made(name, batch_norm=True), device)
        for name in MODULES
    }
    metrics = {c.name: lambda device, case=c: metric(case, device) for c in METRICS}
    return {**modules, **metrics, **OTHERS}


def moved(tree, device):
    def move(leaf):
        return leaf.detach().to(device) if isinstance(leaf, torch.Tensor) else leaf.to(device)

    return tree_map_only((torch.Tensor, nn.Module), move, tree)


def difference(one, two):
    """The largest between trees of tensors, relative to 1 + the size of a number; it is printed."""
    (found, _), (wanted, spec) = tree_flatten_with_path(one), tree_flatten_with_path(two)
    assert len(found) == len(wanted) > 0, spec
    worst = 0.0, "everywhere"
    for (path, a), (_, b) in zip(found, wanted, strict=True):
        if isinstance(b, torch.Tensor) and b.numel():
            a, b = a.cpu().double(), b.double()
            worst = max(worst, (((a - b).abs() / (1 + b.abs())).max().item(), keystr(path)))
    print("largest difference:", *worst)
    return worst[0]


@contextlib.contextmanager
def ready(draws_of_cpu=True):
    """The device, as comparable with the CPU as it gets."""
    logging.disable(logging.CRITICAL)
    if not REAL:
        testing.register(draws_of_cpu)
    torch.backends.cudnn.allow_tf32 = False
    with cpu_draws(DEVICE) if REAL and draws_of_cpu else contextlib.nullcontext():
        yield


def compared(name):
    """The largest difference between the device and the CPU, or what went wrong."""
    return _answer(lambda: difference(computations()[name](DEVICE), computations()[name]("cpu")))


# ------------------------------------------------------------ with its own random numbers
def resumed(make):
    return difference(continued(make, DEVICE, DEVICE), moved(continued(make, None, DEVICE), "cpu"))


def drawn_again(beginning):
    """The difference between draws that begin alike, and between states before and after."""
    module, draws, states = torch.get_device_module(DEVICE), [], []
    for _ in range(2):
        torch.rand(3, device=DEVICE)
        states.append((module.get_rng_state(), torch.get_rng_state()))
        with beginning():
            draws.append(moved((draws_like(), draws_like().bernoulli()), "cpu"))
        states.append((module.get_rng_state(), torch.get_rng_state()))
    return difference([draws[0], *states[::2]], [draws[1], *states[1::2]])


def draws_like():
    return torch.rand(50, device=DEVICE)


def draws_of_the_cpu():
    """What the CPU draws, less what it does while the device draws, too."""
    torch.manual_seed(0)
    alone = torch.rand(3)
    torch.manual_seed(0)
    torch.rand(3, device=DEVICE)
    return difference(torch.rand(3), alone)


LAWS = {
    **{
        f"resumed {name}": partial(resumed, partial(made, name, dropout=0.2, batch_norm=True))
        for name in ("population", "mfvi", "sghmc", "hmc", "multi-dropout", "multi-swag")
    },
    "a key": lambda: drawn_again(lambda: keyed_randomness(1, device=DEVICE)),
    "same noise": lambda: drawn_again(lambda: same_noise([torch.ones(1, device=DEVICE)])),
    "the CPU": draws_of_the_cpu,
}
CONTROLS = {
    "resumed dropout of others": lambda: resumed(partial(built, Plain, 0.5)),
    "no key": lambda: drawn_again(contextlib.nullcontext),
}


def kept(name):
    """How far a law is from being kept by a device with its own random numbers."""
    return _answer((LAWS | CONTROLS)[name])


def _answer(compute):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return compute()
        except Exception:
            return traceback.format_exc()


def ready_with_own_draws():
    return ready(draws_of_cpu=False)
