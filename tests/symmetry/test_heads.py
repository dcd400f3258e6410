"""Blocks inside blocks, as heads that share keys: their canonical forms, and how they match."""

import pytest
import torch
from cases import randomise
from modern_networks import Attention
from torch import nn

from weightsym import (
    canonicalise,
    discover,
    match,
    permute,
    random_permutations,
)
from weightsym import params as P
from weightsym.verify import random_element

X = torch.randn(2, 5, 10, generator=torch.Generator().manual_seed(0)).double()


class Nested(nn.Module):
    """Channels in convolution groups, four of which are a normalisation group."""

    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 2, 1)
        self.g, self.norm = nn.Conv1d(16, 16, 1, groups=8), nn.GroupNorm(2, 16)

    def forward(self, x):
        return self.o(torch.tanh(self.norm(self.g(torch.tanh(self.a(x))))))


NESTED = {
    "grouped": (lambda: Attention(10, heads=4, width=3, kv_heads=2), X),
    "rotary": (lambda: Attention(10, heads=6, width=4, kv_heads=2, rotary="half"), X),
    "one key": (lambda: Attention(10, heads=4, width=3, kv_heads=1), X),
    "three levels": (Nested, torch.randn(2, 3, 7).double()),
}


@pytest.fixture(scope="module", params=NESTED)
def nested(request):
    build, x = NESTED[request.param]
    torch.manual_seed(3)
    model = randomise(build().double())
    return model, discover(model, x), x


def test_blocks_inside_blocks_are_listed_from_inside(nested):
    _, sym, _ = nested
    for index, group in enumerate(sym.permutations):
        for row in group.inner:
            assert len(row) == group.units
            assert max(row) < index
            assert len({sym.permutations[g].units for g in row}) == 1


@pytest.mark.parametrize("by", ["max", "first", "mean", "outgoing"])
def test_canonical_forms_of_blocks_inside_blocks(nested, by):
    model, sym, x = nested
    weights = P.of(model)
    form = canonicalise(weights, sym, permutation=by)
    torch.testing.assert_close(P.apply(model, form, x), P.apply(model, weights, x))
    for seed in range(3):
        other = random_element(weights, sym, torch.Generator().manual_seed(seed))
        again = canonicalise(other, sym, permutation=by)
        for name, w in form.items():
            torch.testing.assert_close(again[name], w, rtol=1e-8, atol=1e-8)


def test_planted_permutations_of_blocks_inside_blocks_are_found(nested):
    model, sym, _ = nested
    weights = P.of(model)
    planted = permute(weights, sym, random_permutations(sym, torch.Generator().manual_seed(4)))
    back = permute(planted, sym, match(planted, weights, sym))
    for name, w in weights.items():
        torch.testing.assert_close(back[name], w)
