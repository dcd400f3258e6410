"""Forwards made to fool the reading of a graph, and random architectures: never a wrong group."""

import random

import pytest
import torch
from cases import Forward, randomise
from torch import nn

from weightsym import discover, verify

KEEPING = {
    "conv": lambda c: nn.Conv2d(c, c, 3, padding=1),
    "grouped": lambda c: nn.Conv2d(c, c, 3, padding=1, groups=2),
    "depthwise": lambda c: nn.Conv2d(c, c, 3, padding=1, groups=c),
    "bn": nn.BatchNorm2d,
    "gn": lambda c: nn.GroupNorm(2, c),
    "in": lambda c: nn.InstanceNorm2d(c, affine=True),
    "relu": lambda c: nn.ReLU(),
    "tanh": lambda c: nn.Tanh(),
    "gelu": lambda c: nn.GELU(),
    "prelu": nn.PReLU,
    "relu6": lambda c: nn.ReLU6(),
    "shuffle": lambda c: nn.ChannelShuffle(2),
    "pool": lambda c: nn.AvgPool2d(3, 1, 1),
}
COMBINING = {
    "residual": (KEEPING["conv"], lambda m, x: x + torch.relu(m(x))),
    "gate": (lambda c: nn.Conv2d(c, c, 1), lambda m, x: x * torch.sigmoid(m(x))),
    "squeeze": (nn.Linear, lambda m, x: x * torch.sigmoid(m(x.mean((2, 3))))[:, :, None, None]),
    "cat": (lambda c: nn.Conv2d(c, 2, 1), lambda m, x: torch.cat([x, m(x)], 1)),
    "half": (
        nn.Identity,
        lambda m, x: torch.cat([torch.relu(x.chunk(2, 1)[0]), x.chunk(2, 1)[1]], 1),
    ),
    "swap": (nn.Identity, lambda m, x: x.roll(1, 1)),
}
KINDS = [*KEEPING, *COMBINING]


def random_net(choices, channels):
    """A convolutional net assembled from a list of choices that keep its shape."""
    layers, width = [nn.Conv2d(2, channels, 3, padding=1)], channels
    for kind in choices:
        build, combine = COMBINING.get(kind) or (KEEPING[kind], lambda m, x: m(x))
        layer = build(width, width) if build is nn.Linear else build(width)
        layers.append(Forward(lambda s, x, f=combine: f(s.layer, x), layer=layer))
        width += 2 * (kind == "cat")
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 3))


@pytest.mark.e2e
@pytest.mark.parametrize("seed", range(40))
def test_random_architectures(seed):
    dice = random.Random(seed)
    choices, batch_norm = dice.choices(KINDS, k=dice.randint(1, 7)), ("carrier", "eval")[seed % 2]
    model = randomise(random_net(choices, dice.choice([4, 6, 8])).double()).eval()
    x = torch.randn(2, 2, 6, 6).double()
    sym = discover(model, x, batch_norm=batch_norm)
    assert verify(model, sym, x) < 1e-8  # of what each group moves, beside which rounding counts
    assert batch_norm == "eval" or not any("numerical check" in f.reason for f in sym.frozen)
