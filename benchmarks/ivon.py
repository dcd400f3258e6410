"""IVON beside Adam and MFVI: NLL and ECE of the test set, and what a step costs, in turns.

python benchmarks/ivon.py mnist|transformer [--seeds 3]

`mnist`: a perceptron 784-100-10, 50 000 images, 10 epochs; `transformer`: a layer of 4 heads and
32 channels, which reads a digit of scikit-learn as eight rows, 40 epochs. All have the prior
N(0, 1). Settings have the least NLL on the validation data; numbers are means and standard
deviations over seeds, which train side by side.
"""

import argparse
import functools
import itertools
import statistics

import torch
from torch import nn
from turns import taking_turns

from lightning_bnn import methods, metrics, models, samplers
from lightning_bnn import params as P
from lightning_bnn.datamodules import MNIST, Digits

PRIOR, DRAWS = 1.0, 50


class Rows(nn.Module):
    """A transformer whose tokens are the rows of an image."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 32)
        self.position = nn.Parameter(torch.randn(8, 32) / 6)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(self.embedding(x.squeeze(1)) + self.position).mean(1))


TASKS = {
    "mnist": (lambda: models.mlp(784, [100], 10), MNIST(val_size=10_000, augment=False), 128, 10),
    "transformer": (Rows, Digits(), 64, 40),
}
GRIDS = {
    "Adam": {"lr": (1e-3, 3e-3)},
    "IVON": {"lr": (0.01, 0.03, 0.1, 0.2), "hessian_init": (0.1, 0.3, 1.0)},
    "MFVI": {"lr": (1e-3, 3e-3), "init_std": (0.01,)},
}


class Training:
    """A method with its networks and its optimizer, in steps."""

    def __init__(self, name, network, size, steps, seeds, lr, init_std=0.01, **options):
        made = {
            "Adam": methods.DeepEnsemble(prior_std=PRIOR),
            "IVON": methods.VariationalOnlineNewton(PRIOR),
            "MFVI": methods.MFVI(prior_std=PRIOR, init_std=init_std),
        }
        starts = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            starts.append(P.of(network()))
        self.network, self.method = network(), made[name]
        self.run = methods.Run(self.network, num_data=size)
        self.state = self.method.init(self.network, P.stack(starts))
        kind = torch.optim.Adam
        if name == "IVON":
            options |= {"num_data": size, "hessian_momentum": 0.999}
            kind = samplers.IVON
        self.optimizer = kind(self.state.parameters(), lr=lr, **options)
        self.method.configure_optimizer(self.state, self.optimizer, self.run)
        self.method.before_fit(
            self.state, methods.Fit(optimizer=self.optimizer, steps=steps), self.run
        )

    def step(self, x, y):
        self.optimizer.zero_grad()
        self.method.losses(self.state, methods.Batch((x,), y), self.run)["loss"].sum().backward()
        self.optimizer.step()

    @torch.no_grad()
    def scores(self, x, y):
        """NLL, ECE and accuracy of every seed."""
        for q in self.method.posterior(self.state, self.run).modes():
            networks, probs = q.sample(getattr(q, "size", DRAWS)), []
            for part in x.split(1000):
                probs.append(P.apply(self.network, networks, part).softmax(-1).mean(0))
            probs = torch.cat(probs)
            right = (probs.argmax(-1) == y).double().mean()
            yield (
                float(metrics.nll(probs, y)),
                100 * float(metrics.ece(probs, y)),
                100 * float(right),
            )


def prepared(data):
    """Training, validation and test data as tensors."""
    data.setup()
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    for loader in loaders:
        first = loader[0] if isinstance(loader, list) else loader
        batches = [data.on_after_batch_transfer(batch, 0)[:2] for batch in first]
        yield tuple(torch.cat(column) for column in zip(*batches, strict=True))


def fitted(task, name, sets, seeds, **settings):
    network, _, size, epochs = TASKS[task]
    (x, y), validation, test = sets
    steps = epochs * -(-len(x) // size)
    training = Training(name, network, len(x), steps, seeds, **settings)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(size):
            training.step(x[rows], y[rows])
    return [[*training.scores(*one)] for one in (validation, test)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=[*TASKS])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    network, data, size, _ = TASKS[options.task]
    sets, chosen = [*prepared(data)], {}
    for name, grid in GRIDS.items():
        found = []
        for point in itertools.product(*grid.values()):
            settings = dict(zip(grid, point, strict=True))
            validated, tested = fitted(options.task, name, sets, options.seeds, **settings)
            found.append((statistics.mean(nll for nll, *_ in validated), settings, tested))
            print(f"{name:<8}{settings} validation {found[-1][0]:.4f}", flush=True)
        _, chosen[name], tested = min(found, key=lambda one: one[0])
        pairs = [(statistics.mean(c), statistics.stdev(c)) for c in zip(*tested, strict=True)]
        cells = [f"{mean:.3f} ± {std:.3f}" for mean, std in pairs]
        print(f"{name:<8}test: NLL, ECE (%), accuracy (%): {', '.join(cells)}", flush=True)
    costs(network, [t[:size] for t in sets[0]], chosen)


def costs(network, batch, chosen):
    """CPU time of a step with one network, in turns, and beside plain torch."""
    net = network()
    adam = torch.optim.Adam(net.parameters())

    def plain():
        adam.zero_grad()
        nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
        adam.step()

    rivals = {n: Training(n, network, 10**4, 10**5, 1, **s) for n, s in chosen.items()}
    steps = {name: functools.partial(one.step, *batch) for name, one in rivals.items()}
    times = taking_turns({"torch": plain, **steps}, 300)
    for name, one in times.items():
        ratio = one.seconds / times["torch"].seconds
        print(f"{name:<8}{1e3 * one.seconds:.2f} ms a step, {ratio:.2f} x")


if __name__ == "__main__":
    main()
