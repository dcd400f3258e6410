"""Random crops and mirror images of a whole batch, on the device it is on."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CropFlip"]


class CropFlip:
    """Shift every image by up to ``padding`` pixels, zeros coming in. Mirror every second one.

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
        down, right, mirrored = draws.unbind(1)
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        crops = crops[torch.arange(n, device=images.device), :, down, right]
        if not self.flip:
            return crops
        return torch.where(mirrored[:, None, None, None] == 1, crops.flip(-1), crops)
