"""Attention: heads under positions, norms and shared keys, and the blocks around it."""

from functools import partial

import modern_networks as modern
import torch
import torch.nn.functional as F
from torch import nn

from known_networks.table import add, linear, network, parameter
from weightsym import fold_norms

FEW, MORE, LONG = (16, 4, 10), (20, 4, 10), [(3, 7, 10)]
BOTH = {"k.bias": 6, "v.bias": 6}


def attention(name, *counts, inputs=FEW, others=LONG, **more):
    """One more row, of attention with these options."""
    facts = "matrices shifts dimension moves kernel held".split()
    known = {key: more.pop(key) for key in facts if key in more}
    add(name, modern.attention(**more), inputs, *counts, others=others, **known)


HEADS, GENERAL = "3*4 2b", "general 3*4"
# h heads of w channels: matrices of queries with keys and of values with outputs, h w^2 each;
# biases of keys and of values, h w each
attention("attention", HEADS, 12, 12, matrices=GENERAL, shifts=BOTH, dimension=2 * 18 + 2 * 6)
# in training the weights of a row do not sum to one
attention("attention with dropout", HEADS, 12, 12, dropout=0.2, shifts={"k.bias": 6})
# the same for each of two heads of keys, however many queries read them
attention("grouped queries", "3*4 2b*3", 12, 12, heads=4, kv_heads=2, matrices=GENERAL, inputs=MORE,
          dimension=2 * 18 + 2 * 6)  # fmt: skip
attention("one key for all", "3*2 4b", 6, 6, heads=4, kv_heads=1, inputs=MORE, dimension=18 + 6)
# a complex number for each of h w / 2 frequencies; a shifted key turns with its position
for layout in ("half", "interleaved"):
    attention(f"rotary {layout}", "4*2 2b", 12, 12, width=4, rotary=layout, shifts={"v.bias": 8},
              matrices="complex 2*4, general 4*2", inputs=MORE, dimension=8 + 32 + 8)  # fmt: skip
attention("rotary, grouped", "4*2 2b*3", 12, 12, heads=4, kv_heads=2, width=4, rotary="half")
attention("rotary, one key", "4 2b", 6, 6, kv_heads=1, width=4, rotary="interleaved",
          matrices="complex 2*2, general 4")  # fmt: skip
# complex numbers, matrices on the two channels left, their key bias; values
attention("partly rotary", "2*2 6*2 2b", 20, 20, width=6, rotary="half", rotated=4, inputs=FEW,
          matrices="complex 2*4, general 2*2, general 6*2", dimension=8 + 8 + 4 + 72 + 12,
          )  # fmt: skip
# a gain of queries against one of keys; both may flip, of which one is found
attention("query-key norm", "3*3 2b", 9, 18, norm=True, matrices="general 3*2",
          dimension=3 + 18 + 6)  # fmt: skip
# every head has a slope of its own
attention("ALiBi", "3*4", 12, 12, positions="alibi", shifts=BOTH, dimension=2 * 18 + 2 * 6)
# columns of the table move with the heads, and every one of them may be shifted
attention("T5 table", HEADS, 12, 12, positions="t5", shifts=BOTH | {"table.weight": 2},
          moves="table.weight", dimension=2 * 18 + 2 * 6 + 2)  # fmt: skip
# one number between scores and values per head
attention("attention by states", HEADS, 14, 14, scores="states", bias=False, shifts={},
          dimension=2 * 18 + 2)  # fmt: skip
attention("linear attention with a map", HEADS, 6, 6, scores="elu", bias=False,
          matrices="general 3*2", dimension=18)  # fmt: skip


# ------------------------------------------------------------ written in other ways
def heads(t, size=6):
    return t.unflatten(-1, (-1, size)).transpose(1, 2)


def joined(t):
    return t.transpose(1, 2).flatten(2)


def complex_rotary(x):
    steps, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.arange(steps)[:, None] * 1.7 ** -torch.arange(half).double()
    turns = torch.polar(torch.ones_like(angles), angles)
    planes = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(planes * turns).flatten(-2)


