import itertools
from functools import partial

import pytest
import torch
from cases import CASES
from checked_symmetries import close, cycle_error
from scipy.optimize import linear_sum_assignment
from torch import nn

from lightning_bnn import models
from weightsym import (
    align,
    average,
    canonicalise,
    compose,
    difference,
    discover,
    fingerprint,
    flip,
    invert,
    match,
    match_all,
    min_mass,
    permute,
    random_permutations,
    random_scales,
    random_signs,
    rescale,
)
from weightsym import params as P
from weightsym.matching.frank_wolfe import Objective, frank_wolfe
from weightsym.matching.plan import Plan

LARGE = ("convnext", "mobilenet", "resnet", "resnet20 frn")
SMALL = [c for c in CASES if c.name not in LARGE]


class Stream(nn.Module):
    """Blocks beside a stream that nothing else reads or writes with weights that differ."""

    def __init__(self, hidden, width, blocks):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(blocks))
        self.stem, self.head = nn.Linear(3, width), nn.Linear(width, 3)
        for end in (self.stem, self.head):
            for p in end.parameters():
                nn.init.zeros_(p)

    def forward(self, x):
        x = self.stem(x)
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(first(x).relu())
        return self.head(x)


class Experts(nn.Module):
    """Blocks with units inside, beside a stream, as weights of three dimensions or of two."""

    def __init__(self, count=2, width=3, hidden=3, flat=False):
        super().__init__()
        up, down = torch.randn(count, hidden, width), torch.randn(count, width, hidden)
        self.up, self.down = (nn.Parameter(w.flatten(0, 1) if flat else w) for w in (up, down))
        self.bias = nn.Parameter(torch.randn(count, width))
        self.router = nn.Linear(width, count)
        self.stem, self.head = nn.Linear(5, width), nn.Linear(width, 2)
        self.shapes = up.shape, down.shape

    def forward(self, x):
        x = self.stem(x)
        up, down = (w.view(s) for w, s in zip((self.up, self.down), self.shapes, strict=True))
        hidden = torch.einsum("bi,ehi->beh", x, up).relu()
        out = torch.einsum("beh,eoh->beo", hidden, down) + self.bias
        return self.head(x + (out * self.router(x).softmax(-1)[..., None]).sum(1))


def grouped():
    """Blocks on both sides of a kernel."""
    return nn.Sequential(nn.Conv1d(2, 6, 1), nn.ReLU(), nn.Conv1d(6, 4, 1, groups=2))


def mlps(members, hidden=(12, 10), inputs=6):
    torch.manual_seed(0)
    model = models.mlp(inputs, list(hidden), 4)
    return model, discover(model, torch.randn(1, inputs)), P.populate(model, members)


# ------------------------------------------------------------ products of permutations
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_products_and_inverses_act_like_one_after_the_other(case):
    model, _, sym = case.known()
    params, generator = P.of(model), torch.Generator().manual_seed(0)
    a, b = (random_permutations(sym, generator) for _ in range(2))
    both = permute(permute(params, sym, a), sym, b)
    assert close(permute(params, sym, compose(a, b, sym)), both)
    assert close(permute(permute(params, sym, a), sym, invert(a, sym)), params)
    stacked = random_permutations(sym, generator, 2)
    together = compose(stacked, b, sym)
    for m in range(2):
        alone = compose([p[m] for p in stacked], b, sym)
        assert all(torch.equal(t[m], p) for t, p in zip(together, alone, strict=True))


# ------------------------------------------------------------ Frank-Wolfe
IN_BLOCKS = [(Experts, (2, 5)), (partial(Experts, flat=True), (2, 5)), (grouped, (2, 2, 4))]


