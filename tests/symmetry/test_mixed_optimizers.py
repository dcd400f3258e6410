import pytest
import torch
import torch.nn.functional as F
from mixing_networks import known

from weightsym import (
    mix,
    random_mixings,
    random_scales,
    rescale,
    transform_optimizer_state,
)
from weightsym.groups import Symmetries


def rotations(sym: Symmetries, seed=3):
    """The orthogonal part of random matrices of every group."""
    matrices = random_mixings(sym, torch.Generator().manual_seed(seed))
    parts = [torch.linalg.svd(m) for m in matrices]
    return [u @ vh for u, _, vh in parts]


def run(model, optimizer, x, steps):
    target = torch.zeros(x.shape, dtype=torch.int64)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
        optimizer.step()


def act(model, optimizer, sym, matrices, carry=True):
    live = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in mix(live, sym, matrices).items():
            live[name].copy_(value)
    if carry:
        transform_optimizer_state(optimizer, live, sym, matrices=matrices)


def distance(name, build, matrices_of, carry=True):
    """Between train, act, train and train, train, act."""
    model, x, sym, params = known(name)
    ends = []
    start = {n: t.clone() for n, t in params.items()}
    for first, second in ((3, 3), (6, 0)):
        model.load_state_dict(start)
        optimizer = build(model.parameters())
        run(model, optimizer, x, first)
        act(model, optimizer, sym, matrices_of(sym), carry)
        run(model, optimizer, x, second)
        ends.append({n: p.detach().clone() for n, p in model.named_parameters()})
    model.load_state_dict(start)
    return max(float((ends[0][n] - ends[1][n]).abs().max()) for n in ends[0])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


@pytest.mark.parametrize("name", ["stream", "rotary", "heads"])
def test_momentum_commutes_with_rotations(name):
    assert distance(name, sgd, rotations) < 1e-12
    assert distance(name, sgd, rotations, carry=False) > 1e-4


def test_adam_and_other_matrices_do_not_commute():
    assert distance("stream", lambda p: torch.optim.Adam(p, lr=1e-2), rotations) > 1e-3
    assert distance("heads", sgd, random_mixings) > 1e-3


def test_gradients_move_by_the_inverse_transpose():
    """After one step the momentum is the gradient, which autograd finds at the new weights."""
    model, x, sym, params = known("heads")
    start = {n: t.clone() for n, t in params.items()}
    matrices = random_mixings(sym, torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    run(model, optimizer, x, 1)
    act(model, optimizer, sym, matrices)
    run(model, torch.optim.SGD(model.parameters(), lr=0.0), x, 1)
    for p in model.parameters():
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], p.grad)
    model.load_state_dict(start)


def test_second_moments_stay_positive_and_follow_permutations():
    model, x, sym, params = known("heads")
    start = {n: t.clone() for n, t in params.items()}
    optimizer = torch.optim.Adam(model.parameters())
    run(model, optimizer, x, 2)
    order = torch.tensor([2, 0, 3, 1])
    matrices = [torch.eye(g.size)[order].expand(g.spaces, -1, -1) for g in sym.linear]
    live = dict(model.named_parameters())
    before = optimizer.state[live["layers.0.q.weight"]]["exp_avg_sq"].clone()
    transform_optimizer_state(optimizer, live, sym, matrices=matrices)
    after = optimizer.state[live["layers.0.q.weight"]]["exp_avg_sq"]
    torch.testing.assert_close(after, before.unflatten(0, (2, 4))[:, order].flatten(0, 1))
    transform_optimizer_state(optimizer, live, sym, matrices=random_mixings(sym))
    assert (optimizer.state[live["layers.0.q.weight"]]["exp_avg_sq"] >= 0).all()
    model.load_state_dict(start)


def trained(build, steps=3):
    model, x, sym, params = known("heads")
    start = {n: t.clone() for n, t in params.items()}
    optimizer = build(model.parameters())
    run(model, optimizer, x, steps)
    model.load_state_dict(start)
    return optimizer, dict(model.named_parameters()), sym, start


@pytest.mark.parametrize(
    ("build", "key"), [(torch.optim.Adamax, "exp_inf"), (torch.optim.Rprop, "step_size")]
)
def test_sizes_stay_positive(build, key):
    """A step is divided by the largest gradient, and steps have lengths: neither has a sign."""
    optimizer, live, sym, _ = trained(build)
    transform_optimizer_state(optimizer, live, sym, matrices=random_mixings(sym))
    signs = [-torch.ones(g.units) for g in sym.signs]
    transform_optimizer_state(optimizer, live, sym, signs=signs)
    assert all((optimizer.state[p][key] >= 0).all() for p in live.values())


def test_averages_of_weights_move_as_weights():
    optimizer, live, sym, start = trained(torch.optim.ASGD)
    for name, p in live.items():
        optimizer.state[p]["ax"] = start[name].clone()
    matrices = random_mixings(sym)
    transform_optimizer_state(optimizer, live, sym, matrices=matrices)
    expected = mix(start, sym, matrices)
    for name, p in live.items():
        torch.testing.assert_close(optimizer.state[p]["ax"], expected[name])
    scales = random_scales(sym)
    transform_optimizer_state(optimizer, live, sym, scales=scales)
    expected = rescale(expected, sym, scales)
    for name, p in live.items():
        torch.testing.assert_close(optimizer.state[p]["ax"], expected[name])


@pytest.mark.bad_input
def test_states_that_cannot_be_carried_are_refused():
    model, x, sym, _ = known("heads")
    live = dict(model.named_parameters())
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.state[next(iter(live.values()))]["old_dirs"] = [torch.zeros(3)]
    with pytest.raises(ValueError, match="'old_dirs' of LBFGS has not the shape of a parameter"):
        transform_optimizer_state(optimizer, live, sym, matrices=random_mixings(sym))
    members = len(next(iter(live.values())))
    with pytest.raises(ValueError, match=r"`matrices\[0\]` must have shape"):
        transform_optimizer_state(
            sgd(model.parameters()), live, sym, matrices=random_mixings(sym, None, members)
        )
