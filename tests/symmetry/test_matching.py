"""Planted elements are found by every way of matching, and no way is worse than a simpler one."""

import functools
import itertools
import logging
import sys

import pytest
import torch
import torchvision
from cases import Forward, randomise
from checked_symmetries import close, find, furthest, seeded
from known_networks.classics import SMALL
from known_networks.mixing import MIXING as MIXED
from known_networks.mixing import TOKENS, Decoder
from scipy.linalg import orthogonal_procrustes
from scipy.optimize import linear_sum_assignment
from torch import nn

from lightning_bnn import models
from weightsym import (
    Learning,
    average,
    compose,
    difference,
    discover,
    flip,
    fold_norms,
    invert,
    match,
    match_all,
    mix,
    permute,
    random_mixings,
    random_permutations,
    random_shifts,
    random_signs,
    shift,
)
from weightsym import params as P
from weightsym.matching import frank_wolfe as walks
from weightsym.matching.ascent import Ascent
from weightsym.matching.frank_wolfe import Objective, frank_wolfe
from weightsym.matching.matrices import least_squares, nearest, procrustes
from weightsym.matching.plan import Plan

lin = nn.Linear


# ------------------------------------------------------------ networks that only these tests need
class Stream(nn.Module):
    """Blocks beside a stream that nothing else reads or writes with weights that differ."""

    def __init__(self, hidden, width, blocks):
        super().__init__()
        self.first = nn.ModuleList(lin(width, hidden, bias=False) for _ in range(blocks))
        self.second = nn.ModuleList(lin(hidden, width, bias=False) for _ in range(blocks))
        self.stem, self.head = lin(3, width), lin(width, 3)
        for end in (self.stem, self.head):
            for p in end.parameters():
                nn.init.zeros_(p)

    def forward(self, x):
        x = self.stem(x)
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(first(x).relu())
        return self.head(x)


def blind(share):
    """A stream whose rows and columns sum to zero, but for a share of what they have summed to.

    The mean of all permutations tells its units apart hardly or not at all.
    """
    model = Stream(15, 25, 2)
    for p in [*model.first.parameters(), *model.second.parameters()]:
        given = p.data.clone()
        p.data -= p.data.mean(0)
        p.data -= p.data.mean(1, keepdim=True)
        p.data += share * (given - p.data)
    return model


class Experts(nn.Module):
    """Blocks with units inside, beside a stream, as weights of three dimensions or of two."""

    def __init__(self, count=2, width=3, hidden=3, flat=False, routed=True):
        super().__init__()
        up, down = torch.randn(count, hidden, width), torch.randn(count, width, hidden)
        self.up, self.down = (nn.Parameter(w.flatten(0, 1) if flat else w) for w in (up, down))
        self.bias = nn.Parameter(torch.randn(count, width))
        self.router = lin(width, count)
        self.stem, self.head = lin(5, width), lin(width, 2)
        self.shapes = up.shape, down.shape
        for p in [] if routed else (m for n, m in self.named_parameters() if "." in n):
            nn.init.zeros_(p)

    def forward(self, x):
        x = self.stem(x)
        up, down = (w.view(s) for w, s in zip((self.up, self.down), self.shapes, strict=True))
        hidden = torch.einsum("bi,ehi->beh", x, up).relu()
        out = torch.einsum("beh,eoh->beo", hidden, down) + self.bias
        return self.head(x + (out * self.router(x).softmax(-1)[..., None]).sum(1))


def grouped():
    """Blocks on both sides of a kernel."""
    return nn.Sequential(nn.Conv1d(2, 6, 1), nn.ReLU(), nn.Conv1d(6, 4, 1, groups=2))


def routed(s, x):
    return (torch.stack([e(x) for e in s.e], -1) * s.r(x).softmax(-1)[:, None]).sum(-1)


def in_a_stream(s, x):
    h = s.first(x)
    return s.last(torch.tanh(h + routed(s, h)))


