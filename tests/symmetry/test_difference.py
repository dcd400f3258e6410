"""The difference of two networks: steps and rest."""

import copy
import math

import pytest
import torch
from cases import Forward
from checked_symmetries import find, moved_at_random, seeded
from test_matching import noisy
from torch import nn

from lightning_bnn import models
from weightsym import (
    Element,
    difference,
    discover,
    fingerprint,
    match,
    permute,
    random_permutations,
    random_scales,
    relation,
    rescale,
)
from weightsym import params as P
from weightsym.matching import difference as difference_module
from weightsym.matching.difference import steady_signs
from weightsym.matching.interpolation import output_error, random_inputs
from weightsym.matching.plan import Plan
from weightsym.matching.relation import fixed_points
from weightsym.matching.walk import Walk

SMALL = ("mlp", "tanh mlp", "recurrent", "resnet", "self-feeding")
MIXED = ("adapter", "stream", "centred")


def element(params, sym, seed=3):
    return moved_at_random(params, sym, seeded(seed))


@pytest.fixture(scope="module")
def pair():
    """Two independent perceptrons and their symmetries."""
    torch.manual_seed(0)
    nets = [models.mlp(6, [16, 12], 3).double() for _ in range(2)]
    return nets[0], discover(nets[0], torch.randn(2, 6).double()), *map(P.of, nets)


# ------------------------------------------------------------ orbits
@pytest.mark.parametrize("name", [*SMALL, *MIXED])
def test_nothing_is_left_within_an_orbit(name):
    _, _, sym, params = find(name)
    found = difference(element(params, sym), params, sym)
    assert found.stages[0].relative > 0.5  # as they are given
    assert found.rest < 1e-7


@pytest.mark.parametrize("layer", [nn.Tanh, nn.ReLU])
def test_nothing_is_left_between_networks_of_two_units(layer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 2), layer(), nn.Linear(2, 1)).double()
    sym, params = discover(net, torch.randn(3, 1).double()), P.of(net)
    assert difference(element(params, sym), params, sym).rest < 1e-6
    torch.manual_seed(1)
    other = {n: torch.randn_like(t) for n, t in params.items()}
    assert difference(other, params, sym).rest > 0.01


def test_lengths_that_a_network_normalises_are_no_difference():
    torch.manual_seed(0)
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(*n)) for n in ((4, 8), (8, 5))]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Linear(5, 2)).double()
    sym, params = discover(net, torch.randn(2, 4).double()), P.of(net)
    other = element(params, sym)
    assert difference(other, params, sym).rest < 1e-7
    assert fingerprint(other, sym).agrees(fingerprint(params, sym))


def test_channels_without_full_rank_are_compared():
    """The network has fewer rows than there are channels: no matrix balances them."""
    torch.manual_seed(2)
    layers = {"z": nn.Parameter(torch.randn(2, 4)), "a": nn.Linear(4, 6), "b": nn.Linear(6, 5)}
    model = Forward(lambda s: s.b(torch.relu(s.a(s.z))), **layers).double()
    sym, params = discover(model), P.of(model)
    other = noisy(params, 3.0)
    apart = difference(other, params, sym)
    assert difference(element(params, sym), params, sym).rest < 0.02
    assert apart.rest > 0.3
    assert torch.allclose(P.apply(model, apart.a), P.apply(model, other))


@pytest.mark.parametrize("name", ["mlp", "tanh mlp", "adapter"])
def test_the_rest_is_one_of_orbits(name):
    """The rest does not depend on which networks of their orbits are compared."""
    _, _, sym, params = find(name)
    other = noisy(params, 0.1)
    found = [difference(element(other, sym, k), element(params, sym, 7 + k), sym) for k in range(2)]
    assert found[0].rest == pytest.approx(found[1].rest, rel=1e-3)
    assert 0.02 < found[0].rest < 0.2
    assert found[0].stages[0].relative != pytest.approx(found[1].stages[0].relative, rel=1e-3)


def test_the_functions_stay_what_they_were(pair):
    model, sym, a, b = pair
    found, inputs = difference(a, b, sym), random_inputs(torch.randn(3, 6).double())
    for before, after in ((a, found.a), (b, found.b)):
        assert output_error(model, before, after, inputs) < 1e-10
    assert output_error(model, found.a, found.b, inputs) > 0.1
    codes = [fingerprint(params, sym).code for params in (a, b)]
    assert [each.code for each in found.fingerprints] == codes
    assert codes[0] != codes[1]


