"""What modules that sample with all the data refuse."""

from __future__ import annotations

from typing import Any

__all__ = ["leave_out"]

_OF_OTHERS = {
    "max_loss": None, "restarts": 0,
    "lr_scheduler": None, "lr_interval": "epoch", "member_rates": None,
}  # fmt: skip


def leave_out(kwargs: dict[str, Any], module: str) -> None:
    """Take out arguments of other methods, which may only be what they are by default.

    Args:
        kwargs: of the module; a checkpoint has them all.
        module: its name.
    """
    for name, default in _OF_OTHERS.items():
        value = kwargs.pop(name, default)
        if value != default:
            raise ValueError(
                f"`{name}` means nothing to {module}, whose sampler adapts its step size and "
                f"rejects what diverges: leave it out, got {value}."
            )