def rotary_of_heads(x):
    """Rotary positions with other angles for every head."""
    steps, half = x.shape[-2], x.shape[-1] // 2
    speeds = torch.arange(1.0, x.shape[-3] + 1)[:, None, None] / torch.arange(1.0, half + 1)
    angles = torch.arange(steps)[:, None] * speeds.to(x)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@network("4 2b", 6, 6, name="rotary, one key, in complex numbers", inputs=MORE, others=LONG,
         matrices="complex 2*2, general 4", dimension=4 + 16 + 4, shifts={"v.bias": 4},
         q=(10, 8), k=(10, 4), v=(10, 4), o=(8, 10))  # fmt: skip
def multi_query_in_complex_numbers(s, x):
    """As in the reference code of Llama: heads behind the tokens, turned before they are moved."""
    q, k, v = (layer(x).unflatten(-1, (-1, 4)) for layer in (s.q, s.k, s.v))
    angles = torch.arange(x.shape[1])[:, None] * 1.7 ** -torch.arange(2).to(x)
    turns = torch.polar(torch.ones_like(angles), angles).view(1, -1, 1, 2)
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * turns)
        .flatten(3)
        .transpose(1, 2)
        for t in (q, k)
    )
    v = v.repeat_interleave(2, 2).transpose(1, 2)
    return s.o(joined(torch.softmax(q @ k.repeat_interleave(2, 1).mT, -1) @ v))


@network("3*4 4 2b", 18, 22, matrices="general 3*4, complex 2*2", inputs=(4, 4, 6),
         others=[(3, 6, 6)], q=linear(6, 14), down=linear(6, 8), up=linear(4, 12),
         m=lambda: nn.RMSNorm(4, eps=0.1), o=linear(6, 6))  # fmt: skip
def latent_attention(s, x):
    """As in DeepSeek: heads of their own beside one key with positions, which is repeated."""
    q, key = s.q(x).unflatten(-1, (2, 7)).split([3, 4], -1), s.down(x)
    k, v = s.up(s.m(key[..., :4])).unflatten(-1, (2, 6)).chunk(2, -1)
    turned = [
        complex_rotary(t.transpose(1, 2)).transpose(1, 2) for t in (q[1], key[:, :, None, 4:])
    ]
    q = torch.cat([q[0], turned[0]], -1)
    k = torch.cat([k, turned[1].expand(-1, -1, 2, -1)], -1)
    weights = torch.einsum("bshd,bthd->bhst", q, k).softmax(-1)
    return s.o(torch.einsum("bhst,bthd->bshd", weights, v).flatten(2))


TURNS = {
    "complex rotary positions": (complex_rotary, "6*4 4b", 36, 36),
    "angles of every head": (rotary_of_heads, "6*4", 36, 36),
}
SEQUENCE = {"inputs": (2, 5, 10), "others": [(3, 8, 10)]}
four = partial(network, q=(10, 24), k=(10, 24), v=(10, 24), o=(24, 3), **SEQUENCE)
for name, (turn, *counts) in TURNS.items():

    @four(*counts, name=name)
    def turned(s, x, turn=turn):
        q, k, v = heads(s.q(x)), heads(s.k(x)), heads(s.v(x))
        return s.o(joined(F.scaled_dot_product_attention(turn(q), turn(k), v)))


# a gain that heads share ties their channels but not the heads
@four("6*5 4b", 30, 32, name="one LayerNorm for all heads", m=nn.LayerNorm(6), n=nn.LayerNorm(6))
def normed(s, x):
    q, k, v = heads(s.q(x)), heads(s.k(x)), heads(s.v(x))
    return s.o(joined(F.scaled_dot_product_attention(s.m(q), s.n(k), v)))


# ------------------------------------------------------------ planes that are turned by halves


def backwards(x, y, c, s):
    return torch.cat([x * c + y * s, -x * s + y * c], -1)


def sheared(x, y, c, s):
    return torch.cat([x * c + y * s, x * s + y * c], -1)


def as_complex_numbers(x, y, c, s):
    return torch.view_as_real(torch.complex(x, y) * torch.complex(c, s)).flatten(-2)


