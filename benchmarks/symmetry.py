"""Speed of the symmetry core, against cvxpy and the `rebasin` package, interleaved in one run.

Prints medians and the ratio of each pair of neighbouring runs, with the number of threads.
"""

import argparse
import copy
import importlib.util
import statistics
import time
import warnings

import torch
import torchvision
from torch import nn

from lightning_bnn import models
from lightning_bnn import params as P
from lightning_bnn.symmetry import (
    canonicalise,
    discover,
    match,
    min_mass,
    permute,
    random_permutations,
    sort_permutations,
    verify,
)


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median(function, repeats=9):
    function()
    return statistics.median(seconds(function) for _ in range(repeats))


def pair(ours, theirs, repeats=3):
    """Both in turn: medians, and the median ratio of neighbours."""
    times = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    return (
        *(statistics.median(t) for t in zip(*times, strict=True)),
        statistics.median(b / a for a, b in times),
    )


def line(name, value, goal=""):
    print(f"{name:<66}{value:>24}   {goal}", flush=True)


def perceptron():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))


def discovery():
    for name, goal in (("resnet18", "<= 1.5 s"), ("densenet121", "<= 5 s")):
        model = getattr(torchvision.models, name)().eval()
        x = torch.randn(1, 3, 224, 224)
        first = seconds(lambda m=model, x=x: discover(m, x))
        again = statistics.median(seconds(lambda m=model, x=x: discover(m, x)) for _ in range(3))
        error = discover(model, x).error
        line(f"discover {name} at 224 px (first call)", f"{again:.2f} s ({first:.2f} s)", goal)
        line(f"   error of a random group element, float64: {error:.0e}", "")


def masses():
    net = models.mlp(784, [128, 128], 10).double()
    sym, params = discover(net, torch.randn(1, 784)), P.of(net)
    found = min_mass(params, sym)
    weights = sum(params[n].numel() for n in sym.weights)
    threads = torch.get_num_threads()
    balance = {}
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        balance[count] = median(lambda: min_mass(params, sym), 51)
    _, oracle, _ = pair(
        lambda: min_mass(params, sym), lambda: min_mass(params, sym, "cvxpy"), repeats=3
    )
    text = ", ".join(f"{1e3 * t:.1f} ms ({n})" for n, t in balance.items())
    line(f"min_mass, {weights} weights: balance (threads)", text)
    line("   cvxpy, one exponential per weight", f"{oracle:.1f} s")
    text = ", ".join(f"{oracle / t:.0f} x ({n})" for n, t in balance.items())
    line("   cvxpy / balance (threads)", text, ">= 1000 x")
    other = min_mass(params, sym, "cvxpy").minimum
    gap = float((found.minimum - other).abs() / other)
    line("   certified gap; relative difference to cvxpy", f"{float(found.gap):.0e}; {gap:.0e}")
    for name, goal in (("carrier", "<= 20 ms"), ("eval", "")):
        resnet = torchvision.models.resnet18()
        sym, params = discover(resnet, torch.randn(1, 3, 64, 64), batch_norm=name), P.of(resnet)
        time_ = median(lambda s=sym, p=params: min_mass(p, s), 7)
        line(
            f"min_mass resnet18, batch_norm={name!r}, {sym.scaling_dof} scales",
            f"{1e3 * time_:.1f} ms",
            goal,
        )
    optunet = models.optunet()
    sym, stack = discover(optunet, torch.randn(1, 1, 28, 28)), P.populate(optunet, 1000)
    line(
        "min_mass 1000 OptuNets", f"{1e3 * median(lambda: min_mass(stack, sym)):.1f} ms", "<= 20 ms"
    )


def canonical_forms():
    net = perceptron()
    sym, stack = discover(net, torch.randn(1, 2)), P.populate(net, 10_000)
    time_ = median(lambda: canonicalise(stack, sym, "unit-norm", "max"), 21)
    line("canonicalise 10 000 two-neuron perceptrons", f"{1e3 * time_:.1f} ms", "<= 5 ms")


def removal_table(largest):
    print("\nremoval of symmetries, MLPs of n weights, milliseconds")
    names = ("sorting", "normalising", "balancing", "cvxpy", "cvxpy / balancing")
    print(f"{'weights':>12}" + "".join(f"{name:>18}" for name in names))
    for power in range(3, largest + 1):
        width = max(2, int((10**power / 3) ** 0.5))
        net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())))
        sym = discover(net[:5], torch.randn(1, width))
        params = P.of(net[:5])
        weights = sum(params[n].numel() for n in sym.weights)
        repeats = 9 if power < 7 else 3

        def sort(p=params, s=sym):
            permute(p, s, sort_permutations(p, s, "max"))

        row = [median(sort, repeats)]
        row += [median(lambda p=params, s=sym: canonicalise(p, s, "unit-norm", None), repeats)]
        row += [median(lambda p=params, s=sym: min_mass(p, s), repeats)]
        text = f"{weights:>12}" + "".join(f"{1e3 * t:>18.2f}" for t in row)
        if power <= 5:
            oracle = seconds(lambda p=params, s=sym: min_mass(p, s, "cvxpy"))
            text += f"{1e3 * oracle:>18.0f}{oracle / row[2]:>16.0f} x"
        print(text, flush=True)
    print()


def matching():
    torch.manual_seed(0)
    net, x = torchvision.models.resnet18().eval(), torch.randn(2, 3, 64, 64)
    sym, params = discover(net, x), P.of(net)
    generator = torch.Generator().manual_seed(1)
    noisy = {
        n: t + 0.5 * t.std() * torch.randn(t.shape, generator=generator)
        if t.is_floating_point() and t.numel() > 1 and "running" not in n
        else t
        for n, t in params.items()
    }
    planted = permute(noisy, sym, random_permutations(sym, generator))
    found = permute(planted, sym, match(planted, params, sym))
    right = sum(bool(torch.equal(found[n], noisy[n])) for n in noisy)
    line(
        "match resnet18, planted permutation + 50 % noise: tensors recovered",
        f"{right}/{len(noisy)}",
        "all",
    )
    ours = median(lambda: match(planted, params, sym), 5)
    line("   time", f"{ours:.2f} s", "<= 1 s")
    if importlib.util.find_spec("rebasin") is None:
        line("   rebasin is not installed: `make bench` installs it", "")
        return
    from rebasin import PermutationCoordinateDescent

    def theirs():
        other = copy.deepcopy(net)
        other.load_state_dict(planted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PermutationCoordinateDescent(net, other, x).rebasin()

    _, rebasin, ratio = pair(lambda: match(planted, params, sym), theirs)
    line("   rebasin 0.0.47", f"{rebasin:.2f} s")
    line("   rebasin / match", f"{ratio:.1f} x", ">= 4 x")
    line("   error of a random group element (float64)", f"{verify(net, sym, x):.0e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--largest", type=int, default=8, help="decimal exponent of the largest network"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"threads: {options.threads}, torch {torch.__version__}")
    discovery()
    masses()
    canonical_forms()
    removal_table(options.largest)
    matching()


if __name__ == "__main__":
    main()
