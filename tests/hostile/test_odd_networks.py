"""Networks that read well and are not what they seem: nothing found in them is silently wrong."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from checked_symmetries import moved_at_random
from torch import nn

from weightsym import (
    UnsupportedModel,
    canonicalise,
    discover,
    flip,
    min_mass,
    permute,
    random_permutations,
    random_scales,
    random_signs,
    rescale,
    verify,
)
from weightsym import params as P


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def lin(a, b, **options):
    return nn.Linear(a, b, **options, dtype=torch.float64)


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def three_layers(forward, persistent=True, **buffers):
    net = Forward(forward, a=lin(4, 8), b=lin(8, 8), c=lin(8, 3))
    for name, tensor in buffers.items():
        net.register_buffer(name, tensor.double(), persistent)
    return net


# ---------------------------------------------------------------------- what is written
def recurrent(s, x):
    h = torch.tanh(s.a(x) + s.b(s.h))
    s.h = h.mean(0, keepdim=True).detach()
    return s.c(h)


def writes(computed, statistic):
    """A forward that computes with a buffer, and in training averages a statistic in it."""

    def forward(s, x):
        h = torch.relu(s.a(x))
        y = computed(s, h)
        if s.training:
            s.t.mul_(0.9).add_(0.1 * statistic(h).detach())
        return y

    return forward


COVARIANCE = writes(lambda s, h: s.c(h @ s.t), lambda h: h.T @ h / len(h))
OTHER_LAYER = writes(lambda s, h: s.c(torch.relu(s.b(h)) - s.t), lambda h: h.mean(0))
STEP_BEFORE = writes(lambda s, h: s.c(h / s.t), lambda h: h.abs().mean(0))
ONE_UNIT = writes(lambda s, h: s.c(h / s.t), lambda h: h[:, 0].abs().mean())
NEVER_READ = writes(lambda s, h: s.c(h), lambda h: h.mean(0))
WITHOUT_SCALE = writes(lambda s, h: s.c(h), lambda h: h.mean(0) / (1 + h.norm()))


class HandWrittenNorm(nn.Module):
    """Batch norm whose statistics have the shape that broadcasts."""

    def __init__(self, persistent):
        super().__init__()
        shape = (1, 6, 1, 1)
        self.gain, self.shift = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape), persistent)
        self.register_buffer("variance", torch.ones(shape), persistent)

    def forward(self, x):
        mean, variance = self.mean, self.variance
        if self.training:
            mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True)
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * mean)
                self.variance.mul_(0.5).add_(0.5 * variance)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.gain + self.shift


def hand_written(persistent=True):
    norm = HandWrittenNorm(persistent)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 3))
    return net.double()


def unread():
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 2)
    net = nn.Sequential(*layers).double()
    net.register_buffer("shadow", torch.zeros(8, 4))
    return net


# ---------------------------------------------------------------------- longer inputs, and others
def table(width):
    def forward(s, x):
        return s.b(torch.relu(s.a(x) + s.table[: x.shape[1]])).mean(1)

    net = Forward(forward, a=lin(4, width), b=lin(width, 2))
    net.table = nn.Parameter(rows(9, width))
    return net


def matrix():
    def forward(s, x):
        return F.linear(torch.relu(s.a(x)), s.table[: x.shape[1]]).sum(-1)

    net = Forward(forward, a=lin(4, 5))
    net.table = nn.Parameter(rows(6, 5))
    return net


class Cached(nn.Module):
    """Keeps a table that it has computed from its weights, as fast attention does."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.table = lin(4, 6), lin(6, 2), nn.Parameter(rows(6))
        self.cache = {}

    def forward(self, x):
        if self.training or "table" not in self.cache:
            self.cache["table"] = self.table * 1
        return self.b(torch.relu(self.a(x) + self.cache["table"]))


def places(s, x):
    h, where = F.max_pool2d(s.a(x), 2, return_indices=True)
    return s.b(h), s.b(where.to(h.dtype))


def pooled():
    return Forward(places, a=nn.Conv2d(1, 5, 3).double(), b=nn.Conv2d(5, 2, 1).double())


