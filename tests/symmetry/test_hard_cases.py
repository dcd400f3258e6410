"""Networks that once fooled the reading of a graph, or broke it."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from checked_symmetries import exact, units
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import canonicalise, discover, min_mass, verify
from lightning_bnn.symmetry.verify import random_element

lin = nn.Linear


def attention(s, x, mask=None):
    q, k, v = (z.unflatten(-1, (4, 4)).transpose(1, 2) for z in s.qkv(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask(x))
    return s.o(y.transpose(1, 2).flatten(2))


def alibi(x):
    t = torch.arange(x.shape[1])
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.06]).to(x.dtype)[:, None, None]
    return -(t[None] - t[:, None]).abs().to(x.dtype) * slopes


def test_heads_with_their_own_constant_bias_are_not_exchangeable():
    layers = {"qkv": lin(8, 48), "o": lin(16, 3)}
    x = torch.randn(2, 6, 8).double()
    plain = exact(Forward(attention, **layers).double(), x)
    biased = exact(Forward(lambda s, x: attention(s, x, alibi), **layers).double(), x)
    assert (4, "block") in units(plain)
    assert (4, "block") not in units(biased)
    assert len(biased.permutations) == 8
    assert not biased.frozen


@pytest.mark.parametrize(
    "reduce",
    [
        *(torch.mean, torch.sum, torch.amax, torch.std, torch.linalg.vector_norm),
        lambda h: h.mean(dim=()),
        lambda h: h.logsumexp((0, 1)),
    ],
)
def test_units_may_be_permuted_under_a_reduction_over_everything(reduce):
    """Without dimensions, with none of them or with all of them: torch means the same."""

    def forward(s, x):
        h = torch.relu(s.a(x))
        return s.c(h / (1 + reduce(h).abs()))

    model = Forward(forward, a=lin(3, 4), c=lin(4, 2)).double()
    sym = exact(model, torch.randn(2, 3).double())
    assert units(sym) == [(4, "channel")]
    assert not sym.frozen


def rows_and_columns(s, x):
    h = torch.relu(s.a(x))
    crossed = h.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)
    return s.c(torch.cat([torch.relu(s.rows(h)), torch.relu(s.columns(crossed))], 1).flatten(1))


def test_blocks_of_two_partitions_are_told_apart():
    """Channels 1 and 2 are in the first row and second column, and the other way round."""
    grouped = {k: nn.Conv1d(4, 4, 1, groups=2) for k in ("rows", "columns")}
    model = Forward(rows_and_columns, a=nn.Conv1d(3, 4, 1), c=lin(8 * 5, 2), **grouped).double()
    sym = exact(model, torch.randn(2, 3, 5).double())
    made = [(2, "channel")] * 4  # those that the grouped convolutions make
    assert units(sym) == [*made, (2, "block"), (2, "block")]  # rows, and columns, as wholes
    assert not sym.frozen  # none that had to be refuted by numbers


class Positions(nn.Module):
    """Learned positions of which the example reads only a part."""

    def __init__(self):
        super().__init__()
        self.a, self.b = lin(5, 9), lin(9, 3)
        self.position = nn.Parameter(torch.randn(1, 12, 9))

    def forward(self, x):
        return self.b(torch.relu(self.a(x) + self.position[:, : x.shape[1]]))


def test_positions_beyond_the_example_move_with_the_others():
    model = Positions().double()
    sym = exact(model, torch.randn(2, 6, 5).double())
    assert units(sym) == [(9, "channel")]
    assert sym.scaling_dof == 9
    assert verify(model, sym, torch.randn(2, 12, 5).double()) < 1e-12


class CausalBuffer(nn.Module):
    """A float mask kept in the state dict, larger than the example needs."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = lin(8, 48), lin(16, 3)
        self.register_buffer("mask", torch.tril(torch.ones(9, 9))[None, None])

    def forward(self, x):
        t = x.shape[1]
        q, k, v = (z.unflatten(-1, (4, 4)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_mask_buffers_are_constants():
    model = CausalBuffer().double()
    sym = exact(model, torch.randn(2, 6, 8).double())
    assert (4, "block") in units(sym)
    assert not any(a.tensor == "mask" for a in sym.axes)
    assert verify(model, sym, torch.randn(2, 9, 8).double()) < 1e-12


class LowPrecisionNorm(nn.Module):
    """Normalises in float32 whatever comes in, as language models do."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = lin(8, 32), lin(32, 32), lin(32, 4)
        self.gain = nn.Parameter(torch.ones(32))

    def norm(self, x):
        y = x.float()
        return self.gain * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def forward(self, x):
        x = self.a(x)
        return self.o(self.norm(x + self.b(self.norm(x))))


def test_computing_in_float32_inside_is_no_reason_to_refuse():
    sym = discover(LowPrecisionNorm(), torch.randn(3, 8))
    assert (32, "channel") in units(sym)
    assert not sym.frozen


# ---------------------------------------------------------------------- logits
class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(7, 4), lin(4, 7, bias=False)
        self.h.weight = self.e.weight

    def forward(self, x):
        return self.h(torch.tanh(self.e(x)))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (TiedHead(), torch.randint(7, (2, 3))),
        (Forward(lambda s, x: s.a(torch.tanh(s.a(x))), a=lin(5, 5)), torch.randn(2, 5)),
        (nn.Conv2d(4, 6, 1, groups=2), torch.randn(2, 4, 3, 3)),
        (nn.Sequential(lin(5, 4), nn.ReLU(), lin(4, 1)), torch.randn(2, 5)),
    ],
    ids=["tied head", "used twice", "grouped", "one output"],
)
def test_no_shift_where_it_would_change_the_function(model, x):
    assert discover(model, x).softmax_shift is None


# ---------------------------------------------------------------------- never a raw exception
def two(s, x):
    return F.pad(torch.relu(s.a(x)), (0, 4)) * torch.tanh(s.b(x))


def with_modes(s, x):
    with torch.autocast("cpu", enabled=False):
        x = torch.relu(s.a(x))
    with torch.enable_grad():
        return s.b(x * 2)


def branch(s, x):
    return s.b(torch.cond(x.sum() > 0, torch.sin, torch.cos, (s.a(x),)))


def constant_mask(s, x):
    h = torch.relu(s.a(x))
    return s.b(h.masked_fill(~torch.ones_like(h, dtype=torch.bool), 0.0))


def mean_beside_variance(s, x):
    variance, mean = torch.var_mean(torch.tanh(s.a(x)), 1)
    return torch.stack([variance, mean], 1)


def learned_power(s, x):
    return s.b(torch.relu(s.a(x)) ** s.p)


def two_to_the(s, x):
    return s.b(2 ** s.a(x))


def thresholded_index(s, x):
    return s.e((s.a(x) > 0).long()).flatten(1)


def to_integers(s, x):
    return s.b((9 * torch.relu(s.a(x))).long().to(x.dtype))


def padded_sigmoid(s, x):
    return s.b(torch.sigmoid(F.pad(s.a(x), (0, 4))))


def padded_norms(s, x):
    return s.b(s.n(F.layer_norm(F.pad(torch.tanh(s.a(x)), (4, 0)), (12,))))


def normalised(s, x):
    return s.b(F.normalize(s.a(x), dim=-1))


def pointnet(s, x):
    return s.b(torch.relu(s.a(x)).max(1)[0])


def snake(s, x):
    h = s.a(x)
    return s.b(h + torch.sin(s.p * h) ** 2 / s.p)


def multi_query(s, x):
    q = s.a(x).unflatten(-1, (2, 4)).transpose(1, 2)
    k, v = s.k(x)[:, None], s.v(x)[:, None]
    y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
    return s.b(y.transpose(1, 2).flatten(2))


def mha_zero_attention(s, x):
    return s.b(s.m(s.a(x), s.a(x), s.a(x))[0])


P8 = {"p": lambda: nn.Parameter(torch.rand(8) + 0.5)}
AB = {"a": lambda: lin(5, 8), "b": lambda: lin(8, 3)}
A12 = {"a": lambda: lin(5, 8), "b": lambda: lin(12, 3)}
SEQUENCE = torch.randn(2, 6, 5)
HARD = [
    (two, {"a": lambda: lin(5, 8), "b": lambda: lin(5, 12)}, None),
    (with_modes, AB, [8]),
    (branch, AB, []),
    (constant_mask, AB, [8]),
    (mean_beside_variance, {"a": lambda: lin(5, 8)}, [8]),
    (learned_power, AB | P8, [8]),
    (two_to_the, AB, [8]),
    (thresholded_index, {"a": lambda: lin(5, 8), "e": lambda: nn.Embedding(2, 3)}, []),
    (to_integers, AB, [8]),
    (padded_sigmoid, A12, [8]),
    (padded_norms, A12 | {"n": lambda: nn.BatchNorm1d(12)}, [8]),
    (normalised, AB, [8]),
    (pointnet, AB, [8]),
    (snake, AB | P8, [8]),
    (multi_query, AB | {"k": lambda: lin(5, 4), "v": lambda: lin(5, 4)}, None),
    (
        mha_zero_attention,
        AB | {"m": lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True, batch_first=True)},
        None,
    ),
]


@pytest.mark.parametrize(
    ("forward", "layers", "expected"), HARD, ids=lambda v: getattr(v, "__name__", "")
)
def test_exact_and_without_the_numerical_net(forward, layers, expected):
    torch.manual_seed(0)
    model = Forward(forward, **{k: make() for k, make in layers.items()}).double().eval()
    over_tokens = forward in (multi_query, mha_zero_attention, pointnet)
    x = (SEQUENCE if over_tokens else torch.randn(4, 5)).double()
    sym = exact(model, x)
    assert not any("numerical check" in f.reason for f in sym.frozen)
    assert expected is None or [u for u, _ in units(sym)] == expected


def test_a_slice_of_a_weight_has_the_units_of_its_rows():
    model = Forward(
        lambda s, x: s.b(torch.relu(F.linear(x, s.a.weight[2:6], s.a.bias[2:6]))),
        a=nn.Linear(5, 8),
        b=nn.Linear(4, 3),
    ).double()
    x = torch.randn(3, 5).double()
    sym = discover(model, x)
    assert [g.units for g in sym.permutations] == [4]
    assert sym.scaling_dof == 4
    assert verify(model, sym, x) < 1e-14


def test_groups_of_a_transposed_convolution_that_is_a_function():
    """Given by position, and the last argument of all."""

    def forward(s, x):
        x = F.conv_transpose2d(torch.relu(s.a(x)), s.b.weight, None, 2, 0, 0, 2)
        return s.c(torch.relu(x))

    a, b, c = nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Conv2d(6, 2, 1)
    model = Forward(forward, a=a, b=b, c=c).double()
    x = torch.randn(2, 2, 5, 5).double()
    sym = discover(model, x)
    assert sorted(g.units for g in sym.permutations) == [2, 2, 2, 3, 3]
    assert verify(model, sym, x) < 1e-13


class Auxiliary(nn.Module):
    """A head that only exists in training."""

    def __init__(self):
        super().__init__()
        self.trunk, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.aux = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))

    def forward(self, x):
        x = torch.relu(self.trunk(x))
        return (self.last(x), self.aux(x)) if self.training else self.last(x)


def test_dropout_in_a_training_graph():
    sym = discover(Auxiliary().eval(), torch.randn(2, 5))
    assert {"aux.0.weight", "aux.3.weight"} <= {a.tensor for a in sym.axes}
    assert sorted(g.units for g in sym.permutations) == [6, 8]


@pytest.mark.slow
def test_auxiliary_heads_of_googlenet():
    import torchvision

    model = torchvision.models.googlenet(init_weights=False, aux_logits=True).eval()
    sym = discover(model, torch.randn(1, 3, 96, 96))
    assert any(a.tensor.startswith("aux1.conv") for a in sym.axes)


def test_a_plain_float32_attribute():
    model = Forward(lambda s, x: torch.relu(s.a(x)) @ s.matrix, a=lin(5, 8))
    model.matrix = torch.randn(8, 3)
    x = torch.randn(2, 5)
    assert verify(model, discover(model, x), x) < 1e-5


# ---------------------------------------------------------------------- canonical forms, oracle
def test_sorting_by_outgoing_weights_with_query_and_key():
    model = Forward(
        lambda s, x: s.b((lambda h: s.m(h, h, h, need_weights=False)[0])(s.a(x))),
        a=lin(8, 16),
        m=nn.MultiheadAttention(16, 4, batch_first=True),
        b=lin(16, 3),
    ).double()
    sym, params = discover(model, torch.randn(2, 5, 8).double()), P.of(model)
    one = canonicalise(params, sym, "unit-norm", "outgoing")
    other = random_element(params, sym, torch.Generator().manual_seed(4))
    two = canonicalise(other, sym, "unit-norm", "outgoing")
    assert all((one[n] - two[n]).abs().max() < 1e-6 for n in one)


def test_latents_in_the_oracle():
    class Latents(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents, self.b = nn.Parameter(torch.randn(1, 5, 7)), lin(7, 3)

        def forward(self, x):
            return self.b(torch.relu(self.latents)) + x

    model = Latents().double()
    sym, params = discover(model, torch.randn(2, 5, 3).double()), P.of(model)
    found = min_mass(params, sym)
    a, c = params["latents"].norm(dim=(0, 1)), params["b.weight"].norm(dim=0)
    torch.testing.assert_close(found.minimum, 2 * (a * c).sum(), rtol=1e-10, atol=0)
    torch.testing.assert_close(
        min_mass(params, sym, "cvxpy").minimum, found.minimum, rtol=1e-8, atol=0
    )


def film(s, x):
    gain, bias = s.a(x).chunk(2, -1)
    return s.b(torch.relu(gain * s.n(s.c(x)) + bias))


@pytest.mark.parametrize("scaling", ["unit-norm", "unit-std", "min-mass"])
def test_one_scale_over_rows_of_which_one_has_a_sign(scaling):
    model = Forward(film, a=lin(5, 16), c=lin(5, 8), n=nn.BatchNorm1d(8, affine=False), b=lin(8, 3))
    model, x = model.double().eval(), torch.randn(4, 5).double()
    sym, params = exact(model, x), P.of(model)
    one = canonicalise(params, sym, scaling, "max")
    two = canonicalise(
        random_element(params, sym, torch.Generator().manual_seed(4)), sym, scaling, "max"
    )
    assert sym.sign_dof > 0
    assert all((one[n].double() - two[n].double()).abs().max() < 1e-6 for n in one)


def test_scalar_parameters():
    """A learned temperature has one unit, no dimension, and a place in every stack."""
    layers = {"a": lin(3, 4), "b": lin(4, 2)}
    model = Forward(lambda s, x: s.b(torch.relu(s.a(x)) * s.scale), **layers)
    model.scale = nn.Parameter(torch.tensor(2.0))
    model, x = model.double(), torch.randn(5, 3).double()
    sym = exact(model, x)
    assert units(sym) == [(4, "channel")]
    stack = P.stack([P.of(model)] * 3)
    for form in ("unit-norm", "unit-std", "min-mass"):
        moved = canonicalise(
            random_element(stack, sym, torch.Generator().manual_seed(0)), sym, form
        )
        torch.testing.assert_close(P.apply(model, moved, x)[1], model(x))
