"""A network that does what it did is solved once, and again if anything has changed."""

import copy
import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from known_networks import NETWORKS
from test_two_rows import described
from torch import nn

from weightsym import discover, verify
from weightsym.discovery.cache import forget, key_of, operations_of, remember
from weightsym.discovery.export import trace_graphs
from weightsym.networks.forward import Inputs, on_network

front = importlib.import_module("weightsym.discovery.discover")


@pytest.fixture
def solved(monkeypatch):
    """The number of times that groups were solved for: none is known but `Net`."""
    forget()
    remember(*original())
    calls, solve = [], front.symmetries_of
    monkeypatch.setattr(front, "symmetries_of", lambda *args: calls.append(0) or solve(*args))
    return calls


WORLD = {"factor": 1.5}


def times(factor):
    return lambda x: factor * x


class Net(nn.Module):
    """A network with all that a result may depend on."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.activation, self.dropout, self.factor = nn.ReLU(), nn.Dropout(0.5), 2.0
        self.register_buffer("mask", torch.ones(6, 6))
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("lost", torch.ones(6), persistent=False)
        self.table, self.rows, self.parts = torch.ones(6), [torch.ones(6)], {"a": [1.0, 2.0]}
        self.function, self.closure = (lambda x: x.abs()), times(2.0)
        self.on_cpu = 0.5

    def forward(self, x):
        x = self.activation(self.first(x)) * self.scale * self.factor * self.table
        x = self.closure(self.function(x)) * self.lost * sum(self.parts["a"]) * WORLD["factor"]
        x = x * sum(self.rows)
        if x.device.type == "cpu" and x.is_cpu and not x.is_meta:
            x = x * self.on_cpu + torch.zeros(6, device=x.device)
        x = nn.functional.linear(x, self.middle.weight * self.mask, self.middle.bias)
        return self.last(self.dropout(self.activation(x)))


class OtherForward(Net):
    def forward(self, x):
        return self.last(torch.sigmoid(self.first(x)))


@functools.cache
def original():
    """The key and the symmetries of `Net` as it is."""
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "remember", lambda *result: kept.append(result))
        discover(Net(), torch.randn(2, 5))
    return kept[0]


def test_what_was_solved_is_not_solved_again(solved):
    model, (x,) = NETWORKS["tied transformer"].made()
    sym = discover(model, x)
    other = copy.deepcopy(model).train()
    for p in other.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    assert discover(other, x.flip(0)) is sym
    assert other.training
    assert len(solved) == 1
    forget()
    assert described(discover(other, x.flip(0))) == described(sym)
    assert len(solved) == 2


CHANGES = {
    "values of a buffer": "net.mask[0, 1:] = 0",
    "values of an attribute": "net.table[2] = 3",
    "a number": "net.factor = -2.0",
    "an activation": "net.activation = nn.Tanh()",
    "an activation that sorts": "net.activation = Forward(lambda self, x: x.sort(-1).values)",
    "the forward": "net.__class__ = OtherForward",
    "a tie": "net.first = nn.Sequential(net.first, nn.Linear(6, 6));"
    "net.middle.weight = net.first[1].weight",
    "a hook": "net.first.register_forward_hook(lambda module, args, out: out + 1)",
    "training": "net.dropout.p = 0.0",
    "a width": "net.last = nn.Linear(6, 4)",
    "precision": "net.double()",
    "a parameter that nothing reads": "net.unread = nn.Linear(3, 3)",
    # a buffer that leaves the state is a constant by its values
    "a constant": "del net.scale; net.register_buffer('scale', torch.arange(6.0) + 1, False)",
    "what is trained": "net.first.requires_grad_(False)",
    "values of a list": "net.parts['a'][1] = 3.0",
    "a tensor in a list": "net.rows[0][1] = 3.0",
    "values of a buffer that is not kept": "net.lost[0] = 2.0",
    "a lambda": "net.function = lambda x: x.sin()",
    "a closure": "net.closure = times(-2.0)",
    "what code reads elsewhere": "patch.setitem(WORLD, 'factor', -1.0)",
    "the forward of one object": "net.first.forward = lambda x: x.cumsum(-1) @ net.first.weight.mT",
    "a function of torch": "patch.setattr(nn.functional, 'dropout', lambda x, *_: x.sin())",
    "a parametrisation": "nn.utils.parametrizations.weight_norm(net.first)",
    "a hook before": "net.last.register_forward_pre_hook(lambda module, args: (args[0].exp(),))",
    "a part": "net.dropout = nn.Identity()",
    "a number in training": "net.dropout.p = 0.25",
    "a number that is read on some devices": "net.on_cpu = -1.0",
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_read_anew(change, solved, monkeypatch):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 5)
    assert discover(net, x) is original()[1]
    with torch.no_grad():
        exec(CHANGES[change], globals() | {"net": net, "patch": monkeypatch})  # noqa: S102
    new = discover(net, x)
    assert new is not original()[1]
    assert len(solved) == 1
    assert verify(net.eval(), new, x) < 1e-6
    if change == "values of a buffer":  # what was found before is wrong for another mask
        assert [g.units for g in original()[1].permutations] == [6, 6]
        assert [g.units for g in new.permutations] != [6, 6]


def test_a_batch_is_cut_once_and_other_shapes_are_read_anew(solved, monkeypatch):
    net, cuts, cut = Net(), [], front.two_rows
    monkeypatch.setattr(front, "two_rows", lambda *args: cuts.append(0) or cut(*args))
    for rows, count in ((9, 1), (9, 1), (2, 1), (7, 2), (9, 2)):
        assert discover(net, torch.randn(rows, 5)) is original()[1]
        assert len(cuts) == count
    assert not solved
    discover(net, torch.randn(2, 3, 5))
    assert len(solved) == 1


def test_settings_and_rules_are_read_anew(solved):
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(4, 5)
    carrier, fixed = discover(net, x), discover(net, x, batch_norm="eval")
    assert (carrier.scaling_dof, fixed.scaling_dof) == (6, 12)
    discover(net, x, rules={"relu": "pointwise"})
    discover(net, x, rules={"relu": "pointwise"})
    assert len(solved) == 4


def test_what_was_not_checked_is_kept_for_these_numbers_alone(solved):
    net = nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False))
    first = discover(net, torch.zeros(2, 5))
    assert first.unchecked
    assert discover(net, torch.zeros(2, 5)) is first
    assert len(solved) == 1
    net[0].weight.data[0, 0] += 1.0
    assert discover(net, torch.zeros(2, 5)) is not first
    assert not discover(net, torch.randn(2, 5)).unchecked
    assert len(solved) == 3


def positions(x):
    places = torch.ones(x.shape[1]).cumsum(0)
    places[0] = 5.0
    return places


BRANCHES = {
    "positions": (lambda net, x: positions(x).sum() < net.factor, True),
    "their number": (lambda net, x: len(positions(x).nonzero()) < net.factor, False),
    "an input": (lambda net, x: x.sum() < net.factor, False),
    "a weight": (lambda net, x: net.a.weight.sum() < net.factor, False),
    "positions beside an input": (lambda net, x: positions(x).copy_(x[0])[0] < net.factor, False),
    "a constant": (lambda net, x: net.table.cumsum(0)[1] < net.factor, True),
    "a constant after a write": (lambda net, x: net.table.clone().add_(x[0, 0]).sum() < 0, False),
    "a draw": (lambda net, x: positions(x).normal_()[0] < net.factor, False),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_numbers_that_depend_on_no_input_are_computed(case):
    branch, is_known = BRANCHES[case]

    def forward(self, x):
        return torch.tanh(self.a(x)) if branch(self, x) else self.a(x).relu()

    net, lines = Forward(forward, a=nn.Linear(4, 5)).eval(), []
    net.table = torch.full((2,), 7.0)
    for net.factor in (13.5, 14.5):  # positions sum to 14, and rows of the table, too
        lines.append(operations_of(net, Inputs((torch.randn(2, 4),))).evaluation.lines)
    assert [any("tanh" in line for line in mode) for mode in lines] == [False, is_known]
    assert bool(lines[0]) == bool(lines[1]) == is_known


def keyed(network, factor=1.0):
    model, x = network.made()
    for p in model.parameters():
        p.data.mul_(factor)
    return key_of(model, operations_of(model, on_network(model, Inputs(x))), "carrier")


@functools.cache
def keys():
    """By key, the networks of the table that have it."""
    names = {}
    for name in (name for name, network in NETWORKS.items() if not network.slow):
        names.setdefault(keyed(NETWORKS[name]), []).append(name)
    return names


def test_networks_of_one_key_have_the_same_symmetries():
    shared = [names for key, names in keys().items() if key and len(names) > 1]
    assert shared
    for first, *others in shared:
        here = described(NETWORKS[first].known()[-1])
        assert all(described(NETWORKS[name].known()[-1]) == here for name in others)


def test_keys_are_those_of_other_weights_and_of_most_networks():
    unknown = keys().get("", [])
    assert len(unknown) < 0.05 * len(NETWORKS)
    assert "a branch by numbers" in unknown  # one branch shows nothing of the other
    for names in keys().values():
        assert keyed(NETWORKS[names[0]], 1.1) == keyed(NETWORKS[names[0]])


def test_weights_that_a_forward_writes_to_stay_as_they_are():
    net = Forward(lambda s, x: s.b(s.a(x)), a=nn.Linear(4, 5), b=nn.Linear(5, 2))
    net.a.register_forward_pre_hook(lambda module, args: module.weight.data.mul_(2.0) and None)
    before = net.a.weight.clone()
    operations = operations_of(net, Inputs((torch.randn(2, 4),)))
    assert key_of(net, operations, "carrier") == ""
    assert operations.dropouts is None
    assert torch.equal(net.a.weight, before)


def test_what_a_longer_example_shows_has_no_key(solved):
    net = nn.GRU(4, 5, batch_first=True)
    for count in (1, 2):
        discover(net, torch.randn(2, 1, 4))
        assert len(solved) == count
    discover(net, torch.randn(2, 3, 4))
    discover(net, torch.randn(2, 3, 4))
    assert len(solved) == 3


def test_operations_of_others_may_be_defined_anew(solved):
    @torch.library.custom_op("lightning_bnn_test::of_cache", mutates_args=())
    def of_cache(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    of_cache.register_fake(torch.empty_like)
    net = Forward(lambda s, x: s.b(of_cache(s.a(x))), a=nn.Linear(4, 5), b=nn.Linear(5, 2))
    for _ in range(2):
        discover(net, torch.randn(2, 4))
    assert len(solved) == 2


class Dropping(nn.Module):
    """Dropouts as modules, as functions with a mode of their own, and off in evaluation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 6), nn.Linear(6, 2), nn.Dropout(0.2)

    def forward(self, x):
        x = F.dropout(self.drop(self.a(x)), 0.3 if self.training else 0.0, self.training)
        return self.b(F.dropout(torch.tanh(x), 0.1, training=True))


