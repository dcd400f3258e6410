"""Effective draws of HMC, MCLMC and SGHMC, for a thousand gradients and for a second.

python benchmarks/effective_draws.py [--only sine] [--chains 4] [--gradients 20000] [--seeds 3]

The posteriors are references of the package, and all chains start from the same draws of theirs:
what is compared is how chains move, and where to, not how they find the posterior. What adapts is
not counted. HMC has several lengths of trajectories and two jitters, MCLMC several energy
variances, SGHMC (with all the data) several step sizes and frictions. Effective sizes are those of
predictions for up to a hundred test inputs: the median, the least. Shift: how far the means of
predictions are from those of the reference, in its standard deviations; sd: the standard deviations
over the reference's. Both are medians over the test inputs: where a network is nearly certain, the
logarithm of its probability hardly varies but for rare draws, and a mean over inputs shows nothing
else. Chains of finite length have a shift of their own, which HMC shows.
"""

import argparse
import time

import torch

from lightning_bnn import params as P
from lightning_bnn import samplers
from lightning_bnn.methods import HMC, MILE, Batch, Run
from lightning_bnn.metrics.chains import effective_sample_size, rhat
from lightning_bnn.references import read_reference, reference_folder
from lightning_bnn.references.diagnosis import chains_of_modes, followed
from lightning_bnn.settings_files import read_settings

ADAPTING, FIRST_STEP = 0.3, 0.01
HMCS = {
    f"HMC, {steps} leapfrogs, jitter {jitter}": (steps, jitter)
    for steps in (10, 30, 60)
    for jitter in (0.1, 0.5)
}
MCLMCS = {f"MCLMC, v = {v:g}": v for v in (1e-2, 1e-3, 5e-4)}
SGHMCS = {
    f"SGHMC, {size} of HMC's step, momentum {momentum}": (size, momentum)
    for size in (0.25, 0.5)
    for momentum in (0.9, 0.98)
}
PROBLEMS = ("two_gaussians", "sine", "yacht", "digits")


class Posterior:
    """A reference, and what its draws predict."""

    def __init__(self, name):
        self.stored, self.problem, _ = read_reference(name)
        self.prior_std = read_settings(reference_folder(name) / "config.yaml")["model"][
            "init_args"
        ]["prior_std"]
        source = self.problem.source
        (batch,) = source.prepared(source.train_dataloader())
        self.data = Batch(batch[:1], batch[1])
        draws = self.predictions(self.stored.networks())
        self.mean, self.sd = draws.mean(0), draws.std(0)

    def starts(self, chains, seed):
        """A draw of the reference for every chain."""
        every = chains_of_modes(self.stored)
        rows = [every[k % len(every)] for k in range(chains)]
        generator = torch.Generator().manual_seed(seed)
        sizes = [P.stack_size(chain) for chain in rows]
        picked = [int(torch.randint(size, (1,), generator=generator)) for size in sizes]
        pairs = list(zip(rows, picked, strict=True))
        return {name: torch.stack([chain[name][k] for chain, k in pairs]) for name in rows[0]}

    def predictions(self, networks):
        with torch.no_grad():
            return followed(self.stored, self.problem, networks, ("function",))["function"]


class Chains:
    """Chains of one method on one posterior."""

    def __init__(self, posterior, method, chains, seed):
        self.posterior, self.method, self.chains = posterior, method, chains
        network, likelihood = posterior.problem.network, posterior.problem.likelihood
        self.size = posterior.data.examples
        self.run = Run(network, likelihood, self.size, warn=lambda _: None, inform=lambda _: None)
        self.state = method.init(network, posterior.starts(chains, seed))
        self.state.data = [posterior.data]
        self.weights = list(self.state.parameters())

    def draws(self, move, transitions, adapting):
        """Predictions after every transition that is no adaptation, and its CPU seconds."""
        kept, begin = [], 0.0
        for step in range(transitions):
            if step == adapting:
                begin = time.process_time()
            move()
            if step >= adapting:
                kept.append({n: t.detach().clone() for n, t in self.state.stack().items()})
        seconds = time.process_time() - begin
        return torch.stack([self.posterior.predictions(stack) for stack in kept], 1), seconds

    def judged(self, move, gradients, each, adapting):
        transitions = gradients // each
        draws, seconds = self.draws(move, transitions, int(adapting * transitions))
        return judged(self.posterior, draws, draws.shape[1] * each * self.chains, seconds)


