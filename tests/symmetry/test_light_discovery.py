"""Used memory, one trace and few motions change no result of `discover`."""

import importlib
from dataclasses import replace

import pytest
import torch
from cases import CASES, Forward
from torch import nn
from torch.fx.node import map_arg

from lightning_bnn.models import mlp
from weightsym import UnsupportedModel, discover
from weightsym.dimensions.decomposition import written_out
from weightsym.dimensions.nodes import writes
from weightsym.discovery.export import trace_graphs
from weightsym.forward import Inputs
from weightsym.fresh_memory import copied, fresh, reused_memory
from weightsym.groups import PermutationGroup
from weightsym.placements import Axis, Placement
from weightsym.verify import covering_motions

refutation = importlib.import_module("weightsym.discovery.refutation")
checking = importlib.import_module("weightsym.discovery.refutation")


# ------------------------------------------------------------ the check
def ring_network():
    """Three numbers in a ring: it may be turned, but no two of them may be exchanged."""
    return Forward(
        lambda s, x: x * (s.ring * s.ring.roll(1).square()).sum(),
        ring=nn.Parameter(torch.rand(3) + 0.5),
    )


def test_a_group_of_which_only_all_cycles_hold_is_refuted():
    model, inputs = ring_network().double(), Inputs((torch.randn(4, 1, dtype=torch.float64),))
    found = discover(model, *inputs.args)
    assert not found.permutations
    place = Placement(len(found.axes), torch.arange(3)[:, None])
    planted = replace(
        found,
        axes=(*found.axes, Axis("ring", 0, 3, "raw")),
        permutations=(PermutationGroup(3, "ring", (place,)),),
        frozen=(),
    )
    graphs = trace_graphs(model, inputs, "carrier")
    left = refutation.refute(model, planted, graphs, inputs, False)
    assert not left.permutations
    assert [f.reason for f in left.frozen] == ["the numerical check refuted this group"]


@pytest.mark.parametrize("kind", ["permutations", "scalings", "signs"])
def test_a_planted_group_is_refuted_and_the_others_stay(kind):
    """The second layer's units as if nothing read them."""
    torch.manual_seed(0)
    activation = nn.Tanh if kind == "signs" else nn.ReLU
    model = nn.Sequential(
        nn.Linear(5, 300), activation(), nn.Linear(300, 300), activation(), nn.Linear(300, 2)
    )
    inputs = Inputs((torch.randn(3, 5),))
    sym = discover(model, *inputs.args)
    good, bad = getattr(sym, kind)
    planted = replace(bad, placements=bad.placements[:-1])
    graphs = trace_graphs(model, inputs, "carrier")
    wrong = replace(sym, **{kind: (good, planted)})
    left = refutation.refute(model, wrong, graphs, inputs, False)
    assert [g.name for g in getattr(left, kind)] == [good.name]
    assert [f.module for f in left.frozen] == [bad.name]


@pytest.mark.parametrize("case", CASES[:10], ids=lambda c: c.name)
def test_two_motions_generate_all_permutations_and_flip_every_sign(case):
    _, _, sym = case.known()
    one, two, *_ = covering_motions(sym, torch.Generator().manual_seed(0))
    for cycle, exchange in zip(one.cycles, two.cycles, strict=True):
        if len(cycle) == 2:
            assert [1, 0] in (cycle.tolist(), exchange.tolist())
            continue
        at, seen = 0, []
        for _ in cycle:
            seen.append(at)
            at = int(cycle[at])
        assert at == 0
        assert sorted(seen) == list(range(len(cycle)))  # one cycle
        a, b = (exchange != torch.arange(len(exchange))).nonzero()[:, 0].tolist()
        assert cycle[a] == b or cycle[b] == a  # neighbours: with the cycle, they generate all
    for a, b in zip(one.factors["signs"], two.factors["signs"], strict=True):
        assert bool(((a == -1) | (b == -1)).all())
        assert bool((a.abs() == 1).all() & (b.abs() == 1).all())


@pytest.mark.parametrize("kind", ["permutations", "signs"])
def test_what_only_moves_together_is_not_taken_for_two_groups_of_two(kind):
    """Incoming and outgoing weights of two units by themselves: one alone changes the function."""
    torch.manual_seed(0)
    sizes = [5, 2, 2, 2, 2, 3]
    layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in zip(sizes, sizes[1:], strict=False)]
    model, inputs = nn.Sequential(*sum(layers, [])).double(), Inputs((torch.randn(4, 5).double(),))
    sym = discover(model, *inputs.args)
    torn = [
        replace(g, placements=part)
        for g in getattr(sym, kind)
        for part in (g.placements[:-1], g.placements[-1:])
    ]
    assert len(torn) >= 8
    left = refutation.refute(
        model,
        replace(sym, **{kind: tuple(torn)}),
        trace_graphs(model, inputs, "carrier"),
        inputs,
        False,
    )
    assert not getattr(left, kind)


