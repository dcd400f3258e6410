"""Whether the objective is that of Bayes, and whether it was minimised."""

from __future__ import annotations

import torch

from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Finding

__all__ = [
    "loss_not_finite",
    "loss_still_falling",
    "not_the_posterior_of_bayes",
    "prior_counted_twice",
    "wrong_number_of_examples",
]

_OFF = 0.1
"""Relative error of the number of examples that drops of last batches may explain."""
_EPOCHS = 5
_FALLING = 0.1
"""Part of the whole fall of the loss that the last fifth of a run may still bring."""


def wrong_number_of_examples(e: Evidence) -> Finding | None:
    """A number of training examples in the objective that is not that of the data."""
    told, seen = e.settings.num_data, e.settings.seen
    if not told or not seen:
        raise NotPossible("the number of training examples is not known")
    if abs(told - seen) <= _OFF * seen:
        return None
    too = "narrow" if told > seen else "wide"
    return Finding(
        "wrong_number_of_examples",
        "fault",
        f"The objective assumes {told} training examples; there are {seen}.",
        f"The likelihood counts {told / seen:.3g} times as much as it should, and the posterior is "
        f"too {too}.",
        "Leave `num_data` away, so that it is read from the loader, or pass the true number.",
        {"told": told, "seen": seen},
    )


def not_the_posterior_of_bayes(e: Evidence) -> Finding | None:
    """A temperature, or a weight of the KL term, other than one."""
    settings = e.settings
    if settings.temperature == 1 and settings.kl_weight == 1:
        return None
    cold = settings.temperature < 1 or settings.kl_weight < 1
    return Finding(
        "not_the_posterior_of_bayes",
        "warning",
        f"The temperature is {settings.temperature:g} and the weight of the KL term "
        f"{settings.kl_weight:g}.",
        "What is approximated is not the posterior but a "
        + ("colder, narrower" if cold else "hotter, wider")
        + " distribution, which should be said with every result.",
        "Set both to 1, unless that is what you want.",
        {"temperature": settings.temperature, "kl_weight": settings.kl_weight},
    )


def prior_counted_twice(e: Evidence) -> Finding | None:
    """Weight decay beside a prior that is part of the objective."""
    decay = e.settings.weight_decay
    if e.settings.prior_std is None or not decay:
        return None
    return Finding(
        "prior_counted_twice",
        "warning",
        f"The optimizer has a weight decay of {decay:g}, and the objective a prior with standard "
        f"deviation {e.settings.prior_std:g}.",
        "Weights are drawn to zero twice: the result is the posterior of a narrower prior.",
        "Set `weight_decay` to 0.",
        {"weight_decay": decay},
    )


def loss_not_finite(e: Evidence) -> Finding | None:
    """A training loss that has become infinite or NaN."""
    losses = _losses(e, 1)
    broken = (~losses.isfinite()).nonzero().flatten().tolist()
    if not broken:
        return None
    return Finding(
        "loss_not_finite",
        "fault",
        f"The training loss is not finite from epoch {broken[0]} on.",
        "Weights that have become NaN stay NaN: what was trained afterwards is lost.",
        "Take a smaller learning rate or clip gradients, and look at the inputs for NaN.",
        {"epoch": broken[0]},
    )


def loss_still_falling(e: Evidence) -> Finding | None:
    """A loss that falls at the end of the run, where a distribution or network is optimised."""
    if e.settings.sampled:
        raise NotPossible("a sampler does not minimise its loss")
    losses = _losses(e, _EPOCHS)
    if not bool(losses.isfinite().all()):
        raise NotPossible("the loss is not finite")
    last = max(2, len(losses) // 5)
    fitted = _line(losses[-last:])
    fall, noise = -fitted[0] * (last - 1), fitted[1]
    whole = float(losses[0] - losses.min())
    if whole <= 0 or fall < _FALLING * whole or fall < 2 * noise:
        return None
    return Finding(
        "loss_still_falling",
        "warning",
        f"The training loss still fell by {fall / whole:.0%} of its whole fall in the last {last} "
        f"of {len(losses)} epochs.",
        "The posterior is that of a run that was stopped, not that of the data.",
        "Train longer, or with a larger learning rate.",
        {"fall": fall, "share": fall / whole},
    )


def _line(values: torch.Tensor) -> tuple[float, float]:
    """Slope of the best line, and the root mean square around it."""
    x = torch.arange(len(values)).double()
    x = x - x.mean()
    slope = float((x * values).sum() / x.square().sum())
    rest = values - values.mean() - slope * x
    return slope, float(rest.square().mean().sqrt())


def _losses(e: Evidence, least: int) -> torch.Tensor:
    losses = torch.tensor([float(v) for v in e.curves.get("loss", ())], dtype=torch.float64)
    if len(losses) < least:
        raise NotPossible(
            f"the losses of {least} epochs were not seen" if least > 1 else "no loss was seen"
        )
    return losses
