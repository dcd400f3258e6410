import functools
import logging
from itertools import pairwise

import pytest
import torch
import torchvision
from cases import CASES, NESTED, Forward, randomise
from torch import nn

from lightning_bnn import models
from weightsym import (
    canonicalise,
    discover,
    permute,
    random_permutations,
    random_shifts,
    remove_softmax_shift,
    shift,
    shift_logits,
    sort_permutations,
)
from weightsym import params as P
from weightsym.mixing import remove_shifts
from weightsym.scales_and_signs import canonical_scales_and_signs
from weightsym.verify import random_element

SMALL = CASES[:10]
SCALINGS = (None, "unit-norm", "unit-std", "min-mass")
KEYS = ("max", "first", "mean", "median", "norm", "outgoing")


def ids(case):
    return case.name


def close(a, b, tolerance=1e-6):
    return all((a[n].double() - b[n].double()).abs().max() <= tolerance for n in a if a[n].numel())


def check_form(model, x, sym, params, **form):
    """Idempotent, keeps the function, constant on the orbit."""
    canonical = canonicalise(params, sym, **form)
    y = P.apply(model, params, x)
    torch.testing.assert_close(P.apply(model, canonical, x), y, rtol=1e-8, atol=1e-8)
    assert close(canonicalise(canonical, sym, **form), canonical)
    other = random_element(params, sym, torch.Generator().manual_seed(5))
    if form["scaling"] is None and sym.scalings:
        other = permute(params, sym, random_permutations(sym))
    assert close(canonicalise(other, sym, **form), canonical)


@pytest.mark.parametrize("case", SMALL, ids=ids)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scalings_are_canonical(case, scaling):
    model, x, sym = case.known()
    check_form(model, x, sym, P.of(model), scaling=scaling, permutation="max")


@pytest.mark.parametrize("case", [*SMALL, *NESTED], ids=ids)
@pytest.mark.parametrize("permutation", KEYS)
def test_sort_keys_are_canonical(case, permutation):
    model, x, sym = case.known()
    check_form(model, x, sym, P.of(model), scaling="unit-norm", permutation=permutation)


@pytest.mark.parametrize("case", SMALL, ids=ids)
@pytest.mark.parametrize("permutation", ["max", "first", "mean", "norm", "outgoing"])
@pytest.mark.parametrize("scaling", [None, pytest.param("unit-norm", marks=pytest.mark.e2e)])
def test_quantised_weights(case, permutation, scaling):
    """Many units have the same statistic, and many weights are as large as the largest."""
    model, x, sym = case.known()
    if permutation == "outgoing" and case.name in ("grouped cnn", "u-net"):
        pytest.skip("units that differ only in where equal weights stand: outside of the law")
    levels = 8 if case.name != "grouped cnn" else 32  # few enough, and no unit without any weight
    params = {
        n: (t * levels).round() / levels if P.is_weight(n, t) else t for n, t in P.of(model).items()
    }
    check_form(model, x, sym, params, scaling=scaling, permutation=permutation)


@pytest.mark.parametrize("permutation", KEYS)
def test_ties_in_a_stack_are_those_of_its_members(permutation):
    model, _, sym = CASES[0].known()
    stack = P.populate(model, 4, torch.Generator().manual_seed(0))
    stack = {n: (t * 8).round() / 8 for n, t in stack.items()}
    together = P.unstack(canonicalise(stack, sym, None, permutation))
    for form, member in zip(together, P.unstack(stack), strict=True):
        assert close(form, canonicalise(member, sym, None, permutation))


@pytest.mark.parametrize("permutation", KEYS)
def test_copies_of_units_are_exchangeable(permutation):
    model, _, sym = CASES[0].known()
    params = {n: t.clone() for n, t in P.of(model).items()}
    params["1.weight"][3:6], params["1.bias"][3:6] = params["1.weight"][2], params["1.bias"][2]
    params["3.weight"][:, 3:6] = params["3.weight"][:, 2:3]
    form = canonicalise(params, sym, "unit-norm", permutation)
    for seed in range(5):
        moved = permute(params, sym, random_permutations(sym, torch.Generator().manual_seed(seed)))
        assert close(canonicalise(moved, sym, "unit-norm", permutation), form)


