import numpy as np
import pytest
import torch
from checked_symmetries import find, seeded
from known_networks.classics import SMALL

from lightning_bnn import models
from weightsym import (
    discover,
    flip,
    identity,
    mix,
    permute,
    random_mixings,
    random_permutations,
    random_scales,
    random_shifts,
    random_signs,
    rescale,
    shift,
)
from weightsym import params as P

KINDS = {
    "permutations": (permute, random_permutations),
    "scales": (rescale, random_scales),
    "signs": (flip, random_signs),
    "matrices": (mix, random_mixings),
    "shifts": (shift, random_shifts),
}
MIXED = "rotary half", "a stream of root mean squares", "a stream of layer norms", "low rank"
IN_BLOCKS = (
    "experts of one module, top 2", "branches, summed", "packed gates", "squared ReLUs",
    "all products of two channels",
)  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "optunet", "branches, summed", *MIXED[1:3]])
def test_acting_on_a_stack_is_acting_on_every_member(name):
    model, _, sym, _ = find(name)
    stack = P.populate(model, 3)
    for act, draw in KINDS.values():
        own, shared = draw(sym, seeded(1), members=3), draw(sym, seeded(2))
        apart, alike = (P.unstack(act(stack, sym, element)) for element in (own, shared))
        for k, member in enumerate(P.unstack(stack)):
            torch.testing.assert_close(apart[k], act(member, sym, [e[k] for e in own]))
            torch.testing.assert_close(alike[k], act(member, sym, shared))


def by_hand(params, sym, orders, scales):
    """The tables of the result, read element by element as its docstring says."""
    new = {n: t.numpy().copy() for n, t in params.items()}
    for name, axes in sym.axes_of.items():
        for k in axes:
            new[name] = new[name] * factors_of(sym, k, scales)
        for k in axes:
            new[name] = new[name][sources_of(sym, k, orders)]
    for group, order in zip(sym.permutations, orders, strict=True):
        for row in group.tensors:
            new |= dict(zip(row, [new[row[k]] for k in order.tolist()], strict=True))
    return new


def labels_of(sym, k):
    shape = sym.shapes[sym.axes[k].tensor]
    return sym.axes[k].labels(shape).expand(shape).numpy()


def factors_of(sym, k, scales):
    factors = np.ones(sym.axes[k].length)
    for g, place in sym.placements_by_axis("scalings").get(k, ()):
        for unit, positions in enumerate(place.positions.tolist()):
            for position in positions:
                factors[position] *= float(scales[g][unit]) ** place.exponent
    return factors[labels_of(sym, k)]


def sources_of(sym, k, orders):
    axis, index = sym.axes[k], np.arange(sym.axes[k].length)
    for g, place in sym.placements_by_axis("permutations").get(k, ()):
        at = place.positions.numpy()
        index[at] = index[at[orders[g].numpy()]]
    label, shape = labels_of(sym, k), sym.shapes[axis.tensor]
    if axis.dim is None:
        return tuple(np.unravel_index(index[label], shape))
    where = list(np.indices(shape))
    where[axis.dim] = index[label] % axis.size
    return tuple(where)


@pytest.mark.parametrize("name", [*SMALL, *IN_BLOCKS])
def test_actions_are_redone_by_hand(name):
    """Also for grouped convolutions and stacks of experts: for these axes see row blocks."""
    *_, sym, params = find(name)
    g = torch.Generator().manual_seed(1)
    orders, scales = random_permutations(sym, g), random_scales(sym, g)
    expected = by_hand(params, sym, orders, scales)
    moved = permute(rescale(params, sym, scales), sym, orders)
    for n in sym.shapes:
        torch.testing.assert_close(
            moved[n], torch.from_numpy(np.asarray(expected[n])), rtol=1e-6, atol=1e-9
        )


def test_convention_of_permutations_and_scales():
    """Unit k of the new network is unit p[k] of the old one, in times s and out over s."""
    model = models.mlp(4, [3], 2)
    sym, params = discover(model, torch.randn(1, 4)), P.of(model)
    p, s = torch.tensor([2, 0, 1]), torch.tensor([2.0, 4.0, 8.0])
    new = permute(params, sym, [p])
    assert torch.equal(new["1.weight"], params["1.weight"][p])
    assert torch.equal(new["1.bias"], params["1.bias"][p])
    assert torch.equal(new["3.weight"], params["3.weight"][:, p])
    new = rescale(params, sym, [s])
    assert torch.equal(new["1.weight"], params["1.weight"] * s[:, None])
    assert torch.equal(new["1.bias"], params["1.bias"] * s)
    assert torch.equal(new["3.weight"], params["3.weight"] / s)


def test_tensors_that_stay_are_not_copied_and_some_may_be_missing():
    """Standard deviations of weights have no running statistics, and move like the weights."""
    model, _, sym, params = find("resnet")
    order = random_permutations(sym, seeded(1))
    whole = permute(params, sym, order)
    assert whole["fc.bias"] is params["fc.bias"]
    assert whole["fc.weight"] is not params["fc.weight"]
    weights = {n: p.detach() for n, p in model.named_parameters()}
    some = permute(weights, sym, order)
    torch.testing.assert_close(some, {n: whole[n] for n in weights})
    torch.testing.assert_close(permute(params, sym, identity(sym)), params)
