"""The check that runs the exported graph decides as the network does, and holds little at once."""

import importlib
import random
import weakref
from dataclasses import replace

import pytest
import torch
from cases import CASES, Forward
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_bnn.models import mlp
from weightsym import UnsupportedModel, discover
from weightsym.discovery.cache import forget
from weightsym.discovery.export import trace_graphs
from weightsym.discovery.random_weights import RandomWeights
from weightsym.discovery.refutation import Check
from weightsym.forward import Inputs

refutation = importlib.import_module("weightsym.discovery.refutation")
small_cases = [case for case in CASES[:10] if case.name != "optunet"]


@pytest.mark.parametrize("case", small_cases, ids=lambda c: c.name)
def test_graph_and_network_see_the_same_error(case):
    model, x, sym = case.known()
    with torch.no_grad():
        by_graph, by_network = checks(model, Inputs((x,)), sym)
        assert by_graph.sensitive
        assert by_network.sensitive
        for a, b in zip(by_graph.outputs, by_network.outputs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert by_graph.error(sym) <= by_graph.tolerance
        assert by_network.error(sym) <= by_network.tolerance
        assert by_graph.holds(sym, 1e-5)
        for wrong in faults(sym):
            assert not by_graph.holds(wrong, 1e-5)
            seen = by_graph.error(wrong)
            assert seen > 1e-6
            assert seen == pytest.approx(by_network.error(wrong), rel=1e-4)


@pytest.mark.parametrize("case", small_cases[::4], ids=lambda c: c.name)
def test_the_network_itself_is_not_needed_where_its_graph_runs(case, monkeypatch):
    model, x = case.make()
    forget()
    monkeypatch.setattr(refutation, "in_runnable_precision", None)
    assert discover(model.float(), x.float() if x.is_floating_point() else x).error < 1e-9


# ------------------------------------------------------------ odd networks
class Upcast(nn.Module):
    """A norm in float32 whatever the weights are, as language models have it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        h = self.first(x).to(torch.float32)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return self.last(torch.relu(self.gain * h.to(self.gain.dtype)))


class TwoOutputs(nn.Module):
    """Two heads, one returned twice, beside a number and the input itself."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x, *, scale=2.0, mask):
        h = torch.relu(self.first(x)) * mask
        y = self.one(h)
        return {"y": y, "again": [y, self.two(h) * scale], "x": x, "n": 3}


class Aliased(nn.Module):
    """One weight under two names, and one in two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.same, self.view = self.middle, nn.Linear(5, 5)
        self.view.weight = nn.Parameter(self.middle.weight.data)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.view(torch.tanh(self.same(x)))))


def with_norm():
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3)
    )


def with_constants(self, x):
    """Tensors that are neither parameters nor buffers, and one that is made in the forward."""
    h = torch.relu(self.a(x @ self.mixing.to(x.dtype)))
    return self.b(h * self.mixing.sum() + torch.full((6,), 0.5, dtype=x.dtype))


def constants():
    net = Forward(with_constants, a=nn.Linear(5, 6), b=nn.Linear(6, 3))
    net.mixing = torch.randn(5, 5)
    return net


ODD = [
    (Upcast, {}), (TwoOutputs, {"mask": torch.ones(4, 1)}), (Aliased, {}),
    (with_norm, {}), (constants, {}),
]  # fmt: skip


@pytest.mark.parametrize(("build", "named"), ODD, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_networks_are_checked_by_their_graph_in_float64(build, named, dtype, monkeypatch):
    torch.manual_seed(0)
    model = build().to(dtype)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    used = []
    forget()
    monkeypatch.setattr(refutation, "in_runnable_precision", lambda *_: used.append(1))
    sym = discover(model, torch.randn(4, 5), **named)
    assert not used
    assert sym.error < 1e-12
    assert sym.permutations
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def noisy(source):
    def forward(self, x):
        return self.b(torch.relu(self.a(x))) + source()

    return Forward(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 3))


@pytest.mark.bad_input
@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_noise_of_a_source_of_its_own_is_no_part_of_the_graph(size):
    source = random.Random(1)
    with pytest.raises(UnsupportedModel, match="different outputs for the same input"):
        discover(noisy(lambda: size * source.random()), torch.randn(2, 5))


def test_a_graph_that_is_not_the_network_is_not_believed(monkeypatch):
    """A forward that tells tracing from running: what it says when it runs counts."""

    def two_faced(self, x):
        h = self.a(x)
        h = torch.relu(h) if torch.compiler.is_exporting() else torch.relu(h[:, [1, 0, 2, 3, 4, 5]])
        return self.b(h * torch.arange(6) if not torch.compiler.is_exporting() else h)

    torch.manual_seed(0)
    sym = discover(Forward(two_faced, a=nn.Linear(5, 6), b=nn.Linear(6, 3)), torch.randn(2, 5))
    assert not sym.permutations
    assert any("numerical check" in f.reason for f in sym.frozen)


# ------------------------------------------------------------ memory
class Held(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have made and that still live."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if hasattr(t, "dim")
        }
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in given:
                    self.hold(t, storage.nbytes())
        return result

    def hold(self, tensor, size):
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self.release, size)

    def release(self, size):
        self.now -= size


def test_no_more_than_a_few_weights_are_held_at_once():
    model, x = mlp(512, [512] * 12, 4).float(), torch.randn(2, 512)
    sym = discover(model, x)
    size = sum(p.numel() * 4 for p in model.parameters())
    graph = trace_graphs(model, Inputs((x,)), "carrier").evaluation
    with torch.no_grad(), Held() as held:
        check = Check.of_graph(graph, Inputs((x,)), RandomWeights(model, sym))
        assert check.error(sym) < 1e-12
    assert held.most < 0.6 * size  # one of the 12 weights is 0.08, in float64 0.16
    with torch.no_grad(), Held() as held:
        Check.of_network(model, Inputs((x,)), sym).error(sym)
    assert held.most > 0.9 * size  # all of them at once


# ------------------------------------------------------------ what the tests share
def checks(model, inputs, sym):
    graph = trace_graphs(model, inputs, sym.batch_norm).evaluation
    weights = RandomWeights(model, sym)
    return Check.of_graph(graph, inputs, weights), Check.of_network(model, inputs, sym)


def faults(sym):
    """Symmetries with one placement dropped, at wrong positions, or with the wrong exponent."""
    for kind in ("permutations", "scalings", "signs", "linear"):
        groups = getattr(sym, kind)
        if not groups:
            continue
        group = groups[-1]
        first, *rest = group.placements
        yield replace(sym, **{kind: (replace(group, placements=tuple(rest)),)})
        order = torch.arange(len(first.positions))
        order[:2] = order[:2].flip(0)
        swapped = replace(first, positions=first.positions[order])
        if kind == "permutations" and group.units > 2:
            yield replace(sym, **{kind: (replace(group, placements=(swapped, *rest), inner=()),)})
        if kind == "scalings":
            other = replace(first, exponent=2 * first.exponent)
            yield replace(sym, **{kind: (replace(group, placements=(other, *rest)),)})
    if read := [g for g in sym.shifts if g.readers]:
        yield replace(sym, shifts=(replace(read[0], readers=()),))
