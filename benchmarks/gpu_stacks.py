"""Work on stacks of networks on a device: chains of HMC, symmetries, processes, memory.

python benchmarks/gpu_stacks.py chains|symmetries|processes|memory [--device cuda] [--quick]
"""

import copy
import functools
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings

import lightning as L
import torch
from gpu_populations import Replay, measured, reason
from population import SGD, Clock
from record import Record, parsed, parser
from torch import nn
from torch.func import functional_call, grad_and_value
from turns import Times, taking_turns

from lightning_bnn import methods, models, samplers
from lightning_bnn import metrics as M
from lightning_bnn.modules import DeepEnsemble
from weightsym import canonicalise, discover, match, min_mass, permute, random_permutations
from weightsym import params as P

HMC = {"step_size": 2e-3, "leapfrog_steps": 20, "transitions": 5}
"""Of all samplers; a call is so many transitions."""


# ------------------------------------------------------------ chains
def our_chains(network, stack, x, y):
    method, run = methods.HMC(), methods.Run(network, num_data=len(y))
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


# ------------------------------------------------------------ symmetries
def symmetries(options, record):
    """What is done to a thousand networks, there and on the CPU; `discover` is work for CPUs."""
    members = 20 if options.quick else 1000
    wide = models.mlp(784, [128, 128], 10)
    for name, network, x in (
        ("OptuNet", models.optunet(), torch.randn(1, 1, 28, 28)),
        ("MLP 784-128-128-10", wide, torch.randn(1, 784)),
    ):
        sym, devices = discover(network, x), dict.fromkeys((options.device, "cpu"))
        for device in devices:
            stack = P.populate(copy.deepcopy(network).to(device), members)
            one = {n: t[0] for n, t in stack.items()}
            few = {n: t[:20] for n, t in stack.items()}
            calls = {
                "canonicalise": functools.partial(canonicalise, stack, sym),
                "min_mass": functools.partial(min_mass, stack, sym),
                "match of 20": functools.partial(match, few, one, sym),
                "discover": functools.partial(discover, copy.deepcopy(network).to(device), x),
                "MMD of 200 and 50": functools.partial(
                    M.mmd_table, {n: t[:200] for n, t in stack.items()},
                    {n: 1.1 * t[-50:] for n, t in stack.items()},
                ),
            }  # fmt: skip
            for who, call in calls.items():
                _timed_call(options, record, who, call, device, problem=f"{members} x {name}")
    resnet = models.resnet18(10)
    sym, params = discover(resnet, torch.randn(1, 3, 32, 32)), P.of(resnet)
    planted = permute(params, sym, random_permutations(sym))
    for device in devices:
        there, back = ({n: t.to(device) for n, t in p.items()} for p in (planted, params))
        call = functools.partial(match, there, back, sym)
        _timed_call(options, record, "match", call, device, problem="ResNet-18")


def _timed_call(options, record, who, call, device, **labels):
    try:
        rounds = 1 if options.quick or device == "cpu" or who == "match of 20" else 3
        (times,) = taking_turns({who: call}, rounds, device, warm=1).values()
    except Exception as error:
        record.value(who, reason(error), on=device, **labels)
    else:
        record.times({who: times}, on=device, **labels)
    record.write()


# ------------------------------------------------------------ processes
def processes(options, record):
    """An ensemble by one process, by DDP and by `members`, on every device that there is."""
    if options.strategy:
        _of_strategy(options)
        return
    there, after = torch.cuda.device_count() if options.device == "cuda" else 2, {}
    for strategy in ("auto", "ddp", "members"):
        with tempfile.TemporaryDirectory() as folder:
            words = ["--device", options.device, "--strategy", strategy, "--into", f"{folder}/end"]
            words += ["--quick"] * options.quick
            subprocess.run([sys.executable, __file__, "processes", *words], check=True)
            end = torch.load(f"{folder}/end")
        after[strategy], times = end["weights"], Times(1, options.device, *end["times"])
        devices = 1 if strategy == "auto" else there
        record.times({strategy: times}, devices=devices, steps=end["steps"])
        record.write()
    far = float((after["members"] - after["auto"]).abs().max())
    record.value("members: apart from one process", far, devices=there)


