"""Canonical forms: they keep the function, stay what they are, and are one for every orbit."""

import functools
import logging
from itertools import pairwise, product

import pytest
import torch
import torchvision
from cases import Forward, randomise
from checked_symmetries import find, furthest, moved_at_random, seeded
from known_networks.classics import SMALL
from known_networks.mixing import MIXING as MIXED
from torch import nn

from lightning_bnn import models
from weightsym import (
    Element,
    balancing_matrices,
    canonicalise,
    discover,
    mix,
    permute,
    plan_removal,
    random_permutations,
    random_shifts,
    remove_softmax_shift,
    shift,
    shift_logits,
    sort_permutations,
)
from weightsym import params as P
from weightsym.forms.balanced_form import balance_spaces, sides
from weightsym.forms.scales_and_signs import canonical_scales_and_signs
from weightsym.groups.shift_removal import remove_shifts

KEYS = ("max", "first", "mean", "median", "norm", "outgoing")
lin = nn.Linear


# ------------------------------------------------------------ networks that only these tests need
def layers(activation, *widths, layer=lin):
    """Layers of some widths with activations between them."""
    every = [m for sizes in pairwise(widths) for m in (layer(*sizes), activation())]
    return nn.Sequential(*every[:-1])


class Streams(nn.Module):
    """Grouped convolutions that write into a residual stream, behind ungrouped ones."""

    def __init__(self, groups, conv):
        super().__init__()
        self.first, self.wide, self.last = (
            nn.Conv2d(a, b, 1) for a, b in ((4, 8), (8, 12), (8, 2))
        )
        self.back, self.own = conv(12, 8, 1, groups=groups), conv(8, 8, 1, groups=groups)

    def forward(self, x):
        h = self.first(x)
        h = h + self.back(torch.relu(self.wide(h)))
        return self.last(torch.relu(h + self.own(torch.relu(h))))


def pooled():
    """Its last units are summed up: no weight leaves them."""
    parts = {"a": lin(3, 5), "b": lin(5, 6)}
    return Forward(lambda s, x: torch.relu(s.b(torch.relu(s.a(x)))).sum(-1, keepdim=True), **parts)


def added(*hidden):
    """Branches that are added up in front of an activation."""
    parts = {"branches": nn.ModuleList(layers(nn.Tanh, 3, n, 5) for n in hidden), "last": lin(5, 2)}
    return Forward(lambda s, x: s.last(torch.tanh(sum(b(x) for b in s.branches))), **parts)


def transposed(n):
    """A matrix that is added to its transpose."""
    parts = {"a": lin(3, n), "d": lin(n, 1), "w": nn.Parameter(torch.randn(n, n))}
    return Forward(lambda s, x: s.d(torch.relu(s.a(x)) @ (s.w + s.w.T)), **parts)


def roots():
    parts = {"a": lin(3, 6), "b": lin(6, 5), "c": lin(5, 2)}
    return Forward(lambda s, x: s.c(torch.relu(s.b(s.a(x).abs().sqrt()))), **parts)


def normed(*widths, norm=nn.RMSNorm):
    """Streams into some of whose directions no weight reaches, but a bias does."""
    inside = [norm(widths[1], elementwise_affine=False), lin(*widths[1:3])]
    more = [nn.Tanh(), *normed(*widths[2:])] if len(widths) > 3 else []
    return nn.Sequential(lin(*widths[:2]), *inside, *more)


def blurred(*widths):
    return functools.partial(layers, *widths, layer=functools.partial(nn.Conv1d, kernel_size=2))


