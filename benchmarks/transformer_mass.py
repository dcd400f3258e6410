"""Excess mass of a small character model and a small vision transformer during training.

Run `python benchmarks/transformer_mass.py`: it trains both for about a minute on one core, prints
one table each, and draws docs/transformer_mass.png. With ``--solve`` it only times the joint least
mass of scales and matrices of one attention layer and the norm before it.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.symmetry import discover, fold_norms, mass, min_mass, mix, rescale

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
def excesses(model: nn.Module, x: Tensor, sym: Any) -> dict[str, float]:
    """Percent of the mass above its least value, by kind of group."""
    params = {n: t.detach().double() for n, t in P.of(model).items()}
    total = float(mass(params, sym))
    least = [min_mass(params, sym, mixing=m, tolerance=1e-6).minimum for m in (False, "only", True)]
    values = [*map(float, least), turned(model, x)]
    return {kind: 100 * (total / value - 1) for kind, value in zip(KINDS, values, strict=True)}


def turned(model: nn.Module, x: Tensor) -> float:
    """Least mass found over a rotation of the stream, too: gains are folded, then chosen anew.

    For norms with folded readers F the best gains leave 2 sum_i |F q_i| over the columns q of the
    rotation: concave in the directions, minimised from the scaled start by gradient descent on the
    matrix exponential. Heads and the other scales are at their joint optimum before; what they
    could gain after the turn is left out, so that this is an upper bound of the least mass.
    """
    sym = discover(model, x)
    params = {n: t.detach().double() for n, t in P.of(model).items()}
    found = min_mass(params, sym, mixing=True, tolerance=1e-6)
    best = mix(rescale(params, sym, found.scales), sym, found.matrices)
    network = copy.deepcopy(model).double()
    network.load_state_dict(best, strict=False)
    folded = dict(
        fold_norms(network, x.double() if x.is_floating_point() else x).named_parameters()
    )
    groups = [
        [f"blocks.{b}.{n}.weight" for n in names]
        for b in range(2)
        for names in (("q", "k", "v"), ("up",))
    ] + [["head.weight"]]
    norms = [torch.cat([folded[n].detach() for n in names]) for names in groups]
    grams = torch.stack([w.T @ w for w in norms])
    start = sum(float(2 * g.diagonal().sqrt().sum()) for g in grams)
    return float(found.minimum) - start + _least_columns(grams)


def _least_columns(grams: Tensor, steps: int = 300) -> float:
    """Least of 2 sum sqrt(q^T G q) over rotations, from none."""
    d = grams.shape[-1]
    free = torch.zeros(d, d, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([free], max_iter=steps, line_search_fn="strong_wolfe")

    def value() -> Tensor:
        optimizer.zero_grad()
        q = torch.linalg.matrix_exp(free - free.T)
        total = 2 * (q.T @ grams @ q).diagonal(dim1=-2, dim2=-1).clamp_min(1e-12).sqrt().sum()
        total.backward()
        return total.detach()

    with torch.no_grad():  # away from the stationary point of no turn
        free += 0.01 * torch.randn(d, d, generator=torch.Generator().manual_seed(0))
    optimizer.step(value)
    return float(value())


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
    sym, generator = discover(model, x), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    steps, rows = [], []
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            steps.append(step)
            rows.append(excesses(model, x, sym))
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


def solve(d: int = 128, heads: int = 8) -> None:
    """CPU seconds of the joint least mass, on one thread, three times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Attention(d, heads, causal=True).double()
    nn.init.uniform_(net.n1.weight, 0.5, 1.5)
    sym, params = discover(net, torch.randn(2, 5, d).double()), P.of(net)
    for _ in range(3):
        start = time.process_time()
        least = min_mass(params, sym, mixing=True, tolerance=1e-8)
        seconds = time.process_time() - start
        print(
            f"width {d}, {heads} heads: {seconds:.3f} s, gap {float(least.gap):.0e}, excess "
            f"{100 * float(1 - least.minimum / least.mass):.1f} %"
        )


def main() -> None:
    """Time a solve, or train both, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--solve", action="store_true", help="time one joint solve, train nothing")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "transformer_mass.png")
    options = parser.parse_args()
    if options.solve:
        solve()
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
