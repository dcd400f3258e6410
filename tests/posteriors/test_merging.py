"""Products of Gaussians: closed forms of linear regression, and networks in one frame."""

import math

import pytest
import torch
from torch import nn

from lightning_bnn.models import mlp
from lightning_bnn.posteriors import (
    DiagonalGaussian,
    LaplaceGaussian,
    merge_gaussians,
    transform_gaussian,
)
from lightning_bnn.posteriors.laplace import CurvatureBlock
from weightsym import (
    Element,
    discover,
    flip,
    mix,
    permute,
    random_mixings,
    random_permutations,
    random_scales,
    random_signs,
    rescale,
)
from weightsym import params as P
from weightsym.matching.matrices import isometric

NOISE, PRIOR, INPUTS = 0.5, 0.7, 5


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ------------------------------------------------------------ linear regression
def shards():
    """Data of four clients, of different sizes and designs."""
    g, weights = generator(), torch.arange(INPUTS) - 2.0
    for rows in (5, 8, 13, 40):
        x = torch.randn(rows, INPUTS, generator=g).double()
        x = torch.linalg.qr(x)[0] * torch.rand(INPUTS, generator=g) * 3  # weights are independent
        yield x, x @ weights.double() + NOISE * torch.randn(rows, generator=g).double()


def exact(x, y):
    """The posterior of a linear regression."""
    precision = x.T @ x / NOISE**2 + torch.eye(INPUTS) / PRIOR**2
    mean = {"w": torch.linalg.solve(precision, x.T @ y / NOISE**2)}
    return DiagonalGaussian(mean, {"w": precision.diagonal().rsqrt()})


def laplace(x, y):
    values = x.square().sum(0) / NOISE**2
    mean = {"w": x.T @ y / NOISE**2 / (values + PRIOR**-2)}
    return LaplaceGaussian(mean, [CurvatureBlock(("w",), values[:, None])], PRIOR**-2)


@pytest.mark.parametrize("posterior", [exact, laplace])
def test_posteriors_of_parts_of_the_data_are_merged_to_that_of_all(posterior):
    every = list(shards())
    whole = posterior(*(torch.cat(parts) for parts in zip(*every, strict=True)))
    parts = [posterior(x, y) for x, y in every]
    points = {"w": torch.randn(20, INPUTS, generator=generator(1)).double()}
    wanted = whole.log_prob(points)
    torch.testing.assert_close(merge_gaussians(parts, PRIOR).log_prob(points), wanted)
    with_all_priors = merge_gaussians(parts).log_prob(points)
    assert (with_all_priors - wanted).abs().max() > 1
    product = torch.stack([part.log_prob(points) for part in parts]).sum(0)
    torch.testing.assert_close(with_all_priors.diff(), product.diff())  # but for a constant


def test_a_posterior_that_is_less_sure_than_the_prior_says_nothing():
    sure = DiagonalGaussian({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([0.1, 0.1])})
    vague = DiagonalGaussian({"w": torch.tensor([9.0, 2.0])}, {"w": torch.tensor([1.1, 0.1])})
    merged = merge_gaussians([sure, vague], prior_std=1.0)
    torch.testing.assert_close(merged.centre["w"], torch.tensor([1.0, 300 / 199]))
    torch.testing.assert_close(merged.deviations["w"], torch.tensor([100, 199.0]).rsqrt())


def halves(names, values):
    """A Laplace approximation over two tensors of one number each, in an order."""
    mean = {name: torch.tensor([float(ord(name))]) for name in names}
    return LaplaceGaussian(mean, [CurvatureBlock(names, torch.tensor(values)[:, None])])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            DiagonalGaussian({"a": torch.ones(1), "b": torch.full((2,), 100.0)}, 0.5),
            DiagonalGaussian({"b": torch.full((2,), 100.0), "a": torch.ones(1)}, 0.5),
        ),
        (halves(("a", "b"), [1.0, 2.0]), halves(("b", "a"), [2.0, 1.0])),
    ],
)
def test_weights_are_merged_by_name_in_any_order(one, other):
    points = {"a": torch.randn(9, 1), "b": torch.randn(9, one.sample(1)["b"].shape[1])}
    wanted = merge_gaussians([one, one]).log_prob(points)
    for pair in ([one, other], [other, one]):
        torch.testing.assert_close(merge_gaussians(pair).log_prob(points), wanted)


# ------------------------------------------------------------ symmetries
def adapter():
    """A product of two matrices, between which any invertible matrix may stand."""
    return nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 5, bias=False))


def cases():
    torch.manual_seed(0)
    relu, tanh = mlp(3, [4, 5], 2), mlp(3, [4], 2, activation=nn.Tanh)
    yield relu, 3, "permutations", permute, random_permutations
    yield relu, 3, "scales", rescale, random_scales
    yield tanh, 3, "signs", flip, random_signs
    yield adapter(), 6, "matrices", mix, random_mixings