@pytest.mark.parametrize(("build", "x"), [*IN_BLOCKS, (lambda: Stream(4, 5, 2), (2, 3))])
def test_values_and_slopes_of_soft_permutations(build, x):
    torch.manual_seed(0)
    model = build().double()
    sym = discover(model, torch.randn(x).double())
    plan = Plan(sym)
    stack = {n: torch.randn(2, *t.shape).double() for n, t in P.of(model).items()}
    goal = {n: torch.randn_like(t) for n, t in P.of(model).items()}
    objective = Objective(plan, stack, goal)
    matrices = [torch.rand(2, t.units, t.units).double().requires_grad_() for t in plan.tables]
    value = objective.value(matrices)
    slopes = torch.autograd.grad(value.sum(), matrices, allow_unused=True, materialize_grads=True)
    assert all(map(torch.allclose, objective.slopes(matrices), slopes))
    orders = [torch.rand(2, t.units).argsort(-1) for t in plan.tables]
    means = [torch.full_like(m, 1 / m.shape[1]) for m in matrices]
    hard = [nn.functional.one_hot(o, o.shape[1]).double() for o in orders]
    for short, long in ((orders, hard), (None, means)):
        assert torch.allclose(objective.value(short), objective.value(long))
        assert all(map(torch.allclose, objective.slopes(short), objective.slopes(long)))


def objective_case(name):
    """A network in float64, its symmetries, and networks that differ from it in their weights."""
    torch.manual_seed(0)
    if isinstance(name, str):
        model, _, sym = next(c for c in CASES if c.name == name).known()
    else:
        model = name[0]().double()
        sym = discover(model, torch.randn(name[1]).double())
    return Plan(sym), sym, {n: torch.randn_like(t.double()) for n, t in P.of(model).items()}


@pytest.mark.parametrize("name", [*IN_BLOCKS, "attention", "grouped cnn", "optunet"])
def test_the_similarity_is_that_of_elements_of_the_group(name):
    plan, sym, goal = objective_case(name)
    orders = plan.best([torch.rand(60, t.units, t.units) for t in plan.tables])
    stack = {n: torch.randn_like(t).expand(60, *t.shape) for n, t in goal.items()}
    moved = permute(stack, sym, plan.elements(orders))
    expected = sum((moved[n] * goal[n]).flatten(1).sum(1) for n in plan.compared)
    assert torch.allclose(Objective(plan, stack, goal).value(orders), expected)
    assert len(expected.unique()) > 5
    whole = {n: axes for n, axes in plan.places.items() if n not in plan.blocks}
    if len(whole) < len(plan.places):  # a negative control: without what is in blocks
        plan.places, plan.blocks = whole, {}
        without = Objective(plan, stack, goal).value(orders)
        assert not torch.allclose(without - without[0], expected - expected[0])
    assert isinstance(name, str) or not plan.blocks


def test_experts_take_part_in_the_walk():
    found = {True: 0, False: 0}
    for trial in range(4):
        torch.manual_seed(trial)
        model = Experts(4, 12, 8)
        for p in [*model.stem.parameters(), *model.head.parameters(), *model.router.parameters()]:
            nn.init.zeros_(p)
        sym, params, copy, moved = planted(model, torch.randn(3, 5), 0.8, trial)
        for blocks in found:
            plan = Plan(sym)
            if not blocks:
                plan.places = {n: a for n, a in plan.places.items() if n not in plan.blocks}
                plan.blocks = {}
            walk = frank_wolfe(plan, P.stack([moved]), params)
            order = [p[0] for p in plan.elements(walk.orders)]
            found[blocks] += close(permute(moved, sym, order), copy)
    assert found[True] == 4 > found[False]


def test_steps_follow_the_quadratic():
    """Values and slopes on the way are those of the objective, which never falls."""
    _, sym, stack = mlps(3, (14, 13, 12))
    plan, goal = Plan(sym), {n: t[0].flip(0).double() for n, t in stack.items()}
    stack = {n: t.double() for n, t in stack.items()}
    values = [Objective(plan, stack, goal).value(None)]
    for steps in range(1, 9):
        walk = frank_wolfe(plan, stack, goal, max_steps=steps)
        values.append(walk.value)
        objective = Objective(plan, stack, goal)
        assert torch.allclose(walk.value, objective.value(walk.matrices))
        shares = [m.amax(-1).mean() for m in walk.matrices]
    assert all(bool((b >= a - 1e-9).all()) for a, b in itertools.pairwise(values))
    assert min(shares) < 1  # not all go to the end


