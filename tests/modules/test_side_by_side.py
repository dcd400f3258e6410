"""Members are trained beside each other: limits, chunks, optimizers, starts."""

import lightning as L
import pytest
import torch
from module_cases import Blobs, made, network, trainer
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.methods import Batch
from lightning_bnn.methods.run import member_losses
from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.modules.optimization import check_elementwise, clip_members
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

    class Largest(L.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            self.seen = [float(g.abs().max()) for g in grads]

    module = DeepEnsemble(
        network(width=4), members=2, likelihood=Gaussian("learned", targets=3), optimizer=SGD
    )
    x, look = torch.randn(20, 6), Largest()
    loader = DataLoader(TensorDataset(x, 100 * torch.randn(20, 3)), batch_size=10)
    trainer(look, max_epochs=1, gradient_clip_val=1e-3, gradient_clip_algorithm="value").fit(
        module, loader
    )
    assert look.seen == pytest.approx([1e-3] * len(look.seen))


@pytest.mark.parametrize("own", [False, True], ids=["shared examples", "own examples"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("batch_norm", [False, True])
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


class Saved:
    """Counts the numbers that are held for the backward pass, now and at most."""

    def __init__(self):
        self.now = self.most = 0

    def pack(self, tensor):
        self.now += tensor.numel()
        self.most = max(self.most, self.now)
        return Held(self, tensor)


class Held:
    def __init__(self, counter, tensor):
        self.counter, self.tensor = counter, tensor

    def __del__(self):
        self.counter.now -= self.tensor.numel()


def most_saved(net, members, chunk_size):
    stack = P.populate(net, members)
    for n in P.weight_names(net):
        stack[n].requires_grad_()
    counter, x = Saved(), torch.randn(500, 6)
    with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda held: held.tensor):
        examples = Batch((x,), x)
        losses = member_losses(
            net, stack, examples, lambda z, _: z.square().mean((-1, -2)), (), chunk_size
        )
    losses.sum().backward()
    return counter.most


def test_one_by_one_holds_the_activations_of_one_member():
    net = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))
    one, all_at_once = most_saved(net, 4, 1), most_saved(net, 4, 4)
    assert one < 1.2 * most_saved(net, 1, 1)
    assert all_at_once > 3 * one


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop,
        torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta,
    ],
)  # fmt: skip
def test_elementwise_optimizers_are_accepted(kind):
    check_elementwise(lambda p: kind(p, lr=1e-2))


class NormScaled(torch.optim.SGD):
    """A step whose length depends on the whole tensor, as that of LARS and LAMB."""

    def step(self, closure=None):
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad * p.norm() / p.grad.norm()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "kind",
    [torch.optim.LBFGS, torch.optim.Adafactor, NormScaled]
    + ([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []),
)
def test_optimizers_that_mix_members_are_refused(kind):
    module = made("ensemble")
    module.make_optimizer = lambda p: kind(p, lr=1e-2)
    with pytest.raises(ValueError, match="cannot train members side by side"):
        trainer().fit(module, Blobs())
    if kind is not torch.optim.LBFGS:
        single = DeepEnsemble(network(), members=1, optimizer=lambda p: NormScaled(p, 1e-2))
        trainer(max_epochs=1).fit(single, Blobs())


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


class Steps(L.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        self.lr = trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("interval", "expected"), [("epoch", 0.03 * 0.5**2), ("step", 0.03 * 0.5**12)]
)
def test_schedulers(interval, expected):
    halves = lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)  # noqa: E731
    module, seen = made("ensemble", lr_scheduler=halves, lr_interval=interval), Steps()
    trainer(seen).fit(module, Blobs())
    assert seen.lr == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scheduler", "interval"),
    [
        (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9), "step"),
        (lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), "epoch"),
        (
            lambda o: torch.optim.lr_scheduler.SequentialLR(
                o,
                [
                    torch.optim.lr_scheduler.ConstantLR(o, 1.0, 1),
                    torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
                ],
                [1],
            ),
            "step",
        ),
    ],
    ids=["one cycle", "exponential", "one after the other"],
)
def test_schedulers_step_as_torch_means_them_to(scheduler, interval):
    module = DeepEnsemble(nn.Linear(2, 3), lr_scheduler=scheduler)
    assert module.configure_optimizers()["lr_scheduler"]["interval"] == interval
