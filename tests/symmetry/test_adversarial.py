"""Forwards made to fool the reading of a graph, and random architectures: never a wrong group."""

import pytest
import torch
import torch.nn.functional as F
from cases import randomise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from weightsym import discover, verify


# ------------------------------------------------------------ random architectures
class RandomNet(nn.Module):
    """A convolutional net assembled from a list of choices that keep its shape."""

    def __init__(self, choices, channels):
        super().__init__()
        self.steps = nn.ModuleList()
        self.kinds = choices
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        width = channels
        for kind in choices:
            layer, width = self.layer(kind, width)
            self.steps.append(layer)
        self.head = nn.Linear(width * 4, 3)

    def layer(self, kind, c):
        plain = {
            "conv": lambda: nn.Conv2d(c, c, 3, padding=1),
            "grouped": lambda: nn.Conv2d(c, c, 3, padding=1, groups=2),
            "depthwise": lambda: nn.Conv2d(c, c, 3, padding=1, groups=c),
            "bn": lambda: nn.BatchNorm2d(c),
            "gn": lambda: nn.GroupNorm(2, c),
            "in": lambda: nn.InstanceNorm2d(c, affine=True),
            "relu": nn.ReLU,
            "tanh": nn.Tanh,
            "gelu": nn.GELU,
            "prelu": lambda: nn.PReLU(c),
            "relu6": nn.ReLU6,
            "residual": lambda: nn.Conv2d(c, c, 3, padding=1),
            "gate": lambda: nn.Conv2d(c, c, 1),
            "squeeze": lambda: nn.Linear(c, c),
            "half": nn.Identity,
            "swap": nn.Identity,
            "shuffle": lambda: nn.ChannelShuffle(2),
            "pool": lambda: nn.AvgPool2d(3, 1, 1),
        }
        if kind == "cat":
            return nn.Conv2d(c, 2, 1), c + 2
        return plain[kind](), c

    def forward(self, x):
        x = self.stem(x)
        for kind, layer in zip(self.kinds, self.steps, strict=True):
            if kind == "residual":
                x = x + torch.relu(layer(x))
            elif kind == "gate":
                x = x * torch.sigmoid(layer(x))
            elif kind == "squeeze":
                x = x * torch.sigmoid(layer(x.mean((2, 3))))[:, :, None, None]
            elif kind == "cat":
                x = torch.cat([x, layer(x)], 1)
            elif kind == "half":
                x = torch.cat([torch.relu(x[:, : x.shape[1] // 2]), x[:, x.shape[1] // 2 :]], 1)
            elif kind == "swap":
                x = x.roll(1, 1)
            else:
                x = layer(x)
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


KINDS = (
    "conv grouped depthwise bn gn in relu tanh gelu prelu relu6 residual gate "
    "squeeze cat half swap shuffle pool"
).split()


@pytest.mark.e2e
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    st.sampled_from([4, 6, 8]),
    st.sampled_from(["carrier", "eval"]),
)
def test_random_architectures(choices, channels, batch_norm):
    torch.manual_seed(0)
    model = randomise(RandomNet(choices, channels).double()).eval()
    x = torch.randn(2, 2, 6, 6).double()
    sym = discover(model, x, batch_norm=batch_norm)
    assert verify(model, sym, x) < 1e-11
    assert batch_norm == "eval" or not any("numerical check" in f.reason for f in sym.frozen)
