"""Mistakes of a caller end in a sentence, never in a silent or wrong result."""

import pytest
import torch
from torch import nn

from lightning_bnn import models
from weightsym import (
    UnsupportedModel,
    canonicalise,
    discover,
    flip,
    identity,
    mass,
    min_mass,
    permute,
    random_permutations,
    random_scales,
    random_signs,
    rescale,
    transform_optimizer_state,
    verify,
)
from weightsym import params as P

pytestmark = pytest.mark.bad_input


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = models.mlp(4, [6], 3, nn.Tanh)

    def forward(self, x):
        return self.net(x)


@pytest.fixture
def setup():
    whole, x = Whole(), torch.randn(2, 4)
    return whole, x, discover(whole.net, x), P.of(whole.net)


def test_symmetries_of_another_module(setup):
    whole, x, sym, params = setup
    other = r"`params` lacks '1.weight' \(it holds 'net.1.weight'\): were the symmetries found on"
    for call in (mass, min_mass, canonicalise, lambda p, s: permute(p, s, [torch.arange(6)])):
        with pytest.raises(ValueError, match=other):
            call(P.of(whole), sym)
        with pytest.raises(ValueError, match="it is empty"):
            call({}, sym)
        with pytest.raises(ValueError, match="lacks '3.bias'"):
            call({n: t for n, t in params.items() if n != "3.bias"}, sym)
    with pytest.raises(ValueError, match="`model` lacks '1.weight'"):
        verify(whole, sym, x)
    with pytest.raises(ValueError, match="must be a dict of tensors .* got Whole"):
        mass(whole, sym)


@pytest.mark.parametrize("draw", [identity, random_permutations, random_scales, random_signs])
def test_elements_of_what_is_not_known(draw):
    with pytest.raises(ValueError, match="`sym` must be what `discover` returned, got NoneType"):
        draw(None)


def test_elements_that_are_none(setup):
    _, _, sym, params = setup
    for wrong in (torch.zeros(6).long(), torch.arange(6) - 1, torch.arange(6).float()):
        with pytest.raises(ValueError, match=r"`permutations\[0\]` must hold every index"):
            permute(params, sym, [wrong])
    for wrong in (torch.tensor([True] * 6), torch.zeros(6), 2 * torch.ones(6)):
        with pytest.raises(ValueError, match=r"`signs\[0\]` must hold \+1 and -1"):
            flip(params, sym, [wrong])
    relu = models.mlp(4, [6], 3)
    scaled = discover(relu, torch.randn(1, 4))
    for wrong in (-torch.ones(6), torch.zeros(6), torch.full((6,), torch.nan)):
        with pytest.raises(ValueError, match=r"`scales\[0\]` must be positive and finite"):
            rescale(P.of(relu), scaled, [wrong])
    with pytest.raises(ValueError, match=r"must have shape \(6,\) .*, got shape \(2, 6\)"):
        permute(params, sym, [torch.arange(6).expand(2, 6)])
    assert torch.equal(permute(params, sym, [list(range(6))])["1.bias"], params["1.bias"])


def test_optimizers_of_another_module(setup):
    whole, x, sym, _ = setup
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    whole(x).square().mean().backward()
    optimizer.step()
    p = [torch.tensor([1, 2, 3, 4, 5, 0])]
    with pytest.raises(ValueError, match=r"`names` lacks '1.weight' \(it holds 'net.1.weight'\)"):
        transform_optimizer_state(optimizer, dict(whole.named_parameters()), sym, permutations=p)
    with pytest.raises(ValueError, match="is not a parameter of the optimizer"):
        transform_optimizer_state(optimizer, P.of(whole.net), sym, permutations=p)


def test_options_of_min_mass(setup):
    _, _, sym, params = setup
    with pytest.raises(ValueError, match="`max_iterations` at least 1, got 1e-10 and 0"):
        min_mass(params, sym, max_iterations=0)


def test_examples_that_do_not_fit():
    net = models.mlp(4, [6], 3)
    with pytest.raises(ValueError, match=r"does not accept a tuple \(unpack it with \*\)"):
        discover(net, (torch.randn(1, 4),))
    with pytest.raises(ValueError, match=r"does not accept a call without inputs"):
        discover(net)
    with pytest.raises(ValueError, match=r"an input of shape \(1, 4\) \(int64\)"):
        discover(net, torch.ones(1, 4).long())
    with pytest.raises(UnsupportedModel, match="DataParallel only wraps a network"):
        discover(nn.DataParallel(net), torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"Module has no forward; pass the submodule"):
        discover(nn.Module(), torch.ones(1, 4))


def test_examples_are_taken_to_the_type_of_the_network():
    net = models.mlp(4, [6], 3).double()
    assert verify(net, discover(net, torch.randn(1, 4)), torch.randn(1, 4)) < 1e-12