NARROW = {"first": (5, 1, 2, 1), "in the middle": (4, 3, 1, 3, 2), "in a row": (5, 1, 1, 1, 3, 1)}
LOCAL = {
    **{f"{name}, {f.__name__}": (functools.partial(layers, f, *widths), (3, widths[0]))
       for name, widths in NARROW.items() for f in (nn.ReLU, nn.Tanh)},
    "narrow convolutions": (blurred(nn.ReLU, 2, 1, 3, 1, 2), (3, 2, 7)),
    "2 groups": (lambda: Streams(2, nn.Conv2d), (2, 4, 3, 3)),
    "4 groups": (lambda: Streams(4, nn.Conv2d), (2, 4, 3, 3)),
    "2 groups, transposed": (lambda: Streams(2, nn.ConvTranspose2d), (2, 4, 3, 3)),
    "units that nothing reads": (pooled, (4, 3)),
    "roots": (roots, (3, 3)),
    "a matrix of 2 units": (lambda: transposed(2), (5, 3)),
    "a matrix of 4 units": (lambda: transposed(4), (5, 3)),
    "sums": (lambda: added(4, 4, 4), (5, 3)),
    "sums that differ": (lambda: added(4, 5, 6), (5, 3)),
    "two inputs": (lambda: normed(2, 4, 1), (5, 2)),
    "one input": (lambda: normed(1, 4, 1), (5, 1)),
    "one centred input": (lambda: normed(1, 6, 2, norm=nn.LayerNorm), (5, 1)),
    "similarities": (lambda: Forward(lambda s, x: s.a(x) @ s.a(x).T, a=lin(2, 4)), (5, 2)),
    "two streams": (lambda: normed(2, 6, 3, 8, 2), (5, 2)),
}  # fmt: skip


@functools.cache
def problem(name):
    """A network in float64, an input, its symmetries and its weights."""
    if name not in LOCAL:
        return find(name)
    torch.manual_seed(0)
    build, shape = LOCAL[name]
    model, x = build().double(), torch.randn(shape).double()
    return model, x, discover(model, x), P.of(model)


# ------------------------------------------------------------ one law
BALANCED = {"mixing": "balanced", "shifts": True}
SHIFTED = ("a matrix of 2 units", "a matrix of 4 units", "sums", "sums that differ")
SECOND_SCALES = ("a product", "three factors", "attention by states", "squared ReLUs")
NESTED = "grouped queries", "rotary, grouped", "one key for all", "three levels"
"""Blocks inside blocks."""
STREAMS = ("2 groups", "4 groups", "2 groups, transposed")
SCALINGS = ("unit-norm", "unit-std", "min-mass")
FORMS = [
    *((name, {"scaling": s}) for name, s in product(SMALL, (None, "unit-std"))),
    *((name, {"permutation": k}) for name, k in product(("grouped cnn",), KEYS)),
    *((name, {"permutation": k}) for name, k in product(NESTED, KEYS[::5])),
    *((name, {"scaling": None, "permutation": k}) for name, k in product(STREAMS, KEYS[::2])),
    *(("units that nothing reads", {"scaling": None, "permutation": k}) for k in KEYS),
    *((name, {"scaling": s, "permutation": k}) for name in [*LOCAL][:7]
      for s, k in zip(SCALINGS, ("max", "first", "max"), strict=True)),
    *((name, {"scaling": s, "shifts": True}) for name in SHIFTED for s in (None, "min-mass")),
    *((name, {"scaling": s}) for name in (*SECOND_SCALES, "a learned number") for s in SCALINGS),
    *(("roots", {"scaling": s}) for s in ("unit-norm", "unit-std")),
    ("Mamba", {"scaling": "unit-norm"}),
    *((name, BALANCED) for name in ("heads", "adapter", "chain", "centred")),
    *((name, {"scaling": "min-mass", **BALANCED}) for name in MIXED if name != "chain"),
    *((name, {"scaling": "unit-std", **BALANCED}) for name in ("stream", "centred")),
    *((name, {"mixing": "balanced"}) for name in [*LOCAL][-5:]),
]  # fmt: skip


def moved(params, sym, form, seed):
    """Another network of the orbit: its scales stay if the form does not fix them."""
    beside = bool(form.get("shifts") or form.get("mixing"))
    if form.get("scaling", "unit-norm") is not None or not sym.scalings:
        return moved_at_random(params, sym, seeded(seed), beside)
    params = shift(params, sym, random_shifts(sym, seeded(seed))) if beside else params
    return permute(params, sym, random_permutations(sym, seeded(seed)))


def is_canonical(model, x, sym, params, form):
    canonical = canonicalise(params, sym, **form)
    y = P.apply(model, params, x)
    torch.testing.assert_close(P.apply(model, canonical, x), y, rtol=1e-8, atol=1e-8)
    assert furthest(canonicalise(canonical, sym, **form), canonical) < 1e-6
    other = moved(params, sym, form, 5)
    assert furthest(canonicalise(other, sym, **form), canonical) < 1e-6
    return canonical, other


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_forms_are_canonical(name, form, caplog):
    model, x, sym, params = problem(name)
    canonical, other = is_canonical(model, x, sym, params, form)
    if form == {"mixing": "balanced"}:
        assert not any(record.name.startswith("weightsym") for record in caplog.records)
    near = {n: t + 0.1 * torch.randn_like(t) if P.is_weight(n, t) else t for n, t in params.items()}
    assert furthest(canonicalise(near, sym, **form), canonical) > 1e-3  # of another orbit
    if form.keys() & {"mixing", "shifts"} and (sym.linear or sym.shifts):
        plain = [canonicalise(p, sym, form.get("scaling", "unit-norm")) for p in (params, other)]
        assert furthest(*plain) > 1e-3