def judged(posterior, draws, gradients, seconds):
    """Of predictions ``(chains, draws, ...)`` that so many gradients of all chains have made."""
    size, pooled = effective_sample_size(draws), draws.flatten(0, 1)
    shift = (pooled.mean(0) - posterior.mean) / posterior.sd
    return {
        "median": float(1000 * size.median() / gradients),
        "least": float(1000 * size.min() / gradients),
        "per second": float(size.median() / seconds), "rhat": float(rhat(draws).max()),
        "shift": shift.abs().median().item(),
        "sd": (pooled.std(0) / posterior.sd).median().item(),
    }  # fmt: skip


def contestants(posterior, arguments, seed):
    """Name and numbers of every sampler."""
    step_size = FIRST_STEP
    for name, (steps, jitter) in HMCS.items():
        chains = Chains(posterior, HMC(posterior.prior_std), arguments.chains, seed)
        adapting = int(ADAPTING * (arguments.gradients // (steps + 1)))
        sampler = samplers.HMC(
            chains.weights, FIRST_STEP, steps, adapt_steps=adapting, jitter=jitter, seed=seed
        )
        move = _transition(chains, sampler)
        yield name, chains.judged(move, arguments.gradients, steps + 1, ADAPTING)
        step_size = float(torch.as_tensor(sampler.step_size).mean())
    for name, variance in MCLMCS.items():
        chains = Chains(posterior, MILE(posterior.prior_std), arguments.chains, seed)
        adapting = int(ADAPTING * (arguments.gradients // 11))
        sampler = samplers.MCLMC(
            chains.weights, FIRST_STEP, 5, variance, descent_steps=0, adapt_steps=adapting,
            seed=seed,
        )  # fmt: skip
        found = chains.judged(_transition(chains, sampler), arguments.gradients, 11, ADAPTING)
        yield name, {**found, "v": float(sampler.energy_variances.mean())}
    for name, (size, momentum) in SGHMCS.items():
        chains = Chains(posterior, HMC(posterior.prior_std), arguments.chains, seed)
        rate = chains.size * (size * step_size) ** 2
        sampler = samplers.SGHMC(chains.weights, rate, momentum, chains.size, seed=seed)
        yield name, chains.judged(_steps(chains, sampler), arguments.gradients, 10, ADAPTING)


def _transition(chains, sampler):
    return lambda: chains.method.step(chains.state, chains.run, sampler.step)


def _steps(chains, sampler, count=10):
    """Some steps of a sampler that takes gradients of the mean loss, the prior's among them."""

    def move():
        for _ in range(count):
            chains.method.energies(chains.state, chains.run)
            for p in chains.weights:
                p.grad /= chains.size
            sampler.step()

    return move


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PROBLEMS)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--gradients", type=int, default=20_000, help="of every chain")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for title in [arguments.only] if arguments.only else PROBLEMS:
        posterior, rows = Posterior(title), {}
        for seed in range(arguments.seeds):
            for name, found in contestants(posterior, arguments, seed):
                rows.setdefault(name, []).append(found)
        show(title, rows)


def show(title, rows):
    means = {
        name: {key: torch.tensor([f[key] for f in found]) for key in found[0]}
        for name, found in rows.items()
    }
    best = max((n for n in means if n in HMCS), key=lambda n: means[n]["median"].mean())
    print(f"\n{title}: effective draws for 1000 gradients of a chain (best HMC: {best})\n")
    header = "sampler,median,least,of the best HMC,for a CPU second,R-hat,shift,sd,v reached"
    print(f"| {' | '.join(header.split(','))} |\n{'|---' * 9}|")
    for name, m in means.items():
        median, least = (_with_spread(m[k]) for k in ("median", "least"))
        ratio = float(m["median"].mean() / means[best]["median"].mean())
        reached = f"{m['v'].mean():.2g}" if "v" in m else ""
        print(
            f"| {name} | {median} | {least} | {ratio:.2f} | {m['per second'].mean():.0f} | "
            f"{m['rhat'].max():.3f} | {m['shift'].mean():.2f} | {m['sd'].mean():.2f} | {reached} |",
            flush=True,
        )


def _with_spread(values):
    spread = f" ± {values.std():.1f}" if len(values) > 1 else ""
    return f"{values.mean():.1f}{spread}"


if __name__ == "__main__":
    main()
