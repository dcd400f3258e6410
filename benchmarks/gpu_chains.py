"""Chains of HMC on a device: ours, plain ones with `torch.func`, and those of blackjax.

python benchmarks/gpu_chains.py [--device cuda] [--quick]
"""

import functools
import os
import warnings

import torch
from gpu_populations import Replay, measured, reason
from record import Record, parsed, parser
from torch import nn
from torch.func import functional_call, grad_and_value

from lightning_bnn import methods, models, samplers
from weightsym import params as P

HMC = {"step_size": 2e-3, "leapfrog_steps": 20, "transitions": 5}
"""Of all samplers; a call is so many transitions."""


def our_chains(network, stack, x, y):
    method, run = methods.HamiltonianMonteCarlo(), methods.Run(network, num_data=len(y))
    state = method.init(network, stack)
    sampler = samplers.HMC(state.parameters(), HMC["step_size"], HMC["leapfrog_steps"], jitter=0.0)
    batches = [methods.Batch((x,), y)]
    method.before_fit(state, methods.Fit(optimizer=sampler, batches=lambda: batches), run)

    def step():
        for _ in range(HMC["transitions"]):
            method.transition(state, run, sampler.step)

    return step, lambda: float(sampler.acceptance.mean())


def energies_of(network, x, y):
    """The gradients and the negative log posteriors of a stack."""

    def energy(member):
        nll = nn.functional.cross_entropy(functional_call(network, member, (x,)), y)
        return len(y) * nll + sum(t.square().sum() for t in member.values()) / 2

    return torch.vmap(grad_and_value(energy))


def kinetic(momenta):
    return sum(m.square().flatten(1).sum(1) for m in momenta) / 2


def kick(momenta, grads, size):
    torch._foreach_add_(momenta, list(grads.values()), alpha=-size)


def plain_chains(network, stack, x, y, wrap=lambda step: step):
    """A transition as one would write it with `torch.func`; it can become a CUDA graph."""
    stack = {n: t.clone() for n, t in stack.items()}
    tensors, size = list(stack.values()), HMC["step_size"]
    acceptance, energies = torch.zeros((), device=x.device), energies_of(network, x, y)

    @torch.no_grad()
    def transition():
        before, momenta = [t.clone() for t in tensors], [torch.randn_like(t) for t in tensors]
        grads, start = energies(stack)
        first = start + kinetic(momenta)
        kick(momenta, grads, size / 2)
        for _ in range(HMC["leapfrog_steps"]):
            torch._foreach_add_(tensors, momenta, alpha=size)
            grads, end = energies(stack)
            kick(momenta, grads, size)
        kick(momenta, grads, -size / 2)
        chance = (first - end - kinetic(momenta)).exp().clamp(max=1)
        accepted = torch.rand_like(chance) < chance
        acceptance.copy_(chance.mean())
        for t, old in zip(tensors, before, strict=True):
            t.copy_(torch.where(accepted.view(-1, *(1,) * (t.ndim - 1)), t, old))

    moved = wrap(transition)

    def step():
        for _ in range(HMC["transitions"]):
            moved()

    return step, lambda: float(acceptance)


def blackjax_chains(network, stack, x, y):
    import gpu_jax

    return gpu_jax.chains(network, stack, x, y, HMC)


def chains(options, record):
    """Joint gradients: of all 1000 examples, for one chain."""
    torch.set_float32_matmul_precision("high")  # as JAX does
    network = models.mlp(64, [32], 10, activation=nn.Tanh).to(options.device)
    x = torch.randn(1000, 64, device=options.device)
    y = (x[:, :10] + x[:, 10:20]).argmax(1)
    ways = {"ours": our_chains, "torch.func": plain_chains, "blackjax": blackjax_chains}
    if options.device == "cuda":
        ways["torch.func, graph"] = functools.partial(plain_chains, wrap=Replay)
    for members in (4,) if options.quick else (4, 64, 1024):
        stack = P.populate(network, members, torch.Generator().manual_seed(0))
        for who, make in ways.items():
            try:
                step, acceptance = make(network, stack, x, y)
                times, calls = measured(step, [()], options.device, options.repeats)
            except Exception as error:
                record.value(who, reason(error), members=members)
                continue
            gradients = calls * HMC["transitions"] * HMC["leapfrog_steps"] * members
            record.times({who: times}, members=members, gradients=gradients)
            record.value(f"{who}: acceptance", acceptance(), members=members)


def main():
    made = parser(__doc__, repeats=3)
    made.add_argument("--quick", action="store_true", help="few chains only")
    options = parsed(made)
    warnings.simplefilter("ignore")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    record = Record(options)
    chains(options, record)
    record.write()


if __name__ == "__main__":
    main()
