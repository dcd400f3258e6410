"""Populations of 1 to 100 000 networks on a device: members x steps per second of every way.

python benchmarks/gpu_populations.py [--device cuda] [--quick] [--case 0]

Ways in torch are our stack, in a Trainer and without one, and twenty lines with `torch.func`; both
also replayed as CUDA graphs, and the latter compiled by `torch.compile`. In JAX it is `vmap` and
`jit`, 32 steps in one scan. All start from the same networks, and are compared after 32 steps.
"""

import functools
import importlib.util
import logging
import os
import time
import traceback
import warnings
from pathlib import Path

import torch
from population import SGD, Batches, cases, fitted
from record import Record, parsed, parser
from torch import nn
from torch.func import functional_call, grad
from turns import Times, synchronise

from lightning_bnn import likelihoods, methods
from lightning_bnn.modules import DeepEnsemble
from weightsym import params as P

SIZES = (1, 10, 100, 1_000, 10_000, 100_000)
COMPILED = (100, 10_000, 100_000)
"""Compilation takes seconds for each size, and convolutions of JAX half a minute."""
SLOW = ("torch.func", "torch.func, compiled", "torch.func, graph", "ours, no graphs")
"""Ways that the largest population is not trained by."""
COMPARED, STEPS = (1, 100), 32
"""Sizes whose networks are compared after so many steps."""
AT_ONCE = 10_000
"""Networks in a chunk of the plain ways."""
RATE, DECAY = 0.04, 2e-4
SECONDS = 0.08
"""Of a round, at least."""


# ------------------------------------------------------------ ways in torch
class Unknown(likelihoods.Categorical):
    """A likelihood of which no engine knows the formula."""


def ours(network, stack, has_graphs=True):
    likelihood = likelihoods.Categorical() if has_graphs else Unknown()
    method, run = methods.DeepEnsemble(), methods.Run(network, likelihood)
    state = method.init(network, stack)
    optimizer = SGD(state.parameters())

    def step(x, y):
        optimizer.zero_grad()
        method.losses(state, methods.Batch((x,), y), run)["loss"].sum().backward()
        optimizer.step()

    return step, lambda: P.ravel(state.stack(), stacked=True)[0].cpu()


def by_hand(network, stack, wrap=lambda update: update):
    """What one would write with `torch.func`."""

    def loss(member, x, y):
        return nn.functional.cross_entropy(functional_call(network, member, (x,)), y)

    gradients = torch.vmap(grad(loss), (0, None, None))

    @torch.no_grad()
    def update(chunk, x, y):
        grads = gradients(chunk, x, y)
        torch._foreach_mul_(list(chunk.values()), 1 - RATE * DECAY)
        torch._foreach_add_(list(chunk.values()), list(grads.values()), alpha=-RATE)

    stack, update = {n: t.clone() for n, t in stack.items()}, wrap(update)
    pieces = zip(*(t.split(AT_ONCE) for t in stack.values()), strict=True)
    chunks = [dict(zip(stack, piece, strict=True)) for piece in pieces]

    def step(x, y):
        for chunk in chunks:
            update(chunk, x, y)

    return step, lambda: P.ravel(stack, stacked=True)[0].cpu()


def compiled(network, stack):
    return by_hand(network, stack, functools.partial(torch.compile, dynamic=False))


def replayed(make):
    """The same step as a CUDA graph."""

    def made(network, stack):
        step, after = make(network, stack)
        return Replay(step), after

    return made


