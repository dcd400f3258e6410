import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from known_networks import NETWORKS
from torch import nn

from lightning_bnn import models
from weightsym import (
    discover,
    flip,
    identity,
    permute,
    random_permutations,
    random_scales,
    random_signs,
    rescale,
    shift_logits,
    transform_optimizer_state,
)
from weightsym import params as P
from weightsym.actions import permute_some

SMALL = CASES[:10]
KINDS = {
    "permutations": (permute, random_permutations),
    "scales": (rescale, random_scales),
    "signs": (flip, random_signs),
}


def ids(case):
    return getattr(case, "name", "branches")


@pytest.mark.parametrize("case", [*SMALL, NETWORKS["branches, summed"]], ids=ids)
@pytest.mark.parametrize("kind", KINDS)
def test_acting_on_a_stack_is_acting_on_every_member(case, kind):
    act, draw = KINDS[kind]
    model, x, sym = case.known()
    stack = P.populate(model, 3)
    element = draw(sym, torch.Generator().manual_seed(1), members=3)
    together = P.unstack(act(stack, sym, element))
    for k, member in enumerate(P.unstack(stack)):
        alone = act(member, sym, [e[k] for e in element])
        assert all(torch.equal(alone[n], together[k][n]) for n in alone)
    shared = draw(sym, torch.Generator().manual_seed(2))
    together = P.unstack(act(stack, sym, shared))
    for k, member in enumerate(P.unstack(stack)):
        alone = act(member, sym, shared)
        assert all(torch.equal(alone[n], together[k][n]) for n in alone)


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


IN_BLOCKS = "experts of one module, top 2", "branches, summed", "packed gates", "squared ReLUs"


@pytest.mark.parametrize("case", [*SMALL, *map(NETWORKS.get, IN_BLOCKS)])
def test_actions_are_redone_by_hand(case):
    """Also for grouped convolutions and stacks of experts: for these axes see row blocks."""
    model, _, sym = case.known()
    params = {n: t.detach() for n, t in P.of(model).items()}
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


def test_untouched_tensors_are_not_copied():
    model = models.mlp(4, [3], 2)
    sym, params = discover(model, torch.randn(1, 4)), P.of(model)
    new = permute(params, sym, random_permutations(sym))
    assert new["3.bias"] is params["3.bias"]
    assert params["1.weight"] is not new["1.weight"]


def test_identity_moves_nothing():
    model, x = SMALL[3].make()
    sym, params = discover(model, x), P.of(model)
    new = permute(params, sym, identity(sym))
    assert all(torch.equal(new[n], t) for n, t in params.items())


# ------------------------------------------------------------ optimizers
def run(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def act_on_run(model, optimizer, sym, permutations, signs):
    live = dict(model.named_parameters())
    new = permute(flip(P.of(model), sym, signs), sym, permutations)
    transform_optimizer_state(optimizer, live, sym, signs=signs)
    transform_optimizer_state(optimizer, live, sym, permutations=permutations)
    model.load_state_dict(new)


def conv_net():
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 16, 3))


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
        (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5}),
    ],
)
def test_training_commutes_with_permutations_and_signs(optimizer_class, options):
    """P1, Proposition 3: train k steps, act, train k steps = train 2k steps, act."""
    x, y = torch.randn(2, 16, 1, 8, 8).double(), torch.randint(3, (2, 16))
    batches = list(zip(x, y, strict=True)) * 3
    one, two = conv_net().double(), conv_net().double()
    two.load_state_dict(one.state_dict())
    sym = discover(one, x[0])
    permutations, signs = random_permutations(sym), random_signs(sym)
    assert sym.sign_dof > 0
    optimizers = [optimizer_class(m.parameters(), **options) for m in (one, two)]
    run(one, optimizers[0], batches)
    act_on_run(one, optimizers[0], sym, permutations, signs)
    run(one, optimizers[0], batches)
    run(two, optimizers[1], batches * 2)
    before = {n: t.clone() for n, t in P.of(two).items()}
    act_on_run(two, optimizers[1], sym, permutations, signs)
    for n, value in P.of(two).items():
        torch.testing.assert_close(P.of(one)[n], value, rtol=1e-7, atol=1e-9)
    assert any(not torch.equal(before[n], t) for n, t in P.of(two).items())


