"""A forward that remembers earlier calls is refused, unless its state is a buffer."""

import pytest
import torch
from cases import Forward
from torch import nn

from weightsym import (
    UnsupportedModel,
    discover,
    permute,
    random_permutations,
    verify,
)
from weightsym import params as P


class Stateful(nn.Module):
    """A cell that holds its state in an attribute."""

    def __init__(self, state=None):
        super().__init__()
        self.read, self.feed, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.state = state

    def step(self, x, state):
        return torch.tanh(self.read(x) + self.feed(state))

    def forward(self, x):
        self.state = self.step(x, self.state)
        return self.last(self.state)


class Begins(Stateful):
    def forward(self, x):
        if self.state is None:
            self.state = torch.zeros(len(x), 6)
        return super().forward(x)


class InPlace(Stateful):
    def forward(self, x):
        self.state.copy_(self.step(x, self.state))
        return self.last(self.state)


class InList(Stateful):
    def forward(self, x):
        self.state[0] = self.step(x, self.state[0])
        return self.last(self.state[0])


class ZeroAtFirst(Stateful):
    """Its weights do not show the state as long as nobody trains them."""

    def __init__(self, state=None):
        super().__init__(state)
        nn.init.zeros_(self.feed.weight)


class Positions(Stateful):
    """Counts its calls, as a decoder counts tokens."""

    state: int

    def forward(self, x):
        self.state += 1
        return self.last(torch.tanh(self.read(x) + self.feed.weight[self.state]))


class InBuffer(Stateful):
    def __init__(self):
        super().__init__()
        del self.state
        self.register_buffer("state", torch.zeros(2, 6))


STATEFUL = {
    "replaced": lambda: Stateful(torch.zeros(2, 6)),
    "begins with nothing": Begins,
    "in place": lambda: InPlace(torch.zeros(2, 6)),
    "in a list": lambda: InList([torch.zeros(2, 6)]),
    "behind weights of zero": lambda: ZeroAtFirst(torch.zeros(2, 6)),
    "a number": lambda: Positions(0),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("build", STATEFUL.values(), ids=STATEFUL)
def test_state_in_an_attribute_is_refused_by_name(build):
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": build()})
    outer = Forward(lambda s, x: s.parts["cell"](x), parts=model)
    with pytest.raises(UnsupportedModel, match=r"keeps 'parts\.cell\.state' .*register_buffer"):
        discover(outer, torch.randn(2, 5))


def test_state_in_a_buffer_moves_at_every_call():
    torch.manual_seed(0)
    cell, x = InBuffer().double(), torch.randn(3, 2, 5).double()
    sym = discover(cell, x[0])
    assert [g.units for g in sym.permutations] == [6]

    def rollout(self, x):
        return [self.cell(y) for y in x]

    twice = Forward(rollout, cell=cell)
    moved = permute(P.of(cell), sym, random_permutations(sym))
    moved = {f"cell.{name}": t for name, t in moved.items()}
    call = torch.func.functional_call
    torch.testing.assert_close(call(twice, moved, (x,)), twice(x), rtol=1e-9, atol=1e-9)
    assert verify(cell, sym, x[0]) < 1e-12


class Notes(Stateful):
    """Leaves behind what nobody reads again."""

    def forward(self, x):
        self.state = torch.tanh(self.read(x))
        return self.last(self.state)


class Table(Stateful):
    """Computes a table once, as rotary positions do."""

    def forward(self, x):
        if self.state is None:
            self.state = torch.arange(6.0).to(x).cos()
        return self.last(torch.tanh(self.read(x)) * self.state)


@pytest.mark.parametrize("kind", [Notes, Table])
def test_what_changes_no_later_call_is_no_state(kind):
    torch.manual_seed(0)
    assert discover(kind(), torch.randn(2, 5)).sign_dof == 6


def test_a_network_is_left_without_state():
    model = Notes()
    discover(model, torch.randn(2, 5))
    assert model.state is None


def test_state_of_training_makes_what_is_found_one_of_evaluation():
    class InTraining(Stateful):
        def forward(self, x):
            if self.training:
                return super().forward(x)
            return self.last(torch.tanh(self.read(x)))

    sym = discover(InTraining(torch.zeros(2, 6)), torch.randn(2, 5))
    assert "'state' from one call to the next" in sym.evaluation_only


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("returned", "what"),
    [(None, "None"), ("yes", "a str without a tensor"), ([], "a list without a tensor")],
)
def test_a_forward_without_an_output_is_refused(returned, what):
    model = Forward(lambda s, x: (s.layer(x), returned)[1], layer=nn.Linear(5, 2))
    with pytest.raises(UnsupportedModel, match=f"returns {what}, .* return its outputs as tensors"):
        discover(model, torch.randn(2, 5))