# ------------------------------------------------------------ rounding
def test_a_network_in_which_rounding_grows_keeps_its_groups(monkeypatch):
    """As deep batch norms over two examples do, where a wrong group still makes an error of one."""
    model = mlp(4, [6], 2).double()
    inputs = Inputs((torch.randn(5, 4, dtype=torch.float64),))
    sym, graphs = discover(model, *inputs.args), trace_graphs(model, inputs, "carrier")
    first = checking.Check.error
    noise = {"rounding": 2e-6, "growth": 1e10}

    def error(self, groups):
        self.error_seen = max(first(self, groups), noise["rounding"])
        return self.error_seen

    monkeypatch.setattr(checking.Check, "error", error)
    monkeypatch.setattr(checking.Check, "holds", lambda *_: False)
    monkeypatch.setattr(checking.Check, "_growth", lambda self, change: noise["growth"])
    left = refutation.refute(model, sym, graphs, inputs, False)
    assert len(left.permutations) == len(sym.permutations) == 1
    assert left.scaling_dof == sym.scaling_dof == 6
    (good,) = sym.scalings
    wrong = replace(sym, scalings=(replace(good, placements=good.placements[:-1]),))
    assert not refutation.refute(model, wrong, graphs, inputs, False).scalings
    for noise["rounding"], noise["growth"] in ((2e-6, 1e6), (1e-3, 1e13)):
        with pytest.raises(UnsupportedModel):  # not by that growth; never as much as that
            refutation.refute(model, sym, graphs, inputs, False)


# ------------------------------------------------------------ decompositions
def computed(program, x, rules=None):
    """What a program returns and writes, by its operations written out."""
    decomposed, signature = written_out(program, rules or {}), program.graph_signature
    states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    numbers = {**program.state_dict, **program.constants}
    values = {}

    def of(things):
        return map_arg(things, values.__getitem__)

    for node in decomposed.graph.nodes:
        if node.op == "placeholder":
            name = states.get(node.name, signature.inputs_to_lifted_tensor_constants.get(node.name))
            values[node] = x if name is None else numbers[name].clone()
        elif node.op == "get_attr":
            values[node] = decomposed.constants[node.target]
        else:
            assert not writes(node)
            values[node] = node.target(*of(node.args), **of(node.kwargs))
    returned = [n for n in decomposed.results if n.name in signature.user_outputs]
    written = {states[p.name]: values[n] for p, n in decomposed.written.items()}
    return [values[decomposed.results[n]] for n in returned], written


@pytest.mark.parametrize("case", CASES[:10], ids=lambda c: c.name)
def test_programs_that_are_written_out_compute_the_same(case):
    model, x = case.make()
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=False)
        (result, *_), _ = computed(program, x)
        torch.testing.assert_close(result, model(x))


def test_what_a_program_writes_is_what_a_network_writes():
    net = nn.Sequential(
        nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    )
    x = torch.randn(5, 2, 4)
    with torch.no_grad():
        program = torch.export.export(net.train(), (x,), strict=False)
        (result,), written = computed(program, x)
        (other,), _ = computed(program, x, {torch.ops.aten.relu.default: torch.sigmoid})
        torch.testing.assert_close(result, net(x))
    assert written.keys() == dict(net.named_buffers()).keys()
    torch.testing.assert_close(written, dict(net.named_buffers()))
    assert not torch.allclose(other, result)


# ------------------------------------------------------------ memory
def test_memory_is_used_again_only_when_nobody_looks_at_it():
    shape, other = torch.Size([300, 300]), torch.Size([300, 150])
    with reused_memory():
        first = copied(torch.ones(shape))
        place, view = first.data_ptr(), first[5:, 3]
        del first
        second = copied(torch.zeros(shape))
        assert second.data_ptr() != place
        assert bool((view == 1).all())
        del view
        third = fresh(other, torch.float64)
        assert third.data_ptr() == place
        assert third.shape == other
        assert third.dtype == torch.float64
    fourth = copied(third)  # outside of it, memory is torch's own
    assert torch.equal(fourth, third)


# ------------------------------------------------------------ one trace for both modes
class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_is_traced_once_if_it_drops_nothing(dropout):
    graphs = trace_graphs(Attention(dropout).eval(), Inputs((torch.randn(2, 5, 8),)), "carrier")
    assert (graphs.training is graphs.evaluation) == (dropout == 0)
