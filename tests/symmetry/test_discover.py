import copy
import math
import re

import pytest
import torch
from cases import CASES, LARGE_CASES, NESTED, Forward
from torch import nn

from lightning_bnn import models
from weightsym import (
    UnsupportedModel,
    discover,
    verify,
)


def ids(case):
    return case.name


def check(case):
    model, x, sym = case.known()
    assert len(sym.permutations) == case.groups
    assert sym.scaling_dof == case.scales
    assert case.signs is None or sym.sign_dof == case.signs
    assert not sym.frozen
    assert not sym.unchecked
    assert verify(model, sym, x) < 1e-12
    return model, sym, x


@pytest.mark.parametrize("case", [*CASES, *NESTED], ids=ids)
def test_groups_are_found_and_exact(case):
    model, sym, x = check(case)
    has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
    if not has_dropout and case.name != "convnext":  # stochastic depth
        assert verify(copy.deepcopy(model).train(), sym, x) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE_CASES, ids=ids)
def test_large_networks(case):
    check(case)


@pytest.mark.parametrize("name", ["resnet", "grouped cnn"])
def test_batch_norm_as_a_fixed_map(name):
    case = next(c for c in CASES if c.name == name)
    model, x = case.make()
    sym = discover(model, x, batch_norm="eval")
    assert sym.scaling_dof == (2 * 120 + 360 if name == "resnet" else 300)
    assert verify(model, sym, x) < 1e-12
    assert verify(model.train(), sym, x) > 1e-6


def test_discover_leaves_the_model_untouched():
    model = Forward(
        lambda s, x: s.b(s.a(x)[0][:, -1]), a=nn.LSTM(5, 4, batch_first=True), b=nn.Linear(4, 2)
    )
    model.b.eval()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 3, 5)
    y = model(x)
    discover(model, x)
    assert model.training
    assert not model.b.training
    assert all(
        torch.equal(before[k], v) and v.dtype == before[k].dtype
        for k, v in model.state_dict().items()
    )
    assert torch.equal(model(x), y)
    y.sum().backward()


def test_groups_are_in_graph_order_with_readable_names():
    sym = discover(models.mlp(6, [5, 4], 3), torch.randn(1, 6))
    assert [(g.units, g.name) for g in sym.permutations] == [(5, "1.weight"), (4, "3.weight")]
    table = str(sym)
    assert "1.weight" in table
    assert "free scales: 9" in table


def test_log10_permutations():
    assert discover(
        models.optunet(), torch.randn(1, 1, 28, 28)
    ).log10_permutations == pytest.approx(4.459392, abs=1e-6)
    case = next(c for c in CASES if c.name == "resnet")  # a stream and a block of each width
    expected = 2 * sum(math.log10(math.factorial(n)) for n in (8, 16, 32, 64))
    assert case.known()[-1].log10_permutations == pytest.approx(expected, rel=1e-12)


def test_logits_shift():
    model = models.mlp(6, [5], 3).double()
    x = torch.randn(4, 6)
    sym = discover(model, x)
    assert sym.softmax_shift.weight == "3.weight"
    assert verify(model, sym, x, softmax_shift=True) < 1e-12
    with_softmax = nn.Sequential(model, nn.LogSoftmax(1))
    assert discover(with_softmax, x.double()).softmax_shift.bias == "0.3.bias"
    assert discover(nn.Sequential(model, nn.Tanh()), x.double()).softmax_shift is None


# ------------------------------------------------------------ what is not understood
class Running(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, -1)


def test_unknown_operation_is_frozen_and_reported():
    model = nn.Sequential(nn.Linear(5, 8), Running(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    sym = discover(model, torch.randn(2, 5))
    assert [(g.units, g.name) for g in sym.permutations] == [(6, "2.weight")]
    (frozen,) = sym.frozen
    assert (frozen.operation, frozen.module) == ("cumsum", "1")
    assert re.match(r"test_discover.py:\d+", frozen.line)
    assert "cumsum" in str(sym)


def by_an_if(self, x):
    return self.a(x) if x.sum() > 0 else self.a(-x)


def by_an_item(self, x):
    return self.a(x) if x.sum().item() > 0 else self.a(-x)


def by_a_size(self, x):
    return self.a(x)[:, : int((x > 0).sum())]


@pytest.mark.bad_input
@pytest.mark.parametrize("ends", [lambda y: y, lambda y: y.sort(0)[0].sum(0)])
def test_sizes_that_depend_on_the_input_are_refused_in_a_sentence(ends):
    model = Forward(lambda s, x: ends(s.a(x[x.sum(-1) > 0])), a=nn.Linear(6, 2))
    with pytest.raises(UnsupportedModel, match="depends on the numbers in the input"):
        discover(model, torch.randn(2, 5, 6))


def tied_outputs(self, x):
    return self.a(x), torch.tanh(self.a(x))


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(5, 3),
        nn.ReLU(),
        Forward(lambda s, x: 2 * x, a=nn.Linear(5, 3)),
        Forward(lambda s, x: s.a(x) + s.a(x).roll(1, -1) ** 3, a=nn.Linear(5, 3)),
        Forward(tied_outputs, a=nn.Linear(5, 3)),
    ],
)
def test_a_network_without_symmetries_says_why(model):
    sym = discover(model, torch.randn(2, 4, 5))
    assert not sym.permutations
    assert sym.frozen
    assert all(f.reason for f in sym.frozen)


