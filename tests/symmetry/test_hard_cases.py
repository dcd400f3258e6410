"""Networks that once fooled the reading of a graph, or broke it."""

import pytest
import torch
from cases import Forward
from checked_symmetries import exact, units
from torch import nn

from weightsym import canonicalise, discover
from weightsym import params as P
from weightsym.verify import covering_motions, random_element, verify

lin = nn.Linear


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


# ---------------------------------------------------------------------- thresholds far from zero
THRESHOLDS = {
    "clamp to 20": lambda x: x.clamp(0, 20),
    "clamp to 10^4": lambda x: x.clamp(0, 1e4),
    "clamp to both sides": lambda x: x.clamp(-20, 30),
    "where": lambda x: torch.where(x < 30, torch.relu(x), 0),
    "mask": lambda x: torch.relu(x) * (x < 50),
    "minimum": lambda x: torch.minimum(torch.relu(x), x.new_tensor(50.0)),
    "threshold": lambda x: nn.functional.threshold(x, 0.01, 0),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=0.05),
    "clamp below zero": lambda x: (-torch.relu(x)).clamp(min=-20),
    "clamp of a leaky ReLU": lambda x: nn.functional.leaky_relu(x, 0.2).clamp(min=-5),
    "quantised": lambda x: torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -128, 127).to(
        x
    ),
    **{
        f"where {t}": lambda x, t=t: torch.where(x > t, 0.1 * x, x)
        for t in (0.003, 0.05, 8.0, 300.0)
    },
}


@pytest.mark.parametrize("function", THRESHOLDS.values(), ids=THRESHOLDS)
def test_thresholds_of_any_size_hold_scales(function):
    model = Forward(lambda s, x: s.b(function(s.a(x))), a=lin(8, 6), b=lin(6, 2)).double()
    sym = discover(model, torch.randn(4, 8).double())
    assert sym.scaling_dof == 0
    assert all(group.kind == "orthogonal" for group in sym.linear)
    assert sym.permutations
    for size in (0.01, 1, 30, 1000):
        assert float(verify(model, sym, size * torch.randn(64, 8).double())) < 1e-9


def test_what_norms_are_clamped_to_holds_no_scale():
    unit = Forward(lambda s, x: s.b(nn.functional.normalize(s.a(x))), a=lin(8, 6), b=lin(6, 2))
    assert discover(unit, torch.randn(4, 8)).scaling_dof == 1


# ---------------------------------------------------------------------- what is read otherwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_layers_of_every_precision(dtype):
    def forward(s, x):
        return s.o(s.r(x)[0])

    model = Forward(forward, r=nn.LSTM(5, 8, batch_first=True), o=lin(8, 3)).to(dtype)
    sym = discover(model, torch.randn(2, 3, 5, dtype=dtype))
    assert ([g.units for g in sym.permutations], sym.frozen) == ([8], ())


@pytest.mark.parametrize("alike", [True, False])
def test_channels_that_are_blurred_alike_may_change_places(alike):
    kernels = torch.ones(1, 1, 3, 3).repeat(8, 1, 1, 1) if alike else torch.rand(8, 1, 3, 3)

    def forward(s, x):
        blurred = nn.functional.conv2d(torch.relu(s.a(x)), kernels, stride=2, groups=8)
        return s.b(blurred)

    model = Forward(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3))
    sym = discover(model, torch.randn(2, 3, 12, 12))
    assert [g.units for g in sym.permutations] == [8] * alike
    assert sym.scaling_dof == 8


def test_whole_numbers_are_no_weights():
    count = nn.Parameter(torch.tensor(2), requires_grad=False)
    model = Forward(lambda s, x: s.k * s.b(torch.relu(s.a(x))), a=lin(5, 8), b=lin(8, 3))
    model.k = count
    sym = discover(model, torch.randn(2, 5))
    assert (sym.scaling_dof, sym.unchecked) == (8, "")


# ---------------------------------------------------------------------- examples of a single step
def looped(s, x):
    h = x.new_zeros(len(x), 5)
    for step in x.unbind(1):
        h = torch.relu(s.i(step) + s.h(h))
    return s.o(h)


def called_again(s, x):
    h = None
    for step in x.unbind(1):
        h = s.r(step, h)
    return s.o(h)


def recurrent(s, x):
    return s.o(s.r(x)[0])


def summed(s, x):
    h = s.i(x[:, 0])
    for k in range(1, x.shape[1]):
        h = torch.tanh(h + s.i(x[:, k]))
    return s.o(h)


def largest(s, x):
    h = s.i(x[:, 0])
    for k in range(1, x.shape[1]):
        h = torch.maximum(0.9 * h, s.i(x[:, k]))
    return s.o(h)


