"""Mixtures of experts: units inside experts, experts with their router, and what forbids that."""

from functools import partial

import modern_networks as modern
import torch
import torch.nn.functional as F
from cases import Forward
from torch import nn

from known_networks.table import add, network, parameter

IN, EXPERTS, HIDDEN = 4, 3, 5
ALL, INSIDE = "5*3 3b", "5*3"
TOKENS = {"inputs": (7, IN), "others": [(2, IN), (11, IN)]}
stacked = partial(
    network, r=(IN, EXPERTS), w1=parameter(EXPERTS, IN, HIDDEN), b1=parameter(EXPERTS, HIDDEN),
    w2=parameter(EXPERTS, HIDDEN, IN), b2=parameter(EXPERTS, IN), **TOKENS,
)  # fmt: skip


# ------------------------------------------------------------ how tokens are sent
def softmax(s, x):
    return s.r(x).softmax(-1)


def compared(s, x):
    values, at = softmax(s, x).topk(2)
    return ((at[..., None] == torch.arange(EXPERTS)) * values[..., None]).sum(1)


def selected_by_a_bias(s, x):
    p = s.r(x).sigmoid()
    at = (p + s.selection).topk(2)[1]
    chosen = p.gather(-1, at)
    return torch.zeros_like(p).scatter(-1, at, chosen / chosen.sum(-1, keepdim=True))


def largest(s, x):
    values, at = softmax(s, x).max(-1)
    return F.one_hot(at, EXPERTS) * values[:, None]


def largest_kept(s, x):
    values, at = softmax(s, x).max(-1, keepdim=True)
    return torch.zeros_like(s.r(x)).scatter(-1, at, values)


def dense(s, x, gates):
    h = torch.relu(torch.einsum("bd,edf->bef", x, s.w1) + s.b1)
    return (torch.einsum("bef,efd->bed", h, s.w2) * gates[..., None]).sum(1)


for gates in (compared, selected_by_a_bias, largest, largest_kept):
    selection = " selection" * (gates is selected_by_a_bias)
    stacked(ALL, 15, 0, name=f"experts, {gates.__name__}", selection=nn.Buffer(torch.randn(3)),
            moves="r.weight r.bias w1 b1 w2" + selection,
            )(lambda s, x, gates=gates: dense(s, x, gates(s, x)))  # fmt: skip


@network("6*3 3b 4", stem=(5, 4), r=(4, EXPERTS), up=parameter(EXPERTS, 6, 4),
         down=parameter(EXPERTS, 4, 6), inputs=(8, 5), moves="up down r.weight r.bias")  # fmt: skip
def stacks_of_which_one_counts_its_matrices(s, x):
    x = s.stem(x).tanh()
    out = torch.einsum("beh,eoh->beo", torch.einsum("bi,ehi->beh", x, s.up).relu(), s.down)
    return (out * softmax(s, x)[..., None]).sum(1)


# only experts with equal gates are exchanged
for gates, groups in (((1.0, 2.0, 3.0), INSIDE), ((1.0, 2.0, 2.0), "5*3 2b")):
    stacked(groups, 15, 0, name=f"experts with gates {gates}", gates=torch.tensor(gates))(
        lambda s, x: dense(s, x, s.gates.to(x).expand(len(x), -1))
    )


# scales of ReLU units, and what all rows and biases of the router may share
add("experts of one module, top 2", partial(modern.MoE, top=2), (12, 4, 5), "4*3 3b", 12, 0,
    dimension=12 + 5 + 1)  # fmt: skip


# ------------------------------------------------------------ weights of the chosen experts


@stacked(ALL, 15, 0)
def experts_chosen_by_select(s, x):
    values, at = softmax(s, x).topk(2)
    w1, w2 = (w.index_select(0, at.flatten()).view(*at.shape, *w.shape[1:]) for w in (s.w1, s.w2))
    h = torch.relu(torch.einsum("td,tkdf->tkf", x, w1) + s.b1[at])
    return (torch.einsum("tkf,tkfd->tkd", h, w2) * values[..., None]).sum(1)


