"""What a softmax forgets: one vector in all rows of the layer before it, one number in its bias."""

import pytest
import torch
from cases import Forward
from test_completeness import kernel_dimension
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import canonicalise, discover, random_shifts, shift, verify

D, EXPERTS, HIDDEN = 4, 3, 2


def tokens(n=30):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def network(forward, bias=True):
    torch.manual_seed(0)
    make = [nn.Sequential(nn.Linear(D, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, D)) for _ in range(3)]
    parts = {"r": nn.Linear(D, EXPERTS, bias), "e": nn.ModuleList(make)}
    return Forward(forward, **parts, z=nn.Parameter(torch.zeros(EXPERTS))).double()


def exact(model):
    for p in model.parameters():
        nn.init.normal_(p)
    sym = discover(model, tokens())
    assert not any("refuted" in f.reason for f in sym.frozen)
    assert max(verify(model, sym, tokens(n)) for n in (30, 2, 11)) < 1e-11
    return sym


def experts(share):
    def forward(s, x):
        g = share(s, x)
        return sum(g[:, k : k + 1] * e(x) for k, e in enumerate(s.e))

    return forward


def softmax(s, x):
    return s.r(x).softmax(-1)


def at_temperature(s, x):
    return (s.r(x) / 0.5).to(x.dtype).softmax(-1)


def with_another_bias(s, x):
    return (s.r(x) + torch.arange(3.0).to(x)).softmax(-1)


def softmax_of_the_best(s, x):
    values, at = s.r(x).topk(2, -1)
    return torch.zeros_like(s.r(x)).scatter(-1, at, values.softmax(-1))


def twice(s, x):
    return s.r(x).softmax(-1) * s.r(x).log_softmax(-1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "share", [softmax, at_temperature, with_another_bias, softmax_of_the_best, twice]
)
def test_what_all_rows_of_a_router_share_is_forgotten(share, bias):
    model = network(experts(share), bias)
    sym = exact(model)
    mine = [(g.name, g.size) for g in sym.shifts if g.is_dead]
    assert sorted(mine) == [*([("r.bias", 1)] if bias else []), ("r.weight", D)]


def test_a_router_that_is_multiplied_by_hand():
    model = network(experts(lambda s, x: (x @ s.w).softmax(-1)))
    model.w = nn.Parameter(torch.randn(D, EXPERTS, dtype=torch.float64))
    assert [(g.name, g.size) for g in exact(model).shifts if g.is_dead] == [("w", D)]


def test_the_list_is_complete():
    model = network(lambda s, x: experts(softmax)(s, x) + 0 * s.z.sum())
    sym = exact(model)
    # of the numbers that are multiplied by zero, but for their scale and turns around their sum
    unread = EXPERTS - 2
    assert sym.dimension + unread == kernel_dimension(model, tokens(60))


def test_probabilities_that_are_returned():
    model = network(softmax)
    sym = exact(model)
    assert sym.shift_dof == D + 1
    moved = shift(P.of(model), sym, random_shifts(sym, torch.Generator().manual_seed(0)))
    assert not torch.allclose(moved["r.weight"], model.r.weight)
    assert torch.allclose(torch.func.functional_call(model, moved, tokens()), model(tokens()))


def test_canonical_forms_have_no_mean_over_experts():
    model = network(experts(softmax))
    sym, params = exact(model), P.of(model)
    form = canonicalise(params, sym, shifts=True)
    assert form["r.weight"].mean(0).abs().max() < 1e-12
    assert form["r.bias"].mean().abs() < 1e-12
    moved = shift(params, sym, random_shifts(sym, torch.Generator().manual_seed(1)))
    again = canonicalise(moved, sym, shifts=True)
    assert all(torch.allclose(form[n], again[n]) for n in form)


# ------------------------------------------------------------ what sees a shift
def sigmoid(s, x):
    return s.r(x).sigmoid()


def scaled_one_by_one(s, x):
    return (s.r(x) * s.z).softmax(-1)


def gated_by_itself(s, x):
    return s.r(x).softmax(-1) * s.r(x)


def best_values(s, x):
    values, at = s.r(x).topk(2, -1)
    return torch.zeros_like(s.r(x)).scatter(-1, at, values.sigmoid())


def masked_by_a_number(s, x):
    return s.r(x).masked_fill(torch.tensor([False, False, True]), -1.0).softmax(-1)


def weight_is_read_again(s, x):
    return s.r(x).softmax(-1) + s.r.weight.square().sum() * s.r.bias.square().sum()


@pytest.mark.parametrize(
    "share",
    [
        sigmoid,
        scaled_one_by_one,
        gated_by_itself,
        best_values,
        masked_by_a_number,
        weight_is_read_again,
    ],
)
def test_a_shift_that_is_seen_is_none(share):
    assert not [g for g in exact(network(experts(share))).shifts if g.name.startswith("r.")]


def test_a_softmax_over_tokens_forgets_the_biases_and_no_more():
    sym = exact(network(experts(lambda s, x: s.r(x).softmax(0))))
    mine = [(g.name, g.size) for g in sym.shifts if g.name.startswith("r.")]
    assert mine == [("r.bias", EXPERTS)]


def test_logits_that_are_returned_too_are_not_shifted():
    sym = exact(network(lambda s, x: (softmax(s, x), s.r(x))))
    assert not sym.shifts
