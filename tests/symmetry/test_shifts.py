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
    ("combine", "trades"),
    [
        (lambda w, p: w + p, True),
        (lambda w, p: (w + p).contiguous(), True),
        (lambda w, p: 3 * w + p, False),
        (lambda w, p: w - p, False),
        (lambda w, p: torch.add(w, p, alpha=2), False),
        (lambda w, p: torch.relu(w) + p, False),
        (lambda w, p: nn.functional.layer_norm(w, (6,)) + p, False),
    ],
    ids=["sum", "copied", "scaled", "difference", "alpha", "relu", "normalised"],
)
def test_tables_trade_only_where_they_are_summed_as_they_stand(combine, trades):
    sym = found(embedded(combine), TOKENS)
    assert [g.size for g in sym.shifts] == [6] * trades


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
    assert names(found(model, X)) == {("bias", 5)}


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
        attention(key_of=lambda s, y: s.key(y) + s.key(y.flip(-2))),
        attention(value_bias=False),
    ],
    ids=["nonlinear", "turned", "summed", "values without a bias"],
)
def test_it_is_not_where_something_sees_it(model):
    assert ("norm.bias", 6) not in names(found(model, X))
