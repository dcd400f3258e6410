"""Matrices pass what is linear in a row of channels, and the result names what loses them."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from torch import nn

from weightsym import (
    UnsupportedModel,
    discover,
)

D = 4


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def linear(d_in, d_out):
    return nn.Linear(d_in, d_out, bias=False)


def network(forward, **parts):
    torch.manual_seed(0)
    pair = {"a": linear(D, 3), "b": linear(3, 5), "c": linear(D, 3)}
    return Forward(forward, **{**pair, **{name: make() for name, make in parts.items()}})


# ------------------------------------------------------------ what is said where they are lost
@torch.library.custom_op("lightning_bnn_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)


# ------------------------------------------------------------ maps over tokens
class Mixer(nn.Module):
    """Channels of a stream, mapped over tokens and over channels in turns."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.first, self.second = (nn.LayerNorm(6) for _ in range(2))
        self.over_tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.over_channels = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))

    def forward(self, x):
        h = self.embed(x)
        h = h + self.over_tokens(self.first(h).mT).mT
        return self.last((h + self.over_channels(self.second(h))).mean(1))


def test_a_map_over_tokens_leaves_channels_to_the_stream():
    sym = discover(Mixer(), torch.randn(2, 4, 3))
    assert sorted(g.units for g in sym.permutations) == [5, 6, 7]
    assert not sym.frozen


def test_a_map_over_tokens_of_the_input_ties_nothing():
    model = Forward(lambda s, x: s.b(torch.relu(s.a(x.mT))), a=nn.Linear(5, 7), b=nn.Linear(7, 2))
    sym = discover(model, torch.randn(20, 5, D))
    assert [g.units for g in sym.permutations] == [7]
    assert not sym.frozen


# ------------------------------------------------------------ noise that is always there
def dropped(h):
    return F.dropout(h, 0.5, training=True)


def graded(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(1.0, 4.0, dtype=x.dtype)


def test_a_wrong_exchange_is_found_out_below_noise_too():
    name = "lightning_bnn_tests::graded"
    torch.library.custom_op(name, graded, mutates_args=()).register_fake(torch.empty_like)
    graded_operation = torch.ops.lightning_bnn_tests.graded
    model = network(lambda s, x: s.b(graded_operation(dropped(torch.relu(s.a(x))))))
    with pytest.raises(UnsupportedModel, match="the groups at a.weight change the outputs"):
        discover(model, torch.randn(6, D), rules={"lightning_bnn_tests.graded": lambda x: 1 * x})
