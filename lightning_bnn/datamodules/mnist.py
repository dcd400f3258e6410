"""MNIST, with FashionMNIST out of distribution."""

from __future__ import annotations

from torchvision import datasets

from lightning_bnn.datamodules.augmentation import CropFlip
from lightning_bnn.datamodules.base import DataModule, Examples, Splits, data_root, found, hold_out

__all__ = ["MNIST"]


class MNIST(DataModule):
    """Handwritten digits ``(1, 28, 28)``; the test set of FashionMNIST is out of distribution.

    Args:
        root: folder that holds ``MNIST/raw`` and ``FashionMNIST/raw``; by default the environment
            variable ``LIGHTNING_BNN_DATA``, else ``data``.
        batch_size: examples in a training batch of one process.
        eval_batch_size: examples in a batch of validation and test.
        seed: decides splits, order and augmentation.
        val_size: training examples that are held out for validation.
        augment: random crops with four pixels of padding.
        download: fetch what is missing.
    """

    mean, std = (0.1307,), (0.3081,)

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        seed: int = 0,
        val_size: int = 5000,
        augment: bool = True,
        download: bool = False,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed)
        self.root, self.val_size, self.download = data_root(root), val_size, download
        self.augmentation = CropFlip(4) if augment else None

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
        data = found(
            lambda: kind(str(self.root), train=train),
            kind.__name__,
            self.root,
            "Set `download: true` to fetch it, or put the four idx files of the set "
            f"into {kind.__name__}/raw.",
        )
        return data.data[:, None], data.targets
