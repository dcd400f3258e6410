"""Random crops and mirror images of a whole batch, on the device it is on."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CropFlip"]


class CropFlip:
    """Shift every image by up to ``padding`` pixels, zeros coming in; mirror every second one.

    The random numbers are drawn apart, with the batch, so that they depend neither on the device
    nor on anything that runs beside.

    Args:
        padding: pixels.
        flip: whether images are mirrored.
    """

    def __init__(self, padding: int = 4, flip: bool = False) -> None:
        self.padding, self.flip = padding, flip

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """For every image the offsets of its crop, and whether it is mirrored."""
        offsets = torch.randint(2 * self.padding + 1, (n, 2), generator=generator)
        mirrored = torch.randint(2, (n, 1), generator=generator) * int(self.flip)
        return torch.cat([offsets, mirrored], 1)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Images ``(batch, channels, height, width)`` after the draws."""
        n, _, height, width = images.shape
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        rows = draws[:, :1] + torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device).expand(n, width)
        columns = torch.where(draws[:, 2:] == 1, width - 1 - columns, columns) + draws[:, 1:2]
        batch = torch.arange(n, device=images.device)[:, None, None]
        return padded.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
