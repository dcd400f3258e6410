"""Orders of all groups at once, against scipy and the functions for one group."""

import pytest
import torch
from cases import CASES
from scipy.stats import kendalltau

from weightsym import (
    UnitOrders,
    discover,
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
from weightsym.counting import inversions

SMALL = CASES[:10]


@pytest.mark.parametrize("n", [2, 3, 7, 8, 33, 64, 100, 513])
def test_inversions(n):
    p = torch.stack([torch.randperm(n) for _ in range(4)])
    x = p.tolist()
    expected = [sum(r[i] > r[j] for i in range(n) for j in range(i + 1, n)) for r in x]
    assert inversions(p).tolist() == expected
    assert inversions(p[0]).item() == expected[0]


@pytest.mark.parametrize("by", ["max", "mean", "median", "norm", "first", "outgoing"])
def test_orders_equal_sorting(by):
    model, x = SMALL[0].make()
    sym = discover(model, x)
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


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_change_equals_the_functions_for_one_group(case):
    model, x, sym = case.known()
    orders = UnitOrders(sym)
    if not orders.groups:
        with pytest.raises(ValueError, match="no permutation symmetry"):
            orders(P.of(model))
        return
    before = orders(P.of(model))
    moved = {
        k: v + 0.05 * torch.randn_like(v) if P.is_weight(k, v) else v
        for k, v in P.of(model).items()
    }
    after = orders(moved)
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
    model, x = SMALL[0].make()
    sym = discover(model, x)
    orders = UnitOrders(sym)
    first, second = P.of(model), P.stack([P.of(model)])
    second = {k: v[0] + 0.1 * torch.randn_like(v[0]) for k, v in second.items()}
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


@pytest.mark.bad_input
def test_unknown_statistic():
    model, x = SMALL[0].make()
    with pytest.raises(ValueError, match="`by` must be one of max, first"):
        UnitOrders(discover(model, x), "largest")
