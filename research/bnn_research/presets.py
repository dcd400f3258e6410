"""`bnn-research presets`: the configurations of the papers and of the references."""

from __future__ import annotations

from lightning_bnn.commands.presets import show_presets

OWN = "bnn_research"
"""The package that has them."""


def presets(name: str | None = None) -> None:
    """List the presets of the papers and of the references, or print one.

    Args:
        name: name of the preset to print; by default all are listed.
    """
    show_presets(name, OWN)
