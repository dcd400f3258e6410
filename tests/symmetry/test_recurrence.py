"""Hidden units of recurrences: cells in loops, projections, and states that are handed on."""

import pytest
import torch
from cases import Forward
from checked_symmetries import exact, units
from torch import nn

torch.manual_seed(0)
X = torch.randn(2, 4, 5).double()
LONGER = torch.randn(3, 7, 5).double()


def counts(sym):
    return sorted(units(sym)), sym.scaling_dof, sym.sign_dof


def in_a_loop(s, x):
    h = c = x.new_zeros(len(x), 6)
    outs = []
    for t in range(x.shape[1]):
        if isinstance(s.cell, nn.LSTMCell):
            h, c = s.cell(x[:, t], (h, c))
        else:
            h = s.cell(x[:, t], h)
        outs.append(h)
    return s.out(torch.stack(outs, 1))


@pytest.mark.parametrize(
    ("cell", "scales", "signs"),
    [
        (nn.GRUCell(5, 6), 0, 6),
        (nn.LSTMCell(5, 6), 0, 6),
        (nn.RNNCell(5, 6), 0, 6),
        (nn.RNNCell(5, 6, nonlinearity="relu"), 6, 0),
        (nn.LSTMCell(5, 6, bias=False), 0, 6),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else None,
)
def test_cells_in_a_loop(cell, scales, signs):
    sym = exact(Forward(in_a_loop, cell=cell, out=nn.Linear(6, 3)), X, others=[(LONGER,)])
    assert counts(sym) == ([(6, "channel")], scales, signs)
    assert not sym.frozen


def test_a_loop_that_starts_without_a_state():
    def forward(s, x):
        h = s.cell(x[:, 0])
        return s.out(s.cell(x[:, 1], h))

    sym = exact(Forward(forward, cell=nn.GRUCell(5, 6), out=nn.Linear(6, 3)), X)
    assert counts(sym) == ([(6, "channel")], 0, 6)


def test_a_state_of_ones_has_a_sign():
    def forward(s, x):
        return s.out(s.cell(x[:, 1], s.cell(x[:, 0], x.new_ones(len(x), 6))))

    sym = exact(Forward(forward, cell=nn.GRUCell(5, 6), out=nn.Linear(6, 3)), X)
    assert counts(sym) == ([(6, "channel")], 0, 0)


def tutorial(s, x):
    """The loop of the tutorials: inputs and state side by side."""
    h = torch.zeros(len(x), 6, dtype=x.dtype)
    for t in range(x.shape[1]):
        both = torch.cat([x[:, t], h], 1)
        h = torch.tanh(s.hidden(both))
    return s.out(both)


def test_the_loop_of_the_tutorials():
    model = Forward(tutorial, hidden=nn.Linear(11, 6), out=nn.Linear(11, 3))
    assert counts(exact(model, X, others=[(LONGER,)])) == ([(6, "channel")], 0, 6)


def test_a_state_that_is_given_and_returned_does_not_move():
    def forward(s, x, h):
        h = torch.tanh(s.hidden(torch.cat([x, h], 1)))
        return s.out(h), h

    model = Forward(forward, hidden=nn.Linear(11, 6), out=nn.Linear(6, 3))
    sym = exact(model, X[:, 0], torch.randn(2, 6).double())
    assert counts(sym) == ([], 0, 0)
    assert {f.module for f in sym.frozen} == {"hidden.weight", "out.weight"}


def sequence(layer, out):
    return Forward(lambda s, x: s.out(s.layer(x)[0]), layer=layer, out=nn.Linear(out, 3))


def test_projections_are_linear_units():
    model = sequence(nn.LSTM(5, 6, proj_size=4, batch_first=True), 4)
    sym = exact(model, X, others=[(LONGER,)])
    assert counts(sym) == ([(4, "channel"), (6, "channel")], 4, 10)
    deep = nn.LSTM(5, 6, 2, proj_size=4, batch_first=True, bidirectional=True, bias=False)
    assert counts(exact(sequence(deep, 8), X))[0] == [(4, "channel")] * 4 + [(6, "channel")] * 4


class LearnedState(nn.Module):
    """An LSTM whose first states are parameters."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)
        self.h, self.c = (nn.Parameter(torch.randn(1, 1, 6)) for _ in range(2))

    def forward(self, x):
        states = [s.expand(-1, len(x), -1).contiguous() for s in (self.h, self.c)]
        return self.out(self.layer(x, tuple(states))[0])


def test_learned_states_move_with_the_units():
    sym = exact(LearnedState(), X, others=[(LONGER,)])
    assert counts(sym) == ([(6, "channel")], 0, 6)
    assert {"h", "c"} <= sym.touched


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_units_that_hand_their_state_on_move_together(kind):
    def forward(s, x):
        return s.out(s.decoder(x, s.encoder(x)[1])[0])

    one, two = (kind(5, 6, 2, batch_first=True) for _ in range(2))
    sym = exact(Forward(forward, encoder=one, decoder=two, out=nn.Linear(6, 3)), X)
    assert counts(sym) == ([(6, "channel")] * 2, 0, 12)  # one for every layer


def test_a_state_computed_from_the_input_moves_and_a_given_one_does_not():
    def computed(s, x):
        return s.out(s.layer(x, torch.tanh(s.first(x[:, 0]))[None])[0])

    layers = {"layer": nn.GRU(5, 6, batch_first=True), "out": nn.Linear(6, 3)}
    sym = exact(Forward(computed, first=nn.Linear(5, 6), **layers), X)
    assert counts(sym) == ([(6, "channel")], 0, 6)
    given = Forward(lambda s, x, h: s.out(s.layer(x, h)[0]), **layers)
    assert counts(exact(given, X, torch.randn(1, 2, 6).double())) == ([], 0, 0)
