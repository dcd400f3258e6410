"""Optional packages: error messages that explain how to install a missing one."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType


class MissingPackage(ModuleNotFoundError):
    """Raised for a missing package. The message explains how to install it."""


@contextmanager
def needed(title: str, extras: Mapping[str, tuple[str, str]]) -> Iterator[None]:
    """Import optional packages, and explain how to install a missing one.

    Args:
        title: name of the feature that needs them.
        extras: package and install command, by module.

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
    """Import a file of `lightning_bnn`, or explain that it is not installed.

    Args:
        module: its name within that package.
        title: name of the feature that needs it.
    """
    with needed(title, {"lightning_bnn": ("lightning_bnn", "lightning_bnn")}):
        return importlib.import_module(f"lightning_bnn.{module}")
