import dataclasses
import functools

import pytest
import torch
from checked_symmetries import furthest, seeded
from mixing_networks import NETWORKS, Decoder, known
from scipy.linalg import orthogonal_procrustes
from torch import nn

from weightsym import (
    Learning,
    align,
    discover,
    fold_norms,
    identity,
    identity_mixings,
    learn_match,
    match,
    match_all,
    mix,
    permute,
    random_mixings,
    random_permutations,
    random_shifts,
    shift,
)
from weightsym import params as P
from weightsym.matching import channels
from weightsym.matching.learned import parted
from weightsym.matching.matrices import SpaceMap, least_squares, nearest, procrustes

# units of the chain's ReLUs that are never active cannot be told apart by activations
CASES = [(n, by) for n in NETWORKS for by in ("weights", "activations")]
CASES.remove(("chain", "activations"))


@functools.cache
def fused():
    """An encoder whose attention keeps queries, keys and values in one tensor."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, norm_first=True, batch_first=True)
    model = nn.Sequential(nn.Linear(3, 8), layer, nn.LayerNorm(8), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    x = torch.randn(40, 5, 3, dtype=torch.float64, generator=seeded())
    model = fold_norms(model.eval(), x[:1])
    return model, x, discover(model, x[:1]), P.of(model)


def problem(name):
    if name == "fused":
        return fused()
    model, x, sym, params = known(name)
    if x.is_floating_point():
        return model, torch.randn(100, *x.shape[1:], dtype=x.dtype, generator=seeded()), sym, params
    return model, torch.randint(5, (40, 6), generator=seeded()), sym, params


def planted(params, sym, permuted=True, seed=3):
    generator = seeded(seed)
    order = random_permutations(sym, generator) if permuted else identity(sym)
    return mix(permute(params, sym, order), sym, random_mixings(sym, generator))


def apart(a, b):
    return sum(float((a[n] - b[n]).square().sum()) for n in a) ** 0.5


# ------------------------------------------------------------ planted elements
@pytest.mark.parametrize("permuting", [True, False])
@pytest.mark.parametrize(("name", "by"), [*CASES, ("fused", "weights"), ("fused", "activations")])
def test_permutations_and_matrices_are_recovered(name, by, permuting):
    model, x, sym, params = problem(name)
    moved, data = planted(params, sym, permuting), {"model": model, "batches": [x]}
    found = match_all(moved, params, sym, by=by, permuting=permuting, **data)
    back = found.apply(moved, sym)
    assert furthest(moved, params) > 0.1
    assert furthest(back, params) < 1e-6
    assert float(found.before) == pytest.approx(apart(moved, params), rel=1e-6)
    assert float(found.after) < 1e-5


@pytest.mark.parametrize("name", ["stream", "fused"])
@pytest.mark.parametrize("by", ["weights", "activations"])
def test_the_function_stays_between_networks_that_differ(name, by):
    model, x, sym, params = problem(name)
    other = {n: t + torch.randn(t.shape, generator=seeded(1)).to(t) for n, t in params.items()}
    found = match_all(other, params, sym, model=model, batches=[x], by=by, sweeps=2)
    moved = found.apply(other, sym)
    before, after = (torch.func.functional_call(model, p, (x,)) for p in (other, moved))
    assert by == "activations" or apart(moved, params) < apart(other, params)
    assert float((after - before).abs().max() / before.abs().max()) < 1e-10


@pytest.mark.parametrize("name", ["stream", "centred"])
def test_under_noise_weights_come_as_close_as_the_planted_element_does(name):
    _, _, sym, params = problem(name)
    generator = seeded(5)
    noisy = {
        n: t + 0.2 * t.std() * torch.randn(t.shape, generator=generator).to(t)
        for n, t in params.items()
    }
    found = match_all(planted(noisy, sym), params, sym)
    assert float(found.after) <= apart(noisy, params) + 1e-9


# ------------------------------------------------------------ never worse
def transformer():
    """A decoder without gains that has tables of words and places."""
    return Decoder(16, heads=4, groups=4, gains=False, layers=1, vocab=27, places=16)


@functools.cache
def decoders(members=3):
    """Untrained decoders with tables of words and places, whose offset they share."""
    model, tokens = transformer(), torch.randint(27, (2, 16), generator=seeded())
    return discover(model, tokens), P.populate(model, members, seeded())


def pairs_of(name):
    """Two networks that have little in common, two that are nearly equal, and their symmetries."""
    if name == "decoders":
        sym, stack = decoders()
        a, b = P.unstack(stack)[:2]
    else:
        _, _, sym, b = problem(name)
        a = {n: torch.randn(t.shape, generator=seeded(1)).to(t) * t.std() for n, t in b.items()}
    noise = {n: 0.02 * torch.randn(t.shape, generator=seeded(2)).to(t) for n, t in b.items()}
    return sym, [(a, b), ({n: t + noise[n] for n, t in b.items()}, b)]


@pytest.mark.parametrize("name", [*NETWORKS, "fused", "decoders"])
def test_no_network_ends_farther_away_than_permutations_or_nothing_leave_it(name):
    sym, pairs = pairs_of(name)
    for a, b in pairs:
        least = min(apart(a, b), apart(match(a, b, sym).apply(a, sym), b))
        assert float(match_all(a, b, sym).after) <= least * (1 + 1e-6)
        mixed = match_all(a, b, sym, permuting=False).apply(a, sym)
        assert apart(mixed, b) <= apart(a, b) * (1 + 1e-6)


def test_tables_count_but_for_the_offset_that_they_share():
    """Else the rotation of a stream is found without most of its weights."""
    sym, stack = decoders()
    a, b = P.unstack(stack)[:2]
    assert {"embed.weight", "places.weight"} <= {
        sym.axes[p.axis].tensor for group in sym.shifts for p in group.placements
    }
    found = match_all(a, b, sym)
    assert float(found.after) < 0.85 * apart(match(a, b, sym).apply(a, sym), b)
    small = [[0.1 * c for c in random_shifts(sym, seeded(k))] for k in range(2)]
    same = match_all(*(shift(w, sym, c) for w, c in zip((a, b), small, strict=True)), sym)
    for mine, other in zip(found.matrices, same.matrices, strict=True):
        assert torch.allclose(mine, other, atol=1e-3)


def test_streams_are_compared_where_they_are_read_and_heads_where_they_are_written():
    model, x, sym, params = problem("stream")
    keys = [(k, n) for k, g in enumerate(sym.linear) for n in range(len(g.placements))]
    roles = {key: sym.axes[sym.linear[key[0]].placements[key[1]].axis].dim for key in keys}
    chosen = channels._telling(sym, dict.fromkeys(keys, 0))
    for k, group in enumerate(sym.linear):
        dims = {roles[key] for key in chosen if key[0] == k}
        assert dims == ({0} if group.rescales else {1})
    written = [key for key in keys if roles[key] == 0]
    assert channels._telling(sym, dict.fromkeys(written, 0)) == written


def test_without_matrices_it_is_matching_by_permutations():
    model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3))
    sym = discover(model, torch.randn(1, 4))
    torch.manual_seed(0)
    other = {n: torch.randn_like(t) for n, t in P.of(model).items()}
    found = match_all(other, P.of(model), sym)
    assert not sym.linear
    assert found.matrices == ()
    expected = match(other, P.of(model), sym).apply(other, sym)
    assert furthest(found.apply(other, sym), expected) == 0


def test_a_stream_with_gains_is_not_turned():
    _, _, sym, params = problem("heads")
    q = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64, generator=seeded())).Q
    turned = {n: t @ q.mT if n == "embed.weight" else t for n, t in params.items()}
    assert all(g.kind == "general" for g in sym.linear)
    back = match_all(turned, params, sym).apply(turned, sym)
    columns = turned["embed.weight"].T
    assert all((columns == c).all(1).any() for c in back["embed.weight"].T)
    assert apart(back, params) > 0.1


def test_members_of_a_stack_are_matched_one_by_one():
    model, x, sym, params = problem("centred")
    rows = [planted(params, sym, seed=s) for s in (1, 2)]
    stack = P.stack(rows)
    found = match_all(stack, params, sym, model=model, batches=[x], by="activations")
    assert found.before.shape == found.after.shape == (2,)
    back = found.apply(stack, sym)
    assert max(float((back[n] - params[n]).abs().max()) for n in params) < 1e-6
    matrices = match_all(stack, params, sym, permuting=False, sweeps=1).matrices
    assert all(m.shape[0] == 2 for m in matrices)


# ------------------------------------------------------------ parts
def test_procrustes_is_scipys():
    a, b = (torch.randn(5, 30, dtype=torch.float64, generator=seeded(s)) for s in (1, 2))
    rotation, scale = orthogonal_procrustes(a.T.numpy(), b.T.numpy())
    found = procrustes(b @ a.mT)
    assert torch.allclose(found.matrices, torch.from_numpy(rotation.T))
    assert float(found.similarity) == pytest.approx(scale)


def test_phases_and_centred_rotations_beat_all_others_of_their_groups():
    for name, kind in (("rotary", "complex"), ("centred", "centred")):
        _, _, sym, _ = problem(name)
        k = next(k for k, g in enumerate(sym.linear) if g.kind == kind)
        group = sym.linear[k]
        rows = [
            torch.randn(group.spaces, group.size, 9, dtype=torch.float64, generator=seeded(s))
            for s in (1, 2)
        ]
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
        both = torch.stack([g, torch.linalg.inv(g).mT])
        return (b - both @ a).square().sum()

    free = eye.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([free], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = misfit(free)
        value.backward()
        return value

    optimizer.step(closure)
    assert float(misfit(found)) <= float(misfit(free.detach())) * (1 + 1e-8) < float(misfit(eye))


@pytest.mark.parametrize("name", [*NETWORKS, "fused"])
def test_matrices_go_where_permutations_carry_their_channels(name):
    _, _, sym, params = problem(name)
    order, matrices = random_permutations(sym, seeded(2)), random_mixings(sym, seeded(1))
    later = SpaceMap(sym).carried(matrices, order)
    mixed_first = permute(mix(params, sym, matrices), sym, order)
    assert furthest(mix(permute(params, sym, order), sym, later), mixed_first) < 1e-12


def test_channels_that_no_linear_map_shows_are_matched_by_weights(caplog):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(4, 6, dtype=torch.float64, generator=seeded(1)))
            self.last = nn.Parameter(torch.randn(3, 4, dtype=torch.float64, generator=seeded(2)))

        def forward(self, x):
            return torch.einsum("oh,hi,bi->bo", self.last, self.first, x)

    model, x = Hidden(), torch.randn(20, 6, dtype=torch.float64, generator=seeded())
    sym, params = discover(model, x[:1]), P.of(model)
    if not sym.linear:
        pytest.skip("this product is not read")
    moved = mix(params, sym, random_mixings(sym, seeded(1)))
    match_all(moved, params, sym, model=model, batches=[x], by="activations", permuting=False)
    assert "weights are compared" in caplog.text


# ------------------------------------------------------------ learned
def test_learning_never_ends_above_its_start_and_keeps_the_function():
    model, x, sym, params = problem("centred")
    x = x[:40]
    other = {
        n: t + 0.5 * torch.randn(t.shape, generator=seeded(1)).to(t) for n, t in params.items()
    }
    batches = [(b, model(b).detach()) for b in x.split(10)]
    start = match_all(other, params, sym)
    loss = nn.functional.mse_loss
    learn = functools.partial(learn_match, start, other, params, sym, model, batches, loss=loss)
    found = learn(learning=Learning(steps=30, every=5))
    judging = parted(batches, 0.25, 0)[1]

    def half_way(element):
        middle = {n: (t + params[n]) / 2 for n, t in element.apply(other, sym).items()}
        return sum(
            float(loss(torch.func.functional_call(model, middle, (a,)), b)) for a, b in judging
        )

    assert half_way(found) < half_way(start)
    outputs = [torch.func.functional_call(model, p, (x,)) for p in (other, found.apply(other, sym))]
    assert torch.allclose(*outputs, rtol=1e-9, atol=1e-10)
    unmoved = learn(learning=Learning(steps=2, rate=1e6))
    assert half_way(unmoved) <= half_way(start) * (1 + 1e-9)


def test_networks_without_anything_to_match_and_with_statistics():
    x = torch.randn(8, 1, 5, 5, generator=seeded())
    norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
    for model in (
        nn.Sequential(nn.Flatten(), nn.Linear(25, 2)).eval(),
        nn.Sequential(*norm).eval(),
    ):
        sym, params = discover(model, x[:1]), P.of(model)
        other = {n: t * 1.5 if t.is_floating_point() else t for n, t in params.items()}
        start = match_all(other, params, sym)
        batches = [(x, torch.zeros(8, dtype=torch.long))] * 2
        found = learn_match(start, other, params, sym, model, batches, learning=Learning(steps=2))
        assert len(found.permutations) == len(sym.permutations)
        if not sym.permutations and not sym.linear:
            assert found is start


# ------------------------------------------------------------ bad input
@pytest.mark.bad_input
def test_errors():
    model, x, sym, params = problem("centred")
    other = {n: t.clone() for n, t in params.items()}
    with pytest.raises(ValueError, match="`by` must be one of weights, activations, got 'both'"):
        match_all(other, params, sym, by="both")
    with pytest.raises(ValueError, match="needs `model` and `batches`"):
        match_all(other, params, sym, by="activations", model=model)
    with pytest.raises(ValueError, match="`batches` is empty"):
        match_all(other, params, sym, by="activations", model=model, batches=[])
    with pytest.raises(ValueError, match="put one tensor into a list"):
        match_all(other, params, sym, by="activations", model=model, batches=x)
    with pytest.raises(ValueError, match="`sweeps` must be at least 1, got 0"):
        match_all(other, params, sym, sweeps=0)
    with pytest.raises(ValueError, match="`reference` must be one network"):
        match_all(other, P.stack([params, params]), sym)
    with pytest.raises(ValueError, match="activations that are not finite"):
        match_all(other, params, sym, by="activations", model=model, batches=[x * torch.inf])
    start = match_all(other, params, sym)
    with pytest.raises(ValueError, match="`start` must be what `match_all` returns, got list"):
        learn_match([], other, params, sym, model, [(x, x)] * 2)
    with pytest.raises(ValueError, match="at least two"):
        learn_match(start, other, params, sym, model, [(x, x)])
    assert [m.shape for m in start.matrices] == [m.shape for m in identity_mixings(sym)]


# ------------------------------------------------------------ many networks


@functools.cache
def networks_of(name, near):
    if name == "decoders":
        sym, stack = decoders()
    else:
        _, _, sym, params = problem(name)
        noise = {n: torch.randn(3, *t.shape, generator=seeded()).to(t) for n, t in params.items()}
        stack = {n: t + noise[n] for n, t in params.items()}
    if near:
        stack = {
            n: t[:1] + 0.05 * t.std() * torch.randn(t.shape, generator=seeded(1)).to(t)
            for n, t in stack.items()
        }
    return sym, stack


@functools.cache
def in_one_frame(name, near, method):
    """The result of `align` with matrices, and the networks in their common frame."""
    sym, stack = networks_of(name, near)
    found = align(stack, sym, mixing=True, method=method, sweeps=1)
    return found, found.apply(stack, sym)


def spread_of(stack, sym):
    return sum(float((stack[n] - stack[n].mean(0)).double().square().sum()) for n in sym.touched)


MANY = [("rotary", False), ("stream", True), ("decoders", False)]


@pytest.mark.parametrize(("name", "near"), MANY)
def test_matrices_never_make_the_joint_frame_wider(name, near):
    """Not from sweep to sweep, and not wider than no, or permutations, or the first one make it."""
    sym, stack = networks_of(name, near)
    found, moved = in_one_frame(name, near, "joint")
    assert found.spread[2] <= found.spread[1] * (1 + 1e-9)
    assert found.spread[0] == pytest.approx(spread_of(stack, sym), rel=1e-6)
    assert found.spread[-1] == pytest.approx(spread_of(moved, sym), rel=1e-5)
    to_the_first = in_one_frame(name, near, "reference")[1]
    for others in (stack, align(stack, sym).apply(stack, sym), to_the_first):
        assert found.spread[-1] <= spread_of(others, sym) * (1 + 1e-6)


@pytest.mark.parametrize("method", ["joint", "reference"])
@pytest.mark.parametrize(("name", "near"), MANY)
def test_the_frame_is_that_of_the_first_network(name, near, method):
    _, stack = networks_of(name, near)
    moved = in_one_frame(name, near, method)[1]
    by = [max(float((moved[n][k] - t[k]).abs().max()) for n, t in stack.items()) for k in (0, 2)]
    assert by[0] < 1e-5 < by[1]


def test_sweeps_that_end_too_early_are_told(caplog):
    sym, stack = networks_of("rotary", near=False)
    align(stack, sym, mixing=True, sweeps=1)
    assert "networks still move after 1 sweeps" in caplog.text


@pytest.mark.bad_input
def test_matrices_do_not_go_with_signs():
    sym, stack = networks_of("stream", near=False)
    with pytest.raises(ValueError, match="`mixing` does not go with `signs`"):
        align(stack, sym, mixing=True, signs=True)


# ------------------------------------------------------------ activations that shifts move
def test_what_two_tables_share_moves_no_activation():
    """The matrices are those that are found where the offset of both is not known."""
    torch.manual_seed(0)
    tokens = torch.randint(27, (20, 16))
    model = transformer()
    a, b = P.unstack(P.populate(model, 2))
    sym = discover(model, tokens[:1])
    others = tuple(s for s in sym.shifts if len(s.placements) != 2 or s.readers)
    assert len(others) == len(sym.shifts) - 1
    found, other = (
        match_all(a, b, known, model=model, batches=[tokens], by="activations", permuting=False)
        for known in (sym, dataclasses.replace(sym, shifts=others))
    )
    for mine, theirs in zip(found.matrices, other.matrices, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_only_channels_of_free_biases_float():
    """Values and keys, whose biases are free, unlike those of a stream."""
    _, _, sym, _ = fused()
    floats = [channels._floats(sym, group) for group in sym.linear]
    assert floats == [group.rescales for group in sym.linear]
    assert {True, False} == set(floats)
