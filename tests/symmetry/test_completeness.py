"""How many continuous symmetries a network has, counted in the kernel of its Jacobian.

A direction of weights along which no output moves, at generic weights and inputs, belongs to a
symmetry. Nothing of the package takes part in the count.
"""

from contextlib import contextmanager

import modern_networks as networks
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_bnn.symmetry import discover, fold_norms


def kernel_dimension(network, *inputs):
    """Trained weights minus the rank of the Jacobian of the outputs, which must be beyond doubt."""
    weights = [p for p in network.parameters() if p.requires_grad]
    numbers = sum(w.numel() for w in weights)
    outputs = network(*inputs).flatten()
    assert len(outputs) > 1.2 * numbers
    outputs = outputs[torch.randperm(len(outputs))[: int(1.2 * numbers) + 1]]
    parts = torch.autograd.grad(outputs, weights, torch.eye(len(outputs)), is_grads_batched=True)
    jacobian = torch.cat([part.flatten(1) for part in parts], 1).numpy()
    values = np.linalg.svd(jacobian, compute_uv=False)
    rank = int((values > 1e-10 * values[0]).sum())
    if rank < numbers:
        assert values[rank - 1] > 1e4 * values[rank], "no clear gap in the singular values"
    return numbers - rank


@contextmanager
def in_float64():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def sequences(d, batch, length=4):
    return lambda: (torch.randn(batch, length, d),)


def tokens():
    return (torch.cat([torch.randperm(11) for _ in range(8)]).reshape(-1, 8),)


def graphs():
    near = networks.path(5)
    return 4 * torch.randn(12, 5, 5), near / near.sum(1, keepdim=True)


def plain_norm(d, eps):
    return nn.LayerNorm(d, eps=eps, elementwise_affine=False)


def rows():
    return (torch.randn(200, 5),)


def two_weight_norms():
    first, second = weight_norm(nn.Linear(5, 6)), weight_norm(nn.Linear(6, 4))
    return nn.Sequential(first, nn.LeakyReLU(), second, nn.LeakyReLU(), nn.Linear(4, 2))


FEW, MORE = sequences(10, 16), sequences(10, 20)