PLANES = {"matrices": "complex 2*4, general 4*2", "dimension": 8 + 32 + 8}
HYPERBOLIC = {"matrices": "general 4*2", "held": "refuted"}  # no complex numbers
for form, known in ((backwards, PLANES), (as_complex_numbers, PLANES), (sheared, HYPERBOLIC)):

    @network("4*2 2b", 12, 12, name=f"planes {form.__name__.replace('_', ' ')}", inputs=MORE,
             q=(10, 8), k=(10, 8), v=(10, 8), o=(8, 10), shifts={"v.bias": 8}, **known)  # fmt: skip
    def in_planes(s, x, form=form):
        def turned(t):
            angles = torch.arange(t.shape[-2])[:, None] * 1.7 ** -torch.arange(2).to(t)
            return form(*t.chunk(2, -1), angles.cos(), angles.sin())

        q, k, v = (heads(layer(x), 4) for layer in (s.q, s.k, s.v))
        return s.o(joined(F.scaled_dot_product_attention(turned(q), turned(k), v)))


# queries are exchanged in their group, and groups as wholes
shared = partial(network, "6*2 2b*3", 18, 18, q=(10, 24), k=(10, 12), v=(10, 12), o=(24, 3),
                 **SEQUENCE)  # fmt: skip


@shared(name="expanded keys, 2")
def expanded(s, x):
    def copied(k):
        b, h, t, d = k.shape
        return k[:, :, None].expand(b, h, 2, t, d).reshape(b, 2 * h, t, d)

    q, k, v = heads(s.q(x)), heads(s.k(x)), heads(s.v(x))
    scores = complex_rotary(q) @ copied(complex_rotary(k)).transpose(-2, -1)
    return s.o(joined(scores.softmax(-1) @ copied(v)))


@shared(name="keys of torch, 2")
def by_torch(s, x):
    q, k, v = complex_rotary(heads(s.q(x))), complex_rotary(heads(s.k(x))), heads(s.v(x))
    return s.o(joined(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))


# ------------------------------------------------------------ what is beside keys
def multihead(**options):
    return lambda: nn.MultiheadAttention(6, 2, batch_first=True, **options)


itself = partial(network, matrices=GENERAL, inputs=(40, 5, 6), others=[(1, 3, 6)])
OPTIONS = {  # keys of all tokens gain a number that an empty one does not
    "torch's attention": ({}, {"m.in_proj_bias": 6}),
    "torch's attention with both": ({"add_zero_attn": True, "add_bias_kv": True}, {}),
}
for name, (options, shifts) in OPTIONS.items():
    itself("2b 3*4", 12, 12, name=name, shifts=shifts, m=multihead(**options))(
        lambda s, x: s.m(x, x, x, need_weights=False)[0]
    )

kinds = partial(
    network, matrices=GENERAL, inputs=[(2, 4, 6), (2, 3, 6)],
    **{a + b: linear(6, 6) for a in "qkvo" for b in "xy"},
)  # fmt: skip


# keys and values that are learned may each be exchanged with the others of their kind, too
@kinds("3*4 5 2b", 12, 12, pk=parameter(5, 6), pv=parameter(5, 6))
def learned_keys_and_values(s, x, y):
    keys, values = (heads(p.expand(len(x), -1, -1), 3) for p in (s.pk, s.pv))
    k, v = torch.cat([keys, heads(s.kx(x), 3)], 2), torch.cat([values, heads(s.vx(x), 3)], 2)
    return s.ox(joined(F.scaled_dot_product_attention(heads(s.qx(x), 3), k, v)))


# ------------------------------------------------------------ streams
def tokens():
    return torch.cat([torch.randperm(11) for _ in range(8)]).reshape(-1, 8)


def plain_norm(d, eps):
    return nn.LayerNorm(d, eps=eps, elementwise_affine=False)


def decoder(name, *counts, facts, **options):
    build = partial(modern.Decoder, **options)
    add(name, build, [tokens], *counts, others=[[torch.randint(11, (3, 5))]], **facts)


# gains 3 d, rotations (found once gains are folded), matrices of a head 2 w^2, tokens against
# positions d
decoder("decoder", "6*3 7", 30, 36, facts={"dimension": 18 + 15 + 72 + 6, "missing": 15})
decoder("decoder, SwiGLU", "6 3*4 7 2b", 37, 43, heads=2, width=3, gated=True,
        facts={"dimension": 18 + 15 + 36 + 6 + 7, "missing": 15})  # fmt: skip
# rotations that leave ones alone, matrices; ones in writers: tokens, positions, heads, units,
# bias; tokens against positions but along ones; ones in readers. No constants over a row are found
decoder("decoder with plain layer norms", "4*2 6 7", 8, 9, width=4, norm=plain_norm,
        facts={"dimension": 10 + 32 + (11 + 8 + 4 + 7 + 1) + 5 + 30, "missing": 60})  # fmt: skip
