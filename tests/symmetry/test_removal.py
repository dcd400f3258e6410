"""Two passes, by block and then by tensor, end where `canonicalise` ends."""

import pytest
import torch
from cases import CASES
from known_networks import NETWORKS

from lightning_bnn import metrics, models
from weightsym import (
    canonicalise,
    discover,
    permute,
    plan_removal,
    random_permutations,
    random_scales,
    rescale,
)
from weightsym import params as P

SMALL = CASES[:10]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("scaling", [None, "unit-norm", "min-mass"])
def test_equals_canonicalise(case, scaling):
    model, x, sym = case.known()
    stack = P.stack([P.of(model)] * 3)
    stack = {k: v + 0.1 * torch.randn_like(v) if P.is_weight(k, v) else v for k, v in stack.items()}
    stack = permute(stack, sym, random_permutations(sym, members=3))
    blocks = [{k: v[:2] for k, v in stack.items()}, {k: v[2:] for k, v in stack.items()}]
    removal = plan_removal(iter(blocks), sym, scaling)
    for name, tensor in canonicalise(stack, sym, scaling).items():
        for rows in (slice(0, 1), slice(1, 3)):
            found = removal(name, stack[name][rows], rows)
            tolerance = 1e-6 if scaling == "min-mass" else 1e-12  # iterates on whole blocks
            torch.testing.assert_close(found, tensor[rows], rtol=tolerance, atol=tolerance)


def test_mmd_without_symmetries():
    """Copies of the same networks, moved along their orbits, are far from them until removal."""
    net = models.mlp(4, [6, 5], 3).double()
    sym = discover(net, torch.randn(2, 4).double())
    x, y = P.populate(net, 40), P.populate(net, 12)
    moved = permute(y, sym, random_permutations(sym, members=12))
    moved = rescale(moved, sym, random_scales(sym, members=12, spread=1.5))
    free = [metrics.Transformed(s, plan_removal(s, sym), memory=512) for s in (x, y, moved)]
    assert metrics.mmd(x, moved) > 2 * metrics.mmd(x, y).abs()
    expected = metrics.mmd(canonicalise(x, sym), canonicalise(y, sym))
    for source in free[1:]:
        torch.testing.assert_close(metrics.mmd(free[0], source), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "form",
    [
        {"scaling": "unit-std", "target": 3.0},
        {"permutation": None},
        {"permutation": "mean", "descending": False},
    ],
)
def test_takes_the_options_of_canonicalise(form):
    net = models.mlp(4, [6, 5], 3).double()
    sym = discover(net, torch.randn(2, 4).double())
    stack = P.populate(net, 4)
    removal = plan_removal(stack, sym, **form)
    for name, tensor in canonicalise(stack, sym, **form).items():
        torch.testing.assert_close(removal(name, stack[name]), tensor)


def test_tensors_that_are_taken_one_by_one_stay_in_place():
    model, _, sym = NETWORKS["branches, summed"].known()
    removal = plan_removal(P.populate(model, 3), sym)
    assert torch.equal(removal.permutations[-1], torch.arange(3).expand(3, -1))


@pytest.mark.bad_input
def test_orbits_with_several_forms_are_refused():
    model, _, sym = NETWORKS["a vector of a recurrence"].known()
    with pytest.raises(ValueError, match="give networks of one orbit different forms of 'p'"):
        plan_removal(P.stack([P.of(model)]), sym)


@pytest.mark.bad_input
def test_errors():
    net = models.mlp(2, [3], 1)
    sym = discover(net, torch.randn(1, 2))
    with pytest.raises(ValueError, match="`networks` must be a stack"):
        plan_removal(P.of(net), sym)
    with pytest.raises(ValueError, match="at least one stack"):
        plan_removal([], sym)
    removal = plan_removal(P.populate(net, 2), sym)
    with pytest.raises(ValueError, match="has no tensor 'net.1.weight'; it has 1.weight"):
        removal("net.1.weight", torch.zeros(2, 3, 2))
    with pytest.raises(ValueError, match="`values` holds 1 networks, `rows` are 2"):
        removal("1.weight", torch.zeros(1, 3, 2))
