"""Shifts: which biases and tables take up what others gain, and which must not."""

import pytest
import torch
from cases import Forward, randomise
from torch import nn

from lightning_bnn.symmetry import discover, verify

TOKENS = torch.randint(9, (3, 4), generator=torch.Generator().manual_seed(0))
X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0)).double()


def found(model, *example):
    """What is found, which holds on other inputs, and of which nothing was refuted."""
    torch.manual_seed(0)
    model = randomise(model.double()).eval()
    sym = discover(model, *example)
    assert not any("refuted" in f.reason for f in sym.frozen)
    others = [x.flip(0)[:2] for x in example]
    assert verify(model, sym, *others) < 1e-10
    return sym


def names(sym):
    return {(g.name, g.size) for g in sym.shifts}


# ------------------------------------------------------------ tables
def embedded(combine):
    """Words and positions, which a norm without a bias reads after they were combined."""

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1])
        x = combine(self.words(tokens), self.places(at))
        return self.last(torch.tanh(self.norm(x)))

    return Forward(
        forward,
        words=nn.Embedding(9, 6),
        places=nn.Embedding(5, 6),
        norm=nn.LayerNorm(6, bias=False),
        last=nn.Linear(6, 2),
    )


@pytest.mark.parametrize(
    ("combine", "exponents"),
    [
        (lambda w, p: w + p, (1, -1)),
        (lambda w, p: (w + p).contiguous(), (1, -1)),
        (lambda w, p: 3 * w + p, (1, -3)),
        (lambda w, p: w - p, (1, 1)),
        (lambda w, p: torch.add(w, p, alpha=2), (1, -2)),
        (lambda w, p: w + 2 * p, (1, -2)),
        (lambda w, p: 3 * w + 2 * p, None),  # no whole multiple
        (lambda w, p: w + 0.5 * p, None),
        (lambda w, p: torch.relu(w) + p, None),
        (lambda w, p: nn.functional.layer_norm(w, (6,)) + p, None),
    ],
    ids=[
        "sum",
        "copied",
        "scaled",
        "difference",
        "alpha",
        "twice",
        "3 to 2",
        "half",
        "relu",
        "normalised",
    ],
)
def test_tables_trade_where_whole_multiples_of_them_are_summed(combine, exponents):
    sym = found(embedded(combine), TOKENS)
    assert [g.size for g in sym.shifts] == [6] * (exponents is not None)
    assert [tuple(p.exponent for p in g.placements) for g in sym.shifts] == [exponents] * len(
        sym.shifts
    )


def test_a_tied_table_writes_logits_and_is_not_shifted():
    def forward(self, tokens, tied=True):
        x = torch.tanh(self.first(self.words(tokens)))
        return nn.functional.linear(self.norm(x), self.words.weight if tied else self.last)

    parts = {"words": nn.Embedding(9, 6), "first": nn.Linear(6, 6), "norm": nn.LayerNorm(6)}
    assert ("words.weight", 6) not in names(found(Forward(forward, **parts), TOKENS))
    untied = Forward(lambda s, t: forward(s, t, tied=False), **parts)
    untied.last = nn.Parameter(torch.randn(9, 6))
    assert ("words.weight", 6) in names(found(untied, TOKENS))


@pytest.mark.parametrize("tied", [True, False])
def test_of_three_tables_each_but_one_gives_a_shift(tied):
    """A tied one gives none: types trade with positions, as in BERT."""

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1])
        x = self.words(tokens) + self.types(tokens % 2) + self.places(at)
        return nn.functional.linear(torch.tanh(self.norm(x)), self.words.weight if tied else self.w)

    tables = {n: nn.Embedding(k, 6) for n, k in (("words", 9), ("types", 2), ("places", 5))}
    model = Forward(forward, norm=nn.LayerNorm(6, bias=False), **tables)
    model.w = nn.Parameter(torch.randn(2, 6))
    sym = found(model, TOKENS)
    assert [g.size for g in sym.shifts] == [6] * (1 if tied else 2)
    moved = {sym.axes[p.axis].tensor for g in sym.shifts for p in g.placements}
    assert ("words.weight" in moved) is not tied


# ------------------------------------------------------------ vectors that are added by hand
def by_hand(read, **parts):
    """A layer norm written by hand, and what reads it."""

    def forward(self, x):
        x = self.first(x)
        x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        return read(self, y * self.gain + self.bias)

    model = Forward(forward, first=nn.Linear(6, 5), last=nn.Linear(5, 2), **parts)
    model.gain, model.bias = (nn.Parameter(torch.randn(5)) for _ in range(2))
    return model


