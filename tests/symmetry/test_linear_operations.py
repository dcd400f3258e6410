"""Matrices pass what is linear in a row of channels; where they are lost, the result says so."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from test_completeness import in_float64, kernel_dimension
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import (
    UnsupportedModel,
    discover,
    mix,
    random_mixings,
    verify,
)
from lightning_bnn.symmetry.forward import Inputs, outputs
from lightning_bnn.symmetry.rules import passthrough

D, NODES = 4, 40
SENDERS = torch.arange(NODES).repeat(2)
RECEIVERS = torch.cat([torch.arange(1, NODES + 1) % NODES, torch.arange(NODES).flip(0)])
EVERY = RECEIVERS[:, None].expand(-1, 3)
"""A graph; its edges, and where each of three channels of an edge goes."""


@pytest.fixture(autouse=True)
def float64():
    with in_float64():
        yield


def nodes():
    return torch.randn(NODES, D)


def sequences(n=20):
    return torch.randn(n, 5, D)


def images():
    return torch.randn(6, D, 4, 4)


def linear(d_in, d_out):
    return nn.Linear(d_in, d_out, bias=False)


def network(forward, **parts):
    torch.manual_seed(0)
    pair = {"a": linear(D, 3), "b": linear(3, 5), "c": linear(D, 3)}
    return Forward(forward, **{**pair, **{name: make() for name, make in parts.items()}})


def matrices(sym):
    """How many rows of each size are mixed by matrices of each kind."""
    return Counter((g.kind, g.size) for g in sym.linear for _ in range(g.spaces))


def found(model, *x):
    """Symmetries that were checked on inputs that discovery has not seen, mixed at random."""
    sym = discover(model, *x)
    mixed = mix(P.of(model), sym, random_mixings(sym, torch.Generator().manual_seed(1)))
    fresh = tuple(torch.randn_like(t) if t.is_floating_point() else t for t in x)
    before, after = (outputs(model, weights, Inputs(fresh)) for weights in (P.of(model), mixed))
    for expected, got in zip(before, after, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)
    return sym


def sent(s, x):
    return s.a(x)[SENDERS]


def zeros(x):
    return x.new_zeros(NODES, 3)


def written(s, x, accumulate):
    return zeros(x).index_put((RECEIVERS,), sent(s, x), accumulate=accumulate)


# what is done to a row of three channels, on what
TOKENWISE = {
    "index_add": (lambda s, x: zeros(x).index_add(0, RECEIVERS, sent(s, x)), nodes),
    "scatter_add": (lambda s, x: zeros(x).scatter_add(0, EVERY, sent(s, x)), nodes),
    "scatter_reduce": (
        lambda s, x: s.c(x).scatter_reduce(0, EVERY, sent(s, x), "mean"),
        nodes,
    ),
    "gather": (lambda s, x: s.a(x).gather(0, EVERY[:NODES]), nodes),
    "take_along_dim": (lambda s, x: torch.take_along_dim(s.a(x), EVERY[:NODES, :1], 0), nodes),
    "index_put": (lambda s, x: written(s, x, accumulate=True), nodes),
    "cumsum": (lambda s, x: s.a(x).cumsum(1), sequences),
    "where": (lambda s, x: torch.where(x[..., :1] > 0, s.a(x), s.c(x)), sequences),
    "masked_fill": (lambda s, x: s.a(x).masked_fill(x[..., :1] > 1, 0.0), sequences),
    "addcmul": (lambda s, x: torch.addcmul(s.a(x), x[..., :1], s.c(x)), sequences),
    "addcdiv": (lambda s, x: torch.addcdiv(s.a(x), s.c(x), 1 + x[..., :1] ** 2), sequences),
    "lerp": (lambda s, x: torch.lerp(s.a(x), s.c(x), x[..., :1]), sequences),
}
WITH_TWO_WRITERS = ("scatter_reduce", "where", "addcmul", "addcdiv", "lerp")


@pytest.mark.parametrize("name", TOKENWISE)
def test_matrices_pass_what_is_linear_in_tokens(name):
    operation, example = TOKENWISE[name]
    model = network(lambda s, x: s.b(operation(s, x)))
    x = example()
    sym = found(model, x)
    assert matrices(sym) == {("general", 3): 1}
    assert not sym.frozen
    model.c.requires_grad_(name in WITH_TWO_WRITERS)
    assert sym.dimension == kernel_dimension(model, x)


# the same operations where they tell channels apart
CHANNELWISE = {
    "gather": lambda s, x: s.a(x).gather(1, (x[..., :3] > 0).long()),
    "where": lambda s, x: torch.where(x[..., :3] > 0, s.a(x), 0.0),
    "where of themselves": lambda s, x: (lambda h: torch.where(h > 0, h, 0.0))(s.a(x)),
    "masked_fill": lambda s, x: s.a(x).masked_fill(x[..., :1] > 0, 1.0),
    "addcmul": lambda s, x: torch.addcmul(s.a(x), s.a(x), s.c(x)),
    "squares": lambda s, x: s.a(x) * s.a(x),
    "lerp": lambda s, x: torch.lerp(s.a(x), s.c(x), x[..., :3]),
}


@pytest.mark.parametrize("name", CHANNELWISE)
def test_they_end_where_channels_are_told_apart(name):
    sym = found(network(lambda s, x: s.b(CHANNELWISE[name](s, x))), sequences())
    assert not sym.linear
    assert not sym.frozen


def test_patches_of_an_image():
    parts = {"a": nn.Conv2d(D, 3, 1, bias=False), "b": linear(12, 5)}
    model = Forward(lambda s, x: s.b(F.unfold(s.a(x), 2).mT), **parts)
    assert matrices(found(model, images())) == {("general", 3): 1}


def test_a_normalisation_over_all_channels_leaves_rotations():
    model = network(lambda s, x: s.b(F.group_norm(s.a(x), 1)))
    assert matrices(found(model, torch.randn(60, D))) == {("centred", 3): 1}
    of_groups = network(lambda s, x: s.b(s.n(s.a(x))), n=lambda: nn.GroupNorm(1, 3))
    assert not discover(of_groups, torch.randn(60, D)).linear


# ------------------------------------------------------------ sums of products, norms of weights
def users():
    return torch.arange(8).repeat_interleave(9), torch.arange(9).repeat(8)


def embeddings(score):
    return Forward(score, u=nn.Embedding(8, 3), i=nn.Embedding(9, 3))


def test_a_sum_of_products_is_an_inner_product():
    model = embeddings(lambda s, u, i: (s.u(u) * s.i(i)).sum(-1))
    sym = discover(model, *users())
    assert matrices(sym) == {("general", 3): 1}
    assert sym.dimension == kernel_dimension(model, *users())


def test_three_factors_have_no_matrices():
    model = embeddings(lambda s, u, i: (s.u(u) * s.i(i) * s.i(u)).sum(-1))
    assert not discover(model, *users()).linear


def test_a_product_that_is_also_used_by_itself():
    def both(s, u, i):
        product = s.u(u) * s.i(i)
        return product.sum(-1), product

    assert not discover(embeddings(both), *users()).linear


@pytest.mark.parametrize(
    "score",
    [
        lambda s, x: F.linear(F.normalize(s.a(x)), F.normalize(s.w)),
        lambda s, x: F.normalize(s.a(x)) @ F.normalize(s.w).T,
        lambda s, x: (
            (lambda h: h / h.norm(dim=-1, keepdim=True))(s.a(x))
            @ (s.w / s.w.norm(dim=-1, keepdim=True)).T
        ),
    ],
)
def test_a_classifier_by_cosines_is_rotated(score):
    torch.manual_seed(0)
    model = Forward(score, a=nn.Linear(4, 5), w=nn.Parameter(torch.randn(3, 5)))
    x = torch.randn(60, 4)
    sym = found(model, x)
    assert matrices(sym) == {("orthogonal", 5): 1}
    assert sym.dimension == kernel_dimension(model, x)


@pytest.mark.parametrize("mean_square", [lambda h: (h * h).mean(-1), lambda h: h.square().mean(-1)])
def test_a_root_mean_square_by_hand(mean_square):
    def forward(s, x):
        h = s.a(x)
        return s.b(h * torch.rsqrt(mean_square(h)[..., None] + 0.1))

    assert matrices(found(network(forward), sequences())) == {("orthogonal", 3): 1}


def standardised(h):
    return (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + 0.1).sqrt()


def test_a_layer_norm_by_hand_leaves_rotations_around_the_mean():
    model = network(lambda s, x: s.b(standardised(s.a(x))))
    assert matrices(found(model, sequences())) == {("centred", 3): 1}


# ------------------------------------------------------------ layers that read rows
@pytest.mark.parametrize(
    "layer", [nn.LSTM, nn.GRU, lambda *a, **k: nn.LSTM(3, 4, proj_size=2, **k)]
)
def test_inputs_of_recurrent_layers_are_mixed(layer):
    model = network(lambda s, x: s.r(s.a(x))[0], r=lambda: layer(3, 2, batch_first=True))
    assert matrices(found(model, sequences(3))) == {("general", 3): 1}


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_inputs_of_cells_are_mixed_and_their_states_are_not(cell):
    def forward(s, x):
        state = None
        for t in range(3):
            state = s.r(s.a(x[:, t]), state)
        return state[0] if isinstance(state, tuple) else state

    model = network(forward, r=lambda: cell(3, 2))
    assert matrices(found(model, sequences(3))) == {("general", 3): 1}


# ------------------------------------------------------------ keys and values from several places
def heads(t):
    return t.unflatten(-1, (2, 3)).transpose(1, 2)


def joint(s, x, y):
    """Tokens of two kinds that attend to each other, with projections of their own."""
    pairs = ((s.qx, s.qy), (s.kx, s.ky), (s.vx, s.vy))
    q, k, v = (torch.cat([heads(first(x)), heads(second(y))], 2) for first, second in pairs)
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return s.ox(out[:, : x.shape[1]]), s.oy(out[:, x.shape[1] :])


def prefixed(s, x, y):
    """Keys and values beside rows of their own, which are learned."""
    keys, values = (heads(p.expand(len(x), -1, -1)) for p in (s.pk, s.pv))
    k, v = torch.cat([keys, heads(s.kx(x))], 2), torch.cat([values, heads(s.vx(x))], 2)
    return s.ox(F.scaled_dot_product_attention(heads(s.qx(x)), k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("forward", [joint, prefixed])
def test_keys_and_values_that_are_joined_are_mixed_together(forward):
    torch.manual_seed(0)
    names = [a + b for a in "qkvo" for b in "xy"]
    tables = {name: nn.Parameter(torch.randn(5, 6)) for name in ("pk", "pv")}
    model = Forward(forward, **{name: linear(6, 6) for name in names}, **tables)
    sym = found(model, torch.randn(2, 4, 6), torch.randn(2, 3, 6))
    assert matrices(sym) == {("general", 3): 4}
    assert any(g.kind == "block" and g.units == 2 for g in sym.permutations)  # heads


def test_an_attention_with_rows_of_its_own_in_torch():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)
    model = Forward(lambda s, x: s.m(x, x, x, need_weights=False)[0], m=attention)
    x = torch.randn(40, 4, 6)
    for p in model.parameters():
        nn.init.normal_(p)
    sym = found(model, x)
    assert matrices(sym) == {("general", 3): 4}
    assert sym.dimension == kernel_dimension(model, x)


# ------------------------------------------------------------ what is said where they are lost
@torch.library.custom_op("lightning_bnn_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)


def complex_product(s, x):
    first, second = torch.view_as_complex(s.w), torch.view_as_complex(s.v)
    return (x.to(torch.complex128) @ first.T @ second).real


LOST = {
    "an operation whose rule was given": lambda s, x: s.b(twice(s.a(x))),
    "a sum over them": lambda s, x: s.b(s.a(x) - s.a(x).mean(-1, keepdim=True)),
    "a product of complex numbers": complex_product,
    "a sum or a variance over rows or columns of a weight": (
        lambda s, x: F.linear(s.a(x), s.b.weight - s.b.weight.mean(1, keepdim=True))
    ),
}


@pytest.mark.parametrize("through", LOST)
def test_what_stops_matrices_is_named_if_it_is_for_want_of_a_rule(through):
    pairs = {"w": (5, 4, 2), "v": (5, 3, 2)}
    model = network(
        LOST[through], **{n: lambda s=s: nn.Parameter(torch.randn(s)) for n, s in pairs.items()}
    )
    sym = discover(model, torch.randn(6, D), rules={"lightning_bnn_tests.twice": passthrough})
    assert [f.reason for f in sym.frozen if "matrices" in f.reason][0].endswith(through)
    assert verify(model, sym, torch.randn(6, D)) < 1e-10


@pytest.mark.parametrize("through", [t for t in LOST if "complex" not in t])
def test_nothing_is_said_where_an_activation_ends_the_row_anyway(through):
    model = network(lambda s, x: LOST[through](s, x))
    model.a = nn.Sequential(model.a, nn.ReLU())
    sym = discover(model, torch.randn(6, D), rules={"lightning_bnn_tests.twice": passthrough})
    assert not sym.frozen


# ------------------------------------------------------------ maps over tokens
class Mixer(nn.Module):
    """Channels of a stream, mapped over tokens and over channels in turns."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.first, self.second = (nn.LayerNorm(6) for _ in range(2))
        self.over_tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.over_channels = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))

    def forward(self, x):
        h = self.embed(x)
        h = h + self.over_tokens(self.first(h).mT).mT
        return self.last((h + self.over_channels(self.second(h))).mean(1))


