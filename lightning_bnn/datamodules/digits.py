"""Handwritten digits of 8 x 8 pixels from scikit-learn, without a download."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.datamodules.base import DataModule, Examples, Splits
from lightning_bnn.extras import needed
from weightsym.params import keyed_generator

__all__ = ["Digits"]


class Digits(DataModule):
    """1797 digits in ten classes, ``(1, 8, 8)``, split at random with equal shares of classes.

    Out of distribution are test digits with permuted pixels (``scrambled``), their negatives
    (``inverted``) and images of independent pixels (``noise``). Shifted are digits with added noise
    (``noisy``) and digits moved by one pixel (``moved``).

    Args:
        batch_size: number of examples in a training batch of one process.
        eval_batch_size: number of examples in a batch of validation and test.
        seed: determines splits, order and noise.
        val_share: fraction of the data for validation.
        test_share: fraction of the data for the test.
        orders: number of members with training batches of their own, see `DataModule`.

    >>> data = Digits()
    >>> data.num_data, data.splits.train[0].shape
    (1078, torch.Size([1078, 1, 8, 8]))
    >>> [name for name, kind in data.test_sets if kind == "ood"]
    ['scrambled', 'inverted', 'noise']
    """

    mean, std = (0.3053,), (0.3760,)

    def __init__(
        self,
        batch_size: int = 64,
        eval_batch_size: int = 512,
        seed: int = 0,
        val_share: float = 0.15,
        test_share: float = 0.25,
        orders: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, orders)
        if not (val_share >= 0 and test_share > 0 and val_share + test_share < 1):
            raise ValueError(
                "`val_share` and `test_share` must be fractions that leave some data for "
                f"training, got {val_share} and {test_share}."
            )
        self.val_share, self.test_share = val_share, test_share

    def load(self) -> Splits:
        """Split the data, and make the other sets from the test digits."""
        with needed("`Digits`"):
            from sklearn.datasets import load_digits

        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
        labels = torch.tensor(data.target)
        parts = self._split(labels)
        train, val, test = ((images[rows], labels[rows]) for rows in parts)
        return Splits(train, val if len(val[0]) else None, test, *self._others(test))

    def _split(self, labels: Tensor) -> list[Tensor]:
        """Return rows for training, validation and test, class by class."""
        generator = keyed_generator(self.seed, "digits")
        parts: list[list[Tensor]] = [[], [], []]
        for label in labels.unique():
            rows = (labels == label).nonzero()[:, 0]
            rows = rows[torch.randperm(len(rows), generator=generator)]
            test, val = (round(len(rows) * share) for share in (self.test_share, self.val_share))
            sizes = [len(rows) - test - val, val, test]
            for rows_of_split, chosen in zip(parts, rows.split(sizes), strict=True):
                rows_of_split.append(chosen)
        return [torch.cat(rows_of_split).sort().values for rows_of_split in parts]

    def _others(self, test: Examples) -> tuple[dict[str, Examples], dict[str, Examples]]:
        images, labels = test
        generator = keyed_generator(self.seed, "digits", "others")
        order = torch.randperm(64, generator=generator)
        noise = torch.rand(images.shape, generator=generator)
        added = 0.3 * torch.randn(images.shape, generator=generator)
        ood = {
            "scrambled": (images.flatten(1)[:, order].reshape(images.shape), labels),
            "inverted": (1 - images, labels),
            "noise": (noise, labels),
        }
        shift = {
            "noisy": ((images + added).clamp(0, 1), labels),
            "moved": (images.roll(1, 3), labels),
        }
        return ood, shift
