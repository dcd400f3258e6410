"""Networks whose weights are views of one vector: rows and columns are elements of it."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from checked_symmetries import exact, units
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import canonicalise, discover, match, min_mass, permute
from lightning_bnn.symmetry.verify import random_element


def views(p, *shapes):
    parts = p.split([torch.Size(s).numel() for s in shapes])
    return [t.view(s) for t, s in zip(parts, shapes, strict=True)]


def without_bias(s, x):
    w, v = views(s.p, (5, 4), (5, 3))
    return F.relu(x @ w.T) @ v


def two_layers(s, x):
    for w, b in zip(*[iter(views(s.p, (5, 4), (5,), (4, 5), (4,), (2, 4), (2,)))] * 2, strict=True):
        x = F.linear(x, w, b) if len(b) == 2 else F.relu(F.linear(x, w, b))
    return x


def recurrent(s, x):
    w, u, v = views(s.p, (5, 4), (5, 5), (3, 5))
    h = x.new_zeros(len(x), 5)
    for t in range(x.shape[1]):
        h = torch.tanh(F.linear(x[:, t], w) + F.linear(h, u))
    return F.linear(h, v)


# forward, numbers in the vector, shape of the inputs, units of the groups, scales, signs
FLAT = {
    "without bias": (without_bias, 35, (6, 4), [5], 5, 0),
    "two layers": (two_layers, 59, (6, 4), [5, 4], 9, 0),
    "recurrent": (recurrent, 60, (6, 3, 4), [5], 0, 5),
}


@pytest.mark.parametrize("name", FLAT)
def test_units_of_a_vector_move_in_all_places(name):
    forward, numbers, shape, sizes, scales, signs = FLAT[name]
    torch.manual_seed(0)
    model = Forward(forward, p=nn.Parameter(torch.randn(numbers))).double()
    sym = exact(model, torch.randn(*shape).double(), tolerance=1e-12)
    assert units(sym) == [(n, "channel") for n in sizes]
    assert (sym.scaling_dof, sym.sign_dof, sym.frozen) == (scales, signs, ())
    params = P.of(model)
    moved = random_element(params, sym, torch.Generator().manual_seed(1))
    for choice in ({}, {"permutation": "first"}, {"permutation": "outgoing"}):
        one, two = (canonicalise(p, sym, **choice) for p in (params, moved))
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    least = [min_mass(p, sym).minimum for p in (params, moved)]
    torch.testing.assert_close(*least, rtol=1e-8, atol=0)
    order = [torch.randperm(n) for n in sizes]
    other = permute(params, sym, order)
    torch.testing.assert_close(permute(other, sym, match(other, params, sym)), params)


def test_elements_that_two_weights_share_are_held_fixed():
    """Views that overlap: rows of one weight are columns of the other."""

    def overlapping(s, x):
        return F.relu(x @ s.p[:20].view(5, 4).T) @ s.p[10:25].view(5, 3)

    model = Forward(overlapping, p=nn.Parameter(torch.randn(25))).double()
    sym = discover(model, torch.randn(6, 4).double())
    assert not sym.permutations
    assert not sym.scalings
    assert sym.frozen
