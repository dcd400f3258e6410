"""Samplers of NumPyro and of `posteriors` beside ours, on the smallest reference, 2-10-2.

    pip install numpyro posteriors
    python benchmarks/anchor_samplers.py [--gradients 20000] [--seeds 3]

All chains start from the same draws of the reference, with all the data. NUTS of NumPyro adapts its
steps and a diagonal of masses, and the leapfrog steps of its trees are counted; it runs twice, and
the second time, which is compiled already, is taken. SGHMC and BAOA of `posteriors` have step sizes
and frictions like those of our SGHMC, shares of the step that our HMC has found, and smaller ones:
that SGHMC takes both of its halves from the same place, and diverges first (nan). Columns are those
of `effective_draws.py`. The network is written in JAX a second time, and its energies are compared
with ours before anything runs.
"""

import argparse
import math
import os
import time
import warnings
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import torch
from effective_draws import FIRST_STEP, HMCS, SGHMCS, Chains, Posterior, judged, show
from effective_draws import contestants as all_of_ours

from lightning_bnn import params as P
from lightning_bnn import samplers
from lightning_bnn.methods import HMC

ADAPTING, EACH = 0.3, 10
"""Share of a run that adapts, and steps of a stochastic sampler between draws."""


# ------------------------------------------------------------ NumPyro
def energy_in_jax(posterior):
    """Negative log posterior of one network's weights by name, for all the data."""
    import jax
    import jax.numpy as jnp

    x, y = (jnp.asarray(t.numpy()) for t in (posterior.data.inputs[0], posterior.data.targets))
    first, second = (n.removesuffix(".weight") for n in posterior.names if n.endswith("weight"))

    def energy(w):
        hidden = jax.nn.relu(x @ w[f"{first}.weight"].T + w[f"{first}.bias"])
        logits = hidden @ w[f"{second}.weight"].T + w[f"{second}.bias"]
        fit = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).sum()
        squares = sum((t**2).sum() for t in w.values())
        return squares / (2 * posterior.prior_std**2) - fit

    return energy


def nuts(posterior, arguments, seed):
    """Trees of leapfrog steps, whose depth decides what a draw costs."""
    import jax
    from numpyro.infer import MCMC, NUTS

    chains = Chains(posterior, HMC(posterior.prior_std), arguments.chains, seed)
    start = {
        n: jax.numpy.asarray(t.numpy()) for n, t in posterior.starts(chains.chains, seed).items()
    }
    energy = energy_in_jax(posterior)
    _agree(jax.vmap(energy)(start), chains.method.energies(chains.state, chains.run))
    draws = arguments.gradients // EACH
    sampler = MCMC(
        NUTS(potential_fn=energy), num_warmup=int(ADAPTING * draws), num_samples=draws,
        num_chains=chains.chains, chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    for _ in range(2):
        sampler.warmup(jax.random.PRNGKey(seed), init_params=start)
        begin = time.process_time()
        sampler.run(jax.random.PRNGKey(seed + 1), extra_fields=("num_steps",))
        found = {
            n: torch.from_numpy(jax.device_get(t).copy())
            for n, t in sampler.get_samples(True).items()
        }
        seconds = time.process_time() - begin
    steps = int(sampler.get_extra_fields()["num_steps"].sum())
    rows = [{n: t[k] for n, t in found.items()} for k in range(chains.chains)]
    predicted = torch.stack([posterior.predictions(row) for row in rows])
    return judged(posterior, predicted, steps, seconds)


def _agree(theirs, ours):
    theirs = torch.tensor(theirs.tolist(), dtype=torch.float64)
    if not torch.allclose(theirs, ours, rtol=1e-4):
        raise SystemExit(f"The energies in JAX, {theirs}, are not ours, {ours}.")


# ------------------------------------------------------------ posteriors
def of_posteriors(kind, size, momentum, step_size, posterior, arguments, seed):
    """SGHMC or BAOA; chains side by side, as the sum of their log posteriors."""
    from posteriors import sgmcmc

    torch.manual_seed(seed)
    chains = Chains(posterior, HMC(posterior.prior_std), arguments.chains, seed)
    network, likelihood = posterior.problem.network, posterior.problem.likelihood
    (x,), y = posterior.data.inputs, posterior.data.targets

    def log_posterior(stack, batch):
        fit = likelihood.log_prob(P.apply(network, stack, x), y).sum()
        squares = sum(t.square().sum() for t in stack.values())
        return fit - squares / (2 * posterior.prior_std**2), torch.empty(0)

    rate = size * step_size
    module = getattr(sgmcmc, kind)
    transform = module.build(log_posterior, lr=rate, alpha=-math.log(momentum) / rate)
    state = transform.init({n: t.clone() for n, t in posterior.starts(chains.chains, seed).items()})
    steps, kept, begin = arguments.gradients // EACH, [], 0.0
    for step in range(steps):
        if step == int(ADAPTING * steps):
            kept, begin = [], time.process_time()
        for _ in range(EACH):
            state, _ = transform.update(state, None)
        kept.append({n: state.params[n].detach() for n in posterior.names})
    seconds = time.process_time() - begin
    draws = torch.stack([posterior.predictions(stack) for stack in kept], 1)
    if not draws.isfinite().all():
        return dict.fromkeys(("median", "least", "per second", "rhat", "shift", "sd"), math.nan)
    return judged(posterior, draws, draws.shape[1] * EACH * chains.chains, seconds)


# ------------------------------------------------------------ the table
def adapted_step(posterior, arguments):
    """That of HMC, as our SGHMC gets its shares of it: with the longest trajectories."""
    steps, jitter = list(HMCS.values())[-1]
    adapting = int(ADAPTING * (arguments.gradients // (steps + 1)))
    chains = Chains(posterior, HMC(posterior.prior_std), arguments.chains, 0)
    sampler = samplers.HMC(
        chains.weights, FIRST_STEP, steps, adapt_steps=adapting, jitter=jitter, seed=0
    )
    for _ in range(adapting):
        chains.method.step(chains.state, chains.run, sampler.step)
    return float(torch.as_tensor(sampler.step_size).mean())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--gradients", type=int, default=20_000, help="of every chain")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    posterior, rows = Posterior("two_gaussians"), {}
    posterior.names = list(posterior.starts(1, 0))
    step_size = adapted_step(posterior, arguments)
    theirs = {"NUTS of NumPyro": nuts}
    for kind in ("sghmc", "baoa"):
        for size, momentum in [(0.05, 0.9), (0.1, 0.9), (0.1, 0.98), *SGHMCS.values()]:
            name = f"{kind.upper()} of posteriors, {size} of HMC's step, momentum {momentum}"
            theirs[name] = partial(of_posteriors, kind, size, momentum, step_size)
    for seed in range(arguments.seeds):
        for name, found in all_of_ours(posterior, arguments, seed):
            rows.setdefault(name, []).append(found)
        for name, run in theirs.items():
            rows.setdefault(name, []).append(run(posterior, arguments, seed))
    show("two_gaussians", rows)


if __name__ == "__main__":
    main()