def planted(model, x, noise, trial, signs=False):
    sym, generator = discover(model, x), torch.Generator().manual_seed(trial)
    params = {n: t.clone() for n, t in P.of(model).items()}
    copy = {
        n: t + (noise * t.std() if t.numel() > 1 else 0) * torch.randn(t.shape, generator=generator)
        for n, t in params.items()
    }
    moved = permute(copy, sym, random_permutations(sym, generator))
    return sym, params, copy, flip(moved, sym, random_signs(sym, generator)) if signs else moved


def test_a_stream_that_nothing_anchors_is_recovered_by_the_joint_way_only():
    found = {"ascent": 0, "frank-wolfe": 0, "best": 0}
    for trial in range(4):
        torch.manual_seed(trial)
        sym, params, copy, moved = planted(Stream(15, 25, 2), torch.randn(1, 3), 0.2, trial)
        for method in found:
            result = match(moved, params, sym, method=method)
            found[method] += close(result.apply(moved, sym), copy)
    assert found["frank-wolfe"] == found["best"] == 4
    assert found["ascent"] < 4


def test_sorted_weights_tell_units_apart_where_the_mean_of_all_permutations_does_not():
    """Rows and columns sum to zero: from the barycentre there is no slope."""
    torch.manual_seed(0)
    model = Stream(15, 25, 2)
    for p in [*model.first.parameters(), *model.second.parameters()]:
        p.data -= p.data.mean(0)
        p.data -= p.data.mean(1, keepdim=True)
    sym, params, copy, moved = planted(model, torch.randn(1, 3), 0.2, 0)
    plan, stack = Plan(sym), {n: t[None] for n, t in moved.items()}
    same = {n: t[None] for n, t in params.items()}
    slopes = Objective(plan, same, params).slopes(None)
    assert max(float(s.abs().max()) for s in slopes) < 1e-5
    for method in ("frank-wolfe", "best"):
        found = match(moved, params, sym, method=method)
        assert close(found.apply(moved, sym), copy)
    walk = frank_wolfe(plan, stack, params)
    assert walk.blind.all()
    lost = [p[0] for p in plan.elements(walk.orders)]
    assert not close(permute(moved, sym, lost), copy)


def test_where_the_mean_of_all_permutations_tells_hardly_anything_sorted_weights_are_asked():
    """From there Frank-Wolfe is given up, but that says nothing about the other start."""
    torch.manual_seed(2)
    model = Stream(15, 25, 2)
    for p in [*model.first.parameters(), *model.second.parameters()]:
        given = p.data.clone()
        p.data -= p.data.mean(0)
        if p.ndim > 1:
            p.data -= p.data.mean(1, keepdim=True)
        p.data += 0.01 * (given - p.data)
    sym, params, copy, moved = planted(model, torch.randn(1, 3), 0.2, 2)
    assert not close(match(moved, params, sym, method="ascent").apply(moved, sym), copy)
    assert close(match(moved, params, sym).apply(moved, sym), copy)


def test_one_hidden_layer_is_one_assignment_for_every_method():
    model, sym, stack = mlps(2, (12,))
    a, b = P.unstack(stack)
    rows = [torch.cat([p["1.weight"], p["1.bias"][:, None], p["3.weight"].T], 1) for p in (b, a)]
    rows_in, columns = linear_sum_assignment((rows[0] @ rows[1].T).numpy(), maximize=True)
    assert (rows_in == range(12)).all()
    for method in ("best", "ascent", "frank-wolfe"):
        assert match(a, b, sym, method=method)[0].tolist() == columns.tolist()
    assert match(a, b, sym).method == "ascent"


def test_best_is_never_below_another_method_and_no_method_above_the_bound():
    _, sym, stack = mlps(6, (14, 13, 12))
    reference = P.unstack(stack)[0]
    found = {m: match(stack, reference, sym, method=m) for m in ("ascent", "frank-wolfe", "best")}
    for method in ("ascent", "frank-wolfe"):
        assert bool((found["best"].objective >= found[method].objective - 1e-4).all())
    assert {"ascent", "frank-wolfe"} >= set(found["best"].method)
    best = found["best"]
    moved = best.apply(stack, sym)
    by_hand = sum((moved[n] * reference[n]).flatten(1).sum(1) for n in reference if n != "7.bias")
    assert torch.allclose(best.objective.float(), by_hand, rtol=1e-4)
    assert "in the mean of 6 networks" in str(best)
    named = [float(found[name].objective[m]) for m, name in enumerate(best.method)]
    assert named == pytest.approx(best.objective.tolist(), rel=1e-5)


