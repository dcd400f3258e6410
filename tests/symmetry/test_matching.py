import functools
import logging

import pytest
import torch
import torchvision
from cases import CASES, NESTED, randomise
from torch import nn

from lightning_bnn import models
from weightsym import (
    barrier,
    discover,
    interpolate,
    match,
    match_activations,
    permute,
    random_permutations,
    transpositions,
)
from weightsym import params as P
from weightsym.matching.plan import Plan

PLANTED = [c for c in CASES if c.name not in ("convnext", "mobilenet", "resnet")]
PLANTED += NESTED


def ids(case):
    return case.name


def plant(params, sym, noise):
    """A permuted copy with noise, and the copy before permuting."""
    generator = torch.Generator().manual_seed(1)
    noisy = dict(params)
    for n, t in params.items():
        if t.is_floating_point() and t.numel() > 1 and "running" not in n:
            noisy[n] = t + noise * t.std() * torch.randn(
                t.shape, generator=generator, dtype=t.dtype
            )
    return permute(noisy, sym, random_permutations(sym, generator)), noisy


def recovered(found, noisy):
    return all(torch.equal(found[n], noisy[n]) for n in noisy)


@pytest.mark.parametrize("case", PLANTED, ids=ids)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_planted_permutation_is_recovered(case, noise):
    model, x, sym = case.known()
    params = P.of(model)
    planted, noisy = plant(params, sym, noise)
    assert not recovered(planted, noisy)
    assert recovered(permute(planted, sym, match(planted, params, sym)), noisy)


@pytest.mark.e2e
def test_resnet18_with_half_its_weights_noise():
    model = randomise(torchvision.models.resnet18())
    sym, params = discover(model, torch.randn(1, 3, 32, 32)), P.of(model)
    assert sym.log10_permutations == pytest.approx(5934.5, abs=0.05)
    planted, noisy = plant(params, sym, 0.5)
    assert recovered(permute(planted, sym, match(planted, params, sym)), noisy)


def test_matching_never_moves_away():
    nets = [models.mlp(8, [12, 10, 9], 4) for _ in range(2)]
    a, b = map(P.of, nets)
    sym = discover(nets[0], torch.randn(1, 8))

    def similarity(permutations):
        moved = permute(a, sym, permutations)
        return float(sum((moved[n] * b[n]).sum() for n in b))

    none = similarity([torch.arange(n) for n in (12, 10, 9)])
    score, again = (similarity(match(a, b, sym, seed=3)) for _ in range(2))
    assert none < score == again


