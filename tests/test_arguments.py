"""Every number and choice that a constructor takes is checked when it is given, not later."""

import inspect
import math
import re

import lightning as L
import numpy as np
import pytest
import torch
from module_cases import network
from torch import nn

from lightning_bnn import bank, callbacks, likelihoods, models, modules, samplers
from lightning_bnn.harvest import Schedule
from lightning_bnn.modules import by_method

pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHT = [nn.Parameter(torch.zeros(2, 3))]


def from_checkpoints(**options):
    torch.save(network().state_dict(), options["source"])
    return modules.FromCheckpoints(network(), **options)


CLASSES = {
    **{
        name: getattr(modules, name)
        for name in by_method.__all__
        if name not in ("FromCheckpoints", "lightning_class")
    },
    **{f"samplers.{cls.__name__}": cls for cls in (
        samplers.SGHMC, samplers.SGLD, samplers.SMILE, samplers.HMC,
        samplers.MCLMC, samplers.CyclicalSchedule,
    )},
    **{
        f"callbacks.{name}": getattr(callbacks, name)
        for name in callbacks.__all__
        if issubclass(getattr(callbacks, name), L.Callback)
    },
    "Gaussian": likelihoods.Gaussian,
    "IsotropicGaussianPrior": likelihoods.IsotropicGaussianPrior,
    "Schedule": Schedule,
}  # fmt: skip
FIRST = {name: network(dropout=0.2) for name in CLASSES if hasattr(modules, name)}
FIRST |= {name: network() for name in ("MCDropout", "HMC", "MILE")}
FIRST |= {name: WEIGHT for name in CLASSES if name.startswith("samplers.")}
FIRST["samplers.CyclicalSchedule"] = samplers.SGLD([nn.Parameter(torch.zeros(2, 3))])
"""What comes before all numbers and choices."""
NEEDED = {
    "MCDropout": {"p": 0.2},
    "samplers.CyclicalSchedule": {"cycle_length": 5},
    "Schedule": {"every_n_steps": 1},
}


def make(name, **options):
    first = [FIRST[name]] if name in FIRST else []
    return CLASSES[name](*first, **NEEDED.get(name, {}) | options)


BAD = {
    "int": [math.nan, math.inf, -1, 0, 1.5, True, "3"],
    "float": [math.nan, math.inf, -1.0, 0.0, True, "3"],
    "Literal": ["nix"],
}
ZERO = {
    "seed", "temperature", "kl_weight", "burn_in", "start", "ramp",
    "scale", "p", "lr", "prior_precision", "weight_decay", "momentum", "alpha", "adapt_steps",
    "jitter", "descent_steps", "exploration", "localization",
}  # fmt: skip
"""Numbers that may be zero somewhere."""


def allowed(name, value):
    """Whether a value is one like any other; of the last epoch torch knows."""
    return (name, value) == ("seed", -1) or name == "last_epoch" or value == 0 and name in ZERO


def numeric(cls):
    """Names and types of the numbers and choices that a class and those below it take."""
    found = {}
    for owner in reversed(cls.__mro__):
        init = vars(owner).get("__init__")
        if init is None or not owner.__module__.startswith(("lightning_bnn", "weightsym")):
            continue
        parameters = dict(inspect.signature(init).parameters)
        for name, parameter in parameters.items():
            annotation = inspect.formatannotation(parameter.annotation).strip("'")
            annotation = re.sub(r"Union\[float, .*", "float", annotation.replace("typing.", ""))
            annotation = annotation.replace(" | tuple[int, int]", "")
            kind = re.match(r"(int|float|Literal)( \| None$|$|\[)", annotation)
            if kind:
                found[name] = kind[1]
    own = inspect.signature(cls).parameters
    passes_on = any(p.kind is p.VAR_KEYWORD for p in own.values())
    return {name: kind for name, kind in found.items() if passes_on or name in own}


CASES = [
    (maker, name, value)
    for maker, cls in CLASSES.items()
    for name, kind in numeric(cls).items()
    for value in BAD[kind]
    if not allowed(name, value)
]


def test_the_law_is_about_something():
    names = {name for _, name, _ in CASES}
    wanted = {"temperature", "kl_weight", "init_std", "every_n_steps", "members"}
    wanted |= {"prior_std", "momentum", "leapfrog_steps", "scale", "std", "kl", "structure"}
    assert wanted <= names
    assert len(CASES) > 600


@pytest.mark.bad_input
@pytest.mark.parametrize("maker", CLASSES)
def test_values_that_cannot_be_meant_are_refused_by_name(maker):
    accepted = []
    for _, name, value in (case for case in CASES if case[0] == maker):
        extra = {"every_n_steps": None} if maker == "Schedule" and name == "every_n_epochs" else {}
        try:
            make(maker, **{**extra, name: value})
        except (ValueError, TypeError) as error:
            if f"`{name}`" not in str(error):
                accepted.append((name, value, str(error)))
        else:
            accepted.append((name, value, "accepted"))
    assert not accepted


@pytest.mark.bad_input  # annotations say less than what is allowed
def test_what_a_command_line_gives_is_taken():
    """Numbers such as 1e-3, whole ones for real ones, and those of numpy and torch."""
    for one in (1, 1e-3, np.float32(0.5), np.int64(2), torch.tensor(0.5)):
        modules.MFVI(network(), prior_std=one, temperature=one, kl_weight=one)
        samplers.SGLD(WEIGHT, lr=one)
    modules.DeepEnsemble(network(), members=np.int64(2), seed=-3, eval_samples=np.int32(3))
    samplers.HMC(WEIGHT, step_size=1, leapfrog_steps=np.int64(3))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: bank.CheckpointBank(path, dtype=torch.int8), "`dtype` must be a floating"),
        (lambda path: bank.CheckpointBank(path, dtype="half"), "`dtype` must be.*got 'half'"),
        *(
            (
                lambda path, o=o: from_checkpoints(source=str(path / "it.pt"), **o),
                f"`{next(iter(o))}`",
            )
            for name, values in {
                "last": [0, 1.5, True], "rank": [1, 2.5], "scale": [math.nan, -1.0, "3"],
                "eval_samples": [0, "3"], "seed": [1.5, "3"],
            }.items()
            for value in values
            for o in [{name: value, "kind": "low_rank"}]
        ),
        (lambda path: models.mlp(3, [4, 2.5], 2), r"`hidden\[1\]` must be a whole number, got 2.5"),
    ],
)  # fmt: skip
def test_other_values_that_cannot_be_meant(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(tmp_path)