def test_flips_are_found_where_they_are_asked_for():
    torch.manual_seed(0)
    model = models.mlp(6, [12, 10], 3, nn.Tanh)
    sym, params, copy, moved = planted(model, torch.randn(1, 6), 0.1, 0, signs=True)
    with_flips = match(moved, params, sym, signs=True)
    assert close(with_flips.apply(moved, sym), copy)
    assert with_flips.objective > 1.2 * match(moved, params, sym).objective


# ------------------------------------------------------------ many networks
def distance_to_mean(stack, names):
    return sum(float((stack[n] - stack[n].mean(0)).double().square().sum()) for n in names)


@pytest.mark.parametrize("kind", ["mlp", "stream", "groups"])
def test_joint_alignment_is_never_worse_than_none_or_the_first(kind):
    torch.manual_seed(0)
    if kind == "mlp":
        model, sym, stack = mlps(8)
    else:
        stream = kind == "stream"
        model = Stream(7, 9, 2) if stream else models.optunet()
        sym = discover(model, torch.randn(1, 3) if stream else torch.randn(1, 1, 28, 28))
        stack = P.populate(model, 6)
    joint, first = align(stack, sym), align(stack, sym, method="reference")
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(joint.spread[1:]))
    assert joint.spread[-1] < first.spread[-1] < first.spread[0] == joint.spread[0]
    names = Plan(sym).compared
    for found in (joint, first):
        moved = distance_to_mean(found.apply(stack, sym), names)
        assert moved == pytest.approx(found.spread[-1], rel=1e-5)
        assert all(torch.equal(p[0], torch.arange(p.shape[1])) for p in found)


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("sample", [256, 3])
def test_permuted_copies_of_one_network_become_equal(signs, sample, monkeypatch):
    """Also where five networks are many: they begin with a sample, and move two at a time."""
    if sample < 5:
        monkeypatch.setattr("weightsym.matching.align._PARTS", 3)
        monkeypatch.setattr("weightsym.matching.align._SAMPLE", sample)
    torch.manual_seed(0)
    model = models.mlp(6, [12, 10], 3, nn.Tanh if signs else nn.ReLU).double()
    sym, params = discover(model, torch.randn(1, 6).double()), P.of(model)
    generator, stack = (
        torch.Generator().manual_seed(0),
        {n: t.repeat(5, *[1] * t.ndim) for n, t in params.items()},
    )
    stack = permute(stack, sym, random_permutations(sym, generator, 5))
    if signs:
        stack = flip(stack, sym, random_signs(sym, generator, 5))
    found = align(stack, sym, signs=signs)
    moved = found.apply(stack, sym)
    assert all(torch.equal(t[0], t[k]) for t in moved.values() for k in range(5))
    assert close({n: t[0] for n, t in moved.items()}, {n: t[0] for n, t in stack.items()})
    if not signs:
        scaled = rescale(stack, sym, random_scales(sym, generator, 5))
        assert align(scaled, sym).spread[-1] > 0.1
        least = rescale(scaled, sym, min_mass(scaled, sym).scales)
        assert align(least, sym).spread[-1] < 1e-8


def test_permutations_cancel_around_every_cycle_of_an_alignment_but_not_of_pairs():
    _, sym, stack = mlps(5)
    members, pairs = P.unstack(stack), list(itertools.permutations(range(5), 2))
    found = align(stack, sym)
    assert cycle_error({(a, b): found.between(a, b, sym) for a, b in pairs}, sym) == 0
    one_by_one = {(a, b): match(members[a], members[b], sym) for a, b in pairs}
    assert cycle_error(one_by_one, sym) > 0.1
    moved = found.apply(stack, sym)
    there = permute(members[2], sym, found.between(2, 1, sym))
    back = permute({n: t[1] for n, t in moved.items()}, sym, invert([p[1] for p in found], sym))
    assert close(back, members[1])
    assert not close(there, members[2])


