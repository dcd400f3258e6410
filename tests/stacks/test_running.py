"""What networks do that do not run as plain functions of their weights."""

import logging

import pytest
import torch
from module_cases import Blobs, adam, trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_bnn.methods import Batch
from lightning_bnn.methods.run import member_losses
from lightning_bnn.modules import DeepEnsemble
from weightsym import params as P
from weightsym.networks import prediction
from weightsym.networks.threads import in_threads, threads_for


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
    with pytest.raises(ValueError, match="`network` has weights that a hook computes"):
        DeepEnsemble(net, members=2)


# ------------------------------------------------------------ threads
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


# ------------------------------------------------------------ chosen chunks
def named_layers(norm=nn.BatchNorm2d, channels=8):
    return nn.Sequential(nn.Conv2d(1, channels, 3), norm(channels), nn.ReLU(), nn.Flatten())


def chunk(model, examples, pixels=28, members=5):
    x = torch.randn(examples, 1, pixels, pixels)
    return P.chunk_of(model, P.populate(model, members), (x,))


@pytest.mark.parametrize(
    ("model", "examples", "expected"),
    [
        (named_layers(), 64, 1),
        (named_layers(), 16, 5),
        (named_layers(channels=2), 64, 5),
        (named_layers(nn.Identity), 64, 5),
        (named_layers().eval(), 64, 5),
    ],
    ids=["large", "few examples", "few channels", "no norm", "evaluation"],
)
def test_norms_that_give_out_much_run_one_by_one(model, examples, expected):
    with torch.enable_grad():
        assert chunk(model, examples) == expected


def test_the_mode_is_not_remembered_with_the_sizes():
    model = named_layers()
    assert [chunk(model.train(mode), 64) for mode in (True, False, True)] == [1, 5, 1]