@stacked("3 5b", 5, 0, held="")
def experts_behind_another_index(s, x):
    """What the experts of one choice write is read by those of another."""
    (_, one), (values, two) = (softmax(s, x * k).topk(2) for k in (1, 2))
    h = torch.relu(torch.einsum("td,tkdf->tkf", x, s.w1[one]))
    return (torch.einsum("tkf,tkfd->tkd", h, s.w2[two]) * values[..., None]).sum(1)


@stacked("5*3 3b", 0, 3)
def experts_with_a_norm_inside(s, x):
    values, at = softmax(s, x).topk(2)
    h = F.layer_norm(torch.einsum("td,tkdf->tkf", x, s.w1[at]), [HIDDEN])
    return (torch.einsum("tkf,tkfd->tkd", h, s.w2[at]) * values[..., None]).sum(1)


@stacked("3 5b", 5, 0, held="")
def experts_by_their_mean(s, x):
    """Matrices that are averaged before a layer takes them."""
    _, at = softmax(s, x).topk(2)
    h = torch.relu(torch.einsum("td,tdf->tf", x, s.w1[at].mean(1)))
    return torch.einsum("tf,tfd->td", h, s.w2[at].mean(1))


@stacked("5*3", 15, 0, held="an index among channels")
def an_index_as_a_number(s, x):
    values, at = softmax(s, x).topk(1)
    h = torch.relu(torch.bmm(x[:, None], s.w1[at[:, 0]]))
    return torch.bmm(h, s.w2[at[:, 0]])[:, 0] * (at + values)


@stacked(ALL, 15, 0)
def the_one_best_expert(s, x):
    p = softmax(s, x)
    at = p.argmax(-1)
    h = torch.relu(torch.bmm(x[:, None], s.w1[at]))
    return torch.bmm(h, s.w2[at])[:, 0] * p.gather(-1, at[:, None])


# ------------------------------------------------------------ one tensor, read part by part
def selected(*stacks):
    return [tuple(w[e] for w in stacks) for e in range(EXPERTS)]


def part_by_part(s, x):
    p = softmax(s, x)
    rows = [torch.relu(F.linear(x, w1.T, b1)) for w1, b1 in selected(s.w1, s.b1)]
    rows = [h @ w2 + b2 for h, (w2, b2) in zip(rows, selected(s.w2, s.b2), strict=True)]
    return sum(p[:, e : e + 1] * y for e, y in enumerate(rows))


@stacked("5*3 3b", 0, 0, held="", unnoticed=True)
def a_tensor_read_as_a_whole_too(s, x):
    return part_by_part(s, x) + s.w1.sum()


