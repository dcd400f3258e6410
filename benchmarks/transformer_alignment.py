"""The loss barrier between two vision transformers, modulo more and more of their symmetries.

LIGHTNING_BNN_DATA=data python benchmarks/transformer_alignment.py --weights FOLDER [--pairs 5]

trains two networks on MNIST for every pair (80 CPU seconds each; kept in the folder), folds the
gains of their norms, brings the second to the first in several ways, and prints one row for each:
the barrier on training and test images (11 points), the accuracy half way, the distance of the
weights and the time. Intervals are those of Student for the mean over pairs, at 95 %.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bnn.datamodules import MNIST

STEPS, BATCH, RATE, DECAY = 2400, 128, 2e-3, 0.1


class Block(nn.Module):
    """Attention and a GELU layer behind RMSNorms."""

    def __init__(self, d: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, h: Tensor) -> Tensor:
        """Add what attention and the layer behind it say."""
        y = self.n1(h)
        q, k, v = (
            m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v)
        h = h + self.o(a.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.n2(h))))


class Images(nn.Module):
    """A vision transformer of two layers with sixteen patches of 7 x 7 pixels."""

    def __init__(self, d: int = 64, heads: int = 4, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, d, 7, 7)
        self.place = nn.Parameter(0.02 * torch.randn(16, d))
        self.blocks = nn.Sequential(*(Block(d, heads, hidden) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the digit."""
        h = self.embed(x).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(h)).mean(1))


# ------------------------------------------------------------ training
def images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images, standardised, with their labels."""
    splits = MNIST(val_size=0, augment=False).load()
    pairs = ((x.float().div(255).sub(0.1307).div(0.3081), y) for x, y in (splits.train, splits.test))
    return next(pairs), next(pairs)


def trained(folder: Path, seed: int) -> nn.Module:
    """A network from the folder, trained first if it is not there."""
    torch.manual_seed(seed)
    model, path = Images(), folder / f"images-{seed}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    x, y = images()[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    for _ in range(STEPS):
        chosen = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        schedule.step()
    torch.save(model.state_dict(), path)
    return model.eval()