# network, inputs, dimension by hand; h heads of w channels, d channels of the stream
JACOBIAN_KERNEL = {
    # queries with keys and values with outputs h w^2 each, key bias h w, value bias h w
    "attention": (networks.attention(), FEW, 2 * 18 + 2 * 6),
    "attention without bias": (networks.attention(bias=False), FEW, 2 * 18),
    # the same for each of two heads of keys, however many queries read them
    "grouped queries": (networks.attention(heads=4, kv_heads=2), MORE, 2 * 18 + 2 * 6),
    "one key for all": (networks.attention(heads=4, kv_heads=1), MORE, 2 * 9 + 2 * 3),
    # a complex number for each of h w / 2 frequencies; the key bias is alive
    "rotary halves": (networks.attention(width=4, rotary="half"), MORE, 2 * 4 + 32 + 8),
    "rotary pairs": (networks.attention(width=4, rotary="interleaved"), MORE, 2 * 4 + 32 + 8),
    # complex numbers, matrices on the two channels left, their key bias; values
    "partly rotary": (
        networks.attention(width=6, rotary="half", rotated=4),
        sequences(10, 16),
        2 * 4 + 2 * 4 + 4 + 72 + 12,
    ),
    # a gain of queries against one of keys; values
    "query-key norm": (networks.attention(norm="shared"), FEW, 3 + 18 + 6),
    "query-key norms of heads": (networks.attention(norm="own"), FEW, 6 + 18 + 6),
    # gains agree inside a frequency
    "query-key norm, rotary": (
        networks.attention(norm="shared", width=4, rotary="half"),
        MORE,
        2 + 32 + 8,
    ),
    "ALiBi": (networks.attention(positions="alibi"), FEW, 2 * 18 + 2 * 6),
    # every column of the table may be shifted
    "T5 table": (networks.attention(positions="t5"), FEW, 2 * 18 + 2 * 6 + 2),
    "table of relative positions": (networks.attention(positions="rows"), FEW, 2 * 18 + 2 * 6 + 2),
    "the same, transposed": (networks.attention(positions="columns"), FEW, 2 * 18 + 2 * 6 + 2),
    # one number between scores and values per head
    "linear attention": (networks.attention(scores="linear", bias=False), FEW, 2 * 18 + 2),
    "linear attention by states": (
        networks.attention(scores="states", bias=False),
        FEW,
        2 * 18 + 2,
    ),
    "linear attention with a map": (networks.attention(scores="elu", bias=False), FEW, 18),
    # scale of the linear half; of both and against the output without an activation
    "SwiGLU": (networks.GatedMLP, sequences(6, 12), 10),
    "bilinear": (lambda: networks.GatedMLP(8, activation=nn.Identity()), sequences(8, 20), 20),
    # scales of ReLU units, and what all rows and biases of the router may share
    "mixture of experts": (networks.MoE, sequences(5, 9), 12 + 5 + 1),
    "best two experts": (lambda: networks.MoE(top=2), sequences(5, 12), 12 + 5 + 1),
    # matrices of the low rank, states, channels before the convolution, one scalar
    "Mamba": (networks.Mamba, sequences(6, 24), 9 + 5 + 10 + 1),
    "LoRA": (networks.LoRA, sequences(6, 9), 4),
    "merged LoRA": (networks.MergedLoRA, sequences(6, 9), 4),
    # whatever the adapters do, the base can undo
    "LoRA on a trained base": (
        lambda: networks.LoRA(trained_base=True),
        sequences(6, 15),
        2 * (6 + 7),
    ),
    # matrices, and the first bias into the second
    "low rank": (networks.LowRank, sequences(6, 12), 9 + 3),
    # gains 3 d, rotations, matrices of a head 2 w^2, tokens against positions d
    "RMS-norm decoder": (networks.Decoder, tokens, 18 + 15 + 2 * 36 + 6),
    "RMS-norm decoder, SwiGLU": (
        lambda: networks.Decoder(heads=2, width=3, gated=True),
        tokens,
        18 + 15 + 2 * 18 + 6 + 7,
    ),
    # rotations that leave ones alone, matrices; ones in writers: tokens, positions, heads, units,
    # bias; tokens against positions but along ones; ones in readers
    "decoder with plain layer norms": (
        lambda: networks.Decoder(width=4, norm=plain_norm),
        tokens,
        10 + 2 * 16 + (11 + 8 + 4 + 7 + 1) + 5 + (12 + 7 + 11),
    ),
    "graph convolution": (networks.GCN, graphs, 6),
    # ELU lets no scale of features through
    "graph attention": (networks.GAT, graphs, 0),
    # rows, whose size has no effect; with a ReLU also units
    "weight norm": (lambda: networks.WeightNorm(nn.Tanh()), rows, 7),
    "weight norm, ReLU": (lambda: networks.WeightNorm(nn.ReLU()), rows, 7 + 7),
    "weight norm of torch": (
        lambda: nn.Sequential(weight_norm(nn.Linear(5, 6)), nn.Tanh()),
        rows,
        6,
    ),
    # units after units: also what gains take up that depends on all weights
    "weight norm behind units": (two_weight_norms, lambda: (3 * rows()[0],), 6 + 4 + 6 + 4),
    # classes and all features
    "cosine classifier": (networks.CosineClassifier, rows, 3 + 1),
    # rotations and a scale of all
    "unit vectors": (networks.UnitVectors, rows, 15 + 1),
    "Snake": (lambda: networks.LearnedSlope(networks.snake), rows, 6),
    "tanh with slopes": (lambda: networks.LearnedSlope(torch.tanh), rows, 6),
}


@pytest.mark.parametrize("case", JACOBIAN_KERNEL)
def test_the_kernel_of_the_jacobian_has_the_dimension_counted_by_hand(case):
    build, inputs, dimension = JACOBIAN_KERNEL[case]
    with in_float64():
        assert kernel_dimension(build(), *inputs()) == dimension


# what discovery does not find: what a trained base takes over, rotations behind gains (fold them
# first), constants over a row that a layer norm forgets, scales of what a normalised weight reads
MISSING = {
    "LoRA on a trained base": 22,
    "RMS-norm decoder": 15,
    "RMS-norm decoder, SwiGLU": 15,
    "decoder with plain layer norms": 60,
    "weight norm behind units": 6,
}


@pytest.mark.parametrize("case", JACOBIAN_KERNEL)
def test_discovery_finds_the_whole_kernel_but_for_what_is_known_to_be_missing(case):
    build, inputs, dimension = JACOBIAN_KERNEL[case]
    with in_float64():
        sym = discover(build(), *inputs())
    assert sym.dimension == dimension - MISSING.get(case, 0)
    assert not any("numerical check" in item.reason for item in sym.frozen)


def test_a_stream_without_gains_is_complete():
    with in_float64():
        x = tokens()
        folded = fold_norms(networks.Decoder(width=4).eval(), *x)
        sym = discover(folded, *x)
        assert sym.dimension == kernel_dimension(folded, *x) == 15 + 2 * 16 + 6
