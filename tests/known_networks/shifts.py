"""Biases and tables that take up what others gain, and those that must not."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from known_networks.table import add, linear, network, parameter

TOKENS = torch.randint(9, (3, 4), generator=torch.Generator().manual_seed(0))
tables = partial(network, inputs=[TOKENS], others=[[TOKENS.flip(0)[:2]]])
rows = partial(network, inputs=(3, 4, 6), others=[(2, 4, 6)])


def table(number):
    return lambda: nn.Embedding(number, 6)


# ------------------------------------------------------------ tables
BOTH = {"words.weight": 6}
COMBINED = {
    "a sum": (lambda w, p: w + p, BOTH),
    "three words and two positions": (lambda w, p: w + w + w + p + p, {}),  # no whole multiple
}
for name, (combine, shifts) in COMBINED.items():

    @tables(name=f"tables, {name}", shifts=shifts, words=table(9), places=table(5), last=(6, 2),
            norm=lambda: nn.LayerNorm(6, bias=False))  # fmt: skip
    def combined(s, tokens, combine=combine):
        x = combine(s.words(tokens), s.places(torch.arange(tokens.shape[1])))
        return s.last(torch.tanh(s.norm(x)))


@tables(name="three tables, one tied", shifts={"types.weight": 6}, words=table(9), types=table(2),
        places=table(5), norm=lambda: nn.LayerNorm(6, bias=False))  # fmt: skip
def of_three(s, tokens):
    """Types trade with positions, as in BERT."""
    at = torch.arange(tokens.shape[1])
    x = s.norm(s.words(tokens) + s.types(tokens % 2) + s.places(at))
    return F.linear(torch.tanh(x), s.words.weight)


# ------------------------------------------------------------ keys without a bias
def attention(s, x):
    y = s.norm(x)
    return s.out((s.query(y) @ s.key(y).mT).softmax(-1) @ s.value(y))


keys = partial(rows, norm=lambda: nn.LayerNorm(6), query=(6, 4), key=linear(6, 4), value=(6, 3),
               out=(3, 2))  # fmt: skip
# what the keys of all tokens gain is forgotten; queries and values take the rest up
keys(name="a norm before keys", shifts={"norm.bias": 6, "value.bias": 3})(attention)
keys(name="a norm before values without a bias", shifts={}, value=linear(6, 3))(attention)


# ------------------------------------------------------------ sums of branches
@rows(name="biases of a part", shifts={"a.bias": 2}, a=(6, 5), b=(6, 5), last=(5, 2))
def summed(s, x):
    a, b = s.a(x), s.b(x)
    both = torch.cat([a[..., :2] + b[..., :2], a[..., 2:] * b[..., 2:]], -1)
    return s.last(torch.tanh(both))


cells = partial(
    network, first=(5, 6), norm=lambda: nn.LayerNorm(6), second=(6, 4), last=(4, 2),
    token=parameter(1, 1, 6), places=parameter(1, 5, 6), inputs=(3, 4, 5), others=[(1, 4, 5)],
)  # fmt: skip


def behind_rows(s, x):
    h = torch.cat([s.token.expand(len(x), -1, -1), s.first(x)], 1) + s.places
    return s.last(torch.tanh(s.second(s.norm(h))))


@cells(shifts={})
def a_norm_that_is_read_twice(s, x):
    """At two places, by layers of their own, one of them without a bias."""
    return behind_rows(s, x) + F.linear(s.norm(s.places), s.second.weight).sum()


# ------------------------------------------------------------ what is forgotten
FORGET = {
    "the mean of tokens": lambda y: y - y.mean(1, keepdim=True),
    "a variance": lambda y: y.var(1, keepdim=True),
}
for name, forget in FORGET.items():
    rows(name=f"forgotten by {name}", first=(6, 4), last=(4, 2), shifts={"first.bias": 4})(
        lambda s, x, f=forget: s.last(torch.tanh(f(s.first(x))))
    )


def convolutions(name, second, **facts):
    add(name, lambda: nn.Sequential(nn.Conv1d(6, 3, 1), second()), (2, 6, 5), others=[(3, 6, 9)],
        **facts)  # fmt: skip


MATRICES = {"matrices": "general 3", "shifts": {"0.bias": 3}}
convolutions("two convolutions", lambda: nn.Conv1d(3, 4, 3), **MATRICES)
convolutions("a padded convolution", lambda: nn.Conv1d(3, 4, 3, padding=1), shifts={},
             matrices="general 3")  # fmt: skip
grouped = partial(network, inputs=(2, 10, 5))
grouped(name="grouped convolutions", matrices="general 3*2",
        a=partial(nn.Conv1d, 10, 6, 1, groups=2), b=partial(nn.Conv1d, 6, 4, 1, groups=2),
        )(lambda s, x: s.b(s.a(x)))  # fmt: skip
grouped(name="a flattened convolution", a=partial(nn.Conv1d, 10, 3, 1), b=(6, 4),
        matrices="general 3")(
    lambda s, x: s.b(F.avg_pool1d(s.a(x), 2).flatten(1))
)  # fmt: skip
network(name="matrices ended by a batch norm", matrices="", a=(6, 3), b=(3, 4), inputs=(4, 6),
        norm=lambda: nn.BatchNorm1d(3))(lambda s, x: s.b(s.norm(s.a(x))))  # fmt: skip
computed = partial(network, inputs=(3, 5), first=(3, 4))


@computed(maker=(2, 20), last=(5, 2))
def a_weight_made_by_the_input(s, x):
    return s.last(F.linear(s.first(x[:, 2:]), s.maker(x[0, :2]).view(5, 4)))


@computed(middle=(4, 4), last=(4, 2))
def a_symmetric_weight(s, x):
    weight = s.middle.weight.triu() + s.middle.weight.triu(1).T
    return s.last(F.linear(s.first(x[:, 2:]), weight, s.middle.bias))


for groups, counts in ((4, ("4", 4, 4)), (2, ("2*2 2b", 4, 2))):

    @network(*counts, name=f"a bias before {groups} groups of channels", inputs=(25, 3, 7),
             shifts={"a.bias": groups}, dead={"a.bias": groups}, dimension=4 + groups,
             a=lambda: nn.Conv1d(3, 4, 2), n=lambda g=groups: nn.GroupNorm(g, 4, eps=0.1),
             o=(4, 3))  # fmt: skip
    def groups_of_channels(s, x):
        return s.o(F.leaky_relu(s.n(s.a(x))).mean(-1))
