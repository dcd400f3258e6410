"""A slice of which a short example leaves nothing: what it is for stays where it is."""

import pytest
import torch
from cases import Forward
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import discover
from lightning_bnn.symmetry.verify import random_element

SHORT, LONG = torch.randn(2, 7, 3), torch.randn(2, 16, 3)


def network(forward):
    pool, norm = nn.Conv1d(4, 4, 4, 4), nn.LayerNorm(4)
    return Forward(forward, a=nn.Linear(3, 4), pool=pool, norm=norm, o=nn.Linear(4, 2)).double()


def pooled(s, h, end):
    """Every four tokens as one, without the last of them."""
    return s.pool(h.mT).mT.tanh()[:, :end]


def before_the_last(s, x):
    h = s.a(x)
    return s.o(s.norm(torch.cat([h[:, :1], pooled(s, h, -1)], 1)))


def none_whatever_the_length(s, x):
    h = s.a(x)
    return s.o(s.norm(torch.cat([h[:, :1], pooled(s, h, 0)], 1)))


def rest_of_the_channels(s, x):
    h = s.a(x)
    return s.o(s.norm(torch.cat([h[..., :4], h[..., 4:]], -1)))


def error(model, found, x):
    """Of a random element, on inputs of another length."""
    with torch.no_grad():
        moved = random_element(P.of(model), found, torch.Generator().manual_seed(0), mixing=True)
        return float((torch.func.functional_call(model, moved, (x,)) - model(x)).abs().max())


def test_what_a_longer_example_would_show_is_held():
    model = network(before_the_last)
    found = discover(model, SHORT.double())
    assert error(model, found, LONG.double()) < 1e-12
    assert {"pass a longer one" in f.reason for f in found.frozen} == {True}
    longer = discover(model, LONG.double())
    assert not longer.frozen
    assert error(model, longer, LONG.double()) < 1e-12
    assert len(longer.permutations) > len(found.permutations)


@pytest.mark.parametrize("forward", [none_whatever_the_length, rest_of_the_channels])
def test_other_empty_slices_hold_nothing(forward):
    model = network(forward)
    found = discover(model, SHORT.double())
    assert not found.frozen
    assert found.permutations
    assert error(model, found, LONG.double()) < 1e-12
