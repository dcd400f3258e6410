"""Matrices that mix channels: found where only linear maps touch them, and nowhere else."""

import io

import pytest
import torch
from cases import Forward
from known_networks import NETWORKS
from modern_networks import Attention
from torch import nn

from weightsym import (
    UnsupportedModel,
    discover,
    identity_mixings,
    min_mass,
    mix,
    random_mixings,
    random_scales,
    random_shifts,
    shift,
    verify,
)
from weightsym import params as P
from weightsym.mixing import mixed_axis
from weightsym.verify import _random_mixings

lin = nn.Linear


CASES = {
    "attention": "attention",
    "rotary": "rotary half",
    "stream": "a stream of root mean squares",
    "centred stream": "a stream of layer norms",
    "flattened": "a flattened convolution",
    "lora": "LoRA",
}


def network(case):
    model, (x, *_), sym = NETWORKS[CASES[case]].known()
    return model, x, sym


@pytest.mark.parametrize("case", CASES)
def test_matrices_are_undone_by_their_inverses(case):
    model, x, sym = network(case)
    params = P.of(model)
    matrices = random_mixings(sym, torch.Generator().manual_seed(1))
    moved = mix(params, sym, matrices)
    for group in sym.linear:
        name = sym.axes[group.placements[0].axis].tensor
        assert not torch.equal(moved[name], params[name])
    torch.testing.assert_close(mix(params, sym, identity_mixings(sym)), params)
    back = mix(moved, sym, [torch.linalg.inv(m) for m in matrices])
    torch.testing.assert_close(back, params, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_stack_is_mixed_like_its_members(case):
    model, x, sym = network(case)
    stack = P.populate(model, 3, torch.Generator().manual_seed(2))
    matrices = random_mixings(sym, torch.Generator().manual_seed(3), members=3)
    together = mix(stack, sym, matrices)
    for k, member in enumerate(P.unstack(stack)):
        alone = mix(member, sym, [m[k] for m in matrices])
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name][k], tensor)
    one = [m[0] for m in matrices]
    shared = mix(stack, sym, one)
    for name, tensor in mix(P.unstack(stack)[2], sym, one).items():
        torch.testing.assert_close(shared[name][2], tensor)


@pytest.mark.parametrize("case", ["stream", "centred stream"])
def test_reflections_are_their_matrices(case):
    model, _, sym = network(case)
    params, drawn = P.of(model), _random_mixings(sym, torch.Generator().manual_seed(4))
    pairs = [(g, v) for g, v in zip(sym.linear, drawn, strict=True) if v.ndim == 2]
    assert pairs
    for group, v in pairs:
        eye = torch.eye(group.size).double().expand(group.spaces, -1, -1)
        matrices = eye - 2 * v[..., None] * v[..., None, :]
        torch.testing.assert_close(matrices @ matrices, eye)
        for placement in group.placements:
            w = params[sym.axes[placement.axis].tensor]
            expected = mixed_axis(w, sym, placement, matrices)
            torch.testing.assert_close(mixed_axis(w, sym, placement, v), expected)


def test_random_matrices_belong_to_their_groups():
    for case in ("rotary", "stream", "centred stream"):
        _, _, sym = network(case)
        for group, m in zip(sym.linear, random_mixings(sym), strict=True):
            gram = m @ m.mT
            if not group.rescales:
                torch.testing.assert_close(gram, torch.eye(group.size).double().expand_as(gram))
            if group.kind == "centred":
                torch.testing.assert_close(m.sum(-1), torch.ones(m.shape[:-1]).double())
            if group.kind == "complex":
                assert torch.equal(m[:, 0, 0], m[:, 1, 1])
                assert torch.equal(m[:, 0, 1], -m[:, 1, 0])


