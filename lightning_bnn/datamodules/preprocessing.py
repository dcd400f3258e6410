"""Random crops and normalisation of batches, on their device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class CropFlip:
    """Shifts every image by up to ``padding`` pixels of zeros, and mirrors every second one.

    The random numbers are drawn separately, with the batch, so that they depend neither on the
    device nor on concurrent work.

    Args:
        padding: number of pixels.
        flip: whether images are mirrored.
    """

    def __init__(self, padding: int = 4, flip: bool = False) -> None:
        self.padding, self.flip = padding, flip

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw the crop offsets of every image, and whether it is mirrored."""
        offsets = torch.randint(2 * self.padding + 1, (n, 2), generator=generator)
        mirrored = torch.randint(2, (n, 1), generator=generator) * int(self.flip)
        return torch.cat([offsets, mirrored], 1)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Apply the draws to images ``(batch, channels, height, width)``."""
        n, _, height, width = images.shape
        down, right, mirrored = draws.unbind(1)
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        crops = padded.unfold(2, height, 1).unfold(3, width, 1)
        crops = crops[torch.arange(n, device=images.device), :, down, right]
        if not self.flip:
            return crops
        return torch.where(mirrored[:, None, None, None] == 1, crops.flip(-1), crops)


AT_ONCE = 2**16
"""Number of entries that stay in the cache between operations."""


def normalise(
    inputs: Tensor, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> Tensor:
    """Convert bytes to numbers from 0 to 1, and channels to mean zero and variance one.

    >>> normalise(torch.tensor([0, 51, 255], dtype=torch.uint8))
    tensor([0.0000, 0.2000, 1.0000])

    Args:
        inputs: examples, ``(..., channels, height, width)`` if there are means.
        mean: of every channel, after the conversion of bytes; None leaves them as they are.
        std: of every channel.
    """
    of_bytes = inputs.dtype == torch.uint8
    if not of_bytes and (mean is None or std is None):
        return inputs
    out = torch.empty_like(
        inputs,
        dtype=torch.get_default_dtype() if of_bytes else None,
        memory_format=torch.contiguous_format,
    )
    scales = (
        []
        if mean is None or std is None
        else [out.new_tensor(v)[:, None, None] for v in (mean, std)]
    )
    for piece, numbers in zip(_pieces(inputs), _pieces(out), strict=True):
        numbers.copy_(piece)
        if of_bytes:
            numbers.div_(255)
        if scales:
            numbers.sub_(scales[0]).div_(scales[1])
    return out


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """Yield some examples at a time on a processor with caches, else all at once."""
    if x.ndim < 4 or x.device.type != "cpu" or x.numel() <= AT_ONCE:
        return [x]
    examples = x.flatten(0, -4)
    return examples.split(max(AT_ONCE // examples[0].numel(), 1))
