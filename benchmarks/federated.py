"""Ten clients with digits of their own, whose posteriors are merged in one round.

python benchmarks/federated.py [--seeds 5]

Perceptrons 64-32-10. Digits are dealt at random, or every client has two of twenty parts of them in
the order of their labels. Clients start at one network, or each at its own. Columns: accuracy (per
cent) and NLL of the mean network, and those of 100 draws; mean and standard deviation over seeds.
"""

import argparse
import functools
import itertools
import statistics

import torch

from lightning_bnn import methods, models, samplers
from lightning_bnn import params as P
from lightning_bnn.datamodules import Digits
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.posteriors import DiagonalGaussian, merge_gaussians
from lightning_bnn.posteriors.curvature import curvature
from lightning_bnn.symmetry import discover, match

CLIENTS, BATCH, DRAWS = 10, 32, 100
PRIOR, EPOCHS = 1.0, {"IVON": 200, "Laplace": 400}  # of clients alone, on the validation digits
IVON = {"lr": 0.1, "hessian_init": 5.0, "hessian_momentum": 0.999}


def posteriors(method, starts, x, y, seed, share=1):
    net, examples, order = starts[0], y.shape[1], torch.Generator().manual_seed(seed)
    made = methods.IVON(PRIOR) if method == "IVON" else methods.DeepEnsemble(prior_std=PRIOR)
    run, state = methods.Run(net, num_data=examples), made.init(net, P.stack([*map(P.of, starts)]))
    kind = functools.partial(samplers.IVON, num_data=examples, **IVON)
    optimizer = (kind if method == "IVON" else torch.optim.Adam)(state.parameters())
    made.configure_optimizer(state, optimizer, run)
    epochs = EPOCHS[method] // share
    fit = methods.Fit(optimizer=optimizer, steps=epochs * -(-examples // BATCH))
    made.before_fit(state, fit, run)
    for _ in range(epochs):
        for rows in torch.randperm(examples, generator=order).split(BATCH):
            batch = methods.Batch((x[:, rows],), y[:, rows], per_member=True)
            optimizer.zero_grad()
            made.losses(state, batch, run)["loss"].sum().backward()
            optimizer.step()
    made.after_fit(state, run)
    modes = made.posterior(state, run).modes()
    return modes if method == "IVON" else [*map(functools.partial(laplace, net), modes, x, y)]


def laplace(net, q, x, y):
    mean = {n: t[0].detach() for n, t in q.networks.items()}
    blocks = curvature(net, mean, [(x, y)], Categorical(), "diag")
    values = torch.cat([b.eigenvalues.flatten() for b in blocks]).to(x)
    spec = P.ravel(mean, [n for b in blocks for n in b.names])[1]
    return DiagonalGaussian(mean, P.unravel((values + PRIOR**-2).rsqrt(), spec))


def shares(y, skewed, g):
    if not skewed:
        return torch.randperm(len(y), generator=g)[: len(y) // CLIENTS * CLIENTS].view(CLIENTS, -1)
    size = len(y) // (2 * CLIENTS)
    pieces = y.argsort(stable=True)[: 2 * CLIENTS * size].view(2 * CLIENTS, size)
    return pieces[torch.randperm(2 * CLIENTS, generator=g)].view(CLIENTS, -1)


@torch.no_grad()
def scores(net, networks, x, y):
    probs = P.apply(net, networks, x).double().softmax(-1).mean(0)
    right = (probs.argmax(-1) == y).double().mean()
    return 100 * float(right), -float(probs.log()[torch.arange(len(y)), y].mean())


def of_posterior(net, q, *test):
    return *scores(net, P.stack([q.centre]), *test), *scores(net, q.sample(DRAWS), *test)


def merged(net, clients, *test):
    means, sym = [q.centre for q in clients], discover(net, test[0][:2])
    matched = [means[0], *(match(m, means[0], sym).apply(m, sym) for m in means[1:])]
    alone = zip(*(of_posterior(net, q, *test) for q in clients), strict=True)
    yield "one client", [sum(column) / CLIENTS for column in alone]
    for name, networks in (("average", means), ("average, matched", matched)):
        mean = {n: t.mean(0)[None] for n, t in P.stack(networks).items()}
        yield name, scores(net, mean, *test)
    yield "precisions", of_posterior(net, merge_gaussians(clients, PRIOR), *test)
    yield "precisions, matched", of_posterior(net, merge_gaussians(clients, PRIOR, sym), *test)
    yield "the same, ten priors", of_posterior(net, merge_gaussians(clients, None, sym), *test)
    drawn = P.stack([w for q in clients for w in P.unstack(q.sample(DRAWS // CLIENTS))])
    yield "mixture of clients", scores(net, drawn, *test)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    for method, skewed, own in itertools.product(EPOCHS, (False, True), (False, True)):
        rows = {}
        for seed in range(seeds):
            data = Digits(seed=seed)
            data.setup()
            (x, y), test = data.splits.train, data.splits.test
            torch.manual_seed(seed)
            starts = [models.mlp(64, [32], 10) for _ in range(CLIENTS if own else 1)]
            dealt = shares(y, skewed, torch.Generator().manual_seed(seed))
            every = starts * (CLIENTS // len(starts))
            clients = posteriors(method, every, x[dealt], y[dealt], seed)
            for name, numbers in merged(starts[0], clients, *test):
                rows.setdefault(name, []).append(numbers)
            (whole,) = posteriors(method, starts[:1], x[None], y[None], seed, 4)
            rows.setdefault("all data", []).append(of_posterior(starts[0], whole, *test))
        labels = "two labels" if skewed else "random"
        print(f"\n{method}, {labels}, {'own starts' if own else 'one start'}")
        for name, found in rows.items():
            columns = [*zip(*found, strict=True)]
            cells = [f"{statistics.mean(c):.2f} ± {statistics.stdev(c):.2f}" for c in columns]
            print(f"{name:<34}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
