"""The check sees every group at every depth, and what an example does not show is named."""

import importlib
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from cases import Forward
from torch import nn

from weightsym import UnsupportedModel, discover, orbit_directions, verify
from weightsym import params as P
from weightsym.discovery.cache import forget
from weightsym.discovery.export import trace_graphs
from weightsym.networks.comparison import OutputComparison
from weightsym.networks.forward import Inputs

refutation = importlib.import_module("weightsym.discovery.refutation")
lin = nn.Linear
DRAWN = random.Random(7)
FEW, MANY, MOST = DRAWN.randint(2, 8), DRAWN.randint(14, 22), DRAWN.randint(32, 40)
"""Depths, of which the largest takes seconds."""


# ------------------------------------------------------------ wrong groups at every depth
class Rotary(nn.Module):
    """Two rotated heads of queries that share their keys and values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = lin(8, 8), lin(8, 4), lin(8, 4), lin(8, 8)

    def forward(self, x):
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3]).to(x)
        cos, sin = (torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))

        def rotated(t):
            return t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin

        q, k = rotated(self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)), rotated(self.k(x))[:, None]
        attended = (q @ k.mT).softmax(-1) @ self.v(x)[:, None]
        return self.o(attended.transpose(1, 2).flatten(2))


def normalised():
    return [lin(5, 4), nn.RMSNorm(4, elementwise_affine=False), lin(4, 8)]


PLANTED = {  # kind of group: the layers that have it, the function of later ones, and its field
    "permutation": (lambda: [lin(5, 8)], nn.Tanh, "permutations"),
    "scaling": (lambda: [lin(5, 8)], nn.LeakyReLU, "scalings"),
    "sign": (lambda: [lin(5, 8, bias=False)], nn.Tanh, "signs"),
    "general": (lambda: [lin(5, 4), lin(4, 8)], nn.GELU, "linear"),
    "orthogonal": (normalised, nn.Sigmoid, "linear"),
    "complex": (lambda: [lin(5, 8), nn.Tanh(), Rotary()], nn.LeakyReLU, "linear"),
    "shift": (lambda: [lin(5, 4), lin(4, 8)], nn.LeakyReLU, "shifts"),
}


def chain(start, function, depth):
    layers = [layer for _ in range(depth) for layer in (function(), lin(8, 8))]
    return nn.Sequential(*start(), *layers, function(), lin(8, 3)).double()


def without_a_place(sym, field, kind):
    """Symmetries whose first group of a kind forgets where it ends."""
    groups = list(getattr(sym, field))
    k = next(k for k, g in enumerate(groups) if getattr(g, "kind", kind) in (kind, "channel"))
    wrong = {"readers": ()} if field == "shifts" else {"placements": groups[k].placements[:-1]}
    groups[k] = replace(groups[k], **wrong)
    return replace(sym, **{field: tuple(groups)}), groups[k].name


@pytest.mark.parametrize(
    ("kind", "depth"),
    [*itertools.product(PLANTED, (FEW, MANY)),
     *(pytest.param(kind, MOST, marks=pytest.mark.e2e) for kind in [*PLANTED][::3])],
)  # fmt: skip
def test_a_planted_group_is_seen_at_every_depth_and_all_others_stay(kind, depth):
    torch.manual_seed(depth)
    start, function, field = PLANTED[kind]
    model = chain(start, function, depth)
    x = torch.randn(3, 4, 5).double()
    right = discover(model, x)
    assert right.frozen == ()
    assert right.unchecked == ""
    assert right.error < 1e-9
    wrong, name = without_a_place(right, field, kind)
    graphs = trace_graphs(model, Inputs((x[:2],)), "carrier")
    left = refutation.refute(model, wrong, graphs, Inputs((x[:2],)), False)
    assert [f.module for f in left.frozen] == [name]
    for every in ("permutations", "scalings", "signs", "linear", "shifts"):
        kept, there = len(getattr(left, every)), len(getattr(right, every))
        assert kept == there - (every == field)
    error = verify(model, wrong, x)
    assert math.isnan(error) or error > 1e-6
    assert not verify(model, right, x) > 1e-6


FUNCTIONS = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
FUNCTIONS["gelu"] = nn.functional.gelu


@pytest.mark.parametrize("depth", [FEW, MANY, pytest.param(MOST, marks=pytest.mark.e2e)])
@pytest.mark.parametrize(("name", "bias"), zip(FUNCTIONS, [True, False] * 2, strict=True))
def test_a_wrong_rule_is_refused_at_every_depth(name, bias, depth):
    def forward(s, x):
        h = s.first(x).cumsum(-1)
        for layer in s.layers:
            h = layer(FUNCTIONS[name](h))
        return h

    torch.manual_seed(depth)
    layers = nn.ModuleList([lin(16, 16, bias) for _ in range(depth)])
    model, x = Forward(forward, first=lin(5, 16), layers=layers), torch.randn(4, 5)
    with pytest.raises(UnsupportedModel, match="the groups at .*first"):
        discover(model, x, rules={"cumsum": lambda x, dim: x})
    sym = discover(model, x, rules={"cumsum": torch.cumsum})
    assert len(sym.permutations) == depth - 1
    assert sym.unchecked == ""


def test_an_error_is_relative_to_outputs_however_far_other_weights_move_them():
    right, wrong = [torch.ones(3).double()], [torch.tensor([1e5, -3e4, 1.0]).double()]
    comparison = OutputComparison.between(right, wrong, 1e-9)
    assert comparison.error([right[0] + 1e-8]) == pytest.approx(1e-8)
    assert OutputComparison.between([0 * right[0]], wrong, 1e-9).error(wrong) == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_unit_that_sleeps_is_awake_at_other_weights(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(lin(4, 1), nn.ReLU(), lin(1, 3)).double()
    model[0].bias.data.fill_(-20.0)
    sym = discover(model, torch.randn(2, 4).double())
    assert (sym.scaling_dof, sym.unchecked) == (1, "")


@pytest.mark.parametrize("bias", [0.0, -20.0])
def test_weights_are_drawn_again_only_where_the_first_do_not_show_all(bias, monkeypatch):
    drawn, draw = [], refutation.draw_that_keeps_signals
    monkeypatch.setattr(
        refutation, "draw_that_keeps_signals", lambda *a: drawn.append(0) or draw(*a)
    )
    torch.manual_seed(0)
    model = nn.Sequential(lin(4, 6), nn.ReLU(), lin(6, 3)).double()
    model[0].bias.data.fill_(bias)
    forget()
    assert discover(model, torch.randn(8, 4).double()).unchecked == ""
    assert bool(drawn) == (bias < 0)


# ------------------------------------------------------------ matrices that move nothing
WIDTHS = [(2, 4, 3), (3, 4, 3), (5, 4, 5), (2, 5, 1), (2, 4, 5, 3), (1, 3, 3, 1), (4, 5, 3, 4)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_dimension_is_the_rank_of_all_directions(widths, bias):
    """A matrix of channels that are more than all that enters and leaves them can move nothing."""
    layers = [lin(a, b, bias) for a, b in itertools.pairwise(widths)]
    model, x = nn.Sequential(*layers).double(), torch.randn(8, widths[0]).double()
    sym = discover(model, x)
    orbit = orbit_directions(P.of(model), sym)
    moves = [orbit.times(unit) for unit in torch.eye(orbit.size, dtype=torch.float64)]
    rows = torch.stack([torch.cat([t.flatten() for t in move.values()]) for move in moves])
    assert sym.dimension == int(torch.linalg.matrix_rank(rows))
    apart = sum(g.dimension for g in sym.linear) + sym.shift_dof
    assert (sym.dimension < apart) == (widths != (5, 4, 5))


# ------------------------------------------------------------ tables that are read in part
def number(*shape):
    return nn.Parameter(torch.randn(shape))


def added(of_table):
    def forward(s, x):
        return s.last(torch.tanh(s.first(x) + of_table(s.table, x.shape[1])))

    return lambda *shape: Forward(forward, first=lin(4, 6), last=lin(6, 2), table=number(*shape))


def scored(of_table):
    def forward(s, x):
        places = torch.arange(x.shape[1])
        bias = of_table(s.table, places[:, None] - places + 7, x.shape[1])
        q, k, v = (f(x).unflatten(-1, (3, 2)).transpose(1, 2) for f in (s.q, s.k, s.v))
        return s.o(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))

    layers = {"q": lin(4, 6), "k": lin(4, 6), "v": lin(4, 6), "o": lin(6, 4)}
    return lambda *shape: Forward(forward, **layers, table=number(*shape))


def stacked(s, x):
    matrices = s.table.view(-1, 6, 2)[: x.shape[1]]
    return torch.einsum("bti,tio->bto", torch.tanh(s.first(x)), matrices)


TABLES = {  # a network, the shape of its table, and whether rows hold the units of all lengths
    "a slice": (added(lambda t, n: t[: 6 * n].view(n, 6)), (48,), False),
    "rows": (added(lambda t, n: t.view(-1, 6)[:n]), (48,), False),
    "columns": (added(lambda t, n: t.view(6, -1)[:, :n].mT), (48,), False),
    "an exponential": (added(lambda t, n: (0.1 * t).exp()[: 6 * n].view(n, 6)), (48,), False),
    "rows of two dimensions": (added(lambda t, n: t[:n]), (8, 6), True),
    "chosen rows": (scored(lambda t, i, n: t.view(-1, 3)[i].permute(2, 0, 1)), (45,), False),
    "chosen columns": (scored(lambda t, i, n: t.view(3, -1)[:, i]), (45,), False),
    "squares": (scored(lambda t, i, n: t[: 3 * n * n].view(3, n, n)), (192,), False),
    "chosen rows of two": (scored(lambda t, i, n: t[i].permute(2, 0, 1)), (15, 3), True),
    "matrices": (lambda *s: Forward(stacked, first=lin(4, 6), table=number(*s)), (96,), False),
    "a stack": (lambda *s: Forward(stacked, first=lin(4, 6), table=number(*s)), (8, 6, 2), True),
}


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_read_in_part_is_named_where_its_groups_are_torn(name, tokens):
    torch.manual_seed(0)
    build, shape, is_whole = TABLES[name]
    model, longest = build(*shape).double(), torch.randn(2, 8, 4).double()
    sym = discover(model, longest[:, :tokens])
    assert any(g.units in (3, 6) for g in sym.permutations)
    assert "table" in sym.touched
    if is_whole or tokens == 8:
        assert sym.unchecked == ""
        assert verify(model, sym, longest) < 1e-9
    else:
        assert "table" in sym.unchecked
        assert verify(model, sym, longest) > 1e-3
