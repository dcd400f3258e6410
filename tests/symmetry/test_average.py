"""Averages in one frame: copies of one network, weights, order, a running mean."""

import itertools

import pytest
import torch
from cases import CASES
from checked_symmetries import close, seeded
from mixing_networks import NETWORKS
from mixing_networks import known as known_mixing
from torch import nn

from lightning_bnn import models
from weightsym import (
    align,
    average,
    discover,
    flip,
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

LARGE = ("convnext", "mobilenet", "resnet", "resnet20 frn")
SMALL = [c for c in CASES if c.name not in LARGE]
BATCH_NORMS = [c for c in CASES if c.name == "resnet"]


def moved(params, sym, members, seed=0, scales=True):
    """Copies of one network, each with its units rescaled, flipped and exchanged at random.

    Flips are those that `match` looks for: of whole units, outside of blocks.
    """
    generator, mirrors = seeded(seed), Plan(sym).mirrors
    stack = {n: t.expand(members, *t.shape).clone() for n, t in params.items()}
    if scales and sym.scalings:
        stack = rescale(stack, sym, random_scales(sym, generator, members))
    if sym.signs:
        signs = random_signs(sym, generator, members)
        signs = [s if k in mirrors else torch.ones_like(s) for k, s in enumerate(signs)]
        stack = flip(stack, sym, signs)
    return permute(stack, sym, random_permutations(sym, generator, members))


def misfit(model, x, a, b):
    """Largest difference of outputs, as a share of the largest output."""
    one, other = P.apply(model, a, x), P.apply(model, b, x)
    return float((one - other).abs().max() / other.abs().max())


def mlps(members, seed=0):
    model = models.mlp(6, [12, 10], 4).double()
    torch.manual_seed(seed)
    return model, discover(model, torch.randn(1, 6).double()), P.populate(model, members)


# ------------------------------------------------------------ copies
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_copies_of_one_network_average_to_it(case):
    model, x, sym = case.known()
    params = P.of(model)
    stack = moved(params, sym, 3)
    least = rescale(stack, sym, min_mass(stack, sym).scales) if sym.scalings else stack
    found = average(least, sym, [1, 2, 3])
    assert misfit(model, x, found, params) < 1e-6
    plain = P.weighted_mean(stack, [1, 2, 3])
    assert misfit(model, x, plain, params) > 1e-2  # a negative control


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "chain"])
def test_copies_mixed_by_matrices_average_to_one(name):
    model, x, sym, params = known_mixing(name)
    stack = P.stack([params, mix(params, sym, random_mixings(sym, seeded(1)))])
    found = average(stack, sym, mixing=True)
    assert misfit(model, x, found, params) < 1e-6
    assert misfit(model, x, P.weighted_mean(stack), params) > 1e-2


def test_a_reference_gives_the_frame():
    model, sym, stack = mlps(1)
    one = {n: t[0] for n, t in stack.items()}
    copies = moved(one, sym, 3, scales=False)
    assert close(average(copies, sym, [0, 1, 2], reference=one), one, 1e-12)
    assert not close(average(copies, sym), one, 1e-2)  # in the frame of the first copy


# ------------------------------------------------------------ weights
def test_weights_choose():
    """A network of weight one comes back as it is, and only shares count."""
    _, sym, stack = mlps(4)
    for k in range(4):
        weights = [float(k == m) for m in range(4)]
        assert close(average(stack, sym, weights), {n: t[k] for n, t in stack.items()})
    a, b = average(stack, sym, [1, 2, 3, 0]), average(stack, sym, torch.tensor([10, 20, 30, 0]))
    assert close(a, b)
    assert not close(a, average(stack, sym, [3, 2, 1, 0]), 1e-3)


def test_weights_count_as_copies_do():
    """A network of weight two is two networks, for the alignment, too."""
    _, sym, stack = mlps(3)
    twice = {n: torch.cat([t, t[2:]]) for n, t in stack.items()}
    weighted, copied = align(stack, sym, weights=[1, 1, 2]), align(twice, sym)
    assert weighted.spread[0] * 4 / 3 == pytest.approx(copied.spread[0], rel=1e-9)
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


def test_the_order_of_networks_does_not_matter():
    """Noisy copies, whose planted elements alignment finds, averaged in any order."""
    model, sym, stack = mlps(1)
    one = {n: t[0] for n, t in stack.items()}
    copies = moved(one, sym, 4, scales=False)
    copies = {n: t + 0.02 * torch.randn(t.shape, generator=seeded(5)) for n, t in copies.items()}
    x, weights = torch.randn(20, 6, generator=seeded(2)).double(), torch.tensor([1.0, 2, 3, 4])
    first = average(copies, sym, weights)
    for order in itertools.islice(itertools.permutations(range(4)), 1, 24, 5):
        rows = list(order)
        again = average({n: t[rows] for n, t in copies.items()}, sym, weights[rows])
        assert misfit(model, x, again, first) < 1e-9
    assert misfit(model, x, average(copies, sym, weights.flip(0)), first) > 1e-4


# ------------------------------------------------------------ batch norms
def test_statistics_are_those_of_the_average():
    case = BATCH_NORMS[0]
    model, x, sym = case.known()
    stack = P.stack([P.of(model)] * 2)
    stack = {n: t + 0.1 * torch.rand_like(t) if t.is_floating_point() else t
             for n, t in stack.items()}  # fmt: skip
    batches = [torch.randn(4, *x.shape[1:], generator=seeded(k)).double() for k in range(2)]
    found = average(stack, sym, model=model, batches=batches)
    plain = average(stack, sym)
    twin = type(model)().double() if not isinstance(model, nn.Sequential) else model
    twin.load_state_dict(plain, strict=False)
    torch.optim.swa_utils.update_bn(batches, twin)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(found[name], tensor, msg=name)
    assert any(not torch.equal(found[n], plain[n]) for n in plain if n.endswith("running_mean"))


# ------------------------------------------------------------ errors
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1, 2]}, "`weights` must be 3 numbers that are not negative"),
        ({"weights": [1, 2, -1]}, "not negative, one for each network, got 1 2 -1"),
        ({"weights": [0, 0, 0]}, "not negative"),
        ({"weights": [1, 2, float("nan")]}, "not negative"),
        ({"weights": [1, 2, True]}, "not negative"),
        ({"weights": 3}, "not negative"),
        ({"model": nn.Linear(1, 1)}, "`model` and `batches` go together"),
        ({"reference": {}}, "`reference` lacks"),
    ],
)
def test_errors(change, message):
    _, sym, stack = mlps(3)
    with pytest.raises(ValueError, match=message):
        average(stack, sym, **change)


@pytest.mark.bad_input
def test_errors_of_networks():
    model, sym, stack = mlps(3)
    with pytest.raises(ValueError, match="must be a stack of networks, not one network"):
        average({n: t[0] for n, t in stack.items()}, sym)
    case = BATCH_NORMS[0]
    network, _, groups = case.known()
    pair = P.stack([P.of(network)] * 2)
    with pytest.raises(ValueError, match="`batches` is empty"):
        average(pair, groups, model=network, batches=[])
    with pytest.raises(ValueError, match="put one tensor into a list"):
        average(pair, groups, model=network, batches=torch.ones(2, 3))
