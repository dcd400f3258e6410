"""What one run of a network does not show, and stacks that run as chains must keep all the same."""

import functools
import logging
import random
import types

import numpy as np
import pytest
import torch
from chain_networks import both, chain_of, error, looped, made
from processes import result
from torch import nn
from torch.nn import functional as F

from lightning_bnn import models
from weightsym import params as P
from weightsym_fast import machine_code, outputs

TOLERANCE = 1e-14


class Layers(nn.Module):
    """Two layers, and whatever a test puts between them."""

    def __init__(self, forward=None, **attributes):
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 3)
        for name, value in attributes.items():
            setattr(self, name, value)
        self._compute = forward

    def forward(self, x):
        return self._compute(self, x)


def is_a_loop(model, stack, x, own=False):
    """Outputs and gradients are those of a loop, also where there are none."""
    run = P.apply_each if own else P.apply
    leaves = [x, *stack.values()]
    sums = [out.square().sum() for out in (run(model, stack, x), looped(model, stack, x, own))]
    for one, other in zip(
        *(torch.autograd.grad(s, leaves, allow_unused=True) for s in sums), strict=True
    ):
        assert (one is None) == (other is None)
        assert one is None or error(one, other) < TOLERANCE


# ------------------------------------------------------------ how gradients are defined
class Through(torch.autograd.Function):
    """A rectifier that lets all gradients through."""

    @staticmethod
    def forward(x):
        return x.relu()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g


def frozen_features(net, x):
    with torch.no_grad():
        h = torch.relu(net.one(x))
    return net.two(h)


DEFINED = {
    "no_grad": frozen_features,
    "detached weights": lambda net, x: net.two(F.linear(x, net.one.weight.detach())),
    "detached once": lambda net, x: net.two(net.one(F.linear(x, net.one.weight.detach()))),
    "detached inputs": lambda net, x: net.two(torch.relu(net.one(x.detach()))),
    "detached outputs": lambda net, x: net.two(net.one(x).detach()),
    "straight through": lambda net, x: net.two(Through.apply(net.one(x))),
}


@pytest.mark.filterwarnings("ignore:.*There is a performance drop.*")
@pytest.mark.parametrize("name", DEFINED)
def test_gradients_as_the_network_defines_them(name):
    model, stack, x = made(Layers(DEFINED[name]), shape=(5,))
    if name == "straight through":  # `vmap` refuses it; members run one by one
        Through.generate_vmap_rule = True
    assert chain_of(model, stack, (x,)) is None
    is_a_loop(model, stack, x)


def twice(net, x):
    return net.two(torch.tanh(net.one(torch.tanh(net.one(x)))))


def test_weights_that_are_used_twice():
    model, stack, x = made(Layers(twice), shape=(5,))
    assert chain_of(model, stack, (x,)) is not None
    is_a_loop(model, stack, x)
    leaves = [stack["one.weight"], stack["one.bias"], x]

    def derivatives(outputs):
        first = torch.autograd.grad(outputs.square().sum(), leaves, create_graph=True)
        return first + torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    ours, theirs = derivatives(P.apply(model, stack, x)), derivatives(looped(model, stack, x, 0))
    assert all(error(one, other) < TOLERANCE for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(36, 1), nn.ReLU()],
        lambda: [nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 1, 3), nn.AdaptiveAvgPool2d(1)],
    ],
    ids=["rectifier", "mean"],
)
def test_gradients_that_others_use_stay_as_they_are(layers):
    """A batch of one number each, of as many examples as a block has, is laid out as in torch."""
    model, stack, x = made(nn.Sequential(*layers()), examples=16, shape=(36,))
    outputs = P.apply(model, stack, x)
    given = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    kept = given.clone()
    torch.autograd.grad(outputs, [x], given, retain_graph=True)
    assert torch.equal(given, kept)
    sums = [(run(x) + run(2 * x)).square().sum() for run in (
        lambda x: P.apply(model, stack, x), lambda x: looped(model, stack, x, False))]  # fmt: skip
    assert error(*(torch.autograd.grad(s, [x])[0] for s in sums)) < TOLERANCE


def test_inputs_and_outputs_may_be_changed_in_place():
    model, stack, x = made(nn.Sequential(nn.Linear(5, 1), nn.ReLU()), examples=16, shape=(5,))
    (wanted,) = torch.autograd.grad(looped(model, stack, x, False).sub(9).sum(), [x])
    (found,) = torch.autograd.grad(P.apply(model, stack, x).sub_(9).sum(), [x])
    assert error(found, wanted) < TOLERANCE
    model, stack, x = made(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 3)), shape=(5,))
    assert chain_of(model, stack, (x.detach().clone(),)) is None


def test_many_gradients_at_once():
    model, stack, x = made(models.mlp(5, [4], 2), shape=(5,))
    many = torch.randn(4, 3, 11, 2, dtype=x.dtype)
    ours, theirs = (
        torch.autograd.grad(out, [x, stack["1.weight"]], many, is_grads_batched=True)
        for out in (P.apply(model, stack, x), looped(model, stack, x, False))
    )
    assert all(error(one, other) < TOLERANCE for one, other in zip(ours, theirs, strict=True))


# ------------------------------------------------------------ what changes between calls
def slope_of(find):
    return lambda net, x: F.leaky_relu(net.two(x), find(net))


