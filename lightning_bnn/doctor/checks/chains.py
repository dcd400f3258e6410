"""Whether chains move as they should, have forgotten their starts, and agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.doctor.chain_values import (
    canonical_values,
    function_values,
    log_densities,
    weight_values,
)
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Finding
from lightning_bnn.metrics import (
    effective_sample_size,
    mcse_mean,
    rhat,
    tail_effective_sample_size,
)

__all__ = [
    "chains_are_copies",
    "chains_differ_as_functions",
    "few_effective_draws",
    "not_burnt_in",
    "step_too_large",
]

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
    looked = [
        found for check in (_acceptance, _temperature, _energy) if (found := check(e)) is not None
    ]
    if not looked:
        raise NotPossible("no temperature, acceptance or energy of a sampler was seen")
    wrong = [(says, numbers) for bad, says, numbers in looked if bad]
    if not wrong:
        return None
    says, numbers = wrong[0]
    return Finding(
        "step_too_large",
        "warning" if numbers.get("energy_variance", math.inf) < _MOST_ENERGY else "fault",
        says,
        "Steps this large do not follow the posterior: draws come from a wider distribution, or "
        "from a few places only.",
        "Take a smaller `lr` or `step_size`, larger batches, or let `adapt_steps` find a step.",
        numbers,
    )


def not_burnt_in(e: Evidence) -> Finding | None:
    """Chains whose fit still improves from their first to their last third."""
    values = log_densities(e)
    third = values.shape[1] // 3
    last = values[:, -third:]
    spread = last.std(1).clamp_min(1e-9)
    rise = (last.mean(1) - values[:, :third].mean(1)) / spread
    if third < 3:
        raise NotPossible("the chains are too short for thirds")
    error = float(rise.std() / math.sqrt(len(rise))) if len(rise) > 1 else 1.0
    mean = float(rise.mean())
    if mean < _DRIFT or mean < 2 * error:
        return None
    return Finding(
        "not_burnt_in",
        "fault",
        f"From the first to the last third of the chains the log-density of the data rises by "
        f"{mean:.1f} ± {error:.1f} of its standard deviations.",
        "The first networks were kept on the way to the posterior, and are no draws of it.",
        "Take a larger `burn_in`, or start the chains from trained networks (`start_from`).",
        {"rise": mean, "error": error},
    )


def chains_differ_as_functions(e: Evidence) -> Finding | None:
    """Chains that predict differently, so that at least one has not seen the posterior."""
    values = _several(function_values(e))
    typical, worst = _reductions(values)
    if typical < _RHAT_TYPICAL and worst < _RHAT_WORST:
        return None
    effective, error = float(effective_sample_size(values).min()), float(mcse_mean(values).max())
    return Finding(
        "chains_differ_as_functions",
        "fault",
        f"The predictions of {len(values)} chains differ: R-hat is {typical:.3f} in the median and "
        f"{worst:.3f} at worst; {effective:.0f} of {values[..., 0].numel()} draws are effective "
        f"there, and a mean prediction is off by up to {error:.2g}.",
        "Chains that sample one posterior predict the same; these are in different places, or have "
        "not moved long enough.",
        "Run longer chains with a larger `burn_in`, start them from trained networks, or lower the "
        "step; until then they are an ensemble, not draws of the posterior.",
        {"rhat_median": typical, "rhat_max": worst, "ess_min": effective, "mcse_max": error},
    )


def chains_are_copies(e: Evidence) -> Finding | None:
    """Chains whose weights differ, and whose canonical forms or functions do not."""
    raw = _reductions(_several(weight_values(e)))[0]
    if raw < _RHAT_WEIGHTS:
        return None
    function = _reductions(_several(function_values(e)))[0]
    canonical = _reductions(_several(canonical_values(e)))[0]
    if function >= _RHAT_WEIGHTS or canonical > 1 + (raw - 1) / 2:
        return None
    return Finding(
        "chains_are_copies",
        "note",
        f"R-hat of the weights is {raw:.2f} in the median as they are, {canonical:.2f} in "
        f"canonical form, and {function:.2f} of the predictions.",
        "The chains sit in copies of one mode that only symmetries tell apart: nothing is wrong, "
        "and nothing is gained by waiting for weights to agree.",
        "Judge convergence by predictions or canonical weights, and remove symmetries before "
        "weights are averaged or compared.",
        {"raw": raw, "canonical": canonical, "function": function},
    )


def few_effective_draws(e: Evidence) -> Finding | None:
    """Chains that agree, but have too few draws for their quantiles."""
    values = function_values(e)
    bulk = float(effective_sample_size(values).min())
    tail = float(tail_effective_sample_size(values).min())
    if min(bulk, tail) >= _EFFECTIVE:
        return None
    error = float(mcse_mean(values).max())
    return Finding(
        "few_effective_draws",
        "warning",
        f"Of the {values[..., 0].numel()} draws {bulk:.0f} are effective for the worst mean "
        f"prediction and {tail:.0f} for its 5 % and 95 % quantiles; means are off by up to "
        f"{error:.2g}.",
        "Intervals and tail probabilities from so few independent draws are rough.",
        f"Draw longer, or more chains, until both are above {_EFFECTIVE}.",
        {"bulk": bulk, "tail": tail, "mcse_max": error},
    )


def _acceptance(e: Evidence) -> tuple[bool, str, dict[str, float]] | None:
    value = _late(e.curves.get("acceptance", ()))
    if value is None:
        return None
    says = f"Only {value:.0%} of the proposals are accepted in the second half of the run."
    return value < _LEAST_ACCEPTANCE, says, {"acceptance": value}


def _temperature(e: Evidence) -> tuple[bool, str, dict[str, float]] | None:
    value = _late(e.curves.get("kinetic_temperature", ()))
    if value is None:
        return None
    asked = e.settings.temperature
    if asked == 0:
        return (
            value > 1,
            f"Momenta have a temperature of {value:.3g}, at no noise.",
            {"kinetic": value},
        )
    hot = value > _HOT * asked or not math.isfinite(value)
    says = f"Momenta have a temperature of {value:.3g}, and {asked:g} was asked for."
    return hot, says, {"kinetic": value, "asked": asked}


def _energy(e: Evidence) -> tuple[bool, str, dict[str, float]] | None:
    value, wanted = _late(e.curves.get("energy_variance", ())), e.settings.wanted_energy_variance
    if value is None or not wanted:
        return None
    says = (
        f"The energy errors of the steps vary by {value:.2g} per weight, and {wanted:.2g} was "
        "asked for."
    )
    return value > _ENERGY * wanted, says, {"energy_variance": value, "wanted": wanted}


def _late(curve: Sequence[float]) -> float | None:
    """The median of the second half of a curve."""
    values = torch.tensor([float(v) for v in curve], dtype=torch.float64)
    values = values[~values.isnan()]
    return float(values[len(values) // 2 :].median()) if len(values) else None


def _several(values: Tensor) -> Tensor:
    if len(values) < 2:
        raise NotPossible("there is only one chain")
    return values


def _reductions(values: Tensor) -> tuple[float, float]:
    """Median and maximum of R-hat over numbers; those that never change count as 1."""
    found = rhat(values).nan_to_num(1.0)
    return float(found.median()), float(found.max())
