"""Effective draws of HMC and MCLMC, for a thousand gradients and for a second.

python benchmarks/effective_draws.py [--only sine] [--chains 4] [--gradients 20000] [--seeds 3]

Both start from the same networks, which Adam has trained on the posterior itself; what adapts is
not counted. HMC has several lengths of trajectories and two jitters, MCLMC several energy
variances. Effective sizes are those of predictions at a hundred places: the median, the least; sd
is the mean standard deviation of predictions over that of the HMC with most effective draws.
"""

import argparse
import time

import torch
from torch import nn

from lightning_bnn import params as P
from lightning_bnn import samplers
from lightning_bnn.datamodules import Digits
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.methods import HMC, MILE, Batch, Run
from lightning_bnn.metrics.chains import effective_sample_size, rhat
from lightning_bnn.models import mlp
from lightning_bnn.randomness import keyed_generator

PLACES, DESCENT, ADAPTING = 100, 1000, 0.3
HMCS = {
    f"HMC, {steps} leapfrogs, jitter {jitter}": (steps, jitter)
    for steps in (10, 30, 60)
    for jitter in (0.1, 0.5)
}
MCLMCS = {f"MCLMC, v = {v:g}": v for v in (1e-2, 1e-3, 5e-4)}


def sine():
    generator = keyed_generator("effective draws", "sine")
    x = 4 * torch.rand(40, 1, generator=generator) - 2
    y = (2 * x).sin() + 0.3 * torch.randn(40, 1, generator=generator)
    places = torch.linspace(-2.5, 2.5, PLACES)[:, None]
    return mlp(1, [50], 1, nn.Tanh), Gaussian(std=0.3), x, y, places


def two_gaussians():
    generator = keyed_generator("effective draws", "gaussians")
    y = torch.arange(60) % 2
    x = torch.randn(60, 2, generator=generator) + (2 * y - 1)[:, None]
    places = 2 * torch.randn(PLACES, 2, generator=generator)
    return mlp(2, [10], 2), Categorical(), x, y, places


def digits():
    splits = Digits().load()
    (x, y), (places, _) = splits.train, splits.test
    return mlp(64, [16], 10), Categorical(), x.flatten(1), y, places[:PLACES].flatten(1)


PROBLEMS = {"two gaussians": two_gaussians, "sine": sine, "digits": digits}


class Chains:
    """Chains of one method on one posterior, from where Adam leads them."""

    def __init__(self, problem, method, chains, seed):
        self.network, likelihood, x, y, self.places = problem
        self.method, self.chains = method, chains
        self.run = Run(self.network, likelihood, len(x), warn=lambda _: None, inform=lambda _: None)
        generator = keyed_generator("effective draws", "start", seed)
        self.state = method.init(self.network, P.populate(self.network, chains, generator))
        data = Batch((x,), y)
        self.state.data = [data]
        self.weights = list(self.state.parameters())
        adam = torch.optim.Adam(self.weights, 0.02)
        for _ in range(DESCENT):
            method.energies(self.state, self.run)
            adam.step()

    def draws(self, sampler, gradients, each):
        """Predictions of every transition after the adaptation, and its time in CPU seconds."""
        transitions = gradients // each
        adapting = int(ADAPTING * transitions)
        sampler.param_groups[0]["adapt_steps"] = adapting
        kept, begin = [], 0.0
        for step in range(transitions):
            if step == adapting:
                begin = time.process_time()
            self.method.step(self.state, self.run, sampler.step)
            if step >= adapting:
                kept.append({n: t.detach().clone() for n, t in self.state.stack().items()})
        seconds = time.process_time() - begin
        return torch.stack([self._predictions(stack) for stack in kept], 1), seconds

    @torch.no_grad()
    def _predictions(self, stack):
        """One number for each place, ``(chains, places)``."""
        outputs = P.apply(self.network, stack, self.places)
        if outputs.shape[-1] == 1:
            return outputs[..., 0].double()
        most = outputs.mean(0).argmax(-1)
        return outputs.log_softmax(-1)[:, torch.arange(len(most)), most].double()


def judged(chains, sampler, gradients, each):
    draws, seconds = chains.draws(sampler, gradients, each)
    size, spent = effective_sample_size(draws), draws[0].shape[0] * each * chains.chains / 1000
    return {
        "median": float(size.median() / spent), "least": float(size.min() / spent),
        "per second": float(size.median() / seconds), "rhat": float(rhat(draws).max()),
        "sd": draws.flatten(0, 1).std(0).mean().item(),
    }  # fmt: skip


def contestants(problem, arguments, seed):
    for name, (steps, jitter) in HMCS.items():
        chains = Chains(problem, HMC(1.0), arguments.chains, seed)
        sampler = samplers.HMC(chains.weights, 0.01, steps, adapt_steps=1, jitter=jitter, seed=seed)
        yield name, judged(chains, sampler, arguments.gradients, steps + 1), ""
    for name, variance in MCLMCS.items():
        chains = Chains(problem, MILE(1.0), arguments.chains, seed)
        sampler = samplers.MCLMC(
            chains.weights, 0.01, 5, variance, descent_steps=0, adapt_steps=1, seed=seed
        )
        found = judged(chains, sampler, arguments.gradients, 11)
        yield name, found, f"{float(sampler.energy_variances.mean()):.2g}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PROBLEMS)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--gradients", type=int, default=20_000, help="of every chain")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for title in [arguments.only] if arguments.only else PROBLEMS:
        rows, reached = {}, {}
        for seed in range(arguments.seeds):
            for name, found, variance in contestants(PROBLEMS[title](), arguments, seed):
                rows.setdefault(name, []).append(found)
                reached[name] = variance
        show(title, rows, reached)


def show(title, rows, reached):
    means = {
        name: {key: torch.tensor([f[key] for f in found]) for key in found[0]}
        for name, found in rows.items()
    }
    best = max((n for n in means if n in HMCS), key=lambda n: means[n]["median"].mean())
    print(f"\n{title}: effective draws for 1000 gradients of a chain (best HMC: {best})\n")
    print(
        "| sampler | median | least | of the best HMC | for a CPU second | R-hat | sd | v reached |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, m in means.items():
        median, least = (_with_spread(m[k]) for k in ("median", "least"))
        ratio = float(m["median"].mean() / means[best]["median"].mean())
        spread = float(m["sd"].mean() / means[best]["sd"].mean())
        print(
            f"| {name} | {median} | {least} | {ratio:.2f} | {m['per second'].mean():.0f} | "
            f"{m['rhat'].max():.3f} | {spread:.3f} | {reached[name]} |",
            flush=True,
        )


def _with_spread(values):
    spread = f" ± {values.std():.1f}" if len(values) > 1 else ""
    return f"{values.mean():.1f}{spread}"


if __name__ == "__main__":
    main()
