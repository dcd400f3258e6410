"""The base of image data sets that are read from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_bnn.datamodules.augmentation import CropFlip
from lightning_bnn.datamodules.base import DataModule, data_root
from lightning_bnn.extras import needed

__all__ = ["ImageData", "torchvision_set"]


class ImageData(DataModule):
    """Images that are read from a folder and augmented by random crops.

    Args:
        root: folder of the data; by default the environment variable ``LIGHTNING_BNN_DATA``, else
            ``data``.
        batch_size: examples in a training batch of one process.
        eval_batch_size: examples in a batch of validation and test.
        seed: decides splits, order and augmentation.
        val_size: training examples that are held out for validation.
        augment: random crops with four pixels of padding, and mirror images of photographs.
        standardise: pixels of mean zero and variance one; otherwise they are from 0 to 1.
        download: fetch what is missing.
        orders: how many members get training batches of their own, see `DataModule`.
    """

    mirrored = True

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        seed: int = 0,
        val_size: int = 5000,
        augment: bool = True,
        standardise: bool = True,
        download: bool = False,
        orders: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, orders)
        self.root, self.val_size, self.download = data_root(root), val_size, download
        if not standardise:
            self.mean = self.std = None
        self.augmentation = CropFlip(4, flip=self.mirrored) if augment else None


def torchvision_set(name: str) -> Any:
    """A class of data sets of torchvision, which the extra `data` brings.

    Args:
        name: of the class.
    """
    with needed(f"`{name}`"):
        from torchvision import datasets
    return getattr(datasets, name)
