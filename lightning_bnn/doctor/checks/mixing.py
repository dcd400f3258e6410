"""Checks of chains: do they move as they should, have they left their starts, do they agree?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Finding
from lightning_bnn.metrics import effective_sample_size, mcse_mean, rhat, tail_effective_sample_size
from lightning_bnn.metrics.convergence import some_of
from lightning_bnn.predictions import ClassPredictions
from weightsym import UnsupportedModel, canonicalise, discover
from weightsym import params as P
from weightsym.params import Params

__all__ = ["chains_are_copies", "chains_not_converged", "not_burnt_in", "step_too_large"]

_WEIGHTS = 300
_LEAST_ACCEPTANCE = 0.5
_HOT = 1.3
"""Kinetic over asked temperature."""
_ENERGY, _MOST_ENERGY = 10.0, 0.05
"""Variance of energy errors over that asked for; and per weight, which biases by several %."""
_DRIFT = 1.0
"""Rise of the log-density between thirds of chains, in deviations of the last third."""
_RHAT_TYPICAL, _RHAT_WORST = 1.05, 1.3
_RHAT_WEIGHTS = 1.1
_EFFECTIVE = 100


def step_too_large(e: Evidence) -> Finding | None:
    """Momenta that are too hot, proposals that are refused, or energies that are not kept."""
    acceptance, kinetic, energy = (
        _late(e, name) for name in ("acceptance", "kinetic_temperature", "energy_variance")
    )
    asked, wanted = e.settings.temperature, e.settings.wanted_energy_variance
    if acceptance is None and kinetic is None and (energy is None or not wanted):
        raise NotPossible("no temperature, acceptance or energy of a sampler was seen")
    severe = True
    if acceptance is not None and acceptance < _LEAST_ACCEPTANCE:
        says = f"Only {acceptance:.0%} of the proposals are accepted in the second half of the run."
    elif kinetic is not None and not kinetic <= (_HOT * asked or 1.0):
        says = f"Momenta have a temperature of {kinetic:.3g}, and {asked:g} was asked for."
    elif energy is not None and wanted and energy > _ENERGY * wanted:
        severe = energy >= _MOST_ENERGY
        says = f"Energy errors vary by {energy:.2g} per weight, and {wanted:.2g} was asked for."
    else:
        return None
    values = {"acceptance": acceptance, "kinetic": kinetic, "energy_variance": energy}
    return Finding(
        "fault" if severe else "warning",
        says,
        "Steps this large do not follow the posterior: draws come from a wider distribution, or "
        "from a few regions only.",
        "Take a smaller `lr` or `step_size`, larger batches, or let `adapt_steps` find a step.",
        {name: value for name, value in values.items() if value is not None},
    )


def not_burnt_in(e: Evidence) -> Finding | None:
    """Chains whose fit still improves from their first to their last third."""
    values = log_densities(e)
    third = values.shape[1] // 3
    if third < 3:
        raise NotPossible("the chains are too short for thirds")
    last = values[:, -third:]
    rise = (last.mean(1) - values[:, :third].mean(1)) / last.std(1).clamp_min(1e-9)
    error = float(rise.std() / math.sqrt(len(rise))) if len(rise) > 1 else 1.0
    mean = float(rise.mean())
    if mean < _DRIFT or mean < 2 * error:
        return None
    return Finding(
        "fault",
        f"From the first to the last third of the chains the log-density of the data rises by "
        f"{mean:.1f} ± {error:.1f} of its standard deviations.",
        "The first networks were kept on the way to the posterior, and are not draws of it.",
        "Take a larger `burn_in`, or start the chains from trained networks (`start_from`).",
        {"rise": mean, "error": error},
    )


def chains_not_converged(e: Evidence) -> Finding | None:
    """Chains that predict differently, or that have too few draws for their quantiles."""
    values = function_values(e)
    typical, worst = _reductions(values) if len(values) > 1 else (1.0, 1.0)
    bulk = float(effective_sample_size(values).min())
    tail = float(tail_effective_sample_size(values).min())
    error = float(mcse_mean(values).max())
    numbers = {"rhat_median": typical, "rhat_max": worst, "bulk": bulk, "tail": tail}
    if typical >= _RHAT_TYPICAL or worst >= _RHAT_WORST:
        return Finding(
            "fault",
            f"The predictions of {len(values)} chains differ: R-hat is {typical:.3f} in the median "
            f"and {worst:.3f} at worst; {bulk:.0f} of {values[..., 0].numel()} draws are effective "
            f"there, and a mean prediction is off by up to {error:.2g}.",
            "Chains that sample one posterior predict the same; these are in different regions, or "
            "have not moved long enough.",
            "Run longer chains with a larger `burn_in`, start them from trained networks, or lower "
            "the step; until then they are an ensemble, not draws of the posterior.",
            numbers,
        )
    if min(bulk, tail) >= _EFFECTIVE:
        return None
    return Finding(
        "warning",
        f"Of the {values[..., 0].numel()} draws {bulk:.0f} are effective for the worst mean "
        f"prediction and {tail:.0f} for its 5 % and 95 % quantiles; means are off by up to "
        f"{error:.2g}.",
        "Intervals and tail probabilities from so few independent draws are rough.",
        f"Draw longer, or more chains, until both are above {_EFFECTIVE}.",
        numbers,
    )


def chains_are_copies(e: Evidence) -> Finding | None:
    """Chains whose weights differ, and whose canonical forms or functions do not."""
    chains = e.finite_chains
    if len(next(iter(chains.values()))) < 2:
        raise NotPossible("there is only one chain")
    raw = _reductions(_some(e, chains))[0]
    if raw < _RHAT_WEIGHTS:
        return None
    function, canonical = _reductions(function_values(e))[0], _reductions(_canonical(e, chains))[0]
    if function >= _RHAT_WEIGHTS or canonical > 1 + (raw - 1) / 2:
        return None
    return Finding(
        "note",
        f"R-hat of the weights is {raw:.2f} in the median as they are, {canonical:.2f} in "
        f"canonical form, and {function:.2f} of the predictions.",
        "The chains sit in copies of one mode that only symmetries tell apart: nothing is wrong, "
        "and nothing is gained by waiting for weights to agree.",
        "Check convergence by predictions or canonical weights, and remove symmetries before "
        "weights are averaged or compared.",
        {"raw": raw, "canonical": canonical, "function": function},
    )


# ------------------------------------------------------------ numbers of chains
@torch.no_grad()
def log_densities(e: Evidence) -> Tensor:
    """Mean log-density of the targets of some examples, ``(chains, times)``."""
    outputs, targets = e.on_chains
    return e.likelihood.log_prob(outputs.flatten(0, 1), targets).mean(-1).view(outputs.shape[:2])  # type: ignore[operator]  # a likelihood has it


def function_values(e: Evidence) -> Tensor:
    """Predictions of the networks of chains for some inputs, ``(chains, times, numbers)``."""
    outputs, _ = e.on_chains
    if e.classes:
        probs = ClassPredictions.of_each(e.likelihood, outputs.flatten(0, 1)).probs
        outputs = probs.unflatten(0, outputs.shape[:2])
    return outputs.flatten(2)


def _canonical(e: Evidence, chains: Params) -> Tensor:
    """Some weights in canonical form, ``(chains, times, numbers)``."""
    shape = next(iter(chains.values())).shape[:2]
    examples = e.held_out or e.training_examples()
    rows = tuple(x[:2] if isinstance(x, Tensor) else x for x in examples.inputs)
    try:
        symmetries = discover(e.network, *rows)
        form = canonicalise({n: t.flatten(0, 1) for n, t in chains.items()}, symmetries)
    except (UnsupportedModel, ValueError) as error:
        raise NotPossible(f"the symmetries are not known ({error})") from None
    return _some(e, {name: t.unflatten(0, shape) for name, t in form.items()})


def _some(e: Evidence, chains: Params) -> Tensor:
    """Some weights as they are, ``(chains, times, numbers)``."""
    names = [name for name in P.weight_names(e.network) if name in chains]
    rows = torch.cat([chains[name].flatten(2) for name in names], -1).double()
    return some_of(rows, _WEIGHTS)


def _late(e: Evidence, name: str) -> float | None:
    """The median of the second half of a curve."""
    values = torch.tensor([float(v) for v in e.curves.get(name, ())], dtype=torch.float64)
    values = values[~values.isnan()]
    return float(values[len(values) // 2 :].median()) if len(values) else None


def _reductions(values: Tensor) -> tuple[float, float]:
    """Compute median and maximum of R-hat over numbers, 1 for those that never change."""
    reductions = rhat(values).nan_to_num(1.0)
    return float(reductions.median()), float(reductions.max())
