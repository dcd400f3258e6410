"""What single operations do to channels: pass them, tell them apart, or hold them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from known_networks.table import linear, network, parameter

two = partial(network, a=(5, 8), b=(8, 3))
wide = partial(network, a=(5, 8), b=(12, 3))
images = partial(network, a=lambda: nn.Conv2d(2, 4, 3), b=(64, 3), inputs=(3, 2, 6, 6))
sequences = partial(network, a=(5, 6), b=(5, 6), o=(6, 3), inputs=(2, 4, 5), others=[(3, 4, 5)])
rows = partial(network, a=linear(4, 3), b=linear(3, 5), c=linear(4, 3), inputs=(20, 5, 4))


# ------------------------------------------------------------ forwards that fool a reader
@network("6 5", 17, 13, e=(3, 6), n=lambda: nn.LayerNorm(12), r=(12, 5), o=(5, 2),
         inputs=(2, 4, 3), others=[(3, 8, 3)])  # fmt: skip
def patches_merged(s, x):
    """As in Swin: neighbours side by side, so that every channel stands at two places of a row."""
    h = s.e(x)
    return s.o(torch.relu(s.r(s.n(torch.cat([h[:, 0::2], h[:, 1::2]], -1)))))


@network("5 6 7", e=(3, 6), l=(6, 2), m=lambda: nn.LayerNorm(6), n=lambda: nn.LayerNorm(6),
         u=(4, 5), v=(5, 4), a=(6, 7), b=(7, 6), inputs=(2, 4, 3))  # fmt: skip
def tokens_and_channels_mixed_in_turns(s, x):
    h = s.e(x)
    h = h + s.v(F.gelu(s.u(s.m(h).mT))).mT
    return s.l((h + s.b(F.gelu(s.a(s.n(h))))).mean(1))


@network("4*2", 8, 4, a=(5, 8), w=parameter(8))
def halves_of_a_vector(s, x):
    h = s.a(x)
    return torch.relu(h[:, :4]) @ s.w[:4] + torch.sin(h[:, 4:] @ s.w[4:])


@network("8", 8, 8, w=parameter(8, 5), b=(8, 3))
def cosines_of_inputs_and_rows(s, x):
    """The input is the same beside all rows, before and after it is squared."""
    return s.b(F.cosine_similarity(x[:, None], s.w, dim=-1))


@two("8", 0, 8)
def functions_of_inputs_beside_all_units(s, x):
    wide = x.sum(1, keepdim=True).expand(-1, 8)
    return s.b(torch.tanh(s.a(x)) * wide.sin() * (wide.exp() + wide))


@two("8", 8, 0, m=parameter(8), kernel=False)
def a_mask_that_is_learned(s, x):
    """Outputs do not move with it, but jump."""
    return s.b(torch.relu(s.a(x)) * (torch.sigmoid(s.m) > 0.5))


@two("4*2", 8, 4)
def half_relu(s, x):
    h = s.a(x)
    return s.b(torch.cat([torch.relu(h[:, :4]), h[:, 4:]], 1))


@two("4*2", 4, 8)
def write_into_a_slice(s, x):
    h = s.a(x)
    h[:, :4] = torch.tanh(h[:, 4:])
    return s.b(h)


@two("4*2", 8, 4)
def in_place_through_a_view(s, x):
    h = s.a(x)
    h[:, ::2].relu_()
    return s.b(h)


@two("8", 8, 0, held="")
def norms_of_columns_as_gains(s, x):
    return s.b(torch.relu(s.a(x)) * s.b.weight.abs().sum(0))


@images("", 4, 0, held="numerical check")
def shifted_flatten(s, x):
    return s.b(torch.relu(s.a(x)).flatten(1).roll(1, 1))


@two("4b", 4, 0)
def crossed_sum(s, x):
    h = s.a(x)
    y = torch.relu(h[:, [0, 5, 2, 3]] + h[:, [4, 1, 6, 7]])
    return s.b(torch.cat([y, torch.relu(h[:, [0, 5, 2, 3]])], 1))


@two("", 0, 0, held="selected by an index")
def a_channel_picked_by_the_input(s, x):
    h = s.a(x)
    return s.b(h.gather(1, x.argsort(-1)[:, :1].expand(-1, 8)))


# ------------------------------------------------------------ forwards that broke a reader
@network("", 0, 0, held="depend on no weight", a=(5, 8))
def a_layer_that_nothing_reads(s, x):
    return 2 * x


@two("8", 8, 0)
def modes_inside(s, x):
    with torch.autocast("cpu", enabled=False):
        x = torch.relu(s.a(x))
    with torch.enable_grad():
        return s.b(x * 2)


@two("", 0, 0, held="cond .*no rule")
def a_branch_by_numbers(s, x):
    return s.b(torch.cond(x.sum() > 0, torch.sin, torch.cos, (s.a(x),)))


@network("8", 0, 0, a=(5, 8))
def mean_and_variance(s, x):
    variance, mean = torch.var_mean(torch.tanh(s.a(x)), 1)
    return torch.stack([variance, mean], 1)


@two("8", 8, 8, p=lambda: nn.Parameter(torch.rand(8) + 0.5))
def snake(s, x):
    h = s.a(x)
    return s.b(h + torch.sin(s.p * h) ** 2 / s.p)


@network("", 8, 0, a=(5, 8), e=lambda: nn.Embedding(2, 3), held="computed indices")
def thresholds_as_an_index(s, x):
    return s.e((s.a(x) > 0).long()).flatten(1)


@two("8", 0, 0)
def rounded_to_integers(s, x):
    return s.b((9 * torch.relu(s.a(x))).long().to(x.dtype))


@wide("4 8", 0, 0)
def sigmoid_of_padding(s, x):
    return s.b(torch.sigmoid(F.pad(s.a(x), (0, 4))))


@wide("4 8", 12, 13, n=lambda: nn.BatchNorm1d(12))
def norms_of_padding(s, x):
    return s.b(s.n(F.layer_norm(F.pad(torch.tanh(s.a(x)), (4, 0)), (12,))))


@two("8", 1, 8)
def unit_vectors_of_a_layer(s, x):
    return s.b(F.normalize(s.a(x), dim=-1))


@network("5", 0, 0, a=(3, 5), t=parameter(5, 5), inputs=(20, 4, 3), others=[(3, 4, 3)],
         shifts={})  # fmt: skip
def states_of_a_random_field(s, x):
    scores = s.a(x)
    total = scores[:, 0]
    for step in range(1, scores.shape[1]):
        total = torch.logsumexp(total[:, :, None] + s.t, 1) + scores[:, step]
    return torch.logsumexp(total, 1)


@network("5", 1, 0, a=(3, 5), t=parameter(5, 5), o=(5, 2), inputs=(30, 3))
def pairs_of_units_beside_a_table(s, x):
    h = s.a(x)
    return s.o((h[:, :, None] + h[:, None] + s.t).relu().sum(2))


@network("6", 1, 6, a=(4, 6), inputs=(60, 8), matrices="orthogonal 6", dimension=16)
def cosines_of_two_inputs_by_one_encoder(s, x):
    return F.cosine_similarity(s.a(x[:, :4]), s.a(x[:, 4:]), dim=1)


@two("8", 8, 0, inputs=(2, 6, 5), others=[(3, 9, 5)])
def largest_over_a_set(s, x):
    return s.b(torch.relu(s.a(x)).max(1)[0])


@network("4", 4, 0, a=(5, 8), b=(4, 3))
def a_slice_of_a_weight(s, x):
    return s.b(torch.relu(F.linear(x, s.a.weight[2:6], s.a.bias[2:6])))


@network("2*2 2b 3*2", 10, 0, a=lambda: nn.Conv2d(2, 4, 3), c=lambda: nn.Conv2d(6, 2, 1),
         b=lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), inputs=(2, 2, 5, 5))  # fmt: skip
def groups_of_a_transposed_convolution(s, x):
    """Given by position, the last of all arguments."""
    x = F.conv_transpose2d(torch.relu(s.a(x)), s.b.weight, None, 2, 0, 0, 2)
    return s.c(torch.relu(x))


grouped = partial(nn.Conv1d, 4, 4, 1, groups=2)


@network("2*4 2b*2", 12, 0, a=lambda: nn.Conv1d(3, 4, 1), b=grouped, c=grouped, o=(40, 2),
         inputs=(2, 3, 5))  # fmt: skip
def blocks_of_rows_and_of_columns(s, x):
    """Channels 1 and 2 are in the first row and the second column, and the other way round."""
    h = torch.relu(s.a(x))
    crossed = h.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)
    return s.o(torch.cat([torch.relu(s.b(h)), torch.relu(s.c(crossed))], 1).flatten(1))


@two("8", 8, 0, inputs=(2, 6, 5), others=[(2, 12, 5)], p=parameter(1, 12, 8))
def positions_beyond_the_example(s, x):
    return s.b(torch.relu(s.a(x) + s.p[:, : x.shape[1]]))


@network("4", 5, 1, a=(3, 4), b=(4, 2), scale=lambda: nn.Parameter(torch.tensor(2.0)),
         inputs=(5, 3))  # fmt: skip
def a_learned_number(s, x):
    return s.b(torch.relu(s.a(x)) * s.scale)


@network("8", 8, 8, a=(5, 16), c=(5, 8), n=lambda: nn.BatchNorm1d(8, affine=False), b=(8, 3))
def gains_and_biases_by_the_input(s, x):
    gain, bias = s.a(x).chunk(2, -1)
    return s.b(torch.relu(gain * s.n(s.c(x)) + bias))


@network("4", 0, 0, a=(3, 4), b=(4, 2), inputs=(2, 3))
def logsumexp_over_everything(s, x):
    h = torch.relu(s.a(x))
    return s.b(h / (1 + h.logsumexp((0, 1)).abs()))


# ------------------------------------------------------------ operations that are rarely used
ZERO = torch.zeros(()).double()
PASSING = {
    "cumprod": (lambda s, x: s.a(x).sigmoid().cumprod(1), "6", 0, 0),
    "cummax": (lambda s, x: s.a(x).cummax(1).values, "6", 6, 0),
    "sort": (lambda s, x: s.a(x).sort(1).values, "6", 6, 0),
    "prod": (lambda s, x: s.a(x).sigmoid().prod(1), "6", 0, 0),
    "masked_scatter": (
        lambda s, x: s.a(x).relu().masked_scatter(
            (x[..., :1] > 0).expand(-1, -1, 6), s.b(x).relu()
        ),
        "6", 6, 0,
    ),
    "min of two": (lambda s, x: torch.min(s.a(x), s.b(x)), "6 2b", 6, 0),
    "logcumsumexp": (lambda s, x: s.a(x).logcumsumexp(1), "6", 0, 0),
    "between zero and one": (lambda s, x: s.a(x).clamp(ZERO, ZERO + 1), "6", 0, 0),
    "phases": (lambda s, x: torch.exp(1j * s.a(x)).real, "6", 0, 0),
    "signs of complex numbers": (
        lambda s, x: torch.view_as_real(torch.sgn(torch.complex(s.a(x), s.a(x) ** 2))).sum(-1),
        "6", 0, 0,
    ),
}  # fmt: skip
for operation, (forward, *counts) in PASSING.items():
    sequences(*counts, name=operation)(lambda s, x, f=forward: s.o(f(s, x)))

REFUSED = {
    "cumsum": lambda s, x: s.a(x).relu().cumsum(-1),
    "masked_scatter": lambda s, x: s.a(x).relu().masked_scatter(s.b(x).detach() > 0, s.b(x).relu()),
    "fft": lambda s, x: torch.fft.fft(s.a(x)).real,
}
for operation, forward in REFUSED.items():
    sequences("", 0, 0, name=f"{operation} of channels", held=operation, others=[(2, 4, 5)])(
        lambda s, x, f=forward: s.o(f(s, x))
    )

sequences("6", 6, 0, name="as_strided of channels", others=[(2, 4, 5)])(
    lambda s, x: s.o(s.a(x).relu().as_strided((2, 4, 6), (24, 6, 1)))
)


@network("6 7", 13, 6, a=(5, 6), o=(7, 3), w=parameter(4, 6, 7), inputs=(60, 4, 5), held="cumsum")
def cumulative_sums_after_a_matrix_for_each_position(s, x):
    return s.o(torch.einsum("bti,tio->bto", s.a(x), s.w).cumsum(1).relu())


@network("6 7", 13, 6, a=(8, 6), c=(6, 7), o=(7, 3), w=parameter(6, 7, 2, 2), inputs=(60, 4, 8),
         others=[(3, 4, 8)], matrices="general 6", dimension=43 + 48, missing=48,
         held="fft")  # fmt: skip
def a_layer_of_a_fourier_neural_operator(s, x):
    """Nobody reads imaginary parts of the lowest frequency, and shifts are not found."""
    h = s.a(x)
    seen = torch.fft.rfft(h, dim=1)[:, :2]
    changed = torch.einsum("bmi,iom->bmo", seen, torch.view_as_complex(s.w))
    return s.o((torch.fft.irfft(changed, n=4, dim=1) + s.c(h)).relu())


BOUNDS = {  # lower and upper, and which scales there are: those of all channels, or one for all
    "learned bounds": (torch.tensor(-0.4), torch.tensor(0.7), nn.Parameter, 1, 0),
    "bounds of channels": (-torch.rand(6), torch.rand(6), nn.Buffer, 0, 0),
    "bounds": (torch.tensor(-0.4), torch.tensor(0.4), nn.Buffer, 0, 6),
}
for name, (low, high, kind, scales, signs) in BOUNDS.items():
    parts = {"low": lambda k=kind, t=low: k(t), "high": lambda k=kind, t=high: k(t)}
    sequences("6", scales, signs, name=name, **parts)(
        lambda s, x: s.o(torch.clamp(s.a(x), s.low, s.high))
    )


@network("6", 6, 0, c=lambda: nn.Conv2d(3, 6, 1), o=(6, 3), table=parameter(1, 6, 4, 4),
         inputs=(2, 3, 6, 6), others=[(1, 3, 8, 8)], held="_upsample_bicubic2d_aa")  # fmt: skip
def a_resized_table(s, x):
    table = F.interpolate(s.table, x.shape[-2:], mode="bicubic", antialias=True)
    return s.o((s.c(x) + table).relu().mean((-2, -1)))


windows = partial(network, "4", 4, 0, a=lambda: nn.Conv2d(3, 4, 1), inputs=(2, 3, 6, 6))


@windows(o=lambda: nn.Conv2d(4, 2, 1))
def folded_windows(s, x):
    return s.o(F.fold(F.unfold(s.a(x).relu(), 2), (6, 6), 2))


@sequences("3 4", 1, 0, a=(5, 3), b=(5, 4), o=(12, 2))
def sums_of_all_pairs(s, x):
    return s.o((s.a(x)[..., None] + s.b(x)[..., None, :]).relu().flatten(-2))


@network("6", 1, 0, a=lambda: nn.Conv2d(3, 6, 3, padding=1), o=lambda: nn.Conv2d(6, 4, 1),
         gate=lambda: nn.Conv2d(2, 1, 3, padding=1), inputs=(2, 3, 6, 6),
         others=[(3, 3, 5, 5)])  # fmt: skip
def mean_and_maximum_of_channels(s, x):
    h = s.a(x).relu()
    seen = torch.cat([h.mean(1, keepdim=True), h.amax(1, keepdim=True)], 1)
    return s.o(h * s.gate(seen).sigmoid()).mean((2, 3))


# ------------------------------------------------------------ operands that are told apart
of_pairs = partial(network, a=(6, 3), b=(9, 2), inputs=(20, 6), others=[(50, 6)])
PAIRS = {
    "differences": lambda x, y: x - y,
    "quotients": lambda x, y: torch.sigmoid(x) / torch.sigmoid(y),
    "orders": lambda x, y: torch.where(x > y, x, 0.3 * y),
    "powers": lambda x, y: torch.relu(x) * torch.relu(y) ** 2,
}
for name, combine in PAIRS.items():

    @of_pairs(name=f"{name} of all pairs", held="exchanges that share entries")
    def all_pairs(s, x, f=combine):
        h = s.a(x)
        return s.b(torch.tanh(f(h[:, :, None], h[:, None]).flatten(1)))


@of_pairs(b=(3, 2), w=parameter(3), held="exchanges that share entries")
def a_circulant(s, x):
    k = torch.arange(3)
    return s.b(torch.tanh(F.softplus(s.a(x)) @ s.w[(k[:, None] - k) % 3]))


@of_pairs(a=parameter(2, 2, 2), b=parameter(2, 3, 2))
def a_tensor_train(s, x):
    return torch.einsum("bij,air,rjc->bac", x.unflatten(1, (2, 3)), s.a, s.b)


# gains that differ tell channels apart, those of one dimension follow them as statistics do
GAINS = {"constants": ("2 3", 6, 0, [[1.0, 1, 2, 2, 2, 3]]), "a buffer": ("6", 6, 6, [2.0] * 6)}
for name, (*counts, gains) in GAINS.items():
    network(*counts, name=f"the largest of a set times {name}", first=(3, 6), last=(6, 2),
            gains=lambda g=gains: nn.Buffer(torch.tensor(g)), inputs=(4, 5, 3),
            )(lambda s, x: s.last(s.first(x).amax(1) * s.gains))  # fmt: skip


# ------------------------------------------------------------ what is linear in rows of channels
NODES = 40
SENDERS = torch.arange(NODES).repeat(2)
RECEIVERS = torch.cat([torch.arange(1, NODES + 1) % NODES, torch.arange(NODES).flip(0)])
EVERY = RECEIVERS[:, None].expand(-1, 3)


ON_NODES = {
    "scatter_reduce": lambda s, x: s.c(x).scatter_reduce(0, EVERY, s.a(x)[SENDERS], "mean"),
    "gather": lambda s, x: s.a(x).gather(0, EVERY[:NODES]),
    "take_along_dim": lambda s, x: torch.take_along_dim(s.a(x), EVERY[:NODES, :1], 0),
}
ON_TOKENS = {
    "where": lambda s, x: torch.where(x[..., :1] > 0, s.a(x), s.c(x)),
    "masked_fill": lambda s, x: s.a(x).masked_fill(x[..., :1] > 1, 0.0),
    "lerp": lambda s, x: torch.lerp(s.a(x), s.c(x), x[..., :1]),
}
for operation, forward in {**ON_NODES, **ON_TOKENS}.items():
    inputs = (NODES, 4) if operation in ON_NODES else (20, 5, 4)
    rows("3", 3, 3, name=f"linear {operation}", matrices="general 3", dimension=9, inputs=inputs)(
        lambda s, x, f=forward: s.b(f(s, x))
    )

TELLING = {
    "gather": (lambda s, x: s.a(x).gather(1, (x[..., :3] > 0).long()), "", 3, 3),
    "where of themselves": (lambda s, x: s.a(x).where(s.a(x) > 0, 0.0), "3", 3, 0),
}
for operation, (forward, *counts) in TELLING.items():
    rows(*counts, name=f"{operation} that tells channels apart", matrices="")(
        lambda s, x, f=forward: s.b(f(s, x))
    )


@rows("3", 0, 1, matrices="centred 3", inputs=(60, 4))
def a_norm_over_all_channels(s, x):
    return s.b(F.group_norm(s.a(x), 1))


@rows("3", 3, 4, matrices="", inputs=(60, 4), n=lambda: nn.GroupNorm(1, 3))
def a_norm_with_gains_over_all_channels(s, x):
    return s.b(s.n(s.a(x)))


USERS, ITEMS = torch.arange(8).repeat_interleave(9), torch.arange(9).repeat(8)
factorised = partial(
    network, u=lambda: nn.Embedding(8, 3), i=lambda: nn.Embedding(9, 3), inputs=[USERS, ITEMS]
)


@factorised("3", 3, 3, matrices="general 3", dimension=9)
def inner_products_of_tables(s, u, i):
    return (s.u(u) * s.i(i)).sum(-1)


@factorised("3", 3, 3, matrices="")
def sums_of_three_factors(s, u, i):
    return (s.u(u) * s.i(i) * s.i(u)).sum(-1)


@factorised("", 3, 3, matrices="")
def products_that_are_returned_too(s, u, i):
    product = s.u(u) * s.i(i)
    return product.sum(-1), product


# ------------------------------------------------------------ noise that is always drawn
def dropped(h):
    return F.dropout(h, 0.5, training=True)


NOISY = {
    "dropout": dropped,
    "dropout of whole channels": lambda h: F.dropout2d(h[..., None, None], 0.5, True)[..., 0, 0],
    "a random mask": lambda h: h * (torch.rand_like(h) < 0.5),
    "a Bernoulli mask": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "added noise": lambda h: h + torch.randn_like(h),
}
for name, noise in NOISY.items():
    scales = 0 if name == "added noise" else 3
    network("3", scales, 0, name=name, a=linear(4, 3), b=linear(3, 5), inputs=(6, 4), random=True)(
        lambda s, x, f=noise: s.b(f(torch.relu(s.a(x))))
    )


# ------------------------------------------------------------ slices of which nothing is left
emptied = partial(
    network, a=(3, 4), pool=lambda: nn.Conv1d(4, 4, 4, 4), norm=lambda: nn.LayerNorm(4), o=(4, 2),
    inputs=(2, 7, 3), others=[(2, 16, 3)],
)  # fmt: skip


def pooled(s, h, end):
    """Every four tokens as one, without the last of them."""
    return s.pool(h.mT).mT.tanh()[:, :end]


def before_the_last(s, x):
    h = s.a(x)
    return s.o(s.norm(torch.cat([h[:, :1], pooled(s, h, -1)], 1)))


emptied("4", 4, 5, name="a slice that is empty in a short example")(before_the_last)


@emptied("4*2", 4, 9)
def a_slice_that_is_always_empty(s, x):
    h = s.a(x)
    return s.o(s.norm(torch.cat([h[:, :1], pooled(s, h, 0)], 1)))


@network("4", 0, 4, a=(6, 4), b=(6, 2), inputs=(2, 5, 6))
def zeros_among_channels(s, x):
    """Their columns of the next layer are read by nobody, and stay where they are."""
    y = torch.tanh(s.a(x))
    return s.b(torch.cat([y, y.new_zeros(*y.shape[:-1], 2)], -1))


@network("5", 5, 0, a=(4, 5), c=(4, 0), o=(5, 2), inputs=(6, 4), held="")
def a_layer_without_channels(s, x):
    return s.o(torch.cat([s.a(x), s.c(x)], 1).relu())


# ------------------------------------------------------------ places behind what no unit passes
flat = partial(network, a=lambda: nn.Conv2d(2, 4, 3), o=(24, 3), inputs=(3, 2, 5, 4))
flat("4", 0, 0, name="flattened before GELU")(lambda s, x: s.o(F.gelu(s.a(x).flatten(1))))


@two("8", 0, 0, b=(13, 3))
def inputs_beside_gelu(s, x):
    return s.b(torch.cat([F.gelu(s.a(x)), x], 1))


@two("8 2", 0, 0, b=(11, 3))
def constants_beside_gelu(s, x):
    numbers = torch.tensor([1.0, 1.0, 2.0]).to(x)
    return s.b(torch.cat([F.gelu(s.a(x)), numbers.expand(len(x), 3)], 1))


# ------------------------------------------------------------ gains that are computed
@network(
    "4",
    4,
    4,
    conv=lambda: nn.Conv1d(4, 4, 2),
    last=(4, 2),
    inputs=(3, 4, 5),
    gain=lambda: nn.Parameter(torch.rand(4) + 0.5),
    moves="gain conv.weight last.weight",
)
def standardised_filters_with_gains(s, x):
    w = s.conv.weight
    rows = F.batch_norm(w.reshape(1, 4, -1), None, None, 2 * s.gain, training=True, eps=1e-6)
    return s.last(torch.relu(F.conv1d(x, rows.reshape_as(w))).mean(-1))


TOKENS = torch.randint(9, (5, 4), generator=torch.Generator().manual_seed(0))


@network("3 4", 3, 4, name="bags of rows, max", matrices="", first=(3, 4), last=(4, 2),
         table=lambda: nn.EmbeddingBag(9, 3, mode="max"), inputs=[TOKENS],
         others=[[TOKENS[:2, :3]]])  # fmt: skip
def bags_of_rows(s, t):
    return s.last(torch.tanh(s.first(s.table(t))))


# ------------------------------------------------------------ slices of which only the size is read
SIZES = [
    torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like,
    lambda t: torch.full_like(t, 2.0), lambda t: torch.randint_like(t, 3),
    lambda t: torch.empty_like(t).fill_(1.0), lambda t: t.new_zeros(t.shape),
    lambda t: t.new_ones(t.shape), lambda t: t.new_full(t.shape, 2.0),
    lambda t: t.new_empty(t.shape).fill_(1.0),
]  # fmt: skip


@two("8", 8, 0, dimension=8, inputs=(40, 5))
def masks_from_slices(s, x):
    h = s.a(x)
    masks = [like(h[:, k % 8 : k % 8 + 1]).isfinite() for k, like in enumerate(SIZES)]
    return s.b(torch.relu(h) * torch.stack(masks).all(0))


@two("7", 8, 0, inputs=(20, 5))
def a_mask_from_numbers(s, x):
    h = s.a(x)
    return s.b(torch.relu(h) * (h[:, :1] > 0))


@sequences("6", 0, 6, c=linear(6, 6))
def a_first_state_from_a_slice(s, x):
    h = s.a(x)
    state = torch.zeros_like(h[:, 0])
    for step in h.unbind(1):
        state = torch.tanh(step + s.c(state))
    return s.o(state + s.b(x).mean(1))


# ------------------------------------------------------------ extremes and distances of channels
pieces = partial(network, "2*4 4b", 4, 0, a=(5, 8), b=(4, 3))
PIECES = {
    "amax": lambda h: h.unflatten(1, (4, 2)).amax(2),
    "max with places that nobody reads": lambda h: h.unflatten(1, (4, 2)).max(2).values,
    "min": lambda h: h.unflatten(1, (2, 4)).min(1).values,
    "pooled channels": lambda h: F.max_pool1d(h[:, None], 2)[:, 0],
}
for name, piece in PIECES.items():
    pieces(name=f"maxout by {name}")(lambda s, x, f=piece: s.b(f(s.a(x))))


@two("", 0, 0, held="mixes entries", b=(7, 3))
def channels_pooled_in_stretches_that_overlap(s, x):
    return s.b(F.max_pool1d(s.a(x)[:, None], 2, stride=1)[:, 0])


@network("8 2b", 8, 16, a=(5, 8), c=(5, 8), b=(8, 3))
def distances_from_the_origin(s, x):
    return s.b(torch.hypot(s.a(x), s.c(x)))


@network("8", 8, 8, a=(5, 8), c=(5, 8), b=(8, 3))
def angles(s, x):
    return s.b(torch.atan2(s.a(x), s.c(x)))


@two("4", 4, 4, b=(4, 3))
def sizes_of_complex_numbers(s, x):
    return s.b(torch.view_as_complex(s.a(x).view(-1, 4, 2)).abs())


@two("4", 4, 8, w=parameter(4))
def complex_numbers_turned_by_learned_angles(s, x):
    turned = torch.view_as_complex(s.a(x).view(-1, 4, 2)) * torch.polar(torch.ones_like(s.w), s.w)
    return s.b(torch.view_as_real(turned).flatten(1))


@network("8", 0, 0, a=(5, 8), c=(5, 8), b=(8, 3))
def angles_after_an_offset(s, x):
    return s.b(torch.atan2(s.a(x) + 1, s.c(x)))
