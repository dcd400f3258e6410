"""The engine of dimensional analysis: as many groups as `discover`, and all of them right."""

import importlib
import re
from collections import Counter

import cases
import modern_networks
import pytest
import torch
from known_networks import NETWORKS, counted
from mixing_networks import Decoder as GroupedQueries
from torch import nn

from lightning_bnn import params
from lightning_bnn.symmetry import discover, verify
from lightning_bnn.symmetry.dimensions.description import by_dimensions
from lightning_bnn.symmetry.dimensions.elements import exchanged, flipped, rescaled
from lightning_bnn.symmetry.dimensions.engine import read
from lightning_bnn.symmetry.dimensions.explanation import explain

CASES = [pytest.param(case, id=case.name) for case in cases.CASES]


def outputs(model, weights, x):
    return params.apply(model, weights, x)


def scaling(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(count, generator=generator, dtype=torch.float64)


def signs(count, seed=0):
    return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def reading():
    known = {}

    def of(case):
        if case.name not in known:
            model, x, symmetries = case.known()
            known[case.name] = model, x, symmetries, read(model, x)
        return known[case.name]

    return of


@pytest.mark.parametrize("case", CASES)
def test_it_finds_the_groups_of_discover(case, reading):
    *_, symmetries, found = reading(case)
    assert found.log10_permutations == pytest.approx(symmetries.log10_permutations)
    assert found.scaling_dof == symmetries.scaling_dof
    assert found.sign_dof == symmetries.sign_dof


def described(symmetries):
    groups = symmetries.permutations
    return {
        "permutations": sorted((g.units, len(g.inner), len(g.tensors)) for g in groups),
        "scales, signs, shifts": (
            symmetries.scaling_dof, symmetries.sign_dof, symmetries.shift_dof,
        ),
        "weights": set(symmetries.weights),
        "constants": set(symmetries.constants),
        "logits": symmetries.softmax_shift,
    }  # fmt: skip


class Experts(nn.Module):
    """Two stacks of matrices, of which only the second has an axis that counts its matrices."""

    def __init__(self):
        super().__init__()
        self.stem, self.router = nn.Linear(5, 4), nn.Linear(4, 3)
        self.up, self.down = (nn.Parameter(torch.randn(3, *n)) for n in ((6, 4), (4, 6)))

    def forward(self, x):
        x = self.stem(x).tanh()
        hidden = torch.einsum("bi,ehi->beh", x, self.up).relu()
        out = torch.einsum("beh,eoh->beo", hidden, self.down)
        return (out * self.router(x).softmax(-1)[..., None]).sum(1)


@pytest.fixture
def by_new_engine(monkeypatch):
    discovery = importlib.import_module("lightning_bnn.symmetry.discovery.discover")
    monkeypatch.setattr(discovery, "by_rules", by_dimensions)
    monkeypatch.setattr(discovery, "recall", lambda key: None)
    monkeypatch.setattr(discovery, "remember", lambda key, symmetries: None)


@pytest.mark.usefixtures("by_new_engine")
def test_rows_of_stacks_move_with_what_lies_inside_them():
    torch.manual_seed(0)
    sym = discover(Experts().double(), torch.randn(8, 5, dtype=torch.float64))
    assert not sym.frozen
    (block,) = (g for g in sym.permutations if g.kind == "block")
    assert (block.units, len(block.inner[0])) == (3, 3)
    rows = {sym.axes[p.axis].tensor for p in block.placements if sym.axes[p.axis].dim == 0}
    assert rows == {"up", "down", "router.weight", "router.bias"}


@pytest.mark.usefixtures("by_new_engine")
@pytest.mark.parametrize("case", CASES)
def test_its_symmetries_are_those_of_discover(case):
    """Placements on axes, blocks inside blocks and all else, checked as those of rules are."""
    model, x, expected = case.known()
    found = discover(model, x)
    assert described(found) == described(expected)
    assert found.error < 1e-9
    assert not any("refuted" in f.reason for f in found.frozen)


MECHANISMS = (  # networks that the engine had wrong, or less of, before it had a word for them
    "patches merged", "tensordot", "positions are no copies",
    "the loop of the tutorials", "cells in a loop, LSTM", "a GRU that hands its state on",
    "one key by einsum", "one key for all", "complex rotary positions",
    "a bilinear layer", "linear index_put", "linear scatter_reduce", "write into a slice",
    "gather that tells channels apart", "zeros among channels", "dropout", "added noise",
    "one mask in two layers", "experts, one_hot", "experts by bmm", "bags of rows, sum",
    "parts of a tensor, with gains", "the one best expert",
)  # fmt: skip


@pytest.mark.usefixtures("by_new_engine")
@pytest.mark.parametrize("name", MECHANISMS)
def test_it_finds_what_is_known(name):
    network = NETWORKS[name]
    model, x = network.made()
    found = discover(model, *x)
    assert not any("refuted" in f.reason for f in found.frozen)
    units = Counter(f"{g.units}{'b' * (g.kind == 'block')}" for g in found.permutations)
    assert network.groups is None or units == counted(network.groups.split())
    assert network.scales in (None, found.scaling_dof)
    assert network.signs in (None, found.sign_dof)
    for inputs in [] if network.random else [x, *network.other_inputs()]:
        assert not verify(model, found, *inputs) > network.tolerance


@pytest.mark.parametrize("case", CASES)
def test_it_finds_the_matrices_of_discover(case, reading):
    *_, symmetries, found = reading(case)
    kinds = {}
    for group in symmetries.linear:
        kinds[group.kind, group.size] = kinds.get((group.kind, group.size), 0) + group.spaces
    assert {(m.kind, m.size): m.groups for m in found.linear} == kinds


@pytest.mark.parametrize("case", CASES)
def test_scales_and_signs_keep_the_function(case, reading):
    model, x, _, found = reading(case)
    weights = params.of(model)
    count = found.reading.system.count
    before = outputs(model, weights, x)
    for moved in (
        rescaled(weights, found, scaling(count)),
        flipped(weights, found, signs(count)),
    ):
        torch.testing.assert_close(outputs(model, moved, x), before, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_every_exchange_keeps_the_function(case, reading):
    model, x, _, found = reading(case)
    weights = moved = params.of(model)
    for group in found.exchanges.groups:
        moved = exchanged(moved, found, group, 0, len(group.units) - 1)
    torch.testing.assert_close(
        outputs(model, moved, x), outputs(model, weights, x), rtol=1e-8, atol=1e-8
    )
    assert any(not torch.equal(moved[name], weights[name]) for name in weights)


def test_a_wrong_element_changes_the_function(reading):
    """The laws above would see a scale that one tensor forgets."""
    (case,) = (c for c in cases.CASES if c.name == "mlp")
    model, x, _, found = reading(case)
    weights = params.of(model)
    moved = rescaled(weights, found, scaling(found.reading.system.count))
    moved["1.weight"] = weights["1.weight"]
    assert not torch.allclose(outputs(model, moved, x), outputs(model, weights, x))


class Sets(nn.Module):
    """The largest of every channel over the elements of a set, then gains that differ."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.register_buffer("gains", torch.tensor([[1.0, 1, 2, 2, 2, 3]]))

    def forward(self, x):
        return self.last(self.first(x).amax(1) * self.gains)


def sets():
    return Sets(), (torch.randn(4, 5, 3),)


def grouped_queries():
    model = GroupedQueries(d=16, heads=4, groups=2, rotary=0, vocab=20)
    return model, (torch.randint(0, 20, (2, 6)),)


def graph_attention():
    return modern_networks.GAT(), (torch.randn(2, 7, 5), modern_networks.path(7))


def adapter():
    return modern_networks.MergedLoRA(), (torch.randn(4, 6),)


def rows_divided_by_norms():
    return modern_networks.WeightNorm(torch.tanh), (torch.randn(4, 5),)


OTHERS = [sets, grouped_queries, graph_attention, adapter, rows_divided_by_norms]


@pytest.mark.parametrize("build", OTHERS)
def test_what_it_finds_in_other_networks_keeps_the_function(build):
    torch.manual_seed(0)
    model, x = build()
    model = model.double().eval()
    x = tuple(t.double() if t.is_floating_point() else t for t in x)
    found = read(model, *x)
    count = found.reading.system.count
    weights = params.of(model)
    moved = flipped(rescaled(weights, found, scaling(count)), found, signs(count))
    for group in found.exchanges.groups:
        moved = exchanged(moved, found, group, 0, len(group.units) - 1)
    before, after = (params.apply(model, w, *x) for w in (weights, moved))
    torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)


def test_the_largest_has_scales_and_no_signs_and_gains_tell_channels_apart():
    model, x = sets()
    found = read(model.eval(), *x)
    assert sorted(len(g.units) for g in found.exchanges.groups) == [2, 3]
    assert (found.scaling_dof, found.sign_dof) == (6, 0)


def test_a_buffer_of_one_dimension_follows_its_channels():
    """As statistics do, and as `discover` says."""
    model, x = sets()
    model.gains = model.gains[0]
    found = read(model.eval(), *x)
    assert [len(g.units) for g in found.exchanges.groups] == [6]
    assert [g.units for g in discover(model, *x).permutations] == [6]


def test_keys_that_heads_share_are_copied_to_every_head():
    """As `discover` finds them: two keys, and two heads behind each."""
    model, x = grouped_queries()
    found, symmetries = read(model.eval(), *x), discover(model, *x)
    sizes = sorted(len(g.units) for g in found.exchanges.groups)
    assert sizes == sorted(g.units for g in symmetries.permutations)
    assert found.scaling_dof == symmetries.scaling_dof
    assert found.sign_dof == symmetries.sign_dof


class Unknown(nn.Module):
    """An operation that no rule names, of which the probe sees that tokens are added up."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.logcumsumexp(self.first(x), 1))


def test_an_operation_without_a_rule_is_measured():
    found = read(Unknown().eval(), torch.randn(2, 5, 3))
    assert [len(g.units) for g in found.exchanges.groups] == [6]
    assert (found.scaling_dof, found.sign_dof) == (0, 0)
    assert not found.frozen


def test_explain_names_the_operation_that_holds_a_scale():
    x = torch.randn(5, 3)
    net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)).eval()
    lines = explain(net, "0.weight", x).splitlines()
    assert any("axis 0: scales and signs are held: sigmoid in `1`" in line for line in lines)
    assert any("axis 0: units, scales and signs go with 0.bias: add" in line for line in lines)
    relu = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    said = explain(relu, "0.weight", x)
    assert "axis 0: signs are held: relu" in said
    assert not re.search(r"axis 0: .*scales [^:]*are held", said)


def test_explain_says_what_only_training_does():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(4, 2))
    lines = explain(net, "0.weight", torch.randn(5, 3)).splitlines()
    (line,) = (line for line in lines if line.endswith("in training"))
    assert "units go with others: native_dropout in `1`" in line
    assert net.training


@pytest.mark.bad_input
def test_explain_refuses_a_tensor_that_is_not_there():
    with pytest.raises(ValueError, match=r"tensor 'wieght', but on \['bias', 'weight'\]"):
        explain(nn.Linear(3, 4), "wieght", torch.randn(5, 3))