X, IMAGES = rows(6, 4), rows(4, 3, 8, 8)
NETWORKS = {
    # network, exchangeable units and scales, an example, and what the network takes besides
    "state": (lambda: three_layers(recurrent, h=torch.zeros(1, 8)), 8, 0, X, X),
    "hidden state": (lambda: three_layers(recurrent, False, h=torch.zeros(1, 8)), 0, 0, X, X),
    "covariance": (lambda: three_layers(COVARIANCE, t=torch.eye(8)), 8, 0, X, X),
    "of another layer": (lambda: three_layers(OTHER_LAYER, t=torch.zeros(8)), 8, 8, X, X),
    "of the step before": (lambda: three_layers(STEP_BEFORE, t=torch.ones(8)), 8, 8, X, X),
    "of one unit": (lambda: three_layers(ONE_UNIT, t=torch.ones(())), 7, 8, X, X),
    "not read": (lambda: three_layers(NEVER_READ, t=torch.zeros(8)), 8, 8, X, X),
    "any shape": (hand_written, 6, 6, IMAGES, IMAGES),
    "any shape, one example": (hand_written, 6, 6, IMAGES[:1], IMAGES),
    "any shape, hidden": (lambda: hand_written(False), 0, 6, IMAGES, IMAGES),
    "counters, unread buffers": (unread, 8, 8, X, X),
    "a table of one row": (lambda: table(4), 4, 4, rows(2, 1, 4), rows(2, 9, 4)),
    "a table of one column": (lambda: table(1), 0, 1, rows(2, 3, 4), rows(2, 9, 4)),
    "a whole table": (lambda: table(4), 4, 4, rows(2, 9, 4), rows(2, 9, 4)),
    "rows that are not reached": (matrix, 5 + 2, 5, rows(2, 2, 4), rows(2, 6, 4)),
    "all rows": (matrix, 5 + 6, 5, rows(2, 6, 4), rows(2, 6, 4)),
    "a cache": (Cached, 6, 6, X, X),
    "places of a maximum": (pooled, 5, 0, rows(2, 1, 8, 8), rows(3, 1, 8, 8)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_found_is_a_symmetry_of_training_and_of_other_inputs(name):
    """The law: act, then run in training, then compare in evaluation."""
    build, units, scales, example, inputs = NETWORKS[name]
    net = build()
    sym = discover(net, example)
    assert sum(g.units for g in sym.permutations) == units
    assert sym.scaling_dof == scales
    assert not sym.constants
    assert not sym.frozen
    orders, factors, flips = random_permutations(sym), random_scales(sym), random_signs(sym)

    def moved(params):
        return flip(rescale(permute(params, sym, orders), sym, factors), sym, flips)

    other = copy.deepcopy(net)
    other.load_state_dict({n: t.clone() for n, t in moved(P.of(net)).items()})
    for one in (net, other):
        one.train()
        for k in range(3):
            one(torch.randn(inputs.shape, generator=torch.Generator().manual_seed(k)).double())
    torch.testing.assert_close(other.eval()(inputs), net.eval()(inputs), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(P.of(other), moved(P.of(net)), rtol=1e-10, atol=1e-12)
    for buffer in {"t", "1.mean"} & {*sym.touched}:  # the negative control
        assert not torch.allclose(P.of(other)[buffer], P.of(net)[buffer])
    assert name == "a cache" or verify(net, sym, inputs) < 1e-12


def test_statistics_that_nothing_reads_take_no_scale_away():
    sym = discover(three_layers(WITHOUT_SCALE, t=torch.zeros(8)), X)
    assert "t" not in sym.touched
    assert sym.scaling_dof == 8


class Untraceable(nn.Module):
    """A buffer that only training writes, in a forward that cannot be traced there."""

    def __init__(self):
        super().__init__()
        self.a, self.b = lin(4, 6), lin(6, 2)
        self.register_buffer("mean", torch.zeros(1, 6, dtype=torch.float64))

    def forward(self, x):
        h = self.a(x)
        if self.training and float(h.mean()) > -100:
            self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0, keepdim=True)
        return self.b(torch.relu(h - self.mean))


def test_where_training_cannot_be_read_every_buffer_is_state_and_it_is_said():
    net = Untraceable()
    sym = discover(net, X)
    assert "training could not be traced" in sym.evaluation_only
    assert "evaluation only" in str(sym)
    net.train()(X)
    assert verify(net.eval(), sym, X) < 1e-12


@pytest.mark.bad_input
def test_a_constant_is_named_and_must_stay_one():
    net = Forward(lambda s, x: s.b(torch.relu(s.a(x) + s.table)), a=lin(4, 6), b=lin(6, 2))
    net.register_buffer("table", torch.zeros(1, 6, dtype=torch.float64))
    sym = discover(net, X)
    assert "read as constants: table" in str(sym)
    canonicalise(P.of(net), sym)
    net.table += rows(1, 6)
    for action in (canonicalise, min_mass, lambda p, s: permute(p, s, random_permutations(s))):
        with pytest.raises(ValueError, match="'table' was read as a constant and now holds other"):
            action(P.of(net), sym)
    assert verify(net, discover(net, X), X) < 1e-12


# ---------------------------------------------------------------------- ties
def tied_head(kind):
    net = Forward(
        lambda s, i: s.head(torch.relu(s.hidden(s.embed(i)))),
        embed=nn.Embedding(7, 6, dtype=torch.float64),
        hidden=lin(6, 6),
        head=lin(6, 7, bias=False),
    )
    if kind == "object":
        net.head.weight = net.embed.weight
    if kind == "storage":
        net.head.weight.data = net.embed.weight.data
    return net


def transposed():
    net = Forward(lambda s, x: s.b(torch.relu(s.a(x))), a=lin(5, 5, bias=False), b=lin(5, 5))
    net.b.weight.data = net.a.weight.data.t()
    return net


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kind", "groups"), [("object", 1), ("storage", 1), ("none", 2), ("another layout", 0)]
)
def test_ties_are_ties_of_memory(kind, groups):
    tokens = torch.randint(7, (3, 4))
    net, x = (transposed(), rows(2, 5)) if kind == "another layout" else (tied_head(kind), tokens)
    sym, before = discover(net, x), net(x)
    assert len(sym.permutations) == groups
    assert any("shares its memory" in f.reason for f in sym.frozen) == (groups == 0)
    assert ("head.weight" in sym.aliases) == (groups == 1)
    assert ("head.weight" in sym.weights) == (kind == "none")
    moved = rescale(net.state_dict(), sym, random_scales(sym))
    moved = permute(moved, sym, random_permutations(sym))
    net.load_state_dict({n: t.clone() for n, t in moved.items()})
    torch.testing.assert_close(net(x), before, rtol=1e-12, atol=1e-12)
    if kind == "storage":
        cut = {n: t.clone() + (n == "head.weight") for n, t in net.state_dict().items()}
        with pytest.raises(ValueError, match="'head.weight' and 'embed.weight' were one tensor"):
            canonicalise(cut, sym)


# ---------------------------------------------------------------------- a check that could fail
MASK = torch.tensor([True, False, True])
SEEN = {
    "as it is": lambda y: y,
    "masked by the least number": lambda y: y.masked_fill(MASK, torch.finfo(y.dtype).min),
    "masked by a sum": lambda y: y + torch.where(MASK, -1e12, 0.0),
    "masked by infinity": lambda y: y.masked_fill(MASK, -torch.inf),
    "complex": lambda y: torch.complex(y, 2 * y),
    "integers": lambda y: (1e4 * y).long(),
    "beside a constant": lambda y: (y, 1e9 + 0 * y),
}
UNSEEN = {
    "multiplied by zero": lambda y: 0 * y,
    "only the largest of one": lambda y: y[:, :1].argmax(-1),
    "nothing but NaN": lambda y: y / 0 - y / 0,
}


def with_wrong_rule(change):
    """A running sum mixes channels, and is not exchangeable."""
    return Forward(lambda s, x: change(s.b(torch.cumsum(s.a(x), -1))), a=lin(4, 5), b=lin(5, 3))


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", SEEN)
def test_the_check_sees_a_wrong_group(kind):
    with pytest.raises(UnsupportedModel, match="`rules` is wrong"):
        discover(with_wrong_rule(SEEN[kind]), X, rules={"cumsum": lambda x, dim: x})
    right = Forward(lambda s, x: SEEN[kind](s.b(torch.relu(s.a(x)))), a=lin(4, 5), b=lin(5, 3))
    sym = discover(right, X)
    assert not sym.unchecked
    assert sym.permutations
    assert max(sym.error, verify(right, sym, X)) < 1e-12


@pytest.mark.parametrize("kind", UNSEEN)
def test_what_the_check_cannot_see_is_not_called_checked(kind, caplog):
    net = with_wrong_rule(UNSEEN[kind])
    sym = discover(net, X, rules={"cumsum": lambda x, dim: x})
    assert "not checked: " in str(sym)
    assert "nothing was checked" in caplog.text
    assert sym.error != sym.error
    assert verify(net, sym, X) != 0


# ---------------------------------------------------------------------- odd numbers
def hidden(units):
    return nn.Sequential(lin(4, units), nn.ReLU(), lin(units, 3))


def test_symmetries_do_not_depend_on_weights_that_are_not_finite():
    net = hidden(5)
    expected = str(discover(net, X))
    with torch.no_grad():
        net[0].weight[0, 0], net[2].weight[0, 0] = float("nan"), float("inf")
    assert str(discover(net, X)) == expected


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1e-4), (torch.bfloat16, 1e-3), (torch.float32, 1.0), (torch.float32, 1e-25)],
)
def test_masses_of_weights_whose_squares_have_no_number(dtype, size):
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sym = discover(net, torch.randn(2, 64))
    params = {n: (size * t).to(dtype) for n, t in P.of(net).items()}
    exact = {n: t.double() for n, t in params.items()}
    found, true = min_mass(params, sym), min_mass(exact, sym)
    assert bool(found.attained)
    assert float(found.minimum) > 0
    torch.testing.assert_close(found.minimum, true.minimum, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.mass, true.mass, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", [55, 114, 126, 335, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_permutations_of_each_other(seed, dtype):
    net, generator = nn.Sequential(lin(3, 8), nn.ReLU(), lin(8, 3)), torch.Generator()
    sym, row = discover(net, rows(2, 3)), torch.randn(3, generator=generator.manual_seed(seed))
    params = {n: t.to(dtype) for n, t in P.of(net).items()}
    orders = [torch.randperm(3, generator=generator) for _ in range(8)]
    params["0.weight"] = torch.stack([row[order] for order in orders]).to(dtype)
    other = moved_at_random(params, sym, generator, mixing=False)
    for by in ("norm", "max"):
        one, two = (canonicalise(p, sym, permutation=by) for p in (params, other))
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- uses
@pytest.mark.bad_input
def test_uses_that_have_no_meaning_are_refused():
    net = hidden(5)
    sym, uneven = discover(net, X), P.populate(net, 3)
    uneven["0.weight"] = uneven["0.weight"][:2]
    with pytest.raises(ValueError, match="not a stack: '0.weight' has 2 members, "):
        canonicalise(uneven, sym)
    with pytest.raises(ValueError, match="on the meta device"):
        discover(nn.BatchNorm1d(3, device="meta"), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"`example` is empty: it holds a tensor of shape \(0, 4"):
        discover(net, rows(0, 4))


class ByName(nn.Module):
    """A forward as language models have: keywords, some of them only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = lin(4, 6), lin(6, 2)

    def forward(self, tokens, *, mask, scale=None):
        return self.b(torch.relu(self.a(tokens)) * mask) * (1 if scale is None else scale)


@pytest.mark.bad_input
def test_arguments_by_name():
    net, mask = ByName(), rows(6, 1)
    for args, named in (((X,), {}), ((), {"tokens": X})):
        sym = discover(net, *args, mask=mask, **named)
        assert sym.scaling_dof == 6
        assert verify(net, sym, *args, mask=mask, **named) < 1e-12
    with pytest.raises(ValueError, match="does not accept an input of shape .*mask"):
        discover(net, X)
    with pytest.raises(ValueError, match="`mask` = an input of shape"):
        discover(net, X, mask=rows(3, 7))
