"""Weights of any shape and side, computed weights, and products of what layers write."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from known_networks.mixing import Products
from known_networks.table import add, linear, network, parameter

hidden = partial(network, a=(4, 6), c=(6, 2), inputs=(3, 4))
maps = partial(network, c=(6, 2), inputs=(3, 4))
filters = partial(
    network, a=lambda: nn.Conv2d(2, 4, 3), h=lambda: nn.Conv2d(4, 5, 3), c=(5, 2),
    inputs=(2, 2, 7, 7), others=[(3, 2, 6, 8)],
)  # fmt: skip

# ------------------------------------------------------------ sides, letters, numbers
SIDES = {
    "by an implicit einsum": lambda s, x: torch.einsum("bi,oi", x, s.w),
    "by an einsum with dots": lambda s, x: torch.einsum("...i,oi->...o", x, s.w),
    "with numbers": lambda s, x: torch.addmm(s.b, x, s.w.T, alpha=0.5, beta=2),
    "of three dimensions": lambda s, x: torch.einsum(
        "bi,hdi->bhd", x, s.w.view(2, 3, 4)
    ).flatten(1),
}  # fmt: skip
for name, side in SIDES.items():
    maps("6", 6, 0, name=f"a matrix {name}", w=parameter(6, 4), b=parameter(6))(
        lambda s, x, f=side: s.c(torch.relu(f(s, x)))
    )


@network("6 3*4 2b", 18, 12, a=(4, 6), o=parameter(2, 3, 4), inputs=(2, 5, 4), others=[(1, 3, 4)],
         **{n: parameter(6, 2, 3) for n in "qkv"})  # fmt: skip
def projections_of_three_dimensions(s, x):
    x = torch.relu(s.a(x))
    q, k, v = (torch.einsum("btd,dhk->bthk", x, t) for t in (s.q, s.k, s.v))
    scores = torch.einsum("bthk,bshk->bhts", q, k).softmax(-1)
    return torch.einsum("bthk,hkd->btd", torch.einsum("bhts,bshk->bthk", scores, v), s.o)


@network("5b", 5, 0, w=parameter(3, 4, 5), c=(10, 2), inputs=(3, 2, 4))
def weights_for_the_examples_of_a_batch(s, x):
    return s.c(torch.relu(torch.bmm(x, s.w).flatten(1)))


# ------------------------------------------------------------ computed weights


hidden(
    "3 5 6", 9, 3, name="unit rows of a product", u=parameter(3, 6), v=parameter(3, 5), c=(5, 2)
)(lambda s, x: s.c(torch.relu(F.linear(torch.relu(s.a(x)), F.normalize(s.v.T @ s.u, dim=1)))))

NORMS = {
    "old weight norm": (nn.utils.weight_norm, 11, 5),
    "old spectral norm": (nn.utils.spectral_norm, 0, 0),
    "spectral norm": (parametrizations.spectral_norm, 0, 0),
}


def trained(norm, layer):
    """A layer with a norm, whose statistics have seen an input."""

    def build():
        made = norm(layer())
        made(torch.randn(2, *(made.weight.shape[1:2] if made.weight.ndim == 2 else (4, 7, 7))))
        return made

    return build


for name, (norm, *counts) in NORMS.items():
    hidden("6 5", *counts, name=name, h=trained(norm, partial(nn.Linear, 6, 5)), c=(5, 2))(
        lambda s, x: s.c(torch.relu(s.h(torch.relu(s.a(x)))))
    )
filters("4 5", 0, 0, name="spectral_norm of a convolution, 1 groups",
        h=trained(parametrizations.spectral_norm, partial(nn.Conv2d, 4, 5, 3)),
        )(lambda s, x: s.c(torch.relu(s.h(torch.relu(s.a(x)))).mean((2, 3))))  # fmt: skip


def by_variance(v):
    return (v - v.mean((1, 2, 3), keepdim=True)) / (v.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()


def by_batch_norm(v):
    rows = v.reshape(1, len(v), -1)
    return F.batch_norm(rows, None, None, training=True, momentum=0.0).reshape_as(v)


for standardise in (by_variance, by_batch_norm):

    @filters("4 5", 1, 0, name=f"standardised filters {standardise.__name__.replace('_', ' ')}")
    def standardised(s, x, f=standardise):
        h = F.conv2d(torch.relu(s.a(x)), f(s.h.weight), s.h.bias)
        return s.c(torch.relu(h).mean((2, 3)))


@filters("2b 2*2 3b 2*3", 6, 5, name="filters between group norms, by_batch_norm", c=(6, 2),
         h=lambda: nn.Conv2d(4, 6, 3), g=lambda: nn.GroupNorm(2, 4),
         n=lambda: nn.GroupNorm(3, 6))  # fmt: skip
def grouped(s, x):
    h = torch.relu(s.g(F.conv2d(x, by_batch_norm(s.a.weight), s.a.bias)))
    h = F.conv2d(h, by_batch_norm(s.h.weight), s.h.bias)
    return s.c(torch.relu(s.n(h)).mean((2, 3)))


def standardised_filters(s, x):
    for conv, norm in zip((s.a, s.h, s.g), s.norms, strict=True):
        x = torch.relu(norm(F.conv2d(x, by_variance(conv.weight))))
    return s.c(x.mean((2, 3)))


# exchanges of groups move thousands of weights, which have no label of their own
network("4*24 8b*3", name="wide filters between group norms", c=(32, 2), inputs=(2, 3, 8, 8),
        norms=lambda: nn.ModuleList(nn.GroupNorm(8, 32) for _ in range(3)),
        **{n: partial(nn.Conv2d, k, 32, 3) for n, k in (("a", 3), ("h", 32), ("g", 32))},
        )(standardised_filters)  # fmt: skip


STATISTICS = {
    "over its deviation": lambda v: v / v.std(1, keepdim=True),
    "over its largest": lambda v: v / v.amax(1, keepdim=True),
}
for name, compute in STATISTICS.items():
    hidden("5 6", 5, 0, name=f"a weight {name}", w=parameter(5, 6), c=(5, 2), held=None)(
        lambda s, x, f=compute: s.c(torch.relu(F.linear(torch.tanh(s.a(x)), f(s.w))))
    )


# ------------------------------------------------------------ views of one vector
def views(p, *shapes):
    parts = p.split([torch.Size(shape).numel() for shape in shapes])
    return [t.view(shape) for t, shape in zip(parts, shapes, strict=True)]


@network("4b 5b", 9, 0, p=parameter(59), inputs=(6, 4))
def a_vector_of_two_layers(s, x):
    a, b, c, d, e, f = views(s.p, (5, 4), (5,), (4, 5), (4,), (2, 4), (2,))
    return F.linear(F.relu(F.linear(F.relu(F.linear(x, a, b)), c, d)), e, f)


@network("", 1, 0, p=parameter(25), inputs=(6, 4), held="")
def views_that_overlap(s, x):
    return F.relu(x @ s.p[:20].view(5, 4).T) @ s.p[10:25].view(5, 3)


# ------------------------------------------------------------ operations that are short for others
short = partial(network, inputs=(150, 4), others=[(3, 4)])


@network("3 5 6", 5, 9, dimension=5, a=(4, 3), c=(4, 5), b=lambda: nn.Bilinear(3, 5, 6), o=(6, 7),
         inputs=(150, 8))  # fmt: skip
def a_bilinear_layer(s, x):
    return s.o(s.b(s.a(x[:, :4]).tanh(), s.c(x[:, 4:]).relu()).tanh())


@network("2 5", 2, 5, a=(4, 3), c=(4, 5), b=lambda: nn.Bilinear(3, 5, 2), inputs=(6, 4))
def a_bilinear_layer_and_one_unit(s, x):
    """One unit that is read elsewhere has no exchange with the others, nor a scale."""
    h = s.a(x).relu()
    return s.b(h, s.c(x).tanh()) + h[:, :1]


@network("5", 5, 0, a=(4, 5), b=lambda: nn.Bilinear(5, 5, 3), inputs=(6, 8))
def a_bilinear_layer_of_one_encoder(s, x):
    return s.b(*(s.a(part).relu() for part in x.chunk(2, 1)))


@short("15", 15, 0, dimension=15, w=parameter(4, 3, 5), v=parameter(5, 3, 2))
def tensordot(s, x):
    return torch.tensordot(torch.tensordot(x, s.w, 1).relu(), s.v, ([1, 2], [1, 0]))


# found in blocks, of which channels of several are not exchanged
@short("5*3 3b", 15, 0, dimension=15, w=parameter(3, 4, 5), v=parameter(3, 5, 2), b=parameter(1, 2))
def addbmm(s, x):
    h = torch.bmm(x.expand(3, -1, -1), s.w).relu()
    return torch.addbmm(s.b, h, s.v, beta=0.5, alpha=2)


@short("5", 0, 5, dimension=0, a=(4, 5), w=parameter(3, 5))
def distances(s, x):
    return torch.cdist(s.a(x).tanh(), s.w)


@short('5', 0, 5, dimension=0, held='', a=(4, 5), c=(4, 5),
       u=parameter(5, 3), v=parameter(5, 3))  # fmt: skip
def complex_numbers(s, x):
    z = torch.complex(s.a(x).tanh(), s.c(x).tanh()) @ torch.complex(s.u, s.v)
    return torch.cat([z.real, z.imag], 1)


# ------------------------------------------------------------ products and their scales
def gates(name, combine, dimension, *counts, **parts):
    """Two maps of the input, what is done with them, and a map that reads it."""
    layers = {"gate": (6, 3), "up": (6, 3), "down": (3, 5)} | parts
    network(*counts, name=name, dimension=dimension, inputs=(80, 6), **layers)(
        lambda s, x: s.down(combine(s.gate(x), s.up(x)))
    )


FREE = {"gate": linear(6, 3), "up": linear(6, 3)}
gates("a product", lambda a, b: a * b, 6, "3 2b", 6, 6)
gates("a product without biases", lambda a, b: a * b, 6, "3 2b", 6, 6, **FREE)
gates("a quotient", lambda a, b: a / b, 6, "3", 6, 6, **FREE, down=linear(3, 5))
gates("a ReLU gate", lambda a, b: torch.relu(a) * b, 6, "3", 6, 3)
# a square has twice the scale of what is squared
gates("a gate of squared ReLUs", lambda a, b: torch.relu(a) ** 2 * b, 6, "3", 6, 3)
network("3", 3, 0, name="squared ReLUs", dimension=3, up=(6, 3), down=(3, 5), inputs=(80, 6))(
    lambda s, x: s.down(torch.relu(s.up(x)).square())
)


@network("3", 6, 6, dimension=6, both=(6, 6), down=(3, 5), inputs=(80, 6))
def packed_gates(s, x):
    a, b = s.both(x).chunk(2, -1)
    return s.down(a * b)


@network("2 2b", 6, 6, dimension=6, down=(2, 4), inputs=(80, 4), **{n: linear(4, 2) for n in "abc"})
def three_factors(s, x):
    return s.down(s.a(x) * s.b(x) * s.c(x))


@network("2*3 2b", 3, 3, up=(4, 3), down=(9, 5), inputs=(80, 4), held=None)
def all_products_of_two_channels(s, x):
    h = s.up(x)
    return s.down((h[..., :, None] * h[..., None, :]).flatten(-2))


# a matrix of heads each for scores and values, one number; two numbers of every product
add(
    "linear attention and products",
    Products,
    (80, 4, 4),
    "2*4 2b 3 4",
    16,
    20,
    dimension=2 * 8 + 2 + 6,
)


# ------------------------------------------------------------ scales of several axes
fixed = partial(network, inputs=(2, 5, 4))


# of what fixed inputs have, two channels that look alike
@fixed("2", 1, 3, g=parameter(2, 3))
def products_of_rows(s, x):
    """A row of gains for each factor, both of fixed channels."""
    q, k = (x[..., :3].sin()[:, :, None] * s.g).unbind(2)
    return (q * k).sum(-1)


@fixed("", 3, 3, g=parameter(2, 3))
def quotients_of_rows(s, x):
    q, k = (x[..., :3].exp()[:, :, None] * s.g).unbind(2)
    return (q / k).sum(-1)


units = partial(fixed, z=(4, 3), v=(4, 5), o=(5, 4), g=parameter(2, 3))


@units("3 5", 2, 8, name="attention of gated units, ReLU")
def without_biases(s, x):
    """Queries and keys of one map, with gains of their own."""
    q, k = torch.einsum("btd,nd->btnd", F.silu(s.z(x)), s.g).unbind(2)
    return s.o(F.relu(q @ k.mT) @ s.v(x).tanh())


@units("3 5", 1, 8, name="attention of gated units with biases", b=parameter(2, 3))
def with_biases(s, x):
    q, k = (torch.einsum("btd,nd->btnd", F.silu(s.z(x)), s.g) + s.b).unbind(2)
    return s.o((q @ k.mT).softmax(-1) @ s.v(x).tanh())


@fixed("3", 4, 0, w=parameter(4, 2, 3), o=(3, 2))
def normalised_tensor(s, x):
    """Every entry of a row of norms has the scale of its row and that of its column."""
    return s.o(torch.einsum("btd,dep->btep", x, F.normalize(s.w, dim=0)).relu())


@fixed("2 3 5", 9, 0, phi=parameter(4, 3, 2), w=parameter(3, 4, 5), o=(5, 4))
def soft_experts(s, x):
    """Tokens mixed into the slots of experts by normalised directions."""
    directions = F.normalize(s.phi, dim=0)
    logits = torch.einsum("btd,dep->btep", F.normalize(x, dim=-1), directions)
    slots = torch.einsum("btep,btd->bepd", logits.softmax(1), x)
    inside = torch.einsum("bepd,edh->beph", slots, s.w).relu()
    back = logits.flatten(2).softmax(-1).view_as(logits)
    return s.o(torch.einsum("btep,beph->bth", back, inside))


# ------------------------------------------------------------ rows of one parameter
in_rows = partial(network, a=linear(4, 5), b=linear(5, 5), c=linear(5, 3), inputs=(40, 4))


@in_rows("5*2", 20, 10, table=parameter(2, 5), dimension=20)
def gains_of_two_layers(s, x):
    first, second = s.table.unbind()
    return s.c(second * F.leaky_relu(s.b(first * F.leaky_relu(s.a(x)))))


@in_rows("5", 15, 5, table=parameter(5), dimension=15)
def one_gain_of_two_layers(s, x):
    return s.c(s.table * F.leaky_relu(s.b(s.table * F.leaky_relu(s.a(x)))))


@in_rows("5 3", 5, 10, table=parameter(3, 5), dimension=5)
def rows_that_change_places(s, x):
    return s.c(sum(torch.tanh(s.a(x) * row) for row in s.table.unbind()))


@network("5", 10, 15, a=linear(4, 5), b=(5, 3), over=parameter(3, 5), under=parameter(2, 5),
         inputs=(60, 4), dimension=10)  # fmt: skip
def rational_activations(s, x):
    """Every power of a channel has its coefficient."""
    h = s.a(x)
    top = s.over[0] + s.over[1] * h + s.over[2] * h * h
    return s.b(top / (1 + (s.under[0] * h + s.under[1] * h * h) ** 2))


@network("5 4", 9, 5, e=linear(4, 4), a=linear(4, 5), b=linear(5, 4), o=linear(4, 6),
         table=parameter(3, 4), inputs=(40, 4))  # fmt: skip
def a_table_of_modulations(s, x):
    """As in diffusion transformers: shift, gain and gate in one parameter."""
    h = s.e(x)
    shift, gain, gate = s.table.chunk(3)
    return s.o(
        h + gate * s.b(F.leaky_relu(s.a(F.layer_norm(h, (4,), eps=0.1) * (1 + gain) + shift)))
    )


@network("3 4", 10, 6, u=parameter(4, 3), d=parameter(3), v=parameter(3, 4), o=linear(4, 5),
         inputs=(30, 4), dimension=16, missing=6)  # fmt: skip
def a_diagonal_between_factors(s, x):
    """Without matrices of the rank, which would leave the diagonal."""
    return s.o(F.leaky_relu(x @ s.u @ torch.diag(s.d) @ s.v))


SUMS = {
    "added": lambda h, g: h + g,
    "stacked and summed": lambda h, g: torch.stack([h, g]).sum(0),
    "stacked behind and averaged": lambda h, g: torch.stack([h, g], -1).mean(-1),
}
for name, total in SUMS.items():

    @network("2*2 2b 3 4", 3, 11, matrices="general 3", name=f"branches that are {name}",
             dimension=9, inputs=(40, 4), a=linear(4, 2), b=linear(4, 2), c=linear(2, 3),
             d=linear(2, 3), u=linear(3, 4), o=linear(4, 4))  # fmt: skip
    def summed_branches(s, x, total=total):
        return s.o(torch.tanh(s.u(total(s.c(torch.tanh(s.a(x))), s.d(torch.tanh(s.b(x)))))))


gates = partial(network, a=linear(5, 3), b=linear(5, 3), o=linear(3, 4), inputs=(40, 5))


@gates("3 2b", 5, 1, g=linear(5, 1), h=linear(5, 1), dimension=5)
def branches_with_a_gate_each(s, x):
    """A gate takes up what its branch has more than the other."""
    return s.o(s.g(x) * F.leaky_relu(s.a(x)) + s.h(x) * F.leaky_relu(s.b(x)))


@gates("3 2b", 4, 1, g=parameter(1), dimension=4)
def branches_with_one_gate(s, x):
    return s.o(s.g * F.leaky_relu(s.a(x)) + s.g * F.leaky_relu(s.b(x)))


@gates("3", 2, 2, g=linear(5, 1), h=linear(5, 1), dimension=2)
def a_gate_beside_what_has_no_unit(s, x):
    return s.o(s.g(x) * torch.tanh(s.a(x)) + s.h(x) * F.leaky_relu(s.b(x)))


# ------------------------------------------------------------ stacks and cores
@network("8*2", 16, 0, a=(5, 8), w=parameter(3, 8, 8), c=(8, 2), inputs=(4, 3, 5))
def a_matrix_for_every_token(s, x):
    return s.c(torch.relu(torch.einsum("bti,tio->bto", torch.relu(s.a(x)), s.w)))


@network("7*3 6*5", 51, 0, a=parameter(5, 6, 6), b=parameter(3, 18, 7), c=(21, 2), inputs=(4, 2, 7))
def locally_connected_layers(s, x):
    """A filter of its own at every place."""
    for filters in (s.a, s.b):
        windows = x.unfold(2, 3, 1).permute(0, 2, 1, 3).flatten(2)
        x = torch.relu(torch.einsum("bpi,pio->bpo", windows, filters)).transpose(1, 2)
    return s.c(x.transpose(1, 2).flatten(1))


@network("5*3 6", 21, 0, a=linear(4, 5), b=linear(4, 5), d=linear(4, 5), w=parameter(5, 5, 5, 6),
         c=(6, 2), inputs=[(3, 4)] * 3)  # fmt: skip
def a_core_of_four_dimensions(s, *x):
    units = (torch.relu(part(y)) for part, y in zip((s.a, s.b, s.d), x, strict=True))
    return s.c(torch.relu(torch.einsum("bi,bj,bk,ijkl->bl", *units, s.w)))


@network("6*2 5*2", 18, 2, a=parameter(4, 6), b=parameter(3, 5), d=parameter(6, 6),
         e=parameter(5, 5), c=(30, 2), inputs=(6, 4, 3))  # fmt: skip
def layers_that_are_kronecker_products(s, x):
    for rows, columns in ((s.a, s.b), (s.d, s.e)):
        x = torch.relu(torch.einsum("bij,ip,jq->bpq", x, rows, columns))
    return s.c(x.flatten(1))


@network(a=parameter(3, 2, 2, 3), b=parameter(3, 3, 2, 3), d=parameter(3, 4, 2, 3), c=(8, 3),
         inputs=(6, 24))  # fmt: skip
def a_ring_of_tensors(s, x):
    whole = torch.einsum("riap,pjbq,qkcr->ijkabc", s.a, s.b, s.d)
    return s.c(torch.relu(x @ whole.reshape(24, 8)))


@network("4", 4, 4, matrices="general 4", w=parameter(3, 4, 4), a=lambda: nn.Embedding(12, 4),
         inputs=[torch.arange(36) % 12, torch.arange(36) // 3, torch.arange(36) % 3])  # fmt: skip
def scores_of_triples(s, subject, object_, relation):
    return torch.einsum("ni,nij,nj->n", s.a(subject), s.w[relation], s.a(object_))
