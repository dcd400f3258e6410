"""Where the deviations of mean-field VI start, with and without a warm-up: ELBO and NLL reached.

LIGHTNING_BNN_DATA=data python benchmarks/vi_starts.py ["digits 16" "two Gaussians" ...]

All starts and five seeds of each train side by side, with the same batches; printed are means and
standard deviations over seeds (of the weights and the noise, not of the data). The last line of
each problem says what the race of `init_std="auto"` picks, and what it would pick without training.
"""

import argparse
import math
import time

import torch

from lightning_bnn import params as P
from lightning_bnn.datamodules import UCI, Digits, TwoGaussians
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.methods import MFVI, Batch, Fit, Progress, Run, starting_deviations
from lightning_bnn.models import mlp
from lightning_bnn.randomness import keyed_generator, keyed_randomness

torch.set_num_threads(1)
STARTS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
WARMUPS = (0.0, 0.25, 0.5)
SEEDS, BATCH, RATE, NETWORKS = 5, 64, 5e-3, 300


def digits():
    splits = Digits().load()
    return tuple(((x - Digits.mean[0]) / Digits.std[0], y) for x, y in (splits.train, splits.test))


def table(datamodule):
    splits = datamodule.load()
    return splits.train, splits.test


def diabetes(rows=100):
    from sklearn.datasets import load_diabetes

    data = load_diabetes()
    order = torch.randperm(len(data.data), generator=keyed_generator("diabetes"))
    x = torch.tensor(data.data).float()[order]
    y = torch.tensor(data.target).float()[order, None]
    x, y = ((t - t[:rows].mean(0)) / t[:rows].std(0) for t in (x, y))
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


PROBLEMS = {  # network, likelihood, data, prior_std, epochs
    "digits 16": (lambda: mlp(64, [16], 10), Categorical(), digits, 0.5, 100),
    "digits 32": (lambda: mlp(64, [32], 10), Categorical(), digits, 0.5, 100),
    "digits 100": (lambda: mlp(64, [100], 10), Categorical(), digits, 0.5, 100),
    "digits 32 N(0,1)": (lambda: mlp(64, [32], 10), Categorical(), digits, 1.0, 100),
    "two Gaussians": (
        lambda: mlp(2, [10], 2), Categorical(), lambda: table(TwoGaussians(size=30)), 1.0, 300,
    ),
    "energy": (lambda: mlp(8, [50], 1), Gaussian(std=0.1), lambda: table(UCI("energy")), 1.0, 400),
    "yacht": (lambda: mlp(6, [20], 1), Gaussian(std=0.1), lambda: table(UCI("yacht")), 1.0, 600),
    "diabetes 100": (lambda: mlp(10, [50], 1), Gaussian(std=0.7), diabetes, 1.0, 600),
}  # fmt: skip


def started(method, network, starts):
    """All starts, each with the same networks."""
    stack = P.populate(network, SEEDS, torch.Generator().manual_seed(1))
    many = {n: t.repeat(len(starts), *[1] * (t.ndim - 1)) for n, t in stack.items()}
    state = method.init(network, many)
    logs = torch.tensor(starts).log().repeat_interleave(SEEDS)
    state.log_std.data.copy_(logs[:, None].expand_as(state.log_std))
    return state


def train(method, state, run, examples, epochs):
    (x, y), adam, step = examples, torch.optim.Adam(state.parameters(), RATE), 0
    steps = math.ceil(len(x) / BATCH)
    method.begin(state, Fit(anew=True, epochs=epochs, epoch_steps=steps, trial=True), run)
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=keyed_generator("order", epoch))
        for rows in order.split(BATCH):
            with keyed_randomness("step", step):
                loss = method.losses(state, Batch((x[rows],), y[rows], number=step), run)["loss"]
            adam.zero_grad()
            loss.sum().backward()
            adam.step()
            step += 1
            method.after_step(state, Progress(step, epoch, step % steps == 0, adam), run)


@torch.no_grad()
def judged(method, state, run, train_set, test_set):
    """ELBO per example and test NLL, ``(starts, seeds)``."""
    (x, y), (u, v) = train_set, test_set
    method.elbo_samples = 10
    with keyed_randomness("elbo"):
        elbos = [method.losses(state, Batch((x,), y), run)["elbo"] for _ in range(5)]
    scores = []
    for k, mode in enumerate(state.modes()):
        outputs = P.apply(run.network, mode.sample(NETWORKS, keyed_generator("test", k)), u)
        logs = run.likelihood.log_prob(outputs, v)
        scores.append((math.log(NETWORKS) - logs.logsumexp(0)).mean())
    elbo = torch.stack(elbos).mean(0) / len(x)
    return [t.view(-1, SEEDS) for t in (elbo, torch.stack(scores))]


def picked(name, steps):
    """What the race picks."""
    network, likelihood, data, prior_std, _ = PROBLEMS[name]
    (x, y), _ = data()
    net, starting_deviations._STEPS = network(), steps
    method = MFVI(prior_std, init_std="auto")
    state = method.init(net, P.populate(net, 1, torch.Generator().manual_seed(1)))
    batches = [Batch((x[k : k + BATCH],), y[k : k + BATCH]) for k in range(0, len(x), BATCH)]
    run = Run(net, likelihood, len(x))
    begun = time.perf_counter()
    method.begin(state, Fit(batches=lambda: batches), run)
    return state.notes["init_std"], time.perf_counter() - begun


def main(names):
    for name in names or PROBLEMS:
        network, likelihood, data, prior_std, epochs = PROBLEMS[name]
        net, (train_set, test_set) = network(), data()
        run, columns = Run(net, likelihood, len(train_set[0])), []
        for warmup in WARMUPS:
            method = MFVI(prior_std, kl_warmup=warmup * epochs)
            state = started(method, net, STARTS)
            train(method, state, run, train_set, epochs)
            columns += judged(method, state, run, train_set, test_set)
        print(f"{name}: n {len(train_set[0])}, {epochs} epochs", flush=True)
        heads = [f"{what}, warm-up {w:g}" for w in WARMUPS for what in ("ELBO", "NLL")]
        print("  start", *(f"{head:>20}" for head in heads))
        for k, start in enumerate(STARTS):
            cells = (f"{c[k].mean():.4f} ± {c[k].std():.4f}" for c in columns)
            print(f"  {start:<5}", *(f"{cell:>20}" for cell in cells), flush=True)
        (start, seconds), (without, _) = picked(name, 100), picked(name, 1)
        print(f"  auto: {start:g} in {seconds:.1f} s; without training: {without:g}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("problems", nargs="*", help=f"by default all: {', '.join(PROBLEMS)}")
    main(parser.parse_args().problems)
