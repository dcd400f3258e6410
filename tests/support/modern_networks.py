"""Small networks of the blocks that people use today, for hand counts of their symmetries.

Inputs and outputs are plain, so that only what lies inside can move; `Decoder` has a stream, too.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


# ------------------------------------------------------------ attention
class Attention(nn.Module):
    """Attention of many kinds, written out, with shared keys where ``kv_heads < heads``.

    ``rotary`` is "half" or "interleaved", ``rotated`` the number of rotated channels of a head;
    ``norm`` is one RMS norm for all heads; ``positions`` is "alibi" or "t5" (a table, picked by
    distance); ``scores`` is "softmax", "elu" (linear attention with a map), or "states" (linear
    attention, the sum of keys times values first).
    """

    def __init__(
        self,
        d=10,
        heads=2,
        width=3,
        kv_heads=None,
        bias=True,
        dropout=0.0,
        rotary=None,
        rotated=None,
        norm=False,
        eps=0.1,
        positions=None,
        scores="softmax",
    ):
        super().__init__()
        self.heads, self.width, self.kv_heads = heads, width, kv_heads or heads
        self.q = nn.Linear(d, heads * width, bias)
        self.k, self.v = (nn.Linear(d, self.kv_heads * width, bias) for _ in range(2))
        self.out = nn.Linear(heads * width, d, bias)
        self.dropout, self.scores, self.eps = nn.Dropout(dropout), scores, eps
        self.rotary, self.rotated, self.positions = rotary, rotated or width, positions
        self.norm = norm
        if norm:
            self.q_gain = nn.Parameter(torch.rand(width) + 0.5)
            self.k_gain = nn.Parameter(torch.rand(width) + 0.5)
        if positions == "t5":
            self.table = nn.Embedding(4, heads)

    def forward(self, x):
        q, k, v = self._split(self.q(x)), self._split(self.k(x)), self._split(self.v(x))
        if self.norm:
            q, k = rms(q, self.eps) * self.q_gain, rms(k, self.eps) * self.k_gain
        if self.rotary:
            q, k = (rotate(y, self.rotated, self.rotary) for y in (q, k))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        if self.scores == "states":
            y = q @ (k.transpose(-2, -1) @ v) / math.sqrt(self.width)
        else:
            y = self.dropout(self._weights(q, k)) @ v
        return self.out(y.transpose(1, 2).flatten(2))

    def _split(self, x):
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def _weights(self, q, k):
        if self.scores == "elu":
            products = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-2, -1)
            return products / products.sum(-1, keepdim=True)
        products = q @ k.transpose(-2, -1) / math.sqrt(self.width)
        return torch.softmax(products + self._bias(q.shape[-2]), -1)

    def _bias(self, length):
        steps = torch.arange(length)
        away = (steps[:, None] - steps).abs()
        if self.positions == "alibi":
            slopes = 2.0 ** -torch.arange(1.0, self.heads + 1)
            return -away * slopes[:, None, None]
        if self.positions == "t5":
            return self.table(away.clamp(max=3)).permute(2, 0, 1)
        return torch.zeros(())


def rms(x, eps):
    """RMS norm without a gain."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotate(x, rotated, layout):
    """Rotary positions on the first ``rotated`` channels of every head."""
    x, rest = x[..., :rotated], x[..., rotated:]
    speeds = 1.7 ** -torch.arange(rotated // 2, dtype=x.dtype)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * speeds
    if layout == "half":
        angles = torch.cat([angles, angles], -1)
        turned = torch.cat([-x[..., rotated // 2 :], x[..., : rotated // 2]], -1)
    else:
        angles = angles.repeat_interleave(2, -1)
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return torch.cat([x * angles.cos() + turned * angles.sin(), rest], -1)


# ------------------------------------------------------------ other blocks
class GatedMLP(nn.Module):
    """SwiGLU, or bilinear without an activation."""

    def __init__(self, d=6, units=10, activation=F.silu):
        super().__init__()
        self.gate, self.up = nn.Linear(d, units, False), nn.Linear(d, units, False)
        self.down, self.activation = nn.Linear(units, d, False), activation

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    """Experts in one tensor each for their two layers, of which the best ``top`` count."""

    def __init__(self, d=5, units=4, experts=3, top=None, bias=True):
        super().__init__()
        self.router, self.top = nn.Linear(d, experts, bias), top
        self.up = nn.Parameter(torch.randn(experts, units, d))
        self.down = nn.Parameter(torch.randn(experts, d, units))

    def forward(self, x):
        share = self.router(x).softmax(-1)
        if self.top:
            best = share.topk(self.top, -1)
            share = torch.zeros_like(share).scatter(-1, best.indices, best.values)
        inside = torch.relu(torch.einsum("btd,eud->bteu", x, self.up))
        return torch.einsum("bteu,edu,bte->btd", inside, self.down, share)


class Mamba(nn.Module):
    """A selective state space: the block of Mamba without its norm."""

    def __init__(self, d=6, inner=10, states=5, rank=3):
        super().__init__()
        self.sizes = (rank, states, states)
        self.enter, self.leave = nn.Linear(d, 2 * inner, False), nn.Linear(inner, d, False)
        self.conv = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.select = nn.Linear(inner, rank + 2 * states, False)
        self.step = nn.Linear(rank, inner)
        self.log_decay = nn.Parameter(torch.randn(inner, states) / 2)
        self.skip = nn.Parameter(torch.randn(inner))

    def forward(self, x):
        length = x.shape[1]
        x, gate = self.enter(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :length].transpose(1, 2))
        step, write, read = self.select(x).split(self.sizes, -1)
        step = F.softplus(self.step(step))
        decay = torch.exp(-step[..., None] * self.log_decay.exp())
        new = (step * x)[..., None] * write[:, :, None, :]
        state, outs = torch.zeros_like(new[:, 0]), []
        for t in range(length):
            state = decay[:, t] * state + new[:, t]
            outs.append((state * read[:, t, None, :]).sum(-1))
        return self.leave((torch.stack(outs, 1) + self.skip * x) * F.silu(gate))


class LoRA(nn.Module):
    """A hidden layer with a trained product of low rank on a weight that does not train."""

    def __init__(self, d=6, units=7, rank=2):
        super().__init__()
        self.base = nn.Linear(d, units)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(d, rank, False), nn.Linear(rank, units, False)
        self.last = nn.Linear(units, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.base(x) + self.up(self.down(x))))


class MergedLoRA(LoRA):
    """The same with the two weights added before they meet the input."""

    def forward(self, x):
        weight = self.base.weight + self.up.weight @ self.down.weight
        return self.last(torch.tanh(F.linear(x, weight, self.base.bias)))


class LowRank(nn.Module):
    """Two linear layers without anything between them, then tanh units."""

    def __init__(self, d=6, rank=3, units=5):
        super().__init__()
        self.one, self.two = nn.Linear(d, rank), nn.Linear(rank, units)
        self.last = nn.Linear(units, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.two(self.one(x))))


class Decoder(nn.Module):
    """Tokens and positions, pre-norm attention and MLP on a stream, a last norm and logits."""

    def __init__(self, d=6, heads=1, width=6, units=7, tokens=11, norm=nn.RMSNorm, gated=False):
        super().__init__()
        self.embed, self.position = nn.Embedding(tokens, d), nn.Embedding(8, d)
        self.norms = nn.ModuleList(norm(d, eps=0.1) for _ in range(3))
        self.attention = Attention(d, heads, width, bias=False)
        if gated:
            self.mlp = GatedMLP(d, units)
        else:
            self.mlp = nn.Sequential(nn.Linear(d, units), nn.GELU(), nn.Linear(units, d))
        self.last = nn.Linear(d, tokens, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return self.last(self.norms[2](x))


# ------------------------------------------------------------ graphs
class GCN(nn.Module):
    """Two convolutions on a graph that is given by a normalised adjacency matrix."""

    def __init__(self, d=5, units=6):
        super().__init__()
        self.one, self.two = nn.Linear(d, units), nn.Linear(units, 3)

    def forward(self, x, adjacency):
        return adjacency @ self.two(torch.relu(adjacency @ self.one(x)))


class GAT(nn.Module):
    """Attention of nodes to their neighbours, whose scores are sums of two numbers per head."""

    def __init__(self, d=5, heads=3, width=4):
        super().__init__()
        self.heads, self.features = heads, nn.Linear(d, heads * width, False)
        self.source, self.target = (nn.Parameter(torch.randn(heads, width)) for _ in range(2))
        self.last = nn.Linear(heads * width, 3)

    def forward(self, x, adjacency):
        h = self.features(x).unflatten(-1, (self.heads, -1))
        scores = (h * self.target).sum(-1)[..., :, None, :] + (h * self.source).sum(-1)[
            ..., None, :, :
        ]
        scores = F.leaky_relu(scores, 0.2).masked_fill(adjacency[..., None] == 0, -math.inf)
        out = torch.einsum("...ijh,...jhc->...ihc", scores.softmax(-2), h)
        return self.last(F.elu(out.flatten(-2)))


# ------------------------------------------------------------ sizes without effect
class CosineClassifier(nn.Module):
    """Cosines between features and the vector of each class."""

    def __init__(self):
        super().__init__()
        self.features, self.classes = nn.Linear(5, 6), nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        features = torch.relu(self.features(x))
        return F.linear(F.normalize(features, dim=-1), F.normalize(self.classes, dim=-1))


class UnitVectors(nn.Module):
    """A hidden layer whose vector is divided by its norm."""

    def __init__(self):
        super().__init__()
        self.inner, self.hidden, self.out = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(F.normalize(self.hidden(torch.tanh(self.inner(x))), dim=-1))


class LearnedSlope(nn.Module):
    """A function of ``c x`` over c, with a number c for each channel."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.out = nn.Linear(5, 6), nn.Linear(6, 3)
        self.slope, self.function = nn.Parameter(torch.rand(6) + 0.5), function

    def forward(self, x):
        h = self.inner(x)
        return self.out(h + self.function(self.slope * h) / self.slope)


def attention(**options):
    """A builder of attention with these options."""
    return lambda: Attention(**options)


def path(nodes):
    """Adjacency of the nodes of a path, each joined to itself and the next."""
    ones = torch.ones(nodes - 1)
    return torch.eye(nodes) + torch.diag(ones, 1) + torch.diag(ones, -1)
