"""Checks of data and objective: do data, outputs and likelihood fit, and was the loss minimised?"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Finding

__all__ = [
    "labels_out_of_range",
    "loss_not_converged",
    "not_standardised",
    "not_the_posterior_of_bayes",
    "probabilities_as_logits",
]

_SMALL, _LARGE = 0.1, 10.0
"""Between which root mean squares of inputs and deviations of targets are ordinary."""
_ROUNDING = 1e-4
_FEW = 30
"""Examples of a class below which a class that is missing means nothing."""
_OFF = 0.1
"""Relative error of the number of examples that drops of last batches may explain."""
_EPOCHS = 5
_FALLING = 0.1
"""Part of the whole fall of the loss that the last fifth of a run may still bring."""


def labels_out_of_range(e: Evidence) -> Finding | None:
    """Labels without an output, and outputs without an example of their class."""
    examples, classes = e.training_examples(), e.class_count
    if classes is None or (examples.targets.is_floating_point() and examples.targets.ndim > 1):
        raise NotPossible("targets are not class indices")
    labels = examples.targets.long().flatten()
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        return Finding(
            "fault",
            f"Labels go from {low} to {high}, and the network has {classes} outputs, for labels "
            f"from 0 to {classes - 1}.",
            "A label without an output has no probability, and the loss is an error or nonsense.",
            "Number the classes from 0 on, mask what is to be ignored before the loss, or give the "
            "network more outputs.",
            {"low": low, "high": high, "classes": classes},
        )
    counts = torch.bincount(labels, minlength=classes)
    missing = (counts == 0).nonzero().flatten().tolist()
    if not missing or len(labels) < _FEW * classes:
        return None
    shifted = missing == [0] or missing == [classes - 1]
    return Finding(
        "warning",
        f"Of {len(labels)} training labels none is {', '.join(map(str, missing[:5]))}, although "
        f"the network has {classes} outputs.",
        "The posterior learns only that this class does not occur.",
        ("Check whether labels are off by one. " if shifted else "")
        + "Take as many outputs as there are classes, or add examples of the class.",
        {"missing": len(missing), "classes": classes},
    )


def probabilities_as_logits(e: Evidence) -> Finding | None:
    """Outputs that are probabilities already, where the likelihood expects logits."""
    if not e.classes:
        raise NotPossible("targets are not classes")
    every = e.on_training if e.held_out is None else e.on_held_out
    outputs = torch.cat([o.flatten(0, 1) for o in every])
    if not bool(outputs.isfinite().all()):
        raise NotPossible("outputs are not finite")
    inside = bool(((outputs >= -_ROUNDING) & (outputs <= 1 + _ROUNDING)).all())
    sums_to_one = outputs.shape[-1] > 1 and bool(((outputs.sum(-1) - 1).abs() < 1e-3).all())
    spans = float(outputs.max() - outputs.min()) > 0.5 and float(outputs.min()) < 0.3
    if not inside or len(outputs) < _FEW or not (sums_to_one or spans):
        return None
    probs = outputs.softmax(-1) if outputs.shape[-1] > 1 else outputs.sigmoid()
    largest = float(probs.max())
    return Finding(
        "fault",
        f"All {outputs.numel()} outputs lie between 0 and 1"
        + (" and sum to one" if sums_to_one else "")
        + ": they are probabilities, and the likelihood takes them for logits.",
        f"A second softmax makes every prediction unsure (none is above {largest:.2f}) and the "
        "gradients small.",
        "Remove the softmax or sigmoid at the end of the network; the likelihood applies it.",
        {"largest": largest},
    )


def not_standardised(e: Evidence) -> Finding | None:
    """Inputs or targets far from the size for which priors, noise and rates are meant."""
    examples, says = e.training_examples(), []
    numbers: dict[str, float] = {}
    if e.numbers:
        targets = examples.targets.double()
        mean, std = float(targets.mean(0).abs().max()), targets.std(0)
        low, high = float(std.min()), float(std.max())
        if low <= _SMALL or high >= _LARGE or mean >= _LARGE:
            numbers = {"mean": mean, "std_min": low, "std_max": high}
            says.append(
                f"Training targets have means of up to {mean:.3g} and standard deviations of "
                f"{low:.3g} to {high:.3g}."
            )
    inputs = [t for t in tree_leaves(examples.inputs) if isinstance(t, Tensor)]
    sizes = [float(t.double().square().mean().sqrt()) for t in inputs if t.is_floating_point()]
    size = max(sizes, default=1.0)
    if not _SMALL / 2 < size < _LARGE:
        numbers["rms"] = size
        says.append(f"The root mean square of the inputs is {size:.3g}.")
    if not says:
        return None
    return Finding(
        "warning",
        " ".join(says),
        "With a Gaussian prior over the weights the sizes of inputs and targets decide how strong "
        "the prior is, and with steps of one size which layers learn.",
        "Scale inputs to a root mean square of about one (pixels by 1/255 and their mean), and "
        "standardise targets on the training data.",
        numbers,
    )


def not_the_posterior_of_bayes(e: Evidence) -> Finding | None:
    """An objective other than likelihood and prior, each counted once."""
    s, says = e.settings, []
    miscounted = bool(s.num_data and s.seen and abs(s.num_data - s.seen) > _OFF * s.seen)
    if miscounted:
        says.append(f"the objective assumes {s.num_data} training examples, and there are {s.seen}")
    if s.temperature != 1:
        says.append(f"the temperature is {s.temperature:g}")
    if s.kl_weight != 1:
        says.append(f"the weight of the KL term is {s.kl_weight:g}")
    if s.prior_std is not None and s.weight_decay:
        says.append(
            f"the optimizer has a weight decay of {s.weight_decay:g} beside a prior of standard "
            f"deviation {s.prior_std:g}"
        )
    if not says:
        return None
    text = "; ".join(says)
    return Finding(
        "fault" if miscounted else "warning",
        f"{text[0].upper()}{text[1:]}.",
        "Likelihood or prior do not count once: the result is narrower or wider than the "
        "posterior, which should be said with every result.",
        "Omit `num_data`, so that it is read from the loader, set temperature and KL weight to 1, "
        "and `weight_decay` to 0, unless that is what you want.",
        {"temperature": s.temperature, "kl_weight": s.kl_weight, "weight_decay": s.weight_decay},
    )


def loss_not_converged(e: Evidence) -> Finding | None:
    """A training loss that is not finite, or that still falls at the end of the run."""
    losses = torch.tensor([float(v) for v in e.curves.get("loss", ())], dtype=torch.float64)
    if not len(losses):
        raise NotPossible("no loss was seen")
    broken = (~losses.isfinite()).nonzero().flatten().tolist()
    if broken:
        return Finding(
            "fault",
            f"The training loss is not finite from epoch {broken[0]} on.",
            "Weights that have become NaN stay NaN: what was trained afterwards is lost.",
            "Take a smaller learning rate or clip gradients, and look at the inputs for NaN.",
            {"epoch": broken[0]},
        )
    if e.settings.sampled:
        return None  # a sampler does not minimise its loss
    if len(losses) < _EPOCHS:
        raise NotPossible(f"fewer than {_EPOCHS} epochs were seen")
    last = max(2, len(losses) // 5)
    slope, noise = _line(losses[-last:])
    fall, whole = -slope * (last - 1), float(losses[0] - losses.min())
    if whole <= 0 or fall < _FALLING * whole or fall < 2 * noise:
        return None
    return Finding(
        "warning",
        f"The training loss still fell by {fall / whole:.0%} of its whole fall in the last {last} "
        f"of {len(losses)} epochs.",
        "The posterior is that of a run that was stopped, not that of the data.",
        "Train longer, or with a larger learning rate.",
        {"fall": fall, "share": fall / whole},
    )


def _line(values: Tensor) -> tuple[float, float]:
    """Slope of the best line, and the root mean square around it."""
    x = torch.arange(len(values)).double()
    x = x - x.mean()
    slope = float((x * values).sum() / x.square().sum())
    residuals = values - values.mean() - slope * x
    return slope, float(residuals.square().mean().sqrt())