@pytest.mark.parametrize("name", [*LOCAL][-5:])
def test_directions_without_weights_are_told_in_single_precision(name):
    _, _, sym, params = problem(name)
    params = {n: t.float() for n, t in params.items()}
    others = params, moved_at_random(params, sym, seeded())
    assert furthest(*others) > 0.1
    assert furthest(*(canonicalise(p, sym, mixing="balanced") for p in others)) < 1e-4


@pytest.mark.parametrize(("name", "permutation"), product(SMALL, ("max", "first", "outgoing")))
def test_ties_are_broken_by_further_weights(name, permutation):
    """Many units have the same statistic, and many weights are as large as the largest."""
    model, x, sym, params = problem(name)
    if permutation == "outgoing" and name in ("grouped cnn", "u-net"):
        pytest.skip("units that differ only in where equal weights stand: outside of the law")
    k = 8 if name != "grouped cnn" else 32  # few enough, and no unit without any weight
    params = {n: (k * t).round() / k if P.is_weight(n, t) else t for n, t in params.items()}
    is_canonical(model, x, sym, params, {"scaling": None, "permutation": permutation})


@pytest.mark.parametrize("permutation", KEYS)
def test_copies_of_units_are_exchangeable(permutation):
    model, x, sym, params = problem("mlp")
    params = {n: t.clone() for n, t in params.items()}
    params["1.weight"][3:6], params["1.bias"][3:6] = params["1.weight"][2], params["1.bias"][2]
    params["3.weight"][:, 3:6] = params["3.weight"][:, 2:3]
    is_canonical(model, x, sym, params, {"permutation": permutation})


@pytest.mark.parametrize("most", [1, 2])
def test_signs_of_ties_are_those_of_a_complete_sort(most, monkeypatch):
    """Also where the numbers that decide are among the first, or not."""
    net = nn.Sequential(lin(9, 6), nn.Tanh(), lin(6, 2))
    sym, draws = discover(net, torch.randn(2, 9)), torch.randn(50, 6, 9, generator=seeded(4))
    stack = {**P.populate(net, 50), "0.weight": draws.round()}
    whole = canonical_scales_and_signs(stack, sym, None)[1][0]
    up, down = draws.round().amax(-1), -draws.round().amin(-1)
    assert (up == down).any()
    assert torch.equal(whole[up != down], (up - down).sign()[up != down])
    monkeypatch.setattr("weightsym.forms.scales_and_signs._EXTREMES", most)
    monkeypatch.setattr("weightsym.forms.scales_and_signs._AT_ONCE", 4)
    assert torch.equal(canonical_scales_and_signs(stack, sym, None)[1][0], whole)


def test_ties_of_units_with_many_weights():
    """A million float32 weights lie closer together than rounding separates any two of them."""
    net = layers(nn.ReLU, 1400, 1400, 1400, layer=functools.partial(lin, bias=False))
    sym, params = discover(net, torch.randn(1, 1400)), P.of(net)
    params["0.weight"][:, 0] = params["2.weight"][0] = 1.0  # the largest of every unit
    other = permute(params, sym, random_permutations(sym, seeded()))
    one, two = (canonicalise(p, sym, None) for p in (params, other))
    assert all(torch.equal(two[n], one[n]) for n in one)


@pytest.mark.e2e
def test_resnet18_with_negative_gains():
    model = randomise(torchvision.models.resnet18().double()).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data *= torch.randn_like(module.weight).sign()
    x = torch.randn(1, 3, 32, 32).double()
    form, _ = is_canonical(model, x, discover(model, x), P.of(model), {"scaling": "unit-norm"})
    gains = form["layer1.0.bn1.weight"]
    torch.testing.assert_close(gains.abs(), torch.ones_like(gains))


# ------------------------------------------------------------ stacks
STACKED = [
    *(("optunet", {"scaling": s}) for s in SCALINGS),
    *(("mlp", {"scaling": None, "permutation": k}) for k in KEYS),
    *((name, {"mixing": "balanced"}) for name in MIXED),
]


