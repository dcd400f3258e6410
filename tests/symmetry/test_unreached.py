"""Parameters that the example does not reach are named."""

import pytest
import torch
from cases import Forward
from torch import nn

from weightsym import discover, verify


def by_task(self, x, task="a"):
    return self.heads[task](torch.relu(self.first(x)))


def norm_by_task(self, x, task="a"):
    return self.last(torch.relu(self.norms[task](self.first(x))))


def with_condition(self, x, cond=None):
    h = self.first(x)
    return self.last(torch.relu(h if cond is None else h + self.cond(cond)))


class Optional(Forward):
    def forward(self, *x, **named):
        return self.function(self, *x, **named)


def heads():
    parts = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 2)})
    return Optional(by_task, first=nn.Linear(5, 6), heads=parts)


def norms(affine=True):
    parts = nn.ModuleDict({k: nn.BatchNorm1d(6, affine=affine) for k in "ab"})
    return Optional(norm_by_task, first=nn.Linear(5, 6), norms=parts, last=nn.Linear(6, 2))


def conditional():
    layers = {"first": nn.Linear(5, 6), "cond": nn.Linear(4, 6), "last": nn.Linear(6, 2)}
    return Optional(with_condition, **layers)


STATISTICS = ["norms.b.running_mean", "norms.b.running_var"]
UNREACHED = {
    "heads": (heads, ["heads.b.weight", "heads.b.bias"]),
    "norms": (norms, ["norms.b.weight", "norms.b.bias", *STATISTICS]),
    "norms without gains": (lambda: norms(affine=False), STATISTICS),
    "condition": (conditional, ["cond.weight", "cond.bias"]),
}


@pytest.mark.parametrize(("build", "names"), UNREACHED.values(), ids=UNREACHED)
def test_what_the_example_does_not_reach_is_named(build, names, caplog):
    torch.manual_seed(0)
    sym = discover(build(), torch.randn(4, 5))
    assert f"no output depends on {', '.join(names)} at this example" in sym.unchecked
    assert "not everything was checked" in caplog.text


def test_what_is_named_may_be_wrong_and_a_wrapper_of_all_tasks_is_not():
    torch.manual_seed(0)
    net, x = heads().double().eval(), torch.randn(4, 5).double()
    sym = discover(net, x)
    assert verify(net, sym, x) < 1e-12
    assert verify(net, sym, x, task="b") > 1e-3
    both = Forward(lambda s, x: [s.net(x, task) for task in "ab"], net=net)
    sym = discover(both, x)
    assert not sym.unchecked
    assert verify(both, sym, x) < 1e-12


def test_the_condition_that_is_given_is_reached():
    assert not discover(conditional(), torch.randn(4, 5), cond=torch.randn(4, 4)).unchecked


def test_what_only_training_reads_is_reached():
    def forward(self, x):
        h = torch.relu(self.first(x))
        return (self.last(h), self.aux(h)) if self.training else self.last(h)

    layers = {"first": nn.Linear(5, 6), "aux": nn.Linear(6, 3), "last": nn.Linear(6, 2)}
    assert not discover(Forward(forward, **layers), torch.randn(4, 5)).unchecked
