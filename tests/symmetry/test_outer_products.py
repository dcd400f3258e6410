"""Products of activations whose channels lie along dimensions of their own, and what reads them.

Values under the scores of many heads, states that sum up keys times values, bilinear pooling: each
side keeps its permutations, scales and matrices until a layer reads both.
"""

import pytest
import torch
from cases import Forward
from checked_symmetries import exact, sizes, units, weight
from test_completeness import in_float64, kernel_dimension
from torch import nn

from lightning_bnn.symmetry import discover

WIDTH = 3


def heads(t, number):
    return t.unflatten(-1, (number, -1)).transpose(1, 2)


def mixed(scores, values):
    return scores.softmax(-1) @ values


# ------------------------------------------------------------ one key for several queries
def by_matmul(q, k, v):
    return mixed(q @ k[:, None].mT, v[:, None])


def by_einsum(q, k, v):
    scores = torch.einsum("bhtw,bsw->bhts", q, k).softmax(-1)
    return torch.einsum("bhts,bsw->bthw", scores, v).transpose(1, 2)


def by_expand(q, k, v):
    k, v = (t[:, None].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    return mixed(q @ k.mT, v)


def by_sdpa(q, k, v):
    k, v = (t[:, None].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v)


def by_baddbmm(q, k, v):
    b, h, t, w = q.shape
    nothing = torch.empty(b, 1, 1, dtype=q.dtype)
    scores = torch.baddbmm(nothing, q.reshape(b, h * t, w), k.mT, beta=0, alpha=0.5)
    shared = scores.view(b, h, t, -1).softmax(-1).view(b, h * t, -1)
    return torch.bmm(shared, v).view(b, h, t, w)


def multi_query(attend):
    def forward(s, x):
        y = attend(heads(s.q(x), 2), s.k(x), s.v(x))
        return s.o(y.transpose(1, 2).flatten(2))

    shapes = {"q": (6, 6), "k": (6, WIDTH), "v": (6, WIDTH), "o": (6, 6)}
    return Forward(forward, **{n: nn.Linear(*shape) for n, shape in shapes.items()})


def grouped(axis):
    """Queries (groups, heads) or (heads, groups) beside keys of size one along the heads."""

    def forward(s, x):
        k, v = (heads(p(x), 2).unsqueeze(axis) for p in (s.k, s.v))
        y = mixed(heads(s.q(x), 4).unflatten(1, (2, 2)) @ k.mT, v)
        return s.o(y.flatten(1, 2).transpose(1, 2).flatten(2))

    shapes = {"q": (6, 12), "k": (6, 6), "v": (6, 6), "o": (12, 6)}
    return Forward(forward, **{n: nn.Linear(*shape) for n, shape in shapes.items()})


# ------------------------------------------------------------ states that grow
def recurrent(outer, start=True, decay=1.0):
    def forward(s, x):
        q, k, v = s.q(x), s.k(x), s.v(x)
        state = x.new_zeros(len(x), WIDTH, 5) if start else None
        rows = []
        for t in range(x.shape[1]):
            new = outer(s, x[:, t], k[:, t], v[:, t], state)
            state = new if state is None else decay * state + new
            rows.append(torch.einsum("bd,bde->be", q[:, t], state))
        return s.o(torch.stack(rows, 1))

    shapes = {"q": (4, 3), "k": (4, 3), "v": (4, 5), "o": (5, 4)}
    return Forward(forward, **{n: nn.Linear(*shape) for n, shape in shapes.items()})


def product(s, x, k, v, state):
    return torch.einsum("bd,be->bde", k, v)


def broadcast(s, x, k, v, state):
    return k[:, :, None] * v[:, None]


def difference(s, x, k, v, state):
    """A delta rule: what the state already says of a key is taken from its value."""
    return torch.einsum("bd,be->bde", k, v - torch.einsum("bde,bd->be", state, k))


def forgetting(s, x, k, v, state):
    return k.sigmoid()[:, :, None] * state + k[:, :, None] * v[:, None]


def decaying(s, x):
    """A state space model whose channels decay each at one speed for all states."""
    channels, step = s.a(x).tanh(), s.dt(x).exp()
    state, rows = x.new_zeros(len(x), 5, 3), []
    for t in range(x.shape[1]):
        new = torch.einsum("be,bn->ben", step[:, t] * channels[:, t], s.b(x[:, t]))
        state = torch.exp(-step[:, t])[:, :, None] * state + new
        rows.append(torch.einsum("ben,bn->be", state, s.c(x[:, t])))
    return s.o(torch.stack(rows, 1))


def running_sums(by):
    def forward(s, x):
        q, k, v = s.q(x), s.k(x), s.v(x)
        state = (k[..., None] * v[..., None, :]).cumsum(1)
        return s.o(by(q, state))

    shapes = {"q": (4, 3), "k": (4, 3), "v": (4, 5), "o": (5, 4)}
    return Forward(forward, **{n: nn.Linear(*shape) for n, shape in shapes.items()})


def pooled(s, x):
    shared = torch.einsum("btk,btc->bkc", s.a(x).sigmoid(), s.b(x))
    return s.o(shared.flatten(1))


def own_slice(s, x):
    h = s.a(x)
    return s.o(torch.einsum("bc,bd->bcd", h, h[:, :2]).sum(-1))


def two_slices(s, x):
    a, b = s.a(x).split([2, 3], -1)
    return s.o(torch.einsum("bc,bd->bcd", a.tanh(), b.tanh()).flatten(1))


def gated_rnn(s, x):
    """IndRNN: every unit remembers itself; the first step meets zeros."""
    h = x.new_zeros(len(x), 5)
    for t in range(x.shape[1]):
        h = torch.relu(s.a(x[:, t]) + s.u.exp() * h)
    return s.o(h)


def layers(forward, **shapes):
    parts = {n: nn.Linear(*s) if isinstance(s, tuple) else s for n, s in shapes.items()}
    return Forward(forward, **parts)


BOTH = 2 * WIDTH**2 + 2 * WIDTH  # matrices of queries and keys, of values; two biases
STATE = 9 + 25 + 1  # matrices of keys, of values, a number between scores and values
CHANNELS = [(3, "channel"), (5, "channel")]
ONE_KEY = [(2, "block"), (3, "channel"), (3, "channel")]
TWO_KEYS = [(2, "block")] * 3 + [(3, "channel")] * 4

# network, shape of the inputs, dimension of the kernel, groups of permutations
NETWORKS = {
    **{
        f"one key {f.__name__}": (lambda f=f: multi_query(f), (8, 5, 6), BOTH, ONE_KEY)
        for f in (by_matmul, by_einsum, by_expand, by_sdpa, by_baddbmm)
    },
    "keys of two heads": (lambda: grouped(2), (10, 6, 6), 2 * BOTH, TWO_KEYS),
    "keys between heads": (lambda: grouped(1), (10, 6, 6), 2 * BOTH, TWO_KEYS),
    "states": (lambda: recurrent(product), (30, 4, 4), STATE, CHANNELS),
    "states, first": (lambda: recurrent(product, start=False), (30, 4, 4), STATE, CHANNELS),
    "states, broadcast": (lambda: recurrent(broadcast), (30, 4, 4), STATE, CHANNELS),
    "states that fade": (lambda: recurrent(product, decay=0.9), (30, 4, 4), STATE, CHANNELS),
    # rotations of the keys; a number between queries and values
    "delta rule": (lambda: recurrent(difference), (30, 4, 4), 3 + 25 + 1, CHANNELS),
    # the gate reads the keys as they are
    "gated states": (lambda: recurrent(forgetting), (30, 4, 4), 25 + 1, CHANNELS),
    # matrices of the states; a number between the states and what reads them
    "states of channels": (
        lambda: layers(decaying, a=(4, 5), dt=(4, 5), b=(4, 3), c=(4, 3), o=(5, 4)),
        (30, 4, 4),
        9 + 1,
        CHANNELS,
    ),
    "running sums": (
        lambda: running_sums(lambda q, s: torch.einsum("btd,btde->bte", q, s)),
        (30, 4, 4),
        STATE,
        CHANNELS,
    ),
    "running sums, by hand": (
        lambda: running_sums(lambda q, s: (q[..., None] * s).sum(-2)),
        (30, 4, 4),
        STATE,
        CHANNELS,
    ),
    "pooling": (
        lambda: layers(pooled, a=(4, 3), b=(4, 2), o=(6, 3)),
        (60, 4, 4),
        4,
        [(2, "channel"), (3, "channel")],
    ),
    "two halves": (
        lambda: layers(two_slices, a=(4, 5), o=(6, 3)),
        (80, 4),
        0,
        [(2, "channel"), (3, "channel")],
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_both_sides_of_an_outer_product_are_found(name):
    build, shape, dimension, groups = NETWORKS[name]
    with in_float64():
        torch.manual_seed(0)
        model, x = build(), torch.randn(*shape)
        assert kernel_dimension(model, x) == dimension
        sym = exact(model, x[:2], others=[(torch.randn(3, *shape[1:]),)], tolerance=1e-12)
    assert sorted(units(sym)) == sorted(groups)
    assert sym.dimension == dimension
    assert not sym.frozen


def test_what_is_multiplied_with_a_part_of_itself_tells_this_part_apart():
    model = layers(own_slice, a=(4, 5), o=(5, 2))
    sym = exact(model, torch.randn(6, 4).double())
    assert sizes(sym) == [2, 3]
    assert [(g.kind, g.size) for g in sym.linear] == [("general", 3)]


def test_units_that_start_at_zero_keep_their_scales():
    u = nn.Parameter(torch.randn(5))
    model = layers(gated_rnn, a=(4, 5), u=u, o=(5, 3))
    sym = exact(model, torch.randn(6, 3, 4).double())
    assert (sizes(sym), sym.scaling_dof, sym.frozen) == ([5], 5, ())


# what is done with the two sides before they meet, and what it ends
SPOILT = {
    "bias": (lambda s, q, k, v: (q, k, v + s.place), ""),
    "constant": (lambda s, q, k, v: (q, k, v * torch.arange(1.0, 4.0).to(v)), "v"),
    "tanh": (lambda s, q, k, v: (q, k, v.tanh()), "v"),
    "keys": (lambda s, q, k, v: (q, k.tanh(), v), "q"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_touches_one_side_ends_its_matrices_alone(name):
    spoil, side = SPOILT[name]

    def forward(s, x):
        q, k, v = spoil(s, heads(s.q(x), 2), s.k(x), s.v(x))
        return s.o(by_matmul(q, k, v).transpose(1, 2).flatten(2))

    model = multi_query(by_matmul)
    model.function, model.place = forward, weight(3)
    sym = exact(model, torch.randn(2, 4, 6).double())
    assert {g.name for g in sym.linear} == {"q.weight", "v.weight"} - {f"{side}.weight"}


def test_columns_of_one_of_two_heads_are_not_exchangeable():
    with in_float64():
        model, x = multi_query(by_matmul), torch.randn(2, 5, 6)
        before = model(x)
        with torch.no_grad():
            for layer, rows in ((model.v.weight, [0, 1]), (model.v.bias, [0, 1])):
                layer[rows] = layer[rows[::-1]]
            for head in (0, WIDTH):
                assert not torch.allclose(model(x), before)
                pair = [head, head + 1]
                model.o.weight[:, pair] = model.o.weight[:, pair[::-1]]
        torch.testing.assert_close(model(x), before)


# ------------------------------------------------------------ a row with itself
def pairs(s, x):
    h = s.a(x)
    return torch.einsum("bi,bj->bij", h, h)


def pairs_of_two(s, x):
    return torch.einsum("bi,bj->bij", s.a(x), s.c(x))


@pytest.mark.parametrize(
    "read",
    [
        lambda s, x: s.o(pairs(s, x).flatten(1)),
        lambda s, x: pairs(s, x).flatten(1).tanh().sum(1),
    ],
    ids=["by a layer", "by a sum"],
)
def test_pairs_of_a_row_with_itself_in_one_dimension_are_reported(read):
    found = discover(layers(read, a=(4, 5), o=(25, 2)), torch.randn(6, 4))
    assert not found.permutations
    assert ["with itself" in f.reason for f in found.frozen] == [True]


@pytest.mark.parametrize(
    "read",
    [
        lambda s, x: pairs(s, x).sum((1, 2)),
        lambda s, x: s.o(pairs_of_two(s, x).flatten(1)),
    ],
    ids=["summed in two", "of two rows"],
)
def test_other_pairs_are_followed_without_a_word(read):
    found = discover(layers(read, a=(4, 5), c=(4, 5), o=(25, 2)), torch.randn(6, 4))
    assert found.permutations
    assert not any("with itself" in f.reason for f in found.frozen)
