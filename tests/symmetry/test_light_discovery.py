"""What makes `discover` light changes no result: used memory, one trace, few motions."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_bnn.models import mlp
from lightning_bnn.symmetry import UnsupportedModel, discover
from lightning_bnn.symmetry.discovery.export import trace_graphs
from lightning_bnn.symmetry.forward import Inputs
from lightning_bnn.symmetry.fresh_memory import copied, fresh, reused_memory
from lightning_bnn.symmetry.groups import PermutationGroup
from lightning_bnn.symmetry.motions import covering_motions
from lightning_bnn.symmetry.placements import Axis, Placement
from tests.cases import CASES, Forward

refutation = importlib.import_module("lightning_bnn.symmetry.discovery.refutation")
checking = importlib.import_module("lightning_bnn.symmetry.discovery.checking")


# ------------------------------------------------------------ the check
class Ring(nn.Module):
    """Three numbers in a ring: it may be turned, but no two of them may be exchanged."""

    def __init__(self):
        super().__init__()
        self.ring = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x):
        return x * (self.ring * self.ring.roll(1).square()).sum()


def test_a_group_of_which_only_all_cycles_hold_is_refuted():
    model, inputs = Ring().double(), Inputs((torch.randn(4, 1, dtype=torch.float64),))
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
    one, two = covering_motions(sym, torch.Generator().manual_seed(0))
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


@pytest.mark.bad_input
@pytest.mark.parametrize(("draws", "message"), [(True, "different outputs"), (False, "no reason")])
def test_what_is_refused_because_it_draws_says_so(draws, message, monkeypatch):
    """As a masked autoencoder does, which hides other patches at every call."""

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * (torch.rand(6) if draws else 1))

    def refused(*_):
        raise UnsupportedModel("no reason")

    model = Forward(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 3))
    monkeypatch.setattr(refutation, "_refuted", refused)
    with pytest.raises(UnsupportedModel, match=message):
        discover(model, torch.randn(2, 5))


# ------------------------------------------------------------ one trace for both modes
class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.b(2 * x if self.training else x)


class Switches(Asks):
    """It keeps its mode under a name of its own."""

    factor = 1.0

    def train(self, mode=True):
        self.factor = 2.0 if mode else 1.0
        return super().train(mode)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * self.factor)


def with_(layer):
    return lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), layer, nn.Linear(6, 3))


def hooked():
    def hook(module, _, out):
        return 2 * out if module.training else out

    model = with_(nn.Identity())()
    model.register_forward_hook(hook)
    return model


@pytest.mark.parametrize(
    "build", [Asks, Switches, hooked, with_(nn.Dropout(0.5)), with_(nn.BatchNorm1d(6))]
)
def test_what_depends_on_the_mode_is_traced_in_both(build):
    model, inputs = build().eval(), Inputs((torch.randn(4, 5),))
    graphs = trace_graphs(model, inputs, "carrier")
    assert graphs.training is not graphs.evaluation
    assert not graphs.evaluation.says_the_same(graphs.training)
    assert "training" not in vars(nn.Module)


@pytest.mark.parametrize(
    "build", [lambda: mlp(5, [6], 3), with_(nn.LayerNorm(6)), with_(nn.Dropout(0.0))]
)
def test_what_does_not_is_traced_once(build):
    model, inputs = build().eval(), Inputs((torch.randn(4, 5),))
    graphs = trace_graphs(model.float(), inputs, "carrier")
    assert graphs.training is graphs.evaluation
    assert "training" not in vars(nn.Module)


@pytest.mark.parametrize(("p", "same"), [(0.0, True), (0.1, False)])
def test_a_dropout_of_nothing_is_no_difference(p, same):
    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.b(nn.functional.dropout(h, p, self.training))

    model = Forward(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 3)).eval()
    graphs = trace_graphs(model, Inputs((torch.randn(4, 5),)), "carrier")
    assert graphs.training is not graphs.evaluation
    assert graphs.evaluation.says_the_same(graphs.training) is same


# ------------------------------------------------------------ rounding
def test_a_network_in_which_rounding_grows_keeps_its_groups(monkeypatch):
    """As deep batch norms over two examples do; a wrong group still makes an error of one."""
    model = mlp(4, [6], 2).double()
    inputs = Inputs((torch.randn(5, 4, dtype=torch.float64),))
    sym, graphs = discover(model, *inputs.args), trace_graphs(model, inputs, "carrier")
    first = checking.Check.error
    noise = {"rounding": 2e-6, "growth": 1e10}

    def error(self, groups):
        self.error_seen = max(first(self, groups), noise["rounding"])
        return self.error_seen

    monkeypatch.setattr(checking.Check, "error", error)
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


def test_many_tensors_in_turn_keep_their_numbers():
    generator = torch.Generator().manual_seed(0)
    with reused_memory():
        held = []
        for k in range(300):
            rows = int(torch.randint(1, 900, (), generator=generator))
            dtype = (torch.float32, torch.float64, torch.bfloat16)[k % 3]
            held.append((k, copied(torch.full((rows, 77), k, dtype=torch.float64), dtype)))
            if len(held) > 5:
                held.pop(int(torch.randint(0, 6, (), generator=generator)))
            assert all(bool((t == torch.tensor(n, dtype=t.dtype)).all()) for n, t in held)


def test_groups_of_two_and_signs_move_in_one_motion_in_the_other_or_in_both():
    torch.manual_seed(0)
    sizes = [3, 2, 2, 2, 2, 2, 2, 3]
    layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in zip(sizes, sizes[1:], strict=False)]
    sym = discover(nn.Sequential(*sum(layers, [])), torch.randn(4, 3))
    swapped, flipped = set(), set()
    for seed in range(5):
        motions = covering_motions(sym, torch.Generator().manual_seed(seed))
        swapped |= set(zip(*([bool(o[0]) for o in m.cycles] for m in motions), strict=True))
        signs = [torch.cat(list(m.factors["signs"])) for m in motions]
        flipped |= set(zip(*((s < 0).tolist() for s in signs), strict=True))
    assert swapped == flipped == {(True, False), (False, True), (True, True)}
