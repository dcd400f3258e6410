"""Images from a folder: MNIST, CIFAR-10, CIFAR-100 and TinyImageNet."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from lightning_bnn.datamodules.base import (
    DataModule,
    Examples,
    Splits,
    data_root,
    hold_out,
    missing,
    read_files,
)
from lightning_bnn.datamodules.preprocessing import CropFlip
from lightning_bnn.extras import needed

__all__ = ["CIFAR10", "CIFAR100", "MNIST", "TinyImageNet"]


class ImageData(DataModule):
    """Images from a folder, augmented by random crops.

    Args:
        root: folder of the data; by default the environment variable ``LIGHTNING_BNN_DATA``, else
            ``data``.
        batch_size: number of examples in a training batch of one process.
        eval_batch_size: number of examples in a batch of validation and test.
        seed: determines splits, order and augmentation.
        val_size: number of training examples held out for validation.
        augment: whether to use random crops with four pixels of padding, and mirror images of
            photographs.
        standardise: whether pixels have mean zero and variance one; otherwise they are between 0
            and 1.
        download: whether to fetch missing files.
        orders: number of members with training batches of their own, see `DataModule`.
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
    """Return a class of data sets of torchvision, which requires the extra `data`.

    Args:
        name: name of the class.
    """
    with needed(f"`{name}`"):
        from torchvision import datasets
    return getattr(datasets, name)


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
        """Download the files, if requested."""
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
        """Download the files, if requested."""
        if self.download:
            torchvision_set(self.source)(str(self.root), download=True)
            torchvision_set("SVHN")(str(self.root), split="test", download=True)

    def load(self) -> Splits:
        """Read the files of both sets."""
        train, val = hold_out(self._read(True), self.val_size, self.seed)
        return Splits(train, val, self._read(False), {"svhn": self._svhn()})

    def _read(self, train: bool) -> Examples:
        dataset = torchvision_set(self.source)
        data = read_files(
            lambda: dataset(str(self.root), train=train),
            self.source,
            self.root,
            "Set `download: true` to fetch it, or unpack its archive for Python there "
            f"({dataset.base_folder}).",
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


_SIDE = 64


class TinyImageNet(ImageData):
    """Photographs ``(3, 64, 64)`` in 200 classes. Its ``val`` folder is the test set.

    All splits of the Describable Textures, resized to 64 x 64, are out of distribution. Decoded
    images are kept in memory (1.2 GB). The folder holds ``tiny-imagenet-200`` and ``dtd``;
    arguments are those of `ImageData`, where ``download`` fetches the textures only.

    >>> TinyImageNet(root="nowhere").folder.as_posix()
    'nowhere/tiny-imagenet-200'
    """

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    @property
    def folder(self) -> Path:
        """The folder with the files of TinyImageNet."""
        return self.root / "tiny-imagenet-200"

    def prepare_data(self) -> None:
        """Download the textures, if requested."""
        if self.download:
            torchvision_set("DTD")(str(self.root), download=True)

    def load(self) -> Splits:
        """Decode the images of both sets."""
        if not (self.folder / "wnids.txt").is_file():
            how = "Unpack tiny-imagenet-200.zip (Stanford CS231n) there."
            raise missing("TinyImageNet", self.folder, how)
        names = sorted((self.folder / "wnids.txt").read_text().split())
        classes = {name: k for k, name in enumerate(names)}
        train, val = hold_out(self._train(classes), self.val_size, self.seed)
        return Splits(train, val, self._test(classes), {"textures": self._textures()})

    def _train(self, classes: dict[str, int]) -> Examples:
        files = [
            (path, label)
            for name, label in classes.items()
            for path in sorted((self.folder / "train" / name / "images").glob("*.JPEG"))
        ]
        return _decoded([path for path, _ in files], "train"), _labels([k for _, k in files])

    def _test(self, classes: dict[str, int]) -> Examples:
        folder = self.folder / "val"
        rows = [line.split() for line in (folder / "val_annotations.txt").read_text().splitlines()]
        paths = [folder / "images" / row[0] for row in rows]
        return _decoded(paths, "val"), _labels([classes[row[1]] for row in rows])

    def _textures(self) -> Examples:
        parts = [
            read_files(
                functools.partial(torchvision_set("DTD"), str(self.root), split=split),
                "DTD",
                self.root,
                "Set `download: true` to fetch it, or unpack dtd-r1.0.1.tar.gz into dtd.",
            )
            for split in ("train", "val", "test")
        ]
        paths = [path for chunk in parts for path in chunk._image_files]
        return _decoded(paths, "textures"), _labels([k for chunk in parts for k in chunk._labels])


def _labels(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def _decoded(paths: Sequence[Path], name: str) -> Tensor:
    """Return all images as bytes ``(n, 3, 64, 64)``."""
    images = np.empty((len(paths), _SIDE, _SIDE, 3), np.uint8)

    def read(k: int) -> None:
        with Image.open(paths[k]) as image:
            small = image.convert("RGB")
            if small.size != (_SIDE, _SIDE):
                small = small.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
            images[k] = np.asarray(small)

    with ThreadPoolExecutor() as pool:
        bar = tqdm(
            total=len(paths), desc=f"decoding {name}", leave=False, disable=len(paths) < 2000
        )
        for _ in pool.map(read, range(len(paths))):
            bar.update()
        bar.close()
    return torch.from_numpy(images).movedim(-1, 1).contiguous()
