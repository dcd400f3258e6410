import logging

import pytest
import torch
from cases import Forward
from checked_symmetries import furthest, seeded
from mixing_networks import NETWORKS, known
from torch import nn

from weightsym import (
    balancing_matrices,
    canonicalise,
    discover,
    flip,
    mix,
    random_mixings,
    rescale,
)
from weightsym import params as P
from weightsym.balanced_form import balance_spaces, sides
from weightsym.verify import random_element

FORMS = [(n, "unit-norm") for n in ("heads", "adapter", "chain", "centred")]
FORMS += [(n, "min-mass") for n in NETWORKS if n != "chain"]


@pytest.mark.parametrize(("name", "scaling"), FORMS)
def test_it_is_a_canonical_form(name, scaling):
    """Keeps the function, again changes nothing, the same on the whole orbit."""
    model, x, sym, params = known(name)
    assert sym.linear
    whole = {"scaling": scaling, "mixing": "balanced", "shifts": True}
    form = canonicalise(params, sym, **whole)
    y = P.apply(model, params, x)
    torch.testing.assert_close(P.apply(model, form, x), y, rtol=1e-10, atol=1e-10)
    assert furthest(canonicalise(form, sym, **whole), form) < 1e-11
    other = random_element(params, sym, seeded(5), mixing=True)
    assert furthest(other, params) > 0.1
    assert furthest(canonicalise(other, sym, **whole), form) < 1e-8


@pytest.mark.parametrize("name", ["stream", "centred"])
def test_standard_deviations_do_not_see_rotations(name):
    """The deviation of what enters a unit is another one in a stream that has been turned."""
    model, x, sym, params = known(name)
    whole = {"scaling": "unit-std", "mixing": "balanced", "shifts": True}
    form = canonicalise(params, sym, **whole)
    torch.testing.assert_close(P.apply(model, form, x), P.apply(model, params, x))
    assert furthest(canonicalise(form, sym, **whole), form) < 1e-10
    for seed in range(2):
        other = random_element(params, sym, seeded(seed), mixing=True)
        assert furthest(canonicalise(other, sym, **whole), form) < 1e-8


@pytest.mark.parametrize("seed", range(8))
def test_the_sign_of_a_centred_stream(seed):
    """No centred matrix is minus one: the whole stream may be flipped beside it."""
    _, _, sym, params = known("centred")
    assert [g.units for g in sym.signs if sym.axes[g.placements[0].axis].tensor == "first.weight"]
    params = {n: t + 0.5 * torch.randn(t.shape, generator=seeded(seed)) for n, t in params.items()}
    form = canonicalise(params, sym, mixing="balanced")
    flipped = flip(params, sym, [-torch.ones(g.units) for g in sym.signs])
    other = mix(flipped, sym, random_mixings(sym, seeded(seed)))
    for equal in (flipped, other):
        assert furthest(canonicalise(equal, sym, mixing="balanced"), form) < 1e-9


def test_without_it_matrices_show():
    _, _, sym, params = known("heads")
    other = mix(params, sym, random_mixings(sym, seeded(5)))
    assert furthest(canonicalise(other, sym), canonicalise(params, sym)) > 0.1


@pytest.mark.parametrize("name", NETWORKS)
def test_a_stack_is_every_member(name):
    model, _, sym, _ = known(name)
    stack = P.populate(model, 3, seeded(5))
    together = P.unstack(canonicalise(stack, sym, mixing="balanced"))
    for form, member in zip(together, P.unstack(stack), strict=True):
        assert furthest(form, canonicalise(member, sym, mixing="balanced")) < 1e-9


@pytest.mark.parametrize("name", NETWORKS)
def test_what_the_matrices_do(name):
    """Sides are balanced, Gram matrices diagonal and sorted, first entries positive."""
    _, _, sym, params = known(name)
    params = mix(params, sym, balancing_matrices(params, sym))
    stack = {n: t[None] for n, t in params.items()}
    for group in sym.linear:
        a, b = sides(stack, sym, group)
        if group.rescales and group.kind == "general":
            torch.testing.assert_close(a @ a.mT, b @ b.mT, rtol=1e-9, atol=1e-9)
        if group.kind == "complex":
            assert torch.allclose(a.square().sum((-1, -2)), b.square().sum((-1, -2)))
        if group.kind in ("general", "orthogonal"):
            gram = a @ a.mT + b @ b.mT
            diagonal = gram.diagonal(dim1=-2, dim2=-1)
            assert (diagonal[..., :-1] > diagonal[..., 1:]).all()
            assert (gram - torch.diag_embed(diagonal)).abs().max() < 1e-10