def branches(forward, deep=False):
    """Experts that are modules of their own."""
    more = [lin(5, 5), nn.Tanh()] if deep else []
    experts = (nn.Sequential(lin(4, 5), nn.ReLU(), *more, lin(5, 4)) for _ in range(4))
    parts = {"r": lin(4, 4), "e": nn.ModuleList(experts), "first": lin(4, 4), "last": lin(4, 2)}
    used = parts if forward is in_a_stream else {n: parts[n] for n in "re"}
    model = Forward(forward, **used)
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def optunet():
    """Groups and no dead units, which activations could not tell apart."""
    layers = [nn.Conv2d(1, 2, 4), nn.Tanh(), nn.Conv2d(2, 10, 5, groups=2), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), lin(10, 10))


def normed():
    layers = [nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), lin(5, 3))


def encoder():
    """No hook fires for the projections of its attention."""
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(lin(5, 8), attention, lin(8, 3))


def fused():
    """An encoder whose attention keeps queries, keys and values in one tensor."""
    layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, norm_first=True, batch_first=True)
    model = nn.Sequential(lin(3, 8), layer, nn.LayerNorm(8), lin(8, 2)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return fold_norms(model, torch.randn(1, 5, 3).double())


def heads(rotary):
    """Eight heads that share two pairs of keys and values."""
    model = Decoder(d=32, heads=8, groups=2, rotary=rotary)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def products():
    """Weights that no matrix product multiplies."""
    model = Forward(lambda s, x: (((x[:, None] * s.a).sum(-1).relu())[:, None] * s.b).sum(-1))
    model.a, model.b = (nn.Parameter(torch.randn(n, m)) for n, m in ((5, 4), (3, 5)))
    return model


def einsum():
    """Channels that no linear map shows."""
    model = Forward(lambda s, x: torch.einsum("oh,hi,bi->bo", s.b, s.a, x))
    model.a, model.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(3, 4))
    return model


LOCAL = {
    "unanchored": (lambda: Stream(15, 25, 2), (1, 3)), "blind": (lambda: blind(0.0), (1, 3)),
    "nearly blind": (lambda: blind(0.01), (1, 3)),
    "short stream": (lambda: Stream(4, 5, 2), (2, 3)), "experts": (Experts, (2, 5)),
    "flat experts": (lambda: Experts(flat=True), (2, 5)),
    "unrouted experts": (lambda: Experts(4, 12, 8, routed=False), (3, 5)),
    "kernels": (grouped, (2, 2, 4)), "branches": (lambda: branches(routed), (7, 4)),
    "summed branches": (lambda: branches(lambda s, x: sum(e(x) for e in s.e)), (7, 4)),
    "deep branches": (lambda: branches(routed, deep=True), (7, 4)),
    "branches in a stream": (lambda: branches(in_a_stream), (7, 4)),
    "smooth optunet": (optunet, (8, 1, 12, 12)), "batch norm": (normed, (8, 2, 6, 6)),
    "encoder": (encoder, (4, 3, 5)), "fused": (fused, (40, 5, 3)),
    "products": (products, (6, 4)), "einsum": (einsum, (20, 6)),
    "shared keys": (lambda: heads(0), TOKENS), "shared rotary keys": (lambda: heads(4), TOKENS),
    "perceptron": (lambda: models.mlp(6, [12, 10], 3, nn.Tanh), (20, 6)),
}  # fmt: skip


@functools.cache
def problem(name):
    """A network in float64, data, its symmetries and its weights."""
    if name not in LOCAL:
        model, x, sym, params = find(name)
    else:
        torch.manual_seed(0)
        build, shape = LOCAL[name]
        model = build().double().eval()
        x = torch.randn(shape).double() if isinstance(shape, tuple) else shape
        sym, params = discover(model, x[:2]), P.of(model)
    more = torch.randint(5, (40, 6), generator=seeded()) if x.shape == TOKENS.shape else x
    return model, more if not more.is_floating_point() else x.double(), sym, params


def noisy(params, size, seed=0):
    """The same weights with noise, as a share of their deviation."""
    g = seeded(seed)
    return {
        n: t + size * t.std() * torch.randn(t.shape, generator=g, dtype=t.dtype)
        if t.is_floating_point() and t.numel() > 1 and "running" not in n
        else t
        for n, t in params.items()
    }


