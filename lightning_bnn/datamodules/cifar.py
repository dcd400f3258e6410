"""CIFAR-10 and CIFAR-100, with SVHN out of distribution."""

from __future__ import annotations

import torch

from lightning_bnn.datamodules.base import Examples, Splits, hold_out, read_files
from lightning_bnn.datamodules.images import ImageData, torchvision_set

__all__ = ["CIFAR10", "CIFAR100"]

_SVHN_SIZE = 10_000


class CIFAR10(ImageData):
    """Photographs ``(3, 32, 32)`` in 10 classes.

    The first 10 000 images of the test set of SVHN (house numbers) are out of distribution. The
    folder holds ``cifar-10-batches-py`` (or ``cifar-100-python``) and ``test_32x32.mat``; arguments
    are those of `ImageData`.

    >>> data = CIFAR10(root="nowhere", val_size=5000)
    >>> white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    >>> data.normalise(white)[0, :, 0, 0].round(decimals=2)  # (1 - mean) / std
    tensor([2.0600, 2.1300, 2.1200])
    """

    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    source = "CIFAR10"

    def prepare_data(self) -> None:
        """Download, where that is asked for."""
        if self.download:
            torchvision_set(self.source)(str(self.root), download=True)
            torchvision_set("SVHN")(str(self.root), split="test", download=True)

    def load(self) -> Splits:
        """Read the files of both sets."""
        train, val = hold_out(self._read(True), self.val_size, self.seed)
        return Splits(train, val, self._read(False), {"svhn": self._svhn()})

    def _read(self, train: bool) -> Examples:
        kind = torchvision_set(self.source)
        data = read_files(
            lambda: kind(str(self.root), train=train),
            self.source,
            self.root,
            "Set `download: true` to fetch it, or unpack its archive for Python there "
            f"({kind.base_folder}).",
        )
        return torch.from_numpy(data.data).movedim(-1, 1).contiguous(), torch.tensor(data.targets)

    def _svhn(self) -> Examples:
        data = read_files(
            lambda: torchvision_set("SVHN")(str(self.root), split="test"),
            "SVHN",
            self.root,
            "Set `download: true` to fetch it, or put test_32x32.mat there.",
        )
        images, labels = data.data[:_SVHN_SIZE], data.labels[:_SVHN_SIZE]
        return torch.from_numpy(images), torch.from_numpy(labels).long()


class CIFAR100(CIFAR10):
    """Photographs ``(3, 32, 32)`` in 100 classes, otherwise as `CIFAR10`.

    >>> CIFAR100(root="nowhere").mean, CIFAR100(root="nowhere", standardise=False).mean
    ((0.5071, 0.4867, 0.4408), None)
    """

    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    source = "CIFAR100"
