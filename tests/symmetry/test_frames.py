"""Many networks in one frame, and their averages there."""

import copy
import dataclasses
import functools
import itertools

import pytest
import torch
from checked_symmetries import close, cycle_error, find, furthest, seeded
from test_matching import SMALL, decoders, mlps, noisy, planted, problem
from torch import nn

from lightning_bnn import models
from weightsym import (
    align,
    average,
    discover,
    flip,
    invert,
    match,
    match_all,
    min_mass,
    mix,
    permute,
    random_mixings,
    random_permutations,
    random_scales,
    random_signs,
    rescale,
)
from weightsym import params as P
from weightsym.matching.plan import Plan


def spread_of(stack, names):
    return sum(float((stack[n] - stack[n].mean(0)).double().square().sum()) for n in names)


# ------------------------------------------------------------ alignment
@functools.cache
def networks_of(name):
    """Symmetries and a stack: of networks with nothing in common, or nearly equal ones."""
    name, _, near = name.partition(", ")
    if name == "decoders":
        _, _, sym, stack = decoders()
    elif name == "mlp":
        _, sym, stack = mlps(8)
    elif name in ("rotary heads", "stream"):
        _, _, sym, params = find(name)
        stack = P.stack([noisy(params, 0.05 if near else 1.0, k) for k in range(3)])
    else:
        model, _, sym, _ = problem(name)
        stack = P.populate(model, 6)
    return sym, stack


@functools.cache
def in_one_frame(name, mixing, method="joint"):
    sym, stack = networks_of(name)
    more = {"sweeps": 1} if mixing else {}
    found = align(stack, sym, mixing=mixing, method=method, **more)
    return found, found.element(stack)


FRAMES = [("mlp", False), ("short stream", False), ("optunet", False), ("rotary heads", True),
          ("stream, near", True), ("decoders", True)]  # fmt: skip


@pytest.mark.parametrize(("name", "mixing"), FRAMES)
def test_the_joint_frame_is_never_wider_than_none_or_that_of_the_first(name, mixing):
    sym, stack = networks_of(name)
    (joint, moved), (first, to_the_first) = (
        in_one_frame(name, mixing, m) for m in ("joint", "reference")
    )
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(joint.spread[1:]))
    assert joint.spread[-1] <= first.spread[-1] * (1 + 1e-6) < first.spread[0] == joint.spread[0]
    names = sym.touched if mixing else Plan(sym).compared
    for given, spread in ((stack, joint.spread[0]), (moved, joint.spread[-1])):
        assert spread_of(given, names) == pytest.approx(spread, rel=1e-5)
    others = (stack, to_the_first, align(stack, sym).element(stack))
    assert all(joint.spread[-1] <= spread_of(s, names) * (1 + 1e-6) for s in others)
    for frame in (moved, to_the_first):  # that of the first network
        rows = [[{n: t[k] for n, t in s.items()} for s in (frame, stack)] for k in (0, 2)]
        assert furthest(*rows[0]) < 1e-5 < furthest(*rows[1])


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("sample", [256, 3])
def test_permuted_copies_of_one_network_become_equal(signs, sample, monkeypatch):
    """Also where five networks are many: they begin with a sample, and move two at a time."""
    if sample < 5:
        monkeypatch.setattr("weightsym.matching.align._PARTS", 3)
        monkeypatch.setattr("weightsym.matching.align._MANY", sample)
        monkeypatch.setattr("weightsym.matching.align._SAMPLE", sample)
    torch.manual_seed(0)
    model = models.mlp(6, [12, 10], 3, nn.Tanh if signs else nn.ReLU).double()
    sym, generator = discover(model, torch.randn(1, 6).double()), seeded()
    stack = permute(P.stack([P.of(model)] * 5), sym, random_permutations(sym, generator, 5))
    stack = flip(stack, sym, random_signs(sym, generator, 5)) if signs else stack
    moved = align(stack, sym, signs=signs).element(stack)
    assert all(torch.equal(t, t[:1].expand_as(t)) for t in moved.values())
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
    assert cycle_error({(a, b): found.between(a, b).permutations for a, b in pairs}, sym) == 0
    one_by_one = {(a, b): match(members[a], members[b], sym) for a, b in pairs}
    assert cycle_error(one_by_one, sym) > 0.1
    moved = found.element(stack)
    there = permute(members[2], sym, found.between(2, 1).permutations)
    back = permute({n: t[1] for n, t in moved.items()}, sym, invert([p[1] for p in found], sym))
    assert close(back, members[1])
    assert not close(there, members[2])