# ------------------------------------------------------------ planted elements
def by_data(model, x):
    inputs = [x, x.flip(0) * 1.1 if x.is_floating_point() else x.flip(0)]
    return {"model": model, "batches": inputs}


def learned(model, x, w, goal, sym):
    batches = [(b, P.apply(model, goal, b)) for b in by_data(model, x)["batches"]]
    batches = [(b, (y + 0.1 * torch.randn_like(y)).detach()) for b, y in batches]
    options = {"loss": nn.MSELoss(), "learning": Learning(steps=2)}
    return match(w, goal, sym, method="learned", model=model, batches=batches, **options)


def average_of_both(model, x, w, goal, sym):
    return average(P.stack([goal, w]), sym, mixing=True)


WAYS = {
    **{m: lambda model, x, w, goal, sym, m=m: match(w, goal, sym, method=m).element(w)
       for m in ("best", "ascent", "frank-wolfe")},
    "signs": lambda model, x, w, goal, sym: match(w, goal, sym, signs=True).element(w),
    "activations": lambda model, x, w, goal, sym: match(
        w, goal, sym, method="activations", **by_data(model, x)).element(w),
    "learned": lambda *given: learned(*given).element(given[2]),
    "matrices": lambda model, x, w, goal, sym: match_all(w, goal, sym).element(w),
    "matrices only": lambda model, x, w, goal, sym: match_all(
        w, goal, sym, permuting=False).element(w),
    "matrices by activations": lambda model, x, w, goal, sym: match_all(
        w, goal, sym, by="activations", **by_data(model, x)).element(w),
    "average": average_of_both,
}  # fmt: skip
BRANCHES = ("branches", "summed branches", "deep branches", "branches in a stream")
NESTED = ("grouped queries", "rotary, grouped", "one key for all", "three levels")
SHARED = ("shared keys", "shared rotary keys")
BY_DATA = ("attention", "smooth optunet", "batch norm")
MATRICES = ("matrices", "matrices only", "matrices by activations")
PLANTED = [
    *((name, "best", 0.3) for name in SMALL),
    *((name, "best", 0.1) for name in NESTED),
    *((name, way, 0.1) for name in BRANCHES for way in ("best", "ascent", "frank-wolfe")),
    *((name, way, 0.2) for name in ("unanchored", "blind") for way in ("best", "frank-wolfe")),
    ("nearly blind", "best", 0.2),
    ("unrouted experts", "frank-wolfe", 0.8),
    ("perceptron", "signs", 0.1),
    *((name, way, 0.0) for name in BY_DATA for way in ("activations", "learned")),
    *((name, "activations", 0.0) for name in ("encoder", "recurrent")),
    # units of the chain's ReLUs that are never active cannot be told apart by activations
    *((name, way, 0.0) for name in (*MIXED, "fused") for way in MATRICES
      if (name, way) != ("chain", MATRICES[2])),
    *((name, "average", 0.0) for name in ("rotary heads", "heads", "centred")),
    *((name, way, 0.0) for name in SHARED
      for way in ("best", "activations", "matrices", "matrices by activations", "average")),
    ("branches", "matrices", 0.1),
]  # fmt: skip


def planted(params, sym, way="best", seed=1):
    """The same network with its units in another order, and what else a way looks for."""
    g = seeded(seed)
    if way != "matrices only":
        order = random_permutations(sym, g)
        for k, group in enumerate(sym.permutations):  # no expert stays in its place
            order[k] = torch.arange(group.units).roll(1) if group.tensors else order[k]
        params = permute(params, sym, order)
    if way == "signs":
        params = flip(params, sym, random_signs(sym, g))
    mixed = "matrices" in way or way == "average"
    return mix(params, sym, random_mixings(sym, g)) if mixed else params


@pytest.mark.parametrize(("name", "way", "noise"), PLANTED)
def test_planted_elements_are_found(name, way, noise, caplog):
    torch.manual_seed(0)
    model, x, sym, params = problem(name)
    near = noisy(params, noise)
    moved = planted(near, sym, way)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="weightsym"):
        back = WAYS[way](model, x, moved, params, sym)
    assert furthest(moved, near) > 0.1
    assert furthest(back, near) < (1e-6 if sym.linear else 1e-12)
    named = way == "activations" and name in SHARED
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("weightsym")]
    assert named == ("heads that share keys" in "".join(ours))
    assert named == bool(ours) or "matrices" in way