@pytest.mark.bad_input
def test_matrices_outside_their_group_are_refused():
    model, x, sym = network("rotary")
    params = P.of(model)
    good = random_mixings(sym)
    planes = next(k for k, g in enumerate(sym.linear) if g.kind == "complex")

    def with_(k, value):
        return [value if j == k else m for j, m in enumerate(good)]

    general = 1 - planes
    for k, wrong, message in (
        (planes, torch.diag(torch.tensor([1.0, -1.0])).expand(4, 2, 2), "form"),
        (general, torch.zeros(2, 4, 4), "be invertible"),
        (general, torch.full((2, 4, 4), float("nan")), "be finite"),
        (general, torch.eye(4), "must have shape"),
        (general, torch.eye(4).expand(3, 2, 4, 4), "must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            mix(params, sym, with_(k, wrong))
    with pytest.raises(ValueError, match="one tensor per group"):
        mix(params, sym, good[:1])
    model, x, sym = network("stream")
    doubled = [2 * m for m in random_mixings(sym)]
    with pytest.raises(ValueError, match="be orthogonal"):
        mix(P.of(model), sym, doubled)


# ------------------------------------------------------------ shifts


@pytest.mark.bad_input
def test_shifts_of_the_wrong_size_are_refused():
    model, x, sym = network("attention")
    for wrong in ([torch.zeros(6)], [torch.zeros(6), torch.zeros(5)], [torch.zeros(3, 6)] * 2):
        with pytest.raises(ValueError, match="`shifts"):
            shift(P.of(model), sym, wrong)
    with pytest.raises(ValueError, match="finite"):
        shift(P.of(model), sym, [torch.full((6,), float("nan"))] * 2)


# ------------------------------------------------------------ what is said of them


def test_symmetries_are_saved_as_plain_data():
    model, x, sym = network("rotary")
    file = io.BytesIO()
    torch.save(sym, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert str(loaded) == str(sym)
    assert verify(model, loaded, x) < 1e-12


# ------------------------------------------------------------ what nothing takes up


def test_one_key_says_that_queries_were_not_checked():
    """The softmax of one number is one, whatever the weights are."""
    attention = Attention(10, 2, 4).double()
    first = Forward(lambda s, x: s.attention(x[:, :1]), attention=attention)
    assert "two tokens" in discover(first, torch.randn(2, 1, 10).double()).unchecked
    assert "two tokens" in discover(first, torch.randn(2, 2, 10).double()).unchecked
    assert not discover(attention, torch.randn(2, 2, 10).double()).unchecked


# ------------------------------------------------------------ bad input
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: None, "`matrices` must hold one tensor per group, got NoneType"),
        (lambda m: ["a"] * len(m), "`matrices` must hold one tensor per group, got list"),
        (lambda m: [g * 1j for g in m], r"`matrices\[0\]` must hold real numbers.*complex128"),
        (lambda m: [g.to("meta") for g in m], r"`matrices\[0\]` must hold real numbers.*meta"),
        (lambda m: [g * 1e-310 for g in m], "an inverse overflows"),
    ],
)
def test_what_is_no_matrix_is_refused(change, message):
    model = nn.Sequential(lin(3, 4), lin(4, 2)).double()
    sym = discover(model, torch.randn(2, 3).double())
    with pytest.raises(ValueError, match=message):
        mix(P.of(model), sym, change(random_mixings(sym)))


@pytest.mark.bad_input
def test_numbers_that_would_be_rounded_and_symmetries_of_something_else_are_refused():
    model = nn.Sequential(lin(3, 4), lin(4, 2)).double()
    sym, params = discover(model, torch.randn(2, 3).double()), P.of(model)
    for wrong in (torch.ones(4, 3, dtype=torch.int64), torch.ones(4, 3, device="meta")):
        with pytest.raises(ValueError, match="'0.weight' must hold real floats"):
            mix({**params, "0.weight": wrong}, sym, random_mixings(sym))
    with pytest.raises(ValueError, match="`sym` must be what `discover` returned, got NoneType"):
        mix(params, None, [])
    with pytest.raises(ValueError, match="`sym` must be what `discover` returned, got dict"):
        random_mixings({})
    with pytest.raises(ValueError, match="`spread` must be at least 0 and finite, got nan"):
        random_mixings(sym, spread=float("nan"))
    with pytest.raises(ValueError, match=r"`shifts\[0\]` must hold real numbers"):
        shift(params, sym, [c * 1j for c in random_shifts(sym)])
    with pytest.raises(UnsupportedModel, match="complex parameters"):
        discover(nn.Linear(3, 2, dtype=torch.complex64), torch.randn(2, 3))


@pytest.mark.bad_input
def test_minimum_mass_refuses_a_start_and_a_tolerance_that_are_no_numbers():
    model = nn.Sequential(lin(3, 4), lin(4, 4), nn.ReLU(), lin(4, 2)).double()
    sym, params = discover(model, torch.randn(2, 3).double()), P.of(model)
    for mixing in (False, True):
        with pytest.raises(ValueError, match=r"`start\[0\]` must be positive and finite"):
            min_mass(params, sym, mixing=mixing, start=[torch.nan * s for s in random_scales(sym)])
        with pytest.raises(ValueError, match="`tolerance` must be positive"):
            min_mass(params, sym, mixing=mixing, tolerance=float("nan"))
