"""Prediction and gradients of a stack: vmap against the loop, interleaved in one run.

The limit up to which `lightning_bnn.params.apply` uses vmap comes from here.
"""

import argparse
import statistics
import time

import torch
from torch import nn

from lightning_bnn import models
from lightning_bnn import params as P


def cases():
    perceptron = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    batch_norm = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    yield "perceptron 2-2-1", perceptron, torch.randn(10, 2), 256
    yield "mlp 64-32-10", models.mlp(64, [32], 10), torch.randn(64, 64), 64
    yield "optunet", models.optunet(), torch.randn(64, 1, 28, 28), 16
    yield "conv + batch norm", batch_norm, torch.randn(32, 1, 8, 8), 32
    yield "conv 3-16-32", small_conv(16, 32), torch.randn(32, 3, 32, 32), 16
    yield "conv 3-32-64", small_conv(32, 64), torch.randn(32, 3, 32, 32), 16
    yield "mlp 64-128-128-10", models.mlp(64, [128, 128], 10), torch.randn(64, 64), 16
    yield "mlp 784-64-10", models.mlp(784, [64], 10), torch.randn(64, 784), 16
    yield "mlp 784-512-512-10", models.mlp(784, [512, 512], 10), torch.randn(64, 784), 8


def small_conv(a, b):
    layers = [nn.Conv2d(3, a, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(a, b, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(b, 10))


def step(model, stack, x, chunk_size):
    trained = P.weight_names(model)
    leaves = {n: t.detach().requires_grad_(n in trained) for n, t in stack.items()}
    P.apply(model, leaves, x, chunk_size=chunk_size).square().mean().backward()


def predict(model, stack, x, chunk_size):
    with torch.no_grad():
        P.apply(model, stack, x, chunk_size=chunk_size)


def timed(function, *args):
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"threads: "
        f"{options.threads}\n{'network':<20}{'weights':>9}{'members':>9}{'predict':>20}{'gradient':>20}"
    )
    for name, model, x, members in cases():
        model.eval()
        stack = P.populate(model, members)
        row = ""
        for function in (predict, step):
            vmapped, looped = [], []
            for repeat in range(options.repeats + 1):
                pair = (
                    timed(function, model, stack, x, members),
                    timed(function, model, stack, x, 1),
                )
                if repeat:
                    vmapped.append(pair[0])
                    looped.append(pair[1])
            ratio = statistics.median(b / a for a, b in zip(vmapped, looped, strict=True))
            row += f"{1e3 * statistics.median(vmapped):>9.2f} ms {ratio:>5.2f} x"
        weights = sum(p.numel() for p in model.parameters())
        print(f"{name:<20}{weights:>9}{members:>9}{row}   (x: loop / vmap)", flush=True)


if __name__ == "__main__":
    main()