def test_the_bias_of_a_norm_by_hand_is_taken_up():
    assert names(found(by_hand(lambda s, y: s.last(y)), X)) == {("bias", 5)}


@pytest.mark.parametrize(
    "read",
    [
        lambda s, y: s.last(torch.tanh(y)),
        lambda s, y: s.last(y) * s.bias.sum(),
        lambda s, y: s.last(y * s.bias),
        lambda s, y: nn.functional.linear(y, s.last.weight),
    ],
    ids=["nonlinear", "read elsewhere", "a gain, too", "no bias behind it"],
)
def test_a_vector_that_something_else_sees_is_not_shifted(read):
    assert ("bias", 5) not in names(found(by_hand(read), X))


def test_what_a_vector_is_added_to_is_not_forgotten():
    model = Forward(
        lambda s, x: s.last(s.first(x) + s.bias), first=nn.Linear(6, 5), last=nn.Linear(5, 2)
    )
    model.bias = nn.Parameter(torch.randn(5))
    assert names(found(model, X)) == {("first.bias", 5), ("bias", 5)}


# ------------------------------------------------------------ keys without a bias
def attention(key=lambda k: k, value_bias=True, key_of=lambda s, y: s.key(y)):
    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.query(y), key(key_of(self, y)), self.value(y)
        return self.out((q @ k.mT).softmax(-1) @ v)

    return Forward(
        forward,
        norm=nn.LayerNorm(6),
        query=nn.Linear(6, 4),
        key=nn.Linear(6, 4, bias=False),
        value=nn.Linear(6, 3, bias=value_bias),
        out=nn.Linear(3, 2),
    )


def test_a_norm_before_keys_without_a_bias_is_shifted():
    """What the keys of all tokens gain is forgotten; queries and values take the rest up."""
    sym = found(attention(), X)
    assert names(sym) == {("norm.bias", 6), ("value.bias", 3)}
    (norm,) = (g for g in sym.shifts if g.name == "norm.bias")
    assert {r.bias for r in norm.readers} == {"query.bias", "value.bias"}


@pytest.mark.parametrize(
    "model",
    [
        attention(key=torch.tanh),
        attention(key=lambda k: k * torch.arange(1.0, 5)[:, None]),
        attention(key_of=lambda s, y: s.key(y) * y[..., :4]),
        attention(value_bias=False),
    ],
    ids=["nonlinear", "turned", "gated", "values without a bias"],
)
def test_it_is_not_where_something_sees_it(model):
    assert ("norm.bias", 6) not in names(found(model, X))


def test_keys_of_two_tokens_that_are_summed_forget_it_as_well():
    model = attention(key_of=lambda s, y: s.key(y) + s.key(y.flip(-2)))
    assert ("norm.bias", 6) in names(found(model, X))


# ------------------------------------------------------------ sums of biases
def branches(combine, x=lambda x: x[..., :3], read=torch.tanh):
    """Two layers whose outputs are combined before something nonlinear reads them."""

    def forward(self, inputs):
        return self.last(read(combine(self.a(inputs), self.b(x(inputs)))))

    parts = {"a": nn.Linear(6, 5), "b": nn.Linear(3, 5), "last": nn.Linear(5, 2)}
    return Forward(forward, **parts)


@pytest.mark.parametrize(
    ("combine", "trades"),
    [
        (lambda a, b: a + b, (1, -1)),
        (lambda a, b: a - b, (1, 1)),
        (lambda a, b: 2 * a + b, (1, -2)),
        (lambda a, b: a * b, None),
        (lambda a, b: a + b.relu(), None),
        (lambda a, b: a + b * a, None),
        (lambda a, b: torch.cat([a[..., :2] + b[..., :2], a[..., 2:] * b[..., 2:]], -1), (1, -1)),
    ],
    ids=["sum", "difference", "twice", "product", "relu", "gate", "a part"],
)
def test_biases_of_one_sum_trade(combine, trades):
    sym = found(branches(combine), X)
    found_groups = [(g.name, tuple(p.exponent for p in g.placements)) for g in sym.shifts]
    assert found_groups == ([("a.bias", trades)] if trades else [])


def test_what_a_sum_of_biases_gains_is_taken_up():
    sym = found(branches(lambda a, b: a + b, read=lambda y: y), X)
    assert [(g.name, [r.bias for r in g.readers]) for g in sym.shifts] == [
        ("a.bias", ["last.bias"]),
        ("b.bias", ["last.bias"]),
    ]


