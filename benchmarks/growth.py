"""How cost grows: CPU time at growing sizes, up to where memory ends, and the exponents.

python benchmarks/growth.py [MFVI discover ...]

Each size is the least of three calls. An exponent is the slope of a line through the logarithms of
the last three. What cannot fit into memory is refused before it is tried.
"""

import torch
from record import Record, parsed, parser
from samplers import OurChains
from vi import adam

from lightning_bnn import likelihoods, methods, models
from lightning_bnn import metrics as M
from lightning_bnn.modules import MFVI
from lightning_bnn.posteriors.curvature import curvature
from weightsym import UnitOrders, discover, match, min_mass, order_change
from weightsym import params as P
from weightsym.discovery.cache import forget

HUGE = 10**8
"""Of what is refused, only the number is made."""


def population(members=64, width=32, depth=1):
    """A gradient of stacked perceptrons, batches of 64."""
    network, x, y = perceptron(64, width, depth), torch.randn(64, 64), torch.arange(64) % 10
    stack = {n: t.requires_grad_() for n, t in P.populate(network, members).items()}
    run = methods.Run(network)
    return lambda: run.losses(stack, methods.Batch((x,), y)).sum().backward()


def mfvi(members=1, width=64, depth=2):
    """A step with Adam, batches of 128."""
    network, x, y = perceptron(784, width, depth), torch.randn(128, 784), torch.arange(128) % 10
    module = MFVI(network, num_data=60_000, members=members)
    step = adam(lambda x, y: module.losses((x,), y)["loss"].sum(), module.parameters())
    return lambda: step(x, y)


def hmc(chains=4, width=10, depth=1):
    """A transition of ten gradients, 246 examples of six features."""
    x, y = torch.randn(246, 6), torch.randn(246, 1)
    network = models.mlp(6, [width] * depth, 1, torch.nn.Tanh)
    start = P.populate(network, chains)
    return OurChains("HMC", (network, x, y, x), start, leapfrog_steps=10).move


def mmd(networks=50, weights=1000):
    """Of a set of networks against half as many."""
    huge = networks >= HUGE
    x = torch.zeros(1, 1).expand(networks, 1) if huge else torch.randn(networks, weights)
    return lambda: M.mmd_table({"w": x}, {"w": x[: networks // 2] + 0.1 * (not huge)})


def laplace(width=8):
    """The full curvature of a perceptron, of 200 examples."""
    network = perceptron(64, width, 1)
    data = [(torch.randn(200, 64), torch.arange(200) % 10)]
    return lambda: curvature(network, P.of(network), data, likelihoods.Categorical(), "full")


def found(width=32, depth=2):
    """`discover` of a perceptron, which remembers nothing of earlier calls."""
    network, x = perceptron(64, width, depth), torch.randn(2, 64)
    return lambda: (forget(), discover(network, x))


def symmetric(width, depth, members=1):
    network = perceptron(64, width, depth)
    stack = P.populate(network, members) if members > 1 else P.of(network)
    return discover(network, torch.randn(2, 64)), stack, P.of(perceptron(64, width, depth))


def least(width=32, depth=2, members=1):
    sym, stack, _ = symmetric(width, depth, members)
    return lambda: min_mass(stack, sym)


def matched(width=32, depth=2):
    sym, a, b = symmetric(width, depth)
    return lambda: match(b, a, sym)


def tau(width=32, depth=2):
    """What `PermutationTau` does for one step."""
    sym, a, b = symmetric(width, depth)
    orders = UnitOrders(sym)
    return lambda: order_change(orders(a), orders(b), orders.sizes)


def perceptron(inputs, width, depth):
    return models.mlp(inputs, [width] * depth, 10)


WIDTHS, DEPTHS = (32, 128, 512, 2048), (2, 4, 8, 16, 32)
CURVES = {
    "population": (population, {"members": (16, 64, 256, 1024, HUGE * 10), "width": WIDTHS[:3]}),
    "MFVI": (mfvi, {"members": (1, 4, 16, 64), "width": WIDTHS, "depth": DEPTHS}),
    "HMC": (hmc, {"chains": (4, 16, 64, 256), "width": (10, 40, 160, 640), "depth": DEPTHS[:4]}),
    "mmd_table": (mmd, {"networks": (100, 200, 400, 800, HUGE), "weights": (10**4, 10**5, 10**6)}),
    "full Laplace": (laplace, {"width": (4, 8, 16, 1024)}),
    "discover": (found, {"width": WIDTHS, "depth": DEPTHS}),
    "min_mass": (least, {"members": (1, 10, 100, 1000), "width": WIDTHS, "depth": DEPTHS}),
    "match": (matched, {"width": WIDTHS[:3], "depth": DEPTHS}),
    "PermutationTau": (tau, {"width": WIDTHS, "depth": DEPTHS}),
}


def main():
    made = parser(__doc__)
    made.add_argument("names", nargs="*", choices=[*CURVES, []], metavar="NAME")
    options = parsed(made)
    record = Record(options)
    for name in options.names or CURVES:
        make, curves = CURVES[name]
        for by, sizes in curves.items():
            record.growth(name, by, sizes, lambda size, make=make, by=by: make(**{by: size}))
    record.write()


if __name__ == "__main__":
    main()
