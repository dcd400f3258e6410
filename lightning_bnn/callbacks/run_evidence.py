"""The examination of a run: of a module with a posterior, or of any other module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.callbacks.watching import whole_network
from lightning_bnn.doctor import Evidence, Examples, Finding, Report, Settings, examine
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.methods.health import Diverged
from lightning_bnn.posteriors import Empirical
from weightsym import params as P
from weightsym.forward import first_line

__all__ = ["examine_run"]

_FEW_CLASSES = 1000
_DRAWS = 20


@torch.no_grad()
def examine_run(
    trainer: Any,
    pl_module: Any,
    network: str | None,
    training: Examples | None,
    held_out: Examples | None,
    curves: Mapping[str, Sequence[float]],
) -> Report:
    """Examine the posterior of a run as it is now.

    Args:
        trainer: of the run.
        pl_module: what it trains.
        network: name of the network inside, by default the likeliest.
        training: some of the examples that it is trained on.
        held_out: some that it is not trained on.
        curves: what was seen epoch by epoch.
    """
    settings = _settings(trainer, pl_module)
    try:
        if callable(getattr(pl_module, "judged_modes", None)):
            evidence = _of_module(pl_module, training, held_out, settings, curves)
        else:
            evidence = _of_network(pl_module, network, training, held_out, settings, curves)
    except ValueError as error:
        return _unexaminable(pl_module, error, settings, curves)
    return examine(evidence, {"module": type(pl_module).__name__})


def _settings(trainer: Any, pl_module: Any) -> Settings:
    """Read what a run was asked for, as far as module and optimizers say it."""
    groups = [g for optimizer in trainer.optimizers for g in optimizer.param_groups]
    first: Mapping[str, Any] = groups[0] if groups else {}
    prior = getattr(pl_module, "prior", None)
    samples = "temperature" in first or "energy_variance" in first
    decay = 0.0 if samples else max((float(g.get("weight_decay", 0)) for g in groups), default=0.0)
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    num_data = first.get("num_data") or getattr(pl_module, "num_data", None)
    method = getattr(pl_module, "method", None)
    return Settings(
        num_data=num_data if isinstance(num_data, int) else None,
        seen=len(dataset) if isinstance(dataset, Sized) else None,
        temperature=_number(first.get("temperature", getattr(pl_module, "temperature", 1.0))),
        kl_weight=_number(getattr(pl_module, "kl_weight", 1.0)),
        prior_std=_number(getattr(prior, "std", None), None),
        weight_decay=decay,
        sampled=bool(getattr(method, "is_sampler", samples)),
        wanted_energy_variance=_number(first.get("energy_variance"), None),
    )


def _number(value: Any, otherwise: Any = 1.0) -> Any:
    return float(value) if isinstance(value, (int, float)) else otherwise


def _of_module(
    pl_module: Any,
    training: Examples | None,
    held_out: Examples | None,
    settings: Settings,
    curves: Mapping[str, Sequence[float]],
) -> Evidence:
    """Collect the evidence on a module of this package, or one with the same methods."""
    chains = getattr(pl_module, "chains", None)
    divergence = getattr(pl_module, "divergence", None)
    return Evidence(
        pl_module.template,
        pl_module.likelihood,
        pl_module.posterior().modes(),
        pl_module.judged_modes(_DRAWS),
        training,
        held_out,
        settings,
        curves,
        chains=chains() if callable(chains) else {},
        left_out=0 if divergence is None else int(divergence.left_out.sum()),
        draws=_DRAWS,
    )


def _of_network(
    pl_module: nn.Module,
    name: str | None,
    training: Examples | None,
    held_out: Examples | None,
    settings: Settings,
    curves: Mapping[str, Sequence[float]],
) -> Evidence:
    """Collect the evidence on any module: one network, and the likelihood that targets suggest."""
    network = copy.deepcopy(whole_network(pl_module, name)[1]).eval()
    weights = {n: t.detach() for n, t in P.of(network).items()}
    mode = Empirical({n: t[None] for n, t in weights.items()})
    examples = held_out or training
    if examples is None:
        raise ValueError("no batch was a tuple of inputs and targets")
    likelihood = _likelihood(network, examples)
    return Evidence(
        network, likelihood, [mode], [mode], training, held_out, settings, curves, alone=True
    )


@torch.no_grad()
def _likelihood(network: nn.Module, examples: Examples) -> nn.Module:
    """Choose a likelihood for targets: classes, or numbers with noise as large as the errors."""
    targets = examples.targets
    try:
        outputs = network(*examples.inputs)
    except Exception as reason:  # whatever the user's forward raises
        raise ValueError(
            f"the network cannot be called with the inputs of a batch: {first_line(reason)}"
        ) from None
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        raise ValueError("the network's outputs are not (batch, numbers)")
    whole = not targets.is_floating_point() and targets.ndim == 1
    if whole and 1 < outputs.shape[1] <= _FEW_CLASSES:
        return Categorical()
    if targets.is_floating_point() and targets.shape == outputs.shape:
        error = float((outputs - targets).square().mean().sqrt())
        return Gaussian(std=error if 0 < error < float("inf") else 1.0)
    raise ValueError("targets are neither class indices nor numbers in the shape of the outputs")


def _unexaminable(
    pl_module: Any, reason: ValueError, settings: Settings, curves: Mapping[str, Sequence[float]]
) -> Report:
    """Report on the run alone, where there is no posterior, or nothing is known of the network."""
    facts = {"module": type(pl_module).__name__}
    if isinstance(reason, Diverged):
        finding = Finding(
            "no_posterior",
            "fault",
            f"There is no posterior to look at: {reason}",
            "Nothing can be drawn from it.",
            "Take a smaller learning rate, clip gradients, or let members begin anew (`restarts`).",
        )
        everything = {"everything else": "there is no posterior"}
        return Report([finding], (), everything, facts, curves)
    report = examine(
        Evidence(pl_module, nn.Identity(), [], [], None, None, settings, curves), facts
    )
    return replace(report, skipped=dict.fromkeys(report.skipped, str(reason)))
