"""Members are trained beside each other: limits, chunks, optimizers, starts."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from module_cases import Blobs, fitted, made, network, trainer
from processes import on_devices
from torch import nn
from torch.func import functional_call
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn._compat import sharding
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.methods import Batch
from lightning_bnn.methods.run import member_losses
from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.modules.fitting import check_elementwise, clip_members
from weightsym import params as P

SGD = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-2)  # noqa: E731


def test_clipping_all_members_together_would_be_something_else():
    """Negative control of the law for members and separate runs."""
    torch.manual_seed(0)
    stacks = [nn.Parameter(torch.zeros(2, 3)) for _ in range(2)]
    for p in stacks:
        p.grad = torch.tensor([[1.0], [100.0]]).expand(2, 3).clone()
    clip_members(stacks, 1.0)
    norms = torch.stack([p.grad.norm(dim=1) for p in stacks]).norm(dim=0)
    torch.testing.assert_close(norms, torch.ones(2))
    assert stacks[0].grad[0, 0] > 0.4
    for p in stacks:
        p.grad = torch.tensor([[1.0], [100.0]]).expand(2, 3).clone()
    torch.nn.utils.clip_grad_norm_(stacks, 1.0)
    assert stacks[0].grad[0, 0] < 0.01
    clip_members([nn.Parameter(torch.zeros(2, 3))], 1.0)  # no gradient: nothing


def test_clipping_by_value():
    """What members share, too: every number by itself."""
    seen = []

    def look(trainer, module, optimizer):
        seen.extend(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)

    likelihood = Gaussian("learned", targets=3)
    module = DeepEnsemble(network(width=4), members=2, likelihood=likelihood, optimizer=SGD)
    loader = DataLoader(TensorDataset(torch.randn(20, 6), 100 * torch.randn(20, 3)), batch_size=10)
    options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    fitted(module, loader, LambdaCallback(on_before_zero_grad=look), max_epochs=1, **options)
    assert seen[-9:] == pytest.approx([1e-3] * len(seen[-9:]))
    assert set(map(bool, seen)) == {True}


@pytest.mark.parametrize("own", [False, True], ids=["shared examples", "own examples"])
@pytest.mark.parametrize(
    ("batch_norm", "chunk", "shared"), [(False, 1, True), (True, 1, False), (True, 2, True)]
)
def test_chunks_have_the_gradient_of_all_at_once(batch_norm, chunk, shared, own):
    torch.manual_seed(0)
    net = network(batch_norm=batch_norm).double()
    scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64), requires_grad=shared)
    rows = (3, 9) if own else (9,)
    x, y = torch.randn(*rows, 6).double(), torch.randint(3, rows)
    weight = torch.tensor([1.0, -2.0, 0.5]).double()

    def loss(z, targets):
        picked = (scale * z).log_softmax(-1).gather(-1, targets.expand(z.shape[:-1])[..., None])
        return -picked[..., 0].mean(-1)

    def gradients(chunk_size):
        stack = P.populate(net, 3, torch.Generator().manual_seed(1))
        leaves = {n: stack[n].requires_grad_() for n in P.weight_names(net)}
        losses = member_losses(net, stack, Batch((x,), y, own), loss, [scale], chunk_size)
        wanted = [*leaves.values(), scale] if shared else list(leaves.values())
        return losses, torch.autograd.grad((weight * losses).sum(), wanted), stack

    (a, b, s), (c, d, t) = gradients(3), gradients(chunk)
    by_hand = [
        loss(functional_call(net, m, (x[k] if own else x,)), y[k] if own else y)
        for k, m in enumerate(P.unstack(P.populate(net, 3, torch.Generator().manual_seed(1))))
    ]
    torch.testing.assert_close(a, torch.stack(by_hand))
    torch.testing.assert_close(a, c)
    for one, other in zip(b, d, strict=True):
        torch.testing.assert_close(one, other)
    for name in s:
        torch.testing.assert_close(s[name], t[name])


class Held:
    """A tensor that is held for the backward pass."""

    def __init__(self, tensor):
        self.tensor = tensor


def most_saved(net, members, chunk_size):
    """How many numbers are held for the backward pass at most."""
    stack, held, most = P.populate(net, members), weakref.WeakSet(), [0]
    for n in P.weight_names(net):
        stack[n].requires_grad_()

    def pack(tensor):
        held.add(box := Held(tensor))
        most.append(sum(each.tensor.numel() for each in held))
        return box

    x = torch.randn(500, 6)
    loss = lambda z, _: z.square().mean((-1, -2))  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        losses = member_losses(net, stack, Batch((x,), x), loss, (), chunk_size)
    losses.sum().backward()
    return max(most)


def test_one_by_one_holds_the_activations_of_one_member():
    net = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))
    one, all_at_once = most_saved(net, 4, 1), most_saved(net, 4, 4)
    assert one < 1.2 * most_saved(net, 1, 1)
    assert all_at_once > 3 * one


@pytest.mark.parametrize("kind", "SGD Adam AdamW RMSprop Adagrad NAdam RAdam Adadelta".split())
def test_elementwise_optimizers_are_accepted(kind):
    check_elementwise(lambda p: getattr(torch.optim, kind)(p, lr=1e-2))


def test_the_first_member_starts_at_the_given_weights_and_the_others_do_not():
    torch.manual_seed(0)
    net = network()
    stack = DeepEnsemble(net, members=3, seed=1).member_stack()
    for name, tensor in P.of(net).items():
        assert torch.equal(stack[name][0], tensor)
        assert not torch.equal(stack[name][1], stack[name][2])
    torch.manual_seed(5)
    again = DeepEnsemble(net, members=3, seed=1).member_stack()
    other = DeepEnsemble(net, members=3, seed=2).member_stack()
    assert torch.equal(again["0.weight"], stack["0.weight"])
    assert not torch.equal(other["0.weight"][1], stack["0.weight"][1])


def halves(optimizer):
    return schedules.ExponentialLR(optimizer, 0.5)


def one_cycle(optimizer):
    return schedules.OneCycleLR(optimizer, 0.1, total_steps=9)


def one_after_the_other(optimizer):
    first = schedules.ConstantLR(optimizer, 1.0, 1)
    return schedules.SequentialLR(optimizer, [first, one_cycle(optimizer)], [1])


@pytest.mark.parametrize(("interval", "times"), [("epoch", 2), ("step", 12)])
def test_schedulers(interval, times):
    rates = []
    see = lambda t, *_: rates.append(t.optimizers[0].param_groups[0]["lr"])  # noqa: E731
    module = made("ensemble", lr_scheduler=halves, lr_interval=interval)
    fitted(module, None, LambdaCallback(on_train_batch_end=see, on_train_end=see))
    assert rates[-1] == pytest.approx(0.03 * 0.5**times)


@pytest.mark.parametrize(
    ("scheduler", "interval"),
    [(one_cycle, "step"), (halves, "epoch"), (one_after_the_other, "step")],
)
def test_schedulers_step_as_torch_means_them_to(scheduler, interval):
    module = DeepEnsemble(nn.Linear(2, 3), lr_scheduler=scheduler)
    assert module.configure_optimizers()["lr_scheduler"]["interval"] == interval


# ------------------------------------------------------------ pieces of weights
class DeepSpeedStrategy(SingleDeviceStrategy):
    """Has the name of the one whose package is not there."""


SHARDING = [
    ("FSDP", lambda: object.__new__(FSDPStrategy)),
    ("FSDP2", ModelParallelStrategy),
    ("DeepSpeed", lambda: DeepSpeedStrategy("cpu")),
    (None, DDPStrategy),
    (None, lambda: SingleDeviceStrategy("cpu")),
]


@pytest.mark.parametrize(("name", "strategy"), SHARDING)
def test_what_cuts_weights_into_pieces_has_a_name(name, strategy):
    assert sharding(SimpleNamespace(strategy=strategy())) == name


def refused(method):
    """What a module says to a strategy of pieces, in each of its stages."""
    cut = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    fitted, module = trainer(strategy=cut, devices=2), made(method)
    for stage in (fitted.fit, fitted.test, fitted.predict):
        with pytest.raises(ValueError, match="not supported under FSDP2, .* use `strategy='ddp'`"):
            stage(module, Blobs())
    return True


@pytest.mark.e2e
def test_our_modules_refuse_pieces_in_one_sentence():
    """Whatever they do with whole networks, they would do with a piece of each."""
    assert on_devices(2, refused, "mfvi") == [True, True]
