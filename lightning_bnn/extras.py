"""Optional packages, and the extra that installs each."""

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
"""Package and install command, by module."""


def needed(title: str) -> AbstractContextManager[None]:
    """Import optional packages, and name the extra of a missing one.

    Args:
        title: name of the feature that needs them.

    >>> with needed("The cluster"):
    ...     raise ModuleNotFoundError("No module named 'ray'", name="ray")
    Traceback (most recent call last):
    weightsym.extras.MissingPackage: The cluster needs ray: pip install 'lightning_bnn[ray]'
    """
    return weightsym.needed(title, EXTRAS)
