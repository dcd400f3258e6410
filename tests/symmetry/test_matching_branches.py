"""Experts that are modules of their own are exchanged by matching, with the units inside."""

import functools
import itertools
import logging

import pytest
import torch
from cases import Forward
from checked_symmetries import cycle_error
from scipy.optimize import linear_sum_assignment
from torch import nn

from weightsym import align, discover, match, match_all, permute
from weightsym import params as P
from weightsym.elements import random_permutations
from weightsym.matching.ascent import Ascent

D, COUNT, HIDDEN = 4, 4, 5
X = torch.randn(7, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def shallow():
    return nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, D))


def deep():
    hidden = nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(nn.Linear(D, HIDDEN), nn.ReLU(), hidden, nn.Tanh(), nn.Linear(HIDDEN, D))


def routed(s, x):
    return (torch.stack([e(x) for e in s.e], -1) * s.r(x).softmax(-1)[:, None]).sum(-1)


def summed(s, x):
    return sum(e(x) for e in s.e)


def in_a_stream(s, x):
    h = s.first(x)
    return s.last(torch.tanh(h + routed(s, h)))


@functools.cache
def case(forward, expert=shallow):
    """A network and its symmetries, read once."""
    model = network(forward, expert)
    return model, discover(model, X)


def network(forward, expert=shallow, seed=0):
    torch.manual_seed(seed)
    parts = {"r": nn.Linear(D, COUNT), "e": nn.ModuleList(expert() for _ in range(COUNT))}
    if forward is in_a_stream:
        parts |= {"first": nn.Linear(D, D), "last": nn.Linear(D, 2)}
    model = Forward(forward, **parts).double().eval()
    for p in model.parameters():
        nn.init.normal_(p)
    return model


CASES = [(routed, shallow), (summed, shallow), (routed, deep), (in_a_stream, shallow)]


def planted(model, sym, seed, noise):
    generator = torch.Generator().manual_seed(seed)
    params = P.of(model)
    near = {
        n: t + noise * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for n, t in params.items()
    }
    order = random_permutations(sym, generator)
    for k, group in enumerate(sym.permutations):  # no expert stays in its place
        order[k] = torch.arange(COUNT).roll(1 + seed % 3) if group.tensors else order[k]
    return params, near, permute(near, sym, order)


def without_exchanges(monkeypatch):
    monkeypatch.setattr(Ascent, "exchange", lambda *_: None)


# ------------------------------------------------------------ two networks
@pytest.mark.parametrize(("forward", "expert"), CASES)
@pytest.mark.parametrize("method", ["best", "ascent", "frank-wolfe"])
def test_planted_exchanges_are_found(forward, expert, method, monkeypatch):
    model, sym = case(forward, expert)
    assert any(group.tensors for group in sym.permutations)
    for seed in range(3):
        params, near, moved = planted(model, sym, seed, 0.1)
        found = match(moved, params, sym, method=method)
        back = found.apply(moved, sym)
        assert all(torch.equal(back[n], near[n]) for n in near)
        value = sum((back[n] * params[n]).sum() for n in sym.touched)
        torch.testing.assert_close(found.objective, value)
        y = torch.func.functional_call(model, moved, X)
        torch.testing.assert_close(torch.func.functional_call(model, back, X), y)
    without_exchanges(monkeypatch)  # a negative control
    kept = match(moved, params, sym, method=method)
    assert kept.objective < found.objective * 0.9


@pytest.mark.parametrize("seed", range(5))
def test_unlike_networks_get_the_best_of_all_orders(seed):
    """One hidden layer in every expert: all orders, each with one assignment per pair."""
    a, b = P.of(network(routed, seed=seed)), P.of(network(routed, seed=100 + seed))
    sym = case(routed)[1]

    def alike(i, j):
        up = sum(
            a[f"e.{i}.0.{n}"].reshape(HIDDEN, -1) @ b[f"e.{j}.0.{n}"].reshape(HIDDEN, -1).T
            for n in ("weight", "bias")
        )
        table = up + a[f"e.{i}.2.weight"].T @ b[f"e.{j}.2.weight"]
        rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
        rest = a[f"e.{i}.2.bias"] @ b[f"e.{j}.2.bias"] + a["r.bias"][i] * b["r.bias"][j]
        return float(table[rows, columns].sum() + rest + a["r.weight"][i] @ b["r.weight"][j])

    table = [[alike(i, j) for j in range(COUNT)] for i in range(COUNT)]
    orders = itertools.permutations(range(COUNT))
    best = max(sum(table[i][order[i]] for i in range(COUNT)) for order in orders)
    found = match(b, a, sym)
    assert float(found.objective) == pytest.approx(best, rel=1e-12)


def test_members_of_a_stack_are_matched_one_by_one():
    model, sym = case(routed)
    params, near, moved = planted(model, sym, 1, 0.1)
    together = match(P.stack([near, moved]), params, sym)
    back = P.unstack(together.apply(P.stack([near, moved]), sym))
    assert all(torch.equal(b[n], near[n]) for b in back for n in near)


def test_experts_that_differ_in_what_they_do_stay():
    def unequal(s, x):
        return sum((k + 1) * e(x) for k, e in enumerate(s.e))

    model, sym = case(unequal)
    assert not any(group.tensors for group in sym.permutations)
    params = P.of(model)
    exchanged = {n: params[n.replace("e.0.", "e.1.")] for n in params}
    assert match(exchanged, params, sym).apply(exchanged, sym)["e.1.2.bias"] is params["e.1.2.bias"]


def test_what_also_mixes_exchanges_experts():
    model, sym = case(routed)
    params, near, moved = planted(model, sym, 2, 0.1)
    back = match_all(moved, params, sym).apply(moved, sym)
    assert all(torch.allclose(back[n], near[n]) for n in near)


# ------------------------------------------------------------ many networks
@pytest.mark.parametrize("forward", [routed, in_a_stream])
def test_a_common_frame_exchanges_experts(forward):
    model, sym = case(forward)
    networks = [planted(model, sym, seed, 0.05)[2] for seed in range(4)]
    found = align(P.stack(networks), sym)
    assert found.spread[-1] < 0.02 * found.spread[0]
    pairs = itertools.permutations(range(4), 2)
    assert cycle_error({(a, b): found.between(a, b, sym) for a, b in pairs}, sym) == 0
    for alone, moved in zip(networks, P.unstack(found.apply(P.stack(networks), sym)), strict=True):
        y = torch.func.functional_call(model, alone, X)
        torch.testing.assert_close(torch.func.functional_call(model, moved, X), y)


# ------------------------------------------------------------ by data
def test_data_leaves_experts_where_they_are_and_says_so(caplog):
    model, sym = case(routed)
    params, _, moved = planted(model, sym, 1, 0.1)
    with caplog.at_level(logging.WARNING):
        found = match(moved, params, sym, method="activations", model=model, batches=[X])
    assert found[-1].tolist() == list(range(COUNT))
    assert "experts" in caplog.text
    caplog.clear()
    match(moved, params, sym)
    assert not caplog.text
