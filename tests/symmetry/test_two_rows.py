"""A batch is read by two of its rows, if it is certain to be a batch."""

import importlib

import pytest
import torch
from cases import Forward
from known_networks import NETWORKS
from torch import nn

from lightning_bnn import models
from weightsym import discover
from weightsym.discovery.example import two_rows
from weightsym.networks.forward import Inputs


def described(sym):
    """Everything that a group is, tensors as lists."""
    groups = (*sym.permutations, *sym.scalings, *sym.signs, *sym.linear, *sym.shifts)
    places = [[(p.axis, p.exponent, p.positions.tolist()) for p in g.placements] for g in groups]
    names = [(type(g), g.name, getattr(g, "units", 0), getattr(g, "inner", ())) for g in groups]
    rest = sym.axes, sym.frozen, sym.unchecked, sym.softmax_shift, sym.evaluation_only
    return names, places, rest


@pytest.mark.parametrize("name", ["mlp", "tied transformer"])
def test_two_rows_say_what_the_whole_batch_says(name, monkeypatch):
    model, (x,) = NETWORKS[name].made()
    batch = torch.cat([x, x.roll(1, 1), x.flip(1)])
    batch = batch[torch.randperm(len(batch))]
    assert len(batch) > 2
    (pair,) = two_rows(model, Inputs((batch,))).args
    assert torch.equal(pair, batch[:2])
    two = discover(model, batch)
    front = importlib.import_module("weightsym.discovery.discover")
    monkeypatch.setattr(front, "two_rows", lambda _, inputs: inputs)
    assert described(two) == described(discover(model, batch))


def causal(s, x):
    """Attention to what came before, in a sequence without a batch dimension."""
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return s.last(s.attention(x, x, x, attn_mask=future)[0])


def gated(s, x):
    """Rows that meet once a gate is open, which is closed at the beginning."""
    y = s.last(x)
    return y + s.gate * y.mean(0)


def propagate(self, x, neighbours):
    return self.last(torch.relu(neighbours @ self.first(x)))


def masked(self, x, mask):
    scores = x @ x.mT + mask
    return self.last(torch.relu(self.first(scores.softmax(-1) @ x)))


def plain(self, x, *_):
    return self.last(torch.relu(self.first(x)))


def recurrent(self, x):
    return self.last(self.lstm(x)[0])


NO_BATCHES = {
    "a sequence": (recurrent, (5, 8)),
    "a batch behind time": (recurrent, (5, 2, 8)),
    "a causal sequence": (causal, (5, 8)),
    "a closed gate": (gated, (5, 8)),
    "a graph": (propagate, (5, 8), (5, 5)),
    "a square mask": (masked, (5, 5, 8), (5, 5)),
    "two sizes": (plain, (5, 8), (4, 8)),
    "a single number": (plain, (5, 8), ()),
    "two rows": (plain, (2, 8)),
    "statistics": (lambda s, x: plain(s, x / x.norm(dim=0)), (5, 8)),
    "a loss beside it": (lambda s, x: (plain(s, x), x.square().mean()), (5, 8)),
    "a fixed size": (lambda s, x: plain(s, x.reshape(5, 8)), (5, 8)),
}


@pytest.mark.parametrize("name", NO_BATCHES)
def test_what_is_not_certain_to_be_a_batch_stays(name):
    torch.manual_seed(0)
    forward, *shapes = NO_BATCHES[name]
    layers = {"first": nn.Linear(8, 6), "last": nn.Linear(6, 2), "lstm": nn.LSTM(8, 6)}
    if forward in (causal, gated):
        layers = {"last": nn.Linear(8, 2), "attention": nn.MultiheadAttention(8, 2)}
    model = Forward(forward, gate=nn.Parameter(torch.zeros(2)), **layers)
    inputs = Inputs(tuple(torch.randn(shape) for shape in shapes))
    assert two_rows(model.eval(), inputs) is inputs


def test_equal_rows_and_objects_of_their_own_stay():
    model = models.mlp(8, [6], 3).eval()
    equal, object_ = Inputs((torch.ones(5, 8),)), Inputs((torch.randn(5, 8), object()))
    for inputs in (equal, object_):
        assert two_rows(model, inputs) is inputs


def test_inputs_of_all_kinds_are_cut_together():
    attention = NETWORKS["sdpa"].build().eval()
    model = Forward(lambda s, x: s.net(x["signal"] * x["mask"][..., None]), net=attention)
    signal, mask = torch.randn(7, 6, 8), torch.ones(7, 6, dtype=torch.long)
    ((pair,), named) = two_rows(model, Inputs(({"signal": signal, "mask": mask},)))
    assert (pair["signal"].shape, pair["mask"].shape, named) == ((2, 6, 8), (2, 6), {})
    tied = NETWORKS["tied transformer"].build().eval()
    assert two_rows(tied, Inputs((torch.randint(11, (9, 6)),))).args[0].shape == (2, 6)