add("decoder with folded norms", lambda: fold_norms(modern.Decoder(width=4).eval(), tokens()),
    [tokens], "4*2 6 7", 8, 14, dimension=15 + 2 * 16 + 6)  # fmt: skip

STREAMS = {
    "a stream of root mean squares": (
        lambda x: F.rms_norm(x, (6,), eps=0.1),
        "orthogonal 6",
        8,
        14,
    ),
    "a stream of unit vectors": (lambda x: F.normalize(x, dim=-1), "orthogonal 6", 9, 14),
    "a stream of layer norms": (lambda x: F.layer_norm(x, (6,), eps=0.1), "centred 6", 8, 9),
}
for name, (norm, kind, *counts) in STREAMS.items():

    @network("4*2 6 7", *counts, name=name, matrices=f"{kind}, general 4*2",
             embed=lambda: nn.Embedding(11, 6),
             attention=modern.attention(d=6, heads=1, width=4, bias=False), one=(6, 7), two=(7, 6),
             last=linear(6, 11), positions=parameter(8, 6), inputs=[torch.randint(11, (2, 5))],
             moves="embed.weight positions")  # fmt: skip
    def stream(s, tokens, norm=norm):
        x = s.embed(tokens) + s.positions[: tokens.shape[1]]
        x = x + s.attention(norm(x))
        return s.last(norm(x + s.two(F.silu(s.one(norm(x))))))


# ------------------------------------------------------------ other blocks
add("SwiGLU", modern.GatedMLP, (12, 4, 6), "10", 10, 10, matrices="", dimension=10)
# both halves against the output; both may flip, of which one is found
add("bilinear", partial(modern.GatedMLP, 8, activation=nn.Identity()), (20, 4, 8), '10 2b', 20, 20,
    dimension=20)  # fmt: skip
# channels, states, rank; row against convolution, state, rank, one number for all; matrices of the
# low rank
mamba = partial(add, others=[(3, 8, 6)])
mamba("Mamba", modern.Mamba, (24, 4, 6), "10 5 3", 19, 19, dimension=9 + 5 + 10 + 1,
      moves="log_decay select.weight")  # fmt: skip


class SharedDecay(modern.Mamba):
    """One row of decays for all channels."""

    def __init__(self):
        super().__init__(inner=7, states=4, rank=3)
        self.log_decay = nn.Parameter(torch.randn(4))


class FixedDecay(modern.Mamba):
    """Decays that are constants, others for every state and channel."""

    def __init__(self):
        super().__init__(inner=7, states=4, rank=3)
        del self.log_decay
        self.register_buffer("log_decay", torch.arange(28.0).reshape(7, 4).double() / 9)


mamba("Mamba with shared decays", SharedDecay, (2, 5, 6), "3 4 7", 15, 15)
mamba("Mamba with constant decays", FixedDecay, (2, 5, 6), "3", 15, 15)
# tanh units, and the rank
add("LoRA", modern.LoRA, (9, 4, 6), "7 2", 2, 9, matrices="general 2", dimension=4)
add("merged LoRA", modern.MergedLoRA, (9, 4, 6), "7 2", 2, 9, dimension=4)
# matrices, and the first bias into the second
add("low rank", modern.LowRank, (12, 4, 6), "3 5", 3, 8, matrices="general 3", dimension=9 + 3)
# classes and all features
add("cosine classifier", modern.CosineClassifier, (200, 5), "6", 4, 0, dimension=3 + 1)
# rotations and a scale of all
add("unit vectors", modern.UnitVectors, (200, 5), "6*2", 1, 12, dimension=15 + 1)
add(
    "learned slopes, tanh",
    partial(modern.LearnedSlope, torch.tanh),
    (200, 5),
    "6",
    6,
    12,
    dimension=6,
)

near = modern.path(5)
graph = [lambda: 4 * torch.randn(12, 5, 5), near / near.sum(1, keepdim=True)]
add("graph convolution", modern.GCN, graph, "6", 6, 0, dimension=6)
# ELU lets no scale of features through
add("graph attention", modern.GAT, graph, "4*3 3b", 0, 0, dimension=0)
