"""Laws of all networks whose symmetries are known: they are found, exact, and no more than that."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from checked_symmetries import moved_at_random, seeded
from known_networks import NETWORKS, ORDERED, REPEATED, counted, marked

from weightsym import canonicalise, fingerprint, match, permute, random_permutations, verify
from weightsym import params as P
from weightsym.discovery.verify import covering_elements
from weightsym.forms import canonical
from weightsym.groups.actions import tied
from weightsym.groups.orbits import orbit_directions
from weightsym.matching.channels import distance

COUNTED = [name for name, row in NETWORKS.items() if row.dimension is not None and row.kernel]


def test_repeated_networks_are_there():
    assert NETWORKS.keys() > REPEATED


def all_that_is_known_is_found(network):
    *_, sym = network.known()
    units = Counter(f"{g.units}{'b' * (g.kind == 'block')}" for g in sym.permutations)
    assert network.groups is None or units == counted(network.groups.split())
    assert network.scales in (None, sym.scaling_dof)
    assert network.signs in (None, sym.sign_dof)
    matrices = Counter(f"{g.kind} {g.size}" for g in sym.linear for _ in range(g.spaces))
    assert network.matrices is None or matrices == counted(network.matrices.split(", "))
    assert network.shifts in (None, {g.name: g.size for g in sym.shifts})
    assert network.dead in (None, {g.name: g.size for g in sym.shifts if g.is_dead})
    assert network.dimension in (None, sym.dimension + network.missing)
    assert set(network.moves.split()) <= sym.touched
    reports = [str(f) for f in sym.frozen]
    if network.held is None:
        assert not any("refuted" in report for report in reports)
    else:
        assert bool(reports) == bool(network.held)
        assert all(re.search(network.held, report) for report in reports), reports


IN_TWO_BLOCKS = [NETWORKS["pairs of channels, read by a layer"]]


def blocks_inside_blocks_are_listed_from_inside(network):
    *_, sym = network.known()
    inside = [g for group in sym.permutations for row in group.inner for g in row]
    assert (len(inside) > len(set(inside))) == (network in IN_TWO_BLOCKS)
    for index, group in enumerate(sym.permutations):
        for row in group.inner:
            assert len(row) == group.units
            assert max(row) < index
            assert len({sym.permutations[g].units for g in row}) == 1


def no_element_changes_the_function(network):
    model, x, sym = network.known()
    if network.random:
        return
    for seed, inputs in enumerate([x, *network.other_inputs()]):
        generator = torch.Generator().manual_seed(seed)
        assert not verify(model, sym, *inputs, generator=generator) > network.tolerance


NOT_NORMED = [NETWORKS["a slice of a weight"], NETWORKS["scores of triples"]]
"""Rows that are not read have the scale of one that permutations move; one sign acts twice."""


def one_fingerprint_for_the_whole_orbit(network):
    model, _, sym = network.known()
    if network in NOT_NORMED:
        return
    own = fingerprint(P.of(model), sym)
    for element in covering_elements(sym, seeded()) if own.attained else ():
        found = fingerprint(element(P.of(model)), sym)
        assert own.agrees(found)
        assert found.norms == pytest.approx(own.norms, rel=1e-5, abs=1e-7)


def scales_signs_and_matrices_hold_in_training(network):
    """Scales, signs and matrices hold exactly, permutations in law where units draw numbers."""
    model, x, sym = network.known()
    model.train()
    try:
        assert not verify(model, replace(sym, permutations=()), *x) > network.tolerance
    finally:
        model.eval()


def an_element_of_which_a_tensor_is_left_out_does(network):
    """Negative control: the laws above would see a tensor that a symmetry forgets."""
    model, x, sym = network.known()
    if network.random or network.unnoticed or len(sym.touched) < 2:
        return
    params = P.of(model)
    before = outputs(model, params, x)
    elements = (moved_at_random(params, sym, seeded(seed)) for seed in range(3))
    assert any(
        change(outputs(model, moved | {name: params[name]}, x), before) > 1e-6
        for moved in elements
        for name in sorted(sym.touched)
    )


def outputs(model, params, x):
    made = torch.func.functional_call(model, params, x)
    return made if isinstance(made, tuple) else (made,)


def change(after, before):
    return max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))


CONSTANT = [NETWORKS["thresholds as an index"]]
"""Outputs that do not change, or jump."""


def nothing_changes_along_the_tangents_of_the_orbit(network):
    model, x, sym = network.known()
    if not sym.dimension:
        return
    params = P.of(model)
    orbit = orbit_directions(params, sym)
    columns = [flat(orbit.times(unit)) for unit in torch.eye(orbit.size, dtype=torch.float64)]
    tangents = torch.stack(columns, 1)
    assert int(torch.linalg.matrix_rank(tangents)) == sym.dimension
    generator = torch.Generator().manual_seed(0)
    vector = {
        n: torch.randn(params[n].shape, generator=generator, dtype=torch.float64)
        for n in orbit.names
    }
    along = orbit.onto(vector)
    solution = torch.linalg.lstsq(tangents, flat(vector)[:, None], driver="gelsd").solution
    torch.testing.assert_close(flat(along), (tangents @ solution)[:, 0], rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(orbit.adjoint(vector), tangents.mT @ flat(vector))
    if network.random:
        return
    is_single = network.tolerance > 1e-10  # it computes in float32 inside
    step, bound = (1e-2, 1e-3) if is_single else (1e-6, 2e-8)
    assert slope(model, params, x, along, step) < bound
    moves = not torch.allclose(flat(along), flat(vector))
    if moves and not network.unnoticed and network not in CONSTANT:
        assert slope(model, params, x, orbit.off(vector), step) > bound


def flat(vectors):
    return torch.cat([t.flatten() for t in vectors.values()])


def slope(model, params, x, direction, size):
    """Of the outputs along a direction, by a difference."""
    step = size / flat(direction).norm()
    ends = [
        outputs(model, params | {n: params[n] + h * t for n, t in direction.items()}, x)
        for h in (step, -step)
    ]
    return change(*ends) / (2 * size)


FORMS = [
    {"scaling": "unit-norm"},
    {"scaling": "unit-std", "permutation": "outgoing"},
    {"scaling": "min-mass"},
    *({"scaling": s, "mixing": "balanced"} for s in ("unit-norm", "min-mass", None)),
]


def told_apart(form, sym):
    """Whether a form is another one than that without matrices."""
    return bool(sym.linear) or not form.get("mixing")


def one_canonical_form_for_the_whole_orbit(network):
    """Or a refusal in one sentence, and then forms of an orbit differ, at one network at least.

    Of each network every second form is looked at.
    """
    model, x, sym = network.known()
    params = P.of(model)
    before = outputs(model, params, x)
    told = [form for form in FORMS if told_apart(form, sym)]
    for form in told[ORDERED.index(network.name) % 2 :: 2]:
        try:
            canonical_form = canonicalise(params, sym, **form)
        except ValueError as error:
            if "rank-deficient" not in str(error):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(canonical, "check_form", lambda *_: None)
                    assert any(
                        forms_differ(drawn(sym, g), sym, g, form) for g in map(seeded, range(40))
                    )
            continue
        assert not forms_differ(params, sym, seeded(5), form, canonical_form)
        assert close(canonicalise(canonical_form, sym, **form), canonical_form)
        if not network.random:
            assert change(outputs(model, canonical_form, x), before) < 100 * network.tolerance


def drawn(sym, generator):
    """Random weights of a network."""
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return tied({n: draw(shape) for n, shape in sym.shapes.items()} | sym.constants, sym)


def forms_differ(params, sym, generator, form, own=None):
    """Of weights, whose form may be known, and of a network of their orbit."""
    removed = replace(
        sym,
        shifts=(),
        scalings=() if form["scaling"] is None else sym.scalings,
        permutations=() if form.get("permutation", "max") is None else sym.permutations,
    )
    moved = moved_at_random(params, removed, generator, bool(form.get("mixing")))
    return not close(canonicalise(moved, sym, **form), own or canonicalise(params, sym, **form))


def close(first, second):
    return all(torch.allclose(first[n], t, rtol=1e-6, atol=1e-6) for n, t in second.items())


NOISE = 0.05


def noisy(params, sym, generator):
    """Weights with noise, a share of the deviation of their tensor."""

    def near(t):
        return t + NOISE * t.std(correction=0) * torch.randn(t.shape, generator=generator).to(t)

    return {
        n: near(t) if t.is_floating_point() and n not in sym.constants else t
        for n, t in params.items()
    }


MISSED = [NETWORKS["a tensor train"]]
"""Only a part of its groups survives the check."""


def planted_permutations_are_found(network):
    """Or others that are as near: no unit is told from another one by noise."""
    model, _, sym = network.known()
    if not sym.permutations or network in MISSED:
        return
    params = P.of(model)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        near = noisy(params, sym, generator)
        moved = permute(near, sym, random_permutations(sym, generator))
        apart = distance(near, params, sym.compared)
        found = match(moved, params, sym).element(moved)
        assert distance(found, params, sym.compared) <= apart * (1 + 1e-9)
    others = {n: torch.randn_like(t) if P.is_weight(n, t) else t for n, t in params.items()}
    unlike = tied(others | sym.constants, sym)
    other = match(unlike, params, sym)
    assert distance(other.element(unlike), params, sym.compared) > 2 * apart


ALWAYS = (
    all_that_is_known_is_found,
    blocks_inside_blocks_are_listed_from_inside,
    no_element_changes_the_function,
    scales_signs_and_matrices_hold_in_training,
    an_element_of_which_a_tensor_is_left_out_does,
)
COMPUTED = (
    one_fingerprint_for_the_whole_orbit,
    nothing_changes_along_the_tangents_of_the_orbit,
    one_canonical_form_for_the_whole_orbit,
    planted_permutations_are_found,
)
"""Laws of what is computed from symmetries, once these are known to be right."""


@pytest.mark.parametrize("name", map(marked, ORDERED))
def test_all_laws_hold(name):
    for law in ALWAYS if name in REPEATED else ALWAYS + COMPUTED:
        torch.manual_seed(0)
        law(NETWORKS[name])


def kernel_dimension(network, *inputs):
    """Trained weights minus the rank of the Jacobian of the outputs, which must be beyond doubt.

    A direction of weights along which no output moves, at generic weights and inputs, belongs to
    a symmetry.
    """
    weights = [p for p in network.parameters() if p.requires_grad]
    outputs = network(*inputs).flatten()
    touched = torch.autograd.grad(outputs.sum(), weights, retain_graph=True, allow_unused=True)
    weights = [w for w, slope in zip(weights, touched, strict=True) if slope is not None]
    numbers = sum(w.numel() for w in weights)
    assert len(outputs) > 1.2 * numbers
    outputs = outputs[torch.randperm(len(outputs))[: numbers + max(numbers // 4, 40)]]
    basis = torch.eye(len(outputs), dtype=outputs.dtype)
    parts = torch.autograd.grad(outputs, weights, basis, is_grads_batched=True)
    jacobian = torch.cat([part.flatten(1) for part in parts], 1).numpy()
    values = np.linalg.svd(jacobian, compute_uv=False)
    rank = int((values > 1e-10 * values[0]).sum())
    if rank < numbers:
        assert values[rank - 1] > 1e4 * values[rank], "no clear gap in the singular values"
    return numbers - rank


@pytest.mark.parametrize("name", map(marked, COUNTED))
def test_the_kernel_of_the_jacobian_has_as_many_dimensions(name):
    """Nothing of the package takes part in the count."""
    model, x = NETWORKS[name].made()
    assert kernel_dimension(model, *x) == NETWORKS[name].dimension
