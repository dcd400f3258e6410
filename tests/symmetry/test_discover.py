import copy
import io
import math
import re

import lightning as L
import pytest
import torch
import torchvision
from cases import Forward
from known_networks import NETWORKS, Network
from torch import nn

from lightning_bnn import models
from weightsym import discover, verify
from weightsym.discovery.cache import forget

lin = nn.Linear
RESNET = NETWORKS["resnet"]


LARGE = {  # inputs, groups of permutations, scales, signs
    "resnet18": ((2, 3, 48, 48), 12, 2880, 4800),
    "convnext_tiny": ((1, 3, 32, 32), 22, 14688),
    "mobilenet_v2": ((2, 3, 64, 64), 25, 712),
    "resnet50": ((2, 3, 64, 64), 37, 11456),
    "resnext50_32x4d": ((2, 3, 64, 64), 1045, 19008),
    "vgg11_bn": ((2, 3, 64, 64), 10, 10944),
    "densenet121": ((2, 3, 64, 64), 120, 41760),
    "vit_b_16": ((1, 3, 224, 224), 313, 37632),
    "swin_t": ((1, 3, 224, 224), 304, 21120),  # with its constant shift mask, all heads move
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_networks_of_torchvision(name):
    inputs, groups, scales, *signs = LARGE[name]
    model, x, sym = Network(name, getattr(torchvision.models, name), inputs).known()
    assert (len(sym.permutations), sym.scaling_dof) == (groups, scales)
    assert signs in ([], [sym.sign_dof])
    assert not sym.frozen
    assert not sym.unchecked
    assert verify(model, sym, *x) < 1e-12


def test_batch_norm_as_a_fixed_map():
    model, (x,) = RESNET.made()
    sym = discover(model, x, batch_norm="eval")
    assert sym.scaling_dof == 2 * 120 + 360
    assert verify(model, sym, x) < 1e-12
    assert verify(model.train(), sym, x) > 1e-6


# ------------------------------------------------------------ what is left alone
def test_networks_and_derivatives_of_the_user_are_left_alone():
    outside, seen = lin(3, 5), []
    layers = {"a": nn.LSTM(5, 4, batch_first=True), "b": lin(4, 2)}
    model = Forward(lambda s, x: s.b(s.a(outside(x))[0][:, -1]), **layers)
    model.b.eval().register_full_backward_hook(lambda *_: seen.append(1))
    before, x = copy.deepcopy(model.state_dict()), torch.randn(2, 3, 3, requires_grad=True)
    y = model(x)
    discover(model, x)
    assert (model.training, model.b.training) == (True, False)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(model(x), y)
    assert (x.grad, outside.weight.grad, model.b.weight.grad, seen) == (None, None, None, [])
    y.sum().backward()
    assert seen


class Uncopied:
    """A trainer with data."""

    def __deepcopy__(self, memo):
        raise AssertionError("the data were copied")


def test_a_lightning_module_in_a_run_is_read_without_copying_its_trainer():
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self._trainer = models.mlp(6, [5], 3), Uncopied()

        def forward(self, x):
            return self.net(x)

    assert [g.name for g in discover(Module(), torch.ones(2, 6)).permutations] == ["net.1.weight"]


# ------------------------------------------------------------ what is said
def test_groups_are_in_graph_order_with_readable_names():
    sym = discover(models.mlp(6, [5, 4], 3), torch.randn(1, 6))
    assert [(g.units, g.name) for g in sym.permutations] == [(5, "1.weight"), (4, "3.weight")]
    assert re.search(r"(?s)1\.weight.*free scales: 9", str(sym))


def test_log10_permutations():
    sizes = 2 * (8, 16, 32, 64)  # a stream and a block of each width
    expected = sum(math.log10(math.factorial(n)) for n in sizes)
    assert RESNET.known()[-1].log10_permutations == pytest.approx(expected, rel=1e-12)


def test_symmetries_are_saved_as_plain_data():
    model, (x,), sym = NETWORKS["rotary half"].known()
    file = io.BytesIO()
    torch.save(sym, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert str(loaded) == str(sym)
    assert verify(model, loaded, x) < 1e-12


def explained(layer, capsys):
    net = nn.Sequential(lin(3, 4), *layer, lin(4, 2))
    discover(net, torch.randn(5, 3), explain="0.weight")
    assert net.training
    return capsys.readouterr().out


def test_explain_names_the_operation_that_holds_or_ties(capsys):
    said = explained([nn.Sigmoid()], capsys)
    assert "axis 0: scales and signs are held: sigmoid in `1`" in said
    assert "axis 0: units, scales and signs go with 0.bias: add" in said
    said = explained([nn.ReLU()], capsys)
    assert "axis 0: signs are held: relu" in said
    assert not re.search(r"axis 0: .*scales [^:]*are held", said)
    said = explained([nn.Dropout(0.5), nn.Sigmoid()], capsys)
    (line,) = (line for line in said.splitlines() if line.endswith("in training"))
    assert "units go with others: native_dropout in `1`" in line


class Running(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, -1)


def test_unknown_operation_is_frozen_and_reported():
    model = nn.Sequential(lin(5, 8), Running(), lin(8, 6), nn.ReLU(), lin(6, 3))
    sym = discover(model, torch.randn(2, 5))
    assert [(g.units, g.name) for g in sym.permutations] == [(6, "2.weight")]
    (frozen,) = sym.frozen
    assert (frozen.operation, frozen.module) == ("cumsum", "1")
    assert re.match(r"test_discover.py:\d+", frozen.line)
    assert "cumsum" in str(sym)


def heads():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True).double()


LIMITS = {
    "exchanges._LONGEST_EXCHANGE": (4, "exchanges of more than 2 things were not searched"),
    "exchanges._LARGEST_CELL": (3, "of 4 units that look alike, exchanges of 3 were searched"),
    "shift_expressions._MOST": (20, "form too many sums to follow"),
}


@pytest.mark.parametrize("limit", [None, *LIMITS])
def test_what_a_limit_leaves_out_is_named(monkeypatch, limit):
    x = torch.randn(2, 5, 8).double()
    number, reason = LIMITS.get(limit, (None, None))
    forget()
    if limit:
        monkeypatch.setattr(f"weightsym.discovery.dimensions.{limit}", number)
    sym = discover(heads(), x)
    assert bool(limit) == any(str(reason) in str(item) for item in sym.frozen)
    assert not verify(heads(), sym, x) > 1e-9
    forget()


# ------------------------------------------------------------ shifts of logits
def tied_head():
    head = Forward(lambda s, x: s.h(torch.tanh(s.e(x))), e=nn.Embedding(7, 4), h=lin(4, 7, False))
    head.h.weight = head.e.weight
    return head


LOGITS = {
    "a perceptron": (lambda: nn.Sequential(lin(5, 4), nn.ReLU(), lin(4, 3)), "2.weight"),
    "a softmax": (lambda: nn.Sequential(lin(5, 3), nn.LogSoftmax(1)), "0.weight"),
    "tanh": (lambda: nn.Sequential(lin(5, 3), nn.Tanh()), None),
    "tied head": (tied_head, None),
    "used twice": (lambda: Forward(lambda s, x: s.a(torch.tanh(s.a(x))), a=lin(5, 5)), None),
    "grouped": (lambda: nn.Conv2d(5, 10, 1, groups=5), None),
    "one output": (lambda: nn.Sequential(lin(5, 4), nn.ReLU(), lin(4, 1)), None),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_shifted_only_where_a_softmax_does_not_see_it(name):
    build, weight = LOGITS[name]
    model, x = build().double(), torch.randn(2, 5)  # is cast
    x = {"tied head": torch.randint(7, (2, 3)), "grouped": x[..., None, None]}.get(name, x)
    sym = discover(model, x)
    assert getattr(sym.softmax_shift, "weight", None) == weight
    assert verify(model, sym, x, softmax_shift=weight is not None) < 1e-12


# ------------------------------------------------------------ numbers of any size and type
THRESHOLDS = {
    "clamp to 20": lambda x: x.clamp(0, 20),
    "clamp to 10^4": lambda x: x.clamp(0, 1e4),
    "clamp to both sides": lambda x: x.clamp(-20, 30),
    "where": lambda x: torch.where(x < 30, torch.relu(x), 0),
    "mask": lambda x: torch.relu(x) * (x < 50),
    "minimum": lambda x: torch.minimum(torch.relu(x), x.new_tensor(50.0)),
    "threshold": lambda x: nn.functional.threshold(x, 0.01, 0),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=0.05),
    "clamp below zero": lambda x: (-torch.relu(x)).clamp(min=-20),
    "clamp of a leaky ReLU": lambda x: nn.functional.leaky_relu(x, 0.2).clamp(min=-5),
    "quantised": lambda x: torch.fake_quantize_per_tensor_affine(x.float(), 0.1, 0, -128, 127).to(
        x
    ),
    **{
        f"where {t}": lambda x, t=t: torch.where(x > t, 0.1 * x, x)
        for t in (0.003, 0.05, 8.0, 300.0)
    },
}


@pytest.mark.parametrize("function", THRESHOLDS.values(), ids=THRESHOLDS)
def test_thresholds_of_any_size_hold_scales(function):
    model = Forward(lambda s, x: s.b(function(s.a(x))), a=lin(8, 6), b=lin(6, 2)).double()
    sym = discover(model, torch.randn(4, 8).double())
    assert sym.scaling_dof == 0
    assert all(group.kind == "orthogonal" for group in sym.linear)
    assert sym.permutations
    for size in (0.01, 1, 30, 1000):
        assert float(verify(model, sym, size * torch.randn(64, 8).double())) < 1e-9


def blurred(s, x):
    h = nn.functional.conv2d(torch.relu(s.a(x)), s.kernels, stride=2, groups=8)
    return s.k * s.b(h)


@pytest.mark.parametrize("alike", [True, False])
def test_channels_that_are_blurred_alike_may_change_places(alike):
    """Besides, a whole number is no weight."""
    kernels = torch.ones(1, 1, 3, 3).repeat(8, 1, 1, 1) if alike else torch.rand(8, 1, 3, 3)
    number = nn.Parameter(torch.tensor(2), requires_grad=False)
    layers = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 4, 3), "kernels": kernels, "k": number}
    sym = discover(Forward(blurred, **layers), torch.randn(2, 3, 12, 12))
    assert [g.units for g in sym.permutations] == [8] * alike
    assert (sym.scaling_dof, sym.unchecked) == (8, "")


def test_recurrent_layers_of_single_precision():
    lstm = Forward(lambda s, x: s.o(s.r(x)[0]), r=nn.LSTM(5, 8, batch_first=True), o=lin(8, 3))
    sym = discover(lstm, torch.randn(2, 3, 5))
    assert ([g.units for g in sym.permutations], sym.frozen) == ([8], ())