def test_outputs_of_large_networks_are_compared_one_tensor_at_a_time(pair, monkeypatch):
    model, _, a, b = pair
    inputs = random_inputs(torch.randn(3, 6).double())
    small, itself = (output_error(model, params, b, inputs) for params in (a, b))
    monkeypatch.setattr("weightsym.networks.forward._LARGE", 0)
    assert output_error(model, a, b, inputs) == pytest.approx(small, rel=1e-9)
    empty = copy.deepcopy(model).to("meta")
    assert output_error(empty, a, b, inputs) == pytest.approx(small, rel=1e-9)
    assert small > 0.1 > itself == output_error(model, b, b, inputs) == 0


def test_steps_explain_what_was_done(pair):
    _, sym, a, _ = pair
    generator = seeded(1)
    scaled = rescale(a, sym, random_scales(sym, generator))
    moved = permute(a, sym, random_permutations(sym, generator))
    by_scales, by_order = (difference(x, a, sym).explained for x in (scaled, moved))
    assert by_scales == {"least mass": pytest.approx(1), "units in order": pytest.approx(0)}
    assert by_order["units in order"] == pytest.approx(1, abs=0.05)
    found = difference(noisy(moved, 0.1), a, sym)
    first, last = found.stages[0].relative ** 2, found.stages[-1].relative ** 2
    assert sum(found.explained.values()) == pytest.approx(1 - last / first)
    same = difference(a, a, sym)
    assert same.explained == {"least mass": 0, "units in order": 0}
    assert same.rest == 0
    assert all(torch.equal(p, torch.arange(len(p))) for p in same.permutations)


def test_distances_are_those_of_all_weights(pair):
    _, sym, a, b = pair
    stage = difference(a, b, sym).stages[0]
    x, y = P.ravel(a)[0], P.ravel(b)[0]
    assert stage.distance == pytest.approx(float((x - y).norm()))
    mean = (x.square().sum() + y.square().sum()) / 2
    assert stage.relative == pytest.approx(float((x - y).norm() / mean.sqrt()))
    layer = stage.by_layer()["3"]
    parts = [("3.weight", "3.bias"), ("3.weight",)]
    right, wrong = (
        math.sqrt(sum(stage.squares[n] for n in p) / sum(stage.sizes[n] for n in p)) for p in parts
    )
    assert layer == pytest.approx(right) != pytest.approx(wrong)


def test_statistics_do_not_count():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    sym, params = discover(model, torch.randn(3, 4)), P.of(model)
    other = {n: t + 1 if "running" in n else t for n, t in params.items()}
    assert difference(other, params, sym).rest == 0
    assert output_error(model, other, params, random_inputs(torch.randn(3, 4))) > 0.01


def test_labels_do_not_count_where_units_are_alike(pair):
    """Units of zeros fit anywhere: they are not taken for units in their places."""
    _, sym, a, b = pair
    empty = [{n: torch.zeros_like(t) for n, t in p.items()} for p in (a, b)]
    found = difference(*empty, sym)
    assert sum(map(fixed_points, found.permutations)) < 9
    assert found.rest == 0


