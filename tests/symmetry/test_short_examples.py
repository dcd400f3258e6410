"""Short examples are read as longer ones, and what an example does not show is named."""

import pytest
import torch
from cases import Forward
from checked_symmetries import units
from modern_networks import attention
from torch import nn

from weightsym import discover, verify

lin = nn.Linear


# ------------------------------------------------------------ a single step
def looped(s, x):
    h = x.new_zeros(len(x), 5)
    for step in x.unbind(1):
        h = torch.relu(s.i(step) + s.h(h))
    return s.o(h)


def called_again(s, x):
    h = None
    for step in x.unbind(1):
        h = s.r(step, h)
    return s.o(h)


def recurrent(s, x):
    return s.o(s.r(x)[0])


def summed(s, x):
    h = s.i(x[:, 0])
    for k in range(1, x.shape[1]):
        h = torch.tanh(h + s.i(x[:, k]))
    return s.o(h)


def largest(s, x):
    h = s.i(x[:, 0])
    for k in range(1, x.shape[1]):
        h = torch.maximum(0.9 * h, s.i(x[:, k]))
    return s.o(h)


def pyramid(s, x):
    h = s.i(x)
    while h.shape[1] > 1:
        h = torch.tanh(h[:, 1:] + h[:, :-1])
    return s.o(h[:, 0])


def of_rows(function, before=torch.relu):
    return Forward(lambda s, x: s.o(function(before(s.i(x)))), i=lin(3, 5), o=lin(5, 2))


def heard(s, signal):
    return s.attention(s.frames(signal[:, None]).mT)


def listening(forward, rotary):
    layers = {"frames": nn.Conv1d(1, 10, 8, 8), "attention": attention(width=4, rotary=rotary)()}
    return Forward(forward, **layers)


ROWS, TOKENS, SIGNALS = ((3, 4, 3), 1), ((3, 5, 10), 1), ((3, 40), 8)
SINGLE_STEPS = {
    "loop": (Forward(looped, i=lin(3, 5), h=lin(5, 5), o=lin(5, 2)), *ROWS),
    "cell": (Forward(called_again, r=nn.GRUCell(3, 5), o=lin(5, 2)), *ROWS),
    "GRU": (Forward(recurrent, r=nn.GRU(3, 5, 2, batch_first=True), o=lin(5, 2)), *ROWS),
    "RNN": (
        Forward(recurrent, r=nn.RNN(3, 5, nonlinearity="relu", batch_first=True), o=lin(5, 2)),
        *ROWS,
    ),
    "LSTM": (
        Forward(recurrent, r=nn.LSTM(3, 5, proj_size=4, batch_first=True), o=lin(4, 2)),
        *ROWS,
    ),
    "sum of steps": (Forward(summed, i=lin(3, 5), o=lin(5, 2)), *ROWS),
    "largest of steps": (Forward(largest, i=lin(3, 5), o=lin(5, 2)), *ROWS),
    "pyramid": (Forward(pyramid, i=lin(3, 5), o=lin(5, 2)), *ROWS),
    "cumprod": (of_rows(lambda h: h.cumprod(1)), *ROWS),
    "logcumsumexp": (of_rows(lambda h: h.logcumsumexp(1)), *ROWS),
    "median of signs": (of_rows(lambda h: h.median(1)[0], torch.tanh), *ROWS),
    "sorted": (of_rows(lambda h: h.sort(1)[0], lambda h: h), *ROWS),
    "quantile": (of_rows(lambda h: h.quantile(0.3, 1), lambda h: h), *ROWS),
    # at position 0 nothing is rotated, and the softmax of one number is one
    "rotary": (attention(width=4, rotary="half")(), *TOKENS),
    "interleaved": (attention(width=4, rotary="interleaved")(), *TOKENS),
    "attention": (attention(width=4)(), *TOKENS),
    "rotary frames": (listening(heard, "half"), *SIGNALS),
}


def sizes(sym):
    matrices = [(g.kind, g.size) for g in sym.linear]
    return units(sym), matrices, sym.scaling_dof, sym.sign_dof, sym.dimension, sym.unchecked


@pytest.mark.parametrize("name", SINGLE_STEPS)
def test_one_step_says_what_several_say(name):
    model, shape, short = SINGLE_STEPS[name]
    model, longer = model.double().eval(), torch.randn(shape).double()
    sym = discover(model, longer[:2, :short])
    assert sizes(sym) == sizes(discover(model, longer))
    assert (sym.unchecked, sym.frozen) == ("", ())
    assert float(verify(model, sym, longer)) < 1e-9


# ------------------------------------------------------------ what is not seen
class Optional(Forward):
    """One of two heads, norms or conditions, by a name."""

    def forward(self, *x, **named):
        return self.function(self, *x, **named)


def by_task(s, x, task="a"):
    return s.heads[task](torch.relu(s.first(x)))


def norm_by_task(s, x, task="a"):
    return s.last(torch.relu(s.norms[task](s.first(x))))


