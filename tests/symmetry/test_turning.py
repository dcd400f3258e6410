import pytest
import torch
from mixing_networks import TOKENS
from test_folding import SEQUENCES, VECTORS, Encoder, HandWritten, Residual, Tied, randomised
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import discover, find_streams, fold_norms, mass, mix, turned_mass


def one_norm(norm=nn.RMSNorm, d=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, d), norm(d), nn.Linear(d, 9)).double()
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2)
    return model


NETWORKS = {
    "by hand": (lambda: Residual(HandWritten), VECTORS, False),
    "readers without bias": (lambda: Residual(nn.LayerNorm, bias=False), VECTORS, True),
    "encoder": (Encoder, SEQUENCES, True),
}


def found(name):
    build, x, keeps_ones = NETWORKS[name]
    model = randomised(build())
    streams = find_streams(model, x)
    assert [stream.keeps_ones for stream in streams] == [keeps_ones]
    return model, x, discover(model, x), streams


# ------------------------------------------------------------ the function stays, the mass falls
def with_gains_anew(model, folded, sym, stream, rotation):
    """The network whose stream is turned, with the best gains: its weights, made step by step."""
    elements = [torch.eye(g.size).double().expand(g.spaces, -1, -1) for g in sym.linear]
    at = [g.kind in ("orthogonal", "centred") for g in sym.linear].index(True)
    elements[at] = rotation[None]
    turned = mix(P.of(folded), sym, elements)
    weights = {**P.of(model), **{n: t for n, t in turned.items() if n in P.of(model)}}
    for norm in stream.norms:
        read = torch.cat([turned[name] for name in norm.readers])
        gain = read.norm(dim=0).sqrt()
        bias = norm.gain.removesuffix("weight") + "bias"
        weights[norm.gain] = gain
        for name in norm.readers:
            weights[name] = turned[name] / gain
        if bias in weights:  # folded into the readers' biases, or asked for by readers without
            added = [n for n in norm.readers if n.replace("weight", "bias") not in weights]
            weights[bias] = torch.zeros_like(gain)
            if added:
                name = added[0]
                shift = turned[name.replace("weight", "bias")]
                weights[bias] = torch.linalg.lstsq(weights[name], shift).solution
    return {name: weights[name] for name in P.of(model)}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_saved_is_the_mass_of_a_network_of_the_same_function(name):
    model, x, sym, (stream,) = found(name)
    params = P.of(model)
    rotation = turned_mass(params, sym, [stream]).rotations[0]
    folded = fold_norms(model, x)
    without = discover(folded, x)
    turned, best = (
        with_gains_anew(model, folded, without, stream, q)
        for q in (rotation, torch.eye(stream.size).double())
    )
    expected = P.apply(model, params, x)
    for weights in (turned, best):
        torch.testing.assert_close(P.apply(model, weights, x), expected, rtol=1e-9, atol=1e-9)
    saved = mass(best, sym) - mass(turned, sym)
    torch.testing.assert_close(turned_mass(best, sym, [stream], [rotation], 1).saved, saved)
    assert saved > 0.01 * mass(best, sym)
    other = {**turned, stream.norms[0].gain: turned[stream.norms[0].gain].roll(1)}
    assert (P.apply(model, other, x) - expected).abs().max() > 1e-3


def test_one_norm_has_a_closed_form():
    """Over all rotations and gains: twice the nuclear norm of the folded readers."""
    model = one_norm()
    params, sym = P.of(model), discover(model, VECTORS)
    folded = (params["2.weight"] * params["1.weight"]).detach()
    start = 2 * folded.norm(dim=0).sum()
    found = turned_mass(params, sym, find_streams(model, VECTORS))
    least = 2 * torch.linalg.svdvals(folded).sum()
    torch.testing.assert_close(start - found.saved, least, rtol=1e-7, atol=0)
    assert least < 0.99 * start


def test_behind_a_layer_norm_the_ones_stay_and_no_other_descent_finds_less():
    model = one_norm(nn.LayerNorm)
    params, sym = P.of(model), discover(model, VECTORS)
    found = turned_mass(params, sym, find_streams(model, VECTORS))
    (rotation,) = found.rotations
    ones = torch.ones(6).double()
    torch.testing.assert_close(rotation @ ones, ones)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(6).double())
    folded = (params["2.weight"] * params["1.weight"]).detach()
    best = min(_by_adam(folded, seed) for seed in range(4))
    assert 2 * (folded @ rotation.mT).norm(dim=0).sum() < best + 1e-4


def _by_adam(folded, seed):
    """The least sum of column norms over matrix exponentials that leave the ones alone."""
    generator = torch.Generator().manual_seed(seed)
    d = folded.shape[1]
    free = torch.randn(d, d, generator=generator, dtype=torch.float64).requires_grad_()
    off = torch.eye(d).double() - 1 / d
    optimizer = torch.optim.Adam([free], 0.05)
    for _ in range(300):
        skew = off @ (free - free.mT) @ off
        value = 2 * (folded @ torch.linalg.matrix_exp(skew)).norm(dim=0).sum()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return value.item()


# ------------------------------------------------------------ stacks, starts
def test_a_stack_is_turned_member_by_member():
    model, _, sym, streams = found("by hand")
    stack = P.stack([P.of(model), P.of(randomised(Residual(HandWritten))), P.of(model)])
    stack = {
        n: t * (1 + 0.1 * torch.arange(3).double().view(-1, *[1] * (t.ndim - 1)))
        for n, t in stack.items()
    }
    together = turned_mass(stack, sym, streams, steps=300)
    alone = [turned_mass(one, sym, streams, steps=300).saved for one in P.unstack(stack)]
    assert together.rotations[0].shape == (3, 6, 6)
    # not convex: members that descend together may end elsewhere
    torch.testing.assert_close(together.saved, torch.stack(alone), rtol=0.05, atol=0)


def test_an_earlier_rotation_is_never_left_for_a_worse_one():
    model, _, sym, streams = found("by hand")
    params, start, saved = P.of(model), None, [0.0]
    for _ in range(4):
        step = turned_mass(params, sym, streams, start, steps=3)
        start = step.rotations
        saved.append(float(step.saved))
    assert saved == sorted(saved)
    assert saved[-1] > saved[1] > 0


# ------------------------------------------------------------ nothing to turn
@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), VECTORS),
        (Tied, TOKENS),  # cannot be folded
        (lambda: Encoder(dropout=0.1), SEQUENCES),  # strikes single channels
        (lambda: Encoder(norm_first=False), SEQUENCES),
        (lambda: Residual(lambda d: HandWritten(d, True)), VECTORS),  # the mass counts 1 + g
    ],
)
def test_streams_that_cannot_be_turned(build, x):
    model = randomised(build())
    assert find_streams(model, x) == ()
    found = turned_mass(P.of(model), discover(model, x), ())
    assert (float(found.saved), found.rotations) == (0, ())


def test_columns_of_zeros_cost_nothing():
    model = one_norm()
    with torch.no_grad():
        model[2].weight.zero_()
    found = turned_mass(P.of(model), discover(model, VECTORS), find_streams(model, VECTORS))
    assert float(found.saved) == 0
    assert bool(found.rotations[0].isfinite().all())


@pytest.mark.bad_input
def test_steps_are_counted():
    model = one_norm()
    with pytest.raises(ValueError, match="`steps` must be at least 1, got 0"):
        turned_mass(P.of(model), discover(model, VECTORS), (), steps=0)
