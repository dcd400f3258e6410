"""What dimensional analysis says of networks that it was found hard to read."""

import re

import pytest
import torch
from cases import Forward
from torch import nn

from weightsym import discover, verify
from weightsym.discovery.cache import forget


class Experts(nn.Module):
    """Two stacks of matrices, of which only the second has an axis that counts its matrices."""

    def __init__(self):
        super().__init__()
        self.stem, self.router = nn.Linear(5, 4), nn.Linear(4, 3)
        self.up, self.down = (nn.Parameter(torch.randn(3, *n)) for n in ((6, 4), (4, 6)))

    def forward(self, x):
        x = self.stem(x).tanh()
        hidden = torch.einsum("bi,ehi->beh", x, self.up).relu()
        out = torch.einsum("beh,eoh->beo", hidden, self.down)
        return (out * self.router(x).softmax(-1)[..., None]).sum(1)


def test_rows_of_stacks_move_with_what_lies_inside_them():
    torch.manual_seed(0)
    sym = discover(Experts().double(), torch.randn(8, 5, dtype=torch.float64))
    assert not sym.frozen
    (block,) = (g for g in sym.permutations if g.kind == "block")
    assert (block.units, len(block.inner[0])) == (3, 3)
    rows = {sym.axes[p.axis].tensor for p in block.placements if sym.axes[p.axis].dim == 0}
    assert rows == {"up", "down", "router.weight", "router.bias"}


def sets_network():
    """The largest of every channel over the elements of a set, then gains that differ."""
    return Forward(
        lambda s, x: s.last(s.first(x).amax(1) * s.gains),
        first=nn.Linear(3, 6),
        last=nn.Linear(6, 2),
        gains=nn.Buffer(torch.tensor([[1.0, 1, 2, 2, 2, 3]])),
    )


def sets():
    return sets_network(), (torch.randn(4, 5, 3),)


def test_the_largest_has_scales_and_no_signs_and_gains_tell_channels_apart():
    model, x = sets()
    sym = discover(model.eval(), *x)
    assert sorted(g.units for g in sym.permutations) == [2, 3]
    assert (sym.scaling_dof, sym.sign_dof) == (6, 0)


def test_a_buffer_of_one_dimension_follows_its_channels():
    """As statistics do."""
    model, x = sets()
    model.gains = model.gains[0]
    assert [g.units for g in discover(model, *x).permutations] == [6]


def test_an_operation_without_a_rule_is_measured():
    """The probe sees that tokens are added up."""
    layers = {"first": nn.Linear(3, 6), "last": nn.Linear(6, 2)}
    model = Forward(lambda s, x: s.last(torch.logcumsumexp(s.first(x), 1)), **layers)
    sym = discover(model, torch.randn(2, 5, 3))
    assert [g.units for g in sym.permutations] == [6]
    assert (sym.scaling_dof, sym.sign_dof) == (0, 0)
    assert not sym.frozen


def explained(model, name, capsys):
    discover(model, torch.randn(5, 3), explain=name)
    return capsys.readouterr().out


def test_explain_names_the_operation_that_holds_a_scale(capsys):
    net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)).eval()
    lines = explained(net, "0.weight", capsys).splitlines()
    assert any("axis 0: scales and signs are held: sigmoid in `1`" in line for line in lines)
    assert any("axis 0: units, scales and signs go with 0.bias: add" in line for line in lines)
    relu = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    said = explained(relu, "0.weight", capsys)
    assert "axis 0: signs are held: relu" in said
    assert not re.search(r"axis 0: .*scales [^:]*are held", said)


def test_explain_says_what_only_training_does(capsys):
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(4, 2))
    lines = explained(net, "0.weight", capsys).splitlines()
    (line,) = (line for line in lines if line.endswith("in training"))
    assert "units go with others: native_dropout in `1`" in line
    assert net.training


@pytest.mark.bad_input
def test_explain_refuses_a_tensor_that_is_not_there():
    with pytest.raises(ValueError, match=r"tensor 'wieght', but on \['bias', 'weight'\]"):
        discover(nn.Linear(3, 4), torch.randn(5, 3), explain="wieght")


class Standardised(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1."""

    def forward(self, x):
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / variance.sqrt(), self.bias)


def test_groups_of_wide_standardised_filters_are_exchanged():
    """Such an exchange moves thousands of weights, which have no label of their own."""
    layers = [
        layer
        for width in (3, 32, 32)
        for layer in (Standardised(width, 32, 3), nn.GroupNorm(8, 32), nn.ReLU())
    ]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))
    sym = discover(net, torch.randn(2, 3, 8, 8))
    assert (
        sorted((g.kind, g.units) for g in sym.permutations if g.kind == "block")
        == [("block", 8)] * 3
    )
    assert sum(g.units == 4 for g in sym.permutations) == 3 * 8


def heads():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True).double()


LIMITS = {
    "exchanges._LONGEST_EXCHANGE": (4, "exchanges of more than 2 things were not searched"),
    "exchanges._LARGEST_CELL": (3, "of 4 units that look alike, exchanges of 3 were searched"),
    "shift_expressions._MOST": (20, "make more sums than are followed"),
}


def test_nothing_is_left_out_within_the_limits():
    assert not discover(heads(), torch.randn(2, 5, 8).double()).frozen


@pytest.mark.parametrize("limit", LIMITS)
def test_what_a_limit_leaves_out_is_named(monkeypatch, limit):
    x = torch.randn(2, 5, 8).double()
    number, reason = LIMITS[limit]
    forget()
    monkeypatch.setattr(f"weightsym.dimensions.{limit}", number)
    sym = discover(heads(), x)
    assert any(reason in str(item) for item in sym.frozen), sym.frozen
    assert not verify(heads(), sym, x) > 1e-9
    forget()
