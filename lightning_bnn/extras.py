"""Optional packages, and the extra that installs each."""

from __future__ import annotations

from contextlib import AbstractContextManager

import weightsym

EXTRAS = {
    "huggingface_hub": ("huggingface_hub", "lightning_bnn[hub]"),
    "pandas": ("pandas", "pandas"),
    "sklearn": ("scikit-learn", "lightning_bnn[data]"),
    "torchvision": ("torchvision", "lightning_bnn[data]"),
}
"""Package and install command, by module."""


def needed(title: str) -> AbstractContextManager[None]:
    """Import optional packages, and name the extra of a missing one.

    Args:
        title: name of the feature that needs them.

    >>> with needed("The Hub"):
    ...     raise ModuleNotFoundError(name="huggingface_hub")
    Traceback (most recent call last):
    weightsym.extras.MissingPackage: The Hub needs huggingface_hub: pip install 'lightning_bnn[hub]'
    """
    return weightsym.needed(title, EXTRAS)
