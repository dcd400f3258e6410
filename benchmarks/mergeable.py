"""What the prediction of `weightsym mergeable` is worth: cosines and barriers of trained pairs.

python benchmarks/mergeable.py [--seeds 3] [--kinds "64 x 1" ViT]

Networks on the digits: two of other starts, tuned ones, and two of one short beginning. The barrier
is that on training data.
"""

import copy

import torch
from record import parsed, parser
from torch import nn
from torch.nn import functional as F

from lightning_bnn import models
from lightning_bnn.datamodules import Digits
from weightsym import barrier, discover
from weightsym import params as P
from weightsym.matching.match_all import in_frame
from weightsym.matching.mergeable import HOPELESS, SURE, least_cosine


class Residual(nn.Module):
    def __init__(self, width=32, hidden=64, blocks=2):
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.up = nn.ModuleList(nn.Linear(width, hidden) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(hidden, width) for _ in range(blocks))

    def forward(self, x):
        x = self.stem(x.flatten(1))
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return self.head(x)


class ViT(nn.Module):
    def __init__(self, width=32, hidden=64):
        super().__init__()
        how = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, 2, hidden, **how)
        self.embed, self.positions = nn.Linear(4, width), nn.Parameter(torch.randn(16, width) / 10)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.embed(F.unfold(x, 2, stride=2).mT) + self.positions
        return self.head(self.layers(x).mean(1))


def convolutions(width=8):
    layers = []
    for before, after in ((1, width), (width, 2 * width), (2 * width, 2 * width)):
        conv = nn.Conv2d(before, after, 3, 1 if before == 1 else 2, 1, bias=False)
        layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


SIZES = ((16, 1), (64, 1), (256, 1), (32, 2), (128, 2), (64, 4))
KINDS = {f"{w} x {n}": lambda w=w, n=n: models.mlp(64, [w] * n, 10) for w, n in SIZES}
KINDS |= {"residual": Residual, "CNN, BatchNorm": convolutions, "ViT": ViT}


def trained(network, x, y, steps, seed, rate=1e-3):
    network, generator = copy.deepcopy(network).train(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(network(x[rows]), y[rows]).backward()
        optimizer.step()
    return network.eval()


def pairs(make, x, y, seed):
    torch.manual_seed(seed)
    start = make()
    base = trained(start, x, y, 400, seed)
    torch.manual_seed(100 + seed)
    yield base, trained(make(), x, y, 400, 100 + seed)
    tuned, far = trained(base, x, y, 100, 7, 3e-4), trained(base, x, y, 400, 8, 3e-3)
    yield from ((base, tuned), (tuned, far), (base, far))
    short = trained(start, x, y, 40, 9)
    yield tuple(trained(short, x, y, 360, k) for k in (1, 2))


def meetings(make, x, y, seed):
    """Cosine and barrier of every pair in every frame."""
    for first, second in pairs(make, x, y, seed):
        sym, a, b = discover(second, x[:2]), P.of(first), P.of(second)
        for method in ("plain", "reference", "mixing")[: 3 if sym.linear else 2]:
            moved = in_frame(a, b, sym, method)(a)
            height = barrier(second, moved, b, [(x[:512], y[:512])], points=3).height
            yield least_cosine(moved, b, sym), height


def main():
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--kinds", nargs="+", default=[*KINDS])
    options = parsed(options)
    data = Digits()
    data.setup("fit")
    x, y = data.splits.train
    found = []
    for kind in options.kinds:
        for seed in range(options.seeds):
            found += [(kind, *row) for row in meetings(KINDS[kind], data.normalise(x), y, seed)]
    for low, high in ((-1.0, HOPELESS), (HOPELESS, SURE), (SURE, 1.01)):
        rows = [(kind, height) for kind, cosine, height in found if low <= cosine < high]
        for kind in (*options.kinds, "all"):
            heights = [h for k, h in rows if kind in (k, "all")]
            if heights:
                good, ends = sum(h <= 0.1 for h in heights), (min(heights), max(heights))
                print(f"{low:5.2f} {kind:<15}{good:>4} of {len(heights):<4}", *ends)


if __name__ == "__main__":
    main()
