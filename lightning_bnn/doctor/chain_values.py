"""What is followed along chains: predictions, some weights, and the same in canonical form."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn import params as P
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.evaluation.predictions import ClassPredictions
from lightning_bnn.params import Params
from lightning_bnn.symmetry import UnsupportedModel, canonicalise, discover

__all__ = ["LEAST", "canonical_values", "function_values", "log_densities", "weight_values"]

LEAST = 8
"""Networks of a chain below which nothing can be said about it."""
_TIMES, _INPUTS, _WEIGHTS = 100, 64, 300


def function_values(e: Evidence) -> Tensor:
    """Predictions of the networks of chains for some inputs, ``(chains, times, numbers)``."""
    return _predictions(e).flatten(2)


@torch.no_grad()
def log_densities(e: Evidence) -> Tensor:
    """Mean log-density of the targets of some examples, ``(chains, times)``."""
    outputs, targets = e.once(_outputs)
    return e.likelihood.log_prob(outputs.flatten(0, 1), targets).mean(-1).view(outputs.shape[:2])  # type: ignore[operator]  # a likelihood has it


def weight_values(e: Evidence) -> Tensor:
    """Some weights as they are, ``(chains, times, numbers)``."""
    return _some(e, thinned(e))


def canonical_values(e: Evidence) -> Tensor:
    """The same weights in canonical form."""
    chains = thinned(e)
    shape = next(iter(chains.values())).shape[:2]
    flat = {name: t.flatten(0, 1) for name, t in chains.items()}
    examples = e.held_out or e.training
    if examples is None:
        raise NotPossible("no examples are known, which symmetries are found with")
    rows = tuple(x[:2] if isinstance(x, Tensor) else x for x in examples.inputs)
    try:
        form = canonicalise(flat, discover(e.network, *rows))
    except (UnsupportedModel, ValueError) as error:
        raise NotPossible(f"the symmetries are not known ({error})") from None
    return _some(e, {name: t.unflatten(0, shape) for name, t in form.items()})


def thinned(e: Evidence) -> Params:
    """The networks of chains that are finite, at most a hundred of each chain."""
    chains = e.chains
    times = next(iter(chains.values())).shape[1] if chains else 0
    if times < LEAST:
        raise NotPossible(f"there are no chains with at least {LEAST} networks")
    finite = torch.stack([t.flatten(1).isfinite().all(1) for t in chains.values()]).all(0)
    if not bool(finite.any()):
        raise NotPossible("no chain is finite")
    rows = torch.linspace(0, times - 1, min(times, _TIMES)).round().long()
    return {name: t[finite.to(t.device)][:, rows.to(t.device)] for name, t in chains.items()}


def _predictions(e: Evidence) -> Tensor:
    outputs, _ = e.once(_outputs)
    if not e.classes:
        return outputs
    flat = ClassPredictions.of_each(e.likelihood, outputs.flatten(0, 1)).probs
    return flat.unflatten(0, outputs.shape[:2])


@torch.no_grad()
def _outputs(e: Evidence) -> tuple[Tensor, Tensor]:
    """Outputs ``(chains, times, examples, ...)`` of all networks for some examples."""
    examples = e.held_out or e.training
    if examples is None:
        raise NotPossible("no examples are known")
    chains = thinned(e)
    shape = next(iter(chains.values())).shape[:2]
    inputs = tuple(x[:_INPUTS] if isinstance(x, Tensor) else x for x in examples.inputs)
    flat = {name: t.flatten(0, 1) for name, t in chains.items()}
    outputs = P.apply(e.network, flat, *inputs)
    return outputs.double().unflatten(0, shape), examples.targets[:_INPUTS]


def _some(e: Evidence, chains: Params) -> Tensor:
    names = [name for name in P.weight_names(e.network) if name in chains]
    rows = torch.cat([chains[name].flatten(2) for name in names], -1).double()
    count = min(_WEIGHTS, rows.shape[-1])
    places = (torch.arange(count) + 0.5) * rows.shape[-1] / count
    return rows[..., places.long().to(rows.device)]