@pytest.mark.parametrize("name", BRANCHES)
def test_without_exchanges_experts_stay_where_they_are(name, monkeypatch):
    """The negative control."""
    _, _, sym, params = problem(name)
    near = noisy(params, 0.1)
    moved = planted(near, sym)
    found = match(moved, params, sym)
    torch.testing.assert_close(
        found.objective, sum((near[n] * params[n]).sum() for n in sym.touched)
    )
    monkeypatch.setattr(Ascent, "exchange", lambda *_: None)
    assert match(moved, params, sym).objective < found.objective * 0.9


NAMED = {
    "products": ("activations", "no layer shows the units of a; they stay"),
    "einsum": ("matrices by activations", "weights are compared"),
    "branches": ("activations", "experts"),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_data_does_not_show_is_named(name, caplog):
    model, x, sym, params = problem(name)
    way, text = NAMED[name]
    moved = planted(params, sym, way) if way != "activations" else params
    with caplog.at_level(logging.WARNING, logger="weightsym"):
        back = WAYS[way](model, x, moved, params, sym)
    assert text in caplog.text
    if way == "activations":
        assert close(back, moved)


@pytest.mark.e2e
def test_resnet18_with_half_its_weights_noise():
    model = randomise(torchvision.models.resnet18())
    sym, params = discover(model, torch.randn(1, 3, 32, 32)), P.of(model)
    assert sym.log10_permutations == pytest.approx(5934.5, abs=0.05)
    near = noisy(params, 0.5)
    moved = planted(near, sym)
    assert close(match(moved, params, sym).element(moved), near)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1), (torch.float64, 1e100)])
def test_nearly_equal_and_huge_units_come_back_to_their_places(dtype, size, small, monkeypatch):
    """As after widening: the gain of an exchange is quadratic in the distance of units."""
    torch.manual_seed(0)
    net = models.mlp(8, [32, 32], 4).to(dtype)
    sym, params = discover(net, torch.randn(2, 8, dtype=dtype)), P.of(net)
    if not small:  # in single precision, but for the last sweeps
        monkeypatch.setattr(Plan, "size", 2**30)
    twice = [n for n in params if n[0] in "13"]
    wide = {n: torch.cat([t[:16], t[:16]]) if n in twice else t for n, t in params.items()}
    wide = {n: size * (t + 1e-5 * t.abs().mean() * torch.randn_like(t)) for n, t in wide.items()}
    moved = planted(wide, sym)
    assert close(match(moved, wide, sym).element(moved), wide)
    swapped = permute(wide, sym, [torch.arange(32).roll(16), torch.arange(32)])
    assert not close(swapped, wide)


# ------------------------------------------------------------ never worse
def apart(a, b, sym):
    """The distance of two networks, in what symmetries move."""
    return sum(float((a[n] - b[n]).square().sum()) for n in sym.touched) ** 0.5


@functools.cache
def decoders(members=3):
    """Untrained decoders with tables of words and places, whose offset they share."""
    model = Decoder(16, heads=4, groups=4, gains=False, layers=1, vocab=27, places=16)
    tokens = torch.randint(27, (20, 16), generator=seeded())
    return model, tokens, discover(model, tokens[:2]), P.populate(model, members, seeded())


def pairs_of(name):
    """Two networks that have little in common, two that are nearly equal, and their symmetries."""
    if name == "decoders":
        _, _, sym, stack = decoders()
        a, b = P.unstack(stack)[:2]
    else:
        _, _, sym, b = problem(name)
        a = {n: torch.randn(t.shape, generator=seeded(1)).to(t) * t.std() for n, t in b.items()}
    return sym, [(a, b), (noisy(b, 0.05), b)]