def test_forgetting_the_optimizer_breaks_the_law():
    x, y = torch.randn(16, 6).double(), torch.randint(3, (16,))
    one, two = models.mlp(6, [5], 3).double(), models.mlp(6, [5], 3).double()
    two.load_state_dict(one.state_dict())
    sym = discover(one, x)
    p = [torch.tensor([1, 2, 3, 4, 0])]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, two)]
    run(one, optimizers[0], [(x, y)] * 3)
    one.load_state_dict(permute(P.of(one), sym, p))
    run(one, optimizers[0], [(x, y)] * 3)
    run(two, optimizers[1], [(x, y)] * 6)
    assert (permute(P.of(two), sym, p)["1.weight"] - P.of(one)["1.weight"]).abs().max() > 1e-4


def test_scales_carry_the_optimizer_covariantly():
    """Gradients scale inversely: so do momenta, and second moments with the square."""
    model, x = models.mlp(6, [5], 3).double(), torch.randn(16, 6).double()
    y = torch.randint(3, (16,))
    sym, params = discover(model, x), P.of(model)
    scales = random_scales(sym)
    live = dict(model.named_parameters())
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.0, 0.0))
    run(model, optimizer, [(x, y)])
    before = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in live.items()}
    transform_optimizer_state(optimizer, live, sym, scales=scales)
    ratio = rescale({n: torch.ones_like(p) for n, p in live.items()}, sym, scales)
    for n, p in live.items():
        torch.testing.assert_close(
            optimizer.state[p]["exp_avg"], (before[n]["exp_avg"] / ratio[n]).detach()
        )
        torch.testing.assert_close(
            optimizer.state[p]["exp_avg_sq"], (before[n]["exp_avg_sq"] / ratio[n] ** 2).detach()
        )
    assert params


# ------------------------------------------------------------ softmax shift, errors
def test_shift_of_logits():
    model, x = models.mlp(6, [5], 3).double(), torch.randn(4, 6).double()
    sym, params = discover(model, x), P.of(model)
    new = shift_logits(params, sym, torch.randn(5), torch.tensor(2.0))
    old_out, new_out = (P.apply(model, p, x) for p in (params, new))
    assert (old_out - new_out).abs().max() > 0.1
    torch.testing.assert_close(new_out.log_softmax(1), old_out.log_softmax(1))


@pytest.mark.bad_input
def test_errors():
    model = models.mlp(6, [5, 4], 3)
    sym, params = discover(model, torch.randn(1, 6)), P.of(model)
    with pytest.raises(ValueError, match="`permutations` must hold one tensor per group: 2, got 1"):
        permute(params, sym, [torch.arange(5)])
    with pytest.raises(
        ValueError, match=r"`scales\[1\]` must have shape \(4,\) \(3.weight\), got shape \(5,\)"
    ):
        rescale(params, sym, [torch.ones(5), torch.ones(5)])
    stack = P.populate(model, 3)
    with pytest.raises(ValueError, match=r"for each of 3 members, got shape \(2, 5\)"):
        permute(stack, sym, random_permutations(sym, members=2))
    branches, _, groups = NETWORKS["branches, summed"].known()
    some = {"e.0.0.weight": P.of(branches)["e.0.0.weight"]}
    with pytest.raises(ValueError, match=r"must hold 'e.1.0.weight'"):
        permute_some(some, groups, random_permutations(groups))
    plain = discover(nn.Sequential(model, nn.Tanh()), torch.randn(1, 6))
    with pytest.raises(ValueError, match="does not end in a layer"):
        shift_logits(params, plain, torch.zeros(4))


def test_a_part_without_statistics_is_acted_on_too():
    """Standard deviations of weights have no running statistics, and move like the weights."""
    model = conv_net()
    sym = discover(model, torch.randn(1, 1, 8, 8))
    weights = {n: p.detach() for n, p in model.named_parameters()}
    p = random_permutations(sym)
    whole = permute(P.of(model), sym, p)
    assert all(torch.equal(t, whole[n]) for n, t in permute(weights, sym, p).items())