@pytest.mark.bad_input
@pytest.mark.parametrize("forward", [by_an_if, by_an_item, by_a_size])
def test_what_depends_on_numbers_is_named_in_words(forward):
    said = r"test_discover.py:\d+ .*: an `if`, a loop or a size depends on numbers .*torch.where"
    said += ".*Pass the submodule"
    with pytest.raises(UnsupportedModel, match=said) as refused:
        discover(Forward(forward, a=nn.Linear(5, 3)), torch.ones(2, 5))
    assert "u0" not in str(refused.value)
    assert "guard" not in str(refused.value)


def by_data(self, x):
    return self.b(torch.relu(self.a(x)).data * self.gain.weight.data[0].exp())


def by_clamped_data(self, x):
    self.a.weight.data.clamp_(-0.1, 0.1)
    return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize(("forward", "scales"), [(by_data, 6), (by_clamped_data, 0)])
def test_data_of_tensors_is_read_as_they_are(forward, scales):
    layers = {"a": nn.Linear(5, 6), "b": nn.Linear(6, 2), "gain": nn.Linear(6, 1, bias=False)}
    model = Forward(forward, **layers).double()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(3, 5).double()
    sym = discover(model, x)
    assert ([g.units for g in sym.permutations], sym.scaling_dof) == ([6], scales)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert verify(copy.deepcopy(model), sym, x) < 1e-12


@pytest.mark.bad_input
def test_an_assignment_to_data_is_named():
    def forward(self, x):
        self.a.weight.data = self.a.weight.data / 2
        return self.a(x)

    with pytest.raises(UnsupportedModel, match=r"it assigns to `\.data` inside of its forward"):
        discover(Forward(forward, a=nn.Linear(5, 3)), torch.ones(2, 5))


@pytest.mark.bad_input
def test_an_exported_program_is_refused():
    x = torch.ones(2, 5)
    program = torch.export.export(models.mlp(5, [4], 3), (x,))
    hint = "pass the module that it was exported from"
    with pytest.raises(ValueError, match=f"got ExportedProgram: {hint}"):
        discover(program, x)
    for model in (program.module(), Forward(lambda s, x: s.net(x), net=program.module())):
        with pytest.raises(UnsupportedModel, match=f"an exported program, .*{hint}"):
            discover(model, x)


def by_autograd(self, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.a(x).tanh().sum(), x, create_graph=True)[0]


def by_func(self, x):
    return torch.func.grad(lambda z: self.a(z).tanh().sum())(x)


DERIVATIVES = r"it takes derivatives, .* inside of its forward\."


def test_derivatives_inside_of_a_forward_are_named():
    model = Forward(by_autograd, a=nn.Linear(5, 3))
    with pytest.raises(UnsupportedModel, match=DERIVATIVES):
        discover(model, torch.ones(1, 5))


def test_derivatives_by_torch_func_are_named_or_nothing_is_free():
    """torch 2.6 exports the derivative as a constant, and later ones do not export it."""
    try:
        said = str(discover(Forward(by_func, a=nn.Linear(5, 3)), torch.ones(1, 5)))
    except UnsupportedModel as error:
        said = str(error)
    nothing = r"permutations: 10\^0\.0 .*scales: 0 .*signs: 0 .*\n.*outputs depend on no weight"
    assert re.search(f"{DERIVATIVES}|{nothing}", said)


@pytest.mark.bad_input
def test_bad_arguments():
    model = models.mlp(6, [5], 3)
    with pytest.raises(ValueError, match=r"does not accept an input of shape \(1, 7\)"):
        discover(model, torch.randn(1, 7))
    with pytest.raises(ValueError, match="`batch_norm` must be 'carrier' or 'eval', got 'fold'"):
        discover(model, torch.randn(1, 6), batch_norm="fold")
    with pytest.raises(ValueError, match="`model` must be a torch.nn.Module, got function"):
        discover(lambda x: x, torch.randn(1, 6))


def test_random_outputs_are_refused():
    calls = []

    def forward(self, x):
        calls.append(0)
        return self.b(torch.relu(self.a(x))) + len(calls)

    model = Forward(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 2))
    with pytest.raises(UnsupportedModel, match="different outputs for the same input"):
        discover(model, torch.randn(2, 5))


def test_a_model_that_cannot_be_copied():
    model = nn.Linear(2, 2)
    model.stream = iter(k for k in range(3))
    with pytest.raises(
        UnsupportedModel, match="Linear cannot be copied: cannot pickle 'generator'"
    ):
        discover(model, torch.randn(1, 2))


def test_a_lightning_module_in_a_run_is_read_without_copying_its_trainer(tmp_path):
    import lightning as L

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, k):
            return torch.ones(6)

        def __deepcopy__(self, memo):
            raise AssertionError("the data were copied")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = models.mlp(6, [5], 3)

        def forward(self, x):
            return self.net(x)

        def training_step(self, x, _):
            self.found = discover(self, x)
            return self.net(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Data(), batch_size=2))
    assert [g.name for g in module.found.permutations] == ["net.1.weight"]