@pytest.mark.parametrize("name", ["rotary heads", "chain", "centred", "fused", "decoders"])
def test_no_network_ends_farther_away_than_permutations_or_nothing_leave_it(name):
    sym, pairs = pairs_of(name)
    for a, b in pairs:
        found = match_all(a, b, sym)
        least = min(apart(a, b, sym), apart(match(a, b, sym).element(a), b, sym))
        assert float(found.before) == pytest.approx(apart(a, b, sym), rel=1e-6)
        assert float(found.after) == pytest.approx(apart(found.element(a), b, sym), rel=1e-5)
        assert float(found.after) <= least * (1 + 1e-6)
        mixed = match_all(a, b, sym, permuting=False).element(a)
        assert apart(mixed, b, sym) <= apart(a, b, sym) * (1 + 1e-6)


@pytest.mark.parametrize("name", ["stream", "centred"])
def test_under_noise_weights_come_as_close_as_the_planted_element_does(name):
    _, _, sym, params = find(name)
    near = noisy(params, 0.2)
    found = match_all(planted(near, sym, "matrices"), params, sym)
    assert float(found.after) <= apart(near, params, sym) + 1e-9


def test_tables_count_but_for_the_offset_that_they_share():
    """Else the rotation of a stream is found without most of its weights."""
    _, _, sym, stack = decoders()
    a, b = P.unstack(stack)[:2]
    tables = {sym.axes[p.axis].tensor for group in sym.shifts for p in group.placements}
    assert {"embed.weight", "places.weight"} <= tables
    found = match_all(a, b, sym)
    assert float(found.after) < 0.85 * apart(match(a, b, sym).element(a), b, sym)
    small = [[0.1 * c for c in random_shifts(sym, seeded(k))] for k in range(2)]
    same = match_all(*(shift(w, sym, c) for w, c in zip((a, b), small, strict=True)), sym)
    for mine, other in zip(found.matrices, same.matrices, strict=True):
        assert torch.allclose(mine, other, atol=1e-3)


def test_without_matrices_it_is_matching_by_permutations():
    _, sym, stack = mlps(2)
    other, goal = P.unstack(stack)
    found = match_all(other, goal, sym)
    assert found.matrices == ()
    assert furthest(found.element(other), match(other, goal, sym).element(other)) == 0


def mlps(members, hidden=(14, 13, 12)):
    torch.manual_seed(0)
    model = models.mlp(6, list(hidden), 4)
    return model, discover(model, torch.randn(1, 6)), P.populate(model, members)


def similarity(stack, goal, names):
    return sum((stack[n] * goal[n]).double().flatten(1).sum(1) for n in names)


@pytest.mark.parametrize("bare", [(True, False), (False, True), (True, True)])
def test_statistics_tell_nothing_and_may_be_missing(bare):
    model = nn.Sequential(lin(4, 6), nn.BatchNorm1d(6), nn.Tanh(), lin(6, 3)).eval()
    sym, pair = discover(model, torch.randn(8, 4)), P.unstack(P.populate(model, 2))
    pair[0]["1.running_mean"] = torch.randn(6)
    some = [
        {n: t for n, t in w.items() if P.is_weight(n, t) or not less}
        for w, less in zip(pair, bare, strict=True)
    ]
    for matching in (match, match_all):
        found, expected = (matching(*networks, sym).permutations for networks in (some, pair))
        assert [p.tolist() for p in found] == [p.tolist() for p in expected]
    assert difference(*some, sym).rest == pytest.approx(difference(*pair, sym).rest)


def test_best_is_never_below_another_method():
    _, sym, stack = mlps(6)
    goal = P.unstack(stack)[0]
    found = {m: match(stack, goal, sym, method=m) for m in ("ascent", "frank-wolfe", "best")}
    best = found["best"]
    for method in ("ascent", "frank-wolfe"):
        assert bool((best.objective >= found[method].objective - 1e-4).all())
    moved = best.element(stack)
    names = [n for n in goal if n != "7.bias"]
    by_hand = similarity(moved, goal, names)
    torch.testing.assert_close(best.objective.double(), by_hand, rtol=1e-4, atol=0)
    assert bool((best.objective[1:] > similarity(stack, goal, names)[1:]).all())
    assert "in the mean of 6 networks" in str(best)
    named = [float(found[name].objective[m]) for m, name in enumerate(best.method)]
    assert named == pytest.approx(best.objective.tolist(), rel=1e-5)
    again = match(stack, goal, sym)
    assert all(torch.equal(p, q) for p, q in zip(best, again, strict=True))


