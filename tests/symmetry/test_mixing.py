"""Matrices that mix channels: found where only linear maps touch them, and nowhere else."""

import io

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from modern_networks import Attention, GatedMLP, LoRA, LowRank, rms
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import (
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
from lightning_bnn.symmetry.forward import Inputs, outputs

lin = nn.Linear


def sequences():
    return torch.randn(2, 5, 10).double()


def stream(norm):
    """Embeddings, one head, an MLP and logits on a stream that every block normalises."""

    def forward(s, tokens):
        x = s.embed(tokens) + s.positions[: tokens.shape[1]]
        x = x + s.attention(norm(x))
        x = x + s.two(F.silu(s.one(norm(x))))
        return s.last(norm(x))

    model = Forward(
        forward,
        embed=nn.Embedding(11, 6),
        attention=Attention(6, 1, 4, bias=False),
        one=lin(6, 7),
        two=lin(7, 6),
        last=lin(6, 11, bias=False),
    )
    model.positions = nn.Parameter(torch.randn(8, 6))
    return model


def chain(*layers):
    return nn.Sequential(*layers)


def tokens():
    return torch.randint(0, 11, (2, 5))


def rms_of_torch(x):
    return F.rms_norm(x, x.shape[-1:], eps=0.1)


def standardised(x):
    return F.layer_norm(x, x.shape[-1:], eps=0.1)


# network, input, {(kind, channels): spaces}
SPACES = {
    "attention": (Attention, sequences, {("general", 3): 4}),
    "grouped": (lambda: Attention(heads=4, kv_heads=2), sequences, {("general", 3): 4}),
    "rotary": (
        lambda: Attention(width=4, rotary="half"),
        sequences,
        {("complex", 2): 4, ("general", 4): 2},
    ),
    "rotary pairs": (
        lambda: Attention(width=4, rotary="interleaved", kv_heads=1),
        sequences,
        {("complex", 2): 2, ("general", 4): 1},
    ),
    "partly rotary": (
        lambda: Attention(width=6, rotated=4, rotary="half"),
        sequences,
        {("complex", 2): 4, ("general", 2): 2, ("general", 6): 2},
    ),
    "gains of queries": (lambda: Attention(norm="shared"), sequences, {("general", 3): 2}),
    "linear with a map": (lambda: Attention(scores="elu"), sequences, {("general", 3): 2}),
    "low rank": (LowRank, lambda: torch.randn(4, 6).double(), {("general", 3): 1}),
    "lora": (LoRA, lambda: torch.randn(4, 6).double(), {("general", 2): 1}),
    "swiglu": (GatedMLP, lambda: torch.randn(4, 6).double(), {}),
    "stream": (
        lambda: stream(rms_of_torch),
        tokens,
        {("orthogonal", 6): 1, ("general", 4): 2},
    ),
    "stream by hand": (
        lambda: stream(lambda x: rms(x, 0.1)),
        tokens,
        {("orthogonal", 6): 1, ("general", 4): 2},
    ),
    "unit vectors": (
        lambda: stream(lambda x: F.normalize(x, dim=-1)),
        tokens,
        {("orthogonal", 6): 1, ("general", 4): 2},
    ),
    "centred stream": (
        lambda: stream(standardised),
        tokens,
        {("centred", 6): 1, ("general", 4): 2},
    ),
    "convolutions": (
        lambda: chain(nn.Conv1d(10, 3, 3, padding=1), nn.Conv1d(3, 4, 3, padding=1)),
        lambda: torch.randn(2, 10, 5).double(),
        {("general", 3): 1},
    ),
    "grouped convolutions": (
        lambda: chain(nn.Conv1d(10, 6, 1, groups=2), nn.Conv1d(6, 4, 1, groups=2)),
        lambda: torch.randn(2, 10, 5).double(),
        {("general", 3): 2},
    ),
    "flattened": (
        lambda: chain(nn.Conv1d(10, 3, 1), nn.AvgPool1d(2), nn.Flatten(), lin(6, 4)),
        lambda: torch.randn(2, 10, 5).double(),
        {("general", 3): 1},
    ),
    "relu": (
        lambda: chain(lin(6, 3), nn.ReLU(), lin(3, 4)),
        lambda: torch.randn(4, 6).double(),
        {},
    ),
    "batch norm": (
        lambda: chain(lin(6, 3), nn.BatchNorm1d(3), lin(3, 4)),
        lambda: torch.randn(4, 6).double(),
        {},
    ),
    "largest over positions": (
        lambda: chain(nn.Conv1d(10, 3, 1), nn.AdaptiveMaxPool1d(1), nn.Flatten(), lin(3, 4)),
        lambda: torch.randn(2, 10, 5).double(),
        {},
    ),
    "constants beside channels": (
        lambda: Forward(
            lambda s, x: s.b(s.a(x) * torch.arange(1.0, 4).to(x)), a=lin(6, 3), b=lin(3, 4)
        ),
        lambda: torch.randn(4, 6).double(),
        {},
    ),
    "one number for all channels": (
        lambda: Forward(lambda s, x: s.b(s.a(x) + s.c(x)), a=lin(6, 3), b=lin(3, 4), c=lin(6, 1)),
        lambda: torch.randn(4, 6).double(),
        {},
    ),
}


def network(case):
    torch.manual_seed(0)
    build, draw, expected = SPACES[case]
    return build().double().eval(), draw(), expected


def spaces(sym):
    found = {}
    for group in sym.linear:
        key = group.kind, group.size
        found[key] = found.get(key, 0) + group.spaces
    return found


def runs(model, params, x):
    return outputs(model, params, Inputs((x,), {}))[0]


@pytest.mark.parametrize("case", SPACES)
def test_the_channels_that_mix_are_those_counted_by_hand(case):
    model, x, expected = network(case)
    sym = discover(model, x)
    assert spaces(sym) == expected
    assert not sym.frozen
    assert verify(model, sym, x[:1]) < 1e-11


@pytest.mark.parametrize("case", [c for c in SPACES if SPACES[c][2]])
def test_matrices_keep_the_function_and_other_matrices_do_not(case):
    model, x, _ = network(case)
    sym, params = discover(model, x), P.of(model)
    matrices = random_mixings(sym, torch.Generator().manual_seed(1))
    moved = mix(params, sym, matrices)
    before = runs(model, params, x)
    torch.testing.assert_close(runs(model, moved, x), before, rtol=1e-10, atol=1e-10)
    assert all(
        not torch.equal(
            moved[sym.axes[g.placements[0].axis].tensor],
            params[sym.axes[g.placements[0].axis].tensor],
        )
        for g in sym.linear
    )
    torch.testing.assert_close(mix(params, sym, identity_mixings(sym)), params)
    back = mix(moved, sym, [torch.linalg.inv(m) for m in matrices])
    torch.testing.assert_close(back, params, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["attention", "rotary", "centred stream", "flattened"])
def test_a_stack_is_mixed_like_its_members(case):
    model, x, _ = network(case)
    sym = discover(model, x)
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


def test_random_matrices_belong_to_their_groups():
    for case in ("rotary", "stream", "centred stream"):
        model, x, _ = network(case)
        sym = discover(model, x)
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
    model, x, _ = network("rotary")
    sym, params = discover(model, x), P.of(model)
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
    model, x, _ = network("stream")
    sym = discover(model, x)
    doubled = [2 * m for m in random_mixings(sym)]
    with pytest.raises(ValueError, match="be orthogonal"):
        mix(P.of(model), sym, doubled)


# ------------------------------------------------------------ shifts
def shifts(sym):
    return sorted((g.name, g.size, g.is_dead) for g in sym.shifts)


def test_keys_forget_their_bias_and_outputs_take_up_that_of_values():
    model, x, _ = network("attention")
    sym, params = discover(model, x), P.of(model)
    assert shifts(sym) == [("k.bias", 6, True), ("v.bias", 6, False)]
    moved = shift(params, sym, random_shifts(sym, torch.Generator().manual_seed(0)))
    changed = {n for n in params if not torch.equal(moved[n], params[n])}
    assert changed == {"k.bias", "v.bias", "out.bias"}
    torch.testing.assert_close(runs(model, moved, x), runs(model, params, x))
    wrong = params | {"v.bias": moved["v.bias"]}
    assert not torch.allclose(runs(model, wrong, x), runs(model, params, x))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rotary": "half", "width": 4}, ["v.bias"]),  # a shifted key turns with its position
        ({"dropout": 0.2}, ["k.bias"]),  # in training the weights of a row do not sum to one
        ({"scores": "elu"}, ["v.bias"]),
        ({"scores": "linear"}, []),
        ({"positions": "t5"}, ["k.bias", "table.weight", "v.bias"]),
        ({"positions": "alibi"}, ["k.bias", "v.bias"]),
        ({"bias": False}, []),
    ],
)
def test_what_stops_a_shift(options, expected):
    torch.manual_seed(0)
    sym = discover(Attention(**options).double(), sequences())
    assert [name for name, *_ in shifts(sym)] == expected
    assert not sym.frozen


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_dropout_tells_channels_apart(p):
    """In training every channel is dropped by itself; nothing is left to the check."""
    torch.manual_seed(0)
    sym = discover(chain(lin(10, 3), nn.Dropout(p), lin(3, 5)).double(), sequences())
    free = p == 0
    assert [(g.kind, g.size) for g in sym.linear] == [("general", 3)] * free
    assert shifts(sym) == [("0.bias", 3, False)] * free
    assert [g.units for g in sym.permutations] == [3]
    assert not sym.frozen