def test_ties_of_units_with_many_weights():
    """A million float32 weights lie closer together than rounding separates any two of them."""
    width = 1400
    into, out_of = (nn.Linear(width, width, bias=False) for _ in range(2))
    net = nn.Sequential(into, nn.ReLU(), out_of)
    sym, params = discover(net, torch.randn(1, width)), P.of(net)
    params["0.weight"][:, 0] = params["2.weight"][0] = 1.0  # the largest of every unit
    form = canonicalise(params, sym, None)
    moved = permute(params, sym, random_permutations(sym, torch.Generator().manual_seed(0)))
    again = canonicalise(moved, sym, None)
    assert all(torch.equal(again[n], form[n]) for n in form)


class Streams(nn.Module):
    """Grouped convolutions that write into a residual stream, behind ungrouped ones."""

    def __init__(self, groups, transposed):
        super().__init__()
        self.first, self.wide, self.last = (
            nn.Conv2d(a, b, 1) for a, b in ((4, 8), (8, 12), (8, 2))
        )
        conv = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.back, self.own = conv(12, 8, 1, groups=groups), conv(8, 8, 1, groups=groups)

    def forward(self, x):
        h = self.first(x)
        h = h + self.back(torch.relu(self.wide(h)))
        return self.last(torch.relu(h + self.own(torch.relu(h))))


@functools.cache
def streams(groups, transposed):
    torch.manual_seed(0)
    model, x = Streams(groups, transposed).double(), torch.randn(2, 4, 3, 3).double()
    return discover(model, x), P.of(model)


@pytest.mark.parametrize("permutation", KEYS)
@pytest.mark.parametrize(("groups", "transposed"), [(2, False), (4, False), (2, True)])
def test_grouped_convolutions_into_a_stream(groups, transposed, permutation):
    sym, params = streams(groups, transposed)
    assert any(g.kind == "block" and len(g.inner) > 1 for g in sym.permutations)
    form = canonicalise(params, sym, None, permutation)
    for seed in range(3):
        moved = permute(params, sym, random_permutations(sym, torch.Generator().manual_seed(seed)))
        assert close(canonicalise(moved, sym, None, permutation), form)


@pytest.mark.e2e
def test_resnet18_with_negative_gains():
    model = randomise(torchvision.models.resnet18().double()).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data *= torch.randn_like(module.weight).sign()
    x = torch.randn(1, 3, 32, 32).double()
    sym = discover(model, x)
    check_form(model, x, sym, P.of(model), scaling="unit-norm", permutation="max")
    gains = canonicalise(P.of(model), sym)["layer1.0.bn1.weight"]
    torch.testing.assert_close(gains.abs(), torch.ones_like(gains))


@pytest.mark.parametrize("scaling", ["unit-norm", "unit-std", "min-mass"])
def test_a_stack_is_every_member(scaling):
    model, x = SMALL[2].make()
    sym, stack = discover(model, x), P.populate(model, 4)
    together = P.unstack(canonicalise(stack, sym, scaling))
    for k, member in enumerate(P.unstack(stack)):
        assert close(together[k], canonicalise(member, sym, scaling), 1e-9)


def test_norms_and_orders_are_what_the_names_say():
    model = models.mlp(7, [6, 5], 3).double()
    sym, params = discover(model, torch.randn(1, 7)), P.of(model)
    new = canonicalise(params, sym, "unit-norm", "max", target=3.0)
    torch.testing.assert_close(new["1.weight"].norm(dim=1), torch.full((6,), 3.0).double())
    torch.testing.assert_close(new["3.weight"].norm(dim=1), torch.full((5,), 3.0).double())
    largest = new["1.weight"].amax(1)
    assert (largest[:-1] >= largest[1:]).all()
    new = canonicalise(params, sym, "unit-std", "first", descending=False)
    torch.testing.assert_close(new["3.weight"].std(1), torch.ones(5).double())
    assert (new["1.weight"][:-1, 0] <= new["1.weight"][1:, 0]).all()
    assert (new["3.weight"][:-1, 0] <= new["3.weight"][1:, 0]).all()
    new = canonicalise(params, sym, None, "outgoing")
    assert (new["5.weight"][0, :-1] >= new["5.weight"][0, 1:]).all()
    assert (new["3.weight"][0, :-1] >= new["3.weight"][0, 1:]).all()
    for key in ("mean", "median", "norm"):
        order = sort_permutations(params, sym, key)[0]
        value = getattr(params["1.weight"], key)(dim=1)
        value = value.values if key == "median" else value
        assert torch.equal(order, value.argsort(descending=True))