CHANGES = {
    "number": (slope_of(lambda n: n.slope), {"slope": 0.1}, lambda n: setattr(n, "slope", 0.5)),
    "dict": (slope_of(lambda n: n.slopes["a"]), {"slopes": {"a": 0.1}},
             lambda n: n.slopes.update(a=0.5)),
    "list": (slope_of(lambda n: n.slopes[0][1]), {"slopes": [(0, 0.1)]},
             lambda n: n.slopes.__setitem__(0, (0, 0.5))),
    "namespace": (slope_of(lambda n: n.config.net.slope),
                  {"config": types.SimpleNamespace(net=types.SimpleNamespace(slope=0.1))},
                  lambda n: setattr(n.config.net, "slope", 0.5)),
    "partial": (lambda n, x: n.act(n.two(x)), {"act": functools.partial(F.leaky_relu)},
                lambda n: setattr(n, "act", functools.partial(F.leaky_relu, negative_slope=0.5))),
    "module": (lambda n, x: n.acts[0](n.two(x)), {"acts": [nn.LeakyReLU(0.1)]},
               lambda n: setattr(n.acts[0], "negative_slope", 0.5)),
    "forward": (lambda n, x: n.two(x), {},
                lambda n: setattr(n, "forward", types.MethodType(lambda s, x: s.one(x), n))),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_that_change_are_seen(name):
    forward, attributes, change = CHANGES[name]
    model, stack, x = made(Layers(forward, **attributes), shape=(5,))
    before = P.apply(model, stack, x)
    assert chain_of(model, stack, (x,)) is not None
    change(model)
    after = P.apply(model, stack, x)
    assert error(after, looped(model, stack, x, False)) < TOLERANCE
    assert after.shape != before.shape or error(after, before) > 0.01


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["Python", "numpy"])
def test_networks_with_random_numbers_that_are_not_of_torch(draw, caplog):
    stochastic = Layers(lambda net, x: net.two(net.one(x) if draw() < 0.5 else x))
    model, stack, x = made(stochastic, shape=(5,))
    generator = {random.random: random.getstate}.get(draw, np.random.get_state)  # noqa: NPY002
    before = repr(generator())
    with caplog.at_level(logging.INFO, "weightsym.params"):
        assert chain_of(model, stack, (x,)) is None
    assert "random numbers" in caplog.text
    assert repr(generator()) == before


def test_networks_that_never_stay_the_same_are_given_up(caplog):
    def counting(net, x):
        net.calls += 1
        return net.two(x)

    model, stack, x = made(Layers(counting, calls=0), shape=(5,))
    with caplog.at_level(logging.INFO, "weightsym.params"):
        for _ in range(outputs.MOST_SETTINGS):
            assert chain_of(model, stack, (x,)) is not None
        assert chain_of(model, stack, (x,)) is None
        calls = model.calls
        assert chain_of(model, stack, (x,)) is None
    assert model.calls == calls
    assert caplog.text.count("attributes") == 1
    is_a_loop(model, stack, x)


# ------------------------------------------------------------ how tensors come
@pytest.mark.parametrize("inference", [True, False], ids=["all tensors", "the call"])
def test_inference_mode_is_no_obstacle(inference):
    with torch.inference_mode(inference):
        model, stack, x = made(models.mlp(5, [4], 2), shape=(5,))
    with torch.inference_mode():
        assert chain_of(model, stack, (x,)) is not None
        assert error(P.apply(model, stack, x), looped(model, stack, x, False)) < TOLERANCE
    if not inference:
        is_a_loop(model, stack, x)


def test_tensors_with_a_negative_bit():
    model, stack, x = made(models.mlp(5, [4], 2), shape=(5,))
    stack["1.weight"] = torch._neg_view(stack["1.weight"].detach()).requires_grad_()
    for ours, theirs in both(model, stack, x):
        assert error(ours, theirs) < TOLERANCE


@pytest.mark.bad_input
@pytest.mark.parametrize("run", [P.apply, P.apply_each])
def test_tensors_of_different_numbers_of_networks(run):
    model, stack, x = made(models.mlp(5, [4], 2), shape=(5,))
    assert chain_of(model, stack, (x,)) is not None
    x = x.detach() if run is P.apply else x.detach().expand(3, *x.shape)
    stack["1.bias"] = stack["1.bias"][:2]
    with pytest.raises(ValueError, match="not a stack|is incompatible|inconsistent sizes"):
        run(model, stack, x)


REASONS = {
    "fewer than 4 examples": (torch.float64, 3, False),
    "double precision": (torch.bfloat16, 16, False),
    "mixed precision": (torch.float32, 16, True),
}


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_that_lie_in_a_call_are_told(reason, caplog):
    dtype, examples, mixed = REASONS[reason]
    model, stack, x = made(models.mlp(5, [4], 2), dtype=dtype, examples=examples, shape=(5,))
    with caplog.at_level(logging.INFO, "weightsym.params"), torch.autocast("cpu", enabled=mixed):
        for _ in range(2):
            P.apply(model, stack, x)
    assert caplog.text.count(reason) == 1


# ------------------------------------------------------------ code that is given up
def _with_few_functions():
    machine_code._compiled = functools.lru_cache(2)(machine_code._compiled.__wrapped__)
    for width in range(1, 5):
        model, stack, x = made(nn.Sequential(nn.Linear(3, width)), shape=(3,))
        for ours, theirs in both(model, stack, x):
            assert error(ours, theirs) < TOLERANCE
    return machine_code._compiled.cache_info().misses


@pytest.mark.e2e
def test_compiled_functions_outlive_those_that_are_forgotten():
    """In a process of its own, since memory that was freed ends a process."""
    assert result(_with_few_functions) > 8