def test_one_hidden_layer_is_one_assignment_for_every_method():
    _, sym, stack = mlps(2, (12,))
    a, b = P.unstack(stack)
    rows = [torch.cat([p["1.weight"], p["1.bias"][:, None], p["3.weight"].T], 1) for p in (b, a)]
    _, columns = linear_sum_assignment((rows[0] @ rows[1].T).numpy(), maximize=True)
    for method in ("best", "ascent", "frank-wolfe"):
        assert match(a, b, sym, method=method)[0].tolist() == columns.tolist()
    assert match(a, b, sym).method == "ascent"


@pytest.mark.parametrize("seed", range(3))
def test_unlike_branches_get_the_best_of_all_orders(seed):
    """One hidden layer in every expert: all orders, each with one assignment per pair."""
    torch.manual_seed(seed)
    a, b = (P.of(branches(routed).double()) for _ in range(2))
    _, _, sym, _ = problem("branches")

    def alike(i, j):
        up = sum(
            a[f"e.{i}.0.{n}"].reshape(5, -1) @ b[f"e.{j}.0.{n}"].reshape(5, -1).T
            for n in ("weight", "bias")
        )
        table = up + a[f"e.{i}.2.weight"].T @ b[f"e.{j}.2.weight"]
        rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
        rest = a[f"e.{i}.2.bias"] @ b[f"e.{j}.2.bias"] + a["r.bias"][i] * b["r.bias"][j]
        return float(table[rows, columns].sum() + rest + a["r.weight"][i] @ b["r.weight"][j])

    table = [[alike(i, j) for j in range(4)] for i in range(4)]
    best = max(sum(table[i][o[i]] for i in range(4)) for o in itertools.permutations(range(4)))
    assert float(match(b, a, sym).objective) == pytest.approx(best, rel=1e-12)


# ------------------------------------------------------------ the walk over soft permutations
WALKED = ("experts", "flat experts", "kernels", "short stream")


@pytest.mark.parametrize("name", WALKED)
def test_values_and_slopes_of_soft_permutations(name):
    _, _, sym, params = problem(name)
    plan = Plan(sym)
    stack = {n: torch.randn(2, *t.shape).double() for n, t in params.items()}
    goal = {n: torch.randn_like(t) for n, t in params.items()}
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


@pytest.mark.parametrize("name", [*WALKED[:3], "attention", "grouped cnn", "optunet"])
def test_the_similarity_is_that_of_elements_of_the_group(name):
    _, _, sym, params = problem(name)
    plan, goal = Plan(sym), {n: torch.randn_like(t.double()) for n, t in params.items()}
    orders = plan.best([torch.rand(60, t.units, t.units) for t in plan.tables])
    stack = {n: torch.randn_like(t).expand(60, *t.shape) for n, t in goal.items()}
    moved = permute(stack, sym, plan.elements(orders))
    expected = similarity(moved, goal, plan.compared)
    assert torch.allclose(Objective(plan, stack, goal).value(orders), expected)
    assert len(expected.unique()) > 5
    whole = {n: axes for n, axes in plan.places.items() if n not in plan.blocks}
    assert (len(whole) < len(plan.places)) == (name in (*WALKED[:3], "grouped cnn"))
    if len(whole) < len(plan.places):  # a negative control: without what is in blocks
        plan.places, plan.blocks = whole, {}
        without = Objective(plan, stack, goal).value(orders)
        assert not torch.allclose(without - without[0], expected - expected[0])


def test_steps_follow_the_quadratic():
    """Values and slopes on the way are those of the objective, which never falls."""
    _, sym, stack = mlps(3)
    plan, goal = Plan(sym), {n: t[0].flip(0).double() for n, t in stack.items()}
    stack = {n: t.double() for n, t in stack.items()}
    values = [Objective(plan, stack, goal).value(None)]
    for steps in range(1, 9):
        walk = frank_wolfe(plan, stack, goal, max_steps=steps)
        values.append(walk.value)
        assert torch.allclose(walk.value, Objective(plan, stack, goal).value(walk.matrices))
        shares = [m.amax(-1).mean() for m in walk.matrices]
    assert all(bool((b >= a - 1e-9).all()) for a, b in itertools.pairwise(values))
    assert min(shares) < 1  # not all go to the end


