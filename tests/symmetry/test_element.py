"""The axioms of a group action, over all known networks and all kinds of groups."""

import pytest
import torch
from checked_symmetries import close, find, furthest, seeded
from known_networks import NETWORKS, ORDERED, each
from test_large_networks import count_as_large

from weightsym import (
    Element,
    compose,
    flip,
    invert,
    mix,
    permute,
    random_mixings,
    random_permutations,
    random_scales,
    random_shifts,
    random_signs,
    rescale,
    shift,
)
from weightsym import params as P
from weightsym.files import save_tensors
from weightsym.matching.moved import Moved

TOLERANCE = 1e-7


def size(params):
    return max((float(t.abs().max()) for t in params.values() if t.numel()), default=1.0)


def same(a, b):
    assert a.keys() == b.keys()
    assert close(a, b, TOLERANCE * max(1.0, size(b)))


def parts(sym, generator, members=None):
    return {
        "permutations": random_permutations(sym, generator, members),
        "scales": random_scales(sym, generator, members),
        "signs": random_signs(sym, generator, members),
        "matrices": random_mixings(sym, generator, members),
        "shifts": random_shifts(sym, generator, members),
    }


def one_by_one(params, sym, values):
    params = permute(shift(params, sym, values["shifts"]), sym, values["permutations"])
    params = flip(rescale(params, sym, values["scales"]), sym, values["signs"])
    return mix(params, sym, values["matrices"])


def it_does_what_its_parts_do_one_by_one(sym, params):
    values = parts(sym, seeded(1))
    same(Element.of_groups(sym, **values)(params), one_by_one(params, sym, values))


def products_and_inverses(sym, params):
    g, h = (Element.random(sym, seeded(k)) for k in (1, 2))
    moved = g(h(params))
    same((g @ h)(params), moved)
    same((g @ h).inverse(moved), params)
    same((g.inverse @ g)(params), params)
    same(((g @ h) @ g)(params), (g @ (h @ g))(params))
    if not sym.shifts:
        assert len((g @ h @ g.inverse).steps) == 1
    assert Element.identity(sym)(params) == params


def members_move_each_by_itself(sym, params):
    stack = P.stack([params, params, params])
    values, others = (parts(sym, seeded(k), 3) for k in (3, 4))
    g, h = (Element.of_groups(sym, **v) for v in (values, others))
    alone = [
        Element.of_groups(sym, **{kind: [v[m] for v in vs] for kind, vs in values.items()})
        for m in range(3)
    ]
    moved = g(stack)
    same(moved, P.stack([one(params) for one in alone]))
    same((h @ g)(stack), h(moved))
    same(g.inverse(moved), stack)


def gradients_are_dual(sym, params):
    """Products of weights and gradients stay; and those of squares are squares."""
    weights = {n: t for n, t in params.items() if n in sym.shapes and t.is_floating_point()}
    values = {**parts(sym, seeded(5)), "shifts": None}
    g = Element.of_groups(sym, **values)
    other = {n: torch.randn(t.shape, generator=seeded(6)).to(t) for n, t in weights.items()}
    first = {n for n in weights if n not in sym.aliases}
    moved, dual = g.on_some(weights), g.dual.on_some(other)
    before = sum(float((weights[n] * other[n]).sum()) for n in first)
    after = sum(float((moved[n] * dual[n]).sum()) for n in first)
    scale = sum(float((weights[n] * other[n]).abs().sum()) for n in first)
    assert abs(after - before) <= 1e-6 * max(1.0, scale)
    if not sym.linear:
        squared = g.squares.on_some({n: t.square() for n, t in weights.items()})
        same(squared, {n: t.square() for n, t in moved.items()})


def permutations_and_matrices_are_read_off(sym, params):
    """Those that it was made of, and those of a product and of an inverse."""
    for members in (None, 3):
        values, others = (parts(sym, seeded(k), members) for k in (8, 9))
        g = Element.of_groups(sym, **values)
        assert all(map(torch.equal, g.permutations, values["permutations"]))
        assert all(map(torch.allclose, g.matrices, values["matrices"]))
        rigid = {kind: others[kind] for kind in ("permutations", "matrices")}
        stack = params if members is None else P.stack([params] * members)
        for product in (Element.of_groups(sym, **rigid) @ g, g.inverse):
            orders, matrices = product.permutations, product.matrices
            again = Element.of_groups(sym, permutations=orders, matrices=matrices)
            left = again.inverse @ product  # scales, signs and shifts are left
            assert all(bool((p == torch.arange(p.shape[-1])).all()) for p in left.permutations)
        same(compose_with_inverse(values["permutations"], sym)(stack), stack)