class Replay:
    """Captures a step when it is first called, and replays it on the batches that follow."""

    def __init__(self, step):
        self.step, self.graph, self.held = step, None, []

    def __call__(self, *batch):
        if self.graph is None:
            self.held = [t.clone() for t in batch]
            self._capture()
            return
        for held, tensor in zip(self.held, batch, strict=True):
            held.copy_(tensor)
        self.graph.replay()

    def _capture(self):
        """The first step runs on a stream of its own, as capturing needs it, the second is kept."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step(*self.held)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(*self.held)


def ways(device, network, members):
    found = {"ours": ours, "torch.func": by_hand, "torch.func, compiled": compiled}
    if device == "cuda":
        found |= {f"{who}, graph": replayed(make) for who, make in found.items()}
        found["ours, no graphs"] = functools.partial(ours, has_graphs=False)
    convolves = any(isinstance(m, nn.Conv2d) for m in network.modules())
    if importlib.util.find_spec("jax") and not (convolves and members not in (100, 10_000)):
        import gpu_jax

        found["JAX, scan"] = gpu_jax.scanned
    skipped = SLOW if members > AT_ONCE else ()
    return {
        who: make
        for who, make in found.items()
        if who not in skipped and ("compiled" not in who or members in COMPILED)
    }


# ------------------------------------------------------------ measuring
def measured(step, batches, device, repeats):
    """Rounds of as many calls as take long enough, and their number."""
    wait = getattr(step, "wait", lambda: None)
    start, k = time.perf_counter(), 0
    while k < 1 or (time.perf_counter() - start < SECONDS / 3 and k < 50):
        step(*batches[k % len(batches)])
        wait()
        synchronise(device)
        k += 1
    count = max(1, round(k * SECONDS / (time.perf_counter() - start)))
    times = Times(1, device)
    for _ in range(repeats):
        times.start()
        for k in range(count):
            step(*batches[k % len(batches)])
        wait()
        times.stop()
    return times, count


def reason(error):
    """Why something could not be measured, in a few words."""
    first = (str(error).strip().splitlines() or [""])[0]
    frame = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__} at {place}: {first}"[:160]


def of_a_size(options, record, name, network, batches, stack):
    """All ways with so many members: rates, and how far apart their networks are in the end."""
    after, labels = {}, {"network": name, "members": P.stack_size(stack)}
    for who, make in ways(options.device, network, labels["members"]).items():
        try:
            after |= of_a_way(options, record, who, make(network, stack), batches, labels)
        except Exception as error:
            record.value(who, reason(error), **labels)
        if options.device == "cuda":
            torch.cuda.empty_cache()
    for who, weights in after.items():
        far = (weights - next(iter(after.values()))).abs().max()
        record.value(f"{who}: apart", float(far), **labels)


def of_a_way(options, record, who, made, batches, labels):
    """The rate of one of them, and its networks after some steps where they are compared."""
    (step, weights), after = made, {}
    each, compared = getattr(step, "steps", 1), labels["members"] in COMPARED
    for _ in range(STEPS // each if compared else 1):
        step(*batches[0])
    if compared:
        after[who] = weights()
    times, calls = measured(step, batches, options.device, options.repeats)
    record.times({who: times}, **labels, steps=calls * each * labels["members"])
    return after


def in_trainer(options, record, name, network, shape, classes, members):
    count, repeats = (23, options.repeats) if members < AT_ONCE else (6, 1)
    times, batches = Times(1, options.device), Batches(shape, classes, count, options.device)
    try:
        for _ in range(repeats):
            fitted(DeepEnsemble(network, members, optimizer=SGD), batches, times)
        labels = {"network": name, "members": members, "steps": (len(batches) - 3) * members}
        record.times({"ours, in a Trainer": times}, **labels)
    except Exception as error:
        record.value("ours, in a Trainer", reason(error), network=name, members=members)


def main():
    made = parser(__doc__, repeats=3)
    made.add_argument("--quick", action="store_true", help="only one and a hundred members")
    made.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    made.add_argument("--case", type=int, nargs="+", default=(0, 1, 2), help="networks")
    options = parsed(made)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    torch.set_float32_matmul_precision("high")  # as JAX does, and cuDNN
    sizes = (1, 100) if options.quick else options.sizes
    record = Record(options)
    for case in options.case:
        name, network, shape, classes, _ = [*cases()][case]
        network = network.to(options.device)
        batches = Batches(shape, classes, 8, options.device).batches
        for members in sizes:
            stack = P.populate(network, members, torch.Generator().manual_seed(0))
            torch._dynamo.reset()
            of_a_size(options, record, name, network, batches, stack)
            in_trainer(options, record, name, network, shape, classes, members)
            record.write()


if __name__ == "__main__":
    main()
