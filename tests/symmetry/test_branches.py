"""Acting on branches with tensors of their own, which change places as wholes."""

import itertools

import pytest
import torch
from known_networks import NETWORKS

from weightsym import match, permute, plan_removal, random_permutations
from weightsym import params as P
from weightsym.actions import permute_some


def known():
    model, (x,), sym = NETWORKS["branches, summed"].known()
    return model, x, sym, P.of(model)


def test_members_of_a_stack_are_permuted_each_in_its_own_way():
    model, _, sym, _ = known()
    stack = P.populate(model, 4)
    orders = random_permutations(sym, torch.Generator().manual_seed(0), 4)
    together = permute(stack, sym, orders)
    for k, alone in enumerate(P.unstack(stack)):
        moved = permute(alone, sym, [order[k] for order in orders])
        assert all(torch.equal(together[name][k], moved[name]) for name in moved)


def test_all_orders_of_the_experts_are_the_same_function():
    model, x, sym, params = known()
    orders = [torch.arange(g.units) for g in sym.permutations]
    for order in itertools.permutations(range(3)):
        moved = permute(params, sym, [*orders[:-1], torch.tensor(order)])
        torch.testing.assert_close(P.apply(model, moved, x), model(x))
        assert torch.equal(moved["e.0.0.weight"], params[f"e.{order[0]}.0.weight"])


def test_tensors_that_are_taken_one_by_one_stay_in_place():
    model, _, sym, params = known()
    removal = plan_removal(P.populate(model, 3), sym)
    assert torch.equal(removal.permutations[-1], torch.arange(3).expand(3, -1))
    assert match(params, params, sym)[-1].tolist() == [0, 1, 2]


def test_a_part_of_what_changes_places_is_refused():
    _, _, sym, params = known()
    orders = random_permutations(sym, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"must hold 'e.1.0.weight'"):
        permute_some({"e.0.0.weight": params["e.0.0.weight"]}, sym, orders)