def _of_strategy(options):
    """What each process does, all of which are started with the words of the first."""
    devices = torch.cuda.device_count() if options.device == "cuda" else 2
    members, times = 64, Times(1, options.device)
    torch.manual_seed(0)
    x, y = torch.randn(6400, 64), torch.randint(10, (6400,))
    module = DeepEnsemble(models.mlp(64, [32], 10), members, optimizer=SGD, seed=0)
    trainer = L.Trainer(
        accelerator="gpu" if options.device == "cuda" else "cpu", strategy=options.strategy,
        devices=1 if options.strategy == "auto" else devices, callbacks=[Clock(times)],
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=options.strategy == "ddp",  # which shuffles
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(x, y)
    trainer.fit(module, torch.utils.data.DataLoader(data, 64))
    if trainer.is_global_zero:
        weights = P.ravel(module.member_stack(), stacked=True)[0].cpu()
        count = trainer.world_size if options.strategy == "ddp" else 1
        end = {"weights": weights, "times": (times.wall, times.cpu)}
        torch.save({**end, "steps": members * (trainer.global_step - 3) * count}, options.into)


# ------------------------------------------------------------ memory
def memory(options, record):
    """Peaks of what is allocated, beside the bytes of the weights."""
    mlp, device = models.mlp(64, [32], 10), options.device
    x, y = torch.randn(64, 64, device=device), torch.randint(10, (64,), device=device)
    for members in (10,) if options.quick else (1_000, 100_000):
        network = mlp.to(device)
        stack = P.populate(network, members)
        call = functools.partial(_trained, network, stack, x, y)
        _peak(options, record, f"{members} x MLP", stack, call)
        half = {n: t[: members // 2] for n, t in stack.items()}
        other = {n: 1.1 * t[-10:] for n, t in stack.items()}
        if members <= 1000:
            _peak(options, record, "MMD", half, functools.partial(M.mmd_table, half, other))
    images, labels = torch.randn(64, 1, 28, 28, device=device), y
    for members in (10,) if options.quick else (1_000, 100_000):
        network = models.optunet().to(device)
        stack = P.populate(network, members)
        call = functools.partial(_trained, network, stack, images, labels)
        _peak(options, record, f"{members} x OptuNet", stack, call)
    for hidden in (8,) if options.quick else (64, 256):
        network = models.mlp(64, [hidden], 10).to(device)
        call = functools.partial(_laplace, network, x, y)
        _peak(options, record, f"full Laplace, {hidden}", P.of(network), call)


def _trained(network, stack, x, y):
    method, run = methods.DeepEnsemble(), methods.Run(network)
    state = method.init(network, stack)
    optimizer = SGD(state.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        method.losses(state, methods.Batch((x,), y), run)["loss"].sum().backward()
        optimizer.step()


def _laplace(network, x, y):
    method, run = methods.Laplace("full", prior_precision=1.0), methods.Run(network, num_data=64)
    state = method.init(network, P.populate(network, 1))
    method.at_end(state, [methods.Batch((x,), y)], run)


def _peak(options, record, what, params, call):
    held = sum(t.nbytes for t in params.values())
    try:
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if options.device == "cuda" else 0
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() - before if options.device == "cuda" else 0
    except Exception as error:
        record.value(what, reason(error), weights=held)
    else:
        record.value(what, float(peak), weights=held, seconds=round(seconds, 3))
    record.write()


PARTS = {"chains": chains, "symmetries": symmetries, "processes": processes, "memory": memory}


def main():
    made = parser(__doc__, tuple(PARTS), repeats=3)
    made.add_argument("--quick", action="store_true", help="small problems only")
    made.add_argument("--strategy", help="of the processes, which start each other")
    made.add_argument("--into", help="file for what a strategy has ended with")
    options = parsed(made)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    record = Record(options)
    PARTS[options.part](options, record)
    record.write()


if __name__ == "__main__":
    main()