def test_closed_form_against_the_definition():
    """G by an eigenvalue problem of A A^T and B B^T: the geometric mean of two matrices."""
    a, b = torch.randn(2, 1, 4, 6, dtype=torch.float64, generator=seeded(5))
    found = balance_spaces(a, b)
    p, q = a @ a.mT, b @ b.mT

    def root(m, power):
        values, vectors = torch.linalg.eigh(m)
        return vectors * values[..., None, :] ** power @ vectors.mT

    # G^T G solves X P X = Q
    middle = root(root(p, 0.5) @ q @ root(p, 0.5), 0.5)
    expected = root(p, -0.5) @ middle @ root(p, -0.5)
    torch.testing.assert_close(found.forward.mT @ found.forward, expected)
    torch.testing.assert_close(
        found.forward @ found.inverse_transpose.mT, torch.eye(4).double()[None]
    )
    torch.testing.assert_close(found.singular, torch.linalg.svdvals(a.mT @ b)[..., :4])


NARROW = {
    "two inputs": lambda: nn.Sequential(nn.Linear(2, 4), *norm(4), nn.Linear(4, 1)),
    "one input": lambda: nn.Sequential(nn.Linear(1, 4), *norm(4), nn.Linear(4, 1)),
    "centred": lambda: nn.Sequential(nn.Linear(1, 6), *norm(6, nn.LayerNorm), nn.Linear(6, 2)),
    "similarities": lambda: Forward(lambda s, x: s.a(x) @ s.a(x).T, a=nn.Linear(2, 4)),
    "two streams": lambda: nn.Sequential(
        nn.Linear(2, 6), *norm(6), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 8), *norm(8),
        nn.Linear(8, 2),
    ),
}  # fmt: skip


def norm(size, kind=nn.RMSNorm):
    return [kind(size, elementwise_affine=False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NARROW)
def test_biases_in_directions_without_weights(name, dtype, caplog):
    """No weight reaches into some directions of a stream, but its bias does."""
    torch.manual_seed(0)
    model, tolerance = NARROW[name]().to(dtype), 1e-4 if dtype == torch.float32 else 1e-8
    x = torch.randn(5, 1 if name in ("one input", "centred") else 2, dtype=dtype)
    sym, params = discover(model, x), P.of(model)
    with caplog.at_level(logging.WARNING):
        form = canonicalise(params, sym, mixing="balanced")
    assert not any(record.name.startswith("weightsym") for record in caplog.records)
    torch.testing.assert_close(P.apply(model, form, x), model(x))
    assert furthest(canonicalise(form, sym, mixing="balanced"), form) < tolerance
    for seed in range(3):
        other = random_element(params, sym, seeded(seed), mixing=True)
        assert furthest(canonicalise(other, sym, mixing="balanced"), form) < tolerance
    bias = next(n for n in params if n.endswith("bias"))
    other = {**params, bias: params[bias].roll(1)}  # as long as before, in another direction
    assert furthest(canonicalise(other, sym, mixing="balanced"), form) > 1e-2


def test_rank_deficient_spaces_stay_and_say_so(caplog):
    model, x, sym, params = known("heads")
    params = {n: t.clone() for n, t in params.items()}
    params["layers.0.o.weight"][:, :4] = 0
    with caplog.at_level(logging.WARNING):
        matrices = balancing_matrices(params, sym)
    assert "1 spaces have no full rank" in caplog.text
    assert torch.equal(matrices[1][0].abs(), torch.eye(4).double())
    for shifts in (False, True):  # what stays where it is differs along orbits
        with pytest.raises(ValueError, match="1 spaces at 'layers.0.v.weight' have no full rank"):
            canonicalise(params, sym, mixing="balanced", shifts=shifts)


def test_equal_singular_values_are_reported(caplog):
    _, _, sym, params = known("heads")
    params = {n: t.clone() for n, t in params.items()}
    for name in ("q", "k"):
        params[f"layers.0.{name}.weight"][:4] = torch.eye(8)[:4].double()
    with caplog.at_level(logging.WARNING):
        balancing_matrices(params, sym)
    assert "not unique" in caplog.text


def test_scales_of_other_units_keep_their_target():
    _, _, sym, params = known("heads")
    form = canonicalise(params, sym, "unit-norm", mixing="balanced")
    for gain in ("layers.0.n1.weight", "layers.0.n2.weight", "norm.weight"):
        torch.testing.assert_close(form[gain], torch.ones(8).double())
    assert rescale(params, sym, [torch.ones(g.units) for g in sym.scalings]).keys() == form.keys()


@pytest.mark.bad_input
def test_errors():
    _, _, sym, params = known("heads")
    with pytest.raises(ValueError, match="`mixing` must be 'balanced' or None, got 'qr'"):
        canonicalise(params, sym, mixing="qr")
    huge = {n: 1e200 * t for n, t in params.items()}
    with pytest.raises(ValueError, match="overflow in torch.float64"):
        balancing_matrices(huge, sym)
    with pytest.raises(ValueError, match="at least one network, got a stack of none"):
        balancing_matrices({n: t[None][:0] for n, t in params.items()}, sym)
