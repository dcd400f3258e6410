"""Our functions beside plain ways to the same result: how many times as much work are those?

python benchmarks/ratios.py [mmd match ...]

Small versions of what the other scripts measure, a second or two each: CPU time on one thread, in
turns, the fastest round of each. `make bench ONLY=ratios` records them.
"""

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import vi
from record import Record, parsed, parser
from scipy.optimize import minimize
from scipy.spatial.distance import cdist, pdist
from torch import Tensor, nn
from torch.func import functional_call
from torchvision.models.resnet import BasicBlock
from turns import Contestants, taking_turns

from lightning_bnn import metrics as M
from lightning_bnn import models, samplers
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.posteriors.kronecker import kronecker_factors
from weightsym import (
    UnitOrders,
    canonicalise,
    discover,
    match,
    min_mass,
    order_change,
    random_permutations,
    ranks,
)
from weightsym import params as P
from weightsym import permute as permuted
from weightsym.discovery.cache import forget

SECONDS, ROUNDS = 1.5, 5
"""CPU time that a ratio may take at least, and the rounds that it takes in any case."""


class Ratio(NamedTuple):
    """What is compared, and what makes the two ways, ``ours`` and ``theirs``, to one result."""

    said: str
    ways: Callable[[], Any]


RATIOS: dict[str, Ratio] = {}


