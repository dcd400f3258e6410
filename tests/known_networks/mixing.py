"""Small networks whose channels matrices may mix, for laws of what is done with these."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from known_networks.table import add


class Decoder(nn.Module):
    """RMSNorm, grouped queries, and rotary positions or a table of them if wanted."""

    def __init__(self, d=8, heads=2, groups=2, rotary=0, gains=True, layers=1, vocab=5, places=0):
        super().__init__()
        self.heads, self.groups, self.rotary, self.size = heads, groups, rotary, d // heads
        inner = self.size * groups
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "n1": nn.RMSNorm(d, elementwise_affine=gains),
                    "q": nn.Linear(d, d, bias=False),
                    "k": nn.Linear(d, inner, bias=False),
                    "v": nn.Linear(d, inner),
                    "o": nn.Linear(d, d),
                    "n2": nn.RMSNorm(d, elementwise_affine=gains),
                    "up": nn.Linear(d, 2 * d),
                    "down": nn.Linear(2 * d, d),
                }
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.RMSNorm(d, elementwise_affine=gains), nn.Linear(d, vocab)
        self.places = nn.Embedding(places, d) if places else None

    def split(self, t, heads):
        return t.unflatten(-1, (heads, self.size)).transpose(1, 2)

    def turn(self, t):
        half = self.rotary // 2
        angle = torch.arange(t.shape[2], dtype=t.dtype)[:, None] * 0.3 ** torch.arange(half)
        angle = torch.cat([angle, angle], -1)
        t, rest = t.split([2 * half, self.size - 2 * half], -1)
        turned = torch.cat([-t[..., half:], t[..., :half]], -1)
        return torch.cat([t * angle.cos() + turned * angle.sin(), rest], -1)

    def forward(self, x):
        h = self.embed(x)
        if self.places is not None:
            h = h + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            y = layer["n1"](h)
            q, k, v = (
                self.split(layer[n](y), c)
                for n, c in (("q", self.heads), ("k", self.groups), ("v", self.groups))
            )
            if self.rotary:
                q, k = self.turn(q), self.turn(k)
            k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + layer["o"](a.transpose(1, 2).flatten(2))
            h = h + layer["down"](F.gelu(layer["up"](layer["n2"](h))))
        return self.head(self.norm(h))


class Chain(nn.Module):
    """Three linear maps in a row behind a ReLU, and a scaled unit that reads what they mix."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(*s) for s in ((4, 6), (6, 3), (3, 3), (3, 5), (5, 2)))

    def forward(self, x):
        a, b, c, d, e = self.maps
        return e(torch.relu(d(c(b(torch.relu(a(x)))))))


class Adapted(nn.Module):
    """A frozen layer with a low-rank update, between a ReLU and a tanh."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(5, 2)
        self.base, self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 2, bias=False), nn.Linear(2, 5)
        self.base.requires_grad_(False)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(torch.tanh(self.base(h) + self.b(self.a(h))))


def convolutions():
    """Two convolutions without an activation between them, in front of a ReLU."""
    layers = nn.Conv1d(2, 3, 2), nn.Conv1d(3, 5, 1), nn.ReLU(), nn.Conv1d(5, 2, 1)
    return nn.Sequential(*layers)


class LayerNormed(nn.Module):
    """A stream behind layer norms without gains, with low-rank updates."""

    def __init__(self, d=5):
        super().__init__()
        self.norm = nn.LayerNorm(d, elementwise_affine=False)
        self.first, self.last = nn.Linear(3, d), nn.Linear(d, 2)
        self.up, self.down = nn.Linear(d, 7), nn.Linear(7, d)

    def forward(self, x):
        h = self.first(x)
        h = h + self.down(torch.tanh(self.up(self.norm(h))))
        return self.last(self.norm(h))


class Products(nn.Module):
    """Linear attention, and a unit that multiplies two of its linear maps."""

    def __init__(self, d=4, heads=2, size=2):
        super().__init__()
        self.shape = heads, size
        self.q, self.k, self.v = (nn.Linear(d, heads * size) for _ in range(3))
        self.o, self.gate, self.up = nn.Linear(heads * size, d), nn.Linear(d, 3), nn.Linear(d, 3)
        self.down = nn.Linear(3, 5)

    def forward(self, x):
        q, k, v = (
            m(x).unflatten(-1, self.shape).transpose(-2, -3) for m in (self.q, self.k, self.v)
        )
        y = torch.tanh(self.o((q @ k.mT @ v).transpose(-2, -3).flatten(-2)))
        return self.down(self.gate(y) * self.up(y))


TOKENS = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])
MIXING = {
    "heads": (Decoder, [TOKENS], "8 4*4 16 2b", "general 4*4"),
    "grouped heads": (lambda: Decoder(groups=1), [TOKENS], "8 16 4*2 2b", "general 4*2"),
    "rotary heads": (
        lambda: Decoder(groups=1, rotary=4), [TOKENS], "8 16 4 2b", "complex 2*2, general 4",
    ),
    "partly rotary heads": (
        lambda: Decoder(rotary=2), [TOKENS], "8 2*2 4*2 16 2b",
        "complex 2*2, general 2*2, general 4*2",
    ),
    "adapter": (Adapted, (12, 4), "6 5 2", "general 2"),
    "convolutions": (convolutions, (6, 2, 4), "3 5", "general 3"),
    "stream": (lambda: Decoder(gains=False), [TOKENS], "8 4*4 16 2b", "orthogonal 8, general 4*4"),
    "chain": (Chain, (3, 4), "6 3*2 5", "general 3*2"),
    "centred": (LayerNormed, (3, 3), "5 7", "centred 5"),
}  # fmt: skip
"""Forwards, inputs, units that change places, and matrices."""


def generic(build):
    """A network whose weights are far from the small ones of a first layer."""
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


for name, (build, inputs, units, matrices) in MIXING.items():
    add(name, partial(generic, build), inputs, units, matrices=matrices)
