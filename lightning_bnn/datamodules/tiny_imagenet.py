"""TinyImageNet, with the Describable Textures out of distribution."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from lightning_bnn.datamodules.base import Examples, Splits, hold_out, missing, read_files
from lightning_bnn.datamodules.images import ImageData, torchvision_set

__all__ = ["TinyImageNet"]

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
        """Download the textures, where that is asked for."""
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
    """All images as bytes ``(n, 3, 64, 64)``."""
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
