"""Operations that are short for others: bilinear layers, distances, angles, products of many."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward
from checked_symmetries import exact, sizes, units
from test_completeness import in_float64, kernel_dimension
from torch import nn

from lightning_bnn.symmetry import discover
from lightning_bnn.symmetry.discovery.export import trace
from lightning_bnn.symmetry.discovery.written_out import write_out
from lightning_bnn.symmetry.forward import Inputs
from lightning_bnn.symmetry.rules.labels import Value, operation_name


def bilinear(s, x):
    return s.o(s.b(s.a(x[:, :4]).tanh(), s.c(x[:, 4:]).relu()).tanh())


def tensordot(s, x):
    return torch.tensordot(torch.tensordot(x, s.w, 1).relu(), s.v, ([1, 2], [1, 0]))


def inner(s, x):
    return torch.inner(torch.inner(x, s.w).relu(), s.v)


def vecdot(s, x):
    return torch.linalg.vecdot(s.a(x).relu(), s.c(x))


def multi_dot(s, x):
    return torch.linalg.multi_dot([s.a(x).tanh(), s.w, s.v])


def addbmm(s, x):
    h = torch.bmm(x.expand(3, -1, -1), s.w).relu()
    return torch.addbmm(s.b, h, s.v, beta=0.5, alpha=2)


def five_factors(s, x):
    return torch.einsum("bi,bj,ir,jr,kr->bk", x[:, :4], x[:, 4:], s.u, s.v, s.w)


def cosine(s, x):
    return F.cosine_similarity(s.a(x).tanh()[:, None], s.w[None], dim=-1)


def distances(s, x):
    return torch.cdist(s.a(x).tanh(), s.w)


def one_distance(s, x):
    return F.pairwise_distance(s.a(x).relu(), s.c(x).relu())


def complex_numbers(s, x):
    z = torch.complex(s.a(x).tanh(), s.c(x).tanh()) @ torch.complex(s.u, s.v)
    return torch.cat([z.real, z.imag], 1)


def parameter(*shape):
    return lambda: nn.Parameter(torch.randn(*shape))


def linear(*shape):
    return lambda: nn.Linear(*shape)


CHANNELS = [(5, "channel")]

# forward, width of the inputs, parts, dimension of the kernel, groups of permutations
NETWORKS = {
    "bilinear": (
        bilinear,
        8,
        {
            "a": linear(4, 3),
            "c": linear(4, 5),
            "b": lambda: nn.Bilinear(3, 5, 6),
            "o": linear(6, 7),
        },
        5,
        [(3, "channel"), (5, "channel"), (6, "channel")],
    ),
    "tensordot": (
        tensordot,
        4,
        {"w": parameter(4, 3, 5), "v": parameter(5, 3, 2)},
        15,
        [(15, "channel")],
    ),
    "inner": (inner, 4, {"w": parameter(5, 4), "v": parameter(2, 5)}, 5, CHANNELS),
    "vecdot": (vecdot, 4, {"a": linear(4, 5), "c": linear(4, 5)}, 5, CHANNELS),
    "multi_dot": (
        multi_dot,
        4,
        {"a": linear(4, 5), "w": parameter(5, 3), "v": parameter(3, 6)},
        9,
        [(3, "channel"), (5, "channel")],
    ),
    "addbmm": (
        addbmm,
        4,
        {"w": parameter(3, 4, 5), "v": parameter(3, 5, 2), "b": parameter(1, 2)},
        15,
        [(15, "channel")],
    ),
    "five factors": (
        five_factors,
        8,
        {"u": parameter(4, 5), "v": parameter(4, 5), "w": parameter(4, 5)},
        10,
        CHANNELS,
    ),
    # sizes of every class
    "cosine": (cosine, 4, {"a": linear(4, 5), "w": parameter(3, 5)}, 3, CHANNELS),
    "distances": (
        distances,
        4,
        {"a": linear(4, 5), "w": parameter(3, 5)},
        0,
        [(5, "block")],
    ),
    "one distance": (one_distance, 4, {"a": linear(4, 5), "c": linear(4, 5)}, 0, CHANNELS),
    "complex": (
        complex_numbers,
        4,
        {
            "a": linear(4, 5),
            "c": linear(4, 5),
            "u": parameter(5, 3),
            "v": parameter(5, 3),
        },
        0,
        [(5, "block")],
    ),
}


def built(name):
    forward, width, parts, *_ = NETWORKS[name]
    torch.manual_seed(0)
    return Forward(forward, **{n: make() for n, make in parts.items()}), torch.randn(150, width)


@pytest.mark.parametrize("name", NETWORKS)
def test_all_symmetries_of_what_is_short_are_found(name):
    *_, dimension, groups = NETWORKS[name]
    with in_float64():
        model, x = built(name)
        assert kernel_dimension(model, x) == dimension
        sym = exact(model, x[:6], others=[(x[6:9],)], tolerance=1e-12)
    assert sorted(units(sym)) == sorted(groups)
    assert sym.dimension == dimension
    assert all("a product of complex numbers" in f.reason for f in sym.frozen)
    assert name == "complex" or not sym.frozen


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_written_out_computes_the_same(name):
    with in_float64():
        model, x = built(name)
        graph = trace(model.eval(), Inputs((x[:6],), {}))
        placeholders = [s.tensor if s.kind != "input" else x[:6] for s in graph.sources.values()]
        before = graph.module(*placeholders)[0]
        short = graph.module.code
        write_out([graph, None], kept=())
        assert graph.module.code != short
        torch.testing.assert_close(graph.module(*placeholders)[0], before, rtol=0, atol=1e-12)


def test_units_that_a_bilinear_layer_tells_apart_stay():
    """One unit that is read elsewhere has no exchange with the others, nor a scale."""

    def forward(s, x):
        h = s.a(x).relu()
        return s.b(h, s.c(x).tanh()) + h[:, :1]

    model = Forward(forward, a=nn.Linear(4, 3), c=nn.Linear(4, 5), b=nn.Bilinear(3, 5, 2))
    sym = exact(model, torch.randn(6, 4).double())
    assert sorted(sizes(sym)) == [2, 5]
    assert (sym.scaling_dof, sym.sign_dof) == (2, 5)


def test_a_rule_of_the_user_stands_before_what_is_written_out():
    seen = []

    def rule(system, node, x, y, weight, bias=None):
        seen.append(operation_name(node))
        for operand in (x, y, weight, bias):
            system.freeze(system.labels(operand))
        return Value(torch.zeros((), dtype=torch.long).expand(node.meta["val"].shape))

    model = Forward(bilinear, a=nn.Linear(4, 3), c=nn.Linear(4, 5), b=nn.Bilinear(3, 5, 6))
    model.o = nn.Linear(6, 7)
    assert not discover(model, torch.randn(6, 8), rules={"aten.bilinear": rule}).permutations
    assert seen[0] == "bilinear"


def test_layers_without_channels_are_named():
    model = Forward(
        lambda s, x: s.o(torch.cat([s.a(x), s.c(x)], 1).relu()),
        a=nn.Linear(4, 5),
        c=nn.Sequential(nn.Linear(4, 5)),
        o=nn.Linear(5, 2),
    )
    model.c[0].weight = nn.Parameter(torch.zeros(0, 4))
    model.c[0].bias = nn.Parameter(torch.zeros(0))
    sym = exact(model, torch.randn(6, 4).double())
    assert (sizes(sym), sym.scaling_dof) == ([5], 5)
    assert [f.reason for f in sym.frozen] == ["one of its tensors has no elements"]


# ------------------------------------------------------------ what has two meanings
@pytest.mark.parametrize(("short", "long"), [("max", "maximum"), ("min", "minimum")])
def test_extremes_of_two_tensors_are_those_of_their_elements(short, long):
    def found(name):
        def forward(s, x):
            return s.o(getattr(torch, name)(s.a(x), s.b(x)))

        net = Forward(forward, a=nn.Linear(4, 5), b=nn.Linear(4, 5), o=nn.Linear(5, 2))
        return discover(net, torch.randn(6, 4))

    one, other = found(short), found(long)
    assert not one.frozen
    assert (one.permutations[0].units, one.scaling_dof) == (5, 5)
    assert one.log10_permutations == other.log10_permutations
    assert one.scaling_dof == other.scaling_dof


def test_a_product_of_two_rows_is_convolved():
    def forward(s, x):
        return s.o(s.conv(s.a(x)[:, :, None] * s.b(x)[:, None]).relu().sum(2))

    net = Forward(
        forward, a=nn.Linear(4, 5), b=nn.Linear(4, 3), conv=nn.Conv1d(5, 6, 1), o=nn.Linear(6, 2)
    )
    found = discover(net, torch.randn(6, 4))
    assert not found.frozen
    assert [group.units for group in found.permutations] == [6, 5]
