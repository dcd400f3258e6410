"""Excess mass of a small character model and a small vision transformer during training.

Run `python benchmarks/transformer_mass.py`: it trains both for about a minute on one core, prints
one table each, and draws docs/transformer_mass.png. With ``--solve`` it only times the joint least
mass of scales and matrices of attention layers of growing width, each with the norm before it, and
the balanced form of a head.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import Record, parsed, parser
from sklearn.datasets import load_digits
from torch import Tensor, nn
from turns import taking_turns

from lightning_bnn import params as P
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.symmetry import (
    canonicalise,
    discover,
    find_streams,
    min_mass,
    mix,
    rescale,
    turned_mass,
)
from lightning_bnn.symmetry.min_mass import excess

ROOT = Path(__file__).parents[1]
STEPS, EVERY = 300, 100
KINDS = ("scales", "heads", "joint", "joint and rotation")


class Block(nn.Module):
    """Attention and a GELU layer behind RMSNorms."""

    def __init__(self, d: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, h: Tensor) -> Tensor:
        """Add what attention and the layer behind it say."""
        y = self.n1(h)
        q, k, v = (
            m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        h = h + self.o(a.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.n2(h))))


class Characters(nn.Module):
    """A decoder of characters."""

    def __init__(self, vocabulary: int, length: int, d: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.place = nn.Parameter(0.02 * torch.randn(length, d))
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(d, 4, True) for _ in range(2)))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character."""
        return self.head(self.norm(self.blocks(self.embed(x) + self.place)))


class Digits(nn.Module):
    """A vision transformer with patches of 2 x 2 pixels."""

    def __init__(self, d: int = 64) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, d, 2, 2)
        self.place = nn.Parameter(0.02 * torch.randn(16, d))
        self.blocks = nn.Sequential(*(Block(d, 4, False) for _ in range(2)))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the digit."""
        h = self.embed(x).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(h)).mean(1))


# ------------------------------------------------------------ what could be saved
def excesses(params: P.Params, sym: Any, streams: Any) -> dict[str, float]:
    """Percent of the mass above its least value, by kind of group."""
    double = {n: t.detach().double() for n, t in params.items()}
    found = [min_mass(double, sym, mixing=m, tolerance=1e-6) for m in (False, "only", True)]
    joint = found[-1]
    lightest = mix(rescale(double, sym, joint.scales), sym, joint.matrices)
    turned = joint.minimum - turned_mass(lightest, sym, streams, steps=300).saved
    least = [*(f.minimum for f in found), turned]
    return {kind: float(excess(joint.mass, v)) for kind, v in zip(KINDS, least, strict=True)}


# ------------------------------------------------------------ training
def characters() -> tuple[nn.Module, Tensor, Any]:
    """The model, an example and a source of batches: the pages of our documentation."""
    text = "".join(p.read_text() for p in sorted((ROOT / "docs").glob("*.md")))
    letters = {c: k for k, c in enumerate(sorted(set(text)))}
    data = torch.tensor([letters[c] for c in text])

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(len(data) - 33, (32, 1), generator=generator) + torch.arange(33)
        rows = data[at]
        return rows[:, :-1], rows[:, 1:]

    return Characters(len(letters), 32), data[:32][None], batch


def digits() -> tuple[nn.Module, Tensor, Any]:
    """The model, an example and a source of batches: the digits of scikit-learn."""
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    y = torch.from_numpy(labels)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(len(x), (64,), generator=generator)
        return x[at], y[at]

    return Digits(), x[:1], batch


def train(model: nn.Module, x: Tensor, batch: Any) -> tuple[list[int], list[dict[str, float]]]:
    """Train with AdamW and look at the mass every few steps."""
    sym, streams = discover(model, x), find_streams(model, x)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    steps, rows = [], []
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            steps.append(step)
            rows.append(excesses(P.of(model), sym, streams))
        inputs, targets = batch(generator)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            print(step, f"loss {loss.item():.2f}", *(f"{k} {v:.2f}%" for k, v in rows[-1].items()))
    return steps, rows


class Attention(Block):
    """The first half of a block, without what passes by it."""

    def __init__(self, d: int, heads: int, causal: bool) -> None:
        super().__init__(d, heads, causal)
        del self.n2, self.up, self.down

    def forward(self, h: Tensor) -> Tensor:
        """What attention says."""
        q, k, v = (
            m(self.n1(h)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for m in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(a.transpose(1, 2).flatten(2))


def solve(options: Any) -> None:
    """Times of the joint least mass and of balanced forms."""
    record = Record(options)
    for d in (32, 64, 128, 256):
        weights, sym = attention(d, d // 16)
        run = partial(min_mass, weights, sym, mixing=True, tolerance=1e-8)
        record.times(taking_turns({"joint": run}, options.repeats), width=d, heads=d // 16)
        for who in ("gap", "excess"):
            record.value(who, float(getattr(run(), who)), width=d)
    weights, sym = attention(768, 12)
    run = partial(canonicalise, weights, sym, None, None, mixing="balanced")
    record.times(taking_turns({"balanced": run}, options.repeats), width=768, heads=12)
    record.write()


def attention(d: int, heads: int) -> tuple[P.Params, Any]:
    """Weights and symmetries of attention behind a norm, in double precision."""
    torch.manual_seed(0)
    net = Attention(d, heads, causal=True).double()
    nn.init.uniform_(net.n1.weight, 0.5, 1.5)
    return P.of(net), discover(net, torch.randn(2, 5, d).double())


def main() -> None:
    """Time a solve, or train both, print and draw."""
    made = parser(__doc__, repeats=3)
    made.add_argument("--solve", action="store_true", help="only time joint solves")
    made.add_argument("--picture", type=Path, default=ROOT / "docs" / "transformer_mass.png")
    options = parsed(made)
    if options.solve:
        solve(options)
    else:
        draw(options.picture)


def draw(picture: Path) -> None:
    """Train both networks, print their tables and draw them."""
    panels = {}
    for title, build in (("characters", characters), ("digits", digits)):
        torch.manual_seed(0)
        print(title)
        steps, rows = train(*build())
        x = torch.tensor([float(step) for step in steps])
        panels[title] = {
            kind: Line(x, torch.tensor([float(row[kind]) for row in rows])) for kind in KINDS
        }
    lines_figure(panels, ("step", "excess mass (%)")).savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