def test_a_network_that_nothing_moves_is_aligned_as_it_is():
    model = nn.Linear(3, 2)
    sym, stack = discover(model, torch.randn(1, 3)), P.populate(model, 3)
    assert close(align(stack, sym).apply(stack, sym), stack)


@pytest.mark.bad_input
def test_what_alignment_refuses():
    _, sym, stack = mlps(3)
    one = P.unstack(stack)[0]
    for call, text in (
        (lambda: align(one, sym), "`stack` must be a stack of networks"),
        (lambda: align(stack, sym, method="mean"), "`method` must be 'joint' or 'reference'"),
        (lambda: align(stack, sym, sweeps=0), "`sweeps` must be at least 1, got 0"),
        (lambda: match(one, one, sym, method="hungarian"), "`method` must be one of best, ascent"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    single = align({n: t[:1] for n, t in stack.items()}, sym)
    assert single.spread[-1] == pytest.approx(0, abs=1e-9)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["1.bias", "3.weight", "0.running_mean"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_named_wherever_they_are(name, value):
    """Else the assignment complains about a matrix, or an average is NaN."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU())
    model.append(nn.Linear(5, 3))
    sym, stack = discover(model.eval(), torch.randn(2, 6)), P.populate(model, 3)
    stack = {n: t.clone() for n, t in stack.items()}
    stack[name][2, 0] = value
    last, first = {n: t[2] for n, t in stack.items()}, {n: t[0] for n, t in stack.items()}
    many = f"`.*`: '{name}' holds NaN or infinite values, first in member 2"
    for call, text in (
        (lambda: match(stack, first, sym), many),
        (lambda: match(first, last, sym), f"`reference`: '{name}' holds NaN or infinite values"),
        (lambda: align(stack, sym), many),
        (lambda: average(stack, sym), many),
        (lambda: canonicalise(stack, sym), many),
        *([(lambda: min_mass(stack, sym), many)] if name == "3.weight" else []),
        (lambda: match_all(stack, first, sym), many),
        (lambda: fingerprint(last, sym), f"'{name}' holds NaN or infinite values"),
        (lambda: difference(first, last, sym), f"'{name}' holds NaN or infinite values"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.bad_input
def test_weights_whose_products_overflow_or_vanish_are_named():
    _, sym, stack = mlps(3)
    huge = {n: t.float() * (1e30 if n == "3.weight" else 1) for n, t in stack.items()}
    one = {n: t[0].float() for n, t in stack.items()}
    for call, name in (
        (lambda: match(huge, one, sym), "params"),
        (lambda: match(one, P.unstack(huge)[0], sym), "reference"),
        (lambda: match_all(huge, one, sym), "params"),
        (lambda: align(huge, sym), "stack"),
        (lambda: min_mass(huge, sym), "params"),
        (lambda: canonicalise(huge, sym, "unit-norm"), "params"),
    ):
        text = f"`{name}`: the squares of '3.weight' overflow in torch.float32"
        with pytest.raises(ValueError, match=text):
            call()
    assert match({n: t.double() for n, t in huge.items()}, one, sym)
    many = {n: 300 * torch.ones_like(t).half() for n, t in stack.items()}
    assert align(many, sym)  # half precision is computed with in float32
    tiny = {n: 1e-30 * t.float() for n, t in stack.items()}
    for call in (lambda: align(tiny, sym), lambda: match(tiny, one, sym)):
        with pytest.raises(ValueError, match="all squares vanish, the largest weight is .*e-3[01]"):
            call()
    exact = {n: t.double() for n, t in tiny.items()}
    spread = align(exact, sym).spread
    assert spread[-1] < 0.9 * float(distance_to_mean(exact, Plan(sym).compared))
    some = {n: t.float() * (1e-30 if n.endswith("bias") else 1) for n, t in stack.items()}
    assert align(some, sym)
