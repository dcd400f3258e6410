"""Convolutions and pooling of a stack against a loop over its networks, one by one."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from lightning_bnn import params as P
from lightning_bnn.stacks import convolution, runs_at_once

EXAMPLES, MEMBERS = 17, 3


class Squeezed(nn.Module):
    """Pooling windows that overlap, and a branch that is added."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding="same", groups=4)
        self.pool = nn.MaxPool2d(3, stride=2)

    def forward(self, x):
        h = self.pool(torch.tanh(self.a(x)))
        return (h + self.b(h)).flatten(1)


NETWORKS = {
    "plain": lambda: nn.Conv2d(2, 3, 3),
    "five wide": lambda: nn.Conv2d(2, 3, (1, 5)),
    "no bias": lambda: nn.Conv2d(2, 3, (2, 4), bias=False),
    "stride": lambda: nn.Conv2d(2, 3, 3, stride=(2, 3)),
    "padding": lambda: nn.Conv2d(2, 3, 3, padding=(2, 1)),
    "same, even": lambda: nn.Conv2d(2, 3, (4, 2), padding="same"),
    "dilation": lambda: nn.Conv2d(2, 3, (2, 3), dilation=(3, 2)),
    "groups": lambda: nn.Conv2d(2, 6, 3, groups=2, stride=2, padding=1, dilation=2),
    "reflected": lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    "pooled": lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.MaxPool2d(3)),
    "pooled, gaps": lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d((2, 1), (3, 2))),
    "pooled, padded": lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2, padding=1)),
    "pooled, overlapping": Squeezed,
    "normalised": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)
    ),
}


def made(name, dtype=torch.float64):
    torch.manual_seed(0)
    model = NETWORKS[name]().to(dtype)
    generator = torch.Generator().manual_seed(1)
    stack = P.populate(model, MEMBERS, generator)
    x = torch.randn(EXAMPLES, 2, 9, 11, generator=generator, dtype=dtype)
    return model, stack, x


def gradients(outputs, stack, names):
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    return torch.autograd.grad((outputs * weights).sum(), [stack[n] for n in names])


def both(model, stack, x, own=False):
    """Outputs and gradients of our kernels, and of a loop."""
    names = [n for n, _ in model.named_parameters()]
    found = []
    for together in (True, False):
        mine = {n: t.clone().requires_grad_(n in names) for n, t in stack.items()}
        if together:
            run = P.apply_each if own else P.apply
            outputs = run(copy.deepcopy(model), mine, *(x,), chunk_size=MEMBERS)
        else:
            rows = [
                functional_call(model, {n: t[m] for n, t in mine.items()}, (x[m] if own else x,))
                for m in range(MEMBERS)
            ]
            outputs = torch.stack(rows)
        found.append((outputs, *gradients(outputs, mine, names)))
    return found


