"""Selective state spaces: channels, states and the units of the step size."""

import torch
from checked_symmetries import exact, sizes
from modern_networks import Mamba

X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)).double()


class SharedDecay(Mamba):
    """One row of decays for all channels."""

    def __init__(self):
        super().__init__(inner=7, states=4, rank=3)
        self.log_decay = torch.nn.Parameter(torch.randn(4))


class FixedDecay(Mamba):
    """Decays that are constants, others for every state."""

    def __init__(self):
        super().__init__(inner=7, states=4, rank=3)
        del self.log_decay
        self.register_buffer("log_decay", torch.arange(28.0).reshape(7, 4).double() / 9)


def groups(model):
    torch.manual_seed(0)
    longer = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    sym = exact(model, X, others=[(longer,)])
    assert not sym.frozen
    return sym, sorted(sizes(sym))


def test_channels_states_and_units_of_the_step_are_exchanged():
    sym, units = groups(Mamba(inner=7, states=4, rank=3))
    assert units == [3, 4, 7]
    (states,) = (g for g in sym.permutations if g.units == 4)
    assert {sym.axes[p.axis].tensor for p in states.placements} == {"log_decay", "select.weight"}


def test_states_are_exchanged_where_all_channels_share_them():
    assert groups(SharedDecay())[1] == [3, 4, 7]


def test_constant_decays_hold_their_states_and_channels():
    assert groups(FixedDecay())[1] == [3]