@pytest.mark.parametrize("name", ["branches", "branches in a stream"])
def test_a_common_frame_exchanges_experts(name):
    model, x, sym, params = problem(name)
    networks = [planted(noisy(params, 0.05, k), sym, seed=k) for k in range(4)]
    found = align(P.stack(networks), sym)
    assert found.spread[-1] < 0.02 * found.spread[0]
    pairs = itertools.permutations(range(4), 2)
    assert cycle_error({(a, b): found.between(a, b).permutations for a, b in pairs}, sym) == 0
    moved = found.element(P.stack(networks))
    torch.testing.assert_close(P.apply(model, moved, x), P.apply(model, P.stack(networks), x))


def test_stacks_of_which_nothing_moves_or_precision_is_low_and_early_ends(caplog):
    linear = nn.Linear(3, 2)
    sym, stack = discover(linear, torch.randn(1, 3)), P.populate(linear, 3)
    assert close(align(stack, sym).element(stack), stack)
    _, sym, stack = mlps(3)
    single = align({n: t[:1] for n, t in stack.items()}, sym)
    assert single.spread[-1] == pytest.approx(0, abs=1e-9)
    assert align({n: 300 * torch.ones_like(t).half() for n, t in stack.items()}, sym)
    tiny = {n: 1e-30 * t.double() for n, t in stack.items()}
    assert align(tiny, sym).spread[-1] < 0.9 * spread_of(tiny, Plan(sym).compared)
    huge = {n: t.double() * (1e30 if n == "3.weight" else 1) for n, t in stack.items()}
    assert match(huge, P.unstack(stack)[0], sym)
    assert align({n: t * (1e-30 if n.endswith("bias") else 1) for n, t in stack.items()}, sym)
    sym, stack = networks_of("rotary heads")
    align(stack, sym, mixing=True, sweeps=1)
    assert "networks still move after 1 sweeps" in caplog.text


