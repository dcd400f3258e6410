"""Two files for `lightning-bnn diff`: a residual network, and the same one trained on and moved.

python benchmarks/diff_example.py FOLDER
"""

import argparse
import copy
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d

from lightning_bnn.datamodules import Digits
from weightsym import Element, discover
from weightsym import params as P
from weightsym.networks.randomness import keyed_generator


class ConvNet(nn.Module):
    """Residual blocks of convolutions with BatchNorm beside a stream."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.last = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(self.stem(x).relu(), 2)
        for block in self.blocks:
            x = (x + block(x)).relu()
        return self.head(self.last(x).mean((2, 3)))


def digits() -> tuple[Tensor, Tensor]:
    source = Digits()
    inputs, labels = source.load().train
    return source.normalise(inputs), labels


def trained(network: ConvNet, seed: int, epochs: int) -> ConvNet:
    """Train a copy in an order of examples that the seed decides."""
    network, (inputs, labels) = copy.deepcopy(network).train(), digits()
    optimizer = torch.optim.Adam(network.parameters(), 0.005)
    generator = keyed_generator(seed, "order")
    for _ in range(epochs):
        for k in torch.randperm(len(inputs), generator=generator).split(64):
            optimizer.zero_grad()
            cross_entropy(network(inputs[k]), labels[k]).backward()
            optimizer.step()
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(__file__, folder / "network.py")  # where the command finds its class
    torch.set_num_threads(1)
    torch.manual_seed(0)
    original = trained(ConvNet(12, 2), 0, 10)
    symmetries, tuned = discover(original, digits()[0][:2]), trained(original, 1, 5)
    generator = keyed_generator(0, "element")
    moved = Element.random(symmetries, generator)(P.of(tuned))
    for name, network in (("a", P.of(original)), ("b", moved)):
        tensors = {n: t.detach().contiguous() for n, t in network.items()}
        save_file(tensors, folder / f"{name}.safetensors")


if __name__ == "__main__":
    main()
