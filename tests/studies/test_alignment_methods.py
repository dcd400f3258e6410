"""The ways into one frame: copies of one transformer that matrices have moved come together."""

import pytest
import torch

from lightning_bnn import params as P
from lightning_bnn.studies.alignment import (
    LEARNED,
    MATRICES,
    PERMUTATIONS,
    aligned,
    without_gains,
)
from lightning_bnn.studies.alignment_networks import Transformer
from lightning_bnn.symmetry import (
    discover,
    fold_norms,
    mix,
    permute,
    random_mixings,
    random_permutations,
)


@pytest.fixture(scope="module")
def copies():
    """A network, its symmetries, three copies of one function, and images."""
    torch.manual_seed(0)
    model, images = Transformer(8).eval(), torch.randn(64, 1, 8, 8)
    folded = fold_norms(model, images[:2])
    sym = discover(folded, images[:2])
    gains = {n: t + 0.3 * torch.randn_like(t) for n, t in P.of(model).items()}
    one = without_gains(model, P.stack([gains]), images)
    torch.testing.assert_close(
        P.apply(folded, P.unstack(one)[0], images), P.apply(model, gains, images)
    )
    stack = {n: t.expand(3, *t.shape[1:]).clone() for n, t in one.items()}
    moved = permute(stack, sym, random_permutations(sym, members=3))
    return folded, sym, mix(moved, sym, random_mixings(sym, members=3)), images


def off(model, networks, images):
    """How far the outputs of the mean are from those of the networks, relative to their size."""
    mean = {n: t.mean(0) for n, t in networks.items()}
    outputs = P.apply(model, P.unstack(networks)[0], images)
    return float((P.apply(model, mean, images) - outputs).norm() / outputs.norm())


def batches_of(images):
    return [(x, torch.zeros(len(x), dtype=torch.long)) for x in images.split(32)]


@pytest.mark.parametrize("method", MATRICES)
def test_copies_moved_by_matrices_average_to_their_function(copies, method):
    model, sym, networks, images = copies
    moved = aligned(model, sym, networks, method, batches_of(images), 0)
    assert off(model, moved, images) < 0.02


@pytest.mark.parametrize("method", [m for m in PERMUTATIONS if m != LEARNED])
def test_permutations_do_not_bring_them_together(copies, method):
    model, sym, networks, images = copies
    moved = aligned(model, sym, networks, method, batches_of(images), 0)
    assert off(model, moved, images) > 0.3
