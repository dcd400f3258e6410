"""A training step of an ensemble of small convolutional networks: at once, one by one, as chosen.

python benchmarks/norms_in_stacks.py

`NORMED_LIMIT` of `lightning_bnn/stacks/choices.py` comes from here.
"""

import functools
import warnings

import torch
from record import Record, parsed, parser
from torch import nn
from torch.nn.functional import cross_entropy
from turns import taking_turns

from lightning_bnn import params as P
from lightning_bnn.methods.batch import Batch
from lightning_bnn.methods.member_losses import member_losses

MEMBERS = 5


def network(first, second, pixels, norm):
    side = ((pixels - 2) // 2 - 2) // 2
    layers = []
    for a, b in ((1, first), (first, second)):
        layers += [nn.Conv2d(a, b, 3), norm(b), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(second * side**2, 10)).train()


def loss(outputs, targets):
    if outputs.ndim == 2:
        return cross_entropy(outputs, targets)
    return torch.vmap(lambda one: cross_entropy(one, targets))(outputs)


def cases():
    identity = lambda _: nn.Identity()  # noqa: E731
    yield "8-16 of 28 px, batch 64", network(8, 16, 28, nn.BatchNorm2d), 28, 64
    yield "the same without norms", network(8, 16, 28, identity), 28, 64
    yield "4-8 of 28 px, batch 64", network(4, 8, 28, nn.BatchNorm2d), 28, 64
    yield "8-16 of 28 px, batch 16", network(8, 16, 28, nn.BatchNorm2d), 28, 16
    yield "16-16 of 12 px, batch 64", network(16, 16, 12, nn.BatchNorm2d), 12, 64


def step(model, stack, batch, chunk_size):
    trained = P.weight_names(model)
    leaves = {n: t.detach().clone().requires_grad_(n in trained) for n, t in stack.items()}
    member_losses(model, leaves, batch, loss, chunk_size=chunk_size).sum().backward()


def main():
    options = parsed(parser(__doc__, repeats=5))
    warnings.simplefilter("ignore")
    record = Record(options)
    for name, model, pixels, size in cases():
        batch = Batch((torch.randn(size, 1, pixels, pixels),), torch.randint(10, (size,)))
        stack = P.populate(model, MEMBERS)
        ways = {"at once": MEMBERS, "loop": 1, "chosen": None}
        calls = {who: functools.partial(step, model, stack, batch, k) for who, k in ways.items()}
        record.times(taking_turns(calls, options.repeats), network=name)
    record.write()


if __name__ == "__main__":
    main()
