"""Chains of stages against a loop over the networks of a stack, one by one."""

import copy
import logging
import math
import multiprocessing
import random

import pytest
import torch
from cases import Forward
from chain_networks import EXAMPLES, both, chain, chain_of, error, looped, made
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from lightning_bnn import models
from weightsym import params as P
from weightsym_fast import machine_code

TOLERANCE = 1e-14
"""Relative to the largest number of a tensor; 1.2e-15 was the most in 136 random networks."""


class Words(nn.Module):
    """Layers by other names than those of modules."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3, padding="same", groups=2), nn.Linear(4, 3)

    def forward(self, pixels):
        h = F.conv2d(pixels, self.one.weight, self.one.bias, padding=1, groups=2)
        h = F.max_pool2d(input=h, kernel_size=2)
        h = torch.relu_(h)
        return self.two(h.mean((2, 3)))


NETWORKS = {
    "strided": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 3, (2, 1), (2, 1), (1, 2), groups=2), nn.LeakyReLU(0.1), nn.AvgPool2d(2)
    ),
    "overlapping": lambda: nn.Sequential(
        nn.Conv2d(2, 3, (2, 4), padding="same"), nn.Tanh(), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(60, 2, bias=False), nn.GELU(),
    ),
    "large maxima": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 2, padding="same"), nn.MaxPool2d((5, 7), (2, 3))
    ),
    "large means": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 2, padding="same"), nn.LeakyReLU(0.1), nn.AvgPool2d((5, 7), (2, 3))
    ),
    "words": Words,
}  # fmt: skip
UNSUITABLE = {
    "add_ takes more": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)),
    "over the edge": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2, padding=1)),
    "different sizes": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(2)),
    "takes more than": lambda: added(),
    "empty_like": lambda: nn.Sequential(nn.Flatten(), nn.Linear(198, 2), nn.Dropout(0.5)),
    "_weight_norm": lambda: nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(198, 2))
    ),
    "known layers": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Softmax(1)),
}


def added():
    return Forward(lambda s, x: x + s.one(x), one=nn.Conv2d(2, 2, 3, padding=1))


@pytest.mark.parametrize(("own", "room"), [(False, 512), (True, 512), (True, 2048)])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_stack_is_a_loop_over_its_networks(name, own, room, monkeypatch):
    """On processors with few registers and with many."""
    monkeypatch.setattr(machine_code, "register_bytes", lambda: room)
    model, stack, x = made(NETWORKS[name](), own)
    assert chain_of(model, stack, (x,), own) is not None
    for ours, theirs in both(model, stack, x, own):
        assert error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize(
    "seed", [k if k < 12 else pytest.param(k, marks=pytest.mark.slow) for k in range(200)]
)
def test_random_networks(seed):
    """Every network has code of its own, which takes long to compile."""
    dice = random.Random(seed)
    (network, shape), own = chain(dice), bool(seed % 2)
    model, stack, x = made(network, own, examples=dice.randint(4, 20), shape=shape)
    assert chain_of(model, stack, (x,), own) is not None
    for ours, theirs in both(model, stack, x, own):
        if theirs is not None:
            assert error(ours, theirs) < 10 * TOLERANCE


def test_members_wrongly_stacked_are_seen():
    """The comparison is no formality: another member's weights give other outputs."""
    model, stack, x = made(NETWORKS["words"]())
    turned = {n: t.roll(1, 0) for n, t in stack.items()}
    assert error(P.apply(model, turned, x), looped(model, stack, x, False)) > 0.01


# ------------------------------------------------------------ what is not a number
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["one.weight", "one.bias", "two.weight", "inputs"])
def test_what_is_not_a_number_goes_where_it_goes_in_torch(name, value):
    """Members that have diverged must be seen.

    Every place is in a window: what no window reaches has no gradient here, NaN in torch (0 x NaN).
    """
    model, stack, x = made(NETWORKS["words"](), shape=(2, 8, 10))
    with torch.no_grad():
        place = (0, 1, 3, 4) if name == "inputs" else (1, *(0,) * (stack[name].ndim - 1))
        (x if name == "inputs" else stack[name])[place] = value
    for ours, theirs in both(model, stack, x):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)
        broken = ~theirs.isfinite()
        assert torch.equal(ours[broken].isnan(), theirs[broken].isnan())


# ------------------------------------------------------------ precision, threads
PARTS = [("torch.get_num_threads", lambda: 2), ("weightsym_fast.running.AT_ONCE", 1)]


