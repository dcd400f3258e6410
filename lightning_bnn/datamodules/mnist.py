"""MNIST, with FashionMNIST out of distribution."""

from __future__ import annotations

from torchvision import datasets

from lightning_bnn.datamodules.base import Examples, Splits, hold_out, read_files
from lightning_bnn.datamodules.images import ImageData

__all__ = ["MNIST"]


class MNIST(ImageData):
    """Handwritten digits ``(1, 28, 28)``; the test set of FashionMNIST is out of distribution.

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
            for kind in (datasets.MNIST, datasets.FashionMNIST):
                kind(str(self.root), download=True)

    def load(self) -> Splits:
        """Read the files of both sets."""
        train, val = hold_out(self._read(datasets.MNIST, True), self.val_size, self.seed)
        ood = {"fashion": self._read(datasets.FashionMNIST, False)}
        return Splits(train, val, self._read(datasets.MNIST, False), ood)

    def _read(self, kind: type[datasets.MNIST], train: bool) -> Examples:
        data = read_files(
            lambda: kind(str(self.root), train=train),
            kind.__name__,
            self.root,
            "Set `download: true` to fetch it, or put the four idx files of the set "
            f"into {kind.__name__}/raw.",
        )
        return data.data[:, None], data.targets
