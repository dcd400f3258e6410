"""Runs with a fault that was put in, and healthy ones, for the verdicts of the doctor.

Every case is a module, its data and its trainer, small enough for seconds. A fault changes one
thing of a healthy run of the same method.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_bnn import samplers
from lightning_bnn.datamodules import Diabetes, Digits, TwoGaussians, Yacht
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.models import mlp
from lightning_bnn.modules import (
    HMC,
    IVON,
    MFVI,
    MILE,
    SGHMC,
    SWAG,
    DeepEnsemble,
    Laplace,
    MCDropout,
    SymmetrizedVI,
)

__all__ = ["FAULTS", "HEALTHY", "Case", "Run"]


@dataclass
class Run:
    """What is trained: a module, its data, for how many epochs."""

    module: Any
    data: Any
    epochs: int
    callbacks: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """A run with a fault, the verdicts that find it, and the two problems that it is tried on."""

    make: Callable[[str, int], Run]
    verdicts: tuple[str, ...]
    problems: tuple[str, str]


CLASSES, NUMBERS = ("digits", "gaussians"), ("yacht", "diabetes")
MIXED = ("digits", "diabetes")


# ------------------------------------------------------------ problems
def data_of(problem: str, seed: int, batch_size: int | None = None) -> Any:
    """The data of a problem, split by the seed."""
    if problem == "digits":
        return Digits(batch_size=batch_size or 64, seed=seed, val_share=0.25)
    if problem == "gaussians":  # which has no validation data of its own
        return Changed(TwoGaussians(batch_size=batch_size or 32, size=150, gap=0.5, seed=seed))
    if problem == "yacht":
        return Yacht(batch_size=batch_size or 32, split=seed, seed=seed, val_size=80)
    return Diabetes(batch_size=batch_size or 32, split=seed, seed=seed, val_size=100)


def network_of(problem: str, seed: int, activation: Any = nn.ReLU) -> nn.Module:
    """A small network for it."""
    torch.manual_seed(seed)
    sizes = {"digits": (64, 16, 10), "gaussians": (2, 10, 2), "yacht": (6, 10, 1)}
    inputs, hidden, outputs = sizes.get(problem, (10, 10, 1))
    return mlp(inputs, [hidden], outputs, activation=activation)


def noise_of(problem: str, learned: bool = True) -> dict[str, Any]:
    """The likelihood of numbers, as an argument of modules; nothing for classes."""
    if problem in CLASSES:
        return {}
    std = 0.25 if problem == "yacht" else 0.7
    return {"likelihood": Gaussian("learned" if learned else "fixed", std)}


def adam(lr: float = 1e-2, **options: Any) -> Any:
    """Makes Adam from parameters."""
    return partial(torch.optim.Adam, lr=lr, **options)


# ------------------------------------------------------------ healthy runs
def ensemble(problem: str, seed: int, epochs: int = 40, **options: Any) -> Run:
    """Five members with a little weight decay."""
    options = {"members": 5, "optimizer": adam(weight_decay=1e-3), **options}
    module = DeepEnsemble(network_of(problem, seed), seed=seed, **noise_of(problem), **options)
    return Run(module, data_of(problem, seed), epochs)


def with_noise(problem: str, seed: int, factor: float) -> Run:
    """An ensemble with a fixed noise that is not that of the data."""
    likelihood = Gaussian("fixed", factor * (0.1 if problem == "yacht" else 0.7))
    module = DeepEnsemble(
        network_of(problem, seed), members=5, seed=seed, likelihood=likelihood,
        optimizer=adam(weight_decay=1e-3),
    )  # fmt: skip
    return Run(module, data_of(problem, seed), 60)


def vi(problem: str, seed: int, kind: Any = MFVI, epochs: int = 80, **options: Any) -> Run:
    """Mean-field inference, trained to the end."""
    options = {"prior_std": 0.5, "init_std": 0.05, "optimizer": adam(2e-2), **options}
    schedule = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[55], gamma=0.2)
    module = kind(
        network_of(problem, seed), seed=seed, lr_scheduler=schedule, **noise_of(problem), **options
    )
    return Run(module, data_of(problem, seed), epochs)


def ivon(problem: str, seed: int, **options: Any) -> Run:
    """Natural gradients, for as many epochs."""
    rate = 0.05 if problem in CLASSES else 0.02
    optimizer = partial(samplers.IVON, lr=rate, hessian_momentum=0.999, hessian_init=0.3)
    schedule = partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[150], gamma=0.2)
    module = IVON(
        network_of(problem, seed), seed=seed, prior_std=0.5, lr_scheduler=schedule,
        optimizer=optimizer, **noise_of(problem), **options,
    )  # fmt: skip
    return Run(module, data_of(problem, seed), 200)


def swag(problem: str, seed: int, network: Any = None, **options: Any) -> Run:
    """Three members of SWAG."""
    options = {"members": 3, "optimizer": adam(weight_decay=1e-3), "start": 20, **options}
    network = network_of(problem, seed) if network is None else network
    module = SWAG(network, seed=seed, **noise_of(problem), **options)
    return Run(module, data_of(problem, seed), 40)


def dropout(problem: str, seed: int, p: float = 0.1) -> Run:
    """Three members with dropout."""
    module = MCDropout(
        network_of(problem, seed), members=3, p=p, seed=seed,
        optimizer=adam(weight_decay=1e-3), **noise_of(problem),
    )  # fmt: skip
    return Run(module, data_of(problem, seed), 40)


def laplace(problem: str, seed: int, **options: Any) -> Run:
    """Three members with a Gaussian around each."""
    options = {"members": 3, "prior_std": 1.0, "optimizer": adam(), **options}
    module = Laplace(network_of(problem, seed), seed=seed, **noise_of(problem), **options)
    return Run(module, data_of(problem, seed), 40)


def sghmc(problem: str, seed: int, epochs: int = 1500, **options: Any) -> Run:
    """Four chains with minibatches."""
    lr = {"digits": 0.02, "gaussians": 0.1, "yacht": 1e-4, "diabetes": 0.03}[problem]
    options = {
        "members": 4, "prior_std": 1.0, "burn_in": epochs // 3, "every_n_epochs": 5,
        "optimizer": partial(samplers.SGHMC, lr=lr, momentum=0.95), **options,
    }  # fmt: skip
    module = SGHMC(network_of(problem, seed), seed=seed, **noise_of(problem, False), **options)
    return Run(module, data_of(problem, seed, 128), epochs)


def hmc(problem: str, seed: int, steps: int = 240, **options: Any) -> Run:
    """Four chains with all data."""
    sampler = partial(samplers.HMC, step_size=5e-3, leapfrog_steps=40, adapt_steps=60)
    options = {"members": 4, "burn_in": 90, "every_n_steps": 2, "optimizer": sampler, **options}
    network = network_of(problem, seed, nn.Tanh)
    module = HMC(network, seed=seed, **noise_of(problem, False), **options)
    return Run(module, data_of(problem, seed, 4096), steps)


def mile(problem: str, seed: int, steps: int = 500, **options: Any) -> Run:
    """Four microcanonical chains."""
    network = network_of(problem, seed, nn.Tanh)
    options = {"members": 4, "burn_in": 320, "every_n_steps": 2, **options}
    module = MILE(network, seed=seed, **noise_of(problem, False), **options)
    return Run(module, data_of(problem, seed, 4096), steps)


HEALTHY: dict[str, tuple[Callable[[str, int], Run], tuple[str, ...]]] = {
    "ensemble": (ensemble, ("digits", "gaussians", "yacht", "diabetes")),
    "MFVI": (vi, ("digits", "gaussians", "yacht", "diabetes")),
    "symmetrized VI": (partial(vi, kind=SymmetrizedVI), ("gaussians", "diabetes")),
    "IVON": (ivon, ("gaussians", "diabetes")),
    "SWAG": (swag, ("digits", "diabetes")),
    "dropout": (dropout, ("digits", "yacht")),
    "Laplace": (laplace, ("gaussians", "diabetes")),
    "SGHMC": (sghmc, ("gaussians", "diabetes")),
    "HMC": (hmc, ("gaussians", "diabetes")),
    "MILE": (mile, ("gaussians", "diabetes")),
}
"""Runs without a fault, and the problems that they are made on."""


# ------------------------------------------------------------ faults in the data
Change = Callable[[Any, Any, str], tuple[Any, Any]]
"""From inputs, targets and the part of the data to other inputs and targets."""


class Changed(L.LightningDataModule):
    """A datamodule whose tensors are changed before they are loaded."""

    def __init__(self, data: Any, change: Change | None = None) -> None:
        super().__init__()
        self.data = data
        self.change = change or (lambda x, y, part: (x, y))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("data"), name)

    def setup(self, stage: str) -> None:
        self.data.setup(stage)

    def train_dataloader(self) -> Any:
        return _Loader(self.data.train_dataloader(), self, "train")

    def val_dataloader(self) -> Any:
        loader = self.data.val_dataloader()
        if not isinstance(loader, list):
            return _Loader(loader, self, "val")
        others = TwoGaussians(size=150, gap=0.5, seed=self.data.seed + 1000)
        others.setup("test")
        return _Loader(others.test_dataloader()[0], self, "val")

    def test_dataloader(self) -> Any:
        loader = self.data.test_dataloader()
        return _Loader(loader[0] if isinstance(loader, list) else loader, self, "test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class _Loader:
    """Batches of a loader, as the network takes them, changed."""

    def __init__(self, loader: Any, owner: Changed, part: str) -> None:
        self.loader, self.owner, self.part = loader, owner, part
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def example(self, rows: int) -> Any:
        """The first rows, for whoever needs to know what inputs look like."""
        return tuple(t[:rows] for t in next(iter(self)))

    def __iter__(self) -> Any:
        for batch in self.loader:
            x, y = self.owner.data.on_after_batch_transfer(batch, 0)[:2]
            yield self.owner.change(x, y, self.part)


def changed(make: Callable[..., Run], change: Any, problem: str, seed: int) -> Run:
    """A healthy run on data that are changed."""
    run = make(problem, seed)
    return Run(run.module, Changed(run.data, change), run.epochs)


def with_noisy_labels(x: Any, y: Any, part: str) -> tuple[Any, Any]:
    """A third of the labels is drawn anew, always alike for the same example."""
    key = (x.double() * torch.arange(1, x[0].numel() + 1).view_as(x[0])).flatten(1).sum(1)
    wrong = (key * 1e4).long() % 3 == 0
    return x, torch.where(wrong, (key * 1e3).long().abs() % (int(y.max()) + 1), y)


def by_heart(problem: str, seed: int) -> Run:
    """A wide network that learns noisy labels by heart."""
    torch.manual_seed(seed)
    network = mlp(64, [256], 10) if problem == "digits" else mlp(2, [200, 200], 2)
    module = DeepEnsemble(network, members=1, seed=seed, optimizer=adam())
    data = (
        data_of(problem, seed)
        if problem == "digits"
        else Changed(TwoGaussians(16, size=30, seed=seed))
    )
    return Run(module, Changed(data, with_noisy_labels), 60 if problem == "digits" else 300)


def with_random_targets(x: Any, y: Any, part: str) -> tuple[Any, Any]:
    """Targets that do not belong to their inputs."""
    return x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(len(y)))]


# ------------------------------------------------------------ faults in networks
def with_softmax(problem: str, seed: int) -> Run:
    """A network that ends in a softmax."""
    network = nn.Sequential(network_of(problem, seed), nn.Softmax(-1))
    module = DeepEnsemble(network, members=3, seed=seed, optimizer=adam())
    return Run(module, data_of(problem, seed), 20)


def one_output_too_many(problem: str, seed: int) -> Run:
    """Labels from 1 on, and an output for 0."""
    torch.manual_seed(seed)
    sizes = {"digits": (64, 16, 11), "gaussians": (2, 10, 3)}[problem]
    network = mlp(sizes[0], [sizes[1]], sizes[2])
    module = DeepEnsemble(network, members=3, seed=seed, optimizer=adam())
    return Run(module, Changed(data_of(problem, seed), lambda x, y, _: (x, y + 1)), 20)


class FromOneSeed(L.Callback):
    """Makes all members copies of the first one before the first step."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for tensor in pl_module.state.parameters():
                tensor.copy_(tensor[:1].expand_as(tensor).clone())