def test_heads_and_groups_are_sorted_inside_first():
    model, x = SMALL[2].make()
    sym, params = discover(model, x), P.of(model)
    new = canonicalise(params, sym, None, "first")
    conv = new["3.weight"][:, 0, 0, 0].reshape(2, 5)
    assert (conv[:, :-1] >= conv[:, 1:]).all()
    assert new["0.weight"][0, 0, 0, 0] >= new["0.weight"][1, 0, 0, 0]


def test_sign_is_that_of_the_largest_weight():
    model, x = SMALL[1].make()
    sym = discover(model, x)
    new = canonicalise(P.of(model), sym, None, None)["1.weight"]
    assert (new.gather(1, new.abs().argmax(1, keepdim=True)) > 0).all()


def test_softmax_shift_is_removed():
    model = models.mlp(6, [5], 3).double()
    x = torch.randn(4, 6).double()
    sym, params = discover(model, x), P.of(model)
    new = remove_softmax_shift(params, sym)
    assert new["3.weight"].sum(0).abs().max() < 1e-12
    assert new["3.bias"].sum().abs() < 1e-12
    torch.testing.assert_close(
        P.apply(model, new, x).log_softmax(1), P.apply(model, params, x).log_softmax(1)
    )
    shifted = shift_logits(params, sym, torch.randn(5).double(), torch.tensor(3.0).double())
    assert close(
        canonicalise(shifted, sym, softmax_shift=True),
        canonicalise(params, sym, softmax_shift=True),
    )
    stack = P.populate(model, 3)
    assert remove_softmax_shift(stack, sym)["3.weight"].sum(1).abs().max() < 1e-12


def test_dead_units_are_left_alone_and_reported(caplog):
    model = models.mlp(6, [5], 3).double()
    model[1].weight.data[2] = 0
    sym, params = discover(model, torch.randn(1, 6)), P.of(model)
    with caplog.at_level(logging.WARNING, logger="weightsym"):
        ((scale,), _) = canonical_scales_and_signs(params, sym, "unit-norm")
    assert scale[2] == 1
    assert "1 units have no incoming weight" in caplog.text
    assert all(t.isfinite().all() for t in canonicalise(params, sym, "unit-std").values())


@pytest.mark.bad_input
def test_errors():
    model = models.mlp(6, [5], 3)
    sym, params = discover(model, torch.randn(1, 6)), P.of(model)
    with pytest.raises(ValueError, match="`by` must be one of max, first, .* got 'size'"):
        sort_permutations(params, sym, "size")
    with pytest.raises(ValueError, match="`scaling` must be one of unit-norm, .* got 'norm'"):
        canonicalise(params, sym, "norm")
    with pytest.raises(ValueError, match=r"`target` must be positive and finite, got 0"):
        canonicalise(params, sym, "unit-norm", target=0)


def pooled():
    """Its last units are summed up: no weight leaves them."""
    return Forward(
        lambda s, x: torch.relu(s.last(torch.relu(s.first(x)))).sum(-1),
        first=nn.Linear(3, 5),
        last=nn.Linear(5, 6),
    )


@pytest.mark.parametrize("by", ["outgoing", "first", "max"])
def test_units_that_nothing_reads_are_sorted_before_what_they_read(by):
    torch.manual_seed(0)
    model = pooled().double()
    sym, params = discover(model, torch.randn(4, 3).double()), P.of(model)
    moved = permute(params, sym, random_permutations(sym, torch.Generator().manual_seed(1)))
    one, other = (canonicalise(p, sym, None, by) for p in (params, moved))
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert any(not torch.equal(one[n], params[n]) for n in one)


# ---------------------------------------------------------------------- layers of width 1
def layers(activation, *widths, layer=nn.Linear):
    """Layers of some widths with activations between them."""
    every = [m for sizes in pairwise(widths) for m in (layer(*sizes), activation())]
    return nn.Sequential(*every[:-1])


NARROW = {
    "first": (5, 1, 2, 1),
    "in the middle": (4, 3, 1, 3, 2),
    "one after another": (5, 1, 1, 1, 3, 1),
    "convolutions": (2, 1, 3, 1, 2),
}


