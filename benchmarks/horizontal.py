"""Do steps off the orbit train better? Digits, three networks, three optimizers, five seeds.

python benchmarks/horizontal.py [mlp cnn transformer]

Every arm has its own learning rate, which has the least loss on validation data over two other
seeds; the test is of the last network of each of five seeds. Split and batches are those of a seed.
"""

import argparse
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from lightning_bnn.datamodules import Digits
from lightning_bnn.models import mlp
from lightning_bnn.samplers import Horizontal
from weightsym import discover

STEPS, BATCH, EXAMPLES = 150, 64, 300
SEEDS, TUNING = range(5), (100, 101)


class Transformer(nn.Module):
    """One encoder over the eight rows of a digit."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, norm_first=True
        )
        self.embed = nn.Linear(8, 16)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.place = nn.Parameter(0.1 * torch.randn(8, 16))
        self.out = nn.Linear(16, 10)

    def forward(self, x):
        return self.out(self.encoder(self.embed(x[:, 0]) + self.place).mean(1))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


NETWORKS = {"mlp": lambda: mlp(64, [32], 10), "cnn": cnn, "transformer": Transformer}
OPTIMIZERS = {
    "SGD": (lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), (0.03, 0.1, 0.3)),
    "Adam": (lambda p, lr: torch.optim.Adam(p, lr), (0.003, 0.01, 0.03)),
    "AdamW": (lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1), (0.003, 0.01, 0.03)),
}
ARMS = {
    "all": lambda *_: None,
    "off the orbit": Horizontal,
    "least mass": lambda *args: Horizontal(*args, gauge="min-mass"),
}


def trained(network, optimizer, arm, lr, seed):
    """Loss and accuracy on validation and on test data."""
    splits = Digits(seed=seed).load()
    x, y = (t[:EXAMPLES] for t in splits.train)
    torch.manual_seed(seed)
    net = NETWORKS[network]()
    stepping = OPTIMIZERS[optimizer][0](net.parameters(), lr)
    ARMS[arm](stepping, net, discover(net, x[:2]))
    for _ in range(STEPS):
        rows = torch.randint(len(x), (BATCH,))
        stepping.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        stepping.step()
    with torch.no_grad():
        outputs = [(net.eval()(a), b) for a, b in (splits.val, splits.test)]
    return [
        (float(F.cross_entropy(o, b)), float((o.argmax(1) == b).float().mean())) for o, b in outputs
    ]


def tested(network, optimizer, arm):
    """Losses and accuracies ``(seeds, 2)`` on test data, at the rate that validation chooses."""

    def validation(lr):
        try:
            return sum(trained(network, optimizer, arm, lr, seed)[0][0] for seed in TUNING)
        except ValueError:  # the weights overflow
            return float("inf")

    lr = min(
        OPTIMIZERS[optimizer][1], key=lambda lr: min(validation(lr), 1e9)
    )  # also where it is NaN
    return torch.tensor([trained(network, optimizer, arm, lr, seed)[1] for seed in SEEDS])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("networks", nargs="*", help=f"some of {', '.join(NETWORKS)}")
    chosen = parser.parse_args().networks or NETWORKS
    print("| network | optimizer | NLL | off the orbit | least mass | accuracy (%) |")
    print("|---|---|---|---|---|---|")
    for network, optimizer in itertools.product(chosen, OPTIMIZERS):
        rows = [tested(network, optimizer, arm) for arm in ARMS]
        nll = rows[0][:, 0]
        cells = [f"{nll.mean():.3f} +- {nll.std():.3f}"]
        for other in rows[1:]:
            change = other[:, 0] - nll
            cells.append(f"{change.mean():+.3f} +- {change.std() / len(change) ** 0.5:.3f}")
        cells.append(", ".join(f"{100 * arm[:, 1].mean():.1f}" for arm in rows))
        print(f"| {network} | {optimizer} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
