"""How many networks run at once in training: one where batch norms give out much."""

import pytest
import torch
from torch import nn

from weightsym import params as P


def network(norm=nn.BatchNorm2d, channels=8):
    return nn.Sequential(nn.Conv2d(1, channels, 3), norm(channels), nn.ReLU(), nn.Flatten())


def chunk(model, examples, pixels=28, members=5):
    x = torch.randn(examples, 1, pixels, pixels)
    return P.chunk_of(model, P.populate(model, members), (x,))


@pytest.mark.parametrize(
    ("model", "examples", "expected"),
    [
        (network(), 64, 1),
        (network(), 16, 5),
        (network(channels=2), 64, 5),
        (network(nn.Identity), 64, 5),
        (network().eval(), 64, 5),
    ],
    ids=["large", "few examples", "few channels", "no norm", "evaluation"],
)
def test_norms_that_give_out_much_run_one_by_one(model, examples, expected):
    with torch.enable_grad():
        assert chunk(model, examples) == expected


def test_the_mode_is_not_remembered_with_the_sizes():
    model = network()
    assert [chunk(model.train(mode), 64) for mode in (True, False, True)] == [1, 5, 1]
