"""Mixtures of experts: units inside experts, experts with their router, and what forbids that."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from checked_symmetries import exact as checked
from checked_symmetries import units, weight
from test_completeness import kernel_dimension
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import canonicalise, discover, min_mass, verify
from lightning_bnn.symmetry.verify import random_element

TOKENS, IN, EXPERTS, HIDDEN = 7, 4, 3, 5
INSIDE = [(HIDDEN, "channel")] * EXPERTS


def experts(forward, **more):
    torch.manual_seed(0)
    parts = {
        "r": nn.Linear(IN, EXPERTS),
        "w1": weight(EXPERTS, IN, HIDDEN),
        "b1": weight(EXPERTS, HIDDEN),
        "w2": weight(EXPERTS, HIDDEN, IN),
    }
    return Forward(forward, **{**parts, **more}).double()


def tokens(n=TOKENS):
    return torch.randn(n, IN, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def exact(model):
    return checked(model, tokens(), others=[(tokens(2),), (tokens(11),)])


# ------------------------------------------------------------ how tokens are sent
def softmax(s, x):
    return s.r(x).softmax(-1)


def scattered(s, x):
    values, at = s.r(x).topk(2)
    return torch.zeros_like(s.r(x)).scatter(-1, at, values.softmax(-1))


def one_hot(s, x):
    values, at = softmax(s, x).topk(2)
    return (F.one_hot(at, EXPERTS) * values[..., None]).sum(1)


def compared(s, x):
    values, at = softmax(s, x).topk(2)
    return ((at[..., None] == torch.arange(EXPERTS)) * values[..., None]).sum(1)


def threshold(s, x):
    logits = s.r(x)
    return logits.masked_fill(logits < logits.topk(2)[0][:, -1:], -torch.inf).softmax(-1)


def with_selection_bias(s, x):
    p = s.r(x).sigmoid()
    at = (p + s.selection).topk(2)[1]
    chosen = p.gather(-1, at)
    return torch.zeros_like(p).scatter(-1, at, chosen / chosen.sum(-1, keepdim=True))


def dense(gates):
    def forward(s, x):
        h = torch.relu(torch.einsum("bd,edf->bef", x, s.w1) + s.b1)
        return (torch.einsum("bef,efd->bed", h, s.w2) * gates(s, x)[..., None]).sum(1)

    return forward


@pytest.mark.parametrize(
    "gates", [softmax, scattered, one_hot, compared, threshold, with_selection_bias]
)
def test_experts_are_exchanged_with_their_router(gates):
    model = experts(dense(gates), selection=nn.Buffer(torch.randn(EXPERTS)))
    sym = exact(model)
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]
    assert (sym.scaling_dof, sym.sign_dof) == (EXPERTS * HIDDEN, 0)
    moved = {sym.axes[p.axis].tensor for p in sym.permutations[-1].placements}
    assert {"r.weight", "r.bias", "w1", "b1", "w2"} <= moved
    assert ("selection" in moved) == (gates is with_selection_bias)
    assert not sym.frozen


@pytest.mark.parametrize(("gates", "alike"), [((1.0, 2.0, 3.0), 0), ((1.0, 2.0, 2.0), 2)])
def test_only_experts_with_equal_gates_are_exchanged(gates, alike):
    sym = exact(experts(dense(lambda s, x: torch.tensor(gates).to(x).expand(len(x), -1))))
    assert units(sym) == [*INSIDE, *([(alike, "block")] if alike else [])]


def test_a_bias_shared_by_experts_leaves_their_common_permutations():
    def forward(s, x):
        h = torch.relu(torch.einsum("bd,edf->bef", x, s.w1) + s.shared)
        return torch.einsum("bef,efd,be->bd", h, s.w2, softmax(s, x))

    sym = exact(experts(forward, shared=weight(HIDDEN)))
    assert units(sym) == [(HIDDEN, "channel"), (EXPERTS, "channel")]
    assert sym.scaling_dof == HIDDEN


# ------------------------------------------------------------ how experts are computed
def by_three(s, x):
    h = torch.relu(torch.einsum("bd,edf->bef", x, s.w1) + s.b1)
    return torch.einsum("bef,efd,be->bd", h, s.w2, softmax(s, x))


def by_bmm(s, x):
    h = torch.relu(torch.baddbmm(s.b1[:, None], x.expand(EXPERTS, -1, -1), s.w1))
    return (torch.bmm(h, s.w2) * softmax(s, x).T[..., None]).sum(0)


def by_transposed(s, x):
    h = torch.relu(torch.einsum("edf,bd->ebf", s.w1, x) + s.b1[:, None])
    return torch.einsum("ebd,be->bd", h @ s.w2, softmax(s, x))


def with_output_bias(s, x):
    h = torch.relu(torch.einsum("bd,edf->ebf", x, s.w1) + s.b1[:, None])
    return torch.einsum("ebd,be->bd", torch.bmm(h, s.w2) + s.b2[:, None], softmax(s, x))


def by_baddbmm(s, x):
    h = torch.relu(torch.bmm(x.expand(EXPERTS, -1, -1), s.w1) + s.b1[:, None])
    return (torch.baddbmm(s.b2[:, None], h, s.w2) * softmax(s, x).T[..., None]).sum(0)


def by_copies(s, x):
    h = torch.relu(torch.bmm(x[None].repeat(EXPERTS, 1, 1), s.w1) + s.b1[:, None])
    return (torch.bmm(h, s.w2) * softmax(s, x).T[..., None]).sum(0)


@pytest.mark.parametrize(
    "forward", [by_three, by_bmm, by_baddbmm, by_copies, by_transposed, with_output_bias]
)
def test_experts_in_one_tensor(forward):
    sym = exact(experts(forward, b2=weight(EXPERTS, IN)))
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]
    assert sym.scaling_dof == EXPERTS * HIDDEN
    assert not [f for f in sym.frozen if f.module != "b2"]


def behind_and_before_layers(s, x):
    return s.c(by_bmm(s, torch.relu(s.a(x))))


def test_what_experts_read_and_write_stays_free():
    layers = {"a": nn.Linear(IN, IN), "c": nn.Linear(IN, 2)}
    model = experts(behind_and_before_layers, **layers)
    sym = exact(model)
    assert units(sym) == [(IN, "channel"), *INSIDE, (IN, "channel"), (EXPERTS, "block")]
    assert (sym.scaling_dof, sym.sign_dof) == (IN + EXPERTS * HIDDEN + IN, IN)
    params = P.of(model)
    moved = random_element(params, sym, torch.Generator().manual_seed(1))
    for choice in ({}, {"permutation": "first"}, {"permutation": "outgoing"}):
        one, two = (canonicalise(p, sym, **choice) for p in (params, moved))
        assert all(torch.allclose(one[n], two[n], atol=1e-12) for n in one)
    least = [min_mass(p, sym).minimum for p in (params, moved)]
    torch.testing.assert_close(*least, rtol=1e-8, atol=0)
    oracle = min_mass(params, sym, solver="cvxpy").minimum
    torch.testing.assert_close(least[0], oracle, rtol=1e-6, atol=0)


def gated(s, x):
    g, u = torch.einsum("bd,edf->ebf", x, s.w1).chunk(2, -1)
    return torch.einsum("ebd,be->bd", torch.bmm(F.silu(g) * u, s.w2), softmax(s, x))


def test_gated_experts():
    sym = exact(experts(gated, w1=weight(EXPERTS, IN, 2 * HIDDEN)))
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]
    assert (sym.scaling_dof, sym.sign_dof) == (EXPERTS * HIDDEN, EXPERTS * HIDDEN)


def in_a_list(s, x):
    p = softmax(s, x)
    return sum(p[:, k : k + 1] * s.o[k](torch.relu(s.e[k](x))) for k in range(EXPERTS))


def test_experts_of_a_list_are_exchanged():
    layers = {
        "e": nn.ModuleList([nn.Linear(IN, HIDDEN) for _ in range(EXPERTS)]),
        "o": nn.ModuleList([nn.Linear(HIDDEN, IN) for _ in range(EXPERTS)]),
    }
    sym = exact(Forward(in_a_list, r=nn.Linear(IN, EXPERTS), **layers).double())
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]
    assert ("e.0.weight", "e.1.weight", "e.2.weight") in sym.permutations[-1].tensors


class First(nn.Module):
    """What an expert does to its input before all else."""

    def __init__(self, forward):
        super().__init__()
        self.forward = forward


NOTHING = {
    "flatten": nn.Flatten,
    "dropout": lambda: nn.Dropout(0.5),
    "no dropout": lambda: nn.Dropout(0.0),
    "to": lambda: First(lambda x: x.to(x.dtype)),
    "view": lambda: First(lambda x: x.view(x.shape)),
    "type_as": lambda: First(lambda x: x.type_as(x)),
}


def summed(s, x):
    p = softmax(s, x)
    return sum(p[:, k : k + 1] * s.e[k](x) for k in range(EXPERTS))


def expert(*first):
    return nn.Sequential(*first, nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, IN))


@pytest.mark.parametrize("name", list(NOTHING))
def test_experts_that_first_do_nothing_are_exchanged(name):
    made = nn.ModuleList(expert(NOTHING[name]()) for _ in range(EXPERTS))
    sym = exact(Forward(summed, r=nn.Linear(IN, EXPERTS), e=made).double().eval())
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]


def test_experts_of_which_one_first_turns_its_input_are_two():
    turned = [nn.Flatten(), First(lambda x: x.flip(-1)), nn.Flatten()]
    made = nn.ModuleList(expert(first) for first in turned)
    sym = exact(Forward(summed, r=nn.Linear(IN, EXPERTS), e=made).double().eval())
    assert units(sym) == [*INSIDE, (2, "block")]


# ------------------------------------------------------------ weights of the chosen experts
def chosen_by_einsum(s, x):
    values, at = softmax(s, x).topk(2)
    h = torch.relu(torch.einsum("td,tkdf->tkf", x, s.w1[at]) + s.b1[at])
    return (torch.einsum("tkf,tkfd->tkd", h, s.w2[at]) * values[..., None]).sum(1)


def chosen_by_bmm(s, x):
    values, at = softmax(s, x).topk(2)
    at = at.reshape(-1)
    h = torch.bmm(x.repeat_interleave(2, 0)[:, None], s.w1[at])[:, 0] + s.b1[at]
    y = torch.bmm(torch.relu(h)[:, None], s.w2[at])[:, 0] * values.reshape(-1)[:, None]
    return y.view(len(x), 2, -1).sum(1)


def chosen_by_select(s, x):
    values, at = softmax(s, x).topk(2)
    w1, w2 = (w.index_select(0, at.flatten()).view(*at.shape, *w.shape[1:]) for w in (s.w1, s.w2))
    h = torch.relu(torch.einsum("td,tkdf->tkf", x, w1) + s.b1[at])
    return (torch.einsum("tkf,tkfd->tkd", h, w2) * values[..., None]).sum(1)


def chosen_on_the_left(s, x):
    values, at = softmax(s, x).topk(2)
    at = at.reshape(-1)
    h = torch.bmm(s.w1.mT[at], x.repeat_interleave(2, 0)[..., None]).squeeze(-1) + s.b1[at]
    y = torch.bmm(s.w2[at].transpose(1, 2), torch.relu(h)[..., None]).squeeze(-1)
    return (y.view(len(x), 2, -1) * values[..., None]).sum(1)


def chosen_with_output_bias(s, x):
    values, at = softmax(s, x).topk(2)
    h = torch.relu(torch.einsum("td,tkdf->tkf", x, s.w1[at]) + s.b1[at])
    return ((torch.einsum("tkf,tkfd->tkd", h, s.w2[at]) + s.b2[at]) * values[..., None]).sum(1)


CHOSEN = [
    chosen_by_einsum,
    chosen_by_bmm,
    chosen_by_select,
    chosen_on_the_left,
    chosen_with_output_bias,
]


@pytest.mark.parametrize("forward", CHOSEN)
def test_units_inside_gathered_experts(forward):
    model = experts(forward, b2=weight(EXPERTS, IN))
    sym = exact(model)
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]
    assert (sym.scaling_dof, sym.frozen) == (EXPERTS * HIDDEN, ())
    params = P.of(model)
    moved = random_element(params, sym, torch.Generator().manual_seed(1))
    one, two = (canonicalise(p, sym, shifts=True) for p in (params, moved))
    assert all(torch.allclose(one[n], two[n], atol=1e-12) for n in one)


def test_the_kernel_of_gathered_experts_is_complete():
    model = experts(chosen_by_einsum)
    sym = exact(model)
    assert sym.dimension == kernel_dimension(model, 4 * tokens(400)) == EXPERTS * HIDDEN + IN + 1


def gated_by_einsum(s, x):
    values, at = softmax(s, x).topk(2)
    g, u = torch.einsum("td,tkdf->tkf", x, s.w1[at]).chunk(2, -1)
    return (torch.einsum("tkf,tkfd->tkd", F.silu(g) * u, s.w2[at]) * values[..., None]).sum(1)


def gated_at_once(s, x):
    values, at = softmax(s, x).topk(2)
    h = F.glu(torch.einsum("td,tkdf->tkf", x, s.w1[at]))
    return (torch.einsum("tkf,tkfd->tkd", h, s.w2[at]) * values[..., None]).sum(1)


@pytest.mark.parametrize("forward", [gated_by_einsum, gated_at_once])
def test_gated_units_inside_gathered_experts(forward):
    sym = exact(experts(forward, w1=weight(EXPERTS, IN, 2 * HIDDEN)))
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]
    assert (sym.scaling_dof, sym.sign_dof, sym.frozen) == (EXPERTS * HIDDEN,) * 2 + ((),)


def behind_another_index(s, x):
    """What the experts of one choice write is read by those of another."""
    (_, one), (values, two) = (softmax(s, x * k).topk(2) for k in (1, 2))
    h = torch.relu(torch.einsum("td,tkdf->tkf", x, s.w1[one]))
    return (torch.einsum("tkf,tkfd->tkd", h, s.w2[two]) * values[..., None]).sum(1)


def normalised(s, x):
    values, at = softmax(s, x).topk(2)
    h = F.layer_norm(torch.einsum("td,tkdf->tkf", x, s.w1[at]), [HIDDEN])
    return (torch.einsum("tkf,tkfd->tkd", h, s.w2[at]) * values[..., None]).sum(1)


@pytest.mark.parametrize("forward", [behind_another_index, normalised])
def test_experts_whose_units_are_needed_by_themselves_have_them_in_common(forward):
    sym = exact(experts(forward))
    assert sorted(n for n, _ in units(sym)) == [EXPERTS, HIDDEN]


def by_their_mean(s, x):
    """Matrices that are averaged before a layer takes them."""
    _, at = softmax(s, x).topk(2)
    h = torch.relu(torch.einsum("td,tdf->tf", x, s.w1[at].mean(1)))
    return torch.einsum("tf,tfd->td", h, s.w2[at].mean(1))


def test_what_is_in_common_only_is_said():
    sym = exact(experts(by_their_mean))
    assert any("in common" in f.reason for f in sym.frozen)


def index_as_a_number(s, x):
    values, at = softmax(s, x).topk(1)
    h = torch.relu(torch.bmm(x[:, None], s.w1[at[:, 0]]))
    return torch.bmm(h, s.w2[at[:, 0]])[:, 0] * (at + values)


def test_an_index_used_as_a_number_forbids_the_exchange():
    sym = exact(experts(index_as_a_number))
    assert EXPERTS not in [g.units for g in sym.permutations]
    assert [f.reason for f in sym.frozen] == ["an index among channels"]


def top_one(s, x):
    p = softmax(s, x)
    at = p.argmax(-1)
    h = torch.relu(torch.bmm(x[:, None], s.w1[at]))
    return torch.bmm(h, s.w2[at])[:, 0] * p.gather(-1, at[:, None])


def test_the_one_expert_of_the_largest_gate():
    assert units(exact(experts(top_one))) == [*INSIDE, (EXPERTS, "block")]


def largest(s, x):
    values, at = softmax(s, x).max(-1)
    return F.one_hot(at, EXPERTS) * values[:, None]


def largest_kept(s, x):
    values, at = softmax(s, x).max(-1, keepdim=True)
    return torch.zeros_like(s.r(x)).scatter(-1, at, values)


@pytest.mark.parametrize("gates", [largest, largest_kept])
def test_the_place_of_the_largest_gate_is_an_index(gates):
    sym = exact(experts(dense(gates)))
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]
    assert not sym.frozen


# ------------------------------------------------------------ the outputs of the chosen experts
def side_by_side(s, x):
    return torch.stack([s.o[k](torch.relu(s.e[k](x))) for k in range(EXPERTS)], 1)


def picked_by_gather(s, x):
    values, at = softmax(s, x).topk(2)
    y = side_by_side(s, x).gather(1, at[..., None].expand(-1, -1, IN))
    return (y * values[..., None]).sum(1)


def picked_by_index(s, x):
    p = softmax(s, x)
    rows, at = torch.arange(len(x)), p.argmax(-1)
    return side_by_side(s, x)[rows, at] * p[rows, at][:, None]


def picked_in_a_stream(s, x):
    x = s.a(x)
    return s.c(F.layer_norm(x + picked_by_gather(s, x), [IN]))


def of_a_list(forward, **more):
    layers = {
        "e": nn.ModuleList([nn.Linear(IN, HIDDEN) for _ in range(EXPERTS)]),
        "o": nn.ModuleList([nn.Linear(HIDDEN, IN) for _ in range(EXPERTS)]),
    }
    return Forward(forward, r=nn.Linear(IN, EXPERTS), **layers, **more).double()


@pytest.mark.parametrize("forward", [picked_by_gather, picked_by_index])
def test_experts_whose_outputs_are_picked_are_exchanged(forward):
    sym = exact(of_a_list(forward))
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]
    assert (sym.scaling_dof, sym.frozen) == (EXPERTS * HIDDEN, ())


def test_picked_experts_leave_the_permutations_of_a_stream():
    layers = {"a": nn.Linear(IN, IN), "c": nn.Linear(IN, 2)}
    sym = exact(of_a_list(picked_in_a_stream, **layers))
    assert sorted(units(sym)) == [(EXPERTS, "block"), (IN, "block"), *INSIDE]


# ------------------------------------------------------------ one tensor, read part by part
def part_by_part(parts, change=lambda s, e, h: h):
    def forward(s, x):
        p = softmax(s, x)
        rows = [torch.relu(F.linear(x, w1.T, b1)) for w1, b1 in parts(s.w1, s.b1)]
        rows = [change(s, e, h) for e, h in enumerate(rows)]
        rows = [h @ w2 + b2 for h, (w2, b2) in zip(rows, parts(s.w2, s.b2), strict=True)]
        return sum(p[:, e : e + 1] * y for e, y in enumerate(rows))

    return forward


def selected(*stacks):
    return [tuple(w[e] for w in stacks) for e in range(EXPERTS)]


def unbound(*stacks):
    return list(zip(*(w.unbind() for w in stacks), strict=True))


def stacked_again(s, x):
    rows = torch.stack([torch.relu(x @ w1) @ w2 for w1, w2 in selected(s.w1, s.w2)], 1)
    return (rows * softmax(s, x)[..., None]).sum(1)


def a_gain_each(s, e, h):
    return h * s.gain[e]


def another_first(s, e, h):
    return h.tanh() if e == 0 else h


def a_constant_each(s, e, h):
    return h + e + 1


# how the parts are read, experts that are exchanged, scales
BY_PARTS = {
    "selected": (part_by_part(selected), EXPERTS, EXPERTS * HIDDEN),
    "unbound": (part_by_part(unbound), EXPERTS, EXPERTS * HIDDEN),
    "stacked": (stacked_again, EXPERTS, EXPERTS * HIDDEN),
    "gains": (part_by_part(selected, a_gain_each), EXPERTS, 2 * EXPERTS * HIDDEN),
    "one is different": (part_by_part(selected, another_first), 2, 2 * HIDDEN),
    "each is different": (part_by_part(selected, a_constant_each), 0, 0),
}


@pytest.mark.parametrize("name", BY_PARTS)
def test_parts_of_one_tensor_are_exchanged_as_modules_are(name):
    forward, alike, scales = BY_PARTS[name]
    more = {"b2": weight(EXPERTS, IN), "gain": weight(EXPERTS, HIDDEN)}
    model = experts(forward, **more)
    sym = exact(model)
    assert units(sym) == [*INSIDE, *([(alike, "block")] if alike else [])]
    assert sym.scaling_dof == scales
    assert not sym.frozen
    params = P.of(model)
    moved = random_element(params, sym, torch.Generator().manual_seed(1))
    for choice in ({}, {"permutation": "first"}):
        one, two = (canonicalise(p, sym, shifts=True, **choice) for p in (params, moved))
        assert all(torch.allclose(one[n], two[n], atol=1e-12) for n in one)


def read_as_a_whole_too(s, x):
    return part_by_part(selected)(s, x) + s.w1.sum()


def test_a_tensor_that_is_also_read_as_a_whole_is_held_fixed_with_a_reason():
    sym = exact(experts(read_as_a_whole_too, b2=weight(EXPERTS, IN)))
    assert [f.module for f in sym.frozen] == ["w1"]


# ------------------------------------------------------------ tokens sorted by their experts
if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):

    @torch.library.custom_op("transformers::grouped_mm_fallback", mutates_args=())
    def grouped(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """As transformers computes it on a CPU."""
        starts = [0, *offs.tolist()]
        parts = [x[a:b] @ m for a, b, m in zip(starts, starts[1:], w, strict=False)]
        return torch.cat(parts)

    @grouped.register_fake
    def _(x, w, offs):
        return x.new_empty(len(x), w.shape[2])


def sorted_by_expert(s, x, places=False):
    values, at = softmax(s, x).topk(2)
    at, order = at.reshape(-1).sort()
    counts = torch.histc(at.double(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    product = torch.ops.transformers.grouped_mm_fallback
    h = s.inside(product(x[order // 2], s.w1, ends) + s.b1[at])
    y = product(h, s.w2, ends) * values.reshape(-1)[order][:, None]
    if places:
        y = y * torch.arange(len(y), dtype=y.dtype)[:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return y[back].view(len(x), 2, -1).sum(1)


# what is between the two products, and how many scales are left
BETWEEN = {"relu": (nn.ReLU(), EXPERTS * HIDDEN), "tanh": (nn.Tanh(), 0)}


@pytest.mark.parametrize("name", BETWEEN)
def test_sorted_tokens_have_experts_with_units_of_their_own(name):
    inside, scales = BETWEEN[name]
    sym = exact(experts(sorted_by_expert, inside=inside))
    assert units(sym) == [*INSIDE, (EXPERTS, "block")]
    assert (sym.scaling_dof, sym.frozen) == (scales, ())


def test_a_softmax_over_sorted_tokens_sees_units_of_all_experts():
    sym = exact(experts(sorted_by_expert, inside=nn.Softmax(0)))
    assert sorted(n for n, _ in units(sym)) == [EXPERTS, HIDDEN]


def times_its_place(s, x):
    """What the place of a sorted token adds depends on how experts are numbered."""
    return sorted_by_expert(s, x, places=True)


def returned_in_order(s, x):
    _, at = softmax(s, x).topk(2)
    _, order = at.reshape(-1).sort()
    ends = at.reshape(-1).sort()[0].double().histc(EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
    return torch.ops.transformers.grouped_mm_fallback(x[order // 2], s.w1, ends)


@pytest.mark.parametrize(("forward", "left"), [(times_its_place, INSIDE), (returned_in_order, [])])
def test_the_order_of_sorted_tokens_must_not_be_seen(forward, left):
    model = experts(forward, inside=nn.Tanh()).double()
    sym = discover(model, tokens())
    assert units(sym) == left
    assert any("refuted" in f.reason for f in sym.frozen)
    assert verify(model, sym, tokens(11)) < 1e-12
