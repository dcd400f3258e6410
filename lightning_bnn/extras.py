"""Packages that only some features need, and the extra that brings each."""

from __future__ import annotations

from contextlib import AbstractContextManager

import weightsym

EXTRAS = {
    "huggingface_hub": ("huggingface_hub", "lightning_bnn[hub]"),
    "pandas": ("pandas", "pandas"),
    "probly": ("probly", "probly"),
    "ray": ("ray", "lightning_bnn[ray]"),
    "sklearn": ("scikit-learn", "lightning_bnn[data]"),
    "submitit": ("submitit", "lightning_bnn[slurm]"),
    "torchvision": ("torchvision", "lightning_bnn[data]"),
}
"""By module: its package, and what to install, which brings it."""


def needed(title: str) -> AbstractContextManager[None]:
    """While packages are imported that come with extras, say which extra brings a missing one.

    Args:
        title: the name of what needs them.

    >>> with needed("The cluster"):
    ...     raise ModuleNotFoundError("No module named 'ray'", name="ray")
    Traceback (most recent call last):
    weightsym.extras.MissingPackage: The cluster needs ray: pip install 'lightning_bnn[ray]'
    """
    return weightsym.needed(title, EXTRAS)