@functools.cache
def narrow(name, activation):
    torch.manual_seed(0)
    is_convolved = name == "convolutions"
    layer = functools.partial(nn.Conv1d, kernel_size=2) if is_convolved else nn.Linear
    model = layers(activation, *NARROW[name], layer=layer).double()
    x = torch.randn(3, NARROW[name][0], *([7] * is_convolved)).double()
    return model, x, discover(model, x)


@pytest.mark.parametrize("permutation", ["max", "first"])
@pytest.mark.parametrize("scaling", ["unit-norm", "unit-std", "min-mass"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("name", NARROW)
def test_layers_of_width_one(name, activation, scaling, permutation):
    """The only unit of a layer has no axis: its weights lie along that of its inputs."""
    model, x, sym = narrow(name, activation)
    params = P.of(model)
    check_form(model, x, sym, params, scaling=scaling, permutation=permutation)
    form = canonicalise(params, sym, scaling, permutation)
    size = torch.linalg.vector_norm if scaling == "unit-norm" else torch.std
    for weight in [n for n in form if n.endswith("weight")][:-1]:
        rows = form[weight].flatten(1)
        if activation is nn.ReLU and scaling != "min-mass" and rows.shape[1] > 1:
            torch.testing.assert_close(size(rows, dim=1), torch.ones(len(rows)).double())
        if activation is nn.Tanh:
            assert torch.equal(rows.amax(1), rows.abs().amax(1))
    other = {**params, "0.bias": params["0.bias"] + 0.1}  # no symmetry
    assert not close(canonicalise(other, sym, scaling, permutation), form, 1e-3)


# ---------------------------------------------------------------------- shifts
class Branches(nn.Module):
    """Branches that are added up in front of an activation."""

    def __init__(self, *hidden):
        super().__init__()
        self.branches = nn.ModuleList(layers(nn.Tanh, 3, n, 5) for n in hidden)
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        return self.last(torch.tanh(sum(branch(x) for branch in self.branches)))


def transposed(n):
    """A matrix that is added to its transpose."""
    layers = {"a": nn.Linear(3, n), "d": nn.Linear(n, 1), "w": nn.Parameter(torch.randn(n, n))}
    return Forward(lambda s, x: s.d(torch.relu(s.a(x)) @ (s.w + s.w.T)), **layers)


SHIFTED = {
    "a matrix of 2 units": lambda: transposed(2),
    "a matrix of 4 units": lambda: transposed(4),
    "branches": lambda: Branches(4, 4, 4),
    "branches that differ": lambda: Branches(4, 5, 6),
}


@functools.cache
def shifted(name):
    torch.manual_seed(0)
    model, x = SHIFTED[name]().double(), torch.randn(5, 3).double()
    return model, x, discover(model, x)


@pytest.mark.parametrize("scaling", [None, "min-mass"])
@pytest.mark.parametrize("name", SHIFTED)
def test_shifts_of_places_that_permutations_move(name, scaling):
    model, x, sym = shifted(name)
    params, generator = P.of(model), torch.Generator().manual_seed(5)
    form = canonicalise(params, sym, scaling, shifts=True)
    torch.testing.assert_close(P.apply(model, form, x), model(x))
    assert close(canonicalise(form, sym, scaling, shifts=True), form)
    for _ in range(3):
        if scaling is None:
            other = shift(params, sym, random_shifts(sym, generator))
            other = permute(other, sym, random_permutations(sym, generator))
        else:
            other = random_element(params, sym, generator, mixing=True)
        assert close(canonicalise(other, sym, scaling, shifts=True), form)
        without = (canonicalise(p, sym, scaling) for p in (params, other))
        assert not close(*without, 1e-3)  # shifts differ


def test_places_that_change_places_share_what_they_hold():
    model, _, sym = shifted("a matrix of 4 units")
    w = P.of(model)["w"]
    torch.testing.assert_close(remove_shifts(P.of(model), sym)["w"], (w + w.T) / 2)
    names = [f"branches.{k}.2.bias" for k in range(3)]
    for name in ("branches", "branches that differ"):
        model, _, sym = shifted(name)
        total = sum(P.of(model)[n] for n in names)
        biases = [remove_shifts(P.of(model), sym)[n] for n in names]
        if name == "branches":
            torch.testing.assert_close(biases, [total / 3] * 3)
        else:
            assert not biases[0].any()
            assert not biases[1].any()
            torch.testing.assert_close(biases[2], total)
