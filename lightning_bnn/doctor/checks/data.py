"""Whether data, outputs and likelihood fit together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_bnn.doctor.evidence import Evidence, Examples, NotPossible
from lightning_bnn.doctor.findings import Finding

__all__ = [
    "class_never_seen",
    "inputs_not_standardised",
    "labels_out_of_range",
    "probabilities_as_logits",
    "targets_not_standardised",
]

_SMALL, _LARGE = 0.1, 10.0
"""Between which root mean squares of inputs and deviations of targets are ordinary."""
_ROUNDING = 1e-4
_FEW = 30
"""Examples below which a class that is missing means nothing."""


def labels_out_of_range(e: Evidence) -> Finding | None:
    """Labels that no output of the network stands for."""
    examples = _training(e)
    labels, classes = _labels(e, examples), _classes_of(e)
    low, high = int(labels.min()), int(labels.max())
    if low >= 0 and high < classes:
        return None
    return Finding(
        "labels_out_of_range",
        "fault",
        f"Labels go from {low} to {high}, and the network has {classes} outputs, for labels from "
        f"0 to {classes - 1}.",
        "A label without an output has no probability, and the loss is an error or nonsense.",
        "Number the classes from 0 on, mask what is to be ignored before the loss, or give the "
        "network more outputs.",
        {"low": low, "high": high, "classes": classes},
    )


def class_never_seen(e: Evidence) -> Finding | None:
    """An output whose class is in no training example, as where labels start at 1."""
    examples = _training(e)
    labels, classes = _labels(e, examples), _classes_of(e)
    if len(labels) < _FEW * classes:
        raise NotPossible(f"{len(labels)} seen examples are too few for {classes} classes")
    counts = torch.bincount(labels.clamp(0, classes - 1), minlength=classes)
    missing = (counts == 0).nonzero().flatten().tolist()
    if not missing:
        return None
    shifted = missing == [0] or missing == [classes - 1]
    return Finding(
        "class_never_seen",
        "warning",
        f"Of {len(labels)} training labels none is {', '.join(map(str, missing[:5]))}, although "
        f"the network has {classes} outputs.",
        "The posterior learns only that this class does not occur, and its probability is lost "
        "where calibration is judged.",
        ("Check whether labels are off by one. " if shifted else "")
        + "Take as many outputs as there are classes, or add examples of the class.",
        {"missing": len(missing), "classes": classes},
    )


def probabilities_as_logits(e: Evidence) -> Finding | None:
    """Outputs that are probabilities already, where the likelihood expects logits."""
    if not e.classes:
        raise NotPossible("targets are not classes")
    outputs = torch.cat([o.flatten(0, 1) for o in _any_outputs(e)])
    if not bool(outputs.isfinite().all()):
        raise NotPossible("outputs are not finite")
    inside = bool(((outputs >= -_ROUNDING) & (outputs <= 1 + _ROUNDING)).all())
    sums_to_one = outputs.shape[-1] > 1 and bool(((outputs.sum(-1) - 1).abs() < 1e-3).all())
    if not inside or len(outputs) < _FEW or not (sums_to_one or _varies(outputs)):
        return None
    most = (
        float(outputs.softmax(-1).max())
        if outputs.shape[-1] > 1
        else float(outputs.sigmoid().max())
    )
    return Finding(
        "probabilities_as_logits",
        "fault",
        f"All {outputs.numel()} outputs lie between 0 and 1"
        + (" and sum to one" if sums_to_one else "")
        + ": they are probabilities, and the likelihood takes them for logits.",
        f"A second softmax makes every prediction unsure (none is above {most:.2f}) and the "
        "gradients small.",
        "Remove the softmax or sigmoid at the end of the network; the likelihood applies it.",
        {"largest": most},
    )


def targets_not_standardised(e: Evidence) -> Finding | None:
    """Targets far from mean zero and deviation one, for which priors and rates are meant."""
    if not e.numbers:
        raise NotPossible("targets are not numbers")
    targets = _training(e).targets.double()
    mean, std = float(targets.mean(0).abs().max()), targets.std(0)
    low, high = float(std.min()), float(std.max())
    if low > _SMALL and high < _LARGE and mean < _LARGE:
        return None
    return Finding(
        "targets_not_standardised",
        "warning",
        f"Training targets have means of up to {mean:.3g} and standard deviations of {low:.3g} to "
        f"{high:.3g}.",
        "Priors, noise and learning rates are meant for targets around zero with deviation one; "
        "otherwise the prior fights the fit and the noise is of another scale.",
        "Standardise targets on the training data, and give predictions their unit afterwards.",
        {"mean": mean, "std_min": low, "std_max": high},
    )


def inputs_not_standardised(e: Evidence) -> Finding | None:
    """Inputs far larger or smaller than one, as raw pixels."""
    tensors = [
        t
        for t in tree_leaves(_training(e).inputs)
        if isinstance(t, Tensor) and t.is_floating_point()
    ]
    if not tensors:
        raise NotPossible("inputs are not floating numbers")
    size = max((float(t.double().square().mean().sqrt()) for t in tensors), default=1.0)
    if _SMALL / 2 < size < _LARGE:
        return None
    return Finding(
        "inputs_not_standardised",
        "warning",
        f"The root mean square of the inputs is {size:.3g}.",
        "With a Gaussian prior over the weights the size of inputs decides how strong the prior "
        "is, and with steps of one size which layers learn.",
        "Scale inputs to a root mean square of about one (pixels by 1/255 and their mean).",
        {"rms": size},
    )


def _training(e: Evidence) -> Examples:
    if e.training is None:
        raise NotPossible("no training data were seen")
    return e.training


def _labels(e: Evidence, examples: Examples) -> Tensor:
    if not e.classes:
        raise NotPossible("targets are not classes")
    if examples.targets.is_floating_point() and examples.targets.ndim > 1:
        raise NotPossible("targets are no class indices")
    return examples.targets.long().flatten()


def _classes_of(e: Evidence) -> int:
    outputs = _any_outputs(e)[0].shape[-1]
    return 2 if outputs == 1 else outputs


def _any_outputs(e: Evidence) -> list[Tensor]:
    return e.on_held_out if e.held_out is not None else e.on_training


def _varies(outputs: Tensor) -> bool:
    """Whether outputs go through most of what a sigmoid can give, so that it is no accident."""
    return float(outputs.max() - outputs.min()) > 0.5 and float(outputs.min()) < 0.3