class Attending(nn.Module):
    """Dropouts inside of attention, as a function and as a module."""

    def __init__(self):
        super().__init__()
        self.a = nn.TransformerEncoderLayer(6, 2, 4, 0.2, batch_first=True)
        self.b = nn.Linear(6, 2)

    def forward(self, x):
        y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3 if self.training else 0.0)
        return self.b(self.a(x) + y)


@pytest.mark.parametrize(
    ("made", "shape", "expected"),
    [
        (Dropping, (3, 4), [(0.2, True), (0.3, True), (0.1, True)]),
        (Attending, (2, 3, 6), [(0.3, True), *[(0.2, True)] * 4]),
    ],
)
def test_dropouts_need_no_second_trace(made, shape, expected):
    """What the mode changes besides, such as a batch norm, does."""
    net, x = made().eval(), Inputs((torch.randn(shape),))
    dropouts = operations_of(net, x).dropouts
    assert dropouts == expected
    quick, traced = (trace_graphs(net, x, "carrier", known) for known in (dropouts, None))
    assert quick.training.says_the_same(traced.training)
    assert not quick.training.says_the_same(quick.evaluation)
    assert quick.training.only_drops(quick.evaluation)
    assert not quick.evaluation.only_drops(quick.training)
    normed = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)).eval()
    assert operations_of(normed, x).dropouts is None
    assert quick.evaluation.with_dropouts(dropouts[:1]) is None