def compared(said: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter two ways to one result under the name of the function that returns them."""

    def enter(ways: Callable[[], Any]) -> Callable[[], Any]:
        RATIOS[ways.__name__] = Ratio(said, ways)
        return ways

    return enter


def silent(*_: Any) -> None:
    """Results that differ."""


# ------------------------------------------------------------ stacks
@compared("`P.apply` of 256 perceptrons; a loop over networks")
def predict_perceptrons():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    return _applied(net, torch.randn(10, 2), 256, lambda out: out)


@compared("gradients of 16 OptuNets; a loop over networks")
def train_optunets():
    return _applied(models.optunet(), torch.randn(64, 1, 28, 28), 16, _gradient)


@compared("gradients of 64 MLPs of 2410 weights; a loop over networks")
def train_mlps():
    return _applied(models.mlp(64, [32], 10), torch.randn(64, 64), 64, _gradient)


def _applied(net, x, members, use):
    stack = {n: t.requires_grad_() for n, t in P.populate(net, members).items()}
    networks = P.unstack({n: t.detach() for n, t in stack.items()})
    for network in networks:
        for t in network.values():
            t.requires_grad_()
    return {
        "ours": lambda: use(P.apply(net, stack, x)),
        "theirs": lambda: torch.stack([use(functional_call(net, n, (x,))) for n in networks]),
    }


def _gradient(outputs: Tensor) -> Tensor:
    outputs.square().sum().backward()
    return outputs.detach()


# ------------------------------------------------------------ metrics
@compared("MMD of 200 and 50 networks of 4000 weights; scipy and numpy")
def mmd():
    x, y = torch.randn(200, 4000), 1.05 * torch.randn(50, 4000)
    return {
        "ours": lambda: M.mmd_table({"w": x}, {"w": y}).values[0],
        "theirs": lambda: _mmd_by_scipy(x.double().numpy(), y.double().numpy()),
    }


def _mmd_by_scipy(x, y):
    """Distances once, then twenty kernels."""
    values = []
    for norm, power in (("cityblock", 1), ("euclidean", 2)):
        xx, xy, yy = pdist(x, norm), cdist(x, y, norm), pdist(y, norm)
        for width in M.KernelGrid().bandwidths(torch.from_numpy(xy)).numpy():
            k = [np.exp(-((d / width) ** power)).mean() for d in (xx, xy, yy)]
            values.append(k[0] + k[2] - 2 * k[1])
    return np.array(values)


@compared("ECE of twenty batches of 512; a loop over bins")
def ece():
    probs = [(3 * torch.randn(512, 10)).softmax(-1) for _ in range(20)]
    batches = [(p, torch.randint(10, (512,))) for p in probs]
    metric = M.ECE()

    def ours():
        metric.reset()
        for batch in batches:
            metric.update(*batch)
        return metric.compute()

    return {"ours": ours, "theirs": lambda: _ece_by_hand(batches)}


def _ece_by_hand(batches):
    probs, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    sure, right = probs.max(-1)
    right, edges, error = (right == labels).double(), torch.linspace(0, 1, 16), 0.0
    for low, high in itertools.pairwise(edges):
        inside = (sure > low) & (sure <= high)
        if inside.any():
            gap = right[inside].mean() - sure[inside].double().mean()
            error += inside.double().mean() * gap.abs()
    return error


@compared("Kronecker factors of a small CNN, 256 images; curvlinops in laplace-torch")
def kronecker():
    from laplace.curvature import CurvlinopsGGN

    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(784, 10)
    )
    x, y = torch.randn(256, 3, 32, 32), torch.randint(10, (256,))
    backend = CurvlinopsGGN(net, "classification")

    def ours():
        blocks = kronecker_factors(net, [(x, y)], Categorical())
        return sum(block.eigenvalues.sum() for block in blocks)

    def theirs():
        factors = backend.kron(x, y, N=len(x))[1].decompose().eigenvalues
        return sum(torch.stack([v.sum() for v in values]).prod() for values in factors)

    return {"ours": ours, "theirs": theirs}


@compared("AUROC of 20 000 scores; scikit-learn")
def auroc():
    from sklearn.metrics import roc_auc_score

    scores, ood = torch.rand(20_000), torch.rand(20_000) < 0.3
    metric = M.AUROC()

    def ours():
        metric.reset()
        metric.update(scores, ood)
        return metric.compute()

    return {
        "ours": ours,
        "theirs": lambda: roc_auc_score(ood.numpy(), scores.numpy()),
    }


@compared("Kendall's tau of the groups of ResNet-18; scipy, group by group")
def tau():
    from scipy.stats import kendalltau

    net = models.resnet18(10)
    orders = UnitOrders(discover(net.eval(), torch.randn(2, 3, 32, 32)))
    params = P.of(net)
    moved = {
        k: v + 0.01 * torch.randn_like(v) if P.is_weight(k, v) else v for k, v in params.items()
    }
    before, after, sizes = orders(params), orders(moved), orders.sizes.tolist()
    both = [
        (ranks(before[g, :n]).numpy(), ranks(after[g, :n]).numpy()) for g, n in enumerate(sizes)
    ]
    return {
        "ours": lambda: order_change(before, after, orders.sizes).tau,
        "theirs": lambda: torch.tensor([kendalltau(a, b).statistic for a, b in both]),
    }


# ------------------------------------------------------------ symmetries
@compared("the first `discover` of two residual blocks; the export of their graph alone")
def discovery():
    blocks = [BasicBlock(16, 16), BasicBlock(16, 16)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    net, x = nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, *tail).eval(), torch.randn(2, 3, 16, 16)
    return {
        "ours": lambda: silent(forget(), discover(net, x)),
        "theirs": lambda: silent(torch.export.export(net, (x,))),
    }


@compared("`canonicalise` of 50 OptuNets; one by one")
def canonical():
    net = models.optunet()
    sym, stack = discover(net, torch.randn(2, 1, 28, 28)), P.populate(net, 50)
    networks = P.unstack(stack)
    return {
        "ours": lambda: canonicalise(stack, sym)["0.weight"],
        "theirs": lambda: P.stack([canonicalise(n, sym) for n in networks])["0.weight"],
    }


def _least_mass(*hidden):
    """Enter a network with its hidden layers."""

    def ways():
        net = models.mlp(10, hidden, 3)
        sym, params = discover(net, torch.randn(4, 10)), P.of(net)
        return {
            "ours": lambda: min_mass(params, sym).minimum,
            "theirs": lambda: _mass_by_hand(params),
        }

    ways.__name__ = "mass_" + "_".join(map(str, hidden))
    shape = "-".join(map(str, (10, *hidden, 3)))
    compared(f"`min_mass` of an MLP {shape}; scipy's L-BFGS-B in log scales")(ways)


for _hidden in ((16, 16), (64, 64, 64), (1024, 1024)):
    _least_mass(*_hidden)


def _mass_by_hand(params):
    squares = [w.double().numpy() ** 2 for w in params.values() if w.ndim == 2]
    first, last, between = squares[0].sum(1), squares[-1].sum(0), squares[1:-1]
    ends = np.cumsum([m.shape[1] for m in squares[1:]])

    def mass(u):
        up = np.split(np.exp(2 * u), ends[:-1])
        down = [1 / factors for factors in up]
        triples = [*zip(up[1:], between, down, strict=False)]
        enters = [first * up[0], *(rows * (m @ columns) for rows, m, columns in triples)]
        leaves = [*(columns * (rows @ m) for rows, m, columns in triples), last * down[-1]]
        gradient = 2 * (np.concatenate(enters) - np.concatenate(leaves))
        return sum(terms.sum() for terms in (*enters, leaves[-1])), gradient

    options = {"ftol": 1e-11, "gtol": 1e-7}
    return minimize(mass, np.zeros(ends[-1]), jac=True, method="L-BFGS-B", options=options).fun


@compared("`match` of MLPs 784-256-256-10; numpy, layer by layer")
def matching():
    net = models.mlp(784, [256, 256], 10)
    sym, a = discover(net, torch.randn(2, 784)), P.of(net)
    b = permuted(a, sym, random_permutations(sym, torch.Generator().manual_seed(0)))

    def ours():
        return permuted(b, sym, match(b, a, sym, method="ascent"))["3.weight"]

    return {"ours": ours, "theirs": lambda: _matched_by_hand(a, b)}


def _matched_by_hand(a, b):
    """Coordinate descent over the two hidden layers of an MLP, until nothing moves."""
    from scipy.optimize import linear_sum_assignment

    a, b = ({n: t.double().numpy() for n, t in w.items()} for w in (a, b))
    layers, previous = (("1", "3"), ("3", "5")), None
    while previous is None or any((previous[n] != b[n]).any() for n in b):
        previous = dict(b)
        for enters, leaves in layers:
            similar = a[f"{enters}.weight"] @ b[f"{enters}.weight"].T
            similar += np.outer(a[f"{enters}.bias"], b[f"{enters}.bias"])
            similar += a[f"{leaves}.weight"].T @ b[f"{leaves}.weight"]
            order = linear_sum_assignment(similar, maximize=True)[1]
            b[f"{enters}.weight"] = b[f"{enters}.weight"][order]
            b[f"{enters}.bias"] = b[f"{enters}.bias"][order]
            b[f"{leaves}.weight"] = b[f"{leaves}.weight"][:, order]
    return torch.from_numpy(b["3.weight"]).float()


# ------------------------------------------------------------ training
@compared("a step of `MFVI`, 784-512-512-10; the deterministic step")
def mfvi():
    options = Namespace(batch=128, device="cpu")
    step, plain = vi.ours(options), vi.deterministic(options)
    x, y = vi.batch(options)
    return {
        "ours": lambda: vi.several(step, x, y),
        "theirs": lambda: vi.several(plain, x, y),
    }


@compared("an update of `SGHMC`, 669 706 weights; SGD with momentum and one normal draw")
def sghmc():
    steps = []
    for make in (
        lambda p: samplers.SGHMC(p, lr=1e-3, num_data=60_000, prior_precision=1.0),
        lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, weight_decay=1e-5, foreach=True),
    ):
        net = models.mlp(784, [512, 512], 10)
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        steps.append(make(net.parameters()).step)
    noise = torch.empty(sum(p.numel() for p in net.parameters()))
    return {
        "ours": steps[0],
        "theirs": lambda: silent(steps[1](), noise.normal_()),
    }


# ------------------------------------------------------------ disks
@compared("one layer of 60 OptuNets in a bank; `torch.load` of 60 files")
def bank():
    folder = tempfile.TemporaryDirectory()
    network, store = P.of(models.optunet()), CheckpointBank(f"{folder.name}/bank")
    files = [Path(folder.name) / f"{k}.pt" for k in range(60)]
    for file in files:
        store.append(network)
        torch.save(network, file)
    store.close()
    return {
        "ours": lambda folder=folder: store.layer("0.weight"),  # as long as the folder is there
        "theirs": lambda: torch.stack([torch.load(f)["0.weight"] for f in files]),
    }


# ------------------------------------------------------------ measuring
def ratio(ways: Contestants) -> float:
    """Theirs over ours, the fastest rounds of both."""
    times = measured(ways)
    return min(times["theirs"]) / min(times["ours"])


def measured(ways: Contestants) -> dict[str, list[float]]:
    """CPU seconds of the rounds of both, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = taking_turns(ways, 1, warm=1)
        round_ = sum(times.cpu[0] for times in first.values())
        rounds = max(ROUNDS, min(500, int(SECONDS / max(round_, 1e-4))))
        return {name: t.cpu for name, t in taking_turns(ways, rounds, warm=0).items()}
    finally:
        torch.set_num_threads(threads)


def ways_of(name: str) -> dict[str, Callable[[], Any]]:
    """Two ways to one result."""
    torch.manual_seed(0)
    return RATIOS[name].ways()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", choices=[*RATIOS, []], metavar="NAME")
    options = parsed(made)
    record = Record(options)
    for name in options.names or RATIOS:
        record.value(name, ratio(ways_of(name)), said=RATIOS[name].said)
    record.write()


if __name__ == "__main__":
    main()
