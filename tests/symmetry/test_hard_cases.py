"""Networks that once fooled the reading of a graph, or broke it."""

import pytest
import torch
from cases import Forward
from checked_symmetries import exact, units
from test_min_mass import least_by_cvxpy
from torch import nn

from weightsym import canonicalise, discover, min_mass
from weightsym import params as P
from weightsym.verify import random_element

lin = nn.Linear


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


@pytest.mark.slow
def test_auxiliary_heads_of_googlenet():
    import torchvision

    model = torchvision.models.googlenet(init_weights=False, aux_logits=True).eval()
    sym = discover(model, torch.randn(1, 3, 96, 96))
    assert any(a.tensor.startswith("aux1.conv") for a in sym.axes)


# ---------------------------------------------------------------------- canonical forms, oracle


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
    assert float(found.minimum) == pytest.approx(least_by_cvxpy(params, sym), rel=1e-8)


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
