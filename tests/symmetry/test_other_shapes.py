"""The relation of networks with other widths, depths, tokens and classes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from checked_symmetries import seeded
from test_matching import noisy
from test_relation import trained
from torch import nn

from lightning_bnn import models
from lightning_bnn.datamodules import Digits
from weightsym import Element, discover, relation
from weightsym import params as P
from weightsym.matching.shapes import in_one_shape, increasing


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Stream(nn.Module):
    """Residual blocks between a table of tokens and a head."""

    def __init__(self, width=24, hidden=48, depth=3, tokens=40):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, tokens)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Heads(nn.Module):
    """Attention and hidden units on a stream."""

    def __init__(self, heads=3, size=6, width=12, hidden=40, tokens=30):
        super().__init__()
        self.heads, total = heads, heads * size
        self.embed, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens)
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.q, self.k, self.v = (nn.Linear(width, total, bias=False) for _ in range(3))
        self.o = nn.Linear(total, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        x = self.embed(x)
        y = self.norm(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in
                   (self.q, self.k, self.v))  # fmt: skip
        x = x + self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(x + self.down(self.up(self.norm(x)).relu()))


SIZES = {
    "fewer hidden units": {"hidden": 32},
    "a narrower stream": {"width": 16},
    "fewer layers": {"depth": 2},
    "more tokens": {"tokens": 47},
    "everything": {"width": 20, "hidden": 40, "depth": 2, "tokens": 44},
}
SYM = {}


def known(**sizes):
    key = tuple(sizes.items())
    if key not in SYM:
        SYM[key] = discover(Stream(**sizes).eval(), torch.randint(40, (2, 5)))
    return SYM[key]


def started(seed, **sizes):
    torch.manual_seed(seed)
    return {n: t.clone() for n, t in P.of(Stream(**sizes)).items()}


def child(parent, width=24, hidden=48, depth=3, tokens=40):
    """What is left of a network after units and layers are taken out, and tokens are added."""
    g = seeded(2)
    layers = torch.randperm(3, generator=g)[:depth].sort().values.tolist()
    stream = torch.randperm(24, generator=g)[:width].sort().values
    left = started(5, width=width, hidden=hidden, depth=depth, tokens=tokens)
    for name in ("embed.weight", "head.weight"):
        left[name][:40] = parent[name][:, stream]
    left["head.bias"][:40] = parent["head.bias"]
    for i, j in enumerate(layers):
        units = torch.randperm(48, generator=g)[:hidden].sort().values
        old, new = f"layers.{j}.", f"layers.{i}."
        left[f"{new}up.weight"] = parent[f"{old}up.weight"][units][:, stream]
        left[f"{new}up.bias"] = parent[f"{old}up.bias"][units]
        left[f"{new}down.weight"] = parent[f"{old}down.weight"][stream][:, units]
        left[f"{new}down.bias"] = parent[f"{old}down.bias"][stream]
    return left, layers


@pytest.mark.parametrize(
    "name", [n if n == "everything" else pytest.param(n, marks=pytest.mark.e2e) for n in SIZES]
)
def test_parts_of_a_network_are_found_and_no_symmetry_hides_them(name):
    sizes, whole = SIZES[name], known()
    parent, sym = started(0), known(**sizes)
    left, layers = child(parent, **sizes)
    left = noisy(left, 0.05)
    hidden = sizes.get("hidden", 48)
    for moved in (left, Element.random(sym, seeded(1))(left)):
        both = relation(moved, parent, sym, whole), relation(parent, moved, whole, sym)
        for found in both:
            assert found.verdict == "parts of it"
            assert found.p_robust < 1e-12
            counted = {g.name: g for g in found.groups if "up" in g.name}
            assert {*counted} == {f"layers.{j}.up.weight" for j in layers}
            assert all(g.units == hidden for g in counted.values())
            assert min(g.agreeing for g in counted.values()) >= 0.6 * hidden
            assert {g.among for g in counted.values()} == {48 if hidden < 48 else None}
        if moved is left:
            assert both[0].p_exact < 1e-30


NESTED = [
    {},
    {"hidden": 44},
    {"hidden": 40, "width": 20},
    {"hidden": 36, "width": 20, "depth": 2},
    {"hidden": 28, "width": 16, "depth": 2, "tokens": 44},
]


def perceptron(seed, hidden):
    """A network that was trained on the digits, and its symmetries."""
    source = Digits()
    inputs, labels = source.load().train
    inputs = source.normalise(inputs).flatten(1)
    torch.manual_seed(seed)
    network = models.mlp(64, [hidden, hidden], 10)
    return trained(network, (inputs, labels), seed), discover(network, inputs[:2])


@pytest.mark.e2e  # 10 pairs each
@pytest.mark.parametrize("kind", ["streams", "trained perceptrons"])
def test_independent_networks_of_other_shapes_are_not_related(kind):
    if kind == "streams":
        networks = [(started(20 + k, **size), known(**size)) for k, size in enumerate(NESTED)]
    else:
        networks = [perceptron(k, hidden) for k, hidden in enumerate(range(72, 52, -4))]
    pairs = itertools.combinations(networks, 2)
    every = [relation(a, b, sym, sym_b) for (a, sym), (b, sym_b) in pairs]
    assert [found.verdict for found in every] == ["independent"] * 10
    assert min(min(f.p_exact, f.p_robust, f.p_close) for f in every) > 1e-3
    assert max((g.agreeing or 0) / g.units for f in every for g in f.groups) < 0.12


def test_groups_that_share_nothing_are_named():
    parent, other, sym = started(0), started(1), known()
    left = {n: other[n] if n.startswith("layers.1.") else t for n, t in parent.items()}
    found = relation(Element.random(sym, seeded(1))(left), parent, sym)
    assert found.verdict == "parts of it"
    assert [g.name for g in found.groups if g.is_apart] == ["layers.1.up.weight"]


def test_what_the_smaller_network_lacks_is_zero():
    """A pruned network among zeros is the same function, with fewer hidden units and layers."""
    sizes = {"hidden": 30, "depth": 2}
    small, large = started(0, **sizes), started(1)
    a, b, sym = in_one_shape(small, large, known(**sizes), known())
    assert sym is known()
    tokens = torch.randint(40, (3, 5), generator=seeded())
    outputs = [P.apply(Stream(), dict(w), tokens) for w in (a, b)]
    torch.testing.assert_close(outputs[0], P.apply(Stream(**sizes), small, tokens))
    torch.testing.assert_close(outputs[1], P.apply(Stream(), large, tokens))


def test_rows_get_increasing_columns_with_the_largest_sum():
    generator = np.random.default_rng(0)
    for rows, columns in ((1, 1), (2, 5), (3, 6), (4, 4)):
        scores = generator.normal(size=(rows, columns))
        every = itertools.combinations(range(columns), rows)
        best = max(every, key=lambda c: sum(scores[i, k] for i, k in enumerate(c)))
        assert increasing(scores) == list(best)


FEWER = [{"heads": 2}, {"size": 4}, {"heads": 2, "size": 4}]


@pytest.fixture(scope="module")
def with_heads():
    """A network with three heads of six channels, and its symmetries."""
    torch.manual_seed(0)
    net = Heads().eval()
    return net, discover(net, torch.randint(30, (2, 5)))


@pytest.mark.parametrize("sizes", FEWER)
def test_heads_of_a_smaller_network_stay_apart_among_zeros(sizes, with_heads):
    net, whole = with_heads
    small, tokens = Heads(**sizes).eval(), torch.randint(30, (3, 5), generator=seeded())
    a, _, _ = in_one_shape(P.of(small), P.of(net), discover(small, tokens), whole)
    torch.testing.assert_close(P.apply(net, dict(a), tokens), small(tokens))


@pytest.mark.e2e
@pytest.mark.parametrize("sizes", FEWER)
def test_a_child_with_fewer_or_smaller_heads_is_found(sizes, with_heads):
    net, whole = with_heads
    torch.manual_seed(5)  # not that of the parent
    parent, small = P.of(net), Heads(**sizes).eval()
    heads, size = sizes.get("heads", 3), sizes.get("size", 6)
    left = dict(parent)
    for name in ("q.weight", "k.weight", "v.weight"):
        left[name] = parent[name].unflatten(0, (3, 6))[-heads:, -size:].flatten(0, 1)
    left["o.weight"] = parent["o.weight"].unflatten(1, (3, 6))[:, -heads:, -size:].flatten(1)
    sym = discover(small, torch.randint(30, (2, 5)))
    moved = Element.random(sym, seeded(1))(noisy(left, 0.05))
    found = relation(moved, parent, sym, whole)
    assert (found.verdict, found.p_robust < 1e-12) == ("parts of it", True)
    assert relation(P.of(small), parent, sym, whole).verdict == "independent"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"width": 28, "hidden": 32}, "at least as many units as the other one everywhere"),
        ({"width": 16, "depth": 4}, "only one has 'layers.3"),
    ],
)
def test_networks_of_which_each_has_more_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        relation(started(0), started(1, **sizes), known(), known(**sizes))


@pytest.mark.bad_input
def test_networks_without_equal_blocks_are_refused():
    layers = [(nn.Linear(n, n - 1), nn.Tanh()) for n in (9, 8, 7)]
    nets = [nn.Sequential(*itertools.chain(*layers[:n])) for n in (2, 3)]
    syms = [discover(net, torch.randn(4, 9)) for net in nets]
    narrow, deep = map(P.of, nets)
    with pytest.raises(ValueError, match="more blocks of one kind, and nothing else: only one has"):
        relation(narrow, {f"a{n}": t for n, t in deep.items()}, syms[0], renamed(syms[1]))


def renamed(sym):
    """Symmetries of a network whose tensors have other names."""
    return replace(sym, shapes={f"a{n}": shape for n, shape in sym.shapes.items()})
