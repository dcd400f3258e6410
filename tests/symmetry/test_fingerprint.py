"""Fingerprints: the same along orbits, others for other networks."""

import functools
import math

import pytest
import torch
from checked_symmetries import find, moved_at_random, seeded
from disk_networks import Experts

from lightning_bnn import models
from weightsym import Fingerprint, discover, fingerprint, mass, min_mass, permute
from weightsym import params as P
from weightsym.forms.fingerprint import _STEP, _code, to_least_mass

NAMES = ["mlp", "tanh mlp", "attention", "recurrent", "resnet", "adapter", "stream", "centred"]


@functools.cache
def own_of(name):
    _, _, sym, params = find(name)
    return fingerprint(params, sym)


@pytest.mark.parametrize("name", NAMES)
def test_networks_of_an_orbit_have_one_when_rounded(name):
    """Also after their weights have been rounded, but not after a change of one in a thousand."""
    (_, _, sym, params), own = find(name), own_of(name)
    moved = moved_at_random(params, sym, seeded(3))
    rounded = {n: t.float() if t.is_floating_point() else t for n, t in moved.items()}
    for other in (moved, rounded):
        found = fingerprint(other, sym)
        assert own.agrees(found)
        assert found.attained
        for tensor, norm in own.norms.items():
            assert found.norms[tensor] == pytest.approx(norm, rel=1e-6, abs=1e-12)
    changed = {n: t * 1.001 if P.is_weight(n, t) else t for n, t in params.items()}
    assert not own.agrees(fingerprint(changed, sym))


def test_norms_of_one_hidden_layer():
    """At least mass, weights that enter a unit are as large as those that leave it."""
    torch.manual_seed(0)
    model = models.mlp(5, [7], 3).double()
    sym, params = discover(model, torch.randn(2, 5).double()), P.of(model)
    w, v = params["1.weight"], params["3.weight"]
    products = float((w.norm(dim=1) * v.norm(dim=0)).sum()) ** 0.5
    scales = (v.norm(dim=0) / w.norm(dim=1)).sqrt()
    norms = fingerprint(params, sym).norms
    assert norms["1.weight"] == pytest.approx(products)
    assert norms["3.weight"] == pytest.approx(products)
    assert norms["1.bias"] == pytest.approx(float((params["1.bias"] * scales).norm()))
    assert norms["3.bias"] == pytest.approx(float(params["3.bias"].norm()))
    assert norms["1.weight"] != pytest.approx(float(w.norm()), rel=1e-3)


def test_experts_have_their_norms_together():
    torch.manual_seed(0)
    net = Experts()
    sym, params = discover(net, torch.randn(5, 4)), P.of(net)
    moved = permute(params, sym, [torch.arange(g.units).roll(1) for g in sym.permutations])
    assert not torch.equal(moved["experts.0.0.weight"], params["experts.0.0.weight"])
    assert fingerprint(moved, sym).norms == pytest.approx(fingerprint(params, sym).norms)
    assert "experts.0.0.weight" in fingerprint(params, sym).norms
    assert "experts.1.0.weight" not in fingerprint(params, sym).norms


def test_at_most_one_word_changes_at_the_end_of_a_cell():
    norms = torch.rand(5, generator=torch.Generator().manual_seed(0)).double() + 0.5
    codes = [_code(norms * math.exp(_STEP * k / 400)) for k in range(801)]
    fingerprints = [Fingerprint({}, code) for code in codes]
    steps = list(zip(fingerprints, fingerprints[1:], strict=False))
    assert all(a.agrees(b) for a, b in steps)
    assert sum(a.code != b.code for a, b in steps) >= 16  # eight numbers, two words, two cells
    assert not fingerprints[0].agrees(fingerprints[-1])
    assert str(fingerprints[0]) == codes[0]


def test_zeros_and_limits():
    torch.manual_seed(0)
    model = models.mlp(4, [5], 2)
    sym, params = discover(model, torch.randn(2, 4)), P.of(model)
    empty = {n: torch.zeros_like(t) for n, t in params.items()}
    assert fingerprint(empty, sym).agrees(fingerprint(empty, sym))
    assert set(fingerprint(empty, sym).norms.values()) == {0.0}
    headless = {**params, "3.weight": torch.zeros(2, 5)}
    assert not bool(min_mass(headless, sym).attained) or fingerprint(headless, sym).attained
    pair = P.stack([params, params])
    least, attained = to_least_mass(pair, sym)
    assert least.view(pair)["1.weight"].shape == (2, 5, 4)
    assert attained.shape == (2,)


# ------------------------------------------------------------ what they see
SEEN = [*NAMES, "heads", "rotary heads"]


def largest_matrix(params):
    return max((n for n, t in params.items() if t.ndim > 1), key=lambda n: params[n].numel())


def one_matrix(change):
    return lambda params: {largest_matrix(params): change(params[largest_matrix(params)])}


def largest_weight(factor):
    def changed(params):
        name = max(params, key=lambda n: float(params[n].abs().max()))
        at = params[name].abs() == params[name].abs().max()
        return {name: torch.where(at, factor * params[name], params[name])}

    return changed


CHANGES = {
    "shuffled entries": one_matrix(lambda w: w.flatten()[torch.randperm(w.numel())].view_as(w)),
    "the largest weight by a third": largest_weight(4 / 3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SEEN)
def test_changes_of_a_network_are_seen(name, change):
    """Norms of tensors alone, the control, see none of those that only move numbers."""
    _, _, sym, params = find(name)
    weights = {n: t for n, t in params.items() if P.is_weight(n, t) and n not in sym.aliases}
    changed = CHANGES[change](weights)
    own, found = own_of(name), fingerprint({**params, **changed}, sym)
    assert not own.agrees(found)


def test_signs_are_not_seen():
    """As the docstring says."""
    _, _, sym, params = find("mlp")
    name = largest_matrix(params)
    assert own_of("mlp").agrees(fingerprint({**params, name: -params[name]}, sym))


def test_heads_that_matrices_balance_have_the_least_mass():
    net = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()
    sym, w = discover(net, torch.randn(2, 5, 8).double()), P.of(net)
    assert sym.scalings
    assert sym.linear
    least = min_mass(w, sym, mixing=True)
    moved = to_least_mass(w, sym, mixing=True)[0](w)
    assert torch.isclose(mass(moved, sym), least.minimum, rtol=1e-10)
    assert not any(bool(units.any()) for units in least.falling)