@pytest.mark.parametrize(("name", "number"), PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_a_stack_are_the_whole_bit_for_bit(name, number, dtype, monkeypatch):
    """On two threads, and where members run one at a time without gradients."""
    model, stack, x = made(NETWORKS["words"](), dtype=dtype)
    alone = both(model, stack, x)
    for ours, theirs in alone:
        assert error(ours, theirs) < (2e-6 if dtype == torch.float32 else TOLERANCE)
    monkeypatch.setattr(name, number)
    for (one, _), (two, _) in zip(alone, both(model, stack, x), strict=True):
        assert torch.equal(one, two)
    with torch.no_grad():
        assert torch.equal(P.apply(model, stack, x), alone[0][0])


def _in_another_process(queue):
    model, stack, x = made(NETWORKS["words"]())
    queue.put(P.apply(model, stack, x).sum().item())


def test_a_forked_process_goes_on():
    model, stack, x = made(NETWORKS["words"]())
    here = P.apply(model, stack, x).sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_in_another_process, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == here
    process.join()


# ------------------------------------------------------------ what is not run as a chain
@pytest.mark.parametrize("reason", UNSUITABLE)
def test_other_networks_run_by_torch_and_say_why(reason, caplog):
    model, stack, x = made(UNSUITABLE[reason]())
    with caplog.at_level(logging.INFO, "weightsym.params"):
        for _ in range(2):
            assert chain_of(model, stack, (x,)) is None
    told = [r.message for r in caplog.records if "machine code" in r.message]
    assert len(told) == 1
    assert reason in told[0]
    if reason not in ("empty_like", "add_ takes more", "_weight_norm"):
        torch.testing.assert_close(P.apply(model, stack, x), looped(model, stack, x, False))


def test_hooks_are_called():
    model, stack, x = made(NETWORKS["words"]())
    assert chain_of(model, stack, (x,)) is not None
    seen = []
    handle = model.one.register_forward_hook(lambda *a: seen.append(a[2].shape))
    model.one.forward(x)
    P.apply(model, stack, x)
    handle.remove()
    model.two.register_forward_hook(lambda m, a, out: 2 * out)
    torch.testing.assert_close(P.apply(model, stack, x), looped(model, stack, x, False))


def test_transforms_of_functions_see_the_network():
    model, stack, x = made(models.mlp(5, [4], 2), shape=(5,))
    stack = {n: t.detach() for n, t in stack.items()}
    found = torch.func.jacrev(lambda s: P.apply(model, s, x.detach()).sum((1, 2)))(stack)
    leaves = [stack["1.weight"].requires_grad_()]
    wanted = torch.autograd.grad(looped(model, stack, x.detach(), False)[1].sum(), leaves)[0]
    torch.testing.assert_close(found["1.weight"][1], wanted)
    x, slope = x.detach(), torch.ones_like(x)
    with forward_ad.dual_level():  # forward derivatives, of which machine code knows nothing
        runs = P.apply(model, stack, dual := forward_ad.make_dual(x, slope)), model(dual)
        assert all(forward_ad.unpack_dual(out).tangent is not None for out in runs)


def test_weights_changed_before_the_backward_pass_are_refused():
    model, stack, x = made(models.mlp(5, [4], 2), shape=(5,))
    outputs = P.apply(model, stack, x).sum()
    with torch.no_grad():
        stack["1.weight"] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.backward()


def test_copies_know_what_is_known(caplog):
    model, stack, x = made(NETWORKS["words"]())
    assert chain_of(copy.deepcopy(model), stack, (x,)) == chain_of(model, stack, (x,))


def test_without_llvmlite_a_stack_runs_too(monkeypatch, caplog):
    model, stack, x = made(NETWORKS["words"]())
    with_code = P.apply(model, stack, x)
    monkeypatch.setitem(__import__("sys").modules, "llvmlite.binding", None)
    machine_code.has_compiler.cache_clear()
    machine_code._compiler.cache_clear()
    with caplog.at_level(logging.WARNING, "weightsym.params"):
        without = P.apply(model, stack, x)
        P.apply(model, stack, x)
    machine_code.has_compiler.cache_clear()
    torch.testing.assert_close(with_code, without)
    assert not caplog.records


@pytest.mark.bad_input
def test_inputs_that_do_not_fit_are_refused_as_torch_does():
    model, stack, x = made(NETWORKS["words"]())
    with pytest.raises(RuntimeError, match="to have 2 channels"):
        P.apply(model, stack, torch.zeros(EXAMPLES, 3, 9, 11, dtype=torch.float64))
