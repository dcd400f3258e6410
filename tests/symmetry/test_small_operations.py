"""Operations that networks use here and there: what passes, and what is refused with a reason."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from checked_symmetries import exact, sizes
from torch import nn

from lightning_bnn.symmetry import discover, verify

torch.manual_seed(0)
X = torch.randn(2, 4, 5).double()
OTHER = torch.randn(3, 4, 5).double()
IMAGE = torch.randn(2, 3, 6, 6).double()


def layers(width=6):
    return {"a": nn.Linear(5, 6), "b": nn.Linear(5, 6), "o": nn.Linear(width, 3)}


def counts(model, x, *others):
    """Groups, scales and signs, after a check on these inputs and on others."""
    sym = exact(model, x, others=[(other,) for other in others])
    return sizes(sym), sym.scaling_dof, sym.sign_dof, sym


HALVES = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 2.0]).double()
PASSING = {
    "reshape_as": (
        lambda s, x: s.o(s.a(x).tanh().flatten(1).reshape_as(x.new_zeros(len(x), 4, 6))),
        [6],
        0,
        6,
    ),
    "addcmul": (lambda s, x: s.o(torch.addcmul(s.a(x), s.b(x).relu(), s.b(x))), [6], 6, 0),
    "addcdiv": (lambda s, x: s.o(torch.addcdiv(s.a(x), s.b(x), 1 + s.a(x).exp())), [6], 0, 0),
    "lerp": (lambda s, x: s.o(torch.lerp(s.a(x), s.b(x).relu(), 0.3)), [6], 6, 0),
    "lerp by channels": (
        lambda s, x: s.o(torch.lerp(s.a(x), s.b(x).relu(), s.b(x).sigmoid())),
        [6],
        0,
        0,
    ),
    "cumsum": (lambda s, x: s.o(s.a(x).relu().cumsum(1)), [6], 6, 0),
    "cumprod": (lambda s, x: s.o(s.a(x).sigmoid().cumprod(1)), [6], 0, 0),
    "cummax": (lambda s, x: s.o(s.a(x).cummax(1).values), [6], 6, 0),
    "sort": (lambda s, x: s.o(s.a(x).sort(1).values), [6], 6, 0),
    "median": (lambda s, x: s.o(s.a(x).median(1).values), [6], 6, 0),
    "prod": (lambda s, x: s.o(s.a(x).sigmoid().prod(1)), [6], 0, 0),
    "hypot": (lambda s, x: s.o(torch.hypot(s.a(x), s.b(x))), [6], 0, 0),
    "tril": (
        lambda s, x: s.o(torch.tril((s.b(x) @ s.b(x).mT).exp()) @ s.a(x).tanh()),
        [6, 6],
        0,
        12,
    ),
    "masked_scatter": (
        lambda s, x: s.o(
            s.a(x).relu().masked_scatter((x[..., :1] > 0).expand(-1, -1, 6), s.b(x).relu())
        ),
        [6],
        6,
        0,
    ),
}

BOUNDS = {  # lower and upper, and what scales there are: those of all channels, or one for all
    "learned for every channel": (-torch.rand(6), torch.rand(6), nn.Parameter, 6),
    "learned, the same for all": (torch.tensor(-0.4), torch.tensor(0.7), nn.Parameter, 1),
    "known for every channel": (-torch.rand(6), torch.rand(6), nn.Buffer, 0),
    "known, the same for all": (torch.tensor(-0.4), torch.tensor(0.4), nn.Buffer, 0),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_that_are_tensors_move_and_are_scaled_with_the_channels(name):
    low, high, kind, scales = BOUNDS[name]
    model = Forward(lambda s, x: s.o(torch.clamp(s.a(x), s.low, s.high)), **layers())
    model.low, model.high = kind(low), kind(high)
    *found, sym = counts(model, X, OTHER)
    assert found == [[6], scales, 0]
    assert not sym.frozen


def test_a_table_of_positions_is_resized_with_its_channels():
    """By an operation of its own where it is smoothed."""

    def forward(s, x):
        table = F.interpolate(s.table, x.shape[-2:], mode="bicubic", antialias=True)
        return s.o((s.c(x) + table).relu().mean((-2, -1)))

    model = Forward(forward, c=nn.Conv2d(3, 6, 1), o=nn.Linear(6, 3))
    model.table = nn.Parameter(torch.randn(1, 6, 4, 4))
    *found, sym = counts(model, IMAGE, torch.randn(1, 3, 8, 8).double())
    assert found == [[6], 6, 0]
    assert "table" in sym.touched
    assert not sym.frozen


def test_a_number_computed_from_weights_may_be_a_difference():
    """As the shares of differential attention are: pairs of channels of two vectors."""

    def forward(s, x):
        share = (s.p * s.q).sum().exp() - (s.r * s.t).sum().exp()
        return s.o(s.a(x).relu() * share)

    model = Forward(forward, **layers())
    for name in "pqrt":
        setattr(model, name, nn.Parameter(torch.randn(4)))
    *found, sym = counts(model, X, OTHER)
    assert found == [[4, 4, 6], 14, 8]
    assert not sym.frozen


@pytest.mark.parametrize("gate", ["number", "tanh", "relu"])
def test_a_gate_of_one_channel_has_a_scale_of_its_own(gate):
    """The column of its weight is one channel, whose scale what it multiplies must undo."""
    functions = {"number": lambda z: z, "tanh": F.tanh, "relu": F.relu}

    def forward(s, x):
        return s.o(functions[gate](x @ s.w) * s.a(x).relu())

    model = Forward(forward, **layers())
    model.w = nn.Parameter(torch.randn(5, 1))
    *found, sym = counts(model, X, OTHER)
    scales, signs = {"number": (7, 1), "tanh": (6, 1), "relu": (7, 0)}[gate]
    assert found == [[6], scales, signs]
    assert not sym.frozen


@pytest.mark.parametrize("name", PASSING)
def test_what_leaves_channels_alone(name):
    forward, groups, scales, signs = PASSING[name]
    model = Forward(forward, **layers())
    *found, sym = counts(model, X, OTHER)
    assert found == [groups, scales, signs]
    assert not sym.frozen


def test_channels_beside_constants_that_differ_are_told_apart():
    """A close cousin of a weight that is the same for all."""
    model = Forward(lambda s, x: s.o(torch.lerp(s.a(x), s.b(x).relu(), HALVES / 4)), **layers())
    assert counts(model, X)[0] == []


@pytest.mark.parametrize(
    ("mode", "groups"),
    [("constant", [6]), ("reflect", [4, 2]), ("replicate", [2, 4]), ("circular", [2, 4])],
)
def test_channels_that_are_padded(mode, groups):
    """Channels at the border stand there twice, and are exchanged among themselves."""
    value = {"value": 1.0} if mode == "constant" else {}

    def forward(s, x):
        return s.o(F.pad(s.a(x).relu(), (1, 1), mode=mode, **value))

    found, scales, *_ = counts(Forward(forward, **layers(8)), X, OTHER)
    assert (found, scales) == (groups, 6)


def test_windows_of_images():
    convolution = nn.Conv2d(3, 4, 1)
    unfolded = Forward(
        lambda s, x: s.o(F.unfold(s.a(x).relu(), 2).mT), a=convolution, o=nn.Linear(16, 2)
    )
    folded = Forward(
        lambda s, x: s.o(F.fold(F.unfold(s.a(x).relu(), 2), (6, 6), 2)),
        a=convolution,
        o=nn.Conv2d(4, 2, 1),
    )
    for model in (unfolded, folded):
        assert counts(model, IMAGE)[:3] == ([4], 4, 0)


def outer_sum(s, x):
    """Every unit of one layer beside every unit of another."""
    return s.o((s.a(x)[..., None] + s.b(x)[..., None, :]).relu().flatten(-2))


def test_sums_of_all_pairs():
    model = Forward(outer_sum, a=nn.Linear(5, 3), b=nn.Linear(5, 4), o=nn.Linear(12, 2))
    found, scales, signs, sym = counts(model, X, OTHER)
    assert (sorted(found), scales, signs) == ([3, 4], 1, 0)
    assert not sym.frozen


def test_copies_of_channels_are_exchanged_where_they_are_told_apart():
    """Three copies of two units, each with a gate of its own: copies and units are exchanged."""

    def forward(s, x):
        return s.o(s.a(x).tanh().repeat_interleave(3, -1) * s.b(x).sigmoid())

    model = Forward(forward, a=nn.Linear(5, 2), b=nn.Linear(5, 6), o=nn.Linear(6, 2))
    assert sorted(counts(model, X, OTHER)[0]) == [2, 3, 3]


def test_places_of_one_channel_are_no_copies():
    """Flattened space repeats a channel, too, but its values differ: a cousin of copies."""

    def forward(s, x):
        return s.o(s.a(x).tanh().flatten(1) * s.b(x.flatten(1)).sigmoid())

    layers = {"a": nn.Conv1d(4, 2, 1), "b": nn.Linear(20, 10), "o": nn.Linear(10, 2)}
    assert counts(Forward(forward, **layers), X, OTHER)[0] == [2]


REFUSED = {
    "cumsum": lambda s, x: s.o(s.a(x).relu().cumsum(-1)),
    "sort": lambda s, x: s.o(s.a(x).sort(-1).values),
    "tril": lambda s, x: s.o(torch.tril(s.a(x).relu())),
    "as_strided": lambda s, x: s.o(s.a(x).relu().as_strided((2, 4, 6), (24, 6, 1))),
    "masked_scatter": lambda s, x: s.o(
        s.a(x).relu().masked_scatter(s.b(x).detach() > 0, s.b(x).relu())
    ),
    "fft_fft": lambda s, x: s.o(torch.fft.fft(s.a(x)).real),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_what_is_not_understood_is_named(operation):
    found, scales, signs, sym = counts(Forward(REFUSED[operation], **layers()), X)
    assert found == []
    assert scales == signs == 0
    assert operation in {f.operation.removesuffix("_") for f in sym.frozen}


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(5, 3),
        nn.ReLU(),
        Forward(lambda s, x: 2 * x, a=nn.Linear(5, 3)),
        Forward(lambda s, x: s.a(x) + s.a(x).roll(1, -1) ** 3, a=nn.Linear(5, 3)),
        Forward(
            lambda s, x: (s.a(x), s.b(torch.tanh(s.a(x)))), a=nn.Linear(5, 3), b=nn.Linear(3, 2)
        ),
        Forward(lambda s, x: s.a(s.b(x) * 0 + 1), a=nn.Linear(6, 3), b=nn.Linear(5, 6)),
    ],
)
def test_a_network_without_symmetries_says_why(model):
    sym = discover(model.double(), X)
    assert sym.frozen or sym.permutations or sym.scalings or sym.signs
    assert all(f.reason for f in sym.frozen)


class Gated(nn.Module):
    """A gate for all channels, made of what their means and extremes are (CBAM)."""

    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.gate = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x):
        h = self.a(x).relu()
        seen = torch.cat([h.mean(1, keepdim=True), h.amax(1, keepdim=True)], 1)
        return self.o(h * self.gate(seen).sigmoid()).mean((2, 3))


def test_a_mean_of_all_channels_is_not_exchanged_with_their_maximum():
    model = Gated().double()
    sym = discover(model, IMAGE)
    assert [g.units for g in sym.permutations] == [6]
    assert not any("numerical check" in item.reason for item in sym.frozen)
    assert verify(model, sym, torch.randn(3, 3, 5, 5).double()) < 1e-11