def test_shifts_of_norms_tables_and_shared_layers():
    torch.manual_seed(0)
    x = torch.randn(4, 6).double()
    shared = Forward(
        lambda s, x: s.b(s.n(s.a(x))) * s.c(s.n(s.a(x))),
        a=lin(6, 4), n=nn.LayerNorm(4), b=lin(4, 3), c=lin(4, 3),
    ).double()  # fmt: skip
    sym = discover(shared, x)
    assert [(g.name, len(g.readers)) for g in sym.shifts] == [("n.bias", 2)]
    padded = chain(nn.Conv1d(6, 3, 1), nn.Conv1d(3, 4, 3, padding=1)).double()
    assert not discover(padded, torch.randn(2, 6, 5).double()).shifts
    bare = chain(nn.Conv1d(6, 3, 1), nn.Conv1d(3, 4, 3)).double()
    sym = discover(bare, torch.randn(2, 6, 5).double())
    assert shifts(sym) == [("0.bias", 3, False)]
    assert verify(bare, sym, torch.randn(3, 6, 9).double()) < 1e-12
    tables = stream(rms_of_torch).double()
    sym = discover(tables, tokens())
    assert ("embed.weight", 6, False) in shifts(sym)
    stack = P.populate(tables, 2)
    values = random_shifts(sym, members=2)
    moved = shift(stack, sym, values)
    for k, member in enumerate(P.unstack(stack)):
        alone = shift(member, sym, [v[k] for v in values])
        for name, tensor in alone.items():
            torch.testing.assert_close(moved[name][k], tensor)


