"""What networks do that do not run as plain functions of their weights."""

import logging

import pytest
import torch
from module_cases import Blobs, adam, trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bnn.modules import DeepEnsemble
from weightsym import params as P


class Recomputing(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x):
        h = self.first(x).relu()
        return checkpoint(self.second, h, use_reentrant=self.reentrant)


class Curious(nn.Module):
    """Cannot run under vmap, and says so after it has changed its statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        h = self.drop(self.norm(self.first(x)))
        return self.last(h.relu() if h.sum().item() < 1e9 else h)


@pytest.mark.bad_input
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("members", "chunk_size"), [(1, None), (3, None), (3, 1)])
def test_networks_that_run_again_in_the_backward_pass(reentrant, members, chunk_size):
    """Their weights would be those of the template then; without gradients they are welcome."""
    net = Recomputing(reentrant)
    module = DeepEnsemble(net, members=members, optimizer=adam)
    module.run.chunk_size = chunk_size
    with pytest.raises(ValueError, match="`network` uses torch.utils.checkpoint"):
        trainer().fit(module, Blobs())
    with torch.no_grad():
        assert P.apply(net, P.populate(net, 3), torch.zeros(2, 6)).shape == (3, 2, 3)


@pytest.mark.parametrize("members", [1, 3])
def test_hooks_of_the_user_are_welcome(members):
    net, x = nn.Linear(6, 3), torch.randn(4, 6)
    stack = {n: t.requires_grad_() for n, t in P.populate(net, members).items()}
    plain = torch.autograd.grad(P.apply(net, stack, x).square().sum(), list(stack.values()))
    with torch.autograd.graph.save_on_cpu():
        hooked = P.apply(net, stack, x, chunk_size=1).square().sum()
    for one, two in zip(torch.autograd.grad(hooked, list(stack.values())), plain, strict=True):
        torch.testing.assert_close(one, two)


def test_a_failed_attempt_changes_nothing():
    torch.manual_seed(0)
    net, x = Curious(), torch.randn(20, 6)
    stack = P.populate(net, 3)
    separate = [{n: t.clone() for n, t in one.items()} for one in P.unstack(stack)]
    torch.manual_seed(1)
    found = P.apply(net, stack, x)
    torch.manual_seed(1)
    wanted = torch.stack([torch.func.functional_call(net, one, (x,)) for one in separate])
    assert torch.equal(found, wanted)
    assert stack["norm.num_batches_tracked"].tolist() == [1, 1, 1]
    for k, one in enumerate(separate):
        assert torch.equal(stack["norm.running_mean"][k], one["norm.running_mean"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_gives_what_the_loop_gives(dtype):
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)
    )
    stack, x = P.populate(net, 3), torch.randn(16, 1, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        at_once, looped = (P.apply(net, stack, x, chunk_size=size) for size in (None, 1))
    assert at_once.dtype == looped.dtype == dtype
    torch.testing.assert_close(
        at_once, looped, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0
    )


@pytest.mark.parametrize("normed", [nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_weights_that_nobody_draws_are_named(normed, caplog):
    net = nn.Sequential(normed(nn.Linear(2, 3)), nn.Linear(3, 1))
    with caplog.at_level(logging.WARNING):
        stack = P.populate(net, 4)
    shared = {n for n, t in stack.items() if len(t.unique(dim=0)) == 1 and t[0].numel() > 1}
    told = {n for n in stack if f"{n}" in caplog.text and not n.startswith("1.")}
    assert told == shared - {n for n, _ in net.named_buffers()} != set()
    caplog.clear()
    P.populate(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), 4)
    assert not caplog.text


@pytest.mark.bad_input
def test_weights_that_a_hook_has_computed():
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="`network` holds weights that are computed"):
        DeepEnsemble(net, members=2)