# ------------------------------------------------------------ outputs
def test_inputs_are_drawn_anew_but_for_tokens():
    first, again = (random_inputs(torch.randn(4, 6), seed=1)[2].args[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, random_inputs(torch.randn(4, 6), seed=2)[2].args[0])
    tokens = torch.tensor([[1, 2]])
    assert all(torch.equal(i.args[0], tokens) for i in random_inputs(tokens, draws=2))


# ------------------------------------------------------------ signs of whole streams
def test_a_stream_that_flips_as_a_whole_is_matched_with_signs():
    """One sign for all channels of a stream is not one sign for each of them."""
    model, x, sym, params = find("centred")
    assert any(g.units == 1 for g in sym.signs)
    for group, mirror in zip(sym.permutations, Plan(sym).mirrors, strict=True):
        assert mirror is None or sym.signs[mirror].units == group.units
    moved = element(params, sym)
    found = match(moved, params, sym, signs=True, method="ascent")
    assert output_error(model, found.element(moved), params, random_inputs(x)) < 1e-10


def test_noise_does_not_change_which_signs_are_compared():
    """A training step may change which weight is the largest, and not the sign of a gain."""
    _, _, sym, params = find("resnet")
    found = difference(element(noisy(params, 0.2), sym), params, sym)
    assert found.rest < 0.3


# ------------------------------------------------------------ simpler ways
def test_no_step_ends_farther_than_a_simpler_one():
    """Even where the largest weight of a stream, which tells its sign, has another sign."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Linear(6, 8), layer, nn.LayerNorm(8), nn.Linear(8, 4)).double().eval()
    sym = discover(model, torch.randn(2, 5, 6).double())
    params = {n: t + 0.3 * torch.randn_like(t) for n, t in P.of(model).items()}
    a, b = ({n: t.clone() for n, t in w.items()} for w in (noisy(params, 0.03), params))
    for k, w in enumerate((a, b)):
        w["0.weight"][0, 0], w["0.weight"][1, 1] = 2 - 0.01 * k, -2 + 0.01 * (1 - k)
    k = next(k for k, g in enumerate(sym.signs) if g.units == 1)
    assert steady_signs(a, sym)[k] == -steady_signs(b, sym)[k]
    plain, moved = (difference(w, b, sym) for w in (a, element(a, sym)))
    steps = {stage.name: stage.relative for stage in plain.stages}
    assert steps["units in order"] <= plain.stages[1].relative * (1 + 1e-9)
    assert steps["channels mixed"] <= 1.1 * steps["units in order"]
    assert max(plain.rest, moved.rest) < 0.04


# ------------------------------------------------------------ independent networks
class Residual(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def residual_networks(inputs):
    torch.manual_seed(0)
    nets = [
        nn.Sequential(
            nn.Linear(inputs, 48), *(Residual(48, 256) for _ in range(3)), nn.Linear(48, 9)
        )
        for _ in range(2)
    ]
    return [*map(P.of, nets)], discover(nets[0], torch.randn(8, inputs))


def test_large_networks_with_nothing_in_common_are_searched_once(monkeypatch):
    """Further starts cost several times as much, and find nothing that is much closer."""
    (a, b), sym = residual_networks(96)
    searched = []
    matched = difference_module.match_all
    monkeypatch.setattr(
        difference_module, "match_all", lambda *args: searched.append(1) or matched(*args)
    )
    once = difference(a, b, sym)
    assert not searched
    monkeypatch.setattr(Walk, "is_apart", False)
    often = difference(a, b, sym)
    assert len(searched) > 2
    assert often.rest <= once.rest * (1 + 1e-6) < 1.05 * often.rest
    assert once.agreeing == often.agreeing
    monkeypatch.undo()
    assert not Walk(noisy(b, 0.01), b, sym).is_apart


@pytest.mark.parametrize("moves", [False, True])
def test_copies_whose_first_layers_are_new_are_not_called_independent(moves):
    """No unit is found twice there, as in independent networks, but further ones fit."""
    (a, b), sym = residual_networks(96)
    for new in (["0.weight", "0.bias"], ["0.weight", "1.up.weight"]):
        child = noisy(b, 0.05) | {name: a[name] for name in new}
        child = Element.random(sym, seeded(3))(child) if moves else child
        assert Walk(child, b, sym).is_apart
        found = relation(child, b, sym)
        assert found.verdict in ("made from it", "parts of it")
        assert found.difference.rest < 0.7


def test_of_many_units_the_first_are_looked_for():
    """Others count where some have no weights: nothing tells which of them can be found."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 1100), nn.ReLU(), nn.Linear(1100, 8))
    sym, w = discover(net, torch.randn(4, 16)), P.of(net)
    child = Element.random(sym, seeded(3))(noisy(w, 0.01))
    (group,) = relation(child, w, sym).groups
    assert (group.units, group.tried) == (1100, 512)
    assert group.agreeing > 500
    holes = w | {name: w[name].clone() for name in ("0.weight", "0.bias")}
    for name in ("0.weight", "0.bias"):
        holes[name][3] = 0
    (group,) = relation(child, holes, sym).groups
    assert group.tried == 1100


def test_a_stream_that_few_inputs_enter_is_searched_from_every_start():
    """Nothing is found twice there, even in a copy."""
    (_, b), sym = residual_networks(9)
    walk = Walk(noisy(b, 0.001), b, sym)
    assert sum(walk.agreeing.values()) < 0.05 * 768
    assert not walk.is_apart
