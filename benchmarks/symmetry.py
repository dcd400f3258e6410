"""Speed of the symmetry core, and of cvxpy and the `rebasin` package.

python benchmarks/symmetry.py masses|matching
"""

import copy
import functools
import importlib.util
import warnings

import cvxpy
import torch
import torchvision
from record import Record, parsed, parser
from turns import taking_turns

from lightning_bnn import models
from weightsym import (
    discover,
    match,
    min_mass,
    permute,
    random_permutations,
    rescale,
    verify,
)
from weightsym import params as P


def masses(options, record):
    net = models.mlp(784, [128, 128], 10).double()
    sym, params = discover(net, torch.randn(1, 784)), P.of(net)
    record.value("weights", sum(params[n].numel() for n in sym.weights))
    balance = taking_turns({"balancing": lambda: min_mass(params, sym)}, 51)
    record.times({**balance, **by_cvxpy(params, sym)}, problem="MLP")
    found, other = min_mass(params, sym), least_by_cvxpy(params, sym)
    record.value("certified gap", float(found.gap))
    record.value("difference", float((found.minimum - other).abs() / other))
    for name in ("carrier", "eval"):
        resnet = torchvision.models.resnet18()
        sym, params = discover(resnet, torch.randn(1, 3, 64, 64), batch_norm=name), P.of(resnet)
        record.value("scales", sym.scaling_dof, problem=f"ResNet-18, {name}")
        calls = {"balancing": functools.partial(min_mass, params, sym)}
        record.times(taking_turns(calls, 7), problem=f"ResNet-18, {name}")
    optunet = models.optunet()
    sym, stack = discover(optunet, torch.randn(1, 1, 28, 28)), P.populate(optunet, 1000)
    calls = {"balancing": lambda: min_mass(stack, sym)}
    record.times(taking_turns(calls, options.repeats), problem="1000 OptuNets")


def by_cvxpy(params, sym, rounds=3):
    return taking_turns({"cvxpy": lambda: least_by_cvxpy(params, sym)}, rounds, warm=0)


def least_by_cvxpy(params, sym):
    """The problem as P1 states it: one exponential per weight, whose powers `rescale` tells."""
    scales = torch.eye(sym.scaling_dof, dtype=torch.float64).exp()
    ones = {n: torch.ones(len(scales), *t.shape, dtype=torch.float64) for n, t in params.items()}
    ones = rescale(ones, sym, scales.split([g.units for g in sym.scalings], -1))
    powers = torch.cat([ones[n].log().round().flatten(1) for n in sym.weights], 1).T.numpy()
    squares = torch.cat([params[n].double().square().flatten() for n in sym.weights]).numpy()
    u = cvxpy.Variable(sym.scaling_dof)
    terms = cvxpy.multiply(squares / squares.sum(), cvxpy.exp(2 * powers @ u))
    return cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(terms))).solve() * squares.sum()


def matching(options, record):
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
    record.value("tensors", len(noisy))
    record.value("error", float(verify(net, sym, x)))
    calls = {}
    for method in ("best", "ascent"):
        calls[method] = functools.partial(match, planted, params, sym, method=method)
        found = permute(planted, sym, calls[method]())
        right = sum(bool(torch.equal(found[n], noisy[n])) for n in noisy)
        record.value("recovered", right, method=method)
    if importlib.util.find_spec("rebasin") is None:
        print("rebasin is left out: it is not installed")
    else:
        calls["rebasin"] = functools.partial(by_rebasin, net, planted, x)
    record.times(taking_turns(calls, 3, warm=1))


def by_rebasin(net, planted, x):
    from rebasin import PermutationCoordinateDescent

    other = copy.deepcopy(net)
    other.load_state_dict(planted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PermutationCoordinateDescent(net, other, x).rebasin()


PARTS = {"masses": masses, "matching": matching}


def main():
    options = parsed(parser(__doc__, tuple(PARTS)))
    record = Record(options)
    PARTS[options.part](options, record)
    record.write()


if __name__ == "__main__":
    main()
