"""Heads under positions and norms, and groups of heads that share keys: what is exchanged."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from cases import Forward, randomise
from checked_symmetries import exact as checked
from checked_symmetries import units
from modern_networks import Attention
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import (
    canonicalise,
    discover,
    match,
    permute,
    random_permutations,
)
from lightning_bnn.symmetry.verify import random_element

torch.manual_seed(0)
X = torch.randn(2, 5, 10).double()
LONGER = torch.randn(3, 8, 10).double()


def exact(model, *x, others=()):
    torch.manual_seed(1)
    sym = checked(randomise(model.double()), *x, others=others)
    assert not sym.frozen
    return sym


def counts(sym):
    return Counter(units(sym))


def attention(**options):
    return exact(Attention(10, **options), X, others=[(LONGER,)])


# ------------------------------------------------------------ positions
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_heads_are_exchanged_and_their_planes_are_not(layout):
    sym = attention(heads=4, width=6, rotary=layout)
    assert counts(sym) == {(6, "channel"): 4, (4, "block"): 1}  # values of a head; heads
    assert sym.scaling_dof == sym.sign_dof == 4 * (3 + 6)  # planes and values


def test_channels_that_are_not_rotated_are_exchanged_inside_heads():
    sym = attention(heads=4, width=6, rotary="half", rotated=4)
    assert counts(sym) == {(2, "channel"): 4, (6, "channel"): 4, (4, "block"): 1}


def complex_rotary(x):
    steps, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.arange(steps)[:, None] * 1.7 ** -torch.arange(half).double()
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)


def own_rotary(x):
    """Rotary positions with other angles for every head."""
    steps, half = x.shape[-2], x.shape[-1] // 2
    speeds = torch.arange(1.0, x.shape[-3] + 1)[:, None, None] / torch.arange(1.0, half + 1)
    angles = torch.arange(steps)[:, None] * speeds.to(x)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def fused(turn, kv_heads=4, **options):
    def forward(s, x):
        q, k, v = (y.unflatten(-1, (-1, 6)).transpose(1, 2) for y in (s.q(x), s.k(x), s.v(x)))
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, **options)
        return s.out(y.transpose(1, 2).flatten(2))

    k, v = (nn.Linear(10, 6 * kv_heads) for _ in range(2))
    return Forward(forward, q=nn.Linear(10, 24), k=k, v=v, out=nn.Linear(24, 3))


def test_complex_rotary_heads_are_exchanged():
    assert counts(exact(fused(complex_rotary), X))[4, "block"] == 1


def test_heads_with_angles_of_their_own_are_not_exchanged():
    assert counts(exact(fused(own_rotary), X)) == {(6, "channel"): 4}


def test_alibi_heads_are_not_exchanged():
    assert counts(attention(heads=4, width=3, positions="alibi")) == {(3, "channel"): 8}


def test_learned_biases_move_with_their_heads():
    sym = attention(heads=4, width=3, positions="t5")
    assert counts(sym) == {(3, "channel"): 8, (4, "block"): 1}
    (heads,) = (g for g in sym.permutations if g.kind == "block")
    assert "table.weight" in {sym.axes[p.axis].tensor for p in heads.placements}


def test_heads_with_a_constant_size_of_their_own_are_not_exchanged():
    sizes = torch.arange(1.0, 5.0)[:, None, None]
    sym = exact(fused(lambda x: x * sizes.to(x)), X)
    assert counts(sym) == {(6, "channel"): 8}


# ------------------------------------------------------------ norms of queries and keys
def test_a_gain_that_heads_share_ties_their_channels_but_not_the_heads():
    plain = attention(heads=4, width=6, norm="shared")
    assert counts(plain) == {(6, "channel"): 5, (4, "block"): 1}
    rotary = attention(heads=4, width=6, norm="shared", rotary="half")
    assert counts(rotary) == {(6, "channel"): 4, (4, "block"): 1}


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_one_norm_module_for_all_heads(norm):
    def forward(s, x):
        q, k, v = (y.unflatten(-1, (-1, 6)).transpose(1, 2) for y in (s.q(x), s.k(x), s.v(x)))
        y = F.scaled_dot_product_attention(s.norm_q(q), s.norm_k(k), v)
        return s.out(y.transpose(1, 2).flatten(2))

    layers = {name: nn.Linear(10, 24) for name in "qkv"}
    model = Forward(forward, **layers, norm_q=norm(6), norm_k=norm(6), out=nn.Linear(24, 3))
    assert counts(exact(model, X)) == {(6, "channel"): 5, (4, "block"): 1}


def test_norms_without_a_gain_leave_every_head_its_channels():
    sym = exact(fused(lambda x: F.layer_norm(x, (6,))), X)
    assert counts(sym) == {(6, "channel"): 8, (4, "block"): 1}


# ------------------------------------------------------------ groups of queries
def repeated(k):
    return k.repeat_interleave(2, 1)


def expanded(k):
    b, h, t, d = k.shape
    return k[:, :, None].expand(b, h, 2, t, d).reshape(b, 2 * h, t, d)


@pytest.mark.parametrize("turn", [lambda x: x, complex_rotary], ids=["plain", "rotary"])
@pytest.mark.parametrize("copy", [repeated, expanded, None])
def test_queries_are_exchanged_in_their_group_and_groups_as_wholes(turn, copy):
    if copy is None:
        model = fused(turn, kv_heads=2, enable_gqa=True)
    else:

        def forward(s, x):
            q, k, v = (y.unflatten(-1, (-1, 6)).transpose(1, 2) for y in (s.q(x), s.k(x), s.v(x)))
            scores = turn(q) @ copy(turn(k)).transpose(-2, -1)
            return s.out((scores.softmax(-1) @ copy(v)).transpose(1, 2).flatten(2))

        k, v = (nn.Linear(10, 12) for _ in range(2))
        model = Forward(forward, q=nn.Linear(10, 24), k=k, v=v, out=nn.Linear(24, 3))
    sym = exact(model, X, others=[(LONGER,)])
    channels = 2 if turn is complex_rotary else 4
    assert counts(sym) == {(6, "channel"): channels, (2, "block"): 3}
    assert sym.log10_permutations == pytest.approx(
        channels * torch.tensor(720.0).log10().item() + 3 * torch.tensor(2.0).log10().item()
    )


def test_all_queries_of_one_key_are_exchanged():
    assert counts(attention(heads=4, width=3, kv_heads=1)) == {(3, "channel"): 2, (4, "block"): 1}
    rotary = attention(heads=4, width=4, kv_heads=1, rotary="half")
    assert counts(rotary) == {(4, "channel"): 1, (4, "block"): 1}


def test_a_query_does_not_leave_its_group():
    model = randomise(Attention(10, heads=4, width=3, kv_heads=2).double())
    sym = discover(model, X)
    weights = P.of(model)
    wrong = dict(weights)
    for name, dim in (("q.weight", 0), ("q.bias", 0), ("out.weight", 1)):
        w = weights[name].clone()
        a, b = w.narrow(dim, 3, 3).clone(), w.narrow(dim, 6, 3).clone()
        w.narrow(dim, 3, 3).copy_(b)
        w.narrow(dim, 6, 3).copy_(a)
        wrong[name] = w
    y = P.apply(model, weights, X)
    assert (P.apply(model, wrong, X) - y).norm() > 0.01 * y.norm()
    assert counts(sym)[4, "block"] == 0


# ------------------------------------------------------------ what acts on blocks inside blocks
class Nested(nn.Module):
    """Channels in convolution groups, four of which are a normalisation group."""

    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 2, 1)
        self.g, self.norm = nn.Conv1d(16, 16, 1, groups=8), nn.GroupNorm(2, 16)

    def forward(self, x):
        return self.o(torch.tanh(self.norm(self.g(torch.tanh(self.a(x))))))


NESTED = {
    "grouped": (lambda: Attention(10, heads=4, width=3, kv_heads=2), X),
    "rotary": (lambda: Attention(10, heads=6, width=4, kv_heads=2, rotary="half"), X),
    "one key": (lambda: Attention(10, heads=4, width=3, kv_heads=1), X),
    "three levels": (Nested, torch.randn(2, 3, 7).double()),
}


@pytest.fixture(scope="module", params=NESTED)
def nested(request):
    build, x = NESTED[request.param]
    torch.manual_seed(3)
    model = randomise(build().double())
    return model, discover(model, x), x


def test_blocks_inside_blocks_are_listed_from_inside(nested):
    _, sym, _ = nested
    for index, group in enumerate(sym.permutations):
        for row in group.inner:
            assert len(row) == group.units
            assert max(row) < index
            assert len({sym.permutations[g].units for g in row}) == 1


@pytest.mark.parametrize("by", ["max", "first", "mean", "outgoing"])
def test_canonical_forms_of_blocks_inside_blocks(nested, by):
    model, sym, x = nested
    weights = P.of(model)
    form = canonicalise(weights, sym, permutation=by)
    torch.testing.assert_close(P.apply(model, form, x), P.apply(model, weights, x))
    for seed in range(3):
        other = random_element(weights, sym, torch.Generator().manual_seed(seed))
        again = canonicalise(other, sym, permutation=by)
        for name, w in form.items():
            torch.testing.assert_close(again[name], w, rtol=1e-8, atol=1e-8)


def test_planted_permutations_of_blocks_inside_blocks_are_found(nested):
    model, sym, _ = nested
    weights = P.of(model)
    planted = permute(weights, sym, random_permutations(sym, torch.Generator().manual_seed(4)))
    back = permute(planted, sym, match(planted, weights, sym, restarts=10))
    for name, w in weights.items():
        torch.testing.assert_close(back[name], w)