def compose_with_inverse(orders, sym):
    return Element.of_groups(sym, permutations=compose(orders, invert(orders, sym), sym))


def stacks_are_joined_and_parted(sym, params):
    g, h = (Element.of_groups(sym, **{**parts(sym, seeded(k), 2), "shifts": None}) for k in (1, 2))
    one = Element.of_groups(sym, **{**parts(sym, seeded(3)), "shifts": None})
    joined, stack = Element.joined([g, h, one], [2, 2, 1]), P.stack([params] * 5)
    expected = [g(P.stack([params] * 2)), h(P.stack([params] * 2)), P.stack([one(params)])]
    whole = {n: torch.cat([part[n] for part in expected]) for n in params}
    same(joined(stack), whole)
    rows = torch.tensor([4, 0, 2])
    same(joined.of_members(rows)(P.stack([params] * 3)), {n: t[rows] for n, t in whole.items()})
    same(joined.of_members(3)(params), {n: t[3] for n, t in whole.items()})


def tensors_move_one_by_one_as_the_whole_network_does(sym, params):
    g = seeded(1)
    signs, orders = random_signs(sym, g), random_permutations(sym, g)
    matrices = random_mixings(sym, g)
    whole = mix(permute(flip(params, sym, signs), sym, orders), sym, matrices)
    first = Element.of_groups(sym, signs=signs)
    then = Element.of_groups(sym, permutations=orders, matrices=matrices)
    network = Moved(params, first)
    assert all(torch.allclose(network[n], t) for n, t in flip(params, sym, signs).items())
    network.move(then)
    for n in params:
        assert torch.allclose(network[n], whole[n], atol=1e-6)
    network.stand(Element(sym))
    assert all(torch.equal(network[n], t) for n, t in params.items())
    if sym.linear:  # random matrices are never one
        assert furthest(whole, params) > 0.01


AXIOMS = (
    it_does_what_its_parts_do_one_by_one,
    products_and_inverses,
    members_move_each_by_itself,
    gradients_are_dual,
    permutations_and_matrices_are_read_off,
    stacks_are_joined_and_parted,
    tensors_move_one_by_one_as_the_whole_network_does,
)


@each
def test_every_axiom_holds(name, monkeypatch):
    """The first of all networks, the others of every third."""
    count_as_large(monkeypatch)
    _, _, sym, params = find(name)
    for axiom in AXIOMS[: None if ORDERED.index(name) % 3 == 0 else 1]:
        axiom(sym, params)


def test_what_does_not_commute_is_told_apart():
    """The controls: the other order, the element itself for its inverse, or for its dual."""
    _, _, sym, params = find("attention")
    g, h = (Element.random(sym, seeded(k)) for k in (1, 2))
    for wrong, right in ((h @ g, g @ h), (g, g.inverse), (g @ g, Element.identity(sym))):
        assert not close(wrong(params), right(params), 1e-3)


WRITTEN = [name for name in NETWORKS if "expert" in name or "heads" in name][:6]


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_written_and_read(name, tmp_path):
    _, _, sym, params = find(name)
    g = Element.random(sym, seeded(1)) @ Element.random(sym, seeded(2))
    g.save(tmp_path / "g.safetensors")
    same(Element.load(tmp_path / "g.safetensors", sym)(params), g(params))


@pytest.mark.bad_input
def test_other_files_are_refused(tmp_path):
    (_, _, sym, params), (_, _, other, _) = find(WRITTEN[0]), find(WRITTEN[-1])
    Element.random(sym).save(tmp_path / "g.safetensors")
    with pytest.raises(ValueError, match="another network than that of `sym`"):
        Element.load(tmp_path / "g.safetensors", other)
    save_tensors(tmp_path / "w.safetensors", params)
    with pytest.raises(ValueError, match="does not contain a group element"):
        Element.load(tmp_path / "w.safetensors", sym)