def pyramid(s, x):
    h = s.i(x)
    while h.shape[1] > 1:
        h = torch.tanh(h[:, 1:] + h[:, :-1])
    return s.o(h[:, 0])


def of_rows(function, before=torch.relu):
    return Forward(lambda s, x: s.o(function(before(s.i(x)))), i=lin(3, 5), o=lin(5, 2))


SINGLE_STEPS = {
    "loop": Forward(looped, i=lin(3, 5), h=lin(5, 5), o=lin(5, 2)),
    "cell": Forward(called_again, r=nn.GRUCell(3, 5), o=lin(5, 2)),
    "GRU": Forward(recurrent, r=nn.GRU(3, 5, 2, batch_first=True), o=lin(5, 2)),
    "RNN": Forward(recurrent, r=nn.RNN(3, 5, nonlinearity="relu", batch_first=True), o=lin(5, 2)),
    "LSTM": Forward(recurrent, r=nn.LSTM(3, 5, proj_size=4, batch_first=True), o=lin(4, 2)),
    "sum of steps": Forward(summed, i=lin(3, 5), o=lin(5, 2)),
    "largest of steps": Forward(largest, i=lin(3, 5), o=lin(5, 2)),
    "pyramid": Forward(pyramid, i=lin(3, 5), o=lin(5, 2)),
    "cumprod": of_rows(lambda h: h.cumprod(1)),
    "logcumsumexp": of_rows(lambda h: h.logcumsumexp(1)),
    "median of signs": of_rows(lambda h: h.median(1)[0], torch.tanh),
    "sorted": of_rows(lambda h: h.sort(1)[0], lambda h: h),
    "quantile": of_rows(lambda h: h.quantile(0.3, 1), lambda h: h),
}


@pytest.mark.parametrize("model", SINGLE_STEPS.values(), ids=SINGLE_STEPS)
def test_one_step_says_what_several_say(model):
    model, longer = model.double(), torch.randn(3, 4, 3).double()
    sym, expected = discover(model, longer[:2, :1]), discover(model, longer)
    assert float(verify(model, sym, longer)) < 1e-9
    assert units(sym) == units(expected)
    assert (sym.scaling_dof, sym.sign_dof, sym.unchecked) == (
        expected.scaling_dof,
        expected.sign_dof,
        "",
    )


def test_weights_of_a_state_that_is_always_zero_are_named():
    cell = Forward(lambda s, x: s.o(s.r(x)), r=nn.GRUCell(3, 5), o=lin(5, 2))
    with_state = Forward(lambda s, x, h: s.o(s.r(x, h)), r=cell.r, o=cell.o)
    x, h = torch.randn(2, 3), torch.randn(2, 5)
    assert "r.weight_hh at this example" in discover(cell, x).unchecked
    assert discover(with_state, x, h).unchecked == ""


# ---------------------------------------------------------------------- what operands are told from
def of_pairs(function):
    def forward(s, x):
        h = s.a(x)
        return s.b(torch.tanh(function(h[:, :, None], h[:, None]).flatten(1)))

    return Forward(forward, a=lin(6, 3), b=lin(9, 2))


def circulant(s, x):
    k = torch.arange(3)
    return s.b(torch.tanh(nn.functional.softplus(s.a(x)) @ s.w[(k[:, None] - k) % 3]))


def tensor_train(s, x):
    return torch.einsum("bij,air,rjc->bac", x.unflatten(1, (2, 3)), s.a, s.c)


def with_parameters(forward, layers, **shapes):
    model = Forward(forward, **layers)
    for name, shape in shapes.items():
        setattr(model, name, nn.Parameter(torch.randn(shape)))
    return model


TOLD_APART = {
    "differences": of_pairs(lambda x, y: x - y),
    "quotients": of_pairs(lambda x, y: torch.sigmoid(x) / torch.sigmoid(y)),
    "orders": of_pairs(lambda x, y: torch.where(x > y, x, 0.3 * y)),
    "powers": of_pairs(lambda x, y: torch.relu(x) * torch.relu(y) ** 2),
    "circulant": with_parameters(circulant, {"a": lin(6, 3), "b": lin(3, 2)}, w=3),
    "tensor train": with_parameters(tensor_train, {}, a=(2, 2, 2), c=(2, 3, 2)),
}


@pytest.mark.parametrize("model", TOLD_APART.values(), ids=TOLD_APART)
@pytest.mark.parametrize("seed", range(3))
def test_no_more_than_holds_for_small_groups(model, seed):
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    x, other = (torch.randn(n, 6, generator=generator).double() for n in (2, 50))
    sym = discover(model, x)
    assert not sym.frozen
    assert float(verify(model, sym, other)) < 1e-9


