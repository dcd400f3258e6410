"""Branches with tensors of their own: exchanged where they compute the same, and only there."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import canonicalise, discover, match, permute, plan_removal, verify
from lightning_bnn.symmetry.actions import permute_some
from lightning_bnn.symmetry.elements import random_permutations
from lightning_bnn.symmetry.verify import random_element

TOKENS, D, COUNT, HIDDEN = 7, 4, 3, 5
EXPERTS = (COUNT, "block")
INSIDE = [(HIDDEN, "channel")] * COUNT


def tokens(n=TOKENS):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def expert(out=D):
    return nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out))


def network(forward, make=expert, **more):
    torch.manual_seed(0)
    parts = {"r": nn.Linear(D, COUNT), "e": nn.ModuleList(make() for _ in range(COUNT)), **more}
    return Forward(forward, **parts).double().eval()


def exact(model):
    for p in model.parameters():
        nn.init.normal_(p)
    sym = discover(model, tokens())
    assert not any("refuted" in f.reason for f in sym.frozen)
    for seed, x in enumerate([tokens(), tokens(2), tokens(11)]):
        assert verify(model, sym, x, generator=torch.Generator().manual_seed(seed)) < 1e-11
    return sym


def units(sym):
    return sorted((g.units, g.kind) for g in sym.permutations)


# ------------------------------------------------------------ how results are put together
def gates(s, x):
    return s.r(x).softmax(-1)


def ensemble(s, x):
    return sum(e(x) for e in s.e)


def mean(s, x):
    return torch.stack([e(x) for e in s.e]).mean(0)


def gated(s, x):
    return sum(gates(s, x)[:, k : k + 1] * e(x) for k, e in enumerate(s.e))


def in_place(s, x):
    total = torch.zeros_like(x)
    for k, e in enumerate(s.e):
        total += gates(s, x)[:, k, None] * e(x)
    return x + total


def split(s, x):
    return sum(g * e(x) for g, e in zip(gates(s, x).split(1, 1), s.e, strict=True))


def stacked(s, x):
    return torch.einsum("be,bed->bd", gates(s, x), torch.stack([e(x) for e in s.e], 1))


def best_two(s, x):
    values, at = gates(s, x).topk(2)
    share = torch.zeros_like(gates(s, x)).scatter(-1, at, values)
    return x + sum(share[:, k : k + 1] * e(x) for k, e in enumerate(s.e))


def one_hot(s, x):
    values, at = gates(s, x).topk(2)
    share = (F.one_hot(at, COUNT) * values[..., None]).sum(1)
    return sum(share[:, k : k + 1] * e(x) for k, e in enumerate(s.e))


def where(s, x):
    values, at = gates(s, x).topk(2)
    shares = [torch.where(at == k, values, 0.0).sum(-1, keepdim=True) for k in range(COUNT)]
    return sum(g * e(x) for g, e in zip(shares, s.e, strict=True))


@pytest.mark.parametrize(
    "forward", [ensemble, mean, gated, in_place, split, stacked, best_two, one_hot, where]
)
def test_branches_are_exchanged_with_their_gates(forward):
    sym = exact(network(forward))
    assert units(sym) == sorted([*INSIDE, EXPERTS])
    assert sym.scaling_dof == COUNT * HIDDEN
    group = sym.permutations[-1]
    assert len(group.tensors) == 4
    moved = {sym.axes[p.axis].tensor for p in group.placements}
    assert moved == (set() if forward in (ensemble, mean) else {"r.weight", "r.bias"})
    assert [sorted(row) for row in group.inner] == [[0, 1, 2]]


def side_by_side(s, x):
    return s.o(torch.cat([e(x) for e in s.e], -1))


def test_branches_side_by_side_move_columns_of_the_next_layer():
    sym = exact(network(side_by_side, o=nn.Linear(COUNT * D, 2)))
    assert units(sym) == sorted([*INSIDE, *[(D, "channel")] * COUNT, EXPERTS])
    (place,) = sym.permutations[-1].placements
    assert (sym.axes[place.axis].tensor, sym.axes[place.axis].dim) == ("o.weight", 1)
    assert place.positions.tolist() == torch.arange(COUNT * D).reshape(COUNT, D).tolist()


@pytest.mark.parametrize("by_row", [False, True])
def test_experts_with_one_result(by_row):
    def forward(s, x):
        if by_row:
            return (gates(s, x) * torch.cat([e(x) for e in s.e], -1)).sum(-1)
        return gated(s, x)

    assert units(exact(network(forward, lambda: expert(1)))) == sorted([*INSIDE, EXPERTS])


# ------------------------------------------------------------ what is inside
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x):
        return self.a(x[:, None], x[:, None], x[:, None])[0][:, 0]


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.b = nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, x):
        return self.b(F.relu(self.n(self.a(x[:, None]))))[:, 0]


def normed():
    return nn.Sequential(
        nn.Linear(D, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(HIDDEN, D),
    )


@pytest.mark.parametrize(
    ("make", "inside"),
    [
        (normed, INSIDE),
        (lambda: nn.Linear(D, D), []),
        (Attention, [*[(2, "channel")] * 4 * COUNT, *[(2, "block")] * COUNT]),
        (Grouped, [*[(2, "channel")] * 2 * COUNT, *[(2, "block")] * COUNT]),
    ],
    ids=["batch norm", "linear", "heads", "groups"],
)
def test_what_is_inside_branches_moves_with_them(make, inside):
    sym = exact(network(gated, make))
    assert units(sym) == sorted([*inside, EXPERTS])


@pytest.mark.parametrize("outer", [gated, stacked])
@pytest.mark.parametrize("inner", [gated, stacked])
def test_branches_inside_branches(outer, inner):
    sym = exact(network(outer, lambda: network(inner)))
    assert [u for u in units(sym) if u[0] != D] == sorted([*INSIDE * COUNT, *[EXPERTS] * 4])
    assert sum(len(g.tensors) for g in sym.permutations) == 3 * 4 + 3 * 4 + 2


def test_experts_with_one_hidden_bias_for_all_are_exchanged():
    def forward(s, x):
        g = gates(s, x)
        return sum(g[:, k : k + 1] * b(torch.relu(a(x) + s.c)) for k, (a, b) in enumerate(s.e))

    def make():
        return nn.ModuleList([nn.Linear(D, HIDDEN, bias=False), nn.Linear(HIDDEN, D)])

    sym = exact(network(forward, make, c=nn.Parameter(torch.zeros(HIDDEN))))
    assert units(sym) == sorted([(HIDDEN, "channel"), EXPERTS])


def test_two_layers_of_experts_with_one_router_are_exchanged_together():
    def forward(s, x):
        g = gates(s, x)
        h = torch.relu(sum(g[:, k : k + 1] * e(x) for k, e in enumerate(s.e)))
        return sum(g[:, k : k + 1] * e(h) for k, e in enumerate(s.f))

    more = nn.ModuleList(nn.Linear(D, D) for _ in range(COUNT))
    sym = exact(network(forward, f=more))
    assert units(sym) == sorted([*INSIDE, (D, "channel"), EXPERTS])
    assert len(sym.permutations[-1].tensors) == 6


# ------------------------------------------------------------ what forbids it
def by_constants(s, x):
    return sum((1.0 + k) * e(x) for k, e in enumerate(s.e))


def by_inputs(s, x):
    return sum(x[:, k : k + 1] * e(x) for k, e in enumerate(s.e))


def one_is_read_again(s, x):
    return gated(s, x), s.e[0](x)[:, :1] * gates(s, x)[:, :1]


def inside_is_read_again(s, x):
    return gated(s, x), s.e[0][0](x)


def gates_are_returned(s, x):
    return gated(s, x), gates(s, x)


def results_are_returned(s, x):
    return torch.stack([e(x) for e in s.e], 1)


def one_after_the_other(s, x):
    for e in s.e:
        x = x + e(x)
    return x


def weighted_in_a_row(s, x):
    inside = torch.stack([x + e(x) for e in s.e], 1)
    return (inside * torch.arange(1.0, COUNT + 1).to(x)[:, None]).sum(1)


def different_activations(s, x):
    functions = (torch.relu, torch.tanh, F.gelu)
    return sum(e[2](f(e[0](x))) for e, f in zip(s.e, functions, strict=True))


def one_reads_weights_of_the_other(s, x):
    return gated(s, x) + F.linear(x, s.e[0][0].weight)[:, :D]


def weights_are_added(s, x):
    return s.r(x) + s.first[:, None].T + s.second[:, None].T


def one_scale_for_each(s, x):
    return sum(c * e(x) for c, e in zip(s.scales, s.e, strict=True))


@pytest.mark.parametrize(
    "forward",
    [
        by_constants,
        by_inputs,
        one_is_read_again,
        inside_is_read_again,
        gates_are_returned,
        results_are_returned,
        one_after_the_other,
        weighted_in_a_row,
        different_activations,
        one_scale_for_each,
        weights_are_added,
        one_reads_weights_of_the_other,
    ],
)
def test_branches_that_are_told_apart_stay(forward):
    more = {name: nn.Parameter(torch.zeros(COUNT)) for name in ("first", "second")}
    scales = nn.Buffer(torch.tensor([[1.0], [2.0], [3.0]]))
    sym = exact(network(forward, scales=scales, **more))
    assert not any(g.tensors for g in sym.permutations)


def test_a_weight_that_two_branches_share_stays_where_it_is():
    model = network(gated)
    model.e[1][0].weight = model.e[0][0].weight
    (group,) = (g for g in exact(model).permutations if g.tensors)
    assert group.tensors == tuple(
        (f"e.0.{n}", f"e.1.{n}") for n in ("2.bias", "2.weight", "0.bias")
    )


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.a, self.b = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * self.mask[0])


@pytest.mark.parametrize("equal", [True, False])
def test_branches_with_constants_are_exchanged_if_these_are_equal(equal):
    masks = [torch.arange(HIDDEN)[None] + 1.0 + (0 if equal else k) for k in range(COUNT)]
    sym = exact(network(gated, lambda: Masked(masks.pop())))
    assert any(g.tensors for g in sym.permutations) == equal


def test_two_branches_of_three_are_exchanged():
    model = network(gated)
    model.e[2] = nn.Linear(D, D).double()
    (group,) = (g for g in exact(model).permutations if g.tensors)
    assert group.units == 2
    assert group.tensors[0] == ("e.0.2.bias", "e.1.2.bias")


# ------------------------------------------------------------ acting
def test_members_of_a_stack_are_permuted_each_in_its_own_way():
    model = network(gated)
    sym, stack = exact(model), P.populate(model, 4)
    orders = random_permutations(sym, torch.Generator().manual_seed(0), 4)
    together = permute(stack, sym, orders)
    for k, alone in enumerate(P.unstack(stack)):
        moved = permute(alone, sym, [order[k] for order in orders])
        assert all(torch.equal(together[name][k], moved[name]) for name in moved)


def test_all_orders_of_the_experts_are_the_same_function():
    model, x = network(gated), tokens()
    sym, params = exact(model), P.of(model)
    orders = [torch.arange(g.units) for g in sym.permutations]
    for order in itertools.permutations(range(COUNT)):
        moved = permute(params, sym, [*orders[:-1], torch.tensor(order)])
        assert torch.allclose(torch.func.functional_call(model, moved, x), model(x))
        assert torch.equal(moved["e.0.0.weight"], params[f"e.{order[0]}.0.weight"])


@pytest.mark.parametrize(
    ("by", "scaling"),
    [("max", "unit-norm"), ("norm", "min-mass"), ("first", "min-mass"), ("outgoing", "unit-norm")],
)
@pytest.mark.parametrize("forward", [ensemble, gated])
def test_canonical_forms_forget_which_expert_is_first(forward, scaling, by):
    more = {"o": nn.Linear(D, 2)} if forward is gated else {}
    model = network(lambda s, x: s.o(forward(s, x)) if more else forward(s, x), **more)
    sym, params = exact(model), P.of(model)
    assert any(g.tensors for g in sym.permutations)
    form = canonicalise(params, sym, scaling, by)
    moved = random_element(params, sym, torch.Generator().manual_seed(1))
    again = canonicalise(moved, sym, scaling, by)
    assert all(torch.allclose(form[n], again[n], rtol=1e-8, atol=1e-10) for n in form)


def test_what_takes_tensors_one_by_one_leaves_the_experts_in_place():
    model = network(gated)
    sym, stack = exact(model), P.populate(model, 3)
    removal = plan_removal(stack, sym)
    assert torch.equal(removal.permutations[-1], torch.arange(COUNT).expand(3, -1))
    params = P.of(model)
    assert match(params, params, sym, restarts=1)[-1].tolist() == [0, 1, 2]


def test_a_part_of_what_changes_places_is_refused():
    model = network(gated)
    sym, params = exact(model), P.of(model)
    orders = random_permutations(sym, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="must hold 'e.1.0.weight'"):
        permute_some({"e.0.0.weight": params["e.0.0.weight"]}, sym, orders)