@pytest.mark.bad_input
def test_shifts_of_the_wrong_size_are_refused():
    model, x, _ = network("attention")
    sym = discover(model, x)
    for wrong in ([torch.zeros(6)], [torch.zeros(6), torch.zeros(5)], [torch.zeros(3, 6)] * 2):
        with pytest.raises(ValueError, match="`shifts"):
            shift(P.of(model), sym, wrong)
    with pytest.raises(ValueError, match="finite"):
        shift(P.of(model), sym, [torch.full((6,), float("nan"))] * 2)


# ------------------------------------------------------------ what is said of them
def test_the_dimension_counts_every_scale_once():
    model, x, _ = network("attention")
    sym = discover(model, x)
    assert sym.dimension == 2 * 2 * 9 + 2 * 6
    assert sym.scaling_dof == 12  # all of them are diagonal matrices
    assert "continuous dimension: 48" in str(sym)
    relu = chain(lin(6, 3), nn.ReLU(), lin(3, 4)).double()
    assert discover(relu, torch.randn(4, 6).double()).dimension == 3


def test_symmetries_are_saved_as_plain_data():
    model, x, _ = network("rotary")
    sym, file = discover(model, x), io.BytesIO()
    torch.save(sym, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert str(loaded) == str(sym)
    assert verify(model, loaded, x) < 1e-12


def test_an_empty_tensor_beside_keys_changes_nothing():
    """A cache without entries, as language models have at their first step."""

    def forward(s, x):
        q, k, v = (z.unflatten(-1, (2, 3)).transpose(1, 2) for z in s.qkv(x).chunk(3, -1))
        k = torch.cat([torch.tensor([]).to(x), k], -2)
        return s.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model = Forward(forward, qkv=lin(10, 18), o=lin(6, 3)).double()
    sym = discover(model, sequences())
    assert spaces(sym) == {("general", 3): 4}
    assert not sym.frozen


# ------------------------------------------------------------ what nothing takes up
def hyper(s, x):
    weight = s.maker(x[0, :2]).view(5, 4)
    return s.last(F.linear(s.first(x[:, 2:]), weight))


def symmetric(s, x):
    weight = s.middle.weight.triu() + s.middle.weight.triu(1).T
    return s.last(F.linear(s.first(x[:, 2:]), weight, s.middle.bias))


@pytest.mark.parametrize("forward", [hyper, symmetric])
def test_no_bias_is_shifted_in_front_of_a_weight_that_is_computed(forward):
    """Found by the rules, not by the check, which would have to refute it."""
    layers = {"first": lin(3, 4), "middle": lin(4, 4), "maker": lin(2, 20)}
    model = Forward(forward, **layers, last=lin(5 if forward is hyper else 4, 2)).double()
    sym = discover(model, torch.randn(3, 5).double())
    assert not {"first.bias", "maker.bias"} & {g.name for g in sym.shifts}
    assert not [f for f in sym.frozen if "refuted" in f.reason]


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
