"""Packages that only some features need: one sentence says what brings what is missing."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["MissingPackage", "needed", "of_the_plug_in"]

_EXTRAS = {
    "huggingface_hub": ("huggingface_hub", "lightning_bnn[hub]"),
    "lightning_bnn": ("lightning_bnn", "lightning_bnn"),
    "llvmlite": ("llvmlite", "weightsym[fast]"),
    "pandas": ("pandas", "pandas"),
    "probly": ("probly", "probly"),
    "ray": ("ray", "lightning_bnn[ray]"),
    "sklearn": ("scikit-learn", "lightning_bnn[data]"),
    "submitit": ("submitit", "lightning_bnn[slurm]"),
    "torchvision": ("torchvision", "lightning_bnn[data]"),
}
"""By module: its package, and what to install, which brings it."""


class MissingPackage(ModuleNotFoundError):
    """Raised where a package is not installed, with a text that says how to install it."""


@contextmanager
def needed(title: str) -> Iterator[None]:
    """While packages are imported that come with extras, say which extra brings a missing one.

    Args:
        title: the name of what needs them.

    >>> with needed("The engine"):
    ...     raise ModuleNotFoundError("No module named 'ray'", name="ray")
    Traceback (most recent call last):
    weightsym.extras.MissingPackage: The engine needs ray: pip install 'lightning_bnn[ray]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        requirement = _EXTRAS.get((error.name or "").partition(".")[0])
        if requirement is None:
            raise
        package, install = requirement
        message = f"{title} needs {package}: pip install {shlex.quote(install)}"
        raise MissingPackage(message, name=error.name) from error


def of_the_plug_in(module: str, title: str) -> ModuleType:
    """Import a file of `lightning_bnn`, or say in one sentence that it is not installed.

    Args:
        module: its name within that package.
        title: the name of what needs it.
    """
    with needed(title):
        return importlib.import_module(f"lightning_bnn.{module}")