def stack_of(name, form):
    model, _, sym, _ = problem(name)
    stack = P.populate(model, 3, seeded())
    ties = form.get("scaling", "unit-norm") is None and name == "mlp"
    return sym, {n: (8 * t).round() / 8 for n, t in stack.items()} if ties else stack


@pytest.mark.parametrize(("name", "form"), STACKED)
def test_a_stack_is_every_member(name, form):
    sym, stack = stack_of(name, form)
    together = P.unstack(canonicalise(stack, sym, **form))
    for one, member in zip(together, P.unstack(stack), strict=True):
        assert furthest(one, canonicalise(member, sym, **form)) < 1e-9


REMOVED = [
    *((name, {"scaling": s}) for name in SMALL for s in (None, "unit-norm", "min-mass")),
    ("mlp", {"scaling": "unit-std", "target": 3.0}),
    ("mlp", {"permutation": None}),
    ("mlp", {"permutation": "mean", "descending": False}),
]


@pytest.mark.parametrize(("name", "form"), REMOVED)
def test_two_passes_by_block_and_by_tensor_end_there_too(name, form):
    model, _, sym, params = problem(name)
    stack = P.stack([params] * 3)
    stack = {k: v + 0.1 * torch.randn_like(v) if P.is_weight(k, v) else v for k, v in stack.items()}
    stack = permute(stack, sym, random_permutations(sym, members=3))
    blocks = [{k: v[:2] for k, v in stack.items()}, {k: v[2:] for k, v in stack.items()}]
    removal = plan_removal(iter(blocks), sym, **form)
    tolerance = 1e-6 if form.get("scaling") == "min-mass" else 1e-12  # iterates on whole blocks
    for tensor, expected in canonicalise(stack, sym, **form).items():
        for rows in (slice(0, 1), slice(1, 3)):
            found = removal.rows(tensor, stack[tensor][rows], rows)
            torch.testing.assert_close(found, expected[rows], rtol=tolerance, atol=tolerance)


def test_tensors_that_are_taken_one_by_one_stay_in_place():
    model, _, sym, _ = problem("branches, summed")
    removal = plan_removal(P.populate(model, 3), sym)
    assert not any(step.sources for step in removal.steps)
    assert any(step.sources for step in Element.random(sym, seeded(), 3).steps)


# ------------------------------------------------------------ what the names say
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


def test_groups_are_sorted_inside_first_and_signs_are_those_of_the_largest_weight():
    _, _, sym, params = problem("optunet")
    new = canonicalise(params, sym, None, "first")
    conv = new["3.weight"][:, 0, 0, 0].reshape(2, 5)
    assert (conv[:, :-1] >= conv[:, 1:]).all()
    assert new["0.weight"][0, 0, 0, 0] >= new["0.weight"][1, 0, 0, 0]
    for name in ("tanh mlp", *(f"{n}, Tanh" for n in NARROW)):
        _, _, sym, params = problem(name)
        form = canonicalise(params, sym, None, None)
        for weight in [n for n in form if n.endswith("weight")][:-1]:
            assert torch.equal(form[weight].amax(1), form[weight].abs().amax(1))


@pytest.mark.parametrize("name", [*(f"{n}, ReLU" for n in NARROW), "roots"])
@pytest.mark.parametrize("scaling", ["unit-norm", "unit-std"])
def test_sizes_of_narrow_layers_and_of_units_of_which_functions_take_a_root(name, scaling):
    _, _, sym, params = problem(name)
    form = canonicalise(params, sym, scaling)
    for weight in [n for n in form if n.endswith("weight")][:-1]:
        rows = form[weight]
        if rows.shape[1] > 1:
            size = rows.norm(dim=1) if scaling == "unit-norm" else rows.std(1)
            torch.testing.assert_close(size, torch.ones(len(rows)).double())


