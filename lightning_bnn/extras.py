"""Packages that only some features need: one sentence says which extra brings what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MissingPackage", "needed"]

_EXTRAS = {
    "curvlinops": ("curvlinops", "laplace"),
    "llvmlite": ("llvmlite", "fast"),
    "ray": ("ray", "ray"),
    "sklearn": ("scikit-learn", "data"),
    "submitit": ("submitit", "slurm"),
    "torchvision": ("torchvision", "data"),
}
"""By module: its package, and the extra of this package that brings it."""


class MissingPackage(ModuleNotFoundError):
    """Raised where a package is not installed, with a text that says how to install it."""


@contextmanager
def needed(what: str) -> Iterator[None]:
    """While packages are imported that come with extras, say which extra brings a missing one.

    Args:
        what: needs them.

    >>> with needed("The engine"):
    ...     raise ModuleNotFoundError("No module named 'ray'", name="ray")
    Traceback (most recent call last):
    lightning_bnn.extras.MissingPackage: The engine needs ray: pip install 'lightning_bnn[ray]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        requirement = _EXTRAS.get((error.name or "").partition(".")[0])
        if requirement is None:
            raise
        package, extra = requirement
        message = f"{what} needs {package}: pip install 'lightning_bnn[{extra}]'"
        raise MissingPackage(message, name=error.name) from error
