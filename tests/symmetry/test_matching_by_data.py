"""Matching by activations, and what learns from a loss half way between two networks."""

import functools
import itertools

import numpy as np
import pytest
import torch
from checked_symmetries import find, seeded
from test_matching import WAYS, noisy, planted, problem
from torch import nn

from lightning_bnn import models
from weightsym import (
    Learning,
    discover,
    interpolate,
    learn_match,
    match,
    match_activations,
    match_all,
    permute,
    random_permutations,
)
from weightsym import params as P
from weightsym.matching.activations import activation_tables
from weightsym.matching.frank_wolfe import doubly_stochastic
from weightsym.matching.learned import HalfWay, parted, passed_through
from weightsym.matching.plan import Plan

cross_entropy = nn.functional.cross_entropy


# ------------------------------------------------------------ activations
def test_activations_are_those_of_numpy_and_the_objective_is_the_largest_sum_over_units():
    torch.manual_seed(0)
    model, other = (models.mlp(4, [6, 5], 3, nn.Tanh).double() for _ in range(2))
    a, b, batches = P.of(model), P.of(other), [torch.randn(20, 4).double() + 1 for _ in range(3)]
    sym, x = discover(model, batches[0]), torch.cat(batches)
    measured = activation_tables(Plan(sym), model, P.stack([b]), a, batches)
    hidden = [torch.tanh(x @ w["1.weight"].T + w["1.bias"]).T.detach().numpy() for w in (a, b)]
    assert np.allclose(measured[0][0], hidden[0] @ hidden[1].T)
    found = match(b, a, sym, method="activations", model=model, batches=batches)
    best = [
        max(float(table[0][range(n), p].sum()) for p in itertools.permutations(range(n)))
        for table, n in zip(measured, (6, 5), strict=True)
    ]
    assert float(measured[0][0][range(6), found[0]].sum()) == pytest.approx(best[0])
    assert float(found.objective) == pytest.approx(sum(best))
    old = match_activations(model, P.stack([b, a]), a, sym, batches)
    assert torch.equal(old[0][0], found[0])
    assert torch.equal(old[0][1], torch.arange(6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["activations", "learned", "matrices by activations"])
def test_inputs_are_cast_to_the_precision_of_weights_and_half_is_learned_in_float32(way, dtype):
    model, x, sym, params = problem("smooth optunet")
    goal = {n: t.to(dtype) for n, t in params.items()}
    moved = planted(goal, sym)
    back = WAYS[way](model, x.to(dtype) if way == "learned" else x.float(), moved, goal, sym)
    assert all(torch.equal(back[n], goal[n]) for n in goal)


# ------------------------------------------------------------ what learns
def learning_pair(seed=0):
    torch.manual_seed(seed)
    model = models.mlp(3, [4, 4], 2).double()
    a, b = P.of(model), P.of(models.mlp(3, [4, 4], 2).double())
    sym, inputs = discover(model, torch.randn(1, 3).double()), torch.randn(6, 16, 3).double()
    batches = [(x, P.apply(model, a, x).argmax(1)) for x in inputs]
    return model, {n: 3 * t.detach() for n, t in a.items()}, b, sym, batches


def test_the_gradient_that_is_passed_through_is_that_of_the_midpoint():
    model, a, b, sym, batches = learning_pair()
    permutations = random_permutations(sym, members=2)
    half_way, names = HalfWay(model, a, cross_entropy, batches), Plan(sym).compared
    network = permute(P.stack([b, a]), sym, permutations)
    free = {n: torch.zeros_like(network[n]).requires_grad_() for n in names}
    stack = {n: passed_through(t, free[n]) if n in free else t for n, t in network.items()}
    losses = half_way.losses(stack, batches[0])
    found = torch.autograd.grad(losses.sum(), list(free.values()))
    moved = permute(b, sym, [p[0] for p in permutations])
    live = {n: t.detach().clone().requires_grad_() for n, t in moved.items()}
    x, y = batches[0]
    loss = cross_entropy(P.apply(model, interpolate(a, live, 0.5), x), y)
    wanted = torch.autograd.grad(loss, [live[n] for n in names])
    torch.testing.assert_close([t[0] for t in found], list(wanted))


def judge(model, reference, batches, settings):
    """Losses half way on the batches that `match` holds back."""
    return HalfWay(model, reference, cross_entropy, parted(batches, settings.held_back, 0)[1]).judge


def test_learning_never_does_worse_than_its_start_and_leaves_everything_alone():
    model, a, b, sym, batches = learning_pair()
    settings = Learning(steps=10, every=2, rate=0.1)
    data = {"model": model, "batches": batches, "loss": cross_entropy, "learning": settings}
    stack = P.stack([b, P.of(models.mlp(3, [4, 4], 2).double())])
    before = [{n: t.clone() for n, t in w.items()} for w in (model.state_dict(), stack, a)]
    found = match(stack, a, sym, method="learned", **data)
    judged = judge(model, a, batches, settings)
    after = judged(found.element(stack))
    starts = (match(stack, a, sym, method=m, **data) for m in ("best", "activations"))
    least = torch.minimum(*(judged(s.element(stack)) for s in starts))
    assert torch.allclose(found.objective, -after)
    assert bool((after <= least).all())
    again = match(stack, a, sym, method="learned", **data)
    assert all(map(torch.equal, found, again))
    for old, new in zip(before, (model.state_dict(), stack, a), strict=True):
        torch.testing.assert_close(dict(new), old, rtol=0, atol=0)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_learning_reaches_a_midpoint_that_weights_do_not():
    """The best of all permutations, by brute force over both groups, is nearer than the start."""
    model, a, b, sym, batches = learning_pair()
    settings = Learning(steps=60, every=1, rate=0.1)
    data = {"model": model, "batches": batches, "loss": cross_entropy, "learning": settings}
    found = match(b, a, sym, method="learned", **data)
    judged = judge(model, a, batches, settings)
    every = list(itertools.product(itertools.permutations(range(4)), repeat=2))
    orders = [torch.tensor([pair[g] for pair in every]) for g in range(2)]
    stack = {n: t.expand(len(every), *t.shape) for n, t in b.items()}
    best = -judged(permute(stack, sym, orders)).min()
    first = -judged(P.stack([match(b, a, sym).element(b)]))[0]
    assert first < found.objective <= best + 1e-12


def test_matrices_are_learned_from_a_start_and_keep_the_function():
    model, _, sym, params = find("centred")
    x, other = torch.randn(40, 3, dtype=torch.float64, generator=seeded()), noisy(params, 1.0, 1)
    batches = [(b, model(b).detach()) for b in x.split(10)]
    start, loss = match_all(other, params, sym), nn.functional.mse_loss
    learn = functools.partial(learn_match, start, other, params, sym, model, batches, loss=loss)
    judging = parted(batches, 0.25, 0)[1]

    def half_way(element):
        middle = interpolate(element.element(other), params, 0.5)
        return sum(float(loss(P.apply(model, middle, a), b)) for a, b in judging)

    found = learn(learning=Learning(steps=30, every=5))
    assert half_way(found) < half_way(start)
    y = P.apply(model, other, x)
    torch.testing.assert_close(P.apply(model, found.element(other), x), y, rtol=1e-9, atol=1e-10)
    unmoved = learn(learning=Learning(steps=2, rate=1e6))
    assert half_way(unmoved) <= half_way(start) * (1 + 1e-9)


@pytest.mark.parametrize("layers", [(), (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())])
def test_networks_without_anything_to_learn_or_with_statistics(layers):
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36 if layers else 25, 2)).eval()
    x = torch.randn(8, 1, 5, 5)
    sym, params = discover(model, x[:1]), P.of(model)
    other = {n: t * 1.5 if t.is_floating_point() else t for n, t in params.items()}
    start, batches = match_all(other, params, sym), [(x, torch.zeros(8, dtype=torch.long))] * 2
    found = learn_match(start, other, params, sym, model, batches, learning=Learning(steps=2))
    assert len(found.permutations) == len(sym.permutations)
    assert (found is start) == (not layers)


def test_matrices_are_doubly_stochastic_also_where_logits_are_large():
    logits = 100 * torch.randn(3, 5, 5, dtype=torch.float64)
    p = doubly_stochastic(logits, 2000)
    assert torch.allclose(p.sum(1), torch.ones(3, 5).double(), atol=1e-6)
    assert torch.allclose(p.sum(2), torch.ones(3, 5).double(), atol=1e-2)
    assert bool((p.isfinite() & (p >= 0)).all())
    plain = logits[0].div(100).exp()
    for _ in range(20):
        plain = plain / plain.sum(1, keepdim=True)
        plain = plain / plain.sum(0)
    assert torch.allclose(doubly_stochastic(logits[0] / 100, 20), plain)