def gaussian(network, seed=0):
    weights = {n: torch.randn(t.shape, generator=generator(seed)) for n, t in P.of(network).items()}
    stds = {
        n: 0.05 + torch.rand(t.shape, generator=generator(seed + 1)) for n, t in weights.items()
    }
    return DiagonalGaussian(weights, stds)


@pytest.mark.parametrize(("network", "inputs", "kind", "act", "draw"), cases())
def test_a_transformed_gaussian_draws_transformed_networks(network, inputs, kind, act, draw):
    sym, posterior = discover(network, torch.randn(2, inputs)), gaussian(network)
    element = draw(sym, generator(2))
    moved = transform_gaussian(posterior, Element.of_groups(sym, **{kind: element}))
    networks = act(posterior.sample(20_000, generator(3)), sym, element)
    for name, std in moved.deviations.items():
        torch.testing.assert_close(networks[name].std(0), std, rtol=0.04, atol=0)
    wanted = act(posterior.centre, sym, element)
    torch.testing.assert_close(moved.centre, wanted)
    if kind in ("permutations", "signs"):  # their densities are the same
        some = posterior.sample(9)
        torch.testing.assert_close(
            moved.log_prob(act(some, sym, element)), posterior.log_prob(some)
        )
    if kind != "signs":
        assert any(
            not torch.allclose(networks[n].std(0), t, rtol=0.1)
            for n, t in posterior.deviations.items()
        )


@pytest.mark.parametrize(("network", "inputs", "kind", "act", "draw"), cases())
def test_copies_in_other_frames_are_merged_to_one_function(network, inputs, kind, act, draw):
    if kind == "scales":
        return
    x = torch.randn(2, inputs)
    sym, posterior = discover(network, x), gaussian(network)
    if kind == "matrices":
        posterior = DiagonalGaussian(posterior.centre, 0.1)  # rotations leave it as it is
    copies = [
        transform_gaussian(
            posterior, Element.of_groups(sym, **{kind: draw(isometric(sym), generator(k))})
        )
        for k in (4, 5)
    ]
    merged = merge_gaussians([posterior, *copies], symmetries=sym)
    torch.testing.assert_close(merged.centre, posterior.centre, rtol=1e-3, atol=1e-4)
    for name, std in posterior.deviations.items():
        torch.testing.assert_close(merged.deviations[name], std / 3**0.5, rtol=1e-3, atol=1e-5)
    naive = merge_gaussians([posterior, *copies])
    outputs, wrong = (P.apply(network, P.stack([q.centre]), x) for q in (posterior, naive))
    assert not torch.allclose(outputs, wrong, rtol=0.1, atol=0.1)


# ------------------------------------------------------------ adapters
def factors(seed):
    """The factors of an adapter of rank 2, balanced as those of a posterior with a prior are."""
    left, values, right = torch.linalg.svd(torch.randn(3, 3, generator=generator(seed)).double())
    roots = values[:2].sqrt()
    return {"0.weight": roots[:, None] * right[:2], "1.weight": left[:, :2] * roots}


def frames(angles, side):
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, -sin * side, sin, cos * side], -1).unflatten(-1, (2, 2))


def turned(w, frame):
    return {"0.weight": frame @ w["0.weight"], "1.weight": w["1.weight"] @ frame.mT}


def in_any_frame(posterior, w):
    """Log-density of a Gaussian that is averaged over all rotations and reflections."""
    angles = torch.arange(240).double() * math.pi / 120
    every = torch.cat([frames(angles, side) for side in (1, -1)])[:, None]
    rows = {n: t.flatten(0, 1) for n, t in turned(w, every).items()}
    return posterior.log_prob(rows).detach().unflatten(0, (480, -1)).logsumexp(0)


def moments(w, log_weights):
    """Mean and deviation of what an adapter adds, and the number of draws that count."""
    weights, products = log_weights.softmax(0).double(), w["1.weight"] @ w["0.weight"]
    mean = torch.einsum("k,kij->ij", weights, products)
    square = torch.einsum("k,kij->ij", weights, (products - mean).square())
    return mean.detach(), square.sqrt().detach(), 1 / weights.square().sum()