def test_a_map_over_tokens_says_that_it_ties_channels():
    sym = discover(Mixer(), torch.randn(2, 4, 3))
    assert sorted(g.units for g in sym.permutations) == [5, 7]  # and not the 6 of the stream
    (said,) = sym.frozen
    assert "`over_tokens.0`" in str(said)
    assert "ties those of the other dimensions" in said.reason


def test_a_map_over_tokens_of_the_input_ties_nothing():
    model = Forward(lambda s, x: s.b(torch.relu(s.a(x.mT))), a=nn.Linear(5, 7), b=nn.Linear(7, 2))
    sym = discover(model, sequences())
    assert [g.units for g in sym.permutations] == [7]
    assert not sym.frozen


# ------------------------------------------------------------ noise that is always there
def dropped(h):
    return F.dropout(h, 0.5, training=True)


NOISY = {
    "dropout": dropped,
    "of whole channels": lambda h: F.dropout2d(h[..., None, None], 0.5, True)[..., 0, 0],
    "a mask by hand": lambda h: h * (torch.rand_like(h) < 0.5),
    "a Bernoulli mask": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "noise that is added": lambda h: h + torch.randn_like(h),
}


@pytest.mark.parametrize("name", NOISY)
def test_units_are_exchanged_below_noise_that_is_always_drawn(name):
    model = network(lambda s, x: s.b(NOISY[name](torch.relu(s.a(x)))))
    sym = discover(model, torch.randn(6, D))
    assert [g.units for g in sym.permutations] == [3]
    assert not sym.frozen
    assert sym.scaling_dof == (0 if name == "noise that is added" else 3)


def graded(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(1.0, 4.0, dtype=x.dtype)


def test_a_wrong_exchange_is_found_out_below_noise_too():
    name = "lightning_bnn_tests::graded"
    torch.library.custom_op(name, graded, mutates_args=()).register_fake(torch.empty_like)
    graded_operation = torch.ops.lightning_bnn_tests.graded
    model = network(lambda s, x: s.b(graded_operation(dropped(torch.relu(s.a(x))))))
    with pytest.raises(UnsupportedModel, match="the groups at a.weight change the outputs"):
        discover(model, torch.randn(6, D), rules={"lightning_bnn_tests.graded": passthrough})
