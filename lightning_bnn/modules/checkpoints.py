"""Metadata in checkpoints, and validation of checkpoints against modules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_bnn._compat import trainer_of
from lightning_bnn.harvest import ends
from lightning_bnn.methods import Method
from lightning_bnn.modules.members import check_fixed, sample_of_fixed
from weightsym.files import load

if TYPE_CHECKING:
    from lightning_bnn.modules.bayesian import Bayesian

NOTES = "lightning_bnn"
"""Key of our notes in a checkpoint."""


def notes_of(module: Bayesian) -> dict[str, Any]:
    """Return the notes of a module.

    Args:
        module: to be saved.
    """
    example = [x.detach().cpu() if isinstance(x, Tensor) else x for x in module.run.rows]
    notes = {
        "class": type(module).__name__, "method": module.method.name,
        "made_of": _parts(module), "example": example, "fixed": sample_of_fixed(module.template),
        "seed": module.seed,
    }  # fmt: skip
    if module.state.divergence is not None:
        trainer = trainer_of(module)
        over = trainer is not None and ends(trainer)
        notes["divergence"] = module.state.divergence.state_dict(last=over)
    return {**notes, **module.state.notes}


def recall(module: Bayesian, notes: dict[str, Any]) -> None:
    """Restore notes, and warn if the module targets another posterior than the saved one.

    Args:
        module: to be loaded.
        notes: of the checkpoint.
    """
    _compare(module, notes.get("made_of", {}))
    check_fixed(module.template, notes.get("fixed", torch.empty(0)), "The run of the checkpoint")
    if module.given_seed is None:
        module.seed = notes.get("seed", module.seed)
    example = notes.get("example", ())
    if not module.run.rows:
        module.run.rows = tuple(
            x.to(module.device) if isinstance(x, Tensor) else x for x in example
        )
    module.state.recall(notes)
    state = notes.get("divergence")
    if module.state.divergence is None or state is None or len(state["left_out"]) < module.members:
        return
    module.state.divergence.load_state_dict(state)


def check_start(module: Bayesian, source: str) -> None:
    """Refuse to start from a checkpoint of this package with other fixed weights.

    Args:
        module: to be started.
        source: a checkpoint, or a folder, which is not checked.
    """
    if Path(source).suffix == ".ckpt" and Path(source).is_file():
        notes = load(source, mmap=True).get(NOTES, {})
        if len(sample := notes.get("fixed", torch.empty(0))):
            check_fixed(module.template, sample, str(source))


def check(module: Bayesian, checkpoint: dict[str, Any]) -> None:
    """Refuse a checkpoint of another method, or of other networks.

    Args:
        module: to be loaded.
        checkpoint: as read by Lightning.
    """
    notes, weights = checkpoint.get(NOTES, {}), checkpoint["state_dict"]
    bases = [c.name for c in type(module.method).__mro__ if issubclass(c, Method)]
    method = notes.get("method")
    foreign = not notes and weights.keys().isdisjoint(
        f"state.{name}" for name in module.state.state_dict()
    )
    if method not in (None, *bases) or foreign:
        stored, current = kind_of(checkpoint), type(module).__name__
        raise _of_another(*((stored, current) if stored != current else (method, bases[0])))
    check_weights(module, weights, strict=False)


def check_weights(module: Bayesian, weights: Mapping[str, Any], strict: bool) -> None:
    """Refuse weights of other networks.

    Args:
        module: to be loaded.
        weights: a state dict.
        strict: whether missing weights are an error.
    """
    for name, tensor in module.named_parameters():
        shape = tuple(weights[name].shape) if name in weights else None
        left_out = shape is None and not strict
        if shape == tuple(tensor.shape) or is_lazy(tensor) or left_out:
            continue
        stored = "nothing" if shape is None else f"numbers of shape {shape}"
        raise ValueError(
            "The checkpoint has different networks or a different number of members: for "
            f"{name!r} it has {stored}, but this module has {tuple(tensor.shape)}."
        )


def check_arguments(module: type, arguments: Mapping[str, Any]) -> None:
    """Refuse unknown arguments of a class of modules, which Lightning would ignore.

    Args:
        module: the class.
        arguments: replacements of arguments in the checkpoint, with those of Lightning.
    """
    parameters = inspect.signature(module).parameters
    loading = inspect.signature(LightningModule.load_from_checkpoint).parameters
    unknown = arguments.keys() - parameters.keys() - loading.keys()
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise TypeError(f"{module.__name__} has no argument `{min(unknown)}`.")


def explain(error: Exception, module: type, path: Any) -> None:
    """Raise an explanation if a file is not a checkpoint that a class could load.

    Args:
        error: raised while loading it.
        module: the class.
        path: the file, or another source that Lightning reads.
    """
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return
    try:
        content = load(path, mmap=True)
    except ValueError as unreadable:
        if "an object of" in str(unreadable) and not isinstance(error, UnpicklingError):
            return  # Lightning has read it, as it was told to
        raise unreadable from error
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise ValueError(f"{path} is not a checkpoint written by Lightning.") from error
    stored = kind_of(content)
    if stored not in [c.__name__ for c in module.__mro__]:
        raise _of_another(stored, module.__name__) from error


def kind_of(checkpoint: Any) -> str | None:
    """Return the class of modules that a checkpoint names, or None.

    Args:
        checkpoint: content of the file.
    """
    notes = checkpoint.get(NOTES) if isinstance(checkpoint, dict) else None
    return notes.get("class") if isinstance(notes, dict) else None


def _of_another(stored: str | None, current: str) -> ValueError:
    author = stored or "another LightningModule"
    return ValueError(f"The checkpoint is of {author}, but this module is {current}.")


def _compare(module: Bayesian, saved: dict[str, str]) -> None:
    current = _parts(module)
    for name, text in saved.items():
        if current.get(name) == text:
            continue
        message = (
            f"The checkpoint was trained with {name} {text}, but this module has "
            f"{current.get(name)}: pass `{name}` to `load_from_checkpoint`."
        )
        if name == "likelihood":  # its parameters would not fit
            raise ValueError(message)
        rank_zero_warn(message)


def _parts(module: Bayesian) -> dict[str, str]:
    """Describe likelihood and prior in words."""
    parts = {name: getattr(module, name) for name in ("likelihood", "prior")}
    return {n: " ".join(repr(p).split()) for n, p in parts.items() if isinstance(p, nn.Module)}
