"""Matching many networks at once gives what matching them one by one gives."""

import itertools
import sys

import pytest
import torch
from cases import CASES
from torch import nn

from lightning_bnn import models
from weightsym import discover, match, permute, random_permutations
from weightsym import params as P
from weightsym.matching import frank_wolfe
from weightsym.matching.ascent import Ascent
from weightsym.matching.frank_wolfe import Objective
from weightsym.matching.plan import Plan

LARGE = ("convnext", "mobilenet", "resnet", "resnet20 frn")
SMALL = [c for c in CASES if c.name not in LARGE]


def noisy(params, members, noise=1.0):
    """Copies of one network, each with its own noise: some come to rest sooner than others."""
    g = torch.Generator().manual_seed(0)
    return {
        n: torch.stack(
            [t + noise * k * t.std() * torch.randn(t.shape, generator=g) for k in range(members)]
        )
        if t.is_floating_point() and t.numel() > 1 and "running" not in n
        else torch.stack([t] * members)
        for n, t in ((n, t.float() if t.is_floating_point() else t) for n, t in params.items())
    }


def same(together, alone, m):
    pairs = [
        *zip(together, alone, strict=True),
        *zip(together.signs or (), alone.signs or (), strict=True),
    ]
    return all(torch.equal(t[m], a) for t, a in pairs)


def check(stack, reference, sym, **options):
    together = match(stack, reference, sym, **options)
    for m, member in enumerate(P.unstack(stack)):
        alone = match(member, reference, sym, **options)
        assert same(together, alone, m)
        assert together.method[m] == alone.method
        assert together.objective[m] == pytest.approx(float(alone.objective), rel=1e-12)
    return together


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_ascent_of_a_stack_is_that_of_its_members(case):
    model, _, sym = case.known()
    reference = {n: t.float() if t.is_floating_point() else t for n, t in P.of(model).items()}
    stack = noisy(reference, 3)
    moved = permute(stack, sym, random_permutations(sym, torch.Generator().manual_seed(1), 3))
    check(moved, reference, sym, method="ascent")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "ascent"},
        {"signs": True},
        {"method": "frank-wolfe"},
    ],
)
def test_every_way_treats_a_stack_as_its_members(options, monkeypatch):
    torch.manual_seed(0)
    model = models.mlp(6, [9, 8], 3, nn.Tanh)
    sym, stack = discover(model, torch.randn(1, 6)), P.populate(model, 3)
    reference = P.of(model)
    together = check(stack, reference, sym, **options)
    module = sys.modules["weightsym.matching.match"]
    monkeypatch.setattr(module, "_AT_ONCE", 2 * Plan(sym).pairs)
    in_turns = match(stack, reference, sym, **options)
    assert all(
        same(in_turns, match(m, reference, sym, **options), k)
        for k, m in enumerate(P.unstack(stack))
    )
    assert torch.equal(together.objective, in_turns.objective)


def test_with_batches_ascent_from_activations_is_tried_as_well():
    torch.manual_seed(0)
    model = models.mlp(6, [9, 8], 3)
    sym, stack = discover(model, torch.randn(1, 6)), P.populate(model, 6)
    batches, reference = [torch.randn(64, 6)], P.of(model)
    with_batches = check(stack, reference, sym, model=model, batches=batches)
    assert bool((with_batches.objective >= match(stack, reference, sym).objective - 1e-5).all())
    assert "ascent from activations" in with_batches.method


def similarity(plan, stack, reference):
    return sum((stack[n] * reference[n]).double().flatten(1).sum(1) for n in plan.compared)


def test_members_settle_by_themselves():
    """A matched member stays while others go on, and no sweep makes any member worse."""
    torch.manual_seed(0)
    model = models.mlp(8, [16, 14, 12], 3)
    sym, stack = discover(model, torch.randn(1, 8)), P.populate(model, 4)
    plan, first = Plan(sym), {n: t[0] for n, t in stack.items()}
    scores, settled = [], []
    for sweeps in (1, 2, 3, 50):
        ascent = Ascent(plan, stack, first)
        ascent.climb(torch.Generator().manual_seed(0), sweeps)
        orders = ascent.permutations
        scores.append(ascent.score())
        settled.append(ascent.settled)
        moved = permute(stack, sym, orders)
        assert torch.allclose(ascent.score(), similarity(plan, moved, first))
        assert torch.equal(orders[0][0], torch.arange(16))
    assert all(bool((b >= a - 1e-6).all()) for a, b in itertools.pairwise(scores))
    assert bool((scores[-1] > scores[0] + 1e-3).any())
    assert (settled[0], settled[-1]) == (False, True)


# ------------------------------------------------------------ where nothing is to be found
WIDTHS = (96, 96, 96, 96)


def deep():
    """A network, its symmetries, and a stack: two with nothing in common, two that are noisy."""
    torch.manual_seed(0)
    model = models.mlp(8, WIDTHS, 4)
    sym, reference = discover(model, torch.randn(1, 8)), P.of(model)
    moved = noisy(reference, 2, 0.5)
    moved = permute(moved, sym, random_permutations(sym, torch.Generator().manual_seed(1), 2))
    others = P.populate(model, 2)
    return sym, reference, {n: torch.cat([others[n], t]) for n, t in moved.items()}


@pytest.fixture
def slopes(monkeypatch):
    """The number of times that slopes are computed from weights."""
    count, slopes = [0], Objective.slopes

    def counting(self, at):
        count[0] += 1
        return slopes(self, at)

    monkeypatch.setattr(Objective, "slopes", counting)
    return count


def test_networks_with_nothing_in_common_are_given_up_early(slopes, monkeypatch):
    sym, reference, stack = deep()
    unrelated = {n: t[:2] for n, t in stack.items()}
    found, early = match(unrelated, reference, sym), slopes[0]
    assert found.method == ("ascent", "ascent")
    assert early <= 14
    monkeypatch.setattr(frank_wolfe, "_REACH", torch.inf)
    slopes[0] = 0
    whole = match(unrelated, reference, sym)
    assert slopes[0] > 2 * early
    assert bool((found.objective >= 0.98 * whole.objective).all())


def test_best_is_never_worse_than_ascent_and_gives_up_nothing_that_is_planted():
    sym, reference, stack = deep()
    best, ascent = (match(stack, reference, sym, method=m) for m in ("best", "ascent"))
    assert bool((best.objective >= ascent.objective * (1 - 1e-7)).all())
    plan = Plan(sym)
    planted = similarity(plan, noisy(reference, 2, 0.5), reference)
    assert bool((best.objective[2:] >= planted * (1 - 1e-6)).all())


@pytest.mark.parametrize("signs", [False, True])
def test_members_that_are_given_up_leave_the_others_as_they_are(signs):
    torch.manual_seed(0)
    model = models.mlp(8, (48,) * 5, 4, nn.Tanh)
    sym, reference = discover(model, torch.randn(1, 8)), P.of(model)
    stack = P.populate(model, 2)
    stack = {n: torch.cat([t, reference[n].flip(0)[None]]) for n, t in stack.items()}
    check(stack, reference, sym, signs=signs)
