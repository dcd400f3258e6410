"""Weights of any shape and side, and weights computed from weights."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from checked_symmetries import exact, sizes
from checked_symmetries import weight as w
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from lightning_bnn import params as P
from lightning_bnn.symmetry import canonicalise, verify
from lightning_bnn.symmetry.verify import random_element

lin = nn.Linear


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


X = random(3, 4)


def head(hidden):
    return lambda s, x: s.c(torch.relu(hidden(s, x)))


# ------------------------------------------------------------ sides, letters, numbers
@pytest.mark.parametrize(
    "hidden",
    [
        lambda s, x: (s.w @ x.T).T,
        lambda s, x: torch.einsum("oi,bi->bo", s.w, x),
        lambda s, x: torch.einsum("bi,oi", x, s.w),
        lambda s, x: torch.einsum("...i,oi->...o", x, s.w),
        lambda s, x: torch.einsum("io,bi->ob", s.w.T, x).T,
        lambda s, x: torch.addmm(s.b, x, s.w.T, alpha=0.5, beta=2),
        lambda s, x: torch.einsum("bi,hdi->bhd", x, s.w.view(2, 3, 4)).flatten(1),
    ],
)
def test_a_matrix_on_any_side(hidden):
    sym = exact(Forward(head(hidden), w=w(6, 4), b=w(6), c=lin(6, 2)).double(), X)
    assert (sizes(sym), sym.scaling_dof, sym.sign_dof) == ([6], 6, 0)
    assert not sym.frozen


def test_three_operands():
    hidden = head(lambda s, x: torch.einsum("bd,rd,or->bo", x, s.u, s.w))
    sym = exact(Forward(hidden, u=w(3, 4), w=w(6, 3), c=lin(6, 2)).double(), X)
    assert (sorted(sizes(sym)), sym.scaling_dof, sym.sign_dof) == ([3, 6], 9, 3)


def heads_of_three_dimensions(s, x):
    x = torch.relu(s.a(x))
    q, k, v = (torch.einsum("btd,dhk->bthk", x, t) for t in (s.q, s.k, s.v))
    scores = torch.einsum("bthk,bshk->bhts", q, k).softmax(-1)
    return torch.einsum("bthk,hkd->btd", torch.einsum("bhts,bshk->bthk", scores, v), s.o)


def test_projections_of_three_dimensions():
    parts = {n: w(6, 2, 3) for n in "qkv"}
    model = Forward(heads_of_three_dimensions, a=lin(4, 6), o=w(2, 3, 4), **parts).double()
    sym = exact(model, random(2, 5, 4))
    assert [(g.units, g.kind) for g in sym.permutations] == [
        (6, "channel"),
        *[(3, "channel")] * 4,
        (2, "block"),
    ]
    assert (sym.scaling_dof, sym.sign_dof) == (6 + 6 + 6, 6 + 6)
    assert verify(model, sym, random(1, 3, 4)) < 1e-11
    params = P.of(model)
    moved = random_element(params, sym, torch.Generator().manual_seed(1))
    for choice in ("max", "first", "outgoing"):
        one, two = (canonicalise(p, sym, permutation=choice) for p in (params, moved))
        assert all(torch.allclose(one[n], two[n], atol=1e-12) for n in one)


def a_matrix_for_each_head(s, x):
    h = torch.relu(s.a(x)).view(-1, 2, 3)
    return s.c(torch.relu(torch.einsum("bhi,hdi->bhd", h, s.w.view(2, 5, 3))).flatten(1))


def test_a_matrix_for_each_head():
    sym = exact(Forward(a_matrix_for_each_head, a=lin(4, 6), w=w(10, 3), c=lin(10, 2)).double(), X)
    assert (sizes(sym), sym.scaling_dof) == ([3, 3, 5, 5, 2], 16)


def test_weights_for_the_examples_of_a_batch_are_not_exchanged():
    hidden = head(lambda s, x: torch.bmm(x, s.w).flatten(1))
    sym = exact(Forward(hidden, w=w(3, 4, 5), c=lin(10, 2)).double(), random(3, 2, 4))
    assert sizes(sym) == [5]


# ------------------------------------------------------------ computed weights
def low_rank(s, x):
    return s.c(torch.relu(F.linear(x, s.w + 0.5 * s.b @ s.a, s.bias)))


def test_a_low_rank_update_keeps_its_ranks_and_units():
    parts = {"w": w(5, 4), "b": w(5, 2), "a": w(2, 4), "bias": w(5)}
    model = Forward(low_rank, **parts, c=lin(5, 2)).double()
    sym = exact(model, X)
    assert (sorted(sizes(sym)), sym.scaling_dof, sym.sign_dof) == ([2, 5], 7, 2)
    assert not sym.frozen
    params = P.of(model)
    moved = random_element(params, sym, torch.Generator().manual_seed(1))
    one, two = (canonicalise(p, sym) for p in (params, moved))
    assert all(torch.allclose(one[n], two[n], atol=1e-12) for n in one)


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = w(2, 4), w(5, 2)

    def forward(self, weight):
        return weight + 0.3 * (self.b @ self.a)


def hidden_layer(layer):
    return Forward(
        lambda s, x: s.c(torch.relu(s.h(torch.relu(s.a(x))))), a=lin(4, 6), h=layer, c=lin(5, 2)
    ).double()


def test_a_parametrized_low_rank_update():
    layer = lin(4, 5).double()
    parametrize.register_parametrization(layer, "weight", LowRank())
    sym = exact(Forward(lambda s, x: s.c(torch.relu(s.h(x))), h=layer, c=lin(5, 2)).double(), X)
    assert (sorted(sizes(sym)), sym.scaling_dof, sym.sign_dof) == ([2, 5], 7, 2)


@pytest.mark.parametrize(
    ("forward", "scales", "signs"),
    [
        (lambda s, x: F.linear(x, (s.u.T @ s.v).T), 6 + 3 + 5, 3),
        (lambda s, x: F.linear(x, F.normalize(s.v.T @ s.u, dim=1)), 0, 3),
        (lambda s, x: F.linear(x, torch.tanh(s.v.T @ s.u)), 0, 3),
    ],
)
def test_products_of_factors(forward, scales, signs):
    model = Forward(
        lambda s, x: s.c(torch.relu(forward(s, torch.relu(s.a(x))))),
        **{"a": lin(4, 6), "u": w(3, 6), "v": w(3, 5), "c": lin(5, 2)},
    )
    sym = exact(model.double(), X)
    assert sorted(sizes(sym)) == [3, 5, 6]
    if scales:
        assert (sym.scaling_dof, sym.sign_dof) == (scales, signs)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, parametrizations.weight_norm])
def test_weight_norm_gives_its_scale_to_the_gain_and_leaves_one_without_effect(norm):
    sym = exact(hidden_layer(norm(lin(6, 5))), X)
    assert (sizes(sym), sym.scaling_dof, sym.sign_dof) == ([6, 5], 5 + 5, 5)
    assert not sym.frozen


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, parametrizations.spectral_norm])
def test_spectral_norm_keeps_permutations_and_moves_its_vectors(norm):
    model = hidden_layer(norm(lin(6, 5)))
    model(X)
    sym = exact(model.eval(), X)
    assert (sizes(sym), sym.scaling_dof, sym.sign_dof) == ([6, 5], 0, 0)
    moved = {n.rpartition(".")[2].lstrip("_").removeprefix("weight_") for n in sym.touched}
    assert {"u", "v"} <= moved
    assert not sym.frozen


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_convolutions_with_a_norm(norm):
    layers = {"a": nn.Conv2d(2, 4, 3), "h": norm(nn.Conv2d(4, 5, 3)), "c": lin(5, 2)}

    def forward(s, x):
        return s.c(torch.relu(s.h(torch.relu(s.a(x)))).mean((2, 3)))

    sym = exact(Forward(forward, **layers).double(), random(2, 2, 7, 7))
    assert sorted(sizes(sym)) == [4, 5]
    depthwise = {"h": norm(nn.Conv2d(4, 4, 3, groups=4)), "c": lin(4, 2)}
    sym = exact(Forward(forward, **{**layers, **depthwise}).double(), random(2, 2, 7, 7))
    assert sizes(sym) == [4]


def by_variance(v):
    return (v - v.mean((1, 2, 3), keepdim=True)) / (v.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()


def by_both(v):
    variance, mean = torch.var_mean(v, (1, 2, 3), correction=0, keepdim=True)
    return (v - mean) * torch.rsqrt(variance + 1e-5)


def by_deviation(v):
    deviation, mean = torch.std_mean(v, dim=[1, 2, 3], keepdim=True)
    return (v - mean) / (deviation + 1e-5)


def by_batch_norm(v):
    rows = v.reshape(1, len(v), -1)
    return F.batch_norm(rows, None, None, training=True, momentum=0.0).reshape_as(v)


@pytest.mark.parametrize("standardised", [by_variance, by_both, by_deviation, by_batch_norm])
def test_weight_standardisation_keeps_permutations(standardised):
    def forward(s, x):
        h = F.conv2d(torch.relu(s.a(x)), standardised(s.h.weight), s.h.bias)
        return s.c(torch.relu(h).mean((2, 3)))

    layers = {"a": nn.Conv2d(2, 4, 3), "h": nn.Conv2d(4, 5, 3), "c": lin(5, 2)}
    sym = exact(Forward(forward, **layers).double(), random(2, 2, 7, 7))
    assert (sorted(sizes(sym)), sym.scaling_dof) == ([4, 5], 0)
    assert not sym.frozen


@pytest.mark.parametrize(
    ("computed", "permuted", "scales"),
    [
        # outputs against `o`, that against the last layer; columns against numbers, of which one
        # for each channel is found, none for places of the kernel
        (lambda s, w: w * s.m, [5], 5 + 5 + 4),
        (lambda s, w: torch.sin(w), [4, 5], 5),
        (
            lambda s, w: F.batch_norm(
                w[None], None, None, weight=(0.3 * s.g).view(-1), training=True
            ),
            [4, 5],
            5 + 5,
        ),
    ],
    ids=["a vector of the state", "sine", "batch norm with a gain"],
)
def test_a_flattened_kernel_goes_on_with_its_channels(computed, permuted, scales):
    def forward(s, x):
        w = computed(s, s.h.weight.flatten(1)).view_as(s.h.weight)
        return s.c(torch.relu(F.conv2d(torch.tanh(s.a(x)), w) * s.o[:, None, None]).mean((2, 3)))

    layers = {"a": nn.Conv2d(2, 4, 3), "h": nn.Conv2d(4, 5, 3), "c": lin(5, 2)}
    model = Forward(forward, **layers)
    model.m, model.o, model.g = w(36), w(5), w(5, 1, 1, 1)
    sym = exact(model.double(), random(2, 2, 7, 7))
    assert (sorted(sizes(sym)), sym.scaling_dof) == (permuted, scales)
    assert not sym.frozen


def test_a_cosine_classifier_keeps_permutations_and_lengths_are_free():
    def forward(s, x):
        return F.linear(F.normalize(torch.relu(s.a(x))), F.normalize(s.w))

    sym = exact(Forward(forward, a=lin(4, 6), w=w(3, 6)).double(), X)
    assert (sizes(sym), sym.scaling_dof) == ([6], 3 + 1)


# ------------------------------------------------------------ what forbids something
def test_only_rows_that_a_mask_treats_alike_are_exchanged():
    mask = torch.tensor([[1.0, 1, 0, 0]] * 2 + [[1, 0, 0, 0]] * 4)
    hidden = head(lambda s, x: F.linear(x, s.w * s.mask))
    sym = exact(Forward(hidden, w=w(6, 4), mask=nn.Buffer(mask), c=lin(6, 2)).double(), X)
    assert (sizes(sym), sym.scaling_dof) == ([2, 4], 6)


def test_a_weight_plus_its_transpose_has_one_row_of_channels():
    def forward(s, x):
        return s.c(torch.relu(F.linear(torch.relu(s.a(x)), s.w + s.w.T)))

    sym = exact(Forward(forward, a=lin(4, 6), w=w(6, 6), c=lin(6, 2)).double(), X)
    assert (sizes(sym), sym.scaling_dof) == ([6], 6)


@pytest.mark.parametrize("other", [torch.eye(6), torch.arange(36.0).view(6, 6)])
def test_a_weight_plus_a_constant_is_held_fixed(other):
    def forward(s, x):
        return s.c(torch.relu(F.linear(torch.relu(s.a(x)), s.w + other.to(x))))

    sym = exact(Forward(forward, a=lin(4, 6), w=w(6, 6), c=lin(6, 2)).double(), X)
    assert (sizes(sym), sym.scaling_dof, sym.sign_dof) == ([], 0, 0)


def test_columns_of_a_low_rank_update_beside_fixed_inputs_do_not_move():
    sym = exact(Forward(lambda s, x: F.linear(x, s.b @ s.a), b=w(2, 3), a=w(3, 4)).double(), X)
    assert sizes(sym) == [3]


@pytest.mark.parametrize(
    ("computed", "permuted", "signs"),
    [
        (lambda v, c: v * c, [], 6),
        (lambda v, c: v / c, [], 6),
        (lambda v, c: v * c[:, :1], [6], 6),
        (lambda v, c: v / v.std(1, keepdim=True), [5, 6], 0),
        (lambda v, c: v / v.amax(1, keepdim=True), [5, 6], 0),
        (lambda v, c: v / v.norm(dim=1, keepdim=True), [5, 6], 6),
        (lambda v, c: v / v.square().sum(1, keepdim=True).sqrt(), [5, 6], 6),
        (lambda v, c: v * (v.square().sum(1, keepdim=True) + 0.1).rsqrt(), [5, 6], 6),
    ],
)
def test_what_constants_and_statistics_of_rows_leave(computed, permuted, signs):
    c = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) + 1

    def forward(s, x):
        return s.c(torch.relu(F.linear(torch.tanh(s.a(x)), computed(s.w, c.to(x)))))

    sym = exact(Forward(forward, a=lin(4, 6), w=w(5, 6), c=lin(5, 2)).double(), X)
    assert (sorted(sizes(sym)), sym.sign_dof) == (permuted, signs)