@pytest.mark.parametrize("seed", range(2))
def test_adapters_in_other_frames_have_the_moments_of_the_product(seed):
    g, centre, clients = generator(50 + seed), factors(seed), []
    for angle, side in ((0.0, 1), (1.1, -1), (2.5, 1)):
        near = {n: t + 0.03 * torch.randn(t.shape, generator=g) for n, t in centre.items()}
        stds = {n: 0.03 + 0.05 * torch.rand(t.shape, generator=g).double() for n, t in near.items()}
        clients.append(
            DiagonalGaussian(turned(near, frames(torch.tensor(angle).double(), side)), stds)
        )
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)).double()
    sym = discover(net, torch.randn(2, 3).double())
    merged, naive = (merge_gaussians(clients, 1.0, s).sample(20_000, g) for s in (sym, None))
    proposal = DiagonalGaussian.fit(merged)
    w = proposal.sample(1000, g)
    prior = DiagonalGaussian({n: torch.zeros_like(t) for n, t in centre.items()}, 1.0)
    product = sum(in_any_frame(q, w) for q in clients) - 2 * prior.log_prob(w)
    mean, std, count = moments(w, product - in_any_frame(proposal, w))
    (found, spread, _), (wrong, *_) = (moments(d, torch.zeros(20_000)) for d in (merged, naive))
    assert count > 150
    assert ((found - mean).abs() < 0.5 * std).all()
    torch.testing.assert_close(spread, std, rtol=0.2, atol=0)
    assert ((wrong - mean).abs() > 10 * std).any()


def test_any_matrix_may_stand_between_factors_unless_there_is_a_prior():
    net, x = adapter(), torch.randn(7, 6)
    sym, posterior = discover(net, x), gaussian(net)
    stretch = Element.of_groups(sym, matrices=random_mixings(sym, generator(4)))
    copies = [posterior, transform_gaussian(posterior, stretch)]
    merged, held = (merge_gaussians(copies, s, sym).centre for s in (None, 30.0))
    outputs, found, wrong = P.apply(net, P.stack([posterior.centre, merged, held]), x)
    torch.testing.assert_close(found, outputs, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(wrong, outputs, rtol=0.1, atol=0.1)


def test_statistics_are_averaged_and_what_is_held_fixed_must_be_the_same():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    first, second = P.of(net), {n: t + 2 if "running" in n else t for n, t in P.of(net).items()}
    names = ["1.weight"]
    merged = merge_gaussians([DiagonalGaussian(w, 0.1, names) for w in (first, second)])
    assert torch.equal(merged.centre["1.running_mean"], first["1.running_mean"] + 1)
    assert merged.spec.names == ("1.weight",)
    other = {**second, "0.bias": first["0.bias"] + 1}
    with pytest.raises(ValueError, match="differ in the fixed weight '0.bias'"):
        merge_gaussians([DiagonalGaussian(w, 0.1, names) for w in (first, other)])


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("activation", "act", "draw"),
    [(nn.ReLU, permute, random_permutations), (nn.Tanh, flip, random_signs)],
)
def test_symmetries_that_would_move_fixed_weights_are_left_out(activation, act, draw, seed):
    net = mlp(6, [5, 4], 2, activation=activation)
    sym, base = discover(net, torch.randn(2, 6)), P.of(net)
    names = [name for name in base if not name.startswith("1.")]  # the first layer is fixed

    def client(weights):
        return DiagonalGaussian({**base, **{n: weights[n] for n in names}}, 0.1, names)

    one = client(gaussian(net, seed).centre)
    element = [torch.arange(5) if act is permute else torch.ones(5), draw(sym, generator(seed))[1]]
    merged = merge_gaussians([one, client(act(one.centre, sym, element))], symmetries=sym)
    torch.testing.assert_close(merged.centre, one.centre)
    other = client(gaussian(net, seed + 9).centre)
    held = merge_gaussians([one, other], symmetries=sym).centre
    torch.testing.assert_close(held["1.weight"], base["1.weight"], rtol=0, atol=0)


def by_curvature(*rotations):
    return LaplaceGaussian(
        {"w": torch.ones(2)}, [CurvatureBlock(("w",), torch.ones(2, 1), *rotations)]
    )


A = DiagonalGaussian({"w": torch.ones(2)})
OTHER = r"`posteriors.1.` is over different weights"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("posteriors", "options", "message"),
    [
        ([], {}, "must hold at least one"),
        ([A, by_curvature(torch.eye(2))], {}, "of the structure 'diag', got LaplaceGaussian"),
        ([A, {"w": torch.ones(2)}], {}, "got dict"),
        ([A, DiagonalGaussian({"w": torch.ones(3)})], {}, OTHER),
        ([A, DiagonalGaussian({"v": torch.ones(2)})], {}, OTHER),
        ([A, A], {"prior_std": -1.0}, "`prior_std` must be positive"),
        ([A, A], {"prior_std": 0.05}, "a lower precision than `prior_std` 0.05"),
        ([A, A], {"symmetries": 3}, "`symmetries` must be a `Symmetries`, got int"),
        ([DiagonalGaussian({"w": torch.ones(2).double()}, 1e200)], {}, "has precisions 0 to 0"),
        (
            [A, DiagonalGaussian({"w": torch.tensor([1.0, math.nan])})],
            {},
            r"`posteriors.1.` holds NaN or infinite values",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused(posteriors, options, message):
    with pytest.raises(ValueError, match=message):
        merge_gaussians(posteriors, **options)