@pytest.mark.parametrize("name", SMALL)
def test_products_and_inverses_act_like_one_after_the_other(name):
    _, _, sym, params = problem(name)
    generator = seeded()
    a, b = (random_permutations(sym, generator) for _ in range(2))
    both = permute(permute(params, sym, a), sym, b)
    assert close(permute(params, sym, compose(a, b, sym)), both)
    assert close(permute(permute(params, sym, a), sym, invert(a, sym)), params)
    stacked = random_permutations(sym, generator, 2)
    together = compose(stacked, b, sym)
    for m in range(2):
        alone = compose([p[m] for p in stacked], b, sym)
        assert all(torch.equal(t[m], p) for t, p in zip(together, alone, strict=True))


# ------------------------------------------------------------ stacks
def check(stack, goal, sym, **options):
    """Matching many networks at once gives what matching them one by one gives."""
    together = match(stack, goal, sym, **options)
    for m, member in enumerate(P.unstack(stack)):
        alone = match(member, goal, sym, **options)
        moved, other = together.element.of_members(m)(member), alone.element(member)
        assert all(torch.equal(moved[n], other[n]) for n in member)
        assert together.method[m] == alone.method
        assert together.objective[m] == pytest.approx(float(alone.objective), rel=1e-12)
    return together


@pytest.mark.parametrize(
    ("name", "method"),
    [*((n, "ascent") for n in SMALL), ("branches", "best"), ("shared keys", "activations")],
)
def test_a_stack_is_matched_as_its_members(name, method):
    model, x, sym, params = problem(name)
    goal = {n: t.float() if t.is_floating_point() else t for n, t in params.items()}
    stack = P.stack([goal, *(noisy(goal, k, k) for k in (1, 2))])  # some come to rest sooner
    stack = permute(stack, sym, random_permutations(sym, seeded(1), 3))
    data = {"model": model, "batches": [x]} if method == "activations" else {}
    check(stack, goal, sym, method=method, **data)


@pytest.mark.parametrize("options", [{}, {"signs": True}, {"method": "frank-wolfe"}])
def test_networks_may_be_matched_in_turns(options, monkeypatch):
    torch.manual_seed(0)
    model = models.mlp(6, [9, 8], 3, nn.Tanh)
    sym, stack = discover(model, torch.randn(1, 6)), P.populate(model, 3)
    together = check(stack, P.of(model), sym, **options)
    monkeypatch.setattr(sys.modules["weightsym.matching.match"], "_AT_ONCE", 2 * Plan(sym).pairs)
    in_turns = match(stack, P.of(model), sym, **options)
    moved, other = together.element(stack), in_turns.element(stack)
    assert all(torch.equal(moved[n], other[n]) for n in stack)
    assert torch.equal(together.objective, in_turns.objective)


def test_members_are_matched_with_matrices_one_by_one():
    model, x, sym, params = problem("centred")
    stack = P.stack([planted(params, sym, "matrices", seed) for seed in (1, 2)])
    found = match_all(stack, params, sym, model=model, batches=[x], by="activations")
    assert found.before.shape == found.after.shape == (2,)
    assert furthest(found.element(stack), params) < 1e-6


def test_with_batches_ascent_from_activations_is_tried_as_well():
    torch.manual_seed(0)
    model = models.mlp(6, [9, 8], 3)
    sym, stack = discover(model, torch.randn(1, 6)), P.populate(model, 6)
    more = check(stack, P.of(model), sym, model=model, batches=[torch.randn(64, 6)])
    assert bool((more.objective >= match(stack, P.of(model), sym).objective - 1e-5).all())
    assert "ascent from activations" in more.method


