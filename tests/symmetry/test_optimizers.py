"""State of optimizers moves with weights, so that training goes on as it would have."""

import copy

import pytest
import torch
import torch.nn.functional as F
from checked_symmetries import find, seeded
from torch import nn
from torch.optim import ASGD, SGD, Adam, Adamax, AdamW, RMSprop, Rprop

from weightsym import (
    Element,
    discover,
    random_mixings,
    random_permutations,
    random_scales,
    random_signs,
    transform_optimizer_state,
)


def units(sym):
    """A random order of all units, and random signs."""
    return {
        "signs": random_signs(sym, seeded(1)),
        "permutations": random_permutations(sym, seeded(1)),
    }


def rotations(sym):
    """The orthogonal part of random matrices of every group."""
    parts = [torch.linalg.svd(m) for m in random_mixings(sym, seeded(3))]
    return {"matrices": [u @ vh for u, _, vh in parts]}


def matrices(sym):
    return {"matrices": random_mixings(sym, seeded(3))}


def scales(sym):
    return {"scales": random_scales(sym, seeded(3))}


def setup(name):
    if name != "convolutions":
        model, x, sym, _ = find(name)
        return copy.deepcopy(model), x, sym
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 6, 3, groups=2)
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)).double()
    x = torch.randn(16, 1, 8, 8).double()
    return model, x, discover(model, x)


def run(model, optimizer, x, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(x).flatten(0, -2)
        F.cross_entropy(y, torch.arange(len(y)) % y.shape[1]).backward()
        optimizer.step()


def act(model, optimizer, sym, element, carry=True):
    element = Element.of_groups(sym, **element)
    if carry:
        transform_optimizer_state(optimizer, dict(model.named_parameters()), element)
    model.load_state_dict(element(model.state_dict()))


def distance(name, build, element, carry=True):
    """Between train, act, train and train, train, act."""
    ends = []
    for first, second in ((3, 3), (6, 0)):
        model, x, sym = setup(name)
        optimizer = build(model.parameters())
        run(model, optimizer, x, first)
        act(model, optimizer, sym, element(sym), carry)
        run(model, optimizer, x, second)
        ends.append(model.state_dict())
    return max(float((ends[0][n] - ends[1][n]).abs().max()) for n in ends[0])


def sgd(parameters):
    return SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


COMMUTING = {
    "SGD": ("convolutions", sgd, units),
    "Adam": ("convolutions", lambda p: Adam(p, 1e-2, amsgrad=True), units),
    "AdamW": ("convolutions", lambda p: AdamW(p, 1e-2), units),
    "RMSprop": ("convolutions", lambda p: RMSprop(p, 1e-2, momentum=0.5), units),
    **{f"SGD of {name}": (name, sgd, rotations) for name in ("stream", "rotary heads", "heads")},
}


@pytest.mark.parametrize("name", COMMUTING)
def test_training_commutes_with_elements(name):
    """P1, Proposition 3: not so if the state of the optimizer is forgotten."""
    assert distance(*COMMUTING[name]) < 1e-9
    assert distance(*COMMUTING[name], carry=False) > 1e-5


def test_adam_and_other_matrices_do_not_commute():
    assert distance("stream", lambda p: Adam(p, lr=1e-2), rotations) > 1e-3
    assert distance("heads", sgd, matrices) > 1e-3


@pytest.mark.parametrize(
    ("build", "element"),
    [
        (lambda p: SGD(p, lr=0.0, momentum=0.9), matrices),
        (lambda p: SGD(p, lr=0.0, momentum=0.9), scales),
        (lambda p: Adam(p, lr=0.0, betas=(0.0, 0.0)), scales),
    ],
)
def test_state_is_that_which_the_moved_network_has(build, element):
    """Gradients move by the inverse transpose, as autograd finds; second moments by squares."""
    model, x, sym = setup("heads")
    moved, fresh = (build(model.parameters()) for _ in range(2))
    run(model, moved, x, 1)
    act(model, moved, sym, element(sym))
    run(model, fresh, x, 1)
    for p in model.parameters():
        torch.testing.assert_close(moved.state[p], fresh.state[p])


@pytest.mark.parametrize(
    ("build", "key"), [(Adam, "exp_avg_sq"), (Adamax, "exp_inf"), (Rprop, "step_size")]
)
def test_sizes_stay_positive_and_follow_permutations(build, key):
    """Squares, the largest gradient that divides a step, and lengths of steps have no sign."""
    model, x, sym = setup("heads")
    optimizer = build(model.parameters())
    run(model, optimizer, x, 3)
    query, order = model.layers[0]["q"].weight, torch.tensor([2, 0, 3, 1])
    before = optimizer.state[query][key].clone()
    orders = [torch.eye(g.size)[order].expand(g.spaces, -1, -1) for g in sym.linear]
    act(model, optimizer, sym, {"matrices": orders})
    after = optimizer.state[query][key]
    torch.testing.assert_close(after, before.unflatten(0, (2, 4))[:, order].flatten(0, 1))
    act(model, optimizer, sym, {"signs": [-torch.ones(g.units) for g in sym.signs]})
    act(model, optimizer, sym, matrices(sym))
    assert all((optimizer.state[p][key] >= 0).all() for p in model.parameters())


def test_averages_of_weights_move_as_weights():
    model, x, sym = setup("heads")
    optimizer = ASGD(model.parameters())
    run(model, optimizer, x, 1)
    for p in model.parameters():
        optimizer.state[p]["ax"] = p.detach().clone()
    for element in (matrices, scales):
        act(model, optimizer, sym, element(sym))
        for p in model.parameters():
            torch.testing.assert_close(optimizer.state[p]["ax"], p.detach())
