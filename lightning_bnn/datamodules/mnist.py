"""MNIST, with FashionMNIST out of distribution."""

from __future__ import annotations

from lightning_bnn.datamodules.base import Examples, Splits, hold_out, read_files
from lightning_bnn.datamodules.images import ImageData, torchvision_set

__all__ = ["MNIST"]


class MNIST(ImageData):
    """Handwritten digits ``(1, 28, 28)``. The test set of FashionMNIST is out of distribution.

    The folder holds ``MNIST/raw`` and ``FashionMNIST/raw``; arguments are those of `ImageData`.

    >>> import torch
    >>> data = MNIST(root="nowhere", augment=False)
    >>> white = torch.full((1, 1, 28, 28), 255, dtype=torch.uint8)
    >>> data.normalise(white).unique().round(decimals=2), data.augmentation
    (tensor([2.8200]), None)
    """

    mean, std = (0.1307,), (0.3081,)
    mirrored = False

    def prepare_data(self) -> None:
        """Download, where that is asked for."""
        if self.download:
            for name in ("MNIST", "FashionMNIST"):
                torchvision_set(name)(str(self.root), download=True)

    def load(self) -> Splits:
        """Read the files of both sets."""
        train, val = hold_out(self._read("MNIST", True), self.val_size, self.seed)
        ood = {"fashion": self._read("FashionMNIST", False)}
        return Splits(train, val, self._read("MNIST", False), ood)

    def _read(self, name: str, train: bool) -> Examples:
        data = read_files(
            lambda: torchvision_set(name)(str(self.root), train=train),
            name,
            self.root,
            "Set `download: true` to fetch it, or put the four idx files of the set "
            f"into {name}/raw.",
        )
        return data.data[:, None], data.targets