# ------------------------------------------------------------ activations
class Multiplied(nn.Module):
    """Weights that no matrix product multiplies."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(n, m)) for n, m in ((5, 4), (3, 5)))

    def forward(self, x):
        hidden = (x[:, None] * self.first).sum(-1).relu()
        return (hidden[:, None] * self.last).sum(-1)


def test_units_that_no_layer_shows_are_named(caplog):
    model, x = Multiplied(), torch.randn(6, 4)
    sym, params = discover(model, x), P.of(model)
    with caplog.at_level(logging.WARNING, logger="weightsym"):
        (found,) = match_activations(model, params, params, sym, [x])
    assert "no layer shows the units of first; they stay" in caplog.text
    assert torch.equal(found, torch.arange(5))


# ------------------------------------------------------------ interpolation
def batches_for(shape, classes=3):
    return [(torch.randn(shape), torch.randint(classes, shape[:1])) for _ in range(3)]


def test_barrier_is_the_papers_definition():
    model = models.mlp(5, [7], 3)
    a, b = P.of(models.mlp(5, [7], 3)), P.of(models.mlp(5, [7], 3))
    batches = batches_for((16, 5))
    found = barrier(model, a, b, batches, points=5)
    x, y = (torch.cat(t) for t in zip(*batches, strict=True))
    losses = []
    for w in (0.0, 0.25, 0.5, 0.75, 1.0):
        mixed = {n: (1 - w) * a[n] + w * b[n] for n in a}
        losses.append(float(nn.functional.cross_entropy(P.apply(model, mixed, x), y)))
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert found.height == pytest.approx(max(losses) - (losses[0] + losses[-1]) / 2, rel=1e-4)


def test_no_barrier_between_a_network_and_its_matched_permutation():
    model = models.mlp(5, [16, 16], 3)
    sym, a = discover(model, torch.randn(1, 5)), {n: 3 * t for n, t in P.of(model).items()}
    b = permute(a, sym, random_permutations(sym))
    batches = [(x, P.apply(model, a, x).argmax(1)) for x, _ in batches_for((32, 5))]
    assert transpositions(match(b, a, sym)[0]) > 5
    before = barrier(model, a, b, batches)
    after = barrier(model, a, permute(b, sym, match(b, a, sym)), batches)
    assert after.height == pytest.approx(0, abs=1e-6)
    assert before.height > after.height + 0.01


def test_batch_norm_statistics_are_estimated_anew():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    params = {n: t.clone() for n, t in P.of(model).items()}
    state = {n: t.clone() for n, t in model.state_dict().items()}
    batches = batches_for((64, 5))
    fresh = barrier(model, params, params, batches, points=3)
    stale = barrier(model, params, params, batches, points=3, batch_norm="as-is")
    x = torch.cat([x for x, _ in batches])
    y = torch.cat([y for _, y in batches])
    hidden = model[0](x)
    parts = torch.stack([model[0](b).var(0) for b, _ in batches]).mean(0)
    params["1.running_mean"], params["1.running_var"] = hidden.mean(0).detach(), parts.detach()
    expected = float(nn.functional.cross_entropy(P.apply(model.eval(), params, x), y))
    assert fresh.losses[0] == pytest.approx(expected, rel=1e-4)
    assert stale.losses[0] != pytest.approx(expected, rel=1e-4)
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())


def test_interpolation_leaves_integers_alone():
    a, b = P.of(nn.BatchNorm1d(2)), P.of(nn.BatchNorm1d(2))
    assert interpolate(a, b, 0.5)["num_batches_tracked"].dtype == torch.int64


@pytest.mark.bad_input
def test_errors():
    model = models.mlp(4, [6], 3)
    sym, params = discover(model, torch.randn(1, 4)), P.of(model)
    with pytest.raises(ValueError, match="`reference` must be one network"):
        match(params, P.populate(model, 2), sym)
    with pytest.raises(ValueError, match="`batches` is empty"):
        match_activations(model, params, params, sym, [])
    with pytest.raises(ValueError, match="put one tensor into a list"):
        match_activations(model, params, params, sym, torch.randn(2, 4))
    with pytest.raises(ValueError, match="`points` must be at least 3, got 1"):
        barrier(model, params, params, [], points=1)
    with pytest.raises(ValueError, match="`batches` is empty"):
        barrier(model, params, params, [])
    with pytest.raises(
        ValueError, match="`batch_norm` must be 'reestimate' or 'as-is', got 'fold'"
    ):
        barrier(model, params, params, [], batch_norm="fold")


def test_products_inside_of_fused_layers_are_seen(caplog):
    """No hook fires for the projections of attention and the gates of recurrent layers."""
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    case = next(c for c in CASES if c.name == "recurrent")
    fused = nn.Sequential(nn.Linear(5, 8), attention, nn.Linear(8, 3)).double().eval()
    tokens = torch.randn(4, 3, 5).double()
    for model, x, sym in ((fused, tokens, discover(fused, tokens)), case.known()):
        params = P.of(model)
        planted, before = plant(params, sym, 0.0)
        with caplog.at_level(logging.WARNING, logger="weightsym"):
            found = match_activations(model, planted, params, sym, [x, torch.randn_like(x)])
        assert recovered(permute(planted, sym, found), before)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# ------------------------------------------------------------ nearly equal units
@functools.cache
def perceptron(dtype):
    torch.manual_seed(0)
    net = models.mlp(8, [32, 32], 4).to(dtype)
    return discover(net, torch.randn(2, 8, dtype=dtype)), P.of(net)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [1e-2, 1e-5])
@pytest.mark.parametrize("method", ["ascent", "best"])
@pytest.mark.parametrize("small", [True, False])
def test_nearly_equal_units_come_back_to_their_places(dtype, apart, method, small, monkeypatch):
    """As after widening: the gain of an exchange is quadratic in the distance of units."""
    sym, params = perceptron(dtype)
    if not small:  # in single precision, but for the last sweeps
        monkeypatch.setattr(Plan, "size", 2**30)
    twice = [n for n in params if n[0] in "13"]
    wide = {n: torch.cat([t[:16], t[:16]]) if n in twice else t for n, t in params.items()}
    wide = {n: t + apart * t.abs().mean() * torch.randn_like(t) for n, t in wide.items()}
    moved = permute(wide, sym, random_permutations(sym, torch.Generator().manual_seed(1)))
    back = permute(moved, sym, match(moved, wide, sym, method=method))
    assert all(torch.equal(back[n], wide[n]) for n in wide)
    swapped = permute(back, sym, [torch.arange(32).roll(16), torch.arange(32)])
    assert any(not torch.equal(swapped[n], wide[n]) for n in wide)


def test_huge_weights_are_matched_in_double_precision():
    torch.manual_seed(0)
    net = models.mlp(8, [16, 16], 4).double()
    sym, params = discover(net, torch.randn(2, 8).double()), P.of(net)
    huge = {n: 1e100 * t for n, t in params.items()}
    moved = permute(huge, sym, random_permutations(sym, torch.Generator().manual_seed(1)))
    back = permute(moved, sym, match(moved, huge, sym))
    assert all(torch.equal(back[n], huge[n]) for n in huge)
    with pytest.raises(ValueError, match="overflow"):
        match({n: 1e60 * t for n, t in moved.items()}, huge, sym)