def test_signs_and_small_groups_move_apart_in_some_motion():
    layers = {"a": lin(4, 2), "b": lin(2, 3), "c": lin(3, 2)}
    model = Forward(lambda s, x: s.c(torch.tanh(s.b(torch.tanh(s.a(x))))), **layers)
    sym = discover(model, torch.randn(2, 4))
    moves = [
        [s for signs in m.factors["signs"] for s in (signs < 0).tolist()]
        + [bool((order != torch.arange(len(order))).any()) for order in m.cycles]
        for m in covering_motions(sym, torch.Generator().manual_seed(0))
    ]
    columns = list(zip(*moves, strict=True))
    assert len(columns) == 7
    assert len(set(columns)) == 7


@pytest.mark.parametrize(
    "function",
    [
        lambda s, h: torch.clamp(h, torch.zeros(()).double(), torch.ones(()).double()),
        lambda s, h: torch.exp(1j * h).real,
        lambda s, h: torch.view_as_real(torch.sgn(torch.complex(h, h**2))).sum(-1),
    ],
    ids=["between zero and one", "phases", "signs of complex numbers"],
)
def test_units_pass_functions_with_zeros_and_complex_numbers(function):
    model = Forward(lambda s, x: s.b(function(s, s.a(x))), a=lin(4, 6), b=lin(6, 3)).double()
    sym = discover(model, torch.randn(2, 4).double())
    assert (units(sym), sym.frozen) == ([(6, "channel")], ())
    assert float(verify(model, sym, torch.randn(50, 4).double())) < 1e-9


def gated(s, x, gate):
    return s.c(torch.relu(s.a(x))) + gate * s.d(torch.tanh(s.b(x)))


@pytest.mark.parametrize("is_open", [False, True])
def test_what_a_closed_gate_hides_is_named(is_open):
    model = Forward(gated, a=lin(6, 8), b=lin(6, 3), c=lin(8, 4), d=lin(3, 4)).double()
    sym = discover(model, torch.randn(2, 6).double(), torch.full((2, 1), float(is_open)).double())
    assert sym.unchecked.startswith("" if is_open else "no output moves with b.bias, b.weight, d.")
    assert bool(sym.unchecked) != is_open


def test_biases_that_cancel_hide_nothing():
    model = Forward(lambda s, x, y: (s.b(torch.relu(s.a(x))) - s.b(torch.relu(s.a(y)))).abs(),
                    a=lin(6, 8), b=lin(8, 4))  # fmt: skip
    assert discover(model, torch.randn(2, 6), torch.randn(2, 6)).unchecked == ""


def test_what_is_computed_twice_is_read_once():
    layers = {f"l{k}": lin(3, 3) for k in range(60)}

    def tower(s, x):
        for name in layers:
            x = x + torch.tanh(getattr(s, name)(x))
        return x

    model = Forward(lambda s, x: s.o(tower(s, x) * tower(s, x).flip(0)), o=lin(3, 2), **layers)
    assert discover(model, torch.randn(2, 3)).unchecked == ""


def test_derivatives_of_the_user_are_left_alone():
    outside, seen = lin(3, 3), []
    model = Forward(lambda s, x: s.b(torch.relu(s.a(outside(x)))), a=lin(3, 4), b=lin(4, 2))
    model.a.register_full_backward_hook(lambda *_: seen.append(1))
    x = torch.randn(2, 3, requires_grad=True)
    discover(model, x)
    assert (x.grad, outside.weight.grad, model.a.weight.grad, seen) == (None, None, None, [])
    model(x).sum().backward()
    assert seen


# ---------------------------------------------------------------------- canonical forms


@pytest.mark.parametrize("scaling", ["unit-norm", "unit-std"])
def test_scales_of_which_functions_take_a_root(scaling):
    layers = {"a": lin(4, 6), "b": lin(6, 5), "c": lin(5, 2)}
    model = Forward(lambda s, x: s.c(torch.relu(s.b(s.a(x).abs().sqrt()))), **layers).double()
    sym, params = exact(model, torch.randn(3, 4).double()), P.of(model)
    form = canonicalise(params, sym, scaling)
    other = random_element(params, sym, torch.Generator().manual_seed(3))
    moved = canonicalise(other, sym, scaling)
    size = (lambda w: w.norm(dim=1)) if scaling == "unit-norm" else lambda w: w.std(1)
    assert {p.exponent for g in sym.scalings for p in g.placements} >= {2, -1}
    assert torch.allclose(size(form["a.weight"]), torch.ones(6).double())
    assert all(torch.allclose(form[n], moved[n]) for n in form)


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