def test_what_two_tables_share_moves_no_activation():
    """The matrices are those that are found where the offset of both is not known."""
    model, tokens, sym, stack = decoders()
    a, b = P.unstack(stack)[:2]
    others = tuple(s for s in sym.shifts if len(s.placements) != 2 or s.readers)
    assert len(others) == len(sym.shifts) - 1
    data = {"model": model, "batches": [tokens], "by": "activations", "permuting": False}
    found, other = (
        match_all(a, b, known, **data) for known in (sym, dataclasses.replace(sym, shifts=others))
    )
    for mine, theirs in zip(found.matrices, other.matrices, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


# ------------------------------------------------------------ averages
def copies(params, sym, members, scales=True):
    """Copies of one network, each with its units rescaled, flipped and exchanged at random.

    Flips are those that `match` looks for: of whole units, outside of blocks.
    """
    generator, mirrors = seeded(), Plan(sym).mirrors
    stack = {n: t.expand(members, *t.shape).clone() for n, t in params.items()}
    if scales:
        stack = rescale(stack, sym, random_scales(sym, generator, members))
    signs = random_signs(sym, generator, members)
    signs = [s if k in mirrors else torch.ones_like(s) for k, s in enumerate(signs)]
    return permute(flip(stack, sym, signs), sym, random_permutations(sym, generator, members))


def misfit(model, x, a, b):
    """Largest difference of outputs, as a share of the largest output."""
    one, other = P.apply(model, a, x), P.apply(model, b, x)
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("name", [*SMALL, "adapter", "centred"])
def test_copies_of_one_network_average_to_it(name):
    model, x, sym, params = problem(name)
    if sym.linear and name not in SMALL:
        stack = P.stack([params, mix(params, sym, random_mixings(sym, seeded(1)))])
        found = average(stack, sym, mixing=True)
    else:
        stack = copies(params, sym, 3)
        least = rescale(stack, sym, min_mass(stack, sym).scales) if sym.scalings else stack
        found = average(least, sym, [1, 2, 3])
    assert misfit(model, x, found, params) < 1e-6
    assert misfit(model, x, P.weighted_mean(stack), params) > 1e-2  # a negative control


def test_weights_choose_and_a_reference_gives_the_frame():
    """A network of weight one comes back as it is, and only shares count."""
    _, sym, stack = mlps(4)
    one, many = P.unstack(stack)[0], copies(P.unstack(stack)[0], sym, 3, scales=False)
    assert close(average(many, sym, [0, 1, 2], reference=one), one, 1e-6)
    assert not close(average(many, sym), one, 1e-2)  # in the frame of the first copy
    for k, member in enumerate(P.unstack(stack)):
        assert close(average(stack, sym, [float(k == m) for m in range(4)]), member)
    a, b = average(stack, sym, [1, 2, 3, 0]), average(stack, sym, torch.tensor([10, 20, 30, 0]))
    assert close(a, b, 1e-7)
    assert not close(a, average(stack, sym, [3, 2, 1, 0]), 1e-3)


def test_weights_count_as_copies_do():
    """A network of weight two is two networks, for the alignment, too."""
    _, sym, stack = mlps(3)
    twice = {n: torch.cat([t, t[2:]]) for n, t in stack.items()}
    weighted, copied = align(stack, sym, weights=[1, 1, 2]), align(twice, sym)
    assert weighted.spread[0] * 4 / 3 == pytest.approx(copied.spread[0], rel=1e-6)
    # two optima of one problem: the search sees copies in another order
    assert weighted.spread[-1] * 4 / 3 == pytest.approx(copied.spread[-1], rel=0.05)
    assert weighted.spread[-1] < 0.9 * weighted.spread[0]
    assert close(average(stack, sym, [1, 1, 1]), average(stack, sym))


def test_the_weighted_mean_is_numpy_s():
    stack = {"w": torch.randn(3, 2, 5).half(), "n": torch.tensor([[3], [4], [5]])}
    found = P.weighted_mean(stack, [1, 1, 2])
    expected = (stack["w"].double() * torch.tensor([0.25, 0.25, 0.5])[:, None, None]).sum(0)
    torch.testing.assert_close(found["w"].double(), expected, rtol=0, atol=2e-3)
    assert found["w"].dtype == torch.half
    assert found["n"].tolist() == [3]
    mask = torch.tensor([[0.0, -torch.inf]] * 2)
    assert P.weighted_mean({"mask": mask})["mask"].tolist() == [0.0, -torch.inf]
    bad = {"w": torch.tensor([[1.0], [torch.nan]])}
    assert P.weighted_mean(bad, [1, 0])["w"].tolist() == [1.0]
    assert P.weighted_mean(bad)["w"].isnan().all()


def test_statistics_are_those_of_the_average():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
    model = nn.Sequential(*layers).double().eval()
    batches = [torch.randn(4, 1, 5, 5, generator=seeded(k)).double() for k in range(2)]
    sym, stack = discover(model, batches[0]), P.populate(model, 2)
    found, plain = average(stack, sym, model=model, batches=batches), average(stack, sym)
    twin = copy.deepcopy(model)
    twin.load_state_dict(plain)
    torch.optim.swa_utils.update_bn(batches, twin)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(found[name], tensor, msg=name)
    assert not torch.equal(found["1.running_mean"], plain["1.running_mean"])
