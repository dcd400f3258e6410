"""Losses by CUDA graphs, on the CPU: what a graph would repeat is computed anew by every replay."""

import copy

import pytest
import torch
from pretended_graphs import Repeated, pretend_a_gpu
from torch import nn

from lightning_bnn import likelihoods, methods, models
from weightsym import params as P
from weightsym_fast import graphs


@pytest.fixture
def replays(monkeypatch):
    """Graphs are made on the CPU, too; the list grows by every losses that come from one."""
    pretend_a_gpu(monkeypatch)
    seen, apply = [], graphs._Replayed.apply
    monkeypatch.setattr(
        graphs._Replayed, "apply", lambda *args: seen.append(1) or apply(*args), raising=False
    )
    return seen


def trained(network, members, steps=8, batch=20, seen=None, **options):
    """The stack after some steps of training, with another batch in each."""
    torch.manual_seed(0)
    device = next(network.parameters()).device
    method, run = methods.DeepEnsemble(), methods.Run(network, **options)
    state = method.init(network, P.populate(network, members))
    optimizer = torch.optim.SGD(state.parameters(), 0.1, momentum=0.9)
    for k in range(steps):
        x = torch.randn(batch - (k == 4), 6).to(device)
        losses = method.losses(state, methods.Batch((x,), x[:, :3].argmax(1)), run)["loss"]
        optimizer.zero_grad()
        (losses * torch.arange(1.0, members + 1, device=device)).sum().backward()
        optimizer.step()
    if seen is not None:
        seen.extend(g for g in run.loss().memory.values() if isinstance(g, graphs._LossGraph))
    return P.ravel(state.stack(), stacked=True)[0]


@pytest.mark.parametrize("members", [1, 5])
def test_training_by_graphs_is_training(replays, members):
    network = models.mlp(6, [8], 3)
    by_graph = trained(network, members)
    assert len(replays) == 5  # neither the first two nor the batch of another size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_AFTER", 100)
        assert torch.allclose(trained(network, members), by_graph, atol=1e-6)
    assert len(replays) == 5


@pytest.mark.e2e
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are of CUDA devices")
def test_training_by_graphs_of_a_card_is_training(monkeypatch):
    network, seen = models.mlp(6, [8], 3).cuda(), []
    by_graph = trained(network, 5, seen=seen)
    assert len(seen) == 1
    monkeypatch.setattr(graphs, "_AFTER", 100)
    assert torch.allclose(trained(network, 5, seen=seen), by_graph, atol=1e-5)
    assert len(seen) == 1


class Own(nn.Sequential):
    """A forward of one's own may do anything."""


class Learned(likelihoods.Categorical):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def log_prob(self, outputs, targets):
        return super().log_prob(self.scale * outputs, targets)


HOOKED = models.mlp(6, [8], 3)
HOOKED[1].register_forward_hook(lambda *_: None)
UNSUITABLE = {
    "buffers": (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), {}),
    "randomness": (nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), {}),
    "a forward of one's own": (Own(nn.Linear(6, 3)), {}),
    "hooks": (HOOKED, {}),
    "members in turn": (models.mlp(6, [8], 3), {"chunk_size": 1}),
    "what members share": (models.mlp(6, [8], 3), {"likelihood": Learned()}),
}


@pytest.mark.parametrize("name", UNSUITABLE)
def test_what_may_compute_something_else_is_not_repeated(replays, name):
    network, options = UNSUITABLE[name]
    trained(network, 3, **options)
    assert not replays


class OtherNumbers(Repeated):
    def replay(self):
        super().replay()
        self.results[0] *= 1.1


class Idle(Repeated):
    """A replay of another stream than that of the operations does nothing."""

    def replay(self):
        pass


class NotRecorded(Repeated):
    is_replayed = False


@pytest.mark.parametrize("kind", [OtherNumbers, Idle, NotRecorded])
def test_a_graph_that_is_not_right_is_not_used(replays, monkeypatch, kind):
    monkeypatch.setattr(graphs, "Recorded", kind)
    trained(models.mlp(6, [8], 3), 3)
    assert not replays


def test_copies_have_no_graphs(replays):
    run = methods.Run(models.mlp(6, [8], 3))
    run.loss().memory["some"] = 2
    assert copy.deepcopy(run).loss().memory == {}


@pytest.mark.e2e
@pytest.mark.skipif(not torch.cuda.is_available(), reason="recordings are CUDA's")
@pytest.mark.parametrize("possible", [True, False])
def test_what_is_recorded_is_what_is_computed(possible):
    """What asks for a number cannot be recorded, and is computed all the same."""
    x = torch.randn(3, 5, device="cuda")

    def compute():
        return [x.square().sum(1), x.exp() * (1.0 if possible else 1 + 0 * x.sum().item())]

    recorded = graphs.Recorded(compute, [x])
    for _ in range(4):
        x.add_(1)
        assert all(map(torch.equal, [t.clone() for t in recorded()], compute()))
    assert (recorded._graph is not None) == possible
    torch.rand(3, device="cuda")  # an attempt leaves the random numbers alone
    if possible:
        x.set_(torch.zeros(3, 5, device="cuda"))  # it is recorded anew
        assert recorded()[0].eq(0).all()