def with_condition(s, x, cond=None):
    h = s.first(x)
    return s.last(torch.relu(h if cond is None else h + s.cond(cond)))


def heads():
    return Optional(by_task, first=lin(5, 6), heads=nn.ModuleDict({"a": lin(6, 3), "b": lin(6, 2)}))


def norms(affine):
    parts = nn.ModuleDict({k: nn.BatchNorm1d(6, affine=affine) for k in "ab"})
    return Optional(norm_by_task, first=lin(5, 6), norms=parts, last=lin(6, 2))


def conditional():
    return Optional(with_condition, first=lin(5, 6), cond=lin(4, 6), last=lin(6, 2))


def auxiliary(s, x):
    h = torch.relu(s.a(x))
    return (s.b(h), s.c(h)) if s.training else s.b(h)


def gated(s, x, gate):
    return s.c(torch.relu(s.a(x))) + gate * s.d(torch.tanh(s.b(x)))


def differing(s, x, y):
    return (s.b(torch.relu(s.a(x))) - s.b(torch.relu(s.a(y)))).abs()


def towers(s, x):
    def tower(x):
        for k in range(60):
            x = x + torch.tanh(getattr(s, f"l{k}")(x))
        return x

    return s.o(tower(x) * tower(x).flip(0))


def language(s, tokens, mask):
    x = s.embed(tokens)
    scores = s.query(x) @ s.key(x).mT + torch.where(mask > 0, 0.0, -1e9)[:, None]
    return s.last(scores.softmax(-1) @ s.value(x))


def all_heads(s, x):
    return [s.net(x, task) for task in "ab"]


X, KEYS, MASK = torch.randn(4, 5), torch.randn(2, 2, 10), torch.ones(2, 1).long()
STATISTICS = "norms.b.running_mean, norms.b.running_var"
GATE = {"a": lin(5, 8), "b": lin(5, 3), "c": lin(8, 4), "d": lin(3, 4)}
CELL = {"r": nn.GRUCell(5, 5), "o": lin(5, 2)}
TOWERS = {"o": lin(3, 2), **{f"l{k}": lin(3, 3) for k in range(60)}}
WORDS = {n: lin(6, 4) for n in ("query", "key", "value")}
WORDS |= {"embed": nn.Embedding(9, 6), "last": lin(4, 2)}
UNSEEN = {  # a network, its inputs, and what is said
    "a head": (heads(), [X], "depends on heads.b.weight, heads.b.bias at"),
    "all heads": (Forward(all_heads, net=heads()), [X], ""),
    "a norm": (norms(True), [X], f"norms.b.weight, norms.b.bias, {STATISTICS} at"),
    "a norm without gains": (norms(False), [X], f"depends on {STATISTICS}"),
    "a condition": (conditional(), [X], "depends on cond.weight, cond.bias at"),
    "a condition that is given": (conditional(), [X, torch.randn(4, 4)], ""),
    "what only training reads": (
        Forward(auxiliary, a=lin(5, 6), b=lin(6, 2), c=lin(6, 3)), [X], "",
    ),
    "a state of zeros": (
        Forward(lambda s, x: s.o(s.r(x)), **CELL), [X], "r.weight_hh at this example",
    ),
    "a state that is given": (Forward(lambda s, x, h: s.o(s.r(x, h)), **CELL), [X, X], ""),
    "a closed gate": (
        Forward(gated, **GATE), [X, torch.zeros(4, 1)], "output changes with b.bias, b.weight, d.",
    ),
    "an open gate": (Forward(gated, **GATE), [X, torch.ones(4, 1)], ""),
    "biases that cancel": (Forward(differing, a=lin(5, 8), b=lin(8, 4)), [X, X.flip(0)], ""),
    "what is computed twice": (Forward(towers, **TOWERS), [X[:, :3]], ""),
    "one key": (
        Forward(lambda s, x: s.net(x[:, :1]), net=attention(width=4)()), [KEYS], "two tokens",
    ),
    "one length": (
        listening(lambda s, x: heard(s, x.reshape(len(x), 8)), "half"), [torch.randn(2, 8)],
        "two tokens",
    ),
    "two words": (Forward(language, **WORDS), [torch.tensor([[8], [0]]), MASK], ""),
    "one word twice": (Forward(language, **WORDS), [torch.tensor([[1], [1]]), MASK], "two tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_what_an_example_does_not_show_is_named(name, caplog):
    torch.manual_seed(0)
    model, inputs, text = UNSEEN[name]
    sym = discover(model.double(), *inputs)
    assert text in sym.unchecked
    assert bool(sym.unchecked) == bool(text) == ("not everything was checked" in caplog.text)
    assert name != "two words" or ("general", 4) in [(g.kind, g.size) for g in sym.linear]


def test_what_is_named_may_be_wrong():
    net, x = heads().double().eval(), X.double()
    sym = discover(net, x)
    assert verify(net, sym, x) < 1e-12
    assert verify(net, sym, x, task="b") > 1e-3
