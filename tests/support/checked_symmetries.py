"""Symmetries of a network that were checked on it, and the sizes of their groups."""

import itertools

import torch
from known_networks import NETWORKS

from weightsym import (
    Element,
    compose,
    random_mixings,
    random_permutations,
    random_scales,
    random_shifts,
    random_signs,
)
from weightsym import params as P
from weightsym.groups.actions import act


def find(name):
    """A network of the table, an input, its symmetries and its weights; nobody changes them."""
    model, (x, *_), sym = NETWORKS[name].known()
    return model, x, sym, P.of(model)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def moved_at_random(params, sym, generator, mixing=True):
    """Another network of the orbit, by matrices and shifts only if it is mixing."""
    signs, scales = random_signs(sym, generator), random_scales(sym, generator)
    element = Element.of_groups(sym, signs=signs, scales=scales)
    if mixing:
        element = Element.of_groups(sym, matrices=random_mixings(sym, generator)) @ element
        element = Element.of_groups(sym, shifts=random_shifts(sym, generator)) @ element
    orders = random_permutations(sym, generator)
    return (Element.of_groups(sym, permutations=orders) @ element)(params)


def furthest(a, b):
    """The largest difference of two networks."""
    return max(float((a[n] - b[n]).abs().max()) for n in b)


def close(a, b, tolerance=0.0):
    return all(torch.allclose(a[n], b[n], rtol=0, atol=tolerance) for n in b)


def units(sym):
    """The numbers and kinds of the units of all groups of permutations."""
    return [(g.units, g.kind) for g in sym.permutations]


def sizes(sym):
    """The numbers of units of all groups of permutations."""
    return [g.units for g in sym.permutations]


def cycle_error(between, sym):
    """The share of units that do not come back to their place on the way round three networks."""
    astray = []
    for a, b, c in itertools.permutations(sorted({k for pair in between for k in pair}), 3):
        there = compose(between[a, b], between[b, c], sym)
        for order in compose(there, between[c, a], sym):
            astray += (order != torch.arange(len(order))).tolist()
    return sum(astray) / len(astray)


def least_by_descent(params, sym, seed):
    """The mass at a random start, minimised by quasi-Newton over log scales and matrices."""
    g = torch.Generator().manual_seed(seed)
    logs = [0.3 * torch.randn(s.units, generator=g, dtype=torch.float64) for s in sym.scalings]
    free = [
        torch.eye(s.size).double()
        + 0.2 * torch.randn(s.spaces, s.size, s.size, generator=g).double()
        for s in sym.linear
    ]
    variables = [t.requires_grad_() for t in (*logs, *free)]
    optimizer = torch.optim.LBFGS(
        variables, max_iter=2000, tolerance_grad=1e-9, tolerance_change=0, history_size=30,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    names = {n: params[n] for n in sym.shapes}

    def value():
        optimizer.zero_grad()
        matrices = [
            t if s.kind == "general" else torch.eye(s.size).double().expand_as(t)
            for t, s in zip(free, sym.linear, strict=True)
        ]
        moved = act(names, sym, {"scalings": [u.exp() for u in logs], "linear": matrices})
        total = sum(moved[n].square().sum() for n in sym.weights)
        total.backward()
        return total

    optimizer.step(value)
    return float(value().detach())
