"""What the benchmarks of averages share: MNIST at 14 x 14, networks, training of many, tables."""

import json
import os
import statistics

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torchvision import datasets

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry.matching.repair import reestimated


# ------------------------------------------------------------ data and networks
def images(train, count=None, kind=datasets.MNIST):
    data = kind(os.environ["LIGHTNING_BNN_DATA"], train=train)
    x = (data.data[:count, None].float() / 255 - 0.1307) / 0.3081
    return avg_pool2d(x, 2), data.targets[:count]


def perceptron():
    return models.mlp(196, [64, 64], 10)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2),
        nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


NETWORKS = {"MLP 196-64-64-10": perceptron, "CNN with batch norms": convolutions}


@torch.no_grad()
def accuracy(model, params, data):
    """Of one network or of every member of a stack, in per cent."""
    x, y = data
    z = torch.cat([P.apply(model.eval(), params, part) for part in x.split(2000)], -2)
    found = 100 * (z.argmax(-1) == y).double().mean(-1)
    return found.tolist()


def trained(model, stack, data, epochs, seed, batch=64, lr=1e-3):
    """Members side by side, each on examples of its own, in an order of its own: Adam.

    Args:
        model: gives the computation.
        stack: where they begin.
        data: one pair of inputs and targets for each member.
        epochs: over the smallest of the sets.
        seed: of the orders.
        batch: examples a step.
        lr: of Adam.
    """
    names = P.weight_names(model)
    stack = {n: t.clone() for n, t in stack.items()}
    leaves = {n: stack[n].requires_grad_() for n in names}
    optimizer = torch.optim.Adam(leaves.values(), lr)
    model.train()
    for epoch in range(epochs):
        orders = [
            torch.randperm(len(y), generator=keyed_generator(seed, "order", epoch, m))
            for m, (_, y) in enumerate(data)
        ]
        for k in range(min(map(len, orders)) // batch):
            rows = [order[k * batch : (k + 1) * batch] for order in orders]
            x = torch.stack([x[r] for (x, _), r in zip(data, rows, strict=True)])
            y = torch.stack([y[r] for (_, y), r in zip(data, rows, strict=True)])
            z = P.apply_each(model, stack, x)
            loss = cross_entropy(z.flatten(0, 1), y.flatten()) * len(data)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    return {n: t.detach() for n, t in stack.items()}


def renewed(model, params, data):
    return reestimated(model.eval(), params, data[0][:2000].split(200))


# ------------------------------------------------------------ tables
def spread(values):
    mean = statistics.mean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{mean:.2f} ± {deviation:.2f}"


def table(rows, keys, numbers):
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    print("| " + " | ".join([*keys, *numbers]) + " |\n|" + "---|" * (len(keys) + len(numbers)))
    for key, some in groups.items():
        cells = [spread([r[n] for r in some]) if n in some[0] else "" for n in numbers]
        print("| " + " | ".join([*map(str, key), *cells]) + " |")


def keep(rows, folder, name):
    """Add rows to a JSON file; those of an earlier call stay."""
    if folder is None:
        return rows
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    rows = (json.loads(path.read_text()) if path.exists() else []) + rows
    path.write_text(json.dumps(rows, indent=1))
    return rows
