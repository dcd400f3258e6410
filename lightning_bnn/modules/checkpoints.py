"""Notes of a checkpoint besides tensors, to be compared or recalled."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_bnn.modules.core import Core
from lightning_bnn.modules.sharing import divergence_state

__all__ = ["KEY", "notes_of", "recall"]

KEY = "lightning_bnn"
"""Where our notes are in a checkpoint."""


def notes_of(module: Core) -> dict[str, Any]:
    """The notes of a module.

    Args:
        module: what is saved.
    """
    example = [x.detach().cpu() if isinstance(x, Tensor) else x for x in module.known_example]
    notes = {"class": type(module).__name__, "made_of": _parts(module), "example": example}
    if module.divergence is not None:
        strategy: Any = None if module.population.share is None else module.trainer.strategy
        gather = None if strategy is None else strategy.gather_members
        notes["divergence"] = divergence_state(module, gather)
    return {**notes, **module.state.notes}


def recall(module: Core, notes: dict[str, Any]) -> None:
    """Go on from notes, and warn if the module targets another posterior than was saved.

    Args:
        module: what is loaded.
        notes: of the checkpoint.
    """
    _compare(module, notes.get("made_of", {}))
    example = notes.get("example", ())
    if not module.known_example:
        module.known_example = tuple(
            x.to(module.device) if isinstance(x, Tensor) else x for x in example
        )
    module.state.recall(notes)
    state = notes.get("divergence")
    if module.divergence is None or state is None or len(state["left_out"]) < module.members:
        return
    module.divergence.load_state_dict(state)
    if module.population.share is not None:
        module.divergence.take_share(module.population.share.first, module.population.share.last)


def _compare(module: Core, saved: dict[str, str]) -> None:
    current = _parts(module)
    for name, text in saved.items():
        if current.get(name) == text:
            continue
        message = (
            f"The checkpoint was trained with {name} {text}, this module has {current.get(name)}: "
            f"pass `{name}` to `load_from_checkpoint`."
        )
        if name == "likelihood":  # its parameters would not fit
            raise ValueError(message)
        rank_zero_warn(message)


def _parts(module: Core) -> dict[str, str]:
    """Likelihood and prior in words."""
    parts = {name: getattr(module, name) for name in ("likelihood", "prior")}
    return {n: " ".join(repr(p).split()) for n, p in parts.items() if isinstance(p, nn.Module)}
