"""Verification sees every group that does not keep the function, however small it is."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from weightsym import discover, verify
from weightsym import params as P
from weightsym.verify import random_element

KINDS = {"permutations": nn.Tanh, "signs": nn.Tanh, "scalings": nn.ReLU}


def network(kind, units):
    torch.manual_seed(0)
    layers = (nn.Linear(3, units), KINDS[kind](), nn.Linear(units, 2))
    model, x = nn.Sequential(*layers).double(), torch.randn(5, 3).double()
    return model, x, replace(discover(model, x), shifts=(), linear=())


def torn(sym, kind):
    """The symmetries of which one group forgets one of its places."""
    (group,) = getattr(sym, kind)
    others = {other: () for other in KINDS if other != kind}
    for k in range(len(group.placements)):
        left = group.placements[:k] + group.placements[k + 1 :]
        yield replace(sym, **others, **{kind: (replace(group, placements=left),)})


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_group_is_always_seen(kind, units):
    if kind == "permutations" and units == 1:
        pytest.skip("one unit has no other order")
    model, x, sym = network(kind, units)
    assert len(list(torn(sym, kind))) == 3  # the weights and biases that enter, what leaves
    for seed in range(5):
        assert verify(model, sym, x, generator=torch.Generator().manual_seed(seed)) < 1e-12
        for wrong in torn(sym, kind):
            generator = torch.Generator().manual_seed(seed)
            assert verify(model, wrong, x, generator=generator) > 1e-6


@pytest.mark.parametrize(("kind", "units"), [("permutations", 2), ("signs", 1)])
def test_one_random_element_leaves_small_groups_alone(kind, units):
    """Negative control: this is why `verify` takes elements that move every unit."""
    model, x, sym = network(kind, units)
    wrong, before = next(torn(sym, kind)), P.of(model)
    moved = [
        random_element(before, wrong, torch.Generator().manual_seed(seed)) for seed in range(20)
    ]
    same = [torch.allclose(P.apply(model, element, x), model(x)) for element in moved]
    assert 0 < sum(same) < 20


def test_units_that_move_only_together_are_seen_in_most_networks():
    """Two groups of two units that are right together are refused unless all four draws agree."""
    model, x, sym = network("permutations", 2)
    (group,) = sym.permutations
    halves = group.placements[:1], group.placements[1:]
    parts = [replace(group, placements=half) for half in halves]
    wrong = replace(sym, permutations=tuple(parts), signs=(), scalings=())
    generators = (torch.Generator().manual_seed(seed) for seed in range(40))
    refused = [verify(model, wrong, x, generator=generator) > 1e-6 for generator in generators]
    assert sum(refused) >= 30  # a share of 8/9