def copies(problem: str, seed: int) -> Run:
    """An ensemble whose members all start at the same weights."""
    run = ensemble(problem, seed)
    return Run(run.module, run.data, run.epochs, [FromOneSeed()])


class Breaks(L.Callback):
    """Gives one member weights that are not finite, at the end of an epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 10:
            with torch.no_grad():
                next(pl_module.state.parameters())[1] = torch.nan


def broken_member(problem: str, seed: int) -> Run:
    """One member of five becomes NaN."""
    run = ensemble(problem, seed)
    return Run(run.module, run.data, run.epochs, [Breaks()])


class Shakes(L.Callback):
    """Adds noise to the weights of one member after every step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for tensor in pl_module.state.parameters():
                if tensor.ndim > 1:
                    tensor[2] += 2 * torch.randn_like(tensor[2])


def shaken_member(problem: str, seed: int) -> Run:
    """One member of five never settles."""
    run = ensemble(problem, seed)
    return Run(run.module, run.data, run.epochs, [Shakes()])


def lost(problem: str, seed: int) -> Run:
    """All members become infinite."""
    return ensemble(problem, seed, 3, optimizer=partial(torch.optim.SGD, lr=1e30))


def with_batch_norm(problem: str, seed: int, momentum: float = 0.1) -> Run:
    """Networks with BatchNorm, whose statistics follow with a momentum; with none they never do."""
    torch.manual_seed(seed)
    sizes = {"digits": (64, 32, 10), "gaussians": (2, 16, 2)}[problem]
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(sizes[0], sizes[1]), nn.BatchNorm1d(sizes[1], momentum=momentum),
        nn.ReLU(), nn.Linear(sizes[1], sizes[2]),
    )  # fmt: skip
    module = DeepEnsemble(network, members=3, seed=seed, optimizer=adam(3e-2))
    return Run(module, Changed(data_of(problem, seed, 50), lambda x, y, _: (3 * x + 5, y)), 25)


