"""What only training does to units, and noise that they meet there."""

from functools import partial

import torch
import torch.nn.functional as F

from known_networks.table import network

hidden = partial(network, inputs=(5, 4), a=(4, 6), b=(6, 3))

# what happens to hidden units in training: exchangeable units, scales
CHANGES = {
    "dropout": (lambda h: F.dropout(h, 0.3), "6", 6),
    "dropout by hand": (lambda h: torch.where(torch.rand_like(h) < 0.3, 0.0 * h, h), "6", 6),
}  # fmt: skip
for name, (change, *counts) in CHANGES.items():
    hidden(*counts, 0, name=f"{name} in training", held=None)(
        lambda s, x, f=change: s.b(torch.relu(f(s.a(x)) if s.training else s.a(x)))
    )

# units that meet noise of one law may change places, and all that one draw meets together
layers = partial(network, inputs=(5, 4), a=(4, 8), b=(8, 8), c=(8, 3), signs=0, held=None)


@layers("", 0)
def noise_of_other_sizes(s, x):
    h = torch.relu(s.a(x))
    noise = torch.normal(torch.zeros(8), torch.linspace(0.1, 0.9, 8))
    return s.c(h + noise if s.training else h)


@layers("8", 16)
def one_mask_in_two_layers(s, x):
    """Swapping the units of one layer alone would change what comes out on average."""
    h = torch.relu(s.a(x))
    m = torch.bernoulli(torch.full_like(h, 0.5)) if s.training else torch.ones_like(h)
    return s.c(torch.relu(s.b(h * m)) * m)


@layers("", 0)
def noise_that_is_returned(s, x):
    h = torch.relu(s.a(x))
    n = torch.randn_like(h) if s.training else torch.zeros_like(h)
    return s.c(h + n), n


@layers("8*2", 16)
def two_masks(s, x):
    h = torch.dropout(torch.relu(s.a(x)), 0.5, s.training)
    return s.c(torch.dropout(torch.relu(s.b(h)), 0.5, s.training))


@layers("7", 8)
def factors_that_differ_in_training(s, x):
    rates = torch.tensor([1.0] * 8) if s.training else torch.tensor([1.0] * 7 + [0.5])
    return s.c(torch.relu(s.a(x)) * rates)
