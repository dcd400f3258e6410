"""How time grows: log-log slopes of CPU time in the size of the work, all on one thread.

python benchmarks/growth.py [--only NAME ...]

Every line doubles one size and keeps the others. The smallest sizes are those from which the size
outweighs what each call costs in any case.
"""

from collections.abc import Callable

import torch
from record import Record, parsed, parser
from torch import nn
from turns import Times

from lightning_bnn import metrics as M
from lightning_bnn import models, samplers
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.modules import MFVI, DeepEnsemble, SymmetrizedVI
from lightning_bnn.posteriors.curvature import curvature
from weightsym import canonicalise, discover, match, min_mass, permute, random_permutations
from weightsym import params as P
from weightsym.discovery.cache import forget

Work = Callable[[int], Callable[[], object]]
GROWTH: dict[str, tuple[str, str, int, tuple[int, ...], Work]] = {}


def grows(said: str, size: str, limit: int, *sizes: int) -> Callable[[Work], Work]:
    """Enter a function of a size that returns what is timed, under its name.

    Args:
        said: what is timed.
        size: what is doubled.
        limit: the exponent of the arithmetic.
        *sizes: the numbers.
    """

    def enter(work: Work) -> Work:
        GROWTH[work.__name__] = said, size, limit, sizes, work
        return work

    return enter


def pair(width: int, layers: int):
    """A network, a permuted copy with noise, and their symmetries."""
    net = models.mlp(16, [width] * layers, 10)
    sym, params = discover(net, torch.randn(2, 16)), P.of(net)
    moved = permute(params, sym, random_permutations(sym, torch.Generator().manual_seed(0)))
    return sym, params, {n: t + 0.2 * t.std() * torch.randn_like(t) for n, t in moved.items()}


# ------------------------------------------------------------ symmetries
@grows("`discover` of residual layers", "layers", 1, 8, 16, 32)
def discover_layers(layers):
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    blocks = [Residual(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(layers)]
    net, x = nn.Sequential(*blocks, nn.Linear(16, 4)), torch.randn(2, 16)
    return lambda: (forget(), discover(net, x))


@grows("`match` by ascent", "layers", 1, 8, 16, 32, 64)
def match_layers(layers):
    sym, params, moved = pair(64, layers)
    return lambda: match(moved, params, sym, method="ascent")


@grows("`match` by ascent", "width", 3, 256, 512, 1024)
def match_width(width):
    sym, params, moved = pair(width, 2)
    return lambda: match(moved, params, sym, method="ascent")


@grows("`min_mass`", "layers", 1, 8, 16, 32)
def mass_layers(layers):
    sym, params, _ = pair(64, layers)
    return lambda: min_mass(params, sym)


@grows("`min_mass`", "width", 2, 512, 1024, 2048)
def mass_width(width):
    sym, params, _ = pair(width, 2)
    return lambda: min_mass(params, sym)


@grows("`canonicalise` of MLPs", "members", 1, 256, 512, 1024)
def canonical_members(members):
    net = models.mlp(16, [32, 32], 10)
    sym, stack = discover(net, torch.randn(2, 16)), P.populate(net, members)
    return lambda: canonicalise(stack, sym)


# ------------------------------------------------------------ posteriors
def training_step(module, optimizer, x, y):
    """Losses, gradients and an update."""
    optimizer = optimizer(module.parameters())

    def step():
        optimizer.zero_grad()
        module.losses((x,), y)["loss"].sum().backward()
        optimizer.step()

    return step


def digits(rows: int):
    return torch.randn(rows, 64), torch.randint(10, (rows,))


@grows("a step of `DeepEnsemble`", "members", 1, 64, 128, 256)
def ensemble_members(members):
    module = DeepEnsemble(models.mlp(64, [32], 10), members)
    return training_step(module, lambda p: torch.optim.SGD(p, 0.1), *digits(64))


@grows("a step of `MFVI`, square layers", "parameters", 1, 512, 724, 1024, 1448)
def mfvi_parameters(width):
    module = MFVI(models.mlp(64, [width, width], 10), num_data=1000)
    return training_step(module, torch.optim.Adam, *digits(64))


@grows("a step of `SymmetrizedVI`, units alike", "width", 3, 256, 512, 1024)
def symmetrized_width(width):
    module = SymmetrizedVI(models.mlp(64, [width, width], 10), num_data=1000, every=1)
    module.example_input_array = digits(2)[0]
    with torch.no_grad():
        module.state.log_std.fill_(0.0)
    return training_step(module, torch.optim.Adam, *digits(64))


def transition(chains: int, rows: int):
    """A trajectory of HMC without a Trainer."""
    from lightning_bnn import methods

    net, (x, y) = models.mlp(64, [16], 10), digits(rows)
    method, run = methods.HamiltonianMonteCarlo(), methods.Run(net, num_data=rows)
    state = method.init(net, P.populate(net, chains))
    sampler = samplers.HMC(state.parameters(), step_size=1e-3, leapfrog_steps=10)
    fit = methods.Fit(optimizer=sampler, batches=lambda: [methods.Batch((x,), y)])
    method.before_fit(state, fit, run)
    return lambda: method.transition(state, run, sampler.step)


@grows("a transition of `HMC`", "chains", 1, 16, 32, 64)
def hmc_chains(chains):
    return transition(chains, 256)


@grows("a transition of `HMC`", "data", 1, 512, 1024, 2048)
def hmc_data(rows):
    return transition(4, rows)


@grows("Kronecker factors", "data", 1, 1024, 2048, 4096)
def kronecker_data(rows):
    net, data = models.mlp(64, [64], 10), [digits(rows)]
    return lambda: curvature(net, P.of(net), data, Categorical())


# ------------------------------------------------------------ metrics
@grows("`mmd_table`", "parameters", 1, 4000, 8000, 16000)
def mmd_parameters(size):
    x, y = torch.randn(100, size), torch.randn(50, size)
    return lambda: M.mmd_table({"w": x}, {"w": y})


@grows("`mmd_table`", "networks", 2, 100, 200, 400)
def mmd_networks(count):
    x, y = torch.randn(count, 2000), torch.randn(count, 2000)
    return lambda: M.mmd_table({"w": x}, {"w": y})


@grows("ECE of one batch", "data", 1, 2**14, 2**15, 2**16)
def ece_data(rows):
    probs, labels = torch.randn(rows, 10).softmax(-1), torch.randint(10, (rows,))
    return lambda: M.ece(probs, labels)


def main() -> None:
    made = parser(__doc__, repeats=3)
    made.add_argument("--only", nargs="+", default=[], choices=GROWTH, metavar="NAME")
    options = parsed(made)
    record = Record(options)
    for name in options.only or GROWTH:
        said, size, limit, sizes, work = GROWTH[name]
        for number in sizes:
            torch.manual_seed(0)
            call, times = work(number), Times()
            call()
            for _ in range(options.repeats):
                times.add(call)
            weights = number**2 if name == "mfvi_parameters" else number
            record.value(said, min(times.cpu), size=size, number=weights, limit=limit)
    record.write()


if __name__ == "__main__":
    main()