def test_the_stream_of_post_norm_blocks():
    """What a norm gains, the layer behind takes up, and the bias of the next sum gives it back."""

    def forward(self, x):
        h = self.first(self.enter(x))
        h = self.second(h + self.down(torch.tanh(self.up(h))))
        return self.out(h)

    layers = {n: nn.Linear(*k) for n, k in (("enter", (6, 5)), ("up", (5, 7)), ("down", (7, 5)))}
    norms = {n: nn.LayerNorm(5) for n in ("first", "second")}
    sym = found(Forward(forward, **layers, **norms, out=nn.Linear(5, 2)), X)
    first, second = sym.shifts
    assert [sym.axes[p.axis].tensor for p in first.placements] == ["first.bias", "down.bias"]
    assert [r.bias for r in first.readers] == ["up.bias"]
    assert (second.name, [r.bias for r in second.readers]) == ("second.bias", ["out.bias"])


@pytest.mark.parametrize(
    ("kind", "traded"), [(nn.LSTM, 4 * 3), (nn.RNN, 3), (nn.GRU, 2 * 3)], ids=["LSTM", "RNN", "GRU"]
)
def test_both_biases_of_a_gate_trade(kind, traded):
    """But for the candidate of a GRU, where another gate is between them."""
    model = Forward(
        lambda s, x: s.last(s.cells(s.first(x))[0]),
        first=nn.Linear(6, 4),
        cells=kind(4, 3, batch_first=True),
        last=nn.Linear(3, 2),
    )
    sym = found(model, X)
    sizes = {g.name: g.size for g in sym.shifts}
    assert sizes == {"first.bias": 4, "cells.bias_ih_l0": traded}


def test_single_rows_of_a_table_trade_with_what_they_are_added_to():
    """A class token with its position, the bias of patches with all others."""

    def forward(self, x):
        token = self.token.expand(len(x), 1, 5)
        h = torch.cat([token, self.patches(x)], 1) + self.places
        return self.last(torch.tanh(nn.functional.layer_norm(h, (5,))))

    model = Forward(forward, patches=nn.Linear(6, 5), last=nn.Linear(5, 2))
    model.token, model.places = nn.Parameter(torch.randn(1, 1, 5)), nn.Parameter(torch.randn(5, 5))
    sym = found(model, X)
    rows = {g.name: g.placements[1].positions for g in sym.shifts}
    assert {name: at.shape for name, at in rows.items()} == {
        "token": (5, 1),
        "patches.bias": (5, 4),
    }
    assert rows["token"].max() < 5 <= rows["patches.bias"].min()


# ------------------------------------------------------------ biases that are made of parts
def test_parts_of_a_bias_are_shifted_each_by_itself():
    """As in BEiT, whose keys have none."""

    def forward(self, x):
        bias = torch.cat([self.query, torch.zeros_like(self.value), self.value])
        q, k, v = nn.functional.linear(x, self.all, bias).chunk(3, -1)
        return self.out((q @ k.mT).softmax(-1) @ v)

    model = Forward(forward, out=nn.Linear(4, 6))
    model.all = nn.Parameter(torch.randn(12, 6))
    model.query, model.value = (nn.Parameter(torch.randn(4)) for _ in range(2))
    assert names(found(model, X)) == {("value", 4)}


def test_a_part_of_a_bias_that_something_else_reads_is_not():
    def forward(self, x):
        return self.out(nn.functional.linear(x, self.w, torch.cat([self.b, self.c])) * self.c.sum())

    model = Forward(forward, out=nn.Linear(4, 6))
    model.w, model.b, model.c = (nn.Parameter(torch.randn(*n)) for n in ((4, 6), (2,), (2,)))
    assert "c" not in {g.name for g in found(model, X).shifts}


# ------------------------------------------------------------ what is forgotten
@pytest.mark.parametrize(
    ("forget", "size"),
    [
        (lambda y: y.softmax(1), 4),
        (lambda y: y - y.mean(1, keepdim=True), 4),
        (lambda y: nn.functional.instance_norm(y.mT).mT, 4),
        (lambda y: y - y.amax(1, keepdim=True), 4),
        (lambda y: y.var(1, keepdim=True), 4),
        (lambda y: y.softmax(-1), 1),  # and what a layer in front of it gains in all rows
        (lambda y: y - y.mean(), 0),
        (lambda y: y - y[:, :1].sigmoid(), 0),
        (lambda y: y.cumsum(1).softmax(1), 0),
    ],
)
def test_what_all_tokens_gain(forget, size):
    model = Forward(
        lambda s, x: s.last(torch.tanh(forget(s.first(x)))),
        first=nn.Linear(6, 4),
        last=nn.Linear(4, 2),
    )
    assert sum(g.size for g in found(model, X).shifts if g.name == "first.bias") == size
