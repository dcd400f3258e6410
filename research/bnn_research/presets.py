"""`bnn-research presets`: the configurations of the papers and of the references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L

from lightning_bnn.commands.presets import preset_names, show_presets
from lightning_bnn.commands.runs import Job

__all__ = ["OWN", "presets", "study_job"]

OWN = "bnn_research"
"""The package that has them."""


def presets(name: str | None = None) -> None:
    """List the presets of the papers and of the references, or print one, to be copied or piped.

    Args:
        name: the one to print; by default all are listed.
    """
    show_presets(name, OWN)


def study_job(
    name: str,
    preset: str,
    overrides: Mapping[str, Any] | None = None,
    callbacks: Sequence[L.Callback] = (),
) -> Job:
    """A preset to be trained, of the papers or of `lightning_bnn`.

    Args:
        name: of its folder.
        preset: its name.
        overrides: what to change in it.
        callbacks: to watch the training by.
    """
    package = OWN if preset in preset_names(OWN) else "lightning_bnn"
    return Job(name, preset, overrides or {}, callbacks, package=package)