HEALTHY["ensemble with BatchNorm"] = (with_batch_norm, CLASSES)
FAULTS: dict[str, Case] = {
    "deviations that never grow": Case(
        partial(vi, init_std=1e-4, optimizer=adam(2e-3), epochs=40),
        ("wrong_deviations",),
        MIXED,
    ),
    "deviations that never shrink": Case(
        partial(vi, prior_std=2.0, init_std=1.0, optimizer=adam(5e-4), epochs=20),
        ("wrong_deviations",),
        MIXED,
    ),
    "KL weight 0.001": Case(
        partial(vi, kl_weight=1e-3),
        ("not_the_posterior_of_bayes", "wrong_deviations"),
        MIXED,
    ),
    "KL weight 100": Case(
        partial(vi, kl_weight=100.0), ("not_the_posterior_of_bayes", "prior_dominates"), MIXED
    ),
    "temperature 0.01 of MFVI": Case(
        partial(vi, temperature=0.01), ("not_the_posterior_of_bayes", "wrong_deviations"), MIXED
    ),
    "temperature 10 of symmetrized VI": Case(
        partial(vi, kind=SymmetrizedVI, temperature=10.0),
        ("not_the_posterior_of_bayes", "wrong_deviations"),
        ("gaussians", "diabetes"),
    ),
    "temperature 0.1 of IVON": Case(
        partial(ivon, temperature=0.1), ("not_the_posterior_of_bayes",), MIXED
    ),
    "temperature 0.1 of Laplace": Case(
        partial(laplace, temperature=0.1),
        ("not_the_posterior_of_bayes",),
        ("gaussians", "diabetes"),
    ),
    "100 times too few examples told": Case(
        partial(vi, num_data=10), ("not_the_posterior_of_bayes",), MIXED
    ),
    "100 times too many examples told": Case(
        partial(vi, num_data=100_000), ("not_the_posterior_of_bayes",), MIXED
    ),
    "a prior that holds everything": Case(
        partial(vi, prior_std=0.01, init_std=0.01),
        ("prior_dominates", "no_better_than_frequencies"),
        MIXED,
    ),
    "weight decay beside the prior": Case(
        partial(vi, optimizer=adam(2e-2, weight_decay=1e-2), epochs=30),
        ("not_the_posterior_of_bayes",),
        MIXED,
    ),
    "softmax at the end": Case(with_softmax, ("probabilities_as_logits",), CLASSES),
    "labels from 1 on": Case(one_output_too_many, ("labels_out_of_range",), CLASSES),
    "labels out of range": Case(
        partial(changed, ensemble, lambda x, y, _: (x, y + 1)), ("labels_out_of_range",), CLASSES
    ),
    "targets in thousands": Case(
        partial(changed, ensemble, lambda x, y, _: (x, 1000 * y + 5000)),
        ("not_standardised",),
        NUMBERS,
    ),
    "inputs in hundreds": Case(
        partial(changed, vi, lambda x, y, _: (300 * x, y)), ("not_standardised",), MIXED
    ),
    "random targets": Case(
        partial(changed, partial(vi, epochs=30), with_random_targets),
        ("no_better_than_frequencies", "prior_dominates"),
        MIXED,
    ),
    "noisy labels learned by heart": Case(by_heart, ("miscalibrated",), CLASSES),
    "noise assumed far too large": Case(
        partial(with_noise, factor=8.0), ("miscalibrated",), NUMBERS
    ),
    "noise assumed far too small": Case(
        partial(with_noise, factor=0.1), ("miscalibrated",), NUMBERS
    ),
    "training stopped early": Case(
        partial(ensemble, optimizer=adam(3e-4)), ("loss_not_converged",), ("digits", "yacht")
    ),
    "learning rate of nothing": Case(
        partial(ensemble, optimizer=adam(1e-8)), ("no_better_than_frequencies",), MIXED
    ),
    "members that are copies": Case(copies, ("draws_alike",), MIXED),
    "a member that becomes NaN": Case(broken_member, ("members_diverged", "no_posterior"), MIXED),
    "a member that never settles": Case(shaken_member, ("members_diverged",), MIXED),
    "a rate that loses all members": Case(lost, ("no_posterior",), MIXED),
    "two members of many modes": Case(
        partial(ensemble, members=2, optimizer=adam(2e-2), epochs=200),
        ("modes_too_few",),
        MIXED,
    ),
    "dropout that drops nothing": Case(
        partial(dropout, p=1e-6), ("draws_alike",), ("digits", "yacht")
    ),
    "SWAG without steps": Case(
        partial(swag, swa_lr=1e-9, ramp=1, optimizer=partial(torch.optim.SGD, lr=0.05)),
        ("draws_alike",),
        MIXED,
    ),
    "statistics never estimated": Case(
        partial(with_batch_norm, momentum=0.0), ("statistics_of_other_networks",), CLASSES
    ),
    "SGHMC with huge steps": Case(
        partial(sghmc, epochs=60, optimizer=partial(samplers.SGHMC, lr=4.0, momentum=0.95)),
        ("step_too_large", "members_diverged", "no_posterior"),
        ("gaussians", "diabetes"),
    ),
    "SGHMC without burn-in": Case(
        partial(sghmc, epochs=30, burn_in=0, every_n_epochs=1),
        ("not_burnt_in", "chains_not_converged"),
        ("digits", "gaussians"),
    ),
    "HMC with huge steps": Case(
        partial(
            hmc,
            burn_in=20,
            steps=80,
            optimizer=partial(samplers.HMC, step_size=0.5, leapfrog_steps=20),
        ),
        ("step_too_large", "draws_alike"),
        ("gaussians", "diabetes"),
    ),
    "HMC with tiny steps": Case(
        partial(
            hmc,
            burn_in=20,
            steps=80,
            optimizer=partial(samplers.HMC, step_size=1e-4, leapfrog_steps=5),
        ),
        ("not_burnt_in", "chains_not_converged"),
        ("gaussians", "diabetes"),
    ),
    "MILE with huge steps": Case(
        partial(
            mile,
            steps=120,
            burn_in=20,
            optimizer=partial(
                samplers.MCLMC, step_size=8.0, adapt_steps=0, descent_steps=50, length=10.0
            ),
        ),
        ("step_too_large", "members_diverged"),
        ("gaussians", "diabetes"),
    ),
}
"""Runs with a fault, by what was done."""
