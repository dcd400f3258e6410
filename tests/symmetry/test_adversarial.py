"""Forwards made to fool the reading of a graph, and random architectures: never a wrong group."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward, randomise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_bnn.symmetry import discover, verify

linear = {"a": lambda: nn.Linear(5, 8), "b": lambda: nn.Linear(8, 3)}
conv = {"a": lambda: nn.Conv2d(2, 4, 3), "b": lambda: nn.Linear(64, 3)}


def half_relu(s, x):
    h = s.a(x)
    return s.b(torch.cat([torch.relu(h[:, :4]), h[:, 4:]], 1))


def slice_write(s, x):
    h = s.a(x)
    h[:, :4] = torch.tanh(h[:, 4:])
    return s.b(h)


def in_place_through_a_view(s, x):
    h = s.a(x)
    h[:, ::2].relu_()
    return s.b(h)


def read_after_in_place(s, x):
    h = s.a(x)
    y = h.relu_()
    return s.b(h + 2 * y)


def subgroup_softmax(s, x):
    return s.b(torch.softmax(s.a(x).view(-1, 2, 4), -1).flatten(1))


def weight_and_raw(s, x):
    return s.b(torch.relu(s.a(x))) + s.a.weight.sum()


def weight_norm_of_columns(s, x):
    return s.b(torch.relu(s.a(x)) * s.b.weight.abs().sum(0))


def shifted_flatten(s, x):
    return s.b(torch.relu(s.a(x)).flatten(1).roll(1, 1))


def half_mirrored(s, x):
    h = torch.relu(s.a(x))
    return s.b(torch.cat([h[:, :2], h[:, 2:].flip(-1)], 1).flatten(1))


def one_channel_kept_apart(s, x):
    h = torch.relu(s.a(x))
    return s.b(h) + h[:, :1]


def position_dependent_gain(s, x):
    return s.b(torch.relu(s.a(x)) * torch.arange(1.0, 9.0).to(x))


def additive_constant(s, x):
    return s.b(torch.relu(s.a(x) + torch.arange(8.0).to(x)))


def crossed_sum(s, x):
    h = s.a(x)
    y = torch.relu(h[:, [0, 5, 2, 3]] + h[:, [4, 1, 6, 7]])
    return s.b(torch.cat([y, torch.relu(h[:, [0, 5, 2, 3]])], 1))


def sorted_channels(s, x):
    return s.b(s.a(x).sort(-1)[0])


def cumulative(s, x):
    return s.b(s.a(x).cumsum(-1))


def outer_product(s, x):
    h = s.a(x)
    return s.b((h[:, :, None] * h[:, None, :]).sum(1))


def indexed_by_input(s, x):
    h = s.a(x)
    return s.b(h.gather(1, x.argsort(-1)[:, :1].expand(-1, 8)))


def broadcast_mask(s, x):
    return s.b(torch.relu(s.a(x)).masked_fill(torch.arange(8) % 2 == 0, 0.0))


def shared_layer_twice(s, x):
    return s.b(torch.relu(s.c(torch.relu(s.c(torch.relu(s.a(x)))))))


def scaled_by_first_unit(s, x):
    h = torch.relu(s.a(x))
    return s.b(h * h[:, :1])


def interleaved(s, x):
    h = torch.relu(s.a(x))
    return s.b(torch.stack([h[:, :4], h[:, 4:]], -1).flatten(1))


FORWARDS = [
    (half_relu, linear), (slice_write, linear), (in_place_through_a_view, linear),
    (read_after_in_place, linear), (subgroup_softmax, linear), (weight_and_raw, linear),
    (weight_norm_of_columns, linear), (shifted_flatten, conv), (half_mirrored, conv),
    (one_channel_kept_apart, linear), (position_dependent_gain, linear),
    (additive_constant, linear), (crossed_sum, linear), (sorted_channels, linear),
    (cumulative, linear), (outer_product, linear), (indexed_by_input, linear),
    (broadcast_mask, linear), (shared_layer_twice, linear | {"c": lambda: nn.Linear(8, 8)}),
    (scaled_by_first_unit, linear), (interleaved, linear),
]  # fmt: skip


@pytest.mark.parametrize(("forward", "layers"), FORWARDS, ids=lambda v: getattr(v, "__name__", ""))
def test_never_a_wrong_group(forward, layers):
    model = Forward(forward, **{k: make() for k, make in layers.items()}).double()
    x = torch.randn(3, 2, 6, 6) if layers is conv else torch.randn(3, 5)
    sym = discover(model, x.double())
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        assert verify(model, sym, x.double(), generator=generator) < 1e-12


def test_what_survives_in_the_adversarial_cases():
    """The halves that are treated alike stay exchangeable, and only they."""

    def units(forward, layers=linear):
        model = Forward(forward, **{k: make() for k, make in layers.items()})
        x = torch.randn(3, 2, 6, 6) if layers is conv else torch.randn(3, 5)
        return [g.units for g in discover(model, x).permutations]

    assert units(half_relu) == [4, 4]
    assert units(subgroup_softmax) == [4, 4, 2]
    assert units(half_mirrored, conv) == [2, 2]
    assert units(one_channel_kept_apart) == [7]
    assert units(broadcast_mask) == []
    assert units(weight_and_raw) == []


def test_a_numerically_refuted_group_is_dropped_and_reported():
    model = Forward(shifted_flatten, **{k: make() for k, make in conv.items()})
    sym = discover(model, torch.randn(3, 2, 6, 6))
    assert not sym.permutations
    assert sym.scaling_dof == 4
    assert any("numerical check" in f.reason for f in sym.frozen)


# ------------------------------------------------------------ random architectures
class RandomNet(nn.Module):
    """A convolutional net assembled from a list of choices that keep its shape."""

    def __init__(self, choices, channels):
        super().__init__()
        self.steps = nn.ModuleList()
        self.kinds = choices
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        width = channels
        for kind in choices:
            layer, width = self.layer(kind, width)
            self.steps.append(layer)
        self.head = nn.Linear(width * 4, 3)

    def layer(self, kind, c):
        plain = {
            "conv": lambda: nn.Conv2d(c, c, 3, padding=1),
            "grouped": lambda: nn.Conv2d(c, c, 3, padding=1, groups=2),
            "depthwise": lambda: nn.Conv2d(c, c, 3, padding=1, groups=c),
            "bn": lambda: nn.BatchNorm2d(c),
            "gn": lambda: nn.GroupNorm(2, c),
            "in": lambda: nn.InstanceNorm2d(c, affine=True),
            "relu": nn.ReLU,
            "tanh": nn.Tanh,
            "gelu": nn.GELU,
            "prelu": lambda: nn.PReLU(c),
            "relu6": nn.ReLU6,
            "residual": lambda: nn.Conv2d(c, c, 3, padding=1),
            "gate": lambda: nn.Conv2d(c, c, 1),
            "squeeze": lambda: nn.Linear(c, c),
            "half": nn.Identity,
            "swap": nn.Identity,
            "shuffle": lambda: nn.ChannelShuffle(2),
            "pool": lambda: nn.AvgPool2d(3, 1, 1),
        }
        if kind == "cat":
            return nn.Conv2d(c, 2, 1), c + 2
        return plain[kind](), c

    def forward(self, x):
        x = self.stem(x)
        for kind, layer in zip(self.kinds, self.steps, strict=True):
            if kind == "residual":
                x = x + torch.relu(layer(x))
            elif kind == "gate":
                x = x * torch.sigmoid(layer(x))
            elif kind == "squeeze":
                x = x * torch.sigmoid(layer(x.mean((2, 3))))[:, :, None, None]
            elif kind == "cat":
                x = torch.cat([x, layer(x)], 1)
            elif kind == "half":
                x = torch.cat([torch.relu(x[:, : x.shape[1] // 2]), x[:, x.shape[1] // 2 :]], 1)
            elif kind == "swap":
                x = x.roll(1, 1)
            else:
                x = layer(x)
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1))


KINDS = (
    "conv grouped depthwise bn gn in relu tanh gelu prelu relu6 residual gate "
    "squeeze cat half swap shuffle pool"
).split()


@pytest.mark.e2e
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=7), st.sampled_from([4, 6, 8]))
def test_random_architectures(choices, channels):
    torch.manual_seed(0)
    model = randomise(RandomNet(choices, channels).double()).eval()
    x = torch.randn(2, 2, 6, 6).double()
    sym = discover(model, x)
    assert verify(model, sym, x) < 1e-11
    assert not any("numerical check" in f.reason for f in sym.frozen)


@pytest.mark.e2e
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=7))
def test_random_architectures_as_fixed_maps(choices):
    torch.manual_seed(0)
    model = randomise(RandomNet(choices, 8).double()).eval()
    x = torch.randn(2, 2, 6, 6).double()
    assert verify(model, discover(model, x, batch_norm="eval"), x) < 1e-11
