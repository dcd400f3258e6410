"""Symmetries of a network that were checked on it, and the sizes of their groups."""

import itertools

import torch
from torch import nn

from weightsym import compose, discover, verify


def exact(model, *x, others=(), tolerance=1e-11):
    """The symmetries, after a check on these inputs and on others."""
    model = model.double()
    sym = discover(model, *x)
    assert not any("refuted" in f.reason for f in sym.frozen)
    for inputs in (x, *others):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            assert verify(model, sym, *inputs, generator=generator) < tolerance
    return sym


def units(sym):
    """The numbers and kinds of the units of all groups of permutations."""
    return [(g.units, g.kind) for g in sym.permutations]


def sizes(sym):
    """The numbers of units of all groups of permutations."""
    return [g.units for g in sym.permutations]


def weight(*shape):
    """A parameter with the same random numbers for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))


def cycle_error(between, sym):
    """The share of units that do not come back to their place on the way round three networks."""
    astray = []
    for a, b, c in itertools.permutations(sorted({k for pair in between for k in pair}), 3):
        there = compose(between[a, b], between[b, c], sym)
        for order in compose(there, between[c, a], sym):
            astray += (order != torch.arange(len(order))).tolist()
    return sum(astray) / len(astray)
