"""Prediction and gradients of a stack: what is chosen, vmap, and the loop, interleaved in one run.

Chains of layers are chosen where there are any; the limit up to which `lightning_bnn.params.apply`
uses vmap for others comes from here.
"""

import functools

import torch
from record import Record, parsed, parser
from torch import nn
from turns import taking_turns

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.params.prediction import _vmapped
from lightning_bnn.stacks import chain_of, runs_at_once


def cases():
    perceptron = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    batch_norm = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    yield "perceptron 2-2-1", perceptron, torch.randn(10, 2), 256
    yield "MLP 64-32-10", models.mlp(64, [32], 10), torch.randn(64, 64), 64
    yield "OptuNet", models.optunet(), torch.randn(64, 1, 28, 28), 16
    yield "conv + batch norm", batch_norm, torch.randn(32, 1, 8, 8), 32
    yield "conv 3-16-32", small_conv(16, 32), torch.randn(32, 3, 32, 32), 16
    yield "conv 3-32-64", small_conv(32, 64), torch.randn(32, 3, 32, 32), 16
    yield "MLP 64-128-128-10", models.mlp(64, [128, 128], 10), torch.randn(64, 64), 16
    yield "MLP 784-64-10", models.mlp(784, [64], 10), torch.randn(64, 784), 16
    yield "MLP 784-512-512-10", models.mlp(784, [512, 512], 10), torch.randn(64, 784), 8
    yield "MLP 784-509-509-10", models.mlp(784, [509, 509], 10), torch.randn(64, 784), 8


def small_conv(a, b):
    layers = [nn.Conv2d(3, a, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(a, b, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(b, 10))


def step(model, stack, run):
    trained = P.weight_names(model)
    leaves = {n: t.detach().requires_grad_(n in trained) for n, t in stack.items()}
    run(leaves).square().mean().backward()


def predict(model, stack, run):
    with torch.no_grad():
        run(stack)


def ways(model, x, members):
    """How all members run: as is chosen, by ``vmap``, one by one."""

    def vmapped(stack):
        return _vmapped(model, stack, (x,), None, members)

    return {
        "chosen": lambda stack: P.apply(model, stack, x),
        "vmap": vmapped,
        "loop": lambda stack: P.apply(model, stack, x, chunk_size=1),
    }


def chosen(model, stack, x):
    if chain_of(model, stack, (x,)) is not None:
        return "chain"
    return "vmap" if runs_at_once(model) else "loop"


def main():
    options = parsed(parser(__doc__))
    record = Record(options)
    for name, model, x, members in cases():
        model, x = model.eval().to(options.device), x.to(options.device)
        stack = {n: t.to(options.device) for n, t in P.populate(model, members).items()}
        labels = {"network": name, "members": members}
        labels["weights"] = sum(p.numel() for p in model.parameters())
        labels["chosen"] = chosen(model, stack, x)
        for what, function in (("predict", predict), ("gradient", step)):
            calls = {
                who: functools.partial(function, model, stack, run)
                for who, run in ways(model, x, members).items()
            }
            record.times(
                taking_turns(calls, options.repeats, options.device, warm=1), what=what, **labels
            )
    record.write()


if __name__ == "__main__":
    main()
