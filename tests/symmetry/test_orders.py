"""Orders of units: their change between networks, against scipy and brute force."""

import itertools
import random

import pytest
import torch
from checked_symmetries import find
from known_networks.classics import SMALL
from scipy.stats import kendalltau

from weightsym import (
    UnitOrders,
    kendall_tau,
    order_change,
    permute,
    random_permutations,
    ranks,
    sort_permutations,
    transpositions,
    transpositions_between,
)
from weightsym import params as P
from weightsym.forms.counting import inversions


def fewest_swaps(permutation):
    """Brute force: breadth-first over swaps."""
    goal, seen = tuple(range(len(permutation))), {tuple(permutation)}
    level, steps = [tuple(permutation)], 0
    while goal not in seen:
        steps += 1
        new = set()
        for p in level:
            for i, j in itertools.combinations(range(len(p)), 2):
                q = list(p)
                q[i], q[j] = q[j], q[i]
                new.add(tuple(q))
        level = list(new - seen)
        seen |= new
    return steps


def test_transpositions_of_all_permutations_of_five():
    every = torch.tensor(list(itertools.permutations(range(5))))
    found = transpositions(every)
    assert found.tolist() == [fewest_swaps(p) for p in every.tolist()]


def test_transpositions_of_long_cycles_and_shapes():
    assert transpositions(torch.arange(1000).roll(1)) == 999
    assert transpositions(torch.arange(1000).reshape(-1, 2).flip(1).flatten()) == 500
    assert transpositions(torch.arange(7).expand(2, 3, 7)).tolist() == [[0] * 3] * 2
    assert transpositions(torch.tensor([0])) == 0


@pytest.mark.parametrize("seed", range(20))
def test_kendall_tau_is_scipys_with_and_without_ties(seed):
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, values = dice.randint(2, 70), dice.randint(1, 12)
    a = torch.randint(values, (3, n), generator=generator).double()
    b = torch.rand(3, n, generator=generator).argsort(-1)
    expected = [kendalltau(x, y).statistic for x, y in zip(a.numpy(), b.numpy(), strict=True)]
    torch.testing.assert_close(
        kendall_tau(a, b), torch.tensor(expected, dtype=torch.float64), equal_nan=True
    )


@pytest.mark.parametrize("n", [2, 3, 8, 33, 100, 513])
def test_inversions(n):
    p = torch.stack([torch.randperm(n) for _ in range(4)])
    x = p.tolist()
    expected = [sum(r[i] > r[j] for i in range(n) for j in range(i + 1, n)) for r in x]
    assert inversions(p).tolist() == expected
    assert inversions(p[0]).item() == expected[0]


@pytest.mark.parametrize("by", ["max", "mean", "median", "norm", "first", "outgoing"])
def test_orders_equal_sorting(by):
    model, _, sym, _ = find("mlp")
    stack = P.populate(model, 3)
    orders = UnitOrders(sym, by)
    found = orders(stack)
    expected = sort_permutations(stack, sym, by)
    for g, size in enumerate(orders.sizes.tolist()):
        assert torch.equal(found[:, g, :size], expected[g])
        tail = torch.arange(size, found.shape[-1])
        assert torch.equal(found[:, g, size:], tail.expand(3, -1))
        one = orders({k: v[1] for k, v in stack.items()})
        assert torch.equal(one[g], found[1, g])


@pytest.mark.parametrize("name", SMALL)
def test_change_equals_the_functions_for_one_group(name):
    _, _, sym, params = find(name)
    orders = UnitOrders(sym)
    near = {
        k: v + 0.05 * torch.randn_like(v) if P.is_weight(k, v) else v for k, v in params.items()
    }
    before, after = orders(params), orders(near)
    change = order_change(before, after, orders.sizes)
    swaps = transpositions_between(before, after)
    for g, n in enumerate(orders.sizes.tolist()):
        a, b = ranks(before[g, :n]), ranks(after[g, :n])
        assert change.tau[g].item() == pytest.approx(kendalltau(a, b).statistic, abs=1e-12)
        assert change.tau[g].item() == pytest.approx(kendall_tau(a, b).item(), abs=1e-12)
        assert change.moved[g].item() == pytest.approx((a != b).double().mean().item())
        assert swaps[g] == transpositions(b[before[g, :n]])


def test_labels_do_not_matter():
    """Renaming the units before and after changes nothing, but another order does."""
    _, _, sym, first = find("mlp")
    orders, second = UnitOrders(sym), {k: v + 0.1 * torch.randn_like(v) for k, v in first.items()}
    p = random_permutations(sym)
    names = [orders(permute(w, sym, p)) for w in (first, second)]
    plain = [orders(w) for w in (first, second)]
    expected = order_change(*plain, orders.sizes)
    found = order_change(*names, orders.sizes)
    torch.testing.assert_close(found, expected)
    assert bool((expected.tau < 1).all())
    nothing = order_change(plain[0], plain[0], orders.sizes)
    assert bool((nothing.tau == 1).all())
    assert bool((nothing.moved == 0).all())


def test_taus_of_stacks_lie_between_one_and_minus_one():
    order = torch.stack([torch.randperm(9) for _ in range(4)])
    assert kendall_tau(order, torch.arange(9)).shape == (4,)
    assert (kendall_tau(order, order) == 1).all()
    assert (kendall_tau(order, 8 - order) == -1).all()