def test_members_settle_by_themselves():
    """A matched member stays while others go on, and no sweep makes any member worse."""
    _, sym, stack = mlps(4, (16, 14, 12))
    plan, first = Plan(sym), {n: t[0] for n, t in stack.items()}
    scores, settled = [], []
    for sweeps in (1, 2, 3, 50):
        ascent = Ascent(plan, stack, first)
        ascent.climb(seeded(), sweeps)
        scores.append(ascent.score())
        settled.append(ascent.settled)
        moved = ascent.element(stack)
        assert torch.allclose(ascent.score(), similarity(moved, first, plan.compared))
        assert torch.equal(ascent.element.permutations[0][0], torch.arange(16))
    assert all(bool((b >= a - 1e-6).all()) for a, b in itertools.pairwise(scores))
    assert bool((scores[-1] > scores[0] + 1e-3).any())
    assert (settled[0], settled[-1]) == (False, True)


def test_networks_with_nothing_in_common_are_given_up_early_and_alone(monkeypatch):
    """The slopes that are computed from weights are counted."""
    torch.manual_seed(0)
    model = models.mlp(8, (96,) * 4, 4)
    sym, goal = discover(model, torch.randn(1, 8)), P.of(model)
    count, slopes = [], Objective.slopes
    monkeypatch.setattr(Objective, "slopes", lambda *a: count.append(0) or slopes(*a))
    near = noisy(goal, 0.5)
    others, moved = P.populate(model, 2), planted(near, sym)
    found, early = match(others, goal, sym), len(count)
    assert found.method == ("ascent", "ascent")
    assert early <= 14
    both = match({n: torch.cat([t, moved[n][None]]) for n, t in others.items()}, goal, sym)
    assert torch.equal(both.objective[:2], found.objective)
    planted_value = sum((near[n] * goal[n]).double().sum() for n in Plan(sym).compared)
    assert both.objective[2] >= planted_value * (1 - 1e-6)
    monkeypatch.setattr(walks, "_REACH", torch.inf)
    count.clear()
    whole = match(others, goal, sym)
    assert len(count) > 2 * early
    assert bool((found.objective >= 0.98 * whole.objective).all())


# ------------------------------------------------------------ parts
def test_procrustes_is_scipys():
    a, b = (torch.randn(5, 30, dtype=torch.float64, generator=seeded(s)) for s in (1, 2))
    rotation, scale = orthogonal_procrustes(a.T.numpy(), b.T.numpy())
    found = procrustes(b @ a.mT)
    assert torch.allclose(found.matrices, torch.from_numpy(rotation.T))
    assert float(found.similarity) == pytest.approx(scale)


@pytest.mark.parametrize(("name", "kind"), [("rotary heads", "complex"), ("centred", "centred")])
def test_phases_and_centred_rotations_beat_all_others_of_their_groups(name, kind):
    _, _, sym, _ = problem(name)
    k, group = next((k, g) for k, g in enumerate(sym.linear) if g.kind == kind)
    shape = group.spaces, group.size, 9
    rows = [torch.randn(shape, dtype=torch.float64, generator=seeded(s)) for s in (1, 2)]
    a, b = (r - r.mean(1, keepdim=True) if kind == "centred" else r for r in rows)
    own, goal, cross = (torch.stack([u @ v.mT] * 2) for u, v in ((a, a), (b, b), (b, a)))
    best = nearest(group, own, goal, cross).matrices
    reached = (best * cross.sum(0)).sum((-2, -1))
    for seed in range(20):
        other = random_mixings(sym, seeded(seed), spread=0.0)[k]
        assert bool(((other * cross.sum(0)).sum((-2, -1)) <= reached + 1e-9).all())


def test_least_squares_over_invertible_matrices_is_what_lbfgs_finds():
    a = torch.randn(2, 3, 4, 12, dtype=torch.float64, generator=seeded(1))
    b = a + 0.5 * torch.randn(2, 3, 4, 12, dtype=torch.float64, generator=seeded(2))
    eye = torch.eye(4, dtype=torch.float64).expand(3, -1, -1)
    found = least_squares(eye, a @ a.mT, b @ a.mT)

    def misfit(g):
        return (b - torch.stack([g, torch.linalg.inv(g).mT]) @ a).square().sum()

    free = eye.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([free], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = misfit(free)
        value.backward()
        return value

    optimizer.step(closure)
    assert float(misfit(found)) <= float(misfit(free.detach())) * (1 + 1e-8) < float(misfit(eye))
