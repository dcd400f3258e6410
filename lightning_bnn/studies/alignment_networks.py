"""Small networks of many kinds and their data, for the study of alignment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bnn.datamodules import Digits
from lightning_bnn.models import mlp

__all__ = ["ARCHITECTURES", "Architecture", "Examples"]

CONTEXT = 16
"""Characters that the language model sees."""


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm and pooling, or residual blocks beside a stream."""

    def __init__(self, width: int, blocks: int = 0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.last = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the digit that an image shows."""
        x = F.max_pool2d(self.stem(x).relu(), 2)
        for block in self.blocks:
            x = (x + block(x)).relu()
        return self.head(self.last(x).mean((2, 3)))


class Block(nn.Module):
    """Attention and a layer of GELU units beside a normalised stream."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the stream what attention and the units say."""
        y = self.before(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A vision transformer on patches of 2 x 2 pixels, or a language model on characters."""

    def __init__(self, width: int, vocabulary: int | None = None) -> None:
        super().__init__()
        words = vocabulary is not None
        self.embed: nn.Module = (
            nn.Embedding(vocabulary, width) if vocabulary else nn.Conv2d(1, width, 2, 2)
        )
        self.words = words
        self.places = nn.Parameter(torch.empty(16, width))
        self.reset_parameters()
        self.blocks = nn.Sequential(*(Block(width, 4, words) for _ in range(2)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary or 10)

    def reset_parameters(self) -> None:
        """Draw numbers that tell places apart."""
        nn.init.normal_(self.places, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the digit, or of the next character."""
        tokens = self.embed(x) if self.words else self.embed(x).flatten(2).mT
        stream = self.blocks(tokens + self.places)
        return self.head(self.norm(stream[:, -1] if self.words else stream.mean(1)))


@dataclass(frozen=True)
class Examples:
    """Inputs and labels, to train and to test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int


def digits() -> Examples:
    """Scikit-learn's digits, 8 x 8 pixels."""
    source = Digits()
    splits = source.load()
    (x, y), (test_x, test_y) = splits.train, splits.test
    return Examples((source.normalise(x), y), (source.normalise(test_x), test_y), 10)


def characters() -> Examples:
    """Python's own source text: the next character after sixteen."""
    text = inspect.getsource(inspect)[:20_000]
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    windows = codes.unfold(0, CONTEXT + 1, 3)
    cut = int(0.8 * len(windows))
    parts = [(w[:, :-1], w[:, -1]) for w in (windows[:cut], windows[cut + CONTEXT :])]
    return Examples(parts[0], parts[1], len(letters))


@dataclass(frozen=True)
class Architecture:
    """A kind of network, its data, and its training.

    With ``prior_std`` its networks are maxima of a posterior, and one Gaussian for them is
    evaluated.
    """

    build: Callable[[int], nn.Module]
    data: Literal["digits", "characters"]
    epochs: int
    lr: float
    prior_std: float | None = None

    def examples(self) -> Examples:
        """The data that it learns."""
        return digits() if self.data == "digits" else characters()


ARCHITECTURES: Mapping[str, Architecture] = {
    "MLP, 32": Architecture(lambda n: mlp(64, [32], n), "digits", 100, 0.005, prior_std=0.5),
    "MLP, 2 x 16": Architecture(lambda n: mlp(64, [16, 16], n), "digits", 40, 0.005),
    "MLP, 2 x 128": Architecture(lambda n: mlp(64, [128, 128], n), "digits", 40, 0.002),
    "CNN": Architecture(lambda n: ConvNet(12), "digits", 20, 0.005),
    "residual CNN": Architecture(lambda n: ConvNet(12, 2), "digits", 20, 0.005),
    "ViT": Architecture(lambda n: Transformer(32), "digits", 40, 0.002),
    "GPT": Architecture(lambda n: Transformer(32, n), "characters", 15, 0.002),
}
"""By the names in the tables."""