@pytest.mark.parametrize("own", [False, True], ids=["shared inputs", "own inputs"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_stack_is_a_loop_over_its_networks(name, own, monkeypatch):
    calls = []
    taken = convolution._over_members
    monkeypatch.setattr(
        convolution, "_over_members", lambda *a: (calls.append(a[0].__name__), taken(*a))
    )
    model, stack, x = made(name)
    x = torch.stack([x, 2 * x, -x]) if own else x
    for ours, theirs in zip(*both(model, stack, x, own), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert {"convolve", "weight_gradient"} <= set(calls)  # and not by grouped convolutions


def test_statistics_of_normalisation_are_those_of_every_member():
    model, stack, x = made("normalised")
    mine = {n: t.clone() for n, t in stack.items()}
    P.apply(model, mine, x, chunk_size=MEMBERS)
    for m, member in enumerate(P.unstack({n: t.clone() for n, t in stack.items()})):
        functional_call(model, member, (x,))
        torch.testing.assert_close(mine["1.running_var"][m], member["1.running_var"])
    assert not torch.equal(mine["1.running_var"][0], mine["1.running_var"][1])


def test_threads_share_the_members(monkeypatch):
    model, stack, x = made("groups")
    alone = P.apply(model, stack, x, chunk_size=MEMBERS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(P.apply(model, stack, x, chunk_size=MEMBERS), alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_member_stays_broken_and_alone(value):
    model, stack, x = made("pooled")
    whole = P.apply(model, stack, x, chunk_size=MEMBERS)
    stack["0.weight"][1] = value
    outputs = P.apply(model, stack, x, chunk_size=MEMBERS)
    assert not outputs[1].isfinite().any()
    assert torch.equal(outputs[[0, 2]], whole[[0, 2]])


def test_the_first_of_equal_values_gets_the_gradient():
    model = nn.Sequential(nn.Conv2d(2, 1, 1), nn.MaxPool2d(2)).double()
    stack = P.populate(model, MEMBERS, torch.Generator().manual_seed(0))
    x = torch.zeros(EXAMPLES, 2, 4, 4, dtype=torch.float64)
    x[:, 1, 1, 1] = 1
    for ours, theirs in zip(*both(model, stack, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_kernel_larger_than_its_input_is_refused_as_torch_does():
    model, stack, x = made("plain")
    with pytest.raises(RuntimeError, match="[Kk]ernel size"):
        P.apply(model, stack, x[:, :, :2], chunk_size=MEMBERS)


@pytest.mark.parametrize(("layer", "channels"), [(nn.Conv2d(3, 8, 3), 1), (nn.Conv2d(1, 8, 3), 2),
                                                 (nn.Conv2d(2, 4, 3), 4)])  # fmt: skip
def test_channels_that_do_not_fit_are_refused(layer, channels):
    stack, x = P.populate(layer, MEMBERS), torch.randn(EXAMPLES, channels, 6, 6)
    with pytest.raises(RuntimeError, match="expected"):
        P.apply(layer, stack, x, chunk_size=MEMBERS)


class Words(nn.Module):
    """Layers called by keyword, and one with a kernel that is no parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.blur = torch.ones(2, 1, 2, 2)

    def forward(self, x):
        x = F.max_pool2d(F.conv2d(x, self.blur.to(x), groups=2), 2)
        x = F.conv2d(input=x, weight=self.conv.weight, bias=self.conv.bias)
        return F.max_pool2d(input=x, kernel_size=2)


def test_layers_by_keyword_and_constant_kernels():
    model = Words().double()
    stack = P.populate(model, MEMBERS, torch.Generator().manual_seed(0))
    x = torch.randn(EXAMPLES, 2, 9, 11, dtype=torch.float64)
    for ours, theirs in zip(*both(model, stack, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert runs_at_once(model)
    shared = x.clone().requires_grad_()  # its gradient goes through layers without members
    P.apply(model, stack, shared, chunk_size=MEMBERS).sum().backward()
    found = shared.grad
    shared.grad = None
    P.apply(model, stack, shared, chunk_size=1).sum().backward()
    torch.testing.assert_close(found, shared.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_precisions(dtype):
    model, stack, x = made("pooled", dtype)
    outputs = P.apply(model, stack, x, chunk_size=MEMBERS)
    exact = P.apply(
        copy.deepcopy(model).double(), {n: t.double() for n, t in stack.items()}, x.double(),
        chunk_size=MEMBERS,
    )  # fmt: skip
    assert outputs.dtype == dtype
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(outputs.double(), exact, rtol=tolerance, atol=tolerance)


def test_without_numba_a_stack_runs_too_and_says_so(monkeypatch, caplog):
    model, stack, x = made("pooled")
    with_kernels = P.apply(model, stack, x, chunk_size=MEMBERS)
    monkeypatch.setitem(__import__("sys").modules, "lightning_bnn.stacks.kernels", None)
    convolution.has_kernels.cache_clear()
    with caplog.at_level(logging.WARNING, "lightning_bnn.params"):
        without = P.apply(model, stack, x, chunk_size=MEMBERS)
    convolution.has_kernels.cache_clear()
    torch.testing.assert_close(with_kernels, without)
    assert "numba" in caplog.text
