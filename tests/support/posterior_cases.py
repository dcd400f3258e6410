"""Posteriors of every kind around one small network, for laws of draws, densities and files."""

import types

import torch
from torch import nn

from lightning_bnn.posteriors import (
    DiagonalGaussian,
    Empirical,
    GaussianScales,
    LaplaceGaussian,
    LowRankGaussian,
    Mixture,
    Posterior,
    Symmetrized,
)
from lightning_bnn.posteriors.laplace import CurvatureBlock
from weightsym import discover
from weightsym import params as P


def template():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return net.double().eval()


def gaussian(seed=0, std=0.3):
    torch.manual_seed(seed)
    net = template()
    return DiagonalGaussian(P.of(net), {k: std * (1 + v.abs()) for k, v in P.of(net).items()})


def rotation(size):
    return torch.linalg.qr(torch.randn(size, size).double())[0]


def laplace(layer=None, joint=False, **options):
    """Around any network, with any curvature in any rotation, of all weights or of some."""
    torch.manual_seed(0)
    net = template()
    shapes = {n: p.shape for n, p in net.named_parameters() if n.startswith(layer or "")}
    sizes = [(shape[0], shape[1:].numel()) for shape in shapes.values()]
    blocks = [
        CurvatureBlock((name,), 20 * torch.rand(m, n).double(), rotation(m), rotation(n))
        for name, (m, n) in zip(shapes, sizes, strict=True)
    ]
    if joint:
        size = sum(m * n for m, n in sizes)
        blocks = [CurvatureBlock(tuple(shapes), torch.rand(size, 1).double(), rotation(size))]
    options = {"prediction": "network", "last_layer": layer, **options}
    return LaplaceGaussian(P.of(net), blocks, 0.1 + 0.2, 1 / 3, **options)


def dense():
    """Of a state of the library `posteriors`, whose weights vary together."""
    net = template()
    params = dict(net.named_parameters())
    root = torch.randn(34, 34, generator=torch.Generator().manual_seed(0)).double()
    prec = torch.eye(34) + root @ root.T
    return Posterior.of(types.SimpleNamespace(params=params, prec=prec), net)


def scales():
    net = P.of(template())
    return GaussianScales(net, {"0.weight": 4, "2.weight": 2}, torch.rand(6).double() + 0.5,
                          torch.rand(6).double() + 0.1)  # fmt: skip


def networks(*chains):
    return Empirical(P.populate(template(), 8), *chains)


POSTERIORS = {
    "dense": dense,
    "laplace": laplace,
    "laplace, last layer": lambda: laplace("2"),
    "laplace, linearised": lambda: laplace("2", joint=True, prediction="linearised"),
    "gaussian": gaussian,
    "gaussian of some weights": lambda: DiagonalGaussian(
        P.of(template()), 0.3, ["2.weight", "0.bias"]
    ),
    "scales": scales,
    "low rank": lambda: LowRankGaussian.fit(P.populate(template(), 40), 5, 0.1),
    "networks": networks,
    "networks of chains": lambda: networks([0, 0, 1, 1, 2, 2, 3, 3]),
    "names of chains": lambda: networks([*"aabbccdd"]),
    "tensor of chains": lambda: networks(torch.arange(8) // 4),
    "mixture": lambda: Mixture([gaussian(k) for k in range(3)], [0.1, 0.2, 0.6]),
    "mixture of networks": lambda: Mixture([networks() for _ in range(2)]),
    "symmetrized": lambda: Symmetrized(gaussian(), discover(template(), torch.eye(3).double())),
    "mixture of mixtures": lambda: Mixture([Mixture([laplace(), gaussian()]), gaussian(7)]),
}


def draw(posterior, n=7, seed=5):
    return posterior.sample(n, torch.Generator().manual_seed(seed))


def same(a, b):
    assert list(a) == list(b)
    return all(torch.equal(a[k], b[k]) for k in a)
