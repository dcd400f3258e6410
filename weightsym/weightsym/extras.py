"""Packages that only some features need: one sentence says what brings what is missing."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType


class MissingPackage(ModuleNotFoundError):
    """Raised where a package is not installed, with a text that says how to install it."""


@contextmanager
def needed(title: str, extras: Mapping[str, tuple[str, str]]) -> Iterator[None]:
    """While packages are imported that need not be there, say how to get a missing one.

    Args:
        title: the name of what needs them.
        extras: by module its package, and what to install, which brings it.

    >>> with needed("The figure", {"sklearn": ("scikit-learn", "mine[data]")}):
    ...     raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    Traceback (most recent call last):
    weightsym.extras.MissingPackage: The figure needs scikit-learn: pip install 'mine[data]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        requirement = extras.get((error.name or "").partition(".")[0])
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
    with needed(title, {"lightning_bnn": ("lightning_bnn", "lightning_bnn")}):
        return importlib.import_module(f"lightning_bnn.{module}")
