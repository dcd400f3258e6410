"""Chunks on several threads give what one thread gives, or are not made."""

import pytest
import torch
from torch import nn

from lightning_bnn.methods import Batch
from lightning_bnn.methods.run import member_losses
from weightsym import params as P
from weightsym.networks import prediction
from weightsym.networks.threads import in_threads, threads_for


def network(dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(),
        nn.Linear(2 * 36, 3),
    )  # fmt: skip


def gradients(model, x, members=5):
    stack = P.populate(model, members, torch.Generator().manual_seed(0))
    leaves = [stack[n].requires_grad_() for n in P.weight_names(model)]
    losses = member_losses(model, stack, Batch((x,), x), lambda z, _: z.square().mean((-1, -2)), ())
    return [losses, *torch.autograd.grad(losses.sum(), leaves), stack["1.running_mean"]]


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(prediction, "fitting_chunk", lambda *_: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_threads_are_one(two_threads):
    torch.manual_seed(0)
    model, x = network().double(), torch.randn(20, 1, 8, 8).double()
    assert threads_for(model, x.device) == 1  # whether it draws is not known yet
    first = gradients(model, x)
    assert threads_for(model, x.device) == 2
    for one, two in zip(first, gradients(model, x), strict=True):
        torch.testing.assert_close(one, two)
    assert torch.get_num_threads() == 2


def test_networks_that_draw_run_on_one_thread(two_threads):
    torch.manual_seed(0)
    model, x = network(0.5), torch.randn(20, 1, 8, 8)
    gradients(model, x)
    assert threads_for(model, x.device) == 1


class Keeping(nn.Module):
    """Keeps an activation, which cannot be copied while it belongs to ``vmap``."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x):
        self.seen = self.network(x)
        return self.seen


def test_networks_that_cannot_be_copied_run_on_one_thread(two_threads):
    model, x = Keeping(), torch.randn(20, 1, 8, 8)
    stack = P.populate(model, 4)
    leaves = [stack[n].requires_grad_() for n in P.weight_names(model)]
    for _ in range(3):
        losses = member_losses(
            model, stack, Batch((x,), x), lambda z, _: z.square().mean((-1, -2)), ()
        )
        grads = torch.autograd.grad(losses.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert threads_for(model, x.device) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_that_are_scaled_reach_the_gradients(dtype, two_threads):
    """Gradients that are taken early do not know of the scale, and would vanish in float16."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(20, 4)
    stack = P.populate(model, 4)
    leaves = [stack[n].requires_grad_() for n in P.weight_names(model)]
    with torch.autocast("cpu", dtype):
        losses = member_losses(
            model, stack, Batch((x,), x), lambda z, _: 1e-7 * z.float().square().mean((-1, -2))
        )
    grads = torch.autograd.grad((2.0**16 * losses).sum(), leaves)
    assert all(g.abs().max() > 0 for g in grads)


def test_what_goes_wrong_in_a_thread_is_raised_here(two_threads):
    def work(model, item):
        if item == 1:
            raise ValueError("it went wrong")
        return item

    with pytest.raises(ValueError, match="it went wrong"):
        in_threads(work, range(4), nn.Linear(1, 1), 2)
    assert torch.get_num_threads() == 2
    assert in_threads(work, [0, 2, 3], nn.Linear(1, 1), 2) == [0, 2, 3]


def test_gradients_and_mixed_precision_are_as_outside():
    def work(model, item):
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    for grad in (False, True):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=not grad):
            assert in_threads(work, range(3), nn.Linear(1, 1), 2) == [(grad, not grad)] * 3