# ------------------------------------------------------------ tokens sorted by their experts
if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):

    @torch.library.custom_op("transformers::grouped_mm_fallback", mutates_args=())
    def grouped(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """As transformers computes it on a CPU."""
        starts = [0, *offs.tolist()]
        parts = [x[a:b] @ m for a, b, m in zip(starts, starts[1:], w, strict=False)]
        return torch.cat(parts)

    @grouped.register_fake
    def _(x, w, offs):
        return x.new_empty(len(x), w.shape[2])


def sorted_by_expert(s, x, places=False):
    values, at = softmax(s, x).topk(2)
    at, order = at.reshape(-1).sort()
    counts = torch.histc(at.double(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    product = torch.ops.transformers.grouped_mm_fallback
    h = s.inside(product(x[order // 2], s.w1, ends) + s.b1[at])
    y = product(h, s.w2, ends) * values.reshape(-1)[order][:, None]
    if places:
        y = y * torch.arange(len(y), dtype=y.dtype)[:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return y[back].view(len(x), 2, -1).sum(1)


# a softmax over sorted tokens sees units of all experts
stacked("3 5b", 0, 0, name="sorted tokens, Softmax", inside=nn.Softmax(0))(sorted_by_expert)


@stacked(INSIDE, 0, 15, held="refuted", inside=nn.Tanh())
def sorted_tokens_times_their_place(s, x):
    """The place of a sorted token depends on how experts are numbered."""
    return sorted_by_expert(s, x, places=True)


@stacked("", 0, 0, held="refuted", unnoticed=True)
def tokens_returned_in_order(s, x):
    _, at = softmax(s, x).topk(2)
    _, order = at.reshape(-1).sort()
    ends = at.reshape(-1).sort()[0].double().histc(EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
    return torch.ops.transformers.grouped_mm_fallback(x[order // 2], s.w1, ends)


# ------------------------------------------------------------ experts in a list of modules
def expert(*first, out=IN):
    return nn.Sequential(*first, nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out))


def listed(make=expert):
    return lambda: nn.ModuleList(make() for _ in range(EXPERTS))


branches = partial(network, r=(IN, EXPERTS), e=listed(), **TOKENS)
TENSORS = " ".join(f"e.{k}.{n}" for k in range(3) for n in ("0.weight", "0.bias", "2.weight"))


def summed(s, x):
    p = softmax(s, x)
    return sum(p[:, k : k + 1] * e(x) for k, e in enumerate(s.e))


def where(s, x):
    values, at = softmax(s, x).topk(2)
    shares = [torch.where(at == k, values, 0.0).sum(-1, keepdim=True) for k in range(EXPERTS)]
    return sum(g * e(x) for g, e in zip(shares, s.e, strict=True))


def picked_by_gather(s, x):
    values, at = softmax(s, x).topk(2)
    y = torch.stack([e(x) for e in s.e], 1).gather(1, at[..., None].expand(-1, -1, IN))
    return (y * values[..., None]).sum(1)


for combine in (summed, where, picked_by_gather):
    moves = TENSORS + " r.weight r.bias"
    branches(ALL, 15, 0, name=f"branches, {combine.__name__}", moves=moves)(combine)


class Attention(nn.Module):
    """Attention to every token by itself."""

    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(IN, 2, batch_first=True)

    def forward(self, x):
        return self.a(x[:, None], x[:, None], x[:, None])[0][:, 0]


def grouped_network():
    """Convolutions with groups of a norm."""
    return Forward(
        lambda s, x: s.b(F.relu(s.n(s.a(x[:, None]))))[:, 0],
        a=nn.Conv1d(1, 4, 3, padding=1),
        n=nn.GroupNorm(2, 4),
        b=nn.Conv1d(4, 1, 3, padding=1),
    )


def mixture():
    return Forward(summed, r=nn.Linear(IN, EXPERTS), e=listed()())


INNER = {
    "branches with heads": (Attention, "2*12 2b*3 3b", 24, 24),
    "branches with groups": (grouped_network, "2*6 2b*3 3b", 12, 6),
    "branches, summed of summed": (mixture, "5*9 3b*4", 45, 0),
}
for name, (make, *counts) in INNER.items():
    branches(*counts, name=name, e=listed(make), held=None)(summed)


# ------------------------------------------------------------ what tells branches apart
class Masked(nn.Module):
    """An expert with a constant for every unit."""

    def __init__(self, mask):
        super().__init__()
        self.a, self.b = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * self.mask[0])


masks = [torch.arange(HIDDEN)[None] + 1.0 + k for k in range(EXPERTS)]
branches("", 15, 0, name="branches with constants, equal False", held=None,
         e=lambda: nn.ModuleList(Masked(mask) for mask in masks))(summed)  # fmt: skip


def sharing():
    made = listed()()
    made[1][0].weight = made[0][0].weight
    return made


branches("5*2 2b", 10, 0, name="branches with one weight in common", e=sharing, held=None)(summed)


# ------------------------------------------------------------ what a softmax forgets
small = partial(
    network, e=listed(lambda: nn.Sequential(nn.Linear(IN, 2), nn.Tanh(), nn.Linear(2, IN))),
    z=parameter(EXPERTS), scales=0, signs=6, inputs=(30, IN), others=[(2, IN), (11, IN)], held=None,
)  # fmt: skip


WORD, NUMBER = {"r.weight": IN}, {"r.bias": 1}
small(
    name="probabilities of a router",
    unnoticed=True,
    dead=WORD | NUMBER,
    r=(IN, EXPERTS),
    e=None,
    signs=0,
)(softmax)