def test_softmax_shift_is_removed():
    model, x = models.mlp(6, [5], 3).double(), torch.randn(4, 6).double()
    sym, params = discover(model, x), P.of(model)
    new = remove_softmax_shift(params, sym)
    assert new["3.weight"].sum(0).abs().max() < 1e-12
    assert new["3.bias"].sum().abs() < 1e-12
    shifted = shift_logits(params, sym, torch.randn(5).double(), torch.tensor(3.0).double())
    assert furthest(shifted, params) > 0.1
    for other in (new, shifted):
        both = (P.apply(model, p, x).log_softmax(1) for p in (params, other))
        torch.testing.assert_close(*both)
    forms = [canonicalise(p, sym, softmax_shift=True) for p in (params, shifted)]
    assert furthest(*forms) < 1e-9
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
        caplog.clear()
        canonicalise(params, sym, "min-mass")
        assert "1 units have no incoming weight" in caplog.text
        caplog.clear()
        nothing = {n: t.clone() for n, t in params.items()}
        nothing["1.bias"][2] = nothing["3.weight"][:, 2] = 0
        canonicalise(nothing, sym, "min-mass")
        assert not caplog.text
    assert all(t.isfinite().all() for t in canonicalise(params, sym, "unit-std").values())


def test_places_that_change_places_share_what_they_hold():
    _, _, sym, params = problem("a matrix of 4 units")
    w = params["w"]
    torch.testing.assert_close(remove_shifts(params, sym)["w"], (w + w.T) / 2)
    for name, shares in (("sums", (1 / 3, 1 / 3, 1 / 3)), ("sums that differ", (0, 0, 1))):
        _, _, sym, params = problem(name)
        names = [f"branches.{k}.2.bias" for k in range(3)]
        total = sum(params[n] for n in names)
        without = remove_shifts(params, sym)
        torch.testing.assert_close([without[n] for n in names], [k * total for k in shares])


# ------------------------------------------------------------ matrices
@pytest.mark.parametrize("name", MIXED)
def test_what_the_matrices_do(name):
    """Sides are balanced, Gram matrices diagonal and sorted, first entries positive."""
    _, _, sym, params = find(name)
    params = mix(params, sym, balancing_matrices(params, sym))
    stack = {n: t[None] for n, t in params.items()}
    for group in sym.linear:
        a, b = sides(stack, sym, group)
        if group.rescales and group.kind == "general":
            torch.testing.assert_close(a @ a.mT, b @ b.mT, rtol=1e-9, atol=1e-9)
        if group.kind == "complex":
            assert torch.allclose(a.square().sum((-1, -2)), b.square().sum((-1, -2)))
        if group.kind in ("general", "orthogonal"):
            gram = a @ a.mT + b @ b.mT
            diagonal = gram.diagonal(dim1=-2, dim2=-1)
            assert (diagonal[..., :-1] > diagonal[..., 1:]).all()
            assert (gram - torch.diag_embed(diagonal)).abs().max() < 1e-10


def test_closed_form_against_the_definition():
    """G by an eigenvalue problem of A A^T and B B^T: the geometric mean of two matrices."""
    a, b = torch.randn(2, 1, 4, 6, dtype=torch.float64, generator=seeded(5))
    found = balance_spaces(a, b)
    p, q = a @ a.mT, b @ b.mT

    def root(m, power):
        values, vectors = torch.linalg.eigh(m)
        return vectors * values[..., None, :] ** power @ vectors.mT

    # G^T G solves X P X = Q
    middle = root(root(p, 0.5) @ q @ root(p, 0.5), 0.5)
    expected = root(p, -0.5) @ middle @ root(p, -0.5)
    torch.testing.assert_close(found.forward.mT @ found.forward, expected)
    eye = torch.eye(4).double()[None]
    torch.testing.assert_close(found.forward @ found.inverse_transpose.mT, eye)
    torch.testing.assert_close(found.singular, torch.linalg.svdvals(a.mT @ b)[..., :4])


def test_spaces_whose_matrices_are_not_unique_are_named(caplog):
    _, _, sym, params = find("heads")
    flat, alike = ({n: t.clone() for n, t in params.items()} for _ in range(2))
    flat["layers.0.o.weight"][:, :4] = 0
    for name in ("q", "k"):
        alike[f"layers.0.{name}.weight"][:4] = torch.eye(8)[:4].double()
    with caplog.at_level(logging.WARNING):
        balancing_matrices(alike, sym)
        assert "not unique" in caplog.text
        matrices = balancing_matrices(flat, sym)
    assert "1 spaces are rank-deficient" in caplog.text
    assert torch.equal(matrices[1][0].abs(), torch.eye(4).double())
    for shifts in (False, True):  # what stays where it is differs along orbits
        with pytest.raises(ValueError, match="1 spaces at 'layers.0.v.weight' are rank-deficient"):
            canonicalise(flat, sym, mixing="balanced", shifts=shifts)
