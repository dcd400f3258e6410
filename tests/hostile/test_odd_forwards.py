"""Networks that read well and are not what they seem: nothing found in them is silently wrong."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from torch import nn

from weightsym import (
    UnsupportedModel,
    canonicalise,
    discover,
    min_mass,
    permute,
    random_permutations,
    random_scales,
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


# ---------------------------------------------------------------------- buffers
class HandWrittenNorm(nn.Module):
    """Batch norm whose statistics have the shape that broadcasts."""

    def __init__(self, shape, persistent=True):
        super().__init__()
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


def hand_written(**options):
    norm = HandWrittenNorm((1, 6, 1, 1), **options)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 3))
    return net.double()


def trained(net, x):
    optimizer = torch.optim.SGD(net.train().parameters(), 0.05)
    for _ in range(5):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return net.eval()


@pytest.mark.parametrize("example_rows", [1, 4])
def test_statistics_of_any_shape_are_state(example_rows):
    net, x = hand_written(), rows(4, 3, 8, 8)
    sym = discover(net, x[:example_rows])
    assert [g.units for g in sym.permutations] == [6]
    before = trained(net, x)(x)
    params = P.of(net)
    moved = permute(params, sym, random_permutations(sym))
    for new in (canonicalise(params, sym), moved):
        torch.testing.assert_close(P.apply(net, new, x), before, rtol=1e-10, atol=1e-12)
    assert not torch.equal(moved["1.mean"], params["1.mean"])


def test_state_that_no_action_reaches_holds_its_channels():
    net, x = hand_written(persistent=False), rows(4, 3, 8, 8)
    sym = discover(net, x)
    assert not sym.permutations
    assert verify(trained(net, x), sym, x) < 1e-12


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
    net, x = Untraceable(), rows(5, 4)
    sym = discover(net, x)
    assert "training could not be traced" in sym.evaluation_only
    assert "evaluation only" in str(sym)
    assert verify(trained(net, x), sym, x) < 1e-12


@pytest.mark.bad_input
def test_a_constant_is_named_and_must_stay_one():
    net = Forward(lambda s, x: s.b(torch.relu(s.a(x) + s.table)), a=lin(4, 6), b=lin(6, 2))
    net.register_buffer("table", torch.zeros(1, 6, dtype=torch.float64))
    sym = discover(net, rows(2, 4))
    assert "read as constants: table" in str(sym)
    canonicalise(P.of(net), sym)
    net.table += rows(1, 6)
    for action in (canonicalise, min_mass, lambda p, s: permute(p, s, random_permutations(s))):
        with pytest.raises(ValueError, match="'table' was read as a constant and now holds other"):
            action(P.of(net), sym)
    assert verify(net, discover(net, rows(2, 4)), rows(2, 4)) < 1e-12


# ---------------------------------------------------------------------- longer inputs
@pytest.mark.parametrize(("tokens", "width"), [(1, 4), (3, 1), (9, 4)])
def test_tables_longer_than_the_example(tokens, width):
    def forward(self, x):
        h = self.a(x) + self.table[: x.shape[1]]
        return self.b(torch.relu(h)).mean(1)

    net = Forward(forward, a=lin(4, width), b=lin(width, 2))
    net.table = nn.Parameter(rows(9, width))
    sym = discover(net, rows(2, tokens, 4))
    assert sym.scaling_dof == width
    assert verify(net, sym, rows(2, 9, 4)) < 1e-12


@pytest.mark.parametrize("tokens", [2, 6])
def test_rows_of_a_matrix_that_the_example_does_not_reach(tokens):
    def forward(self, x):
        h = torch.relu(self.a(x))
        return F.linear(h, self.table[: x.shape[1]]).sum(-1)

    net = Forward(forward, a=lin(4, 5))
    net.table = nn.Parameter(rows(6, 5))
    sym = discover(net, rows(2, tokens, 4))
    assert sym.scaling_dof == 5
    assert verify(net, sym, rows(2, 6, 4)) < 1e-12


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


@pytest.mark.parametrize(("kind", "groups"), [("object", 1), ("storage", 1), ("none", 2)])
def test_ties_are_ties_of_memory(kind, groups):
    net, tokens = tied_head(kind), torch.randint(7, (3, 4))
    sym, before = discover(net, tokens), net(tokens)
    assert len(sym.permutations) == groups
    assert ("head.weight" in sym.aliases) == (kind != "none")
    assert ("head.weight" in sym.weights) == (kind == "none")
    moved = rescale(net.state_dict(), sym, random_scales(sym))
    moved = permute(moved, sym, random_permutations(sym))
    net.load_state_dict({n: t.clone() for n, t in moved.items()})
    torch.testing.assert_close(net(tokens), before, rtol=1e-12, atol=1e-12)


@pytest.mark.bad_input
def test_a_tie_that_was_cut_is_named():
    net = tied_head("storage")
    sym = discover(net, torch.randint(7, (3, 4)))
    state = {n: t.clone() for n, t in net.state_dict().items()}
    state["head.weight"] += 1
    with pytest.raises(ValueError, match="'head.weight' and 'embed.weight' were one tensor"):
        canonicalise(state, sym)


def test_memory_shared_in_another_layout_is_held_fixed():
    net = Forward(lambda s, x: s.b(torch.relu(s.a(x))), a=lin(5, 5, bias=False), b=lin(5, 5))
    net.b.weight.data = net.a.weight.data.t()
    x = rows(2, 5)
    sym, before = discover(net, x), net(x)
    assert any("shares its memory" in f.reason for f in sym.frozen)
    state = canonicalise(net.state_dict(), sym)
    net.load_state_dict({n: t.clone() for n, t in state.items()})
    torch.testing.assert_close(net(x), before)


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
    with pytest.raises(UnsupportedModel, match="`rules` breaks the function"):
        discover(with_wrong_rule(SEEN[kind]), rows(6, 4), rules={"cumsum": lambda x, dim: x})
    right = Forward(lambda s, x: SEEN[kind](s.b(torch.relu(s.a(x)))), a=lin(4, 5), b=lin(5, 3))
    sym = discover(right, rows(6, 4))
    assert not sym.unchecked
    assert sym.permutations
    assert max(sym.error, verify(right, sym, rows(6, 4))) < 1e-12


@pytest.mark.parametrize("kind", UNSEEN)
def test_what_the_check_cannot_see_is_not_called_checked(kind, caplog):
    net = with_wrong_rule(UNSEEN[kind])
    sym = discover(net, rows(6, 4), rules={"cumsum": lambda x, dim: x})
    assert "not checked: " in str(sym)
    assert "nothing was checked" in caplog.text
    assert sym.error != sym.error
    assert verify(net, sym, rows(6, 4)) != 0


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


def test_a_forward_that_keeps_what_it_computed_is_no_reason_to_refuse():
    sym = discover(Cached(), rows(3, 4))
    assert [g.units for g in sym.permutations] == [6]
    assert not sym.frozen


def test_places_of_a_maximum_have_no_size():
    def forward(self, x):
        h, where = F.max_pool2d(self.a(x), 2, return_indices=True)
        return self.b(h), self.b(where.to(h.dtype))

    conv = [nn.Conv2d(1, 5, 3), nn.Conv2d(5, 2, 1)]
    net = Forward(forward, a=conv[0].double(), b=conv[1].double())
    sym = discover(net, rows(2, 1, 8, 8))
    assert sym.scaling_dof == 0
    assert not sym.frozen


# ---------------------------------------------------------------------- what has no size


def hidden(units):
    return nn.Sequential(lin(4, units), nn.ReLU(), lin(units, 3))


def test_symmetries_do_not_depend_on_weights_that_are_not_finite():
    net = hidden(5)
    expected = str(discover(net, rows(2, 4)))
    with torch.no_grad():
        net[0].weight[0, 0], net[2].weight[0, 0] = float("nan"), float("inf")
    assert str(discover(net, rows(2, 4))) == expected


def test_weights_whose_squares_are_flushed_to_zero_count():
    net = hidden(5).float()
    sym = discover(net, torch.randn(2, 4))
    params = {n: t * 1e-25 for n, t in P.of(net).items()}
    tiny, exact = min_mass(params, sym), min_mass({n: t.double() for n, t in params.items()}, sym)
    assert bool(tiny.attained)
    torch.testing.assert_close(tiny.minimum, exact.minimum, rtol=1e-6, atol=0)
    assert float(tiny.minimum) > 0


@pytest.mark.bad_input
def test_uses_that_have_no_meaning_are_refused():
    net = hidden(5)
    sym = discover(net, rows(2, 4))
    uneven = P.populate(net, 3)
    uneven["0.weight"] = uneven["0.weight"][:2]
    with pytest.raises(ValueError, match="no stack: '0.weight' is there for 2 members, "):
        canonicalise(uneven, sym)
    with pytest.raises(ValueError, match="on the meta device"):
        discover(nn.Linear(3, 2, device="meta"), torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"`example` is empty: it holds a tensor of shape \(0, 4"):
        discover(net, rows(0, 4))


# ---------------------------------------------------------------------- names
class ByName(nn.Module):
    """A forward as language models have: keywords, some of them only."""

    def __init__(self):
        super().__init__()
        self.a, self.b = lin(4, 6), lin(6, 2)

    def forward(self, tokens, *, mask, scale=None):
        return self.b(torch.relu(self.a(tokens)) * mask) * (1 if scale is None else scale)


@pytest.mark.bad_input
def test_arguments_by_name():
    net, x, mask = ByName(), rows(2, 4), rows(2, 1)
    for call in ((x,), ()), ((), {"tokens": x}):
        args, named = call if call[1] else ((x,), {})
        sym = discover(net, *args, mask=mask, **named)
        assert sym.scaling_dof == 6
        assert verify(net, sym, *args, mask=mask, **named) < 1e-12
    with pytest.raises(ValueError, match="does not accept an input of shape .*mask"):
        discover(net, x)
    with pytest.raises(ValueError, match="`mask` = an input of shape"):
        discover(net, x, mask=rows(3, 7))
