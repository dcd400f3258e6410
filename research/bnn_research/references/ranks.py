"""Simulation-based calibration: ranks of true functions among those that a sampler draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from scipy.stats import kstest
from torch import Tensor, nn
from tqdm.auto import tqdm

from bnn_research.presets import OWN
from lightning_bnn.commands.presets import preset_names, preset_text
from lightning_bnn.evaluation.problem import Problem, read_problem
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.methods import Batch, Fit, HamiltonianMonteCarlo, Run
from lightning_bnn.plots import histograms_figure
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import Card
from lightning_bnn.references.cards import level_of
from lightning_bnn.samplers import HMC
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome
from weightsym import params as P
from weightsym.params import Params, keyed_generator

_PREFIX = "reference_"
_POINTS = 4
"""Number of inputs at which functions are ranked."""


def sbc(
    name: str,
    replicates: int = 64,
    draws: int = 15,
    transitions: int | None = None,
    seed: int = 0,
    card: str | None = None,
    out: str | None = None,
) -> Outcome:
    """Test the sampler of a reference, with its settings, on data of known weights.

    For each replicate, weights are drawn from the prior and targets from the likelihood, at the
    inputs of the reference. If the sampler is right, the rank of every statistic of the true
    weights among those of its draws is uniform.

    Args:
        name: name of the reference, such as yacht.
        replicates: number of simulated data sets, one chain each, all side by side.
        draws: number of draws of a chain, evenly spaced after the burn-in; they must be nearly
            independent, so take few.
        transitions: number of transitions, by default that of the reference.
        seed: random seed of the weights, the data and the chains.
        card: a ``card.json`` that the p-values are entered in.
        out: folder for the results, by default studies/sbc_NAME.
    """
    names = [n.removeprefix(_PREFIX) for n in preset_names(OWN) if n.startswith(_PREFIX)]
    if name not in names:
        raise ValueError(f"`name` must be one of {', '.join(names)}, got {name!r}.")
    if replicates < 10 or draws < 3:
        raise ValueError("`replicates` must be at least 10 and `draws` at least 3.")
    folder = results_folder(out or f"studies/sbc_{name}", "sbc")
    text = preset_text(f"{_PREFIX}{name}", OWN)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    settings = yaml.safe_load(text)
    if transitions is not None:
        settings["trainer"]["max_epochs"] = transitions
    with one_thread():
        ranks = ranks_of(
            read_problem(Path(folder) / "config.yaml"), settings, replicates, draws, seed
        )
    p = {statistic: uniformity(values, draws, seed) for statistic, values in ranks.items()}
    if card is not None:
        path = Path(card)
        replace(Card.read(path), calibration=p).write(path)
    return publish(_findings(name, ranks, p, draws, seed), folder)


def ranks_of(
    problem: Problem, settings: Mapping[str, Any], replicates: int, draws: int, seed: int
) -> dict[str, Tensor]:
    """Return the ranks of all statistics, one number for each replicate.

    Args:
        problem: network, inputs and likelihood.
        settings: of the configuration of a reference.
        replicates: number of simulated data sets.
        draws: number of draws of a chain.
        seed: of everything.
    """
    model, total = settings["model"]["init_args"], settings["trainer"]["max_epochs"]
    if total - model["burn_in"] < draws:
        raise ValueError(
            f"`transitions` must be at least {model['burn_in'] + draws}, got {total}: "
            f"{model['burn_in']} are burn-in."
        )
    inputs = torch.cat([x for x, _ in problem.training_set(10**6)])
    generator = keyed_generator(seed, "sbc")
    network = problem.network
    starts = P.populate(network, replicates, generator)
    truth = {
        n: model["prior_std"] * torch.randn(t.shape, generator=generator) for n, t in starts.items()
    }
    targets = simulated(P.apply(network, truth, inputs), problem.likelihood, generator)
    method = HamiltonianMonteCarlo(prior_std=model["prior_std"])
    run = Run(network, problem.likelihood, num_data=len(inputs))
    state = method.init(network, starts)
    sampler = HMC(state.parameters(), seed=seed, **model["optimizer"]["init_args"])
    batch = Batch((inputs.expand(replicates, *inputs.shape),), targets, per_member=True)
    method.before_fit(state, Fit(optimizer=sampler, batches=lambda: [batch]), run)
    kept = set(torch.linspace(model["burn_in"], total, draws + 1).long().tolist()[1:])
    points = inputs[torch.linspace(0, len(inputs) - 1, _POINTS).long()]
    known = _statistics(network, truth, points, run, batch)
    ranks = {name: torch.zeros(replicates) for name in known}
    for step in tqdm(range(1, total + 1), desc="transitions", leave=False):
        method.transition(state, run, sampler.step)
        if step in kept:
            found = _statistics(network, state.stack(), points, run, batch)
            for name, values in found.items():
                ranks[name] += values < known[name]
    return ranks


def simulated(outputs: Tensor, likelihood: nn.Module, generator: torch.Generator) -> Tensor:
    """Draw targets of networks.

    Args:
        outputs: ``(networks, examples, numbers)``.
        likelihood: `Gaussian` with a fixed deviation, or of classes.
        generator: of the noise.
    """
    if isinstance(likelihood, Gaussian):
        mean, std = likelihood.moments(outputs)
        return mean + std * torch.randn(mean.shape, generator=generator)
    rows = outputs.softmax(-1).flatten(0, 1)
    return torch.multinomial(rows, 1, generator=generator).view(outputs.shape[:2])


@torch.no_grad()
def _statistics(
    network: nn.Module, stack: Params, points: Tensor, run: Run, batch: Batch
) -> dict[str, Tensor]:
    """Function values at some inputs, the loss on the data, and the squared norm of all weights."""
    outputs = P.apply(network, stack, points)
    values = outputs[..., 0] - (outputs[..., 1] if outputs.shape[-1] > 1 else 0)
    squares = sum(t.square().flatten(1).sum(1) for t in stack.values())
    return {
        **{f"function at input {k + 1}": values[:, k] for k in range(_POINTS)},
        "loss": run.losses(stack, batch),
        "squared weights": torch.as_tensor(squares),
    }


def uniformity(ranks: Tensor, draws: int, seed: int = 0) -> float:
    """Return the p-value of uniform ranks: ties are broken by chance, so that it is exact.

    Args:
        ranks: from 0 to the number of draws.
        draws: that number.
        seed: of the chance.

    >>> uniformity(torch.arange(16).repeat(10), 15) > 0.9, uniformity(torch.zeros(160), 15) < 1e-6
    (True, True)
    """
    chance = torch.rand(len(ranks), generator=torch.Generator().manual_seed(seed))
    values = (ranks + chance) / (draws + 1)
    return float(kstest(np.asarray(values), "uniform").pvalue)


def _findings(
    name: str, ranks: Mapping[str, Tensor], p: Mapping[str, float], draws: int, seed: int
) -> Findings:
    rows: list[list[Cell]] = [
        [statistic, float(values.mean()) / draws, p[statistic]]
        for statistic, values in ranks.items()
    ]
    verdict = f"{name}: {level_of(p)}"
    count = len(next(iter(ranks.values())))
    table = Table(
        f"Ranks among {draws} draws, {count} data sets", ["statistic", "mean rank", "p"], rows
    )
    panels = {statistic: {"ranks": values} for statistic, values in ranks.items()}
    return Findings(
        "sbc", f"Simulation-based calibration of the sampler of {name}", {"ranks": table},
        {"ranks": histograms_figure(panels, "rank", bins=draws + 1)}, [verdict],
        {"replicates": count, "draws": draws, "seed": seed},
    )  # fmt: skip
