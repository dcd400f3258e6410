"""A training step of an ensemble of small convolutional networks: at once, one by one, as chosen.

python benchmarks/norms_in_stacks.py [--members 5] [--rounds 5]

Contestants take turns on one thread; printed are milliseconds of CPU time (medians) and the ratio
of what is chosen to the loop. `NORMED_LIMIT` of `lightning_bnn/stacks/choices.py` comes from here.
"""

import argparse
import statistics
import time
import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_bnn import params as P
from lightning_bnn.methods.batch import Batch
from lightning_bnn.methods.member_losses import member_losses


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


def seconds(model, stack, batch, chunk_size):
    trained = P.weight_names(model)
    leaves = {n: t.detach().clone().requires_grad_(n in trained) for n, t in stack.items()}
    start = time.process_time()
    member_losses(model, leaves, batch, loss, chunk_size=chunk_size).sum().backward()
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    print(f"{'':26} {'at once':>8} {'loop':>8} {'chosen':>8}   chosen / loop")
    for name, model, pixels, size in cases():
        batch = Batch((torch.randn(size, 1, pixels, pixels),), torch.randint(10, (size,)))
        stack = P.populate(model, options.members)
        rounds = [
            [seconds(model, stack, batch, chunk) for chunk in (options.members, 1, None)]
            for _ in range(options.rounds + 1)
        ][1:]
        ratio = statistics.median(chosen / loop for _, loop, chosen in rounds)
        times = "".join(f"{1e3 * statistics.median(c):9.1f}" for c in zip(*rounds, strict=True))
        print(f"{name:26}{times}   {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
